"""``Message``: what a sink is given; ``Receipt``: what it answers; ``Sink``: the Protocol between."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
from msgspec import Struct

from notbefore.core.delivery import Delivery, MessageKind
from notbefore.core.routing import Severity
from notbefore.errors import SendError

_PREFIX = "azure.scheduled_event."


class Message(Struct, frozen=True):
    """One delivery, opened."""

    delivery_id: str
    event_key: str
    sink: str
    kind: MessageKind
    severity: Severity
    record: dict[str, Any]
    line: bytes  # the record as it is stored: JSON
    thread: str | None = None
    severity_given: bool = False  # by the route

    @classmethod
    def of(cls, delivery: Delivery) -> "Message":
        """Open a delivery; raises ``msgspec.DecodeError`` when its record is no JSON object."""
        return cls(
            delivery_id=delivery.delivery_id,
            event_key=delivery.event_key,
            sink=delivery.sink,
            kind=delivery.kind,
            severity=delivery.severity,
            record=msgspec.json.decode(delivery.record, type=dict[str, Any]),
            line=delivery.record,
            thread=delivery.thread,
            severity_given=delivery.severity_given,
        )

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the event: ``type``, ``not_before``; or of the record as a whole: ``host.name``."""
        return self.record.get(_PREFIX + name, self.record.get(name, default))

    @property
    def over(self) -> bool:
        """The event has ended."""
        return self.kind in ("canceled", "finished", "ended")

    @property
    def no_longer_affected(self) -> bool:
        """The event was to hit the VM that tells of it, and no longer is."""
        return self.get("scope") == "peer" and self.get("previous_scope") is not None

    @property
    def exercise(self) -> bool:
        """Nothing has happened: somebody tries whether the message arrives."""
        return bool(self.get("exercise"))


class Receipt(Struct, frozen=True):
    """The far side has it."""

    thread: str | None = None  # to be told with later messages of the same event
    repeat: float | None = None  # seconds after which it is to be sent again while the event lasts
    fallback: bool = False  # a template failed, and the built-in text was sent


class Sink(Protocol):
    """One place where messages go. Made and used by one thread; made as ``Sink(name, settings, links)``."""

    def send(self, message: Message) -> Receipt:
        """Hand a message over: return once the far side has accepted it, raise ``errors.SendError`` when it did not."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


@runtime_checkable
class BatchSink(Protocol):
    """A sink that takes several messages at once (``SinkSettings.BATCH``)."""

    def send_many(self, messages: Sequence[Message]) -> list[Receipt | SendError]:
        """Hand them over; what came of each, in the order given."""
        ...


@runtime_checkable
class ConnectableSink(Protocol):
    """A sink that can be asked whether it would take a message."""

    def connect(self) -> None:
        """Ask; raises ``errors.SendError`` where it would not."""
        ...
