"""``OutboxRows``: the deliveries in an outbox, their counts, and which of them may be sent next. Pure.

For each sink it is always true that accepted = delivered + expired + withdrawn + overflowed + dropped (``Ledger``) +
the pending and dead rows.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.delivery import EXPIRING_KINDS, Delivery, DeliveryState, Lane
from notbefore.core.routing import SEVERITIES

ROW_BYTES: Final = 600  # of a delivery without its record and error text
LATENCY_BOUNDS: Final = (0.1, 1.0, 5.0, 30.0, 300.0, 3_600.0)  # seconds; a stored ``Latency`` must fit them

Latency = tuple[tuple[int, ...], float]  # counts by LATENCY_BOUNDS, one more beyond; the sum in seconds
Urgency = tuple[bool, int, bool, float, int]  # the smallest is the most urgent
K = TypeVar("K", bound=str | tuple[str, ...])


class Schedule(Generic[K]):
    """Keys that become ready at a time, each with an urgency. A new ``put`` replaces the earlier one of its key."""

    def __init__(self) -> None:
        self._later: list[tuple[float, Urgency, K]] = []  # sorted, and so is ``_ready``
        self._ready: list[tuple[Urgency, float, K]] = []
        self._places: dict[K, tuple[list[Any], Any]] = {}  # key -> the list that contains it, and its entry there

    def put(self, key: K, time: float | None, urgency: Urgency = (False, 0, False, 0.0, 0)) -> None:
        """Make a key ready from this time on; ``None``: never."""
        self.drop(key)
        if time is not None:
            self._add(key, self._later, (time, urgency, key))

    def drop(self, key: K) -> None:
        """Remove a key, if it is there."""
        if key in self._places:
            queue, entry = self._places.pop(key)
            del queue[bisect_left(queue, entry)]

    def pop(self, now: float) -> K | None:
        """Remove and return the most urgent ready key; ``None``: no key is ready."""
        while self._later and self._later[0][0] <= now:
            time, urgency, key = self._later.pop(0)
            self._add(key, self._ready, (urgency, time, key))
        if not self._ready:
            return None
        found = self._ready[0][2]
        self.drop(found)
        return found

    def first(self) -> float:
        """Return when the next key becomes ready, or the time at which it did; infinite without a key."""
        if self._ready:
            return self._ready[0][1]
        return self._later[0][0] if self._later else math.inf

    def _add(self, key: K, queue: list[Any], entry: Any) -> None:
        insort(queue, entry)
        self._places[key] = queue, entry


class Ledger(Struct, frozen=True):
    """The counts of deliveries by sink.

    ``accepted``: added to the outbox. ``failed``: an attempt that is made again. ``dead``: not tried again, and kept.
    ``expired``: too late, and never delivered. ``withdrawn``: no longer needed, such as an untried reminder of a
    canceled event; or moved, to another sink or to the fleet instance that has the partition now.
    ``overflowed``: removed from a full outbox. ``dropped``: removed by an operator.
    """

    seq: int = 0
    counts: dict[tuple[str, str], int] = {}  # (sink, result)
    latency: dict[str, Latency] = {}  # by sink


class OutboxImage(Struct, frozen=True):
    """An outbox, or a part of one, as it is stored. ``clock``: the time on the outbox's clock at that moment."""

    clock: float = 0.0
    rows: tuple[Delivery, ...] = ()
    threads: tuple[tuple[Lane, str], ...] = ()
    ledger: Ledger = Ledger()


