"""``Channel``: a client's connection, waitress's with limits on how long it may take; and the same over TLS."""

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

from notbefore.web.request import Request, Task

REQUEST_PATIENCE: Final = 10.0  # seconds for a request to arrive, from its first byte or the connection's opening
ANSWER_PATIENCE: Final = 60.0  # seconds for a whole answer to be read
IDLE_PATIENCE: Final = 120.0  # seconds between two requests of one connection; scrapes come each minute or more often
PIPELINED: Final = 4  # requests of one connection that wait; Prometheus and browsers send one at a time
RECORD: Final = 16 * 1024  # bytes; the most that a TLS record holds
HANDSHAKE: Final = 0x16  # the first byte of a TLS connection
NOT_TLS: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: 37\r\n\r\n"
    b"this is an HTTPS port: use https://\r\n"
)

log = logging.getLogger("notbefore.http")


class Channel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """A connection. Times are monotonic seconds."""

    parser_class = Request
    task_class = Task
    requests: list[Request]  # those that have arrived; the first is being answered
    waiting_since: float  # when it opened, or its last request began or arrived
    progress: float = 0.0  # when bytes of an answer last went out, or began to wait
    served: bool = False
    login_failed: bool = False  # its last password was wrong
    login_waits: bool = False  # its password has not been checked yet
    socket: Any  # a plain one, over TLS an ``SSLSocket`` from the first byte on

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.waiting_since = time.monotonic()
        super().__init__(*args, **kwargs)

    def received(self, data: bytes) -> bool:
        """Read bytes; a complete request goes to a worker."""
        if self.request is None:
            self.waiting_since = time.monotonic()
        result: bool = super().received(data)
        if self.requests:
            self.served = True
            self.waiting_since = time.monotonic()
        if len(self.requests) > PIPELINED:
            log.debug("connection from %s: closed, it sends requests and reads no answers", self.addr)
            self.handle_close()
        return result

    def write_soon(self, data: Any) -> int:
        """Take a part of an answer from a worker."""
        if not self.total_outbufs_len:
            self.progress = time.monotonic()
        return int(super().write_soon(data))

    def send(self, data: bytes, do_close: bool = True) -> int:  # noqa: FBT001, FBT002 - waitress's signature
        """Write what there is room for; returns how many bytes."""
        sent = self._send(data, do_close)
        if sent:
            self.progress = time.monotonic()
        return sent

    def _send(self, data: bytes, do_close: bool) -> int:  # noqa: FBT001 - as above
        return int(super().send(data, do_close))

    def handle_error(self) -> None:
        """Close."""
        # that a client goes away is no error of the agent
        log.debug("connection from %s: closed on %r", self.addr, sys.exc_info()[1])
        self.handle_close()

    @property
    def busy(self) -> bool:
        """One of its requests is being answered, or soon will be."""
        return bool(self.requests) and not self.login_waits

    def overdue(self, now: float) -> bool:
        """It has used up its time: to send a request, to read the answer, or to send the next request."""
        if self.busy:
            return bool(self.total_outbufs_len) and (
                now - self.progress > REQUEST_PATIENCE or now - self.waiting_since > ANSWER_PATIENCE
            )
        idle = self.served and self.request is None and not self.total_outbufs_len
        return now - self.waiting_since > (IDLE_PATIENCE if idle else REQUEST_PATIENCE)


class TlsChannel(Channel):
    """The same over TLS. Until its first byte it costs no more than a plain one; its handshake has a request's time.

    A worker may write an answer while the poll thread reads. OpenSSL does not allow both at once: hence the lock.
    """

    def __init__(self, *args: Any, context: Callable[[], ssl.SSLContext | None], **kwargs: Any) -> None:
        self._context = context
        self._tls_lock = threading.Lock()
        self._established = False  # its handshake is complete
        self._handshake_writes = False  # the handshake waits for room to write
        super().__init__(*args, **kwargs)
        self.sendbuf_len = RECORD  # one record at a time: what did not fit is the same when it is tried again

    def writable(self) -> bool:
        """Whether it waits for room to write."""
        return bool(super().writable() or self._handshake_writes)

    def handle_write(self) -> None:
        """There is room to write."""
        if self._established:
            super().handle_write()
        else:
            self.server.handshakes.append(self)

    def handle_read(self) -> None:
        """Bytes have arrived."""
        if not self._established:
            self.server.handshakes.append(self)
            return
        try:
            # a whole record at once: nothing stays inside the SSL object, where no poll would find it
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

    def handshake(self) -> None:
        """Go on with the handshake as far as the received bytes allow."""
        if self.socket is None:
            return
        self._handshake_writes = False
        try:
            if not isinstance(self.socket, ssl.SSLSocket) and not self._begin():
                return
            self.socket.do_handshake()
            self._established = True
        except (ssl.SSLWantReadError, BlockingIOError):
            pass
        except ssl.SSLWantWriteError:
            self._handshake_writes = True
        except OSError as error:
            log.debug("connection from %s: the handshake failed: %s", self.addr, error)
            self.handle_close()

    def _begin(self) -> bool:
        """Whether the client speaks TLS."""
        first = self.socket.recv(1, socket.MSG_PEEK)
        context = self._context()
        if first and first[0] == HANDSHAKE and context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
            return True
        if first:
            self.socket.recv(RECORD)  # unread bytes would make the kernel cut the connection before the answer
            self.socket.send(NOT_TLS)
        self.handle_close()
        return False

    def handle_close(self) -> None:
        """Close, with TLS's own message, so that the client knows that nothing was cut off."""
        if self._established and self.socket is not None and not self.total_outbufs_len:
            with suppress(OSError, ValueError), self._tls_lock:
                self.socket.unwrap()  # which does not wait for the client's own
        super().handle_close()
