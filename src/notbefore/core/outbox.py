"""``Outbox``: the deliveries that wait, and the rules by which they go. Pure: the clock and the dice are arguments.

Who owns an outbox gives it changes (``take``) and what a courier says (``exchange``), and writes down what changed
(``take_changes``, then ``written``). A courier is given deliveries and owns nothing: what it had when it ended is due
again (``release``). Within an event and a sink the order is kept: a delivery waits for the one before it, and until the
result of that one is written, or for ``WRITE_PATIENCE``.

What a row becomes is said by functions, at the end of this module. ``OutboxRows`` holds the rows, ``Lanes`` knows which
may go, ``Unwritten`` what waits for the disk; ``Outbox`` has the rules that concern several rows.

Times are seconds on a clock that nobody sets. At any time and for each sink, accepted = delivered + expired + withdrawn
+ overflowed + dropped + the rows that are pending or dead (``Ledger``).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import APPROVAL_KINDS, Change
from notbefore.core.delivery import EXPIRING_KINDS, PATIENCE, Delivery, MessageKind, Terms, delivery_id
from notbefore.core.duration import back_off
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.record import Record, view
from notbefore.core.routing import SEVERITIES, Severity
from notbefore.core.schedule import Schedule, Urgency

FIRST_PAUSE: Final = 1.0  # seconds: the ceiling of the first pause after a failed attempt
LONGEST_PAUSE: Final = 300.0  # seconds: ... of all later ones; a fleet that was cut off does not come back at once
LONGEST_ASKED: Final = 3600.0  # seconds: what a Retry-After may ask for at most
WRITE_PATIENCE: Final = 1.0  # seconds for which a delivery waits until what it depends on is written
DEAD_SECONDS: Final = 30 * 86_400.0  # how long a dead letter is kept
REPEAT_SECONDS: Final = 400 * 86_400.0  # how long a delivery is repeated at most, when its event never ends
FAILED_REPEAT_SECONDS: Final = 60.0  # after which a repetition is tried again that the receiver refused
ROW_BYTES: Final = 600  # of a row beside its record and its texts
LATENCY_BOUNDS: Final = (0.1, 1.0, 5.0, 30.0, 300.0, 3_600.0)  # seconds from a change to its acceptance
INTERRUPTED: Final = "interrupted: its courier ended while it ran; it is not run again"

RowState = Literal["pending", "dead", "repeating"]
Latency = tuple[tuple[int, ...], float]  # counts by LATENCY_BOUNDS and beyond; the sum of seconds
Lane = tuple[str, str]  # a sink and the key of an event: what is in it goes in order


class Bounds(NamedTuple):
    """What an outbox may hold; beyond it, what is least severe and oldest is pushed out, and counted."""

    rows: int
    size: int  # bytes


OF_AN_AGENT: Final = Bounds(1_000, 2 * 1024 * 1024)
OF_A_FLEET: Final = Bounds(10_000, 64 * 1024 * 1024)


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
    patience: float = 0.0  # seconds for which a refusal that may pass is to be reported as ``failed``
    repetition: bool = False  # it was delivered before, and is sent again while the event lasts


class SendResult(Struct, frozen=True):
    """What came of a given delivery.

    ``accepted`` by the receiver; ``refused`` for good; ``failed``: to be tried again; ``returned``: not tried, it waits
    for another.
    """

    delivery_id: str
    outcome: Literal["accepted", "refused", "failed", "returned"]
    error: str = ""
    retry_after: float | None = None  # seconds, asked for by the receiver: nothing is sent to this sink before
    thread: str | None = None  # what the sink is given again with later deliveries of this event
    repeat: float | None = None  # seconds after which it is to be sent again while the event lasts


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
        return self.state == "pending" and not self.is_reminder

    @property
    def is_reminder(self) -> bool:
        """It has a time of its own, and is of use only until the event starts."""
        return self.delivery.kind == "reminder"

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
    rows: dict[str, Row | None]  # by delivery id; ``None``: it is gone
    threads: dict[Lane, str | None]
    ledger: Ledger


class OutboxImage(Struct, frozen=True):
    """All of an outbox, as it is written down. Its times are on a clock that shows ``clock`` at that moment."""

    clock: float = 0.0
    rows: tuple[Row, ...] = ()
    threads: tuple[tuple[Lane, str], ...] = ()
    ledger: Ledger = Ledger()


class Unwritten:
    """What changed and is not written down yet, and what waits for that.

    ``patience``: seconds for which a row, or what comes next in a lane, waits; 0 where nobody waits for it.
    """

    def __init__(self, patience: float) -> None:
        self.changed: set[str | Lane] = set()  # rows and threads that nobody has taken yet
        self._patience = patience
        self._step = 0  # of the changes that are to be taken next
        self._waits: dict[str | Lane, tuple[int, float]] = {}  # row or lane -> its step, until when it waits

    def take(self) -> tuple[int, set[str | Lane]]:
        """What changed since the last call, and what ``written`` is given once it is written."""
        changed, self.changed = self.changed, set()
        self._step += 1
        return self._step - 1, changed

    def written(self, step: int) -> list[str | Lane]:
        """What was taken up to this step is on disk; returns the rows and lanes that waited for that."""
        found = [key for key, (made, _) in self._waits.items() if made <= step]
        for key in found:
            del self._waits[key]
        return found

    def hold(self, key: str | Lane, now: float) -> None:
        """Let a row, or what comes next in a lane, wait until what changes now is written."""
        if self._patience > 0:
            self._waits[key] = (self._step, now + self._patience)

    def forget(self, delivery_id: str) -> None:
        """The row is gone."""
        self._waits.pop(delivery_id, None)

    def until(self, row: Row) -> float:
        """When the row is due, and nothing that it depends on waits to be written."""
        return max([row.due, *(self._waits[key][1] for key in (row.id, row.lane) if key in self._waits)])


class Lanes:
    """When the next row of each lane may go, and until when a receiver has asked for a pause."""

    def __init__(self) -> None:
        self._queues: defaultdict[str, Schedule[Lane]] = defaultdict(Schedule)  # by sink
        self._paused: dict[str, float] = {}  # sink -> until when

    def line_up(self, lane: Lane, at: float, urgent: Urgency) -> None:
        """The next of this lane may go at this time."""
        self._queues[lane[0]].put(lane, at, urgent)

    def drop(self, lane: Lane) -> None:
        """Nothing of this lane may go."""
        self._queues[lane[0]].drop(lane)

    def pop(self, sink: str, now: float) -> Lane | None:
        """The lane of a sink whose next row goes first; ``None``: nothing may go now."""
        return self._queues[sink].pop(now) if now >= self._paused.get(sink, now) else None

    def pause(self, sink: str, until: float) -> None:
        """Nothing is sent to this sink before."""
        self._paused[sink] = until

    def resume(self, sink: str) -> None:
        """The receiver accepts again."""
        self._paused.pop(sink, None)

    def next_due(self) -> float | None:
        """When something may go next; ``None``: nothing waits."""
        times = ((sink, queue.first()) for sink, queue in self._queues.items())
        return min((max(at, self._paused.get(sink, at)) for sink, at in times if at is not None), default=None)


class OutboxRows:
    """The rows of an outbox, what sinks said of their events, and what was counted."""

    def __init__(self, patience: float = WRITE_PATIENCE) -> None:
        self.by_id: dict[str, Row] = {}  # by delivery id, in their order
        self.ledger = Ledger()
        self.time_known = True  # while False nothing expires, and no reminder is due: see ``Outbox.advance``
        self.size = 0  # bytes
        self.threads: dict[Lane, str] = {}  # what sinks said of the first messages of events
        self.given: set[str] = set()  # the ids that a courier has
        self.lanes = Lanes()
        self.expiries = Schedule[str]()
        self.fallbacks = Schedule[str]()
        self.unwritten = Unwritten(patience)
        self._of_event: dict[str, dict[str, None]] = {}  # event key -> the ids of its rows

    # ---- for readers

    def chosen(self, state: RowState | None = None, sink: str | None = None) -> list[Row]:
        """What is in the outbox, oldest first; of one state or one sink where these are given."""
        return [row for row in self.by_id.values() if state in (None, row.state) and sink in (None, row.delivery.sink)]

    def of_event(self, event_key: str, sink: str | None = None) -> list[Row]:
        """The rows of an event, and of one sink if that is given, in their order."""
        found = sorted((self.by_id[one] for one in self._of_event.get(event_key, ())), key=lambda row: row.seq)
        return found if sink is None else [row for row in found if row.delivery.sink == sink]

    def image(self, now: float, event_keys: Collection[str] | None = None) -> OutboxImage:
        """All of it; or what it holds of these events, without what it has counted."""
        if event_keys is None:
            return OutboxImage(now, tuple(self.by_id.values()), tuple(self.threads.items()), self.ledger)
        rows = tuple(row for key in event_keys for row in self.of_event(key))
        return OutboxImage(now, rows, tuple((lane, one) for lane, one in self.threads.items() if lane[1] in event_keys))

    # ---- what its owner writes down

    def take_changes(self, *, everything: bool = False) -> OutboxChanges:
        """What changed since the last call, or all that there is."""
        step, changed = self.unwritten.take()
        if everything:
            return OutboxChanges(step, {**self.by_id}, {**self.threads}, self.ledger)
        rows = {one: self.by_id.get(one) for one in changed if isinstance(one, str)}
        threads = {lane: self.threads.get(lane) for lane in changed if isinstance(lane, tuple)}
        return OutboxChanges(step, rows, threads, self.ledger)

    def written(self, step: int) -> bool:
        """What ``take_changes`` gave up to this step is on disk; returns whether something waited for that."""
        waited = self.unwritten.written(step)
        next_ones = [self._line_up(key if isinstance(key, tuple) else self.by_id[key].lane) for key in waited]
        return any(next_ones)

    # ---- changes

    def accept(self, row: Row) -> Row:
        """Count a row that is new, if it is to be delivered; returns it with its place in the order, if it has none."""
        if row.state != "repeating":
            self.count(row.delivery.sink, "accepted")
        self.ledger = replace(self.ledger, seq=self.ledger.seq + 1)
        return replace(row, seq=row.seq or self.ledger.seq)

    def put(self, row: Row) -> None:
        """Add a row, or replace it by what it has become."""
        before = self.by_id.get(row.id)
        self.size += row.size - (before.size if before is not None else 0)
        self.by_id[row.id] = row
        self._of_event.setdefault(row.delivery.event_key, {})[row.id] = None
        self.unwritten.changed.add(row.id)
        self.expiries.put(row.id, row.expires)
        if row.fallback_at is None:
            self.fallbacks.drop(row.id)
        else:
            self.fallbacks.put(row.id, row.fallback_at)
        self._line_up(row.lane)

    def remove(self, row: Row, result: str | None = None) -> None:
        """Take a row out, and count what became of it; of one that is repeated that was counted before."""
        self.size -= self.by_id.pop(row.id).size
        ids = self._of_event[row.delivery.event_key]
        del ids[row.id]
        if not ids:
            del self._of_event[row.delivery.event_key]
        self.given.discard(row.id)
        self.unwritten.forget(row.id)
        self.expiries.drop(row.id)
        self.fallbacks.drop(row.id)
        self.unwritten.changed.add(row.id)
        if result is not None and row.state != "repeating":
            self.count(row.delivery.sink, result)
        self._line_up(row.lane)

    def remember_thread(self, lane: Lane, thread: str | None) -> None:
        """``None``: forget it."""
        self.threads.pop(lane, None)
        if thread is not None:
            self.threads[lane] = thread
        self.unwritten.changed.add(lane)

    def count(self, sink: str, result: str) -> None:
        """One more: see ``Ledger``."""
        counts, key = self.ledger.counts, (sink, result)
        self.ledger = replace(self.ledger, counts={**counts, key: counts.get(key, 0) + 1})

    # ---- which of them may go

    def _line_up(self, lane: Lane) -> bool:
        """Note when the next row of a lane may go; returns whether there is one."""
        found = self.next_of(lane)
        if found is None:
            self.lanes.drop(lane)
            return False
        self.lanes.line_up(lane, found[0], urgency(found[1]))
        return True

    def next_of(self, lane: Lane) -> tuple[float, Row] | None:
        """The row of a lane that may go first, and when; ``None``: none before a courier has said what came of one.

        Its reminders do not wait for what comes after them.
        """
        sink, event_key = lane
        found: list[tuple[float, Urgency, Row]] = []
        queued = False
        for row in self.of_event(event_key, sink):
            if row.id in self.given:
                return None
            if not queued and row.state != "dead" and (self.time_known or not row.is_reminder):
                found.append((self.unwritten.until(row), urgency(row), row))
            queued = queued or row.queued
        at, _, first = min(found, key=lambda one: one[:2], default=(0.0, None, None))
        return (at, first) if first is not None else None


class Outbox:
    """For one thread at a time. ``dice`` gives random numbers from 0 to 1; ``patience``: see ``Unwritten``."""

    def __init__(
        self, dice: Callable[[], float], bounds: Bounds = OF_AN_AGENT, patience: float = WRITE_PATIENCE
    ) -> None:
        self.rows = OutboxRows(patience)
        self._bounds = bounds
        self._dice = dice
        self._restored = 0  # the last row that was restored

    def restore(self, image: OutboxImage, now: float, passed: float = 0.0, *, time_known: bool = True) -> None:
        """Go on with what was written down, ``passed`` seconds later, as far as that is known.

        What is there already stays as it is. What may run once and may have been given to a courier is dead: nobody
        knows how far it came.
        """
        self.rows.time_known, self._restored = time_known, image.ledger.seq
        counted = image.ledger.seq > 0  # a part of another outbox has no counts
        if counted:
            self.rows.ledger = image.ledger
        for lane, thread in image.threads:
            self.rows.remember_thread(lane, thread)
        for row in sorted(image.rows, key=lambda row: row.seq):
            if row.id not in self.rows.by_id:
                here = row if counted else self.rows.accept(replace(row, seq=0))
                here = here.shifted(now - image.clock - passed)
                self.rows.put(here)
                if row.withdrawn:
                    self.rows.remove(here, "expired")
                elif row.begun and row.state == "pending":
                    bury(self.rows, here, INTERRUPTED, now)
        push_out(self.rows, self._bounds, now)

    def advance(self, seconds: float) -> None:
        """So much time had passed unseen when this was restored: from now on the time is known."""
        self.rows.time_known = True
        for row in self.rows.chosen():
            self.rows.put(row.shifted(-seconds) if row.seq <= self._restored else row)

    # ---- what happens to events

    def take(self, change: Change, record: bytes, made: Sequence[Delivery], now: float, wall: float) -> None:
        """Take a change and its deliveries: what it makes needless is withdrawn.

        ``record``: the change as JSON. ``wall``: Unix seconds of ``now``.
        """
        key, over = change.event.key, change.kind in OUTCOMES
        if over:
            self._withdraw(key, lambda row: row.delivery.expires_with_event, over=True)
        elif change.kind == "started":
            self._withdraw(key, lambda row: row.is_reminder)
        elif change.not_before_shift:  # the reminders move, also those to sinks whose route sends nothing of it
            for row in self.rows.of_event(key):
                if row.state == "pending" and row.is_reminder:
                    self.rows.put(moved(row, change.not_before_shift, record))
        if change.no_longer_affected:
            self.no_longer_affected(key)
            over = True
        for one in made:
            self._add(new_row(one, now, wall, final=over), now)
        if over:
            for end in [end for one in made for end in followers(self.rows, one)]:
                self._add(new_row(end, now, wall, final=True), now)
        push_out(self.rows, self._bounds, now)

    def put(self, made: Iterable[Delivery], now: float, wall: float) -> None:
        """Add deliveries; one whose id is there already is left as it is. ``wall``: Unix seconds of ``now``."""
        for one in made:
            self._add(new_row(one, now, wall), now)
        push_out(self.rows, self._bounds, now)

    def no_longer_affected(self, *event_keys: str) -> None:
        """Withdraw the reminders of events, and end their repetitions: they do not affect this VM any longer."""
        for key in event_keys:
            self._withdraw(key, lambda row: row.is_reminder, over=True)

    def _withdraw(self, event_key: str, needless: Callable[[Row], bool], *, over: bool = False) -> None:
        """Withdraw what is ``needless`` now; ``over``: nothing is repeated any more."""
        for row in self.rows.of_event(event_key):
            if row.state == "pending" and needless(row):
                if row.id in self.rows.given:  # it may be delivered at this moment
                    self.rows.put(replace(row, withdrawn=True, fallback_at=None))
                else:  # where its own time had not come, and nobody tried to send it, nobody missed anything
                    self.rows.remove(row, "expired" if row.attempts > 0 or not row.is_reminder else "withdrawn")
            elif over and row.state == "pending":
                self.rows.put(replace(row, final=True))
            elif over and row.state == "repeating":
                self.rows.remove(row)

    def _add(self, row: Row, now: float) -> None:
        """Accept a row; it replaces what is repeated of the event, and its reminders."""
        one = row.delivery
        if row.id in self.rows.by_id:
            return
        for other in self.rows.of_event(one.event_key, one.sink):
            if other.state == "repeating":
                self.rows.remove(other)
        if one.kind not in ("reminder", *APPROVAL_KINDS):
            self._withdraw(one.event_key, lambda other: other.is_reminder and other.delivery.sink == one.sink)
        self.rows.unwritten.hold(row.id, now)
        self.rows.put(self.rows.accept(row))

    # ---- the courier

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int], now: float) -> list[GivenDelivery]:
        """Take in results, and give what is due, the most severe first; ``room``: how many deliveries a sink can take.

        Of one event a sink is given one delivery at a time.
        """
        for result in results:
            self._record(result, now)
        expire(self.rows, now)
        while (one := self.rows.fallbacks.pop(now)) is not None:  # it is dead, or has waited for too long
            row = self.rows.by_id[one]
            for name in row.delivery.fallback:
                self._add(fallback_copy(row, name, now), now)
            self.rows.put(replace(row, fallback_at=None))
        return [given for sink, count in room.items() for given in give(self.rows, sink, count, now)]

    def release(self, now: float) -> list[Row]:
        """The courier has ended: what it had is due again; returns what is dead instead, because it may run once."""
        left, dead = [self.rows.by_id[one] for one in sorted(self.rows.given)], []
        self.rows.given.clear()
        for row in left:
            if row.withdrawn:
                self.rows.remove(row, "expired")
            elif row.delivery.once:
                dead.append(bury(self.rows, row, INTERRUPTED, now))
            else:
                self.rows.put(row)
        return dead

    def next_due(self) -> float | None:
        """When a courier is needed next; ``None``: nothing waits."""
        times = self.rows.fallbacks.first(), self.rows.lanes.next_due()
        return min((time for time in times if time is not None), default=None)

    def _record(self, result: SendResult, now: float) -> None:
        row, rows = self.rows.by_id.get(result.delivery_id), self.rows
        given = result.delivery_id in rows.given
        rows.given.discard(result.delivery_id)
        if row is None or row.state == "dead" or not (given or result.outcome == "accepted"):
            return  # an operator dropped it, a full outbox pushed it out, or its courier was given up
        sink = row.delivery.sink
        rows.unwritten.hold(row.lane, now)
        if result.retry_after is not None:
            rows.lanes.pause(sink, now + min(result.retry_after, LONGEST_ASKED))
        elif result.outcome == "accepted":
            rows.lanes.resume(sink)
        if result.outcome == "accepted":
            record_accepted(rows, row, result, now)
            if len(rows.threads) > self._bounds.rows:
                rows.remember_thread(next(iter(rows.threads)), None)
        elif row.withdrawn:
            rows.remove(row, "expired")
        elif result.outcome == "refused" and row.state != "repeating":
            bury(rows, row, result.error, now)
        elif result.outcome == "returned":
            rows.put(row)
        else:
            rows.count(sink, "failed")
            rows.put(after_failure(row, result, self._dice(), now))

    # ---- what operators ask

    def retry(self, ids: Collection[str], now: float, expire_after: Mapping[str, float]) -> int:
        """Make deliveries due now, as if never tried; returns how many. What a courier has is left alone.

        ``expire_after``: by sink, in seconds, how long they are kept from now on.
        """
        found = at_hand(self.rows, ids)
        for row in found:
            again = replace(row, due=now, attempts=0, begun=False)
            if row.state != "repeating":
                kept = expire_after.get(row.delivery.sink, Terms().expire_after)
                again = replace(again, state="pending", expires=now + kept)
            self.rows.put(again)
        return len(found)

    def drop(self, ids: Collection[str]) -> int:
        """Delete deliveries, and count them as dropped; returns how many. What a courier has is left alone."""
        found = at_hand(self.rows, ids)
        for row in found:
            self.rows.remove(row, "dropped")
        return len(found)

    def redirect(self, sinks: Collection[str], targets: Callable[[Row], Sequence[str]], now: float) -> list[Row]:
        """After a sink was removed or renamed: what waits for it goes to those that ``targets`` names now, or is dead.

        Returns the rows that left their sink.
        """
        left = [
            row
            for row in at_hand(self.rows, list(self.rows.by_id))
            if row.delivery.sink not in sinks and row.state != "dead"
        ]
        for row in left:
            names = [name for name in targets(row) if name in sinks and name not in row.delivery.others]
            if row.state == "repeating":
                self.rows.remove(row)
            elif not names:
                bury(self.rows, row, f"no sink of the name {row.delivery.sink} is configured", now)
            else:
                self.rows.remove(row, "withdrawn")
                for name in names:  # in its place: else its times would not move with those that were restored
                    self._add(untried(row, to_sink(row.delivery, name)), now)
        return left


# ---- rules about rows


def leave(rows: OutboxRows, event_keys: Collection[str]) -> None:
    """Leave these events to another outbox, which has them now: nothing of them is sent any more."""
    for row in [row for key in event_keys for row in rows.of_event(key)]:
        rows.remove(row, "withdrawn")
    for lane in [lane for lane in rows.threads if lane[1] in event_keys]:
        rows.remember_thread(lane, None)


def expire(rows: OutboxRows, now: float) -> None:
    """Remove what is too old; of what a courier has it is looked at again when it is known what came of it."""
    while rows.time_known and (one := rows.expiries.pop(now)) is not None:
        if one not in rows.given:
            rows.remove(rows.by_id[one], "expired")


def push_out(rows: OutboxRows, bounds: Bounds, now: float) -> None:
    """Remove what is too much: repetitions first, then dead letters, then the least severe and oldest."""
    expire(rows, now)
    if len(rows.by_id) > bounds.rows or rows.size > bounds.size:
        for row in sorted(at_hand(rows, list(rows.by_id)), key=worth):
            if len(rows.by_id) > bounds.rows or rows.size > bounds.size:
                rows.remove(row, "overflowed")


def at_hand(rows: OutboxRows, ids: Iterable[str]) -> list[Row]:
    """Those of these rows that are there, and that no courier has."""
    return [rows.by_id[one] for one in ids if one in rows.by_id and one not in rows.given]


def give(rows: OutboxRows, sink: str, count: int, now: float) -> list[GivenDelivery]:
    """What a courier is given for a sink."""
    found: list[GivenDelivery] = []
    while len(found) < count and (lane := rows.lanes.pop(sink, now)) and (first := rows.next_of(lane)):
        row = first[1]
        if row.delivery.once and not row.begun:  # written first, and given after it
            rows.unwritten.hold(row.id, now)
            rows.put(replace(row, begun=True))
            continue
        rows.given.add(row.id)
        found.append(opened(row, rows.threads.get(lane), now))
    return found


def record_accepted(rows: OutboxRows, row: Row, result: SendResult, now: float) -> None:
    """It is delivered: it is over, or repeated while its event lasts."""
    # a sink that names no thread, and got this as another one's fallback, is to get the event's end as well
    thread = "" if result.thread is None and row.delivery.note else result.thread
    if thread is not None:
        rows.remember_thread(row.lane, thread)
    if row.state != "repeating":
        rows.count(row.delivery.sink, "delivered")
        rows.ledger = replace(rows.ledger, latency=observed(rows.ledger.latency, row, now))
    others = [other for other in rows.of_event(row.delivery.event_key, row.delivery.sink) if other.id != row.id]
    if result.repeat is None or row.final or row.withdrawn or any(other.queued for other in others):
        rows.remove(row)
        return
    for other in others:
        if other.state == "repeating":
            rows.remove(other)
    rows.put(repeated(row, result.repeat, now))


def bury(rows: OutboxRows, row: Row, error: str, now: float) -> Row:
    """It is dead: kept, and not sent again unless an operator asks for it."""
    rows.count(row.delivery.sink, "dead")
    # a heartbeat is of no use once the next one is due: it is not kept longer
    expires = row.expires if row.delivery.kind == "heartbeat" else now + DEAD_SECONDS
    fallback_at = None if row.fallback_at is None else min(row.fallback_at, now)
    dead = replace(row, state="dead", error=error, expires=expires, fallback_at=fallback_at, begun=False)
    rows.put(dead)
    return dead


def followers(rows: OutboxRows, one: Delivery) -> Iterator[Delivery]:
    """The end of an event for those sinks of the fallback that were given its beginning.

    A sink was given it where a thread of the event is known, or a message of it is still to be sent there.
    """
    for name in one.fallback:
        waits = any(row.state == "pending" for row in rows.of_event(one.event_key, name))
        if waits or (name, one.event_key) in rows.threads:
            note = f"an earlier message of this event came here instead of {one.sink}"
            yield replace(to_sink(one, name), note=note, due=one.created, **_ALONE)


# ---- what a row becomes, and what is made of it


def new_row(one: Delivery, now: float, wall: float, *, final: bool = False) -> Row:
    """The row of a delivery. ``wall``: Unix seconds of ``now``; ``final``: the event is over."""
    shift, patient = now - wall, one.patient and one.severity == "critical"
    return Row(
        delivery=one,
        since=one.created + shift,
        due=one.due + shift,
        expires=one.expires + shift,
        patient_until=max(one.not_before, one.created + PATIENCE) + shift if patient else now,
        fallback_at=None if one.fallback_at is None else one.fallback_at + shift,
        final=final,
    )


def moved(row: Row, seconds: float, record: bytes) -> Row:
    """A reminder after NotBefore has moved by so many seconds, as this record says."""
    later = row.shifted(seconds)
    return replace(later, patient_until=row.patient_until, delivery=replace(row.delivery, record=record))


def after_failure(row: Row, result: SendResult, dice: float, now: float) -> Row:
    """It is tried again later; so is a repetition that was refused: the message itself was delivered."""
    attempts = row.attempts + 1
    pause = back_off(attempts, FIRST_PAUSE, LONGEST_PAUSE) * dice
    if row.state == "repeating":
        pause = FAILED_REPEAT_SECONDS
    if result.retry_after is not None:
        pause = max(pause, min(result.retry_after, LONGEST_ASKED))
    return replace(row, attempts=attempts, due=now + pause, error=result.error, begun=False)


def repeated(row: Row, every: float, now: float) -> Row:
    """It is sent again after ``every`` seconds."""
    expires = row.expires if row.state == "repeating" else now + REPEAT_SECONDS
    return replace(row, state="repeating", due=now + every, expires=expires, attempts=0, error="", fallback_at=None)


def untried(row: Row, delivery: Delivery) -> Row:
    """A row of the same age for another delivery."""
    return replace(row, delivery=delivery, attempts=0, state="pending", error="", begun=False, withdrawn=False)


def fallback_copy(row: Row, sink: str, now: float) -> Row:
    """What is sent to a sink of its fallback."""
    one, waited = row.delivery, max(0.0, now - row.since)
    why = f"{one.sink} refused it" if row.state == "dead" else f"{one.sink} has not accepted it within {waited:.0f} s"
    copy = replace(to_sink(one, sink), note=f"{why}: {row.error}" if row.error else why, **_ALONE)
    return replace(untried(row, copy), seq=0, due=now, expires=now + Terms().expire_after, fallback_at=None)


def opened(row: Row, thread: str | None, now: float) -> GivenDelivery:
    """What a courier is given of it."""
    return view(
        GivenDelivery,
        row.delivery,
        thread=thread,
        patience=max(0.0, row.patient_until - now),
        repetition=row.state == "repeating",
    )


def urgency(row: Row) -> Urgency:
    """What is sent first: the most severe, of these what can be prepared for, the next to begin, and the oldest."""
    one = row.delivery
    return SEVERITIES.index(one.severity), one.kind not in EXPIRING_KINDS, one.not_before, row.seq


def worth(row: Row) -> tuple[bool, bool, int, int]:
    """What is pushed out first."""
    return row.state != "repeating", row.state != "dead", -SEVERITIES.index(row.delivery.severity), row.seq


def observed(latency: Mapping[str, Latency], row: Row, now: float) -> dict[str, Latency]:
    """With the latency of a row that was accepted now."""
    sink, seconds = row.delivery.sink, max(0.0, now - row.since)
    counts, total = latency.get(sink, ((0,) * (len(LATENCY_BOUNDS) + 1), 0.0))
    at = bisect_left(LATENCY_BOUNDS, seconds)
    return {**latency, sink: ((*counts[:at], counts[at] + 1, *counts[at + 1 :]), total + seconds)}


_ALONE: Final[dict[str, Any]] = {"fallback": (), "fallback_at": None, "others": ()}


def to_sink(one: Delivery, sink: str) -> Delivery:
    """The same for another sink, under the id that it has there by a route of its own."""
    change_id = one.delivery_id
    if one.kind not in ("reminder", "heartbeat"):
        with suppress(msgspec.DecodeError):
            change_id = Record.read(one.record).change_id
    return replace(one, sink=sink, delivery_id=delivery_id(change_id, sink))