class OutboxRows:
    """The deliveries in an outbox, the threads of their events, the counts, and the changes that are not on disk yet.

    ``patience``: seconds that a delivery waits for the disk at most; 0 if the outbox is not written to a disk.
    """

    def __init__(self, patience: float) -> None:
        self.by_id: dict[str, Delivery] = {}  # in the order of insertion
        self.ledger = Ledger()
        self.time_known = True  # while False nothing expires, and no reminder is due: see ``Outbox.advance``
        self.size = 0  # bytes
        self.threads: dict[Lane, str] = {}  # texts that sinks get back: see ``SendResult.thread``
        self.given: set[str] = set()  # the ids that a courier has
        self.paused: dict[str, float] = {}  # sink -> the end of the pause that its receiver asked for
        self.expiries = Schedule[str]()
        self.fallbacks = Schedule[str]()
        self.changed: set[Lane] = set()  # since ``take``
        self._patience = patience
        self._waits: dict[Lane, float] = {}  # lane that waits for the disk -> its deadline
        self._queues: defaultdict[str, Schedule[Lane]] = defaultdict(Schedule)  # by sink
        self._of_event: dict[str, dict[str, None]] = {}  # event key -> the ids of its deliveries

    # ---- for readers

    def chosen(self, state: DeliveryState | None = None, sink: str | None = None) -> list[Delivery]:
        """Return the deliveries, oldest first; only those of a state or a sink, if given."""
        return [row for row in self.by_id.values() if state in (None, row.state) and sink in (None, row.sink)]

    def of_event(self, event_key: str, sink: str | None = None) -> list[Delivery]:
        """Return the deliveries of an event in their order; only those of a sink, if given."""
        found = sorted((self.by_id[one] for one in self._of_event.get(event_key, ())), key=lambda row: row.seq)
        return found if sink is None else [row for row in found if row.sink == sink]

    @property
    def under_way(self) -> list[Delivery]:
        """The deliveries that a courier has."""
        return [self.by_id[one] for one in sorted(self.given)]

    def image(self, now: float, event_keys: Collection[str]) -> OutboxImage:
        """Return the deliveries and threads of these events, without the counts."""
        rows = tuple(row for key in event_keys for row in self.of_event(key))
        return OutboxImage(now, rows, tuple((lane, one) for lane, one in self.threads.items() if lane[1] in event_keys))

    # ---- what its owner writes to the disk

    def take(self, now: float) -> OutboxImage:
        """Return all that is to be on disk; from now on, nothing has changed."""
        self.changed = set()
        return OutboxImage(now, tuple(self.by_id.values()), tuple(self.threads.items()), self.ledger)

    def written(self) -> bool:
        """Note that what was taken last is on disk; return whether a delivery waited for that."""
        waited = [lane for lane in self._waits if lane not in self.changed]
        for lane in waited:
            del self._waits[lane]
        next_ones = [self._line_up(lane) for lane in waited]
        return any(next_ones)

    def hold(self, lane: Lane, now: float) -> bool:
        """Let the deliveries of a lane wait until its present changes are on disk; return whether they wait."""
        if self._patience > 0:
            self._waits[lane] = now + self._patience
            self.changed.add(lane)
        return self._patience > 0

    # ---- changes

    def put(self, row: Delivery) -> None:
        """Add a delivery, or replace the one with its id."""
        before = self.by_id.get(row.delivery_id)
        self.size += _size(row) - (_size(before) if before is not None else 0)
        self.by_id[row.delivery_id] = row
        self._of_event.setdefault(row.event_key, {})[row.delivery_id] = None
        self.changed.add(row.lane)
        self.expiries.put(row.delivery_id, row.expires)
        self.fallbacks.put(row.delivery_id, row.fallback_at)
        self._line_up(row.lane)

    def remove(self, row: Delivery, result: str | None = None) -> None:
        """Remove a delivery, and count its result; a repetition is not counted again."""
        one = row.delivery_id
        self.size -= _size(self.by_id.pop(one))
        ids = self._of_event[row.event_key]
        del ids[one]
        if not ids:
            del self._of_event[row.event_key]
        self.given.discard(one)
        self.expiries.drop(one)
        self.fallbacks.drop(one)
        self.changed.add(row.lane)
        if result is not None and row.state != "repeating":
            self.count(row.sink, result)
        self._line_up(row.lane)

    def remember_thread(self, lane: Lane, thread: str | None) -> None:
        """Store the thread of a lane; ``None``: forget it."""
        self.threads.pop(lane, None)
        if thread is not None:
            self.threads[lane] = thread
        self.changed.add(lane)

    def count(self, sink: str, result: str) -> None:
        """Count one more of this result: see ``Ledger``."""
        counts, key = self.ledger.counts, (sink, result)
        self.ledger = replace(self.ledger, counts={**counts, key: counts.get(key, 0) + 1})

    # ---- which of them may be sent

    def pop(self, sink: str, now: float) -> Delivery | None:
        """Return the next delivery to a sink; ``None``: none may be sent now."""
        lane = self._queues[sink].pop(now) if now >= self.paused.get(sink, now) else None
        found = self._next_of(lane) if lane is not None else None
        return found[2] if found is not None else None

    def beginning(self, sink: str, now: float) -> int:
        """Return how many deliveries to a sink begin once that is on disk."""
        held = [lane for lane, until in self._waits.items() if lane[0] == sink and until > now]
        rows = [row for name, event_key in held for row in self.of_event(event_key, name)]
        return sum(row.begun and row.delivery_id not in self.given for row in rows)

    def next_due(self) -> float:
        """Return the time at which a courier is needed next; infinite if nothing waits."""
        times = [max(queue.first(), self.paused.get(sink, -math.inf)) for sink, queue in self._queues.items()]
        return min([*times, self.fallbacks.first()])

    def _line_up(self, lane: Lane) -> bool:
        """Schedule the next delivery of a lane; return whether there is one."""
        found = self._next_of(lane)
        if found is None:
            self._queues[lane[0]].drop(lane)
            return False
        self._queues[lane[0]].put(lane, found[0], found[1])
        return True

    def _next_of(self, lane: Lane) -> tuple[float, Urgency, Delivery] | None:
        """Return the next delivery of a lane after its time; ``None``: there is none, or a courier still has one.

        Reminders wait for earlier messages; no message waits for a reminder.
        """
        found: list[tuple[float, Urgency, Delivery]] = []
        queued = False
        for row in self.of_event(lane[1], lane[0]):
            if row.delivery_id in self.given:
                return None
            if not queued and row.state != "dead" and (self.time_known or not row.is_reminder):
                found.append((max(row.due, self._waits.get(lane, row.due)), _urgency(row), row))
            queued = queued or row.queued
        return min(found, key=lambda one: one[:2], default=None)


def _size(row: Delivery) -> int:
    """Return about how many bytes it takes."""
    return ROW_BYTES + len(row.record) + len(row.error)


def _urgency(row: Delivery) -> Urgency:
    """Order by severity, then messages about coming events first, then by NotBefore, then by age; begun ones first."""
    return not row.begun, SEVERITIES.index(row.severity), row.kind not in EXPIRING_KINDS, row.not_before, row.seq
