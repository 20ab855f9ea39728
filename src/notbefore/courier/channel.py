"""``Channel``: the one socket between an agent and its courier: frames of MessagePack, each after its length."""

import select
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

MAX_FRAME: Final = 96 * 1024 * 1024  # bytes: more than all that an outbox may hold
_LENGTH: Final = struct.Struct("!I")


class Channel:
    """One end of it. Never waits, and takes no frame of more than ``MAX_FRAME`` bytes. For one thread at a time.

    Every method raises ``ConnectionError`` where the other end is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(0)
        self._end = end
        self._received = bytearray()
        self._unsent = bytearray()
        self.fileno = end.fileno  # for ``select``
        self.close = end.close

    @property
    def unsent(self) -> bool:
        """Something waits until the other end reads: ``flush`` is needed when the socket can be written."""
        return bool(self._unsent)

    def send(self, message: object) -> None:
        """Send as much as the socket takes now."""
        frame = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        self._unsent += _LENGTH.pack(len(frame)) + frame
        self.flush()

    def flush(self) -> None:
        """Send more of what waits."""
        try:
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            return

    def receive(self) -> Iterator[bytes]:
        """The whole frames that are there."""
        try:
            data = self._end.recv(1024 * 1024)
        except BlockingIOError:
            return
        self._received += data
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MAX_FRAME:
                raise ConnectionError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            frame = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            yield frame
        if not data:
            raise ConnectionError("the other end is gone")


def wait(seconds: float, channel: Channel, *readers: Any) -> None:
    """Until a frame may be there, one of ``readers`` can be read, or more can be sent; not longer than ``seconds``."""
    select.select([channel, *readers], [channel] if channel.unsent else [], [], seconds)
