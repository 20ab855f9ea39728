"""``Message``: what a sink is given; ``Receipt``: what it returns; ``Sink``: the Protocol of all sinks."""

import hashlib
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.delivery import Delivery, MessageKind
from notbefore.core.document import STARTED
from notbefore.core.record import Heartbeat, Record, view
from notbefore.core.routing import Severity
from notbefore.core.text import escaped
from notbefore.errors import SendError

MAX_KEY: Final = 255  # characters of an alert's key, which PagerDuty takes; others take as much or more
AHEAD: Final = ("announced", "updated", "reminder")  # kinds of message about what is to come


class Message(Struct, frozen=True):
    """One delivery, opened."""

    delivery_id: str
    event_key: str
    sink: str
    kind: MessageKind
    severity: Severity
    content: Record | Heartbeat
    line: bytes  # the record as it is stored: JSON
    thread: str | None = None
    note: str = ""  # why it goes to this sink, where that is not by its route

    @classmethod
    def of(cls, delivery: Delivery) -> "Message":
        """Open a delivery; raises ``msgspec.DecodeError`` when its record cannot be read."""
        content = (Heartbeat if delivery.kind == "heartbeat" else Record).read(delivery.record)
        return view(cls, delivery, content=content, line=delivery.record)

    @property
    def record(self) -> Record:
        """The change; raises ``SendError`` for a heartbeat, which is only for sinks that send any content."""
        if isinstance(self.content, Heartbeat):
            raise SendError("this sink cannot send a heartbeat", permanent=True)
        return self.content

    @property
    def alert_key(self) -> str:
        """The name of the event for a receiver that keeps an alert of it; the same from every VM."""
        key = f"notbefore/{escaped(self.event_key)}"
        return key if len(key) <= MAX_KEY else f"notbefore/{hashlib.sha256(key.encode()).hexdigest()}"

    @property
    def shared(self) -> "Message":
        """The message without what differs between the VMs that send it."""
        return replace(self, content=self.record.shared)

    @property
    def is_ahead(self) -> bool:
        """It is about what is to come."""
        return self.kind in AHEAD and self.record.event_status != STARTED

    @property
    def over(self) -> bool:
        """The event has ended."""
        return self.kind in ("canceled", "finished", "ended")

    @property
    def settled(self) -> bool:
        """Nothing more comes: the event has ended, or no longer affects this VM."""
        return self.over or (self.kind == "updated" and self.record.no_longer_affected)

    @property
    def is_good_news(self) -> bool:
        """Nothing more comes, and it is known how the event ended."""
        return self.settled and not (self.kind == "ended" and self.record.outcome == "unknown")

    @property
    def shown_severity(self) -> Severity:
        """The severity that a message shows: good news is information, an end that nobody saw is a warning."""
        return "info" if self.is_good_news else "warning" if self.settled else self.severity


class Receipt(Struct, frozen=True):
    """The receiver has accepted the message."""

    thread: str | None = None  # given to the sink again with later messages of the same event
    repeat: float | None = None  # seconds after which it is to be sent again while the event lasts


class Sink:
    """One place where messages go. Made and used by one thread; made as ``Sink(name, settings, messages)``."""

    def send(self, message: Message) -> Receipt:
        """Send a message: return once the receiver has accepted it, raise ``errors.SendError`` when it has not."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections."""
