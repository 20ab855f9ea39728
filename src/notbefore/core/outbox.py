"""``Outbox``: the deliveries that wait, and the rules by which they go. Pure: the clock and the dice are arguments.

Who owns an outbox gives it changes (``take``) and what a courier says (``exchange``), and writes down what changed
(``take_changes``, then ``written``). A courier is given deliveries and owns nothing: what it had when it ended is due
again (``release``). Within an event and a sink the order is kept: a delivery waits for the one before it, and until the
result of that one is written, or for ``WRITE_PATIENCE``.

``OutboxRows`` (``core/outbox_rows``) holds the deliveries and knows which may go; ``Outbox`` has the rules; what a
delivery becomes is said by functions at the end. Times are seconds on a clock that nobody sets.
"""

from bisect import bisect_left
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

FIRST_PAUSE: Final = 1.0  # seconds: the ceiling of the first pause after a failed attempt
LONGEST_PAUSE: Final = 300.0  # seconds: ... of all later ones; a fleet that was cut off does not come back at once
LONGEST_ASKED: Final = 3600.0  # seconds: what a Retry-After may ask for at most
WRITE_PATIENCE: Final = 1.0  # seconds for which a delivery waits until what it depends on is written
DEAD_SECONDS: Final = 30 * A_DAY  # how long a dead letter is kept
REPEAT_SECONDS: Final = 400 * A_DAY  # how long a delivery is repeated at most, when its event never ends
INTERRUPTED: Final = "interrupted: its courier ended while it ran; it is not run again"

_ALONE: Final[dict[str, Any]] = {"fallback": (), "fallback_at": None, "others": ()}


class Bounds(NamedTuple):
    """What an outbox may hold; beyond it, what is least severe and oldest is pushed out, and counted."""

    rows: int
    size: int  # bytes


OF_AN_AGENT: Final = Bounds(1_000, 2 * 1024 * 1024)
OF_A_FLEET: Final = Bounds(10_000, 64 * 1024 * 1024)


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
    by_hand: bool = False  # somebody has to put something right first: what is critical goes to its fallback at once


