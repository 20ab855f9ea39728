"""``Orders``: what the courier needs to know, as the agent hands it over, and the few words that go between them."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from notbefore import __version__
from notbefore.config.messages import Messages
from notbefore.config.secret import Secret
from notbefore.config.sinks import PeersConfig, SinkConfig
from notbefore.core.duration import Duration
from notbefore.errors import ConfigError
from notbefore.store.schema import SCHEMA_VERSION

DONE: Final = 0
HUNG: Final = 10  # exit codes of a courier
LOST_STATE: Final = 11
OTHER_VERSION: Final = 12  # the orders are of another version of this package

SIGN_INTERVAL: Final = 1.0  # seconds between signs of life
STOP_SECONDS: Final = 10.0  # to send what is due before it stops
LEAVE_SECONDS: Final = 2.0  # for what is under way before it leaves; the successor sends the rest again
# what the agent writes after the orders; LEAVE: a successor waits; IN_AGENT: neither file of the outbox can be written
STOP, LEAVE, WAKE, IN_AGENT = b"t", b"l", b"w", b"m"
ALIVE, TROUBLE = b".", b"!"  # what the courier writes; TROUBLE: the outbox cannot be used
MAX_ORDERS: Final = 60 * 1024  # bytes: less than a pipe holds, so that the agent never waits for a courier to read


class Orders(Struct, frozen=True):
    """All that a courier needs to know; the agent writes it to the courier's pipe."""

    state_file: str
    sinks: dict[str, SinkConfig] = {}
    messages: Messages = Messages()
    peers: PeersConfig | None = None
    log_format: Literal["auto", "json", "text"] = "auto"
    log_level: str = "info"
    hidden: tuple[str, ...] = ()  # variables of the environment that hold other secrets of the agent's
    spare_file: str | None = None  # it holds the outbox while the state file cannot be written
    channel: int | None = None  # the file descriptor over which the agent is asked for the outbox
    in_agent: bool = False  # it is there now: neither file can be written
    patient: bool = True  # what is critical is tried again where a refusal may pass: not in a drill
    confirm: bool = False  # one delivery at a time, and none until the last one is confirmed (`store.confirm`)
    linger: float = 60.0  # seconds with nothing to do after which it leaves
    deadline_grace: float = 5.0  # seconds beyond a sink's timeout after which an attempt is given up as hanging


def seal(orders: Orders, environment: Mapping[str, str]) -> bytes:
    """Orders as they go through the pipe; raises ``ConfigError`` where a secret cannot be had."""

    def encode(value: object) -> Any:
        return value.sealed(environment) if isinstance(value, Secret) else str(value)

    sealed = {"origin": Origin.here(), **msgspec.structs.asdict(orders)}
    line = msgspec.json.encode(sealed, enc_hook=encode) + b"\n"
    if len(line) > MAX_ORDERS:
        raise ConfigError(f"the sinks' settings are more than {MAX_ORDERS} bytes in all: shorten the templates")
    return line


def unseal(line: bytes) -> Orders:
    """The orders, read; raises ``msgspec.MsgspecError``."""

    def decode(kind: type, value: object) -> object:
        return Secret.read(value) if kind is Secret else Duration(value)

    return msgspec.json.decode(line, type=Orders, dec_hook=decode)


class Origin(Struct, frozen=True):
    """Of which code orders are. A courier that is of another one takes none: it may misread them, or the state."""

    version: str = ""
    schema: int = 0

    @classmethod
    def here(cls) -> "Origin":
        """Of the code that runs."""
        return cls(__version__, SCHEMA_VERSION)

    @classmethod
    def read(cls, line: bytes) -> "Origin":
        """Of sealed orders, whatever else they hold; raises ``msgspec.MsgspecError``."""
        return msgspec.json.decode(line, type=_Sealed).origin


class _Sealed(Struct, frozen=True):
    """What orders of every version have."""

    origin: Origin = Origin()
