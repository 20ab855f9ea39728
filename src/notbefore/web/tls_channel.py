"""``TlsChannel``: a client's connection over TLS. Imported where it is configured: `ssl` is a megabyte."""

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from notbefore.web.channel import Channel

RECORD: Final = 16 * 1024  # bytes; the most that a TLS record holds
HANDSHAKE: Final = 0x16  # the first byte of a TLS connection
NOT_TLS: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: 37\r\n\r\n"
    b"this is an HTTPS port: use https://\r\n"
)

log = logging.getLogger("notbefore.http")


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

    def send(self, data: bytes, do_close: bool = True) -> int:  # noqa: FBT001, FBT002 - waitress's signature
        """Write what there is room for; returns how many bytes."""
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