class Outbox:
    """For one thread at a time. ``dice`` gives random numbers from 0 to 1; ``patience``: see ``OutboxRows``."""

    def __init__(
        self, dice: Callable[[], float], bounds: Bounds = OF_AN_AGENT, patience: float = WRITE_PATIENCE
    ) -> None:
        self.rows = OutboxRows(patience)
        self._bounds = bounds
        self._dice = dice
        self.terms: Mapping[str, Terms] | None = None  # by sink; None: nobody has said which are configured
        self._targets: Callable[[Delivery], Targets] = lambda _row: Targets()
        self._restored = 0  # the last ``seq`` that was restored

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
        for one in sorted(image.rows, key=lambda row: row.seq):
            if one.delivery_id not in self.rows.by_id:
                row = one.shifted(now - image.clock - passed)
                row = row if counted else self._accepted(replace(row, seq=0))
                self.rows.put(row)
                if row.begun and row.state == "pending":
                    _bury(self.rows, row, INTERRUPTED, now)
        _push_out(self.rows, self._bounds, now)

    def advance(self, seconds: float) -> None:
        """So much time had passed unseen when this was restored: from now on the time is known."""
        self.rows.time_known = True
        for row in self.rows.chosen():
            self.rows.put(row.shifted(-seconds) if row.seq <= self._restored else row)

    # ---- what happens to events

    def take(self, change: Change, made: Sequence[Delivery], now: float, wall: float) -> None:
        """Take a change and its deliveries: what it makes needless is withdrawn. ``wall``: Unix seconds of ``now``."""
        key, over = change.event.key, change.kind in OUTCOMES
        if over:
            self._withdraw(key, now, lambda row: row.expires_with_event, over=True)
        elif change.kind == "started" or change.not_before_changed:  # those of a new NotBefore are among what is made
            self._withdraw(key, now, lambda row: row.is_reminder)
        if change.no_longer_affected:
            self.no_longer_affected([key], now)
            over = True
        made = [replace(one, final=over) for one in made]
        ends = [end for one in made for end in _followers(self.rows, one, self.terms or {})] if over else []
        self.put([*made, *ends], now, wall)
        self._spare(self.rows.of_event(key), [end.sink for end in ends])  # nothing of the event comes after its end

    def _spare(self, rows: Iterable[Delivery], sinks: Collection[str]) -> None:
        """From now on these deliveries do not go to these sinks as their fallback."""
        for row in rows:
            left = tuple(name for name in row.fallback if name not in sinks)
            if left != row.fallback:
                self.rows.put(replace(row, fallback=left))

    def put(self, made: Iterable[Delivery], now: float, wall: float) -> None:
        """Add deliveries; one whose id is there already is left as it is. ``wall``: Unix seconds of ``now``."""
        for one in made:
            self._add(one.shifted(now - wall), now)
        _push_out(self.rows, self._bounds, now)

    def no_longer_affected(self, event_keys: Iterable[str], now: float) -> None:
        """Withdraw the reminders of events, and end their repetitions: they do not affect this VM any longer."""
        for key in event_keys:
            self._withdraw(key, now, lambda row: row.is_reminder, over=True)

    def leave(self, event_keys: Collection[str]) -> None:
        """Leave these events to another outbox, which has them now: nothing of them is sent any more."""
        for row in [row for key in event_keys for row in self.rows.of_event(key)]:
            self.rows.remove(row, "withdrawn")
        for lane in [lane for lane in self.rows.threads if lane[1] in event_keys]:
            self.rows.remember_thread(lane, None)

    def _withdraw(self, key: str, now: float, needless: Callable[[Delivery], bool], *, over: bool = False) -> None:
        """Withdraw what is ``needless`` of an event; ``over``: nothing of it is repeated any more."""
        for row in self.rows.of_event(key):
            if row.state == "pending" and needless(row):
                if row.delivery_id in self.rows.given:  # it may be delivered at this moment; it is not tried again
                    self.rows.put(replace(row, expires=min(row.expires, now), fallback_at=None, final=True))
                else:  # where its own time had not come, and nobody tried to send it, nobody missed anything
                    self.rows.remove(row, "expired" if row.attempts > 0 or not row.is_reminder else "withdrawn")
            elif over and row.state == "pending":
                self.rows.put(replace(row, final=True))
            elif over and row.state == "repeating":
                self.rows.remove(row)

    def _add(self, one: Delivery, now: float) -> None:
        """Accept a delivery; it replaces what is repeated of the event, and its reminders."""
        if one.delivery_id in self.rows.by_id:
            return
        for other in self.rows.of_event(one.event_key, one.sink):
            if other.state == "repeating":
                self.rows.remove(other)
        if one.kind not in ("reminder", *APPROVAL_KINDS):
            self._withdraw(one.event_key, now, lambda other: other.is_reminder and other.sink == one.sink)
        self.rows.hold(one.delivery_id, now)
        self.rows.put(self._accepted(one))

    def _accepted(self, one: Delivery) -> Delivery:
        """Count what is new, if it is to be delivered; returns it with its place in the order, if it has none."""
        if one.state != "repeating":
            self.rows.count(one.sink, "accepted")
        self.rows.ledger = replace(self.rows.ledger, seq=self.rows.ledger.seq + 1)
        return replace(one, seq=one.seq or self.rows.ledger.seq)

    # ---- the courier

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int], now: float) -> list[Delivery]:
        """Take in results, and give what is due, the most severe first; ``room``: how many deliveries a sink can take.

        Of one event a sink is given one delivery at a time.
        """
        for result in results:
            self._record(result, now)
        _expire(self.rows, now)
        while (one := self.rows.fallbacks.pop(now)) is not None:  # it is dead, or has waited for too long
            row = self.rows.by_id[one]
            for name in row.fallback:
                self._add(_fallback_copy(row, name, self.terms or {}, now), now)
            self.rows.put(replace(row, fallback_at=None))
            same = [other for other in self.rows.of_event(row.event_key) if other.change_id == row.change_id]
            self._spare(same, row.fallback)  # another sink that fails has the same fallback
        return [given for sink, count in room.items() for given in self._give(sink, count, now)]

    def release(self, now: float) -> list[Delivery]:
        """The courier has ended: what it had is due again; returns what is dead instead, because it may run once."""
        left, dead = [self.rows.by_id[one] for one in sorted(self.rows.given)], []
        self.rows.given.clear()
        for row in left:
            if row.once:
                dead.append(_bury(self.rows, row, INTERRUPTED, now))
            else:
                self.rows.put(row)
        _expire(self.rows, now)
        return dead

    def _give(self, sink: str, count: int, now: float) -> list[Delivery]:
        """What a courier is given for a sink."""
        found: list[Delivery] = []
        while len(found) < count and (row := self.rows.pop(sink, now)) is not None:
            if row.once and not row.begun:  # written first, and given after it
                self.rows.hold(row.delivery_id, now)
                self.rows.put(replace(row, begun=True))
                continue
            self.rows.given.add(row.delivery_id)
            found.append(replace(row, thread=self.rows.threads.get(row.lane)))
        return found

    def _record(self, result: SendResult, now: float) -> None:
        """What became of a delivery that a courier was given."""
        row, rows = self.rows.by_id.get(result.delivery_id), self.rows
        given = result.delivery_id in rows.given
        rows.given.discard(result.delivery_id)
        if row is None or row.state == "dead" or not (given or result.outcome == "accepted"):
            return  # an operator dropped it, a full outbox pushed it out, or its courier was given up
        rows.hold(row.lane, now)
        if result.retry_after is not None:
            rows.paused[row.sink] = now + min(result.retry_after, LONGEST_ASKED)
        if result.outcome == "accepted":
            self._delivered(row, result, now)
        elif result.outcome == "returned":
            rows.put(row)
        elif result.outcome == "refused" and row.state != "repeating" and row.expires > now:
            _bury(self.rows, replace(row, attempts=row.attempts + 1), result.error, now)
        else:  # a repetition that was refused is tried again as well: the message itself was delivered
            rows.count(row.sink, "failed")
            rows.put(_after_failure(row, result, self._dice(), now))

    def _delivered(self, row: Delivery, result: SendResult, now: float) -> None:
        """It is over, or repeated while its event lasts."""
        rows = self.rows
        # a sink that names no thread, and got this as another one's fallback, is to get the event's end as well
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

    # ---- what operators ask

    def retry(self, ids: Collection[str], now: float) -> int:
        """Make deliveries due now, for a day, as if never tried; returns how many. What a courier has is left alone.

        A pause that their receivers have asked for is over.
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
        """Delete deliveries, and count them as dropped; returns how many. What a courier has is left alone."""
        found = _at_hand(self.rows, ids)
        for row in found:
            self.rows.remove(row, "dropped")
        return len(found)

    def use_sinks(
        self, terms: Mapping[str, Terms], targets: Callable[[Delivery], Targets], now: float
    ) -> list[Delivery]:
        """From now on these are configured; ``targets``: where a delivery would go by the routes. See ``redirect``.

        A pause that a receiver has asked for is over: it may be another one now.
        """
        self.terms, self._targets = terms, targets
        self.rows.paused.clear()
        return self.redirect(now)

    def redirect(self, now: float) -> list[Delivery]:
        """What waits for a sink that is not configured any more goes where the routes lead now, or is dead.

        A fallback of that name is those of the routes now. Returns what left its sink.
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
            names = found.fallback if row.note else found.sinks  # with a note it came as a fallback
            if row.state == "repeating":
                self.rows.remove(row)
            elif not (names := tuple(name for name in names if name in self.terms and name not in row.others)):
                _bury(self.rows, row, f"no sink of the name {row.sink} is configured", now)
            else:
                self.rows.remove(row, "withdrawn")
                for name in names:  # in its place: else its times would not move with those that were restored
                    self._add(_to_sink(row, name, self.terms), now)
        return left


