"""An outbox, with both ends of it at hand: its owner's and a courier's.

Its clock is an argument of each call.
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
    """A change of an event, as far as an outbox asks for it."""
    facts: dict[str, Any] = {
        "event": event(EventId=event_key),
        "scope": "self",
        "time": T0,
        **fields,
    }
    return Change(
        id="c", kind=kind, reason="content_changed", incarnation=1, first_seen=T0, **facts
    )


class Box:
    """``patience``: seconds for which what is given waits to be written.

    ``removed``: what found no room.
    """

    def __init__(self, bounds: Bounds = OF_AN_AGENT, patience: float = 0.0) -> None:
        self.removed: list[Delivery] = []
        self.outbox = Outbox(lambda: 1.0, bounds, patience)

    def put(self, *deliveries: Delivery, now: float = 0.0) -> None:
        self.outbox.put(deliveries, now, now)
        self.removed += self.outbox.make_room(now)

    def take(
        self,
        kind: ChangeKind,
        event_key: str = "e",
        *made: Delivery,
        now: float = 0.0,
        **fields: Any,
    ) -> list[str]:
        seen = datetime.fromtimestamp(now, UTC)
        step = change(kind, event_key, **{"time": seen, **fields})
        if made:
            step = replace(step, id=made[0].change_id or step.id)
        left_open = self.outbox.take(step, made, now, now, last_message(step, b"{}"))
        self.removed += self.outbox.make_room(now)
        return left_open

    def lease(self, now: float = 1.0, *results: SendResult, **room: int) -> list[Delivery]:
        return self.outbox.exchange(results, room or {"chat": 100, "hub": 100}, now)

    def rows(self, **chosen: Any) -> list[Delivery]:
        return self.outbox.rows.chosen(**chosen)

    @property
    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for (_, name), count in self.outbox.rows.ledger.counts.items():
            found[name] = found.get(name, 0) + count
        return found

    def count(self, result: str) -> int:
        return self.counts.get(result, 0)


def rows_of(store: Store) -> list[Delivery]:
    """What is in the outbox of an agent, oldest first."""
    with store.opened() as (outbox, _):
        return outbox.rows.chosen()


def ids(deliveries: Iterable[Delivery]) -> list[str]:
    return [delivery.delivery_id for delivery in deliveries]


def accepted(one: Delivery, **fields: Any) -> SendResult:
    return SendResult(one.delivery_id, "accepted", **fields)


def failed(one: Delivery, **fields: Any) -> SendResult:
    return SendResult(one.delivery_id, "failed", **fields)


def refused(one: Delivery, **fields: Any) -> SendResult:
    return SendResult(one.delivery_id, "refused", **fields)
