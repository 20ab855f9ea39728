"""``OutboxRows``: the deliveries in an outbox, what is counted of them, and which of them may go. Pure.

At any time and for each sink, accepted = delivered + expired + withdrawn + overflowed + dropped + what is pending or
dead (``Ledger``).
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.delivery import EXPIRING_KINDS, Delivery, DeliveryState, Lane
from notbefore.core.routing import SEVERITIES

ROW_BYTES: Final = 600  # of a delivery beside its record and its texts
LATENCY_BOUNDS: Final = (0.1, 1.0, 5.0, 30.0, 300.0, 3_600.0)  # seconds from a change to its acceptance

Latency = tuple[tuple[int, ...], float]  # counts by LATENCY_BOUNDS and beyond; the sum of seconds
Urgency = tuple[int, bool, float, int]  # the smallest is the most urgent
K = TypeVar("K", bound=str | tuple[str, ...])


class Schedule(Generic[K]):
    """Keys, each with a time, and how urgent it is from then on; what was ``put`` last of a key counts."""

    def __init__(self) -> None:
        self._later: list[tuple[float, Urgency, K]] = []  # sorted, as the next one is
        self._ready: list[tuple[Urgency, float, K]] = []
        self._places: dict[K, tuple[list[Any], Any]] = {}  # of each key: the list that it is in, and as what

    def put(self, key: K, time: float | None, urgency: Urgency = (0, False, 0.0, 0)) -> None:
        """From this time on it is ready; ``None``: never."""
        self.drop(key)
        if time is not None:
            self._add(key, self._later, (time, urgency, key))

    def drop(self, key: K) -> None:
        """Forget a key, if it is there."""
        if key in self._places:
            queue, entry = self._places.pop(key)
            del queue[bisect_left(queue, entry)]

    def pop(self, now: float) -> K | None:
        """Take the most urgent key that is ready; ``None``: there is none."""
        while self._later and self._later[0][0] <= now:
            time, urgency, key = self._later.pop(0)
            self._add(key, self._ready, (urgency, time, key))
        if not self._ready:
            return None
        found = self._ready[0][2]
        self.drop(found)
        return found

    def first(self) -> float | None:
        """When a key is ready next, or has been since; ``None``: there is none."""
        if self._ready:
            return self._ready[0][1]
        return self._later[0][0] if self._later else None

    def _add(self, key: K, queue: list[Any], entry: Any) -> None:
        insort(queue, entry)
        self._places[key] = queue, entry


class Ledger(Struct, frozen=True):
    """What is counted of deliveries, by sink.

    ``accepted``: taken into the outbox. ``failed``: an attempt that will be made again. ``dead``: refused for good, and
    kept. ``expired``: too late, and never delivered. ``withdrawn``: not needed any more before its time came, such as
    the reminder of an event that was canceled, or left to the fleet's instance that has the partition now.
    ``overflowed``: pushed out of a full outbox. ``dropped``: taken out by an operator.
    """

    seq: int = 0
    counts: dict[tuple[str, str], int] = {}  # (sink, result)
    latency: dict[str, Latency] = {}  # by sink


class OutboxChanges(NamedTuple):
    """What to write down. ``step``: what ``written`` is given once it is written."""

    step: int
    rows: dict[str, Delivery | None]  # by delivery id; ``None``: it is gone
    threads: dict[Lane, str | None]
    ledger: Ledger


class OutboxImage(Struct, frozen=True):
    """An outbox, or a part of one, as it is written down: on a clock that shows ``clock`` at that moment."""

    clock: float = 0.0
    rows: tuple[Delivery, ...] = ()
    threads: tuple[tuple[Lane, str], ...] = ()
    ledger: Ledger = Ledger()


class OutboxRows:
    """The deliveries in an outbox, what sinks said of their events, what was counted, and what is not written yet.

    ``patience``: seconds for which a delivery waits for the disk; 0 where nobody writes.
    """

    def __init__(self, patience: float) -> None:
        self.by_id: dict[str, Delivery] = {}  # in their order
        self.ledger = Ledger()
        self.time_known = True  # while False nothing expires, and no reminder is due: see ``Outbox.advance``
        self.size = 0  # bytes
        self.threads: dict[Lane, str] = {}  # what sinks said of the first messages of events
        self.given: set[str] = set()  # the ids that a courier has
        self.paused: dict[str, float] = {}  # sink -> until when its receiver has asked for a pause
        self.expiries = Schedule[str]()
        self.fallbacks = Schedule[str]()
        self.changed: set[str | Lane] = set()  # ids and threads that nobody has taken to write them yet
        self._step = 0  # of the changes that are to be taken next
        self._patience = patience
        self._waits: dict[str | Lane, tuple[int, float]] = {}  # id or lane -> the step it waits for, until when
        self._queues: defaultdict[str, Schedule[Lane]] = defaultdict(Schedule)  # by sink
        self._of_event: dict[str, dict[str, None]] = {}  # event key -> the ids of its deliveries

    # ---- for readers

    def chosen(self, state: DeliveryState | None = None, sink: str | None = None) -> list[Delivery]:
        """What is in the outbox, oldest first; of one state or one sink where these are given."""
        return [row for row in self.by_id.values() if state in (None, row.state) and sink in (None, row.sink)]

    def of_event(self, event_key: str, sink: str | None = None) -> list[Delivery]:
        """Those of an event, and of one sink if that is given, in their order."""
        found = sorted((self.by_id[one] for one in self._of_event.get(event_key, ())), key=lambda row: row.seq)
        return found if sink is None else [row for row in found if row.sink == sink]

    def image(self, now: float, event_keys: Collection[str]) -> OutboxImage:
        """What it holds of these events, without what it has counted."""
        rows = tuple(row for key in event_keys for row in self.of_event(key))
        return OutboxImage(now, rows, tuple((lane, one) for lane, one in self.threads.items() if lane[1] in event_keys))

    # ---- what its owner writes down

    def take_changes(self, *, everything: bool = False) -> OutboxChanges:
        """What changed since the last call, or all that there is."""
        changed, self.changed = self.changed, set()
        self._step += 1
        if everything:
            return OutboxChanges(self._step - 1, {**self.by_id}, {**self.threads}, self.ledger)
        rows = {one: self.by_id.get(one) for one in changed if isinstance(one, str)}
        threads = {lane: self.threads.get(lane) for lane in changed if isinstance(lane, tuple)}
        return OutboxChanges(self._step - 1, rows, threads, self.ledger)

    def written(self, step: int) -> bool:
        """What ``take_changes`` gave up to this step is on disk; returns whether something waited for that."""
        waited = [key for key, (made, _) in self._waits.items() if made <= step]
        for key in waited:
            del self._waits[key]
        next_ones = [self._line_up(key if isinstance(key, tuple) else self.by_id[key].lane) for key in waited]
        return any(next_ones)

    def hold(self, key: str | Lane, now: float) -> None:
        """Let a delivery, or what comes next in a lane, wait until what changes now is written."""
        if self._patience > 0:
            self._waits[key] = (self._step, now + self._patience)

    # ---- changes

    def put(self, row: Delivery) -> None:
        """Add a delivery, or replace it by what it has become."""
        before = self.by_id.get(row.delivery_id)
        self.size += _size(row) - (_size(before) if before is not None else 0)
        self.by_id[row.delivery_id] = row
        self._of_event.setdefault(row.event_key, {})[row.delivery_id] = None
        self.changed.add(row.delivery_id)
        self.expiries.put(row.delivery_id, row.expires)
        self.fallbacks.put(row.delivery_id, row.fallback_at)
        self._line_up(row.lane)

    def remove(self, row: Delivery, result: str | None = None) -> None:
        """Take a delivery out, and count what became of it; of one that is repeated that was counted before."""
        one = row.delivery_id
        self.size -= _size(self.by_id.pop(one))
        ids = self._of_event[row.event_key]
        del ids[one]
        if not ids:
            del self._of_event[row.event_key]
        self.given.discard(one)
        self._waits.pop(one, None)
        self.expiries.drop(one)
        self.fallbacks.drop(one)
        self.changed.add(one)
        if result is not None and row.state != "repeating":
            self.count(row.sink, result)
        self._line_up(row.lane)

    def remember_thread(self, lane: Lane, thread: str | None) -> None:
        """``None``: forget it."""
        self.threads.pop(lane, None)
        if thread is not None:
            self.threads[lane] = thread
        self.changed.add(lane)

    def count(self, sink: str, result: str) -> None:
        """One more: see ``Ledger``."""
        counts, key = self.ledger.counts, (sink, result)
        self.ledger = replace(self.ledger, counts={**counts, key: counts.get(key, 0) + 1})

    # ---- which of them may go

    def pop(self, sink: str, now: float) -> Delivery | None:
        """What a sink is to be sent first; ``None``: nothing may go now."""
        lane = self._queues[sink].pop(now) if now >= self.paused.get(sink, now) else None
        found = self._next_of(lane) if lane is not None else None
        return found[1] if found is not None else None

    def next_due(self) -> float | None:
        """When a courier is needed next; ``None``: nothing waits."""
        queues = self._queues.items()
        times = [max(at, self.paused.get(sink, at)) for sink, queue in queues if (at := queue.first()) is not None]
        if (fallback := self.fallbacks.first()) is not None:
            times.append(fallback)
        return min(times, default=None)

    def _line_up(self, lane: Lane) -> bool:
        """Note when the next delivery of a lane may go; returns whether there is one."""
        found = self._next_of(lane)
        if found is None:
            self._queues[lane[0]].drop(lane)
            return False
        self._queues[lane[0]].put(lane, found[0], _urgency(found[1]))
        return True

    def _next_of(self, lane: Lane) -> tuple[float, Delivery] | None:
        """What may go first of a lane, and when; ``None``: nothing before a courier has said what came of one.

        Its reminders do not wait for what comes after them.
        """
        found: list[tuple[float, Urgency, Delivery]] = []
        queued = False
        for row in self.of_event(lane[1], lane[0]):
            if row.delivery_id in self.given:
                return None
            if not queued and row.state != "dead" and (self.time_known or not row.is_reminder):
                waits = [self._waits[key][1] for key in (row.delivery_id, lane) if key in self._waits]
                found.append((max([row.due, *waits]), _urgency(row), row))
            queued = queued or row.queued
        if not found:
            return None
        at, _, first = min(found, key=lambda one: one[:2])
        return at, first


def _size(row: Delivery) -> int:
    """About how many bytes it takes."""
    return ROW_BYTES + len(row.record) + len(row.error)


def _urgency(row: Delivery) -> Urgency:
    """What is sent first: the most severe, of these what can be prepared for, the next to begin, and the oldest."""
    return SEVERITIES.index(row.severity), row.kind not in EXPIRING_KINDS, row.not_before, row.seq