# ---- rules about several of them


def _at_hand(rows: OutboxRows, ids: Iterable[str]) -> list[Delivery]:
    """Those of these that are there, and that no courier has."""
    return [rows.by_id[one] for one in ids if one in rows.by_id and one not in rows.given]


def _expire(rows: OutboxRows, now: float) -> None:
    """Remove what is too old; of what a courier has it is looked at again when it is known what came of it."""
    while rows.time_known and (one := rows.expiries.pop(now)) is not None:
        if one not in rows.given:
            rows.remove(rows.by_id[one], "expired")


def _push_out(rows: OutboxRows, bounds: Bounds, now: float) -> None:
    """Remove what is too much: repetitions first, then dead letters, then the least severe and oldest."""
    _expire(rows, now)
    if len(rows.by_id) > bounds.rows or rows.size > bounds.size:
        for row in sorted(_at_hand(rows, rows.by_id), key=_worth):
            if len(rows.by_id) > bounds.rows or rows.size > bounds.size:
                rows.remove(row, "overflowed")


def _bury(rows: OutboxRows, row: Delivery, error: str, now: float) -> Delivery:
    """It is dead: kept, and not sent again unless an operator asks for it."""
    rows.count(row.sink, "dead")
    # a heartbeat is of no use once the next one is due: it is not kept longer
    expires = row.expires if row.kind == "heartbeat" else now + DEAD_SECONDS
    fallback_at = None if row.fallback_at is None else min(row.fallback_at, now)
    dead = replace(row, state="dead", error=error, expires=expires, fallback_at=fallback_at, begun=False)
    rows.put(dead)
    return dead


