"""``FleetOutbox``: the deliveries of all partitions that this instance has, which its courier asks for.

One outbox for all of them, so that the most severe goes first whatever partition it is of. Each partition's part of it
stands in that partition's snapshot (``part``), and goes with it (``adopt``, ``leave``).
"""

import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from notbefore.core.delivery import Delivery, Routing, Targets, deliveries, targets_of
from notbefore.core.outbox import OF_A_FLEET, Outbox, SendResult
from notbefore.core.outbox_rows import OutboxImage
from notbefore.core.record import Record, Vm
from notbefore.fleet.waves import Notification, known
from notbefore.metrics.totals import Totals
from notbefore.process.clock import Clock
from notbefore.store.store import StoredOutbox, log_overflowed

PLACE: Final = ("subscription_id", "resource_group", "location", "zone", "scale_set")  # that routes ask for


class FleetOutbox(StoredOutbox):
    """For several threads. ``wake`` is called when there is something to deliver; it may not wait.

    ``hub_time`` gives the time by the hub, in Unix seconds, which notifications are dated by.
    """

    def __init__(self, routing: Routing, wake: Callable[[], None], hub_time: Callable[[], float]) -> None:
        outbox = Outbox(random.random, OF_A_FLEET, patience=0.0, overflowed=log_overflowed)
        super().__init__(outbox, threading.Condition(), Clock(), lambda: None, wake)
        self.routing = routing
        self.totals = Totals()  # what was notified since the start
        self._hub_time = hub_time
        self._partition_of: dict[str, str] = {}  # event key -> partition
        self._news: set[str] = set()  # see ``has_news``
        self.use_sinks(routing.sinks, self._targets_of)

    # ---- for the partitions

    def commit(self, partition: str, made: Notification, *, sent: bool) -> bytes:
        """Take a notification of a partition; returns its record. ``sent``: somebody is to be notified of it."""
        change = made.change
        line = Record.of(change, made.vm, exercise=made.exercise, fleet=made.facts).line()
        # by each place that it is routed by; one for each sink and step
        vms = map(known, made.routed) if sent else ()
        new = {one.delivery_id: one for vm in vms for one in deliveries(change, line, self.routing, vm)}
        with self.opened() as (outbox, now):
            self._partition_of[change.event.key] = partition
            outbox.take(change, list(new.values()), now, self._hub_time())
            self._news.add(partition)
            self.totals = self.totals.plus(change)
        return line

    def has_news(self, partition: str) -> bool:
        """Something of it was taken in, accepted or refused since its last ``part``."""
        return partition in self._news

    def part(self, partition: str, open_keys: Collection[str]) -> OutboxImage:
        """What waits of a partition, and what sinks said of its events that are open (``open_keys``)."""
        with self.opened() as (outbox, now):
            keys = self._keys(partition)
            image = outbox.rows.image(now, keys)
            self._leave(keys.difference(open_keys, (row.event_key for row in image.rows)))
            self._news.discard(partition)
            outbox.rows.take_changes()  # nobody writes them one by one
            return image

    def adopt(self, partition: str, image: OutboxImage, passed: float) -> None:
        """Go on with what a snapshot holds, which was taken ``passed`` seconds ago."""
        with self.opened() as (outbox, now):
            keys = {row.event_key for row in image.rows}.union(lane[1] for lane, _ in image.threads)
            self._partition_of |= dict.fromkeys(keys, partition)
            outbox.restore(image, now, passed)
            outbox.redirect(now)  # whose it was may have had other sinks

    def leave(self, partition: str) -> None:
        """Another instance has this partition: nothing of it is sent any more."""
        with self._memory:
            self._leave(self._keys(partition))

    def _targets_of(self, row: Delivery) -> Targets:
        record = Record.read(row.record)
        place: dict[str, Any] = {name: getattr(record, name) or "" for name in PLACE}
        return targets_of(row.record, self.routing, known(Vm(tags=record.tags, **place)))

    def _keys(self, partition: str) -> set[str]:
        return {key for key, name in self._partition_of.items() if name == partition}

    def _leave(self, keys: Collection[str]) -> None:
        for key in keys:
            del self._partition_of[key]
        self._outbox.leave(keys)

    # ---- for the courier

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int]) -> Sequence[Delivery]:
        """As of an agent's outbox; note of which partitions there are news."""
        results = list(results)
        with self._memory:  # both at once
            rows = [self._outbox.rows.by_id.get(one.delivery_id) for one in results if one.outcome != "returned"]
            self._news |= {self._partition_of[row.event_key] for row in rows if row is not None}
            return super().exchange(results, room)
