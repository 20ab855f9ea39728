"""``TlsChannel``: a client's connection over TLS. Imported only if configured: `ssl` takes a megabyte."""

import logging
import socket
import ssl
import time
from contextlib import suppress
from typing import Any, Final

from notbefore.web.channel import Channel

RECORD: Final = 16 * 1024  # bytes; the most that a TLS record holds

log = logging.getLogger("notbefore.http")


class TlsChannel(Channel):
    """A ``Channel`` over TLS; the handshake has the same deadline as a request.

    A worker may write an answer while the poll thread reads, but OpenSSL does not allow both at once. Workers write
    under waitress's ``outbuf_lock``, so the poll thread reads under it too.
    """

    def __init__(self, context: ssl.SSLContext, server: Any, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        self._established = False  # its handshake is complete
        sock.settimeout(0.0)
        tls = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True)
        super().__init__(server, tls, *args, **kwargs)
        self.sendbuf_len = RECORD  # one record at a time: OpenSSL wants the same bytes when a write is tried again

    def handle_read(self) -> None:
        """Read a whole record: no bytes may stay inside OpenSSL, where no poll would find them."""
        try:
            with self.outbuf_lock:
                if not self._established:
                    self.socket.do_handshake()  # its output fits: nothing was written before
                    self._established = True
                data = self.socket.recv(RECORD)
        except ssl.SSLWantReadError:
            return
        except OSError as error:
            log.debug("connection from %s: closed on %r", self.addr, error)
            data = b""
        if data:
            self.last_activity = time.time()
            self.received(data)
        else:
            self.handle_close()

    def send(self, data: bytes, do_close: bool = True) -> int:  # noqa: FBT001, FBT002 - waitress's signature
        """Write as much as there is room for; return the number of bytes."""
        try:
            return int(super().send(data, do_close))
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0

    def handle_close(self) -> None:
        """Close with TLS's closing message, so that the client knows that nothing was cut off."""
        if self._established and self.socket is not None and not self.total_outbufs_len:
            with suppress(OSError, ValueError), self.outbuf_lock:
                self.socket.unwrap()  # which does not wait for the client's own
        super().handle_close()
