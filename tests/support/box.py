"""An outbox, with both ends of it at hand: the courier's and the agent's."""

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

from notbefore.core.delivery import Delivery, DeliveryResult
from notbefore.metrics.outbox import OutboxView
from notbefore.store import outbox_intake
from notbefore.store.disk import DiskThread
from notbefore.store.outbox import CourierTurn, Outbox
from notbefore.store.outbox_reader import OutboxReader
from notbefore.store.schema import transaction
from notbefore.store.state import Store
from notbefore.store.state_file import FILE_NAME, StoredState

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


class Box:
    """An outbox with a hand on the agent's side of it as well."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        with closing(Store(directory)) as store:
            store.confirm_time(1e12)  # any time that a test names has come for certain
            store.commit(StoredState(), [])
        self.outbox = Outbox(self.path)
        self.reader = OutboxReader(self.path, DiskThread())

    def put(self, *deliveries: Delivery) -> None:
        with transaction(self.outbox._db) as db:
            outbox_intake.put(db, deliveries)
            for one in deliveries:  # the event is listed, as the agent would have it
                db.execute("INSERT OR REPLACE INTO tracked VALUES (?, 1, '{}')", (one.event_key,))

    def ended(self, event_key: str) -> None:
        with transaction(self.outbox._db) as db:
            outbox_intake.event_ended(db, event_key)
            db.execute("DELETE FROM tracked WHERE event_key = ?", (event_key,))

    def started(self, event_key: str) -> None:
        with transaction(self.outbox._db) as db:
            outbox_intake.event_started(db, event_key)

    def lease(self, now: float = 1.0, *results: DeliveryResult, **room: int) -> list[Delivery]:
        return self.outbox.exchange(CourierTurn(results, room or {"chat": 100, "hub": 100}, now))

    def expire(self, now: float, max_rows: int = 10_000) -> None:
        with transaction(self.outbox._db) as db:
            outbox_intake.expire(db, now, max_rows)

    @property
    def view(self) -> OutboxView:
        self.reader.refresh()
        return self.reader.view

    @property
    def next_due(self) -> float | None:
        return self.reader.refresh()

    def count(self, result: str) -> int:
        return sum(count for (_, name), count in self.view.counts.items() if name == result)

    def close(self) -> None:
        self.reader.close()
        self.outbox.close()


def ids(deliveries: list[Delivery]) -> list[str]:
    return [one.delivery_id for one in deliveries]


def delivered(one: Delivery, time: float = 1.0, **fields: Any) -> DeliveryResult:
    return DeliveryResult(one.delivery_id, "delivered", time, **fields)
