"""``FrameSocket``: carries the messages between an agent and its courier.

Each is a frame: its length, then MessagePack.
"""

import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from notbefore.process.main_thread import wait_for

MAX_FRAME: Final = 96 * 1024 * 1024  # bytes: more than a whole outbox may have
READ_BYTES: Final = 1024 * 1024  # that are received at a time
_LENGTH: Final = struct.Struct("!I")


class FrameSocket:
    """One end of the connection. It never waits. Use it in one thread.

    Every method raises ``ConnectionError`` if the other end is closed.
    """

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(0)
        self._end = end
        self._received = bytearray()
        self.unsent = bytearray()  # call ``flush`` once the socket is writable

    def fileno(self) -> int:
        """Return the file descriptor, for ``select`` and the like."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def send(self, message: object) -> None:
        """Queue a message, and send as much as the socket accepts now."""
        self.send_frame(msgspec.msgpack.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message in the same way."""
        self.unsent += _LENGTH.pack(len(frame)) + frame
        self.flush()

    def flush(self) -> None:
        """Send more of the unsent bytes."""
        try:
            while self.unsent:
                sent = self._end.send(self.unsent)
                del self.unsent[:sent]
        except BlockingIOError:
            return

    def receive(self) -> Iterator[bytes]:
        """Yield the complete frames that have arrived. A frame has at most ``MAX_FRAME`` bytes."""
        try:
            data = self._end.recv(READ_BYTES)
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
            raise ConnectionError("the other end is closed")


def wait_for_frame(seconds: float, frames: FrameSocket, *readers: Any) -> None:
    """Wait until a frame may have arrived, one of ``readers`` is readable, or more can be sent.

    At most ``seconds``.
    """
    unsent: list[FrameSocket] = []
    if frames.unsent:
        unsent.append(frames)
    wait_for(seconds, [frames, *readers], unsent)
