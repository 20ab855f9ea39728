"""``FleetOutbox``: the deliveries of all partitions of this instance, for its courier.

All partitions share one outbox, so that the most severe delivery is sent first, whichever partition
it is of. A partition's deliveries are stored in its snapshot (``part``), and come and go with the
partition (``adopt``, ``leave``).
"""

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from notbefore.core.change import Change
from notbefore.core.delivery import Delivery, Targets, deliveries, last_message, targets_of
from notbefore.core.outbox import OF_A_FLEET, Outbox
from notbefore.core.outbox_rows import OutboxImage
from notbefore.core.record import Record, Vm
from notbefore.core.routing import Routing
from notbefore.fleet.notification import Notification
from notbefore.fleet.waves import routable
from notbefore.metrics.totals import Totals
from notbefore.process.clock import Clock
from notbefore.store.stored_outbox import StoredOutbox, log_left_open
from notbefore.wording.records import record_of

# the fields that routes match
PLACE: Final = (
    "subscription_id",
    "resource_group",
    "location",
    "zone",
    "scale_set",
)


class FleetOutbox(StoredOutbox):
    """May be used from several threads.

    ``wake`` is called when there is something to deliver; it must not wait. ``hub_time`` returns
    the hub's time in Unix seconds, which is the clock of notifications.
    """

    def __init__(
        self, routing: Routing, wake: Callable[[], None], hub_time: Callable[[], float]
    ) -> None:
        outbox = Outbox(random.random, OF_A_FLEET, patience=0.0)
        super().__init__(outbox, Clock(), wake)
        self.routing = routing
        self.totals = Totals()  # counts of what was notified since the start
        self._hub_time = hub_time
        self._partition_of: dict[str, str] = {}  # event key -> partition
        self.use_sinks(routing.sinks, self._targets_of)

    # ---- for the partitions

    def commit(self, partition: str, notification: Notification) -> bytes:
        """Queue the deliveries of a partition's notification, and count it; return its record."""
        change = notification.change
        record = record_of(
            change,
            notification.vm,
            exercise=notification.exercise,
            fleet=notification.facts,
        )
        line = record.line()

        # each of its places routes it; each sink gets one delivery for each step
        new: dict[str, Delivery] = {}
        for vm in notification.routed:
            for delivery in deliveries(change, line, self.routing, routable(vm)):
                new[delivery.delivery_id] = delivery

        self._take(partition, change, list(new.values()), last_message(change, line))
        with self._memory_lock:
            self.totals = self.totals.plus(change)
        return line

    def mute(self, partition: str, notification: Notification) -> None:
        """Take a step of which no one is notified: it only withdraws what it makes needless."""
        self._take(partition, notification.change)

    def end_reminders(self, partition: str, event_key: str) -> None:
        """End the reminders and repetitions of an event that has moved to another partition.

        If this instance reads that partition, its deliveries of the event stay.
        """
        with self.opened() as (outbox, now):
            if self._partition_of.get(event_key) == partition:
                outbox.no_longer_affected([event_key], now)

    def _take(
        self,
        partition: str,
        change: Change,
        new: Sequence[Delivery] = (),
        last: Delivery | None = None,
    ) -> None:
        event = change.event
        with self.opened() as (outbox, now):
            self._partition_of[event.key] = partition
            removed = outbox.take(change, new, now, self._hub_time(), last)
        log_left_open((sink, event.event_id) for sink in removed)

    def has_news(self, partition: str) -> bool:
        """Whether a delivery of a partition has come, gone or changed since its last ``part``."""
        with self._memory_lock:
            for _, event_key in self._outbox.rows.changed:
                if self._partition_of.get(event_key) == partition:
                    return True
        return False

    def part(self, partition: str, open_keys: Collection[str]) -> OutboxImage:
        """Return the waiting deliveries of a partition, and what sinks keep of its open events.

        ``open_keys``: the event keys of these events.
        """
        with self.opened() as (outbox, now):
            keys = self._keys(partition)
            image = outbox.rows.image(now, keys)
            waiting_keys = {row.event_key for row in image.rows}
            self._leave(keys - waiting_keys - set(open_keys))
            self._forget_changes(partition)
            return image

    def _forget_changes(self, partition: str) -> None:
        """Forget the changes of a partition, and of events that no partition here has any more."""
        changed = self._outbox.rows.changed
        for lane in list(changed):
            _, event_key = lane
            if self._partition_of.get(event_key, partition) == partition:
                changed.discard(lane)

    def adopt(self, partition: str, image: OutboxImage, passed: float) -> None:
        """Take over the deliveries of a snapshot that was taken ``passed`` seconds ago."""
        with self.opened() as (outbox, now):
            for row in image.rows:
                self._partition_of[row.event_key] = partition
            for (_, event_key), _ in image.threads:
                self._partition_of[event_key] = partition
            outbox.restore(image, now, passed)
            outbox.redirect(now)  # the previous owner may have had other sinks

    def leave(self, partition: str) -> None:
        """Send nothing more of this partition: another instance has it."""
        with self._memory_lock:
            self._leave(self._keys(partition))

    def _targets_of(self, row: Delivery) -> Targets:
        record = Record.read(row.record)
        place: dict[str, Any] = {name: getattr(record, name) or "" for name in PLACE}
        return targets_of(row.record, self.routing, routable(Vm(tags=record.tags, **place)))

    def _keys(self, partition: str) -> set[str]:
        return {key for key, name in self._partition_of.items() if name == partition}

    def _leave(self, keys: Collection[str]) -> None:
        for key in keys:
            del self._partition_of[key]
        self._outbox.leave(keys)
