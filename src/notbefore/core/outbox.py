"""``Outbox``: the deliveries that wait, and the rules by which they go. Pure: the clock and the dice are arguments.

Who owns an outbox gives it changes (``take``) and what a courier says (``exchange``), and writes down what changed
(``take_changes``, then ``written``). A courier is given deliveries and owns nothing: what it had when it ended is due
again (``release``). Within an event and a sink the order is kept: a delivery waits for the one before it, and until the
result of that one is written, or for ``WRITE_PATIENCE``.

Times are seconds on a clock that nobody sets. At any time and for each sink, accepted = delivered + expired + withdrawn
+ overflowed + dropped + yielded + the rows that are pending or dead (``core.delivery.RESULTS``).
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import APPROVAL_KINDS, Change
from notbefore.core.delivery import EXPIRING_KINDS, FALLBACK, PATIENCE, Delivery, MessageKind, Terms, delivery_id
from notbefore.core.duration import back_off
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.record import Record
from notbefore.core.routing import SEVERITIES, Severity

FIRST_PAUSE: Final = 1.0  # seconds: the ceiling of the first pause after a failed attempt
LONGEST_PAUSE: Final = (
    300.0  # seconds: the ceiling of all later ones; a fleet that was cut off does not come back at once
)
LONGEST_ASKED: Final = 3600.0  # seconds: what a Retry-After may ask for at most
WRITE_PATIENCE: Final = 1.0  # seconds for which a delivery waits until what it depends on is written
DEAD_SECONDS: Final = 30 * 86_400.0  # how long a dead letter is kept
REPEAT_SECONDS: Final = 400 * 86_400.0  # how long a delivery is repeated at most, when its event never ends
FAILED_REPEAT_SECONDS: Final = 60.0  # after which a repetition is tried again that the receiver refused
REPORT_EVERY: Final = 3600.0  # seconds between two reports that one sink refuses messages
BATCH_ROWS: Final = 100  # deliveries of one event that a sink is given at once, where it takes several
ROW_BYTES: Final = 600  # of a row beside its record and its texts
LATENCY_BOUNDS: Final = (0.1, 1.0, 5.0, 30.0, 300.0, 3_600.0)  # seconds from a change to its acceptance
INTERRUPTED: Final = "interrupted: its courier ended while it ran; it is not run again (`rerun: true` would)"

RowState = Literal["pending", "dead", "repeating"]
_Urgency = tuple[int, bool, float, int]
_Timer = tuple[float, str]  # a time, and the id of a row
Lane = tuple[str, str]  # a sink and the key of an event: what is in it goes in order


class Bounds(NamedTuple):
    """What an outbox may hold; beyond it, what is least severe and oldest is pushed out, and counted."""

    rows: int
    size: int  # bytes


OF_AN_AGENT: Final = Bounds(1_000, 2 * 1024 * 1024)
OF_A_FLEET: Final = Bounds(10_000, 32 * 1024 * 1024)


class GivenDelivery(Struct, frozen=True):
    """What a courier is given: all that it needs to send one delivery."""

    delivery_id: str
    event_key: str
    sink: str
    kind: MessageKind
    severity: Severity
    record: bytes  # the change as JSON
    thread: str | None = None  # what the sink said of the first message of this event
    note: str = ""  # why it goes to this sink, where that is not by its route
    ahead: tuple[str, ...] = ()  # the VMs that are to notify before this one
    age: float = 0.0  # seconds since its time came; what is ``ahead`` had so long to notify
    patience: float = 0.0  # seconds for which a refusal that may pass is to be reported as ``failed``
    repetition: bool = False  # it was delivered before, and is sent again while the event lasts
    usual: tuple[float, int] | None = None  # seconds of interruption usual for this type of event, of so many measured


class SendResult(Struct, frozen=True):
    """What came of a given delivery.

    ``accepted`` by the receiver; ``refused`` for good; ``failed``: to be tried again; ``returned``: not tried, it waits
    for another; ``yielded``: another VM that comes before this one notifies.
    """

    delivery_id: str
    outcome: Literal["accepted", "refused", "failed", "returned", "yielded"]
    error: str = ""
    retry_after: float | None = None  # seconds, asked for by the receiver: nothing is sent to this sink before
    thread: str | None = None  # what the sink is given again with later deliveries of this event
    repeat: float | None = None  # seconds after which it is to be sent again while the event lasts
    template_failed: bool = False  # the user's template failed, and the built-in text was sent


class Row(Struct, frozen=True):
    """One delivery in the outbox."""

    delivery: Delivery
    since: float  # when it was, or will be, worth sending first
    due: float  # not to be sent before
    expires: float  # not to be sent after
    seq: int = 0  # the order in which they came
    patient_until: float = 0.0  # until when a refusal that may pass is tried again
    fallback_at: float | None = None  # when it goes to the sinks of its fallback as well
    attempts: int = 0  # that have failed
    state: RowState = "pending"
    error: str = ""  # why the last attempt failed
    begun: bool = False  # it runs once, and may have been given to a courier
    withdrawn: bool = False  # not needed any more; a courier has it
    final: bool = False  # its event is over: it is not repeated

    @property
    def id(self) -> str:
        """The id of the delivery."""
        return self.delivery.delivery_id

    @property
    def lane(self) -> Lane:
        """In which order it goes."""
        return self.delivery.sink, self.delivery.event_key

    @property
    def queued(self) -> bool:
        """Later ones of its lane wait for it. Nothing waits for a reminder: it has a time of its own."""
        return self.state == "pending" and self.delivery.kind != "reminder"

    @property
    def waits_for_others(self) -> bool:
        """Its turn comes after that of other VMs."""
        return bool(self.delivery.ahead) and self.attempts == 0

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return ROW_BYTES + len(self.delivery.record) + len(self.error)

    def shifted(self, seconds: float) -> "Row":
        """The same on a clock that is ahead by ``seconds``."""
        return replace(
            self,
            since=self.since + seconds,
            due=self.due + seconds,
            expires=self.expires + seconds,
            patient_until=self.patient_until + seconds,
            fallback_at=None if self.fallback_at is None else self.fallback_at + seconds,
        )


class Ledger(Struct, frozen=True):
    """What is counted, and when a refusing sink was last reported."""

    seq: int = 0
    counts: dict[tuple[str, str], int] = {}  # (sink, result of core.delivery.RESULTS, or FALLBACK)
    latency: dict[str, tuple[tuple[int, ...], float]] = {}  # sink -> counts by LATENCY_BOUNDS and beyond; their sum
    reported: dict[str, float] = {}  # sink -> when people were last notified that it refuses messages


class OutboxChanges(NamedTuple):
    """What to write down. ``step``: what ``Outbox.written`` is given once it is written."""

    step: int
    rows: dict[str, Row | None]  # by delivery id; ``None``: it is gone
    threads: dict[Lane, str | None]
    ledger: Ledger


class OutboxImage(Struct, frozen=True):
    """All of an outbox, as it is written down. Its times are on a clock that shows ``clock`` at that moment."""

    clock: float = 0.0
    rows: tuple[Row, ...] = ()
    threads: tuple[tuple[Lane, str], ...] = ()
    ledger: Ledger = Ledger()


class Waiting(NamedTuple):
    """What waits for a sink, of one severity."""

    rows: int
    oldest: float  # seconds since the first of them was worth sending


class Outbox:
    """For one thread at a time. ``dice`` gives random numbers from 0 to 1.

    ``patience``: seconds for which deliveries wait to be ``written``; 0 where nobody waits for it.
    """

    def __init__(
        self, dice: Callable[[], float], bounds: Bounds = OF_AN_AGENT, patience: float = WRITE_PATIENCE
    ) -> None:
        self.time_known = True  # while False nothing expires, and no reminder is due: see ``advance``
        self._bounds = bounds
        self._dice = dice
        self._patience = patience
        self._rows: dict[str, Row] = {}  # by delivery id, in their order
        self._of_event: dict[str, dict[str, None]] = {}  # event key -> the ids of its rows, in their order
        self._restored = 0  # the last row that was restored
        self._size = 0  # bytes
        self._ledger = Ledger()
        self._threads: dict[Lane, str] = {}  # what sinks said of the first messages of events
        self._given: set[str] = set()  # the ids that a courier has
        self._paused: dict[str, float] = {}  # sink -> until when its receiver asked for a pause
        self._queues: dict[str, _Queue] = {}  # sink -> what may be sent
        self._expiries: list[_Timer] = []  # heaps, whose entries may be outdated
        self._fallbacks: list[_Timer] = []
        self._changed_rows: set[str] = set()
        self._changed_threads: set[Lane] = set()
        self._step = 0  # of the changes that are to be taken next
        self._unwritten: dict[str | Lane, tuple[int, float]] = {}  # row or lane -> its step, until when it waits

    def restore(self, image: OutboxImage, now: float, passed: float = 0.0, *, time_known: bool = True) -> None:
        """Begin with what was written down, ``passed`` seconds later, as far as that is known.

        What may run once and may have been given to a courier is dead: nobody knows how far it came.
        """
        self.time_known, self._restored = time_known, image.ledger.seq
        shift = now - image.clock - passed
        reported = {sink: at + shift for sink, at in image.ledger.reported.items()}
        self._ledger = replace(image.ledger, reported=reported)
        self._threads = dict(image.threads)
        for row in sorted(image.rows, key=lambda row: row.seq):
            self._insert(row.shifted(shift) if shift else row)
        if not shift:  # else their times are to be written on this clock
            self._changed_rows.clear()
        for row in [row for row in self._rows.values() if row.withdrawn]:
            self._remove(row, "expired")
        self._give_up([row for row in self._rows.values() if row.begun and row.state == "pending"], now)

    # ---- what its owner writes down

    @property
    def changed(self) -> bool:
        """There is something that ``take_changes`` has not given."""
        return bool(self._changed_rows or self._changed_threads)

    def take_changes(self) -> OutboxChanges | None:
        """What changed since the last call; ``None``: nothing."""
        if not self.changed:
            return None
        self._step += 1
        changes = OutboxChanges(
            self._step - 1,
            {one: self._rows.get(one) for one in self._changed_rows},
            {lane: self._threads.get(lane) for lane in self._changed_threads},
            self._ledger,
        )
        self._changed_rows, self._changed_threads = set(), set()
        return changes

    def written(self, step: int) -> bool:
        """What ``take_changes`` gave up to this step is on disk; returns whether something waited for that."""
        waited = False
        for key in [key for key, (made, _) in self._unwritten.items() if made <= step]:
            del self._unwritten[key]
            lane = key if isinstance(key, tuple) else self._rows[key].lane
            waited = self._line_up(lane) or waited
        return waited

    def image(self, now: float) -> OutboxImage:
        """All of it."""
        return OutboxImage(now, tuple(self._rows.values()), tuple(self._threads.items()), self._ledger)

    def part(self, event_keys: Collection[str], now: float) -> OutboxImage:
        """What it holds of these events, without what it has counted."""
        rows = tuple(row for key in event_keys for row in self._rows_of(key))
        threads = tuple((lane, thread) for lane, thread in self._threads.items() if lane[1] in event_keys)
        return OutboxImage(now, rows, threads)

    def adopt(self, image: OutboxImage, now: float, passed: float = 0.0) -> None:
        """Go on with a part of another outbox, ``passed`` seconds later; what is there already stays as it is.

        What may run once and may have been given to a courier is dead, as in ``restore``.
        """
        shift = now - image.clock - passed
        for lane, thread in image.threads:
            self._remember_thread(lane, thread)
        new = [row for row in image.rows if row.id not in self._rows and not row.withdrawn]
        for row in sorted(new, key=lambda row: row.seq):
            self._ledger = replace(self._ledger, seq=self._ledger.seq + 1)
            self._count(row.delivery.sink, "accepted")
            self._insert(replace(row.shifted(shift), seq=self._ledger.seq))
        self._give_up([self._rows[row.id] for row in new if row.begun and row.state == "pending"], now)
        self._keep_bounds(now)

    def leave(self, event_keys: Collection[str]) -> None:
        """Leave these events to another outbox, which has them now: nothing of them is sent any more."""
        for row in [row for key in event_keys for row in self._rows_of(key)]:
            self._remove(row, "yielded")
        for lane in [lane for lane in self._threads if lane[1] in event_keys]:
            del self._threads[lane]
            self._changed_threads.add(lane)

    def advance(self, seconds: float) -> None:
        """So much time had passed unseen when this was restored: from now on the time is known."""
        self.time_known = True
        reported = {sink: at - seconds for sink, at in self._ledger.reported.items()}
        self._ledger = replace(self._ledger, reported=reported)
        for row in list(self._rows.values()):
            self._set(row.shifted(-seconds) if row.seq <= self._restored else row)

    # ---- what happens to events

    def take(self, change: Change, record: bytes, made: Sequence[Delivery], now: float, wall: float) -> None:
        """Take a change and its deliveries: what it makes needless is withdrawn.

        ``record``: the change as JSON. ``wall``: Unix seconds of ``now``.
        """
        key, over = change.event.key, change.kind in OUTCOMES
        if over:
            self._end(key, lambda row: row.delivery.expires_with_event)
        elif change.kind == "started":
            self._withdraw_where(key, _is_reminder)
        elif change.not_before_shift:
            self._move_reminders(key, change.not_before_shift, record)
        if change.no_longer_affected:
            self.no_longer_affected(key)
        over = over or change.no_longer_affected
        for one in made:
            self._put(one, now, wall, final=over)
        if over:
            self._follow(made, now, wall)
        self._keep_bounds(now)

    def put(self, made: Iterable[Delivery], now: float, wall: float) -> None:
        """Add deliveries; one whose id is there already is left as it is. ``wall``: Unix seconds of ``now``."""
        for one in made:
            self._put(one, now, wall)
        self._keep_bounds(now)

    def no_longer_affected(self, *event_keys: str) -> None:
        """Withdraw the reminders of events, and end their repetitions: they do not affect this VM any longer."""
        for key in event_keys:
            self._end(key, _is_reminder)

    def _end(self, event_key: str, needless: Callable[[Row], bool]) -> None:
        self._withdraw_where(event_key, needless)
        for row in self._rows_of(event_key):
            if row.state == "repeating":
                self._remove(row)
            elif row.state == "pending":
                self._set(replace(row, final=True))

    def _withdraw_where(self, event_key: str, needless: Callable[[Row], bool]) -> None:
        for row in self._rows_of(event_key):
            if row.state == "pending" and (needless(row) or row.waits_for_others):
                self._withdraw(row)

    def _withdraw(self, row: Row) -> None:
        if row.id in self._given:  # it may be delivered at this moment
            self._set(replace(row, withdrawn=True))
        else:  # where its own time had not come, and nobody tried to send it, nobody missed anything
            needed = row.attempts > 0 or not (_is_reminder(row) or row.waits_for_others)
            self._remove(row, "expired" if needed else "withdrawn")

    def _move_reminders(self, event_key: str, seconds: float, record: bytes) -> None:
        """NotBefore has moved: so do the reminders, also those to sinks whose route sends no message of the move."""
        for row in self._rows_of(event_key):
            if row.state == "pending" and _is_reminder(row):
                moved = replace(row.shifted(seconds), patient_until=row.patient_until)
                self._set(replace(moved, delivery=replace(row.delivery, record=record)))

    def _put(self, one: Delivery, now: float, wall: float, *, final: bool = False) -> None:
        shift, patient = now - wall, one.patient and one.severity == "critical"
        row = Row(
            delivery=one,
            since=one.created + shift,
            due=one.due + shift,
            expires=one.expires + shift,
            patient_until=max(one.not_before, one.created + PATIENCE) + shift if patient else now,
            fallback_at=None if one.fallback_at is None else one.fallback_at + shift,
            final=final,
        )
        self._add(row, now)

    def _add(self, row: Row, now: float, seq: int | None = None) -> None:
        """Accept a row; it replaces what is repeated of the event, its reminders, and what waits for other VMs.

        ``seq``: its place in the order, where it has one; else the last.
        """
        one = row.delivery
        if row.id in self._rows:
            return
        replaces = one.kind not in ("reminder", *APPROVAL_KINDS)
        for other in self._rows_of(one.event_key, one.sink):
            if other.state == "repeating":
                self._remove(other)
            elif replaces and other.state == "pending" and (_is_reminder(other) or other.waits_for_others):
                self._withdraw(other)
        if seq is None:
            self._ledger = replace(self._ledger, seq=self._ledger.seq + 1)
        self._count(one.sink, "accepted")
        self._hold(row.id, now)
        self._insert(replace(row, seq=self._ledger.seq if seq is None else seq))

    def _follow(self, made: Iterable[Delivery], now: float, wall: float) -> None:
        """Send the end of an event also to the sinks of the fallback that were given its beginning.

        A sink was given it where a thread of the event is known, or a message of it is still to be sent there.
        """
        for one in made:
            for name in one.fallback:
                waits = any(row.state == "pending" for row in self._rows_of(one.event_key, name))
                if not waits and (name, one.event_key) not in self._threads:
                    continue
                note = f"an earlier message of this event came here instead of {one.sink}"
                copy = replace(_to(one, name), note=note, due=one.created, **_ALONE)
                self._put(copy, now, wall, final=True)

    def _keep_bounds(self, now: float) -> None:
        """Push out what is too much: repetitions first, then dead letters, then the least severe and oldest."""
        self._expire(now)
        if len(self._rows) <= self._bounds.rows and self._size <= self._bounds.size:
            return
        for row in sorted((row for row in self._rows.values() if row.id not in self._given), key=_worth):
            if len(self._rows) <= self._bounds.rows and self._size <= self._bounds.size:
                break
            self._remove(row, "overflowed" if row.state != "repeating" else None)

    # ---- the courier

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int], now: float) -> list[GivenDelivery]:
        """Take in results, and give what is due, the most severe first; ``room``: how many deliveries a sink can take.

        Of one event a sink is given one delivery at a time, or all that are due where it takes several at once
        (``Delivery.batched``).
        """
        for result in results:
            self._record(result, now)
        self._expire(now)
        self._fall_back(now)
        found: list[GivenDelivery] = []
        for sink, count in room.items():
            if count > 0 and now >= self._paused.get(sink, now):
                found += self._give(sink, count, now)
        return found

    def release(self, now: float) -> list[Row]:
        """The courier has ended: what it had is due again; returns what is dead instead, because it may run once."""
        left = [self._rows[one] for one in sorted(self._given) if one in self._rows]
        self._given.clear()
        dead = self._give_up([row for row in left if row.delivery.once], now)
        for row in left:
            if row.withdrawn:
                self._remove(row, "expired")
            else:
                self._line_up(row.lane)
                self._watch(self._rows[row.id])
        return dead

    def next_due(self, now: float) -> float | None:
        """When a courier is needed next; ``None``: nothing waits."""
        times = [self._next_fallback()]
        for sink, queue in self._queues.items():
            at = queue.next_at(now, lambda one: self._sendable_at(one, now))
            times.append(None if at is None else max(at, self._paused.get(sink, at)))
        return min((time for time in times if time is not None), default=None)

    def _give(self, sink: str, count: int, now: float) -> list[GivenDelivery]:
        found: list[GivenDelivery] = []
        queue = self._queues.get(sink)
        while queue is not None and len(found) < count:
            one = queue.pop(now, lambda one: self._sendable_at(one, now))
            if one is None:
                break
            row = self._rows[one]
            if row.delivery.once and not row.begun:  # written first, and given after it
                self._hold(row.id, now)
                self._set(replace(row, begun=True))
                continue
            for given in self._with_followers(row, now) if row.delivery.batched else [row]:
                self._given.add(given.id)
                found.append(self._opened(given, now))
        return found

    def _hold(self, key: str | Lane, now: float) -> None:
        """Let a row, or what comes next in a lane, wait until what changes now is written."""
        if self._patience > 0:
            self._unwritten[key] = (self._step, now + self._patience)

    def _with_followers(self, first: Row, now: float) -> list[Row]:
        """What a sink that takes several is given with an event's first delivery, up to one that has to wait."""
        found = [first]
        for row in self._rows_of(first.delivery.event_key, first.delivery.sink):
            if first.queued and row.queued and row.seq > first.seq:
                if self._waits_until(row.id, row.due, now) > now or len(found) == BATCH_ROWS:
                    break
                found.append(row)
        return found

    def _opened(self, row: Row, now: float) -> GivenDelivery:
        one = row.delivery
        return GivenDelivery(
            delivery_id=one.delivery_id,
            event_key=one.event_key,
            sink=one.sink,
            kind=one.kind,
            severity=one.severity,
            record=one.record,
            thread=self._threads.get(row.lane),
            note=one.note,
            ahead=one.ahead,
            age=max(0.0, now - row.since),
            patience=max(0.0, row.patient_until - now),
            repetition=row.state == "repeating",
        )

    def _sendable_at(self, delivery_id: str, now: float) -> float | None:
        """When a row may be sent, as far as is known now; ``None``: not before something happens to it or its lane."""
        row = self._rows.get(delivery_id)
        if row is None or row.state == "dead" or (_is_reminder(row) and not self.time_known):
            return None
        for other in self._rows_of(row.delivery.event_key, row.delivery.sink):
            if other.id in self._given or (other.queued and other.seq < row.seq):
                return None
        return self._waits_until(row.lane, self._waits_until(row.id, row.due, now), now)

    def _waits_until(self, key: str | Lane, due: float, now: float) -> float:
        """When what is due may go, with regard to what is not written yet."""
        if key not in self._unwritten:
            return due
        until = self._unwritten[key][1]
        if until <= now:
            del self._unwritten[key]
        return max(due, until)

    def _record(self, result: SendResult, now: float) -> None:
        row = self._rows.get(result.delivery_id)
        given = result.delivery_id in self._given
        self._given.discard(result.delivery_id)
        if row is None or row.state == "dead" or not (given or result.outcome == "accepted"):
            return  # an operator dropped it, a full outbox pushed it out, or its courier was given up
        sink = row.delivery.sink
        self._hold(row.lane, now)
        if result.template_failed:
            self._count(sink, FALLBACK)
        if result.retry_after is not None:
            self._paused[sink] = now + min(result.retry_after, LONGEST_ASKED)
        elif result.outcome == "accepted":
            self._paused.pop(sink, None)
        if result.outcome == "accepted":
            self._record_accepted(row, result, now)
        elif result.outcome == "yielded":
            self._remove(row, "yielded")
        elif row.withdrawn:
            self._remove(row, "expired")
        elif result.outcome == "refused" and row.state != "repeating":
            self._bury(row, result.error, now)
        elif result.outcome == "returned":
            self._set(row)
        else:
            self._record_failed(row, result, now)
        self._line_up(row.lane)

    def _record_accepted(self, row: Row, result: SendResult, now: float) -> None:
        # a sink that names no thread, and got this as another one's fallback, is to get the event's end as well
        thread = "" if result.thread is None and row.delivery.note else result.thread
        if thread is not None:
            self._remember_thread(row.lane, thread)
        if row.state != "repeating":
            self._count(row.delivery.sink, "delivered")
            self._observe(row.delivery.sink, max(0.0, now - row.since))
        others = [other for other in self._rows_of(row.delivery.event_key, row.delivery.sink) if other.id != row.id]
        if result.repeat is None or row.final or row.withdrawn or any(other.queued for other in others):
            self._remove(row)
            return
        for other in others:
            if other.state == "repeating":
                self._remove(other)
        again = replace(row, state="repeating", due=now + result.repeat, expires=now + REPEAT_SECONDS)
        self._set(replace(again, attempts=0, error="", fallback_at=None))

    def _record_failed(self, row: Row, result: SendResult, now: float) -> None:
        """An attempt that is made again; so is a repetition that was refused: the message itself was delivered."""
        self._count(row.delivery.sink, "failed")
        attempts = row.attempts + 1
        pause = back_off(attempts, FIRST_PAUSE, LONGEST_PAUSE) * self._dice()
        if row.state == "repeating":
            pause = FAILED_REPEAT_SECONDS
        if result.retry_after is not None:
            pause = max(pause, min(result.retry_after, LONGEST_ASKED))
        self._set(replace(row, attempts=attempts, due=now + pause, error=result.error, begun=False))

    def _bury(self, row: Row, error: str, now: float) -> Row:
        """It is dead: kept, and not sent again unless an operator asks for it."""
        self._count(row.delivery.sink, "dead")
        # a heartbeat is of no use once the next one is due: it is not kept longer
        expires = row.expires if row.delivery.kind == "heartbeat" else now + DEAD_SECONDS
        fallback_at = None if row.fallback_at is None else min(row.fallback_at, now)
        dead = replace(row, state="dead", error=error, expires=expires, fallback_at=fallback_at, begun=False)
        self._set(dead)
        self._report(dead, now)
        return dead

    def _give_up(self, rows: Iterable[Row], now: float) -> list[Row]:
        return [self._bury(row, INTERRUPTED, now) for row in rows if not row.withdrawn]

    def _report(self, row: Row, now: float) -> None:
        """Notify people through another sink of the same route that a sink refuses messages; once in a while."""
        sink, reported = row.delivery.sink, self._ledger.reported
        recent = {name for name, at in reported.items() if at > now - REPORT_EVERY}
        able = [name for name in row.delivery.others if name not in {*recent, sink}]
        if sink in recent or not able:
            return
        self._ledger = replace(self._ledger, reported={**reported, sink: now})
        report: MessageKind = "sink_failed"
        notice = replace(
            row.delivery,
            delivery_id=delivery_id(row.id, able[0], report),
            event_key=f"sink {sink}",
            sink=able[0],
            kind=report,
            expires_with_event=False,
            note=f"sink {sink} refused a message: {row.error}",
            **_ALONE,
        )
        self._add(Row(notice, since=now, due=now, expires=now + Terms().expire_after, patient_until=now), now)

    # ---- time

    def _expire(self, now: float) -> None:
        while self.time_known and self._expiries and self._expiries[0][0] <= now:
            at, one = heapq.heappop(self._expiries)
            row = self._rows.get(one)
            if row is not None and row.expires == at and one not in self._given:
                self._remove(row, None if row.state == "repeating" else "expired")

    def _fall_back(self, now: float) -> None:
        """Add what is dead, or has waited for too long, to the sinks of its fallback as well; each only once."""
        while (at := self._next_fallback()) is not None and at <= now:
            row = self._rows[heapq.heappop(self._fallbacks)[1]]
            one, waited = row.delivery, max(0.0, now - row.since)
            why = (
                f"{one.sink} refused it"
                if row.state == "dead"
                else f"{one.sink} has not accepted it within {waited:.0f} s"
            )
            for name in one.fallback:
                copy = replace(_to(one, name), note=f"{why}: {row.error}" if row.error else why, **_ALONE)
                self._add(_anew(row, copy, due=now, expires=now + Terms().expire_after), now)
            self._set(replace(row, fallback_at=None))

    def _next_fallback(self) -> float | None:
        while self._fallbacks:
            at, one = self._fallbacks[0]
            row = self._rows.get(one)
            if row is not None and row.fallback_at == at and not row.withdrawn:
                return at
            heapq.heappop(self._fallbacks)
        return None

    # ---- what operators and readers ask

    def retry(self, ids: Collection[str], now: float, expire_after: Mapping[str, float]) -> int:
        """Make deliveries due now, as if never tried; returns how many. What a courier has is left alone.

        ``expire_after``: by sink, in seconds, how long they are kept from now on.
        """
        found = [self._rows[one] for one in ids if one in self._rows and one not in self._given]
        for row in found:
            sink = row.delivery.sink
            expires = now + expire_after.get(sink, Terms().expire_after)
            if row.delivery.kind == "heartbeat":
                expires = row.expires
            elif row.state != "dead" or sink not in expire_after:
                expires = max(expires, row.expires)
            state: RowState = "repeating" if row.state == "repeating" else "pending"
            self._set(replace(row, due=now, attempts=0, state=state, expires=expires, begun=False))
            self._line_up(row.lane)
        return len(found)

    def drop(self, ids: Collection[str]) -> int:
        """Delete deliveries, and count them as dropped; returns how many. What a courier has is left alone."""
        found = [self._rows[one] for one in ids if one in self._rows and one not in self._given]
        for row in found:
            self._remove(row, None if row.state == "repeating" else "dropped")
        return len(found)

    def redirect(self, sinks: Collection[str], targets: Callable[[Row], Sequence[str]], now: float) -> list[Row]:
        """After a sink was removed or renamed: what waits for it goes to those that ``targets`` names now, or is dead.

        Returns the rows that left their sink.
        """
        left = [
            row
            for row in self._rows.values()
            if row.delivery.sink not in sinks and row.state != "dead" and row.id not in self._given
        ]
        for row in left:
            if row.state == "repeating":
                self._remove(row)
                continue
            names = [name for name in targets(row) if name in sinks and name not in row.delivery.others]
            if not names:
                self._bury(row, f"no sink of the name {row.delivery.sink} is configured", now)
                continue
            self._remove(row, "withdrawn")
            for name in names:
                copy = _to(row.delivery, name)
                self._add(_anew(row, copy, due=row.due, expires=row.expires, fallback_at=row.fallback_at), now, row.seq)
        return left

    def rows(self, state: RowState | None = None, sink: str | None = None) -> Iterator[Row]:
        """What is in the outbox, oldest first; of one state or one sink where these are given."""
        for row in self._rows.values():
            if (state is None or row.state == state) and (sink is None or row.delivery.sink == sink):
                yield row

    def get(self, delivery_id: str) -> Row | None:
        """The row of this id; ``None``: it is gone."""
        return self._rows.get(delivery_id)

    def find(self, prefix: str) -> list[Row]:
        """The rows whose id begins with ``prefix``."""
        return [row for row in self._rows.values() if row.id.startswith(prefix)]

    def waiting(self, now: float) -> dict[tuple[str, Severity], Waiting]:
        """What waits, by sink and severity, without what waits for other VMs to notify."""
        found: dict[tuple[str, Severity], Waiting] = {}
        for row in self._rows.values():
            if row.state == "pending" and not row.waits_for_others:
                key = row.delivery.sink, row.delivery.severity
                rows, oldest = found.get(key, Waiting(0, 0.0))
                found[key] = Waiting(rows + 1, max(oldest, now - row.since))
        return found

    @property
    def ledger(self) -> Ledger:
        """What was counted."""
        return self._ledger

    # ---- rows and their indexes

    def _rows_of(self, event_key: str, sink: str | None = None) -> list[Row]:
        """The rows of an event, and of one sink if that is given, in their order."""
        found = [self._rows[one] for one in self._of_event.get(event_key, ())]
        return found if sink is None else [row for row in found if row.delivery.sink == sink]

    def _insert(self, row: Row) -> None:
        self._rows[row.id] = row
        self._of_event.setdefault(row.delivery.event_key, {})[row.id] = None
        self._size += row.size
        self._changed_rows.add(row.id)
        self._watch(row)
        self._line_up(row.lane)

    def _set(self, row: Row) -> None:
        """Replace a row by what it has become."""
        self._size += row.size - self._rows[row.id].size
        self._rows[row.id] = row
        self._changed_rows.add(row.id)
        self._watch(row)
        self._line_up(row.lane)

    def _remove(self, row: Row, result: str | None = None) -> None:
        del self._rows[row.id]
        ids = self._of_event[row.delivery.event_key]
        del ids[row.id]
        if not ids:
            del self._of_event[row.delivery.event_key]
        self._size -= row.size
        self._given.discard(row.id)
        self._unwritten.pop(row.id, None)
        self._changed_rows.add(row.id)
        if result is not None:
            self._count(row.delivery.sink, result)
        self._line_up(row.lane)

    def _watch(self, row: Row) -> None:
        """Note when it expires, and when it goes to its fallback."""
        most, rows = 4 * len(self._rows) + 64, self._rows.values()
        _push(self._expiries, (row.expires, row.id), ((one.expires, one.id) for one in rows), most)
        if row.fallback_at is not None:
            times = ((one.fallback_at, one.id) for one in rows if one.fallback_at is not None)
            _push(self._fallbacks, (row.fallback_at, row.id), times, most)

    def _line_up(self, lane: Lane) -> bool:
        """Queue what is next in a lane, and its reminders that come before that; returns whether there is something."""
        sink, event_key = lane
        queue, found = self._queues.setdefault(sink, _Queue()), False
        if queue.entries > 4 * len(self._rows) + 64:  # most of them are outdated
            queue = self._queues[sink] = _Queue()
            for row in self.rows(sink=sink):
                queue.add(row)
        for row in self._rows_of(event_key, sink):
            if row.state != "dead" and row.id not in self._given:
                queue.add(row)
                found = True
            if row.queued:
                break
        return found

    def _remember_thread(self, lane: Lane, thread: str) -> None:
        self._threads.pop(lane, None)
        self._threads[lane] = thread
        self._changed_threads.add(lane)
        if len(self._threads) > self._bounds.rows:
            oldest = next(iter(self._threads))
            del self._threads[oldest]
            self._changed_threads.add(oldest)

    def _count(self, sink: str, result: str) -> None:
        counts = self._ledger.counts
        key = sink, result
        self._ledger = replace(self._ledger, counts={**counts, key: counts.get(key, 0) + 1})

    def _observe(self, sink: str, seconds: float) -> None:
        latency = self._ledger.latency
        counts, total = latency.get(sink, ((0,) * (len(LATENCY_BOUNDS) + 1), 0.0))
        at = bisect_left(LATENCY_BOUNDS, seconds)
        counts = (*counts[:at], counts[at] + 1, *counts[at + 1 :])
        self._ledger = replace(self._ledger, latency={**latency, sink: (counts, total + seconds)})


