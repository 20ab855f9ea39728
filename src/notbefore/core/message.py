"""``Message``: a delivery, decoded, as a sink sends it. Pure."""

from datetime import datetime
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import AS_FAR_AS_KNOWN
from notbefore.core.delivery import EXPIRING_KINDS, Delivery, MessageKind
from notbefore.core.document import STARTED
from notbefore.core.event_types import Severity, event_type_of
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.record import Heartbeat, Record
from notbefore.core.text import escaped, sha256
from notbefore.errors import SendError

# characters of an alert's key: PagerDuty's limit; others accept as many or more
MAX_KEY: Final = 255


class Templated(Struct, frozen=True):
    """The texts that the user's templates have made for a message; ``None``: there is none."""

    title: str | None = None
    body: str | None = None
    request: str | None = None  # the whole body of a request, for a sink that sends one


class Message(Struct, frozen=True):
    """A delivery whose record is decoded."""

    delivery_id: str
    event_key: str
    sink: str
    kind: MessageKind
    severity: Severity
    content: Record | Heartbeat
    line: bytes  # the record as it is stored: JSON
    now: datetime  # when it is sent, by IMDS's clock: times in its text are relative to it
    thread: str | None = None
    note: str = ""  # why it goes to this sink, if not by its route
    templated: Templated = Templated()

    @classmethod
    def of(cls, delivery: Delivery, now: datetime) -> "Message":
        """Decode a delivery that is sent ``now``.

        Raises ``msgspec.DecodeError`` if its record cannot be read.
        """
        content: Record | Heartbeat
        if delivery.kind == "heartbeat":
            content = Heartbeat.read(delivery.record)
        else:
            content = Record.read(delivery.record)
        return cls(
            delivery_id=delivery.delivery_id,
            event_key=delivery.event_key,
            sink=delivery.sink,
            kind=delivery.kind,
            severity=delivery.severity,
            content=content,
            line=delivery.record,
            now=now,
            thread=delivery.thread or None,  # "": the sink has returned no text for this event
            note=delivery.note,
        )

    @property
    def record(self) -> Record:
        """The record of the change.

        Raises ``SendError`` for a heartbeat, which not every sink can send.
        """
        if isinstance(self.content, Heartbeat):
            raise SendError("this sink cannot send a heartbeat", permanent=True)
        return self.content

    @property
    def alert_key(self) -> str:
        """The key of the event's alert at the receiver; the same from every VM."""
        key = f"notbefore/{escaped(self.event_key)}"
        if len(key) > MAX_KEY:
            return f"notbefore/{sha256(key.encode())}"
        return key

    @property
    def shared(self) -> "Message":
        """The message without the values that differ between the VMs that send it."""
        return replace(self, content=self.record.shared)

    @property
    def is_ahead(self) -> bool:
        """Whether it is about a coming event."""
        return self.kind in EXPIRING_KINDS and self.record.event_status != STARTED

    @property
    def over(self) -> bool:
        """Whether the event has ended."""
        return self.kind in OUTCOMES

    @property
    def settled(self) -> bool:
        """Whether it is the last message: the event has ended, or no longer affects this VM."""
        return self.over or (self.kind == "updated" and self.record.no_longer_affected)

    @property
    def is_good_news(self) -> bool:
        """Whether it is the last message, and the outcome of the event is known.

        The end of an advice is good news too: there is no outcome to know.
        """
        if event_type_of(self.record.event_type).is_advice:
            return self.settled
        if not self.settled or self.record.reason == AS_FAR_AS_KNOWN:
            return False
        return self.kind != "ended" or self.record.outcome != "unknown"

    @property
    def shown_severity(self) -> Severity:
        """The severity that the message shows.

        Good news is ``info``, and an end of which the outcome is unknown is a ``warning``.
        """
        if self.is_good_news:
            return "info"
        if self.settled:
            return "warning"
        return self.severity
