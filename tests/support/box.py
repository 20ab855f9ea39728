"""``Box`` wraps an outbox: a test acts as its owner and as its courier.

The test passes the time with each call.
"""

import itertools
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from notbefore.core.change import Change, ChangeKind
from notbefore.core.delivery import Delivery, last_message
from notbefore.core.outbox import OF_AN_AGENT, Bounds, Outbox, SendResult
from notbefore.store.store import Store
from support.azure import T0, event

NUMBERS = itertools.count()


def highest_dice() -> float:
    return 1.0


def delivery(event_key: str = "e", sink: str = "chat", **fields: Any) -> Delivery:
    return Delivery(
        **{
            "delivery_id": f"{next(NUMBERS):032x}",
            "event_key": event_key,
            "sink": sink,
            "kind": "announced",
            "severity": "info",
            "created": 0.0,
            "due": 0.0,
            "expires": 1e9,
            "expires_with_event": True,
            "record": b"{}",
            **fields,
        }
    )


def change(kind: ChangeKind, event_key: str = "e", **fields: Any) -> Change:
    """Return a change of an event with the fields that an outbox reads."""
    return Change(
        id="c",
        kind=kind,
        reason="content_changed",
        incarnation=1,
        first_seen=T0,
        **{"event": event(EventId=event_key), "scope": "self", "time": T0, **fields},
    )


class Box:
    """An outbox without a store, and the deliveries that it dropped for want of room.

    ``patience``: seconds for which a delivery waits until it is written.
    """

    def __init__(self, bounds: Bounds = OF_AN_AGENT, patience: float = 0.0) -> None:
        self.removed: list[Delivery] = []
        self.outbox = Outbox(highest_dice, bounds, patience)

    def put(self, *deliveries: Delivery, now: float = 0.0) -> None:
        self.outbox.put(deliveries, now, now)
        self.removed += self.outbox.make_room(now)

    def take(
        self,
        kind: ChangeKind,
        event_key: str = "e",
        *deliveries: Delivery,
        now: float = 0.0,
        **fields: Any,
    ) -> list[str]:
        """Let the outbox take a change with its deliveries; return as ``Outbox.take`` does."""
        step = change(kind, event_key, **{"time": datetime.fromtimestamp(now, UTC), **fields})
        if deliveries:
            step = replace(step, id=deliveries[0].change_id or step.id)
        left_open = self.outbox.take(step, deliveries, now, now, last_message(step, b"{}"))
        self.removed += self.outbox.make_room(now)
        return left_open

    def lease(self, now: float = 1.0, *results: SendResult, **room: int) -> list[Delivery]:
        """Report results and lease due deliveries; ``room``: how many of each sink."""
        return self.outbox.exchange(results, room or {"chat": 100, "hub": 100}, now)

    def rows(self, **selection: Any) -> list[Delivery]:
        return self.outbox.rows.chosen(**selection)

    @property
    def counts(self) -> dict[str, int]:
        """The number of deliveries with each result."""
        totals: dict[str, int] = {}
        for (_, result), count in self.outbox.rows.ledger.counts.items():
            totals[result] = totals.get(result, 0) + count
        return totals

    def count(self, result: str) -> int:
        return self.counts.get(result, 0)


def rows_of(store: Store) -> list[Delivery]:
    """Return the deliveries in the outbox of an agent, oldest first."""
    with store.opened() as (outbox, _):
        return outbox.rows.chosen()


def ids(deliveries: Iterable[Delivery]) -> list[str]:
    return [delivery.delivery_id for delivery in deliveries]


def accepted(sent: Delivery, **fields: Any) -> SendResult:
    """Return the result of a delivery that the receiver accepted."""
    return SendResult(sent.delivery_id, "accepted", **fields)


def failed(sent: Delivery, **fields: Any) -> SendResult:
    """Return the result of a delivery that failed and is retried."""
    return SendResult(sent.delivery_id, "failed", **fields)


def refused(sent: Delivery, **fields: Any) -> SendResult:
    """Return the result of a delivery that the receiver refused for good."""
    return SendResult(sent.delivery_id, "refused", **fields)