class _Queue:
    """What may be sent to one sink: two heaps, whose entries may be outdated. So each row is asked before it counts.

    ``sendable_at`` says when a row may be sent; ``None``: that is not known yet, and it will be added again.
    """

    def __init__(self) -> None:
        self._later: list[tuple[float, _Urgency, str]] = []  # by when it is due
        self._ready: list[tuple[_Urgency, str]] = []  # due

    @property
    def entries(self) -> int:
        """How many there are, outdated ones included."""
        return len(self._later) + len(self._ready)

    def add(self, row: Row) -> None:
        """Queue a row, or queue it again after it has changed."""
        heapq.heappush(self._later, (row.due, _urgency(row), row.id))

    def pop(self, now: float, sendable_at: Callable[[str], float | None]) -> str | None:
        """Take the most urgent row that may be sent now; ``None``: there is none."""
        while self._later and self._later[0][0] <= now:
            _, urgency, one = heapq.heappop(self._later)
            heapq.heappush(self._ready, (urgency, one))
        while self._ready:
            urgency, one = heapq.heappop(self._ready)
            at = sendable_at(one)
            if at is not None and at <= now:
                return one
            if at is not None:
                heapq.heappush(self._later, (at, urgency, one))
        return None

    def next_at(self, now: float, sendable_at: Callable[[str], float | None]) -> float | None:
        """When a row may be sent next; ``None``: there is none."""
        while self._ready or self._later:
            if self._ready:
                urgency, one = heapq.heappop(self._ready)
                entry = now
            else:
                entry, urgency, one = heapq.heappop(self._later)
            at = sendable_at(one)
            if at is not None:
                heapq.heappush(self._later, (at, urgency, one))
                if at <= entry:
                    return at
        return None


