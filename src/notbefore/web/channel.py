"""A client's connection: waitress's channel, which knows since when it keeps us waiting, and the same over TLS."""

import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from waitress.channel import HTTPChannel

REQUEST_PATIENCE: Final = 10.0  # seconds for a request to arrive, from its first byte or the connection's opening
ANSWER_PATIENCE: Final = 60.0  # seconds for a request's answer to be read, when it is so long that a worker waits
IDLE_PATIENCE: Final = 120.0  # seconds between two requests of one connection; scrapes come each minute or more often
PIPELINED: Final = 4  # requests that a connection may have under way; Prometheus and browsers send one at a time
RECORD: Final = 16 * 1024  # bytes; the most that a TLS record holds
HANDSHAKE: Final = 0x16  # the first byte of a TLS connection
PLAIN: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: 34\r\n\r\n"
    b"this is HTTPS: ask with https://\r\n"
)

log = logging.getLogger("notbefore.http")


class Channel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """A connection that knows since when it keeps us waiting."""

    waiting_since: float
    moved: float = 0.0  # when bytes of an answer last went out, or began to wait
    served: bool = False
    socket: Any  # a plain one, over TLS an ``SSLSocket`` from the first byte on

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.waiting_since = time.monotonic()
        super().__init__(*args, **kwargs)

    def received(self, data: bytes) -> bool:
        """Take in what came; a request that is complete goes to a worker."""
        if self.request is None:
            self.waiting_since = time.monotonic()
        result: bool = super().received(data)
        if self.requests:
            self.served = True
            self.waiting_since = time.monotonic()
        if len(self.requests) > PIPELINED:
            log.debug("connection from %s: closed, it asks without reading", self.addr)
            self.handle_close()
        return result

    def write_soon(self, data: Any) -> int:
        """Take a part of an answer from a worker."""
        if not self.total_outbufs_len:
            self.moved = time.monotonic()
        return int(super().write_soon(data))

    def send(self, data: bytes, do_close: bool = True) -> int:  # noqa: FBT001, FBT002 - waitress's signature
        """Write what there is room for; returns how many bytes."""
        sent = self._send(data, do_close)
        if sent:
            self.moved = time.monotonic()
        return sent

    def _send(self, data: bytes, do_close: bool) -> int:  # noqa: FBT001 - as above
        return int(super().send(data, do_close))

    def handle_error(self) -> None:
        """Close."""
        # a client that goes away in the middle of anything is no error of ours
        log.debug("connection from %s: closed on %r", self.addr, sys.exc_info()[1])
        self.handle_close()

    @property
    def busy(self) -> bool:
        """A request of it is being answered."""
        return bool(self.requests)

    def overdue(self, now: float) -> bool:
        """It has had its time: to send a request, to read its answer, or to come back with another request."""
        if self.busy:  # a worker may wait for it in `write_soon`; closing wakes that
            return bool(self.total_outbufs_len) and (
                now - self.moved > REQUEST_PATIENCE or now - self.waiting_since > ANSWER_PATIENCE
            )
        idle = self.served and self.request is None and not self.total_outbufs_len
        return now - self.waiting_since > (IDLE_PATIENCE if idle else REQUEST_PATIENCE)


class TlsChannel(Channel):
    """The same over TLS. Until its first byte it costs no more than a plain one; its handshake has a request's time.

    An answer may be written by a worker while the poll thread looks at the connection, and OpenSSL leaves it to us
    that only one of them works on it at a time.
    """

    def __init__(self, *args: Any, context: Callable[[], ssl.SSLContext | None], **kwargs: Any) -> None:
        self._context = context
        self._tls_lock = threading.Lock()
        self._shaken = False
        self._shake_writes = False  # the handshake waits for room to write
        super().__init__(*args, **kwargs)
        self.sendbuf_len = RECORD  # one record at a time: what did not fit is the same when it is tried again

    def writable(self) -> bool:
        """Whether it waits for room to write."""
        return bool(super().writable() or self._shake_writes)

    def handle_write(self) -> None:
        """There is room to write."""
        if self._shaken:
            super().handle_write()
        else:
            self.server.to_shake.append(self)

    def handle_read(self) -> None:
        """Something came."""
        if not self._shaken:
            self.server.to_shake.append(self)
            return
        try:
            # a whole record at once: nothing stays inside the SSL object, where no poll would see it
            with self._tls_lock:
                data = self.socket.recv(RECORD)
        except ssl.SSLWantReadError:
            return
        except OSError as error:
            log.debug("connection from %s: closed on %r", self.addr, error)
            self.handle_close()
            return
        if data:
            self.last_activity = time.time()
            self.received(data)
        else:
            self.handle_close()

    def _send(self, data: bytes, do_close: bool) -> int:  # noqa: FBT001 - as above
        try:
            with self._tls_lock:
                sent: int = self.socket.send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except OSError:
            if not do_close:
                raise
            self.handle_close()
            return 0
        return sent

    def shake(self) -> None:
        """Go on with the handshake as far as what has come allows."""
        if self.socket is None:
            return
        self._shake_writes = False
        try:
            if not isinstance(self.socket, ssl.SSLSocket) and not self._begin():
                return
            self.socket.do_handshake()
            self._shaken = True
        except (ssl.SSLWantReadError, BlockingIOError):
            pass
        except ssl.SSLWantWriteError:
            self._shake_writes = True
        except OSError as error:
            log.debug("connection from %s: no TLS: %s", self.addr, error)
            self.handle_close()

    def _begin(self) -> bool:
        """Whether what begins is TLS."""
        first = self.socket.recv(1, socket.MSG_PEEK)
        context = self._context()
        if first and first[0] == HANDSHAKE and context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
            return True
        if first:
            self.socket.recv(RECORD)  # what is left unread makes the kernel cut the connection before the answer
            self.socket.send(PLAIN)
        self.handle_close()
        return False

    def handle_close(self) -> None:
        """Close, with TLS's word for it, so that the client knows that nothing was cut off."""
        if self._shaken and self.socket is not None and not self.total_outbufs_len:
            with suppress(OSError, ValueError), self._tls_lock:
                self.socket.unwrap()  # nobody waits for the client's own
        super().handle_close()
