"""``Outbox``: the waiting deliveries, and the rules for sending them. Pure: the clock and the dice are arguments.

Its owner adds changes (``take``), passes on the results of a courier (``exchange``), and stores the modified rows
(``OutboxRows.take``, then ``written``). A courier gets deliveries and owns nothing: those that it had when it ended are
due again (``release``). The deliveries of one event to one sink are sent in order: each waits for the result of the one
before, and until that result is on disk, but at most ``DISK_PATIENCE`` for the disk.

``OutboxRows`` (``core/outbox_rows``) holds the deliveries and knows which may be sent; ``Outbox`` has the rules; the
functions at the end make the new state of a delivery. Times are seconds on a clock that cannot be set.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import APPROVAL_KINDS, Change
from notbefore.core.delivery import A_DAY, EXPIRING_KINDS, Delivery, Targets, Terms, delivery_id
from notbefore.core.duration import back_off
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.outbox_rows import LATENCY_BOUNDS, Latency, OutboxImage, OutboxRows
from notbefore.core.routing import SEVERITIES

FIRST_PAUSE: Final = 1.0  # seconds: the upper limit of the pause after the first failed attempt
LONGEST_PAUSE: Final = 300.0  # seconds: the upper limit of later pauses; random, so that a fleet does not retry at once
LONGEST_ASKED: Final = 3600.0  # seconds: a longer Retry-After is shortened to this
DISK_PATIENCE: Final = 1.0  # seconds that a delivery waits at most until what it depends on is on disk
DEAD_SECONDS: Final = 30 * A_DAY  # a dead letter is kept so long
REPEAT_SECONDS: Final = 400 * A_DAY  # a delivery is repeated so long at most, if its event never ends
INTERRUPTED: Final = "interrupted: its courier ended while it ran; it is not run again"

_ALONE: Final[dict[str, Any]] = {"fallback": (), "fallback_at": None, "others": ()}  # for a copy to a fallback sink


class Bounds(NamedTuple):
    """The limits of an outbox; beyond them deliveries are removed, and counted: see ``_removal_order``."""

    rows: int
    size: int  # bytes


OF_AN_AGENT: Final = Bounds(1_000, 2 * 1024 * 1024)
OF_A_FLEET: Final = Bounds(10_000, 64 * 1024 * 1024)


class SendResult(Struct, frozen=True):
    """The result of a delivery that a courier had.

    ``accepted`` by the receiver; ``refused`` for good; ``failed``: to be tried again; ``returned``: not tried, as the
    receiver asked for a pause.
    """

    delivery_id: str
    outcome: Literal["accepted", "refused", "failed", "returned"]
    error: str = ""
    retry_after: float | None = None  # seconds: the receiver asks for a pause, for all deliveries to this sink
    thread: str | None = None  # the sink gets this text back with later deliveries of this event
    repeat: float | None = None  # seconds until it is sent again, while the event lasts
    by_hand: bool = False  # somebody must correct something first: a critical delivery goes to its fallback at once


class Outbox:
    """For one thread at a time. ``dice`` gives random numbers from 0 to 1; ``patience``: see ``OutboxRows``.

    ``overflowed`` gets the deliveries that are removed for lack of room; there may be none.
    """

    def __init__(
        self,
        dice: Callable[[], float],
        bounds: Bounds = OF_AN_AGENT,
        patience: float = DISK_PATIENCE,
        overflowed: Callable[[list[Delivery]], None] = lambda _rows: None,
    ) -> None:
        self.rows = OutboxRows(patience)
        self._bounds = bounds
        self._dice = dice
        self._overflowed = overflowed
        self.terms: Mapping[str, Terms] | None = None  # by sink; None: the configured sinks are not known yet
        self._targets: Callable[[Delivery], Targets] = lambda _row: Targets()
        self._restored = 0  # the highest ``seq`` of the restored deliveries

    def restore(self, image: OutboxImage, now: float, passed: float = 0.0, *, time_known: bool = True) -> None:
        """Add the stored deliveries. ``passed``: seconds since they were stored, as far as that is known.

        Deliveries that are here already stay as they are. One that may be attempted only once is dead if a courier may
        have had it: nobody knows how far the attempt came.
        """
        self.rows.time_known, self._restored = time_known, image.ledger.seq
        counted = image.ledger.seq > 0  # an image of a part of an outbox has no counts
        if counted:
            self.rows.ledger = image.ledger
        for lane, thread in image.threads:
            self.rows.remember_thread(lane, thread)
        for one in sorted(image.rows, key=lambda row: row.seq):
            if one.delivery_id not in self.rows.by_id:
                row = one.shifted(now - image.clock - passed)
                row = row if counted else self._accepted(replace(row, seq=0))
                self.rows.put(row)
                if row.begun and row.state == "pending":
                    _bury(self.rows, row, INTERRUPTED, now)
        _push_out(self.rows, self._bounds, now, self._overflowed)

    def advance(self, seconds: float) -> None:
        """Correct the times of the restored deliveries: ``seconds`` passed uncounted before. Now the time is known."""
        self.rows.time_known = True
        for row in self.rows.chosen():
            self.rows.put(row.shifted(-seconds) if row.seq <= self._restored else row)

    # ---- changes of events

    def take(self, change: Change, made: Sequence[Delivery], now: float, wall: float) -> None:
        """Add the deliveries of a change; withdraw those that it makes needless. ``wall``: Unix seconds of ``now``."""
        key, over = change.event.key, change.kind in OUTCOMES or change.no_longer_affected
        if change.kind in OUTCOMES:
            self._withdraw(key, now, lambda row: row.expires_with_event, over=True)
        elif over or change.kind == "started" or change.not_before_changed:  # ``made`` contains the new reminders
            self._withdraw(key, now, lambda row: row.is_reminder, over=over)
        made = [replace(one, final=over) for one in made]
        ends = [end for one in made for end in _followers(self.rows, one, self.terms or {})] if over else []
        self.put([*made, *ends], now, wall)
        self._spare(self.rows.of_event(key), [end.sink for end in ends])  # a sink gets no message after the end

    def _spare(self, rows: Iterable[Delivery], sinks: Collection[str]) -> None:
        """Remove these sinks from the fallback of these deliveries."""
        for row in rows:
            left = tuple(name for name in row.fallback if name not in sinks)
            if left != row.fallback:
                self.rows.put(replace(row, fallback=left))

    def put(self, made: Iterable[Delivery], now: float, wall: float) -> None:
        """Add deliveries, except those whose id is here already. ``wall``: Unix seconds of ``now``."""
        for one in made:
            self._add(one.shifted(now - wall), now)
        _push_out(self.rows, self._bounds, now, self._overflowed)

    def no_longer_affected(self, event_keys: Iterable[str], now: float) -> None:
        """Withdraw the reminders of events that no longer affect this VM, and end their repetitions."""
        for key in event_keys:
            self._withdraw(key, now, lambda row: row.is_reminder, over=True)

    def leave(self, event_keys: Collection[str]) -> None:
        """Remove all deliveries of these events: another outbox sends them now."""
        for row in [row for key in event_keys for row in self.rows.of_event(key)]:
            self.rows.remove(row, "withdrawn")
        for lane in [lane for lane in self.rows.threads if lane[1] in event_keys]:
            self.rows.remember_thread(lane, None)

    def _withdraw(self, key: str, now: float, needless: Callable[[Delivery], bool], *, over: bool = False) -> None:
        """Withdraw the ``needless`` deliveries of an event; ``over``: end its repetitions."""
        for row in self.rows.of_event(key):
            if row.state == "pending" and needless(row):
                if row.delivery_id in self.rows.given:  # the courier may be sending it; it is not tried again
                    self.rows.put(replace(row, expires=min(row.expires, now), fallback_at=None, final=True))
                else:  # nobody missed a reminder that was not tried; any other message was not delivered in time
                    self.rows.remove(row, "expired" if row.attempts > 0 or not row.is_reminder else "withdrawn")
            elif over and row.state == "repeating":
                self.rows.remove(row)
            elif over:  # also of a dead letter, which an operator may send again
                self.rows.put(replace(row, final=True))

    def _add(self, one: Delivery, now: float) -> None:
        """Add a delivery; it replaces the repetition and the reminders of its event at its sink."""
        if one.delivery_id in self.rows.by_id:
            return
        for other in self.rows.of_event(one.event_key, one.sink):
            if other.state == "repeating":
                self.rows.remove(other)
        if one.kind not in ("reminder", *APPROVAL_KINDS):
            self._withdraw(one.event_key, now, lambda other: other.is_reminder and other.sink == one.sink)
        self.rows.hold(one.lane, now)
        self.rows.put(self._accepted(one))

    def _accepted(self, one: Delivery) -> Delivery:
        """Count a new delivery, unless it only repeats; return it with a ``seq``, its place in the order."""
        if one.state != "repeating":
            self.rows.count(one.sink, "accepted")
        self.rows.ledger = replace(self.rows.ledger, seq=self.rows.ledger.seq + 1)
        return replace(one, seq=one.seq or self.rows.ledger.seq)

    # ---- the courier

    def exchange(self, results: Iterable[SendResult], limits: Mapping[str, int], now: float) -> list[Delivery]:
        """Record results, and return due deliveries, the most severe first.

        ``limits``: sink -> how many it may have at a time, only one of each event.
        """
        for result in results:
            self._record(result, now)
        _expire(self.rows, now)
        while (one := self.rows.fallbacks.pop(now)) is not None:  # it is dead, or has waited too long
            row = self.rows.by_id[one]
            for name in row.fallback:
                self._add(_fallback_copy(row, name, self.terms or {}, now), now)
            self.rows.put(replace(row, fallback_at=None))
            same = [other for other in self.rows.of_event(row.event_key) if other.change_id == row.change_id]
            self._spare(same, row.fallback)  # else they get it twice, if another sink fails as well
        had = Counter(row.sink for row in self.rows.under_way)
        return [given for sink, limit in limits.items() for given in self._give(sink, limit - had[sink], now)]

    def release(self, now: float) -> list[Delivery]:
        """Make the deliveries of an ended courier due again; those with ``once`` are dead instead, and returned."""
        left, dead = self.rows.under_way, []
        self.rows.given.clear()
        for row in left:
            if row.once:
                dead.append(_bury(self.rows, row, INTERRUPTED, now))
            else:
                self.rows.put(row)
        _expire(self.rows, now)
        return dead

    def _give(self, sink: str, count: int, now: float) -> list[Delivery]:
        """Return the deliveries that a courier gets for a sink."""
        found, room = list[Delivery](), count - self.rows.beginning(sink, now)
        while len(found) < room and (row := self.rows.pop(sink, now)) is not None:
            if row.once and not row.begun:  # ``begun`` is written to the disk first
                room -= self.rows.hold(row.lane, now)
                self.rows.put(replace(row, begun=True))
                continue
            self.rows.given.add(row.delivery_id)
            found.append(replace(row, thread=self.rows.threads.get(row.lane)))
        return found

    def _record(self, result: SendResult, now: float) -> None:
        """Record the result of a delivery that a courier had."""
        row, rows = self.rows.by_id.get(result.delivery_id), self.rows
        given = result.delivery_id in rows.given
        rows.given.discard(result.delivery_id)
        if row is None or row.state == "dead" or not (given or result.outcome == "accepted"):
            return  # gone or dead by now; or no longer given: then only a late acceptance counts
        rows.hold(row.lane, now)
        if result.retry_after is not None:
            rows.paused[row.sink] = now + min(result.retry_after, LONGEST_ASKED)
        if result.outcome == "accepted":
            self._delivered(row, result, now)
        elif result.outcome == "returned":
            rows.put(row)
        elif result.outcome == "refused" and row.state != "repeating" and row.expires > now:
            _bury(self.rows, replace(row, attempts=row.attempts + 1), result.error, now)
        else:  # a refused repetition is also tried again: its message was delivered before
            rows.count(row.sink, "failed")
            rows.put(_after_failure(row, result, self._dice(), now))

    def _delivered(self, row: Delivery, result: SendResult, now: float) -> None:
        """Remove an accepted delivery, or repeat it while its event lasts."""
        rows = self.rows
        # an empty thread notes that a fallback sink got a message: it must get the event's end as well
        thread = "" if result.thread is None and row.note else result.thread
        if thread is not None:
            rows.remember_thread(row.lane, thread)
            if len(rows.threads) > self._bounds.rows:
                rows.remember_thread(next(iter(rows.threads)), None)
        if row.state != "repeating":
            rows.count(row.sink, "delivered")
            rows.ledger = replace(rows.ledger, latency=_observed(rows.ledger.latency, row, now))
        others = [other for other in rows.of_event(row.event_key, row.sink) if other.delivery_id != row.delivery_id]
        if result.repeat is None or row.final or any(other.queued for other in others):
            rows.remove(row)
            return
        for other in others:
            if other.state == "repeating":
                rows.remove(other)
        expires = row.expires if row.state == "repeating" else now + REPEAT_SECONDS
        again = replace(row, state="repeating", due=now + result.repeat, expires=expires, fallback_at=None)
        rows.put(replace(again, attempts=0, error=""))

    # ---- requests of operators

    def retry(self, ids: Collection[str], now: float) -> int:
        """Make deliveries due now, for a day, as if never tried, except those that a courier has; return how many.

        This ends the pauses that their receivers asked for.
        """
        found = _at_hand(self.rows, ids)
        for row in found:
            self.rows.paused.pop(row.sink, None)
            again = replace(row, due=now, attempts=0, begun=False)
            if row.state != "repeating":
                again = replace(again, state="pending", expires=now + A_DAY)
            self.rows.put(again)
        self.redirect(now)
        return len(found)

    def drop(self, ids: Collection[str]) -> int:
        """Delete deliveries, except those that a courier has, and count them as dropped; return how many."""
        found = _at_hand(self.rows, ids)
        for row in found:
            self.rows.remove(row, "dropped")
        return len(found)

    def use_sinks(
        self, terms: Mapping[str, Terms], targets: Callable[[Delivery], Targets], now: float
    ) -> list[Delivery]:
        """Set the configured sinks, and ``targets``: where the routes send a delivery. Then ``redirect``.

        This ends the pauses that receivers asked for: a sink may have another receiver now.
        """
        self.terms, self._targets = terms, targets
        self.rows.paused.clear()
        return self.redirect(now)

    def redirect(self, now: float) -> list[Delivery]:
        """Move deliveries from removed sinks to those of the present routes; if there are none, they are dead.

        A repetition is sent anew, so that an alert goes on under another name; without a route it ends.
        A fallback that names a removed sink is replaced in the same way. Returns the deliveries of removed sinks.
        """
        if self.terms is None:
            return []
        for row in _at_hand(self.rows, self.rows.by_id):
            if not set(row.fallback) <= self.terms.keys():
                self.rows.put(replace(row, fallback=self._targets(row).fallback))
        known = _at_hand(self.rows, self.rows.by_id)
        left = [row for row in known if row.sink not in self.terms and row.state != "dead"]
        for row in left:
            found = self._targets(row)
            names = found.fallback if row.note else found.sinks  # a note: it came as a fallback
            if names := tuple(name for name in names if name in self.terms and name not in row.others):
                self.rows.remove(row, "withdrawn")
                others = tuple(name for name in row.others if name in self.terms)
                expires = now + A_DAY if row.state == "repeating" else row.expires
                for name in names:  # with its ``seq``, so that ``advance`` still corrects its times
                    self._add(_to_sink(row, name, self.terms, others=others, expires=expires), now)
            elif row.state == "repeating":
                self.rows.remove(row)
            else:
                _bury(self.rows, row, f"no sink named {row.sink} is configured", now)
        return left


# ---- rules about several deliveries


def _at_hand(rows: OutboxRows, ids: Iterable[str]) -> list[Delivery]:
    """Return the deliveries with these ids that exist, and that no courier has."""
    return [rows.by_id[one] for one in ids if one in rows.by_id and one not in rows.given]


def _expire(rows: OutboxRows, now: float) -> None:
    """Remove the expired deliveries; one that a courier has is checked again after its result."""
    while rows.time_known and (one := rows.expiries.pop(now)) is not None:
        if one not in rows.given:
            rows.remove(rows.by_id[one], "expired")


def _push_out(rows: OutboxRows, bounds: Bounds, now: float, overflowed: Callable[[list[Delivery]], None]) -> None:
    """Remove what has expired, then what exceeds the bounds."""
    _expire(rows, now)
    order, removed = _removal_order(rows), list[Delivery]()
    while (len(rows.by_id) > bounds.rows or rows.size > bounds.size) and (row := next(order, None)) is not None:
        rows.remove(row, "overflowed")
        removed.append(row)
    overflowed(removed)


def _removal_order(rows: OutboxRows) -> Iterator[Delivery]:
    """Yield first repetitions, then dead letters, then the least severe and oldest of the sinks with the most rows.

    So a sink that is stuck fills the outbox at its own cost, and not at that of the others.
    """
    rank, found = Counter[str](), list[tuple[bool, bool, int, Delivery]]()
    for row in sorted(_at_hand(rows, rows.by_id), key=lambda row: (SEVERITIES.index(row.severity), -row.seq)):
        rank[row.sink] += 1  # within its sink: the highest one is removed first
        found.append((row.state != "repeating", row.state != "dead", -rank[row.sink], row))
    yield from (row for *_, row in sorted(found, key=lambda one: one[:3]))


def _bury(rows: OutboxRows, row: Delivery, error: str, now: float) -> Delivery:
    """Make a delivery dead: it is kept, and not sent again unless an operator asks for it."""
    rows.count(row.sink, "dead")
    # a heartbeat is not kept longer: it is of no use once the next one is due
    expires = row.expires if row.kind == "heartbeat" else now + DEAD_SECONDS
    fallback_at = None if row.fallback_at is None else min(row.fallback_at, now)
    dead = replace(row, state="dead", error=error, expires=expires, fallback_at=fallback_at, begun=False)
    rows.put(dead)
    return dead


def _followers(rows: OutboxRows, end: Delivery, terms: Mapping[str, Terms]) -> Iterator[Delivery]:
    """Yield the end of an event for each fallback sink that got an earlier message of it.

    Such a sink has a thread of the event, or still has a pending message of it.
    """
    for name in end.fallback:
        waits = any(row.state == "pending" for row in rows.of_event(end.event_key, name))
        if waits or (name, end.event_key) in rows.threads:
            note = f"an earlier message of this event came here instead of {end.sink}"
            yield _to_sink(end, name, terms, note=note, due=end.created, **_ALONE)


# ---- one delivery


def _after_failure(row: Delivery, result: SendResult, dice: float, now: float) -> Delivery:
    """Return the delivery with the time of its next attempt."""
    attempts = row.attempts + 1
    pause = back_off(attempts, FIRST_PAUSE, LONGEST_PAUSE) * dice
    at = min(row.fallback_at, now) if result.by_hand and row.fallback_at is not None else row.fallback_at
    return replace(row, attempts=attempts, due=now + pause, error=result.error, begun=False, fallback_at=at)


def _to_sink(row: Delivery, sink: str, terms: Mapping[str, Terms], **fields: Any) -> Delivery:
    """Return an untried copy for another sink, by its terms, with the same id as if a route led there."""
    own = terms.get(sink, Terms())
    untried = replace(row, attempts=0, state="pending", error="", begun=False, once=own.once)
    needless = row.is_reminder or (own.expire_on_end and row.kind in EXPIRING_KINDS)
    identity = delivery_id(row.change_id or row.delivery_id, sink)
    return replace(untried, sink=sink, delivery_id=identity, expires_with_event=needless, **fields)


def _fallback_copy(row: Delivery, sink: str, terms: Mapping[str, Terms], now: float) -> Delivery:
    """Return the copy for a sink of its fallback."""
    why = f"{row.sink} refused it" if row.state == "dead" else f"{row.sink} has not accepted it so far"
    note = f"{why}: {row.error}" if row.error else why
    return _to_sink(row, sink, terms, note=note, seq=0, due=now, expires=now + A_DAY, **_ALONE)


def _observed(latency: Mapping[str, Latency], row: Delivery, now: float) -> dict[str, Latency]:
    """Return the latencies with that of a delivery accepted now."""
    seconds = max(0.0, now - row.created)
    counts, total = latency.get(row.sink, ((0,) * (len(LATENCY_BOUNDS) + 1), 0.0))
    at = bisect_left(LATENCY_BOUNDS, seconds)
    return {**latency, row.sink: ((*counts[:at], counts[at] + 1, *counts[at + 1 :]), total + seconds)}