def _followers(rows: OutboxRows, end: Delivery, terms: Mapping[str, Terms]) -> Iterator[Delivery]:
    """The end of an event for those sinks of the fallback that were given its beginning.

    A sink was given it where a thread of the event is known, or a message of it is still to be sent there.
    """
    for name in end.fallback:
        waits = any(row.state == "pending" for row in rows.of_event(end.event_key, name))
        if waits or (name, end.event_key) in rows.threads:
            note = f"an earlier message of this event came here instead of {end.sink}"
            yield _to_sink(end, name, terms, note=note, due=end.created, **_ALONE)


# ---- what is asked of one, and what it becomes


def _worth(row: Delivery) -> tuple[bool, bool, int, int]:
    """What is pushed out first."""
    return row.state != "repeating", row.state != "dead", -SEVERITIES.index(row.severity), row.seq


def _after_failure(row: Delivery, result: SendResult, dice: float, now: float) -> Delivery:
    """It is tried again later."""
    attempts = row.attempts + 1
    pause = back_off(attempts, FIRST_PAUSE, LONGEST_PAUSE) * dice
    if result.retry_after is not None:
        pause = max(pause, min(result.retry_after, LONGEST_ASKED))
    at = min(row.fallback_at, now) if result.by_hand and row.fallback_at is not None else row.fallback_at
    return replace(row, attempts=attempts, due=now + pause, error=result.error, begun=False, fallback_at=at)


def _to_sink(row: Delivery, sink: str, terms: Mapping[str, Terms], **fields: Any) -> Delivery:
    """The same for another sink, by its terms: not tried yet, under the id that it has there by a route of its own."""
    own = terms.get(sink, Terms())
    untried = replace(row, attempts=0, state="pending", error="", begun=False, once=own.once)
    needless = row.is_reminder or (own.expire_on_end and row.kind in EXPIRING_KINDS)
    identity = delivery_id(row.change_id or row.delivery_id, sink)
    return replace(untried, sink=sink, delivery_id=identity, expires_with_event=needless, **fields)


def _fallback_copy(row: Delivery, sink: str, terms: Mapping[str, Terms], now: float) -> Delivery:
    """What is sent to a sink of its fallback."""
    why = f"{row.sink} refused it" if row.state == "dead" else f"{row.sink} has not accepted it so far"
    note = f"{why}: {row.error}" if row.error else why
    return _to_sink(row, sink, terms, note=note, seq=0, due=now, expires=now + A_DAY, **_ALONE)


def _observed(latency: Mapping[str, Latency], row: Delivery, now: float) -> dict[str, Latency]:
    """With the latency of a delivery that was accepted now."""
    seconds = max(0.0, now - row.created)
    counts, total = latency.get(row.sink, ((0,) * (len(LATENCY_BOUNDS) + 1), 0.0))
    at = bisect_left(LATENCY_BOUNDS, seconds)
    return {**latency, row.sink: ((*counts[:at], counts[at] + 1, *counts[at + 1 :]), total + seconds)}
