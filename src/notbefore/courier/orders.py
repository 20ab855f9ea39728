"""What goes between an agent and its courier, as frames of a ``Channel``: MessagePack, each after its length.

The agent sends ``Orders`` first, and the courier a ``Hello``: of these each version can read what the others send. Then
the courier asks (``Turn``) and the agent answers (``Given``), which says ``Wake`` or ``Leave`` at any time.
"""

import select
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

DONE: Final = 0
HUNG: Final = 10  # exit code of a courier that leaves because a sink hangs

TURN_INTERVAL: Final = 1.0  # seconds between two turns of a courier at most
MAX_FRAME: Final = 96 * 1024 * 1024  # bytes: more than all that an outbox may hold
_LENGTH: Final = struct.Struct("!I")


class Orders(Struct, frozen=True):
    """All that a courier needs to know of the configuration."""

    sinks: dict[str, SinkConfig] = {}
    messages: Messages = Messages()
    log_format: Literal["auto", "json", "text"] = "auto"
    log_level: str = "info"
    hidden: tuple[str, ...] = ()  # variables of the environment that hold secrets
    # how the agent was started, and its variables NOTBEFORE_*: another version looks whether it can be started so
    command: tuple[str, ...] = ("run",)
    variables: dict[str, str] = {}
    version: str = __version__


class Hello(Struct, frozen=True):
    """A courier has started. ``problem``: why it cannot work, in words; for one of another version than its orders."""

    version: str
    schema: int
    problem: str = ""


class Turn(Struct, frozen=True):
    """What came of deliveries, and how many more each sink can take now."""

    results: Sequence[SendResult]
    room: Mapping[str, int]
    busy: bool = False  # something is under way


class Given(Struct, frozen=True, tag=True):
    """The answer to a turn: what is to be delivered."""

    deliveries: Sequence[Delivery]


class Wake(Struct, frozen=True, tag=True):
    """Something is due: take a turn now."""


class Leave(Struct, frozen=True, tag=True):
    """Take nothing more, and end once what is under way is done, or after this many seconds."""

    seconds: float


FromAgent = Given | Wake | Leave


def seal(orders: Orders, environment: Mapping[str, str]) -> bytes:
    """Orders as a frame, with the secrets in them; raises ``ConfigError`` where one cannot be had."""

    def encode(value: object) -> Any:
        return value.sealed(environment) if isinstance(value, Secret) else str(value)

    return msgspec.msgpack.encode(orders, enc_hook=encode)


def unseal(frame: bytes) -> Orders:
    """The orders, read; raises ``ValueError``."""

    def decode(kind: type, value: object) -> object:
        return Secret.read(value) if kind is Secret else Duration(value)

    return msgspec.msgpack.decode(frame, type=Orders, dec_hook=decode)


class Channel:
    """One end of it. Never waits, and takes no frame of more than ``MAX_FRAME`` bytes. For one thread at a time.

    Every method raises ``ConnectionError`` where the other end is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(0)
        self._end = end
        self._received = bytearray()
        self.unsent = bytearray()  # waits until the other end reads: ``flush`` once the socket can be written
        self.fileno = end.fileno  # for ``select``
        self.close = end.close

    def send(self, message: object) -> None:
        """Send as much as the socket takes now."""
        frame = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        self.unsent += _LENGTH.pack(len(frame)) + frame
        self.flush()

    def flush(self) -> None:
        """Send more of what waits."""
        try:
            while self.unsent:
                del self.unsent[: self._end.send(self.unsent)]
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