def _urgency(row: Row) -> _Urgency:
    """What is sent first: the most severe, of these what can be prepared for, the next to begin, and the oldest."""
    one = row.delivery
    return SEVERITIES.index(one.severity), one.kind not in EXPIRING_KINDS, one.not_before, row.seq


def _worth(row: Row) -> tuple[bool, bool, int, int]:
    """What is pushed out first."""
    return row.state != "repeating", row.state != "dead", -SEVERITIES.index(row.delivery.severity), row.seq


def _is_reminder(row: Row) -> bool:
    return row.delivery.kind == "reminder"


_ALONE: Final[dict[str, Any]] = {"ahead": (), "fallback": (), "fallback_at": None, "others": ()}


def _to(one: Delivery, sink: str) -> Delivery:
    """The same for another sink, under the id that it has there by a route of its own."""
    return replace(one, sink=sink, delivery_id=delivery_id(_change_id(one), sink))


def _change_id(one: Delivery) -> str:
    if one.kind not in ("reminder", "heartbeat", "sink_failed"):
        with suppress(msgspec.DecodeError):
            return Record.read(one.record).change_id
    return one.delivery_id


def _anew(row: Row, delivery: Delivery, due: float, expires: float, fallback_at: float | None = None) -> Row:
    """A row of the same age that was never tried."""
    return Row(
        delivery,
        since=row.since,
        due=due,
        expires=expires,
        patient_until=row.patient_until,
        fallback_at=fallback_at,
        final=row.final,
    )


def _push(heap: list[_Timer], entry: _Timer, timers: Iterable[_Timer], most: int) -> None:
    """Add an entry to a heap of times; from ``most`` entries on it is made anew of those that are right."""
    if len(heap) >= most:
        heap[:] = timers
        heapq.heapify(heap)
    heapq.heappush(heap, entry)
