"""``OutboxRows``: the deliveries in an outbox, their counts, and which may be sent next. Pure.

For each sink it is always true that accepted = delivered + expired + withdrawn + overflowed +
dropped (``Ledger``) + the pending and dead rows.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.delivery import EXPIRING_KINDS, Delivery, DeliveryState, Lane
from notbefore.core.event_types import SEVERITIES

ROW_BYTES: Final = 600  # of a delivery without its record and error text

# seconds; a stored ``Latency`` must fit them
LATENCY_BOUNDS: Final = (0.1, 1.0, 5.0, 30.0, 300.0, 3_600.0)

Latency = tuple[tuple[int, ...], float]
"""Counts by LATENCY_BOUNDS, with one more for longer ones; and the sum in seconds."""

Urgency = tuple[bool, int, bool, float, int]
"""The smallest is the most urgent: see ``_urgency``."""

K = TypeVar("K", bound=str | tuple[str, ...])


class Schedule(Generic[K]):
    """Keys that become ready at a time, each with an urgency.

    A new ``put`` replaces the earlier one of its key.
    """

    def __init__(self) -> None:
        self._later: list[tuple[float, Urgency, K]] = []  # sorted, and so is ``_ready``
        self._ready: list[tuple[Urgency, float, K]] = []
        self._places: dict[K, tuple[list[Any], Any]] = {}  # key -> its list, and its entry there

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
        _, _, most_urgent = self._ready[0]
        self.drop(most_urgent)
        return most_urgent

    def first(self) -> float:
        """Return when the next key becomes ready, or did; infinite without a key."""
        if self._ready:
            _, ready_since, _ = self._ready[0]
            return ready_since
        if self._later:
            ready_from, _, _ = self._later[0]
            return ready_from
        return math.inf

    def _add(self, key: K, queue: list[Any], entry: Any) -> None:
        insort(queue, entry)
        self._places[key] = (queue, entry)


class Ledger(Struct, frozen=True):
    """The counts of deliveries by sink.

    ``accepted``: added to the outbox. ``failed``: an attempt that is made again. ``dead``: not
    tried again, and kept. ``expired``: too late, and never delivered. ``withdrawn``: no longer
    needed, such as an untried reminder of a canceled event; or moved, to another sink or to the
    fleet instance that has the partition now. ``overflowed``: removed from a full outbox.
    ``dropped``: removed by an operator.
    """

    seq: int = 0
    counts: dict[tuple[str, str], int] = {}  # (sink, result)
    latency: dict[str, Latency] = {}  # by sink


class OutboxImage(Struct, frozen=True):
    """An outbox, or a part of one, as it is stored.

    ``clock``: the time on the outbox's clock at that moment.
    """

    clock: float = 0.0
    rows: tuple[Delivery, ...] = ()
    threads: tuple[tuple[Lane, str], ...] = ()
    ledger: Ledger = Ledger()


class LaneRows:
    """The deliveries of one lane.

    Both parts are in the order of ``seq``, so that a long lane is not sorted for each delivery.
    """

    def __init__(self) -> None:
        self.queued: dict[str, Delivery] = {}  # by id: later deliveries wait for these
        self.others: dict[str, Delivery] = {}  # reminders, repetitions and dead letters

    def __len__(self) -> int:
        return len(self.queued) + len(self.others)

    def put(self, row: Delivery) -> None:
        """Add a delivery, or replace the one with its id."""
        if row.queued:
            self.others.pop(row.delivery_id, None)
            _put_in_order(self.queued, row)
        else:
            self.queued.pop(row.delivery_id, None)
            _put_in_order(self.others, row)

    def remove(self, row: Delivery) -> None:
        """Remove a delivery."""
        self.queued.pop(row.delivery_id, None)
        self.others.pop(row.delivery_id, None)

    def in_order(self) -> list[Delivery]:
        """Return all deliveries, oldest first."""
        return sorted([*self.queued.values(), *self.others.values()], key=_seq)

    def candidates(self) -> list[Delivery]:
        """Return the deliveries that wait for no other one.

        Those are the first queued one, and the reminders and repetitions before it. No message
        waits for a reminder.
        """
        first_queued = next(iter(self.queued.values()), None)
        candidates: list[Delivery] = []
        for row in self.others.values():
            if first_queued is not None and row.seq > first_queued.seq:
                break
            if row.state != "dead":
                candidates.append(row)
        if first_queued is not None:
            candidates.append(first_queued)
        return candidates


class Turn(NamedTuple):
    """The next delivery of a lane, and when it is due."""

    time: float
    urgency: Urgency
    row: Delivery


class OutboxRows:
    """The deliveries in an outbox, the threads of their events, the counts, and unwritten changes.

    ``patience``: seconds that a delivery waits for the disk at most; 0 if the outbox is not written
    to a disk.
    """

    def __init__(self, patience: float) -> None:
        self.by_id: dict[str, Delivery] = {}  # in the order of insertion
        self.ledger = Ledger()
        self.time_known = True  # while False nothing expires, and no reminder is due
        self.size = 0  # bytes
        self.threads: dict[Lane, str] = {}  # texts for sinks: see ``SendResult.thread``
        self.paused: dict[str, float] = {}  # sink -> the end of the pause that its receiver wants
        self.expiries = Schedule[str]()
        self.fallbacks = Schedule[str]()
        self.changed: set[Lane] = set()  # since ``take``
        self._patience = patience
        self._waits: dict[Lane, float] = {}  # lane that waits for the disk -> its deadline
        self._given: dict[Lane, str] = {}  # lane -> the id of its delivery that a courier has
        self._queues: defaultdict[str, Schedule[Lane]] = defaultdict(Schedule)  # by sink
        self._events: dict[str, dict[str, LaneRows]] = {}  # event key -> sink -> its deliveries

    # ---- for readers

    def chosen(self, state: DeliveryState | None = None, sink: str | None = None) -> list[Delivery]:
        """Return the deliveries, oldest first; only those of a state or a sink, if given."""
        rows = list(self.by_id.values())
        if state is not None:
            rows = [row for row in rows if row.state == state]
        if sink is not None:
            rows = [row for row in rows if row.sink == sink]
        return rows

    def of_event(self, event_key: str) -> list[Delivery]:
        """Return the deliveries of an event in their order."""
        rows: list[Delivery] = []
        for lane_rows in self._events.get(event_key, {}).values():
            rows += lane_rows.in_order()
        rows.sort(key=_seq)
        return rows

    def lane_rows(self, lane: Lane) -> LaneRows:
        """Return the deliveries of a lane, which are not to be changed."""
        sink, event_key = lane
        return self._events.get(event_key, {}).get(sink) or LaneRows()

    def image(self, now: float, event_keys: Collection[str]) -> OutboxImage:
        """Return the deliveries and threads of these events, without the counts."""
        rows: list[Delivery] = []
        for event_key in event_keys:
            rows += self.of_event(event_key)

        threads: list[tuple[Lane, str]] = []
        for lane, thread in self.threads.items():
            _, event_key = lane
            if event_key in event_keys:
                threads.append((lane, thread))
        return OutboxImage(now, tuple(rows), tuple(threads))

    # ---- what its owner writes to the disk

    def take(self, now: float) -> OutboxImage:
        """Return all that is to be on disk; from now on, nothing has changed."""
        self.changed = set()
        rows = tuple(self.by_id.values())
        threads = tuple(self.threads.items())
        return OutboxImage(now, rows, threads, self.ledger)

    def written(self) -> bool:
        """Note that what was taken last is on disk; return whether a delivery waited for that."""
        written_lanes = [lane for lane in self._waits if lane not in self.changed]
        has_waited = False
        for lane in written_lanes:
            del self._waits[lane]
            if self._line_up(lane):
                has_waited = True
        return has_waited

    def hold(self, lane: Lane, now: float) -> bool:
        """Let a lane wait until its present changes are on disk; return whether it waits."""
        if self._patience <= 0:
            return False
        self._waits[lane] = now + self._patience
        self.changed.add(lane)
        return True

    # ---- changes

    def put(self, row: Delivery) -> None:
        """Add a delivery, or replace the one with its id."""
        before = self.by_id.get(row.delivery_id)
        if before is not None:
            self.size -= _size(before)
        self.size += _size(row)

        self.by_id[row.delivery_id] = row
        lanes = self._events.setdefault(row.event_key, {})
        lanes.setdefault(row.sink, LaneRows()).put(row)
        self.expiries.put(row.delivery_id, row.expires)
        self.fallbacks.put(row.delivery_id, row.fallback_at)
        self.changed.add(row.lane)
        self._line_up(row.lane)

    def remove(self, row: Delivery, result: str | None = None) -> None:
        """Remove a delivery, and count its result; a repetition is not counted again."""
        stored = self.by_id.pop(row.delivery_id)
        self.size -= _size(stored)
        self._remove_from_lane(row)
        self.take_back(row)
        self.expiries.drop(row.delivery_id)
        self.fallbacks.drop(row.delivery_id)
        self.changed.add(row.lane)
        if result is not None and row.state != "repeating":
            self.count(row.sink, result)
        self._line_up(row.lane)

    def _remove_from_lane(self, row: Delivery) -> None:
        lanes = self._events[row.event_key]
        lane_rows = lanes[row.sink]
        lane_rows.remove(row)
        if not lane_rows:
            del lanes[row.sink]
        if not lanes:
            del self._events[row.event_key]

    def remember_thread(self, lane: Lane, thread: str | None) -> None:
        """Store the thread of a lane; ``None``: forget it."""
        self.threads.pop(lane, None)
        if thread is not None:
            self.threads[lane] = thread
        self.changed.add(lane)

    def count(self, sink: str, result: str) -> None:
        """Count one more of this result: see ``Ledger``."""
        counts = dict(self.ledger.counts)
        counts[sink, result] = counts.get((sink, result), 0) + 1
        self.ledger = replace(self.ledger, counts=counts)

    # ---- the deliveries that a courier has: one of a lane at most

    def give(self, row: Delivery) -> None:
        """Note that a courier has a delivery."""
        self._given[row.lane] = row.delivery_id

    def is_given(self, row: Delivery) -> bool:
        """Whether a courier has a delivery."""
        return self._given.get(row.lane) == row.delivery_id

    def take_back(self, row: Delivery) -> bool:
        """Note that no courier has a delivery any more; return whether one had it."""
        if not self.is_given(row):
            return False
        del self._given[row.lane]
        return True

    @property
    def under_way(self) -> list[Delivery]:
        """The deliveries that a courier has."""
        return [self.by_id[delivery_id] for delivery_id in sorted(self._given.values())]

    # ---- which of them may be sent

    def pause(self, sink: str, until: float, now: float) -> None:
        """Send nothing to a sink until then.

        The pause ends in time for a message about a coming event that would lose its notice.
        """
        self.paused[sink] = until
        lanes = {row.lane for row in self.by_id.values() if row.sink == sink}
        for lane in lanes:
            turn = self._next_turn(lane)
            if turn is not None and turn.row.not_before > now:
                self._shorten_pause(turn)

    def _shorten_pause(self, turn: Turn) -> None:
        """Let the pause of a sink end when this delivery is due, if its notice would be lost."""
        row = turn.row
        pause_ends = self.paused.get(row.sink, -math.inf)
        is_notice = row.kind in EXPIRING_KINDS and row.state == "pending"
        if is_notice and turn.time < row.not_before < pause_ends:
            self.paused[row.sink] = turn.time

    def pop(self, sink: str, now: float) -> Delivery | None:
        """Return the next delivery to a sink; ``None``: none may be sent now."""
        if now < self.paused.get(sink, now):
            return None
        lane = self._queues[sink].pop(now)
        if lane is None:
            return None
        turn = self._next_turn(lane)
        if turn is None:
            return None
        return turn.row

    def beginning(self, sink: str, now: float) -> int:
        """Return how many deliveries to a sink begin as soon as the disk knows that they do."""
        count = 0
        for lane, deadline in self._waits.items():
            lane_sink, _ = lane
            if lane_sink != sink or deadline <= now:
                continue
            for row in self.lane_rows(lane).in_order():
                if row.begun and not self.is_given(row):
                    count += 1
        return count

    def next_due(self) -> float:
        """Return the time at which a courier is needed next; infinite if nothing waits."""
        earliest = self.fallbacks.first()
        for sink, queue in self._queues.items():
            pause_ends = self.paused.get(sink, -math.inf)
            earliest = min(earliest, max(queue.first(), pause_ends))
        return earliest

    def _line_up(self, lane: Lane) -> bool:
        """Schedule the next delivery of a lane; return whether there is one."""
        sink, _ = lane
        turn = self._next_turn(lane)
        if turn is None:
            self._queues[sink].drop(lane)
            return False
        self._shorten_pause(turn)
        self._queues[sink].put(lane, turn.time, turn.urgency)
        return True

    def _next_turn(self, lane: Lane) -> Turn | None:
        """Return the next delivery of a lane; ``None``: there is none, or a courier has one."""
        if lane in self._given:
            return None

        turns: list[Turn] = []
        for row in self.lane_rows(lane).candidates():
            if row.is_reminder and not self.time_known:
                continue
            time = max(row.due, self._waits.get(lane, row.due))
            turns.append(Turn(time, _urgency(row), row))
        return min(turns, key=_order, default=None)


def _put_in_order(rows: dict[str, Delivery], row: Delivery) -> None:
    """Put a delivery after those with a smaller ``seq``."""
    is_present = row.delivery_id in rows
    last = next(reversed(rows.values()), None)
    rows[row.delivery_id] = row
    if is_present or last is None or last.seq <= row.seq:
        return

    # it was moved from another sink, or another part, with its ``seq``
    in_order = sorted(rows.values(), key=_seq)
    rows.clear()
    for delivery in in_order:
        rows[delivery.delivery_id] = delivery


def _seq(row: Delivery) -> int:
    return row.seq


def _order(turn: Turn) -> tuple[float, Urgency]:
    return turn.time, turn.urgency


def _size(row: Delivery) -> int:
    """Return about how many bytes it takes."""
    return ROW_BYTES + len(row.record) + len(row.error)


def _urgency(row: Delivery) -> Urgency:
    """Return the rank of a delivery among those that are due; the smallest is sent first.

    Begun ones come first. Then it is by severity, messages about coming events before others, by
    NotBefore, and by age.
    """
    return (
        not row.begun,
        SEVERITIES.index(row.severity),
        row.kind not in EXPIRING_KINDS,
        row.not_before,
        row.seq,
    )
