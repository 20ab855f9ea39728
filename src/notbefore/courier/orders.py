"""The messages between an agent and its courier (``FrameSocket`` carries them).

The agent sends ``Orders``, and the courier answers ``Hello``: each version can read these two from
any other version. After that the courier sends a ``CourierReport`` and the agent a ``Batch``, each
at any time.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from notbefore import __version__
from notbefore.config.secret import Secret
from notbefore.config.sinks import Messages, SinkConfig
from notbefore.core.delivery import Delivery
from notbefore.core.duration import Duration
from notbefore.core.outbox import SendResult

REPORT_INTERVAL: Final = 1.0  # seconds: the longest time between two reports of a courier


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


class CourierReport(Struct, frozen=True):
    """The results of deliveries, and what the courier can do now."""

    results: Sequence[SendResult]
    limits: Mapping[str, int]  # sink -> how many deliveries it may have at a time
    hangs: bool = False  # an attempt has not ended long after its timeout
    # sink -> how often a template of the user's has failed since this courier started
    template_failures: Mapping[str, int] = {}


class Batch(Struct, frozen=True):
    """Deliveries to send."""

    deliveries: Sequence[Delivery]
    time: float  # the present in Unix seconds, by the clock that the messages go by


def seal(orders: Orders, environment: Mapping[str, str]) -> bytes:
    """Return orders as a frame, with their secrets.

    Raises ``ConfigError`` if a secret cannot be read.
    """

    def encode(value: object) -> Any:
        if isinstance(value, Secret):
            return value.sealed(environment)
        return str(value)

    return msgspec.msgpack.encode(orders, enc_hook=encode)


def unseal(frame: bytes) -> Orders:
    """Decode orders; raises ``ValueError``."""

    def decode(kind: type, value: object) -> object:
        if kind is Secret:
            return Secret.read(value)
        return Duration(value)

    return msgspec.msgpack.decode(frame, type=Orders, dec_hook=decode)
