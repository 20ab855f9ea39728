"""The messages between an agent and its courier, as frames of a ``Channel``: a length, then
MessagePack.

The agent sends ``Orders``, and the courier answers ``Hello``: each version can read these two from
any other version. Then the courier reports (``Turn``) and the agent gives deliveries (``Given``),
each at any time.
"""

import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from notbefore import __version__
from notbefore.config.secret import Secret
from notbefore.config.sinks import Messages, SinkConfig
from notbefore.core.delivery import Delivery
from notbefore.core.duration import Duration
from notbefore.core.outbox import SendResult
from notbefore.process.main_thread import wait_for

TURN_INTERVAL: Final = 1.0  # seconds: the longest time between two turns of a courier
MAX_FRAME: Final = 96 * 1024 * 1024  # bytes: more than a whole outbox may have
_LENGTH: Final = struct.Struct("!I")


class Orders(Struct, frozen=True):
    """The part of the configuration that a courier needs."""

    sinks: dict[str, SinkConfig] = {}
    messages: Messages = Messages()
    log_format: Literal["auto", "json", "text"] = "auto"
    log_level: str = "info"
    hidden: tuple[str, ...] = ()  # names of environment variables that contain secrets
    version: str = __version__


class Hello(Struct, frozen=True):
    """A courier has started. It can work for an agent of the same version."""

    version: str
    schema: int


class Turn(Struct, frozen=True):
    """The results of deliveries. ``limits``: sink -> how many it may have at a time."""

    results: Sequence[SendResult]
    limits: Mapping[str, int]
    hangs: bool = False  # an attempt has not ended long after its timeout


class Given(Struct, frozen=True):
    """The deliveries to send."""

    deliveries: Sequence[Delivery]
    time: float  # now in Unix seconds, by the clock that the messages go by


def seal(orders: Orders, environment: Mapping[str, str]) -> bytes:
    """Return orders as a frame, with their secrets.

    Raises ``ConfigError`` if a secret cannot be read.
    """

    def encode(value: object) -> Any:
        return value.sealed(environment) if isinstance(value, Secret) else str(value)

    return msgspec.msgpack.encode(orders, enc_hook=encode)


def unseal(frame: bytes) -> Orders:
    """Decode orders; raises ``ValueError``."""

    def decode(kind: type, value: object) -> object:
        return Secret.read(value) if kind is Secret else Duration(value)

    return msgspec.msgpack.decode(frame, type=Orders, dec_hook=decode)


class Channel:
    """One end of the connection.

    It never waits, and accepts at most ``MAX_FRAME`` bytes per frame. For one thread.

    Every method raises ``ConnectionError`` if the other end is closed.
    """

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(0)
        self._end = end
        self._received = bytearray()
        self.unsent = bytearray()  # call ``flush`` for it once the socket is writable
        self.fileno = end.fileno  # for ``wait``
        self.close = end.close

    def send(self, message: object) -> None:
        """Queue a message, and send as much as the socket accepts now."""
        frame = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        self.unsent += _LENGTH.pack(len(frame)) + frame
        self.flush()

    def flush(self) -> None:
        """Send more of the unsent bytes."""
        try:
            while self.unsent:
                del self.unsent[: self._end.send(self.unsent)]
        except BlockingIOError:
            return

    def receive(self) -> Iterator[bytes]:
        """Yield the complete frames that have arrived."""
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
    """Wait until there may be a frame, one of ``readers`` is readable, or more can be sent.

    At most ``seconds``.
    """
    wait_for(seconds, [channel, *readers], [channel] if channel.unsent else [])
