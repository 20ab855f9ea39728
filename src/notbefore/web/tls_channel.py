"""``TlsChannel``: a client's connection over TLS."""

import socket
import ssl
from contextlib import suppress
from typing import Any, Final

from notbefore.web.channel import Channel

RECORD: Final = 16 * 1024  # bytes; the most that a TLS record holds
HANDSHAKES: Final = 100  # unfinished at a time: OpenSSL needs 45 to 70 KiB for each


class TlsChannel(Channel):
    """A ``Channel`` over TLS; the handshake has the same deadline as a request.

    A worker may write an answer while the poll thread reads, but OpenSSL does not allow both at
    once. Workers write under waitress's ``outbuf_lock``, so the poll thread reads under it too.
    """

    established: bool = False  # its handshake is complete

    def __init__(self, context: ssl.SSLContext, *args: Any, **kwargs: Any) -> None:
        self._context = context
        super().__init__(*args, **kwargs)
        # one record at a time: OpenSSL wants the same bytes when a write is tried again
        self.sendbuf_len = RECORD

    def handle_read(self) -> None:
        """Read a whole record: no bytes may stay inside OpenSSL, where no poll would find them."""
        try:
            with self.outbuf_lock:
                if not isinstance(self.socket, ssl.SSLSocket):
                    self._begin()
                self.socket.do_handshake()  # its output fits: nothing was written before
                self.established = True
                data = self.socket.recv(RECORD)
        except ssl.SSLWantReadError:
            return
        if data:
            self.received(data)
        else:
            self.handle_close()

    def _begin(self) -> None:
        """Begin the handshake. Above ``HANDSHAKES``, drop the oldest unfinished one.

        Its connection stays open without TLS, because a client that sees its connection close would
        connect again at once. If it continues the handshake, the handshake fails.
        """
        # raises if the client has gone; ``wrap_socket`` might leave it open
        self.socket.recv(1, socket.MSG_PEEK)

        unfinished: list[TlsChannel] = []
        for channel in self.server.active_channels.values():
            if isinstance(channel.socket, ssl.SSLSocket) and not channel.established:
                unfinished.append(channel)
        if len(unfinished) >= HANDSHAKES:
            oldest = unfinished[0]
            oldest.socket = socket.socket(fileno=oldest.socket.detach())
            oldest.socket.settimeout(0.0)

        self.socket = self._context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )

    def send(self, data: bytes, do_close: bool = True) -> int:  # noqa: FBT001, FBT002 - waitress's signature
        """Write as much as there is room for; return the number of bytes."""
        try:
            return super().send(data, do_close)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self.note_progress(0, len(data))
            return 0

    def handle_close(self) -> None:
        """Close with TLS's closing message, so that the client knows that nothing was cut off."""
        if self.established and self.socket is not None and not self.total_outbufs_len:
            with suppress(OSError, ValueError), self.outbuf_lock:
                self.socket.unwrap()  # which does not wait for the client's own
        super().handle_close()
