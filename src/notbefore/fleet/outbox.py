"""``FleetOutbox``: the deliveries of all partitions that this instance has, which its courier asks for.

One outbox for all of them, so that the most severe goes first whatever partition it is of. Each partition's part of it
stands in that partition's snapshot (``part``), and goes with it (``adopt``, ``leave``).
"""

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from notbefore.core.delivery import Delivery, Routing, deliveries
from notbefore.core.outbox import OF_A_FLEET, Outbox, OutboxImage, SendResult
from notbefore.core.record import Record
from notbefore.fleet.waves import Notification, known
from notbefore.metrics.totals import OutboxView, Totals, view_of


class FleetOutbox:
    """For several threads. ``wake`` is called when there is something to deliver; it may not wait.

    ``hub_time`` gives the time by the hub, in Unix seconds, which notifications are dated by.
    """

    def __init__(self, routing: Routing, wake: Callable[[], None], hub_time: Callable[[], float]) -> None:
        self.routing = routing
        self.totals = Totals()  # what was notified since the start
        self._wake = wake
        self._hub_time = hub_time
        self._lock = threading.Lock()  # of all below; held over nothing that waits
        self._outbox = Outbox(random.random, OF_A_FLEET, patience=0.0)
        self._partition_of: dict[str, str] = {}  # event key -> partition
        self._news: set[str] = set()  # partitions of which something was taken in, accepted or refused

    # ---- for the partitions

    def commit(self, partition: str, made: Notification, *, sent: bool) -> bytes:
        """Take a notification of a partition; returns its record. ``sent``: somebody is to be notified of it."""
        change = made.change
        line = Record.of(change, made.vm, exercise=made.exercise, fleet=made.facts).line()
        # by each place that it is routed by; one for each sink and step
        vms = map(known, made.routed) if sent else ()
        new = {one.delivery_id: one for vm in vms for one in deliveries(change, line, self.routing, vm)}
        with self._lock:
            self._partition_of[change.event.key] = partition
            self._outbox.take(change, list(new.values()), time.monotonic(), self._hub_time())
            self._news.add(partition)
            self.totals = self.totals.plus(change)
        self._wake()
        return line

    def take_news(self) -> set[str]:
        """The partitions of which something was taken in, accepted or refused since the last call."""
        with self._lock:
            news, self._news = self._news, set()
            return news

    def part(self, partition: str, open_keys: Collection[str]) -> OutboxImage:
        """What waits of a partition, and what sinks said of its events that are open (``open_keys``)."""
        with self._lock:
            keys = self._keys(partition)
            image = self._outbox.rows.image(time.monotonic(), keys)
            self._leave(keys.difference(open_keys, (row.event_key for row in image.rows)))
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

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int]) -> Sequence[Delivery]:
        """Take in results, and give what is due."""
        results = list(results)
        with self._lock:
            for one in results:
                row = self._outbox.rows.by_id.get(one.delivery_id)
                if row is not None and one.outcome != "returned":
                    self._news.add(self._partition_of[row.event_key])
            return self._outbox.exchange(results, room, time.monotonic())

    def courier_ended(self) -> None:
        """What the courier had is due again."""
        with self._lock:
            self._outbox.release(time.monotonic())

    def next_due(self) -> float | None:
        """Seconds until a courier is needed, 0 or less: now; ``None``: nothing waits."""
        with self._lock:
            due = self._outbox.rows.next_due()
            return None if due is None else due - time.monotonic()

    def view(self) -> OutboxView:
        """What metrics and the page show of it."""
        with self._lock:
            return view_of(self._outbox, time.monotonic(), time.time())
