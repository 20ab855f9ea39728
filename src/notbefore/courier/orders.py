"""What goes between an agent and its courier, as frames of a ``Channel``.

The agent sends ``Orders`` first, and the courier a ``Hello``: of these each version can read what the others send. Then
the courier asks (``Turn``) and the agent answers (``Given``), which says ``Wake`` or ``Leave`` at any time.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from notbefore import __version__
from notbefore.config.messages import Messages
from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig
from notbefore.core.delivery import Delivery
from notbefore.core.duration import Duration
from notbefore.core.outbox import SendResult

DONE: Final = 0
HUNG: Final = 10  # exit code of a courier that leaves because a sink hangs

TURN_INTERVAL: Final = 1.0  # seconds between two turns of a courier at most


class Orders(Struct, frozen=True):
    """All that a courier needs to know of the configuration."""

    sinks: dict[str, SinkConfig] = {}
    messages: Messages = Messages()
    log_format: Literal["auto", "json", "text"] = "auto"
    log_level: str = "info"
    hidden: tuple[str, ...] = ()  # variables of the environment that hold other secrets of the agent's
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
