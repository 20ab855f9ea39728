"""``FleetOutbox``: the deliveries of all partitions that this instance has, which its courier asks for.

One outbox for all of them, so that the most severe goes first whatever partition it is of. Each partition's part of it
stands in that partition's snapshot (``part``), and goes with it (``adopt``, ``leave``).
"""

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from notbefore.core.delivery import Delivery, DeliveryState, Routing, deliveries
from notbefore.core.outbox import OF_A_FLEET, GivenDelivery, Outbox, OutboxImage, SendResult
from notbefore.core.record import Record
from notbefore.fleet.waves import Notification, known
from notbefore.metrics.outbox import OutboxView, view_of
from notbefore.metrics.totals import Totals


class FleetOutbox:
    """For several threads. ``wake`` is called when there is something to deliver; it may not wait.

    ``settled`` is called with the partitions of which something was accepted or refused; it may not wait either.
    ``hub_time`` gives the time by the hub, in Unix seconds, which notifications are dated by.
    """

    def __init__(
        self,
        routing: Routing,
        wake: Callable[[], None],
        settled: Callable[[set[str]], None],
        hub_time: Callable[[], float],
    ) -> None:
        self.routing = routing
        self.totals = Totals()  # what was notified since the start
        self._wake = wake
        self._settled = settled
        self._hub_time = hub_time
        self._lock = threading.Lock()  # of all below; held over nothing that waits
        self._outbox = Outbox(random.random, OF_A_FLEET, patience=0.0)
        self._partition_of: dict[str, str] = {}  # event key -> partition

    # ---- for the partitions

    def commit(self, partition: str, made: Notification, *, sent: bool) -> bytes:
        """Take a notification of a partition; returns its record. ``sent``: somebody is to be notified of it."""
        line = Record.of(made.change, made.vm, exercise=made.exercise, fleet=made.facts).line()
        new = self._deliveries(made, line) if sent else []
        with self._lock:
            self._partition_of[made.change.event.key] = partition
            self._outbox.take(made.change, line, new, time.monotonic(), self._hub_time())
            self.totals = self.totals.plus(made.change)
        self._wake()
        return line

    def _deliveries(self, made: Notification, line: bytes) -> list[Delivery]:
        """By each place that it is routed by; one for each sink and step."""
        vms = map(known, made.routed)
        found = {one.delivery_id: one for vm in vms for one in deliveries(made.change, line, self.routing, vm)}
        return list(found.values())

    def part(self, partition: str, open_keys: Collection[str]) -> OutboxImage:
        """What waits of a partition, and what sinks said of its events that are open (``open_keys``)."""
        with self._lock:
            keys = self._keys(partition)
            image = self._outbox.rows.image(time.monotonic(), keys)
            wanted = {row.event_key for row in image.rows}.union(open_keys)
            self._leave(keys - wanted)
            self._outbox.rows.take_changes()  # nobody writes them one by one
            return image

    def adopt(self, partition: str, image: OutboxImage, passed: float) -> None:
        """Go on with what a snapshot holds, which was taken ``passed`` seconds ago."""
        with self._lock:
            keys = {row.event_key for row in image.rows}.union(lane[1] for lane, _ in image.threads)
            self._partition_of |= dict.fromkeys(keys, partition)
            self._outbox.restore(image, time.monotonic(), passed)
        self._wake()

    def leave(self, partition: str) -> None:
        """Another instance has this partition: nothing of it is sent any more."""
        with self._lock:
            self._leave(self._keys(partition))

    def _keys(self, partition: str) -> set[str]:
        return {key for key, name in self._partition_of.items() if name == partition}

    def _leave(self, keys: Collection[str]) -> None:
        for key in keys:
            del self._partition_of[key]
        self._outbox.leave(keys)

    # ---- for the courier: see ``supervisor.OutboxOwner``

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int]) -> Sequence[GivenDelivery]:
        """Take in results, and give what is due."""
        results = list(results)
        with self._lock:
            tried = (self._outbox.rows.by_id.get(one.delivery_id) for one in results if one.outcome != "returned")
            keys = {row.event_key for row in tried if row is not None}
            settled = {self._partition_of[key] for key in keys if key in self._partition_of}
            given = self._outbox.exchange(results, room, time.monotonic())
        if settled:
            self._settled(settled)
        return given

    def courier_ended(self) -> None:
        """What the courier had is due again."""
        with self._lock:
            self._outbox.release(time.monotonic())

    def next_due(self) -> float | None:
        """Seconds until a courier is needed, 0 or less: now; ``None``: nothing waits."""
        with self._lock:
            now = time.monotonic()
            due = self._outbox.next_due()
            return None if due is None else due - now

    # ---- for readers

    def rows(self, state: DeliveryState | None = None) -> list[Delivery]:
        """What is in the outbox, oldest first."""
        with self._lock:
            return self._outbox.rows.chosen(state)

    def view(self) -> OutboxView:
        """What metrics and the page show of it."""
        with self._lock:
            return view_of(self._outbox, time.monotonic(), time.time())
