"""``OutboxAnswer``: the deliveries, as ``/api/v1/outbox`` and ``notbefore outbox`` show them."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from notbefore.core.delivery import Delivery, Lane
from notbefore.core.text import rfc3339
from notbefore.process.operations import OutboxReply


class DeliverySummary(Struct, frozen=True):
    """A delivery that waits or was refused. Times are RFC 3339, by the clock of the agent's VM."""

    delivery_id: str
    event_key: str
    sink: str
    kind: str
    severity: str
    note: str
    fallback: tuple[str, ...]
    others: tuple[str, ...]
    expires_with_event: bool
    state: str
    attempts: int
    error: str
    created: str
    due: str
    expires: str
    listed: bool  # whether its event is listed now
    record: dict[str, Any] | UnsetType = UNSET  # the change; only where it was asked for

    @property
    def lane(self) -> Lane:
        """Deliveries with the same lane are sent in order."""
        return self.sink, self.event_key

    @property
    def queued(self) -> bool:
        """Whether later deliveries of its lane wait for it; see ``Delivery.queued``."""
        return self.state == "pending" and self.kind != "reminder"


class OutboxAnswer(Struct, frozen=True):
    """The body of ``/api/v1/outbox``."""

    time: str  # now, by the clock of the agent's VM
    deliveries: tuple[DeliverySummary, ...]  # oldest first


def outbox_answer(reply: OutboxReply, now: datetime, *, with_records: bool) -> OutboxAnswer:
    """Return the deliveries of a reply. ``now``: by the clock of the agent's VM."""
    listed = frozenset(reply.listed)
    deliveries = [
        _summary(
            delivery,
            shift=reply.shift,
            is_listed=delivery.event_key in listed,
            with_record=with_records,
        )
        for delivery in reply.rows
    ]
    return OutboxAnswer(time=rfc3339(now), deliveries=tuple(deliveries))


def _summary(
    delivery: Delivery, *, shift: float, is_listed: bool, with_record: bool
) -> DeliverySummary:
    record: dict[str, Any] | UnsetType = UNSET
    if with_record:
        record = msgspec.json.decode(delivery.record)
    return DeliverySummary(
        delivery_id=delivery.delivery_id,
        event_key=delivery.event_key,
        sink=delivery.sink,
        kind=delivery.kind,
        severity=delivery.severity,
        note=delivery.note,
        fallback=delivery.fallback,
        others=delivery.others,
        expires_with_event=delivery.expires_with_event,
        state=delivery.state,
        attempts=delivery.attempts,
        error=delivery.error,
        created=_time(delivery.created + shift),
        due=_time(delivery.due + shift),
        expires=_time(delivery.expires + shift),
        listed=is_listed,
        record=record,
    )


def _time(timestamp: float) -> str:
    return rfc3339(datetime.fromtimestamp(timestamp, UTC))
