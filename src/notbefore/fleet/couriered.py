"""``CourieredStore``: the outbox of the fleet's store, as a courier's supervisor asks for it."""

import random
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from notbefore.core.delivery import Delivery, DeliveryResult
from notbefore.core.duration import back_off
from notbefore.core.outbox import FIRST_PAUSE, LONGEST_ASKED, LONGEST_PAUSE, GivenDelivery, SendResult
from notbefore.store.courier_outbox import CourierOutbox
from notbefore.store.outbox import CourierTurn
from notbefore.store.outbox_reader import OutboxReader
from notbefore.store.state import Store

_OUTCOMES: Final = {"accepted": "delivered", "refused": "dead", "failed": "retry", "yielded": "yielded"}


class CourieredStore:
    """``reader`` says when something is due; ``run_once``: sinks whose attempts may not be made again."""

    def __init__(self, store: Store, reader: OutboxReader, run_once: Sequence[str] = ()) -> None:
        self._store = store
        self._reader = reader
        self._run_once = run_once
        self._outbox = CourierOutbox(store.path, store.spare_path)
        self._unrecorded: list[DeliveryResult] = []
        self._given: dict[str, Delivery] = {}
        self.in_trouble = False  # the outbox could not be used

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int]) -> Sequence[GivenDelivery]:
        """Write down what came of deliveries, and lease what is due: one for each sink, until it is confirmed."""
        now = time.time()
        for one in results:
            self._unrecorded += self._result_of(one, now)
        busy = {delivery.sink for delivery in self._given.values()}
        wanted = {sink: 1 for sink, count in room.items() if count > 0 and sink not in busy}
        try:
            leased = self._outbox.exchange(CourierTurn(self._unrecorded, wanted, now, confirm=True))
        except sqlite3.Error:
            self.in_trouble = True
            return []
        self._unrecorded, self.in_trouble = [], False
        self._given |= {one.delivery_id: one for one in leased}
        return [_given(one, now) for one in leased]

    def courier_ended(self) -> None:
        """Make due again what it had."""
        self._given = {}
        try:
            self._outbox.release_leases(time.time(), self._run_once)
        except sqlite3.Error:
            self.in_trouble = True

    def next_due(self) -> float | None:
        """See ``supervisor.OutboxOwner``."""
        due = self._reader.refresh()
        if due is None or self._given:
            return None
        return due - time.time()

    def close(self) -> None:
        """Close the files."""
        self._outbox.close()

    def _result_of(self, result: SendResult, now: float) -> list[DeliveryResult]:
        delivery = self._given.pop(result.delivery_id, None)
        if delivery is None:
            return []
        due = None
        if result.outcome in ("failed", "returned"):
            pause = back_off(delivery.attempts + 1, FIRST_PAUSE, LONGEST_PAUSE) * random.random()  # noqa: S311 - a pause, not a secret
            due = now + max(pause, min(result.retry_after or 0.0, LONGEST_ASKED))
        return [
            DeliveryResult(
                delivery_id=result.delivery_id,
                result=_OUTCOMES.get(result.outcome, "retry"),  # type: ignore[arg-type]
                time=now,
                due=due,
                pause=result.retry_after is not None,
                error=result.error,
                thread=result.thread,
                repeat=result.repeat,
                fallback=result.template_failed,
            )
        ]


def _given(one: Delivery, now: float) -> GivenDelivery:
    return GivenDelivery(
        delivery_id=one.delivery_id,
        event_key=one.event_key,
        sink=one.sink,
        kind=one.kind,
        severity=one.severity,
        record=one.record,
        thread=one.thread,
        note=one.note,
        age=now - one.created,
        repetition=one.state == "repeating",
    )
