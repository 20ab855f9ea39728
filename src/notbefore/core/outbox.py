"""``Outbox``: the waiting deliveries, and the rules for sending them. Pure.

The clock and the dice are arguments.

Its owner adds changes (``take``), passes on the results of a courier (``exchange``), and stores the
modified rows (``OutboxRows.take``, then ``written``). A courier gets deliveries and owns nothing:
those that it had when it ended are due again (``release``). The deliveries of one event to one sink
are sent in order: each waits for the result of the previous one, and until that result is on disk,
but at most ``DISK_PATIENCE`` for the disk.

``OutboxRows`` (``core/outbox_rows``) holds the deliveries and knows which may be sent; ``Outbox``
has the rules; the functions at the end make the new state of a delivery. Times are seconds on a
clock that cannot be set.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import APPROVAL_KINDS, Change
from notbefore.core.delivery import Delivery, Lane, Targets, for_sink, is_last
from notbefore.core.duration import back_off
from notbefore.core.event_types import SEVERITIES
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.outbox_rows import LATENCY_BOUNDS, Latency, OutboxImage, OutboxRows
from notbefore.core.routing import A_DAY, Terms

FIRST_PAUSE: Final = 1.0  # seconds: the upper limit of the pause after the first failed attempt
LONGEST_PAUSE: Final = 300.0  # seconds: the limit of later ones; random, so that a fleet spreads
LONGEST_ASKED: Final = 3600.0  # seconds: a longer Retry-After is shortened to this
DISK_PATIENCE: Final = 1.0  # seconds that a delivery waits at most for what must be on disk first
DEAD_SECONDS: Final = 30 * A_DAY  # a dead letter is kept so long
REPEAT_SECONDS: Final = 400 * A_DAY  # a delivery is repeated so long, if its event never ends
INTERRUPTED: Final = "interrupted: its courier ended while it ran; it is not run again"
KEEPS_REMINDERS: Final = frozenset({"reminder", *APPROVAL_KINDS})  # these replace no reminder


class Bounds(NamedTuple):
    """The limits of an outbox; beyond them deliveries are removed, and counted."""

    rows: int
    size: int  # bytes


OF_AN_AGENT: Final = Bounds(1_000, 2 * 1024 * 1024)
OF_A_FLEET: Final = Bounds(10_000, 64 * 1024 * 1024)


class SendResult(Struct, frozen=True):
    """The result of a delivery that a courier had.

    ``accepted`` by the receiver; ``refused`` for good; ``failed``: to be tried again; ``returned``:
    not tried, as the receiver asked for a pause.
    """

    delivery_id: str
    outcome: Literal["accepted", "refused", "failed", "returned"]
    error: str = ""
    retry_after: float | None = None  # seconds: the receiver asks for a pause of the whole sink
    # the sink opened something for the event, even if the delivery failed: it gets this text back
    # with later attempts and deliveries, and it gets the end, by any route or none
    thread: str | None = None
    repeat: float | None = None  # seconds until it is sent again, while the event lasts
    by_hand: bool = False  # a person must act first: a critical delivery uses its fallback now


class Outbox:
    """Use it in one thread at a time. After each step, its owner calls ``make_room``.

    ``dice`` gives random numbers from 0 to 1; ``patience``: see ``OutboxRows``.
    """

    def __init__(
        self,
        dice: Callable[[], float],
        bounds: Bounds = OF_AN_AGENT,
        patience: float = DISK_PATIENCE,
    ) -> None:
        self.rows = OutboxRows(patience)
        self.terms: Mapping[str, Terms] | None = None  # by sink; None: the sinks are not known yet
        self._bounds = bounds
        self._dice = dice
        self._targets: Callable[[Delivery], Targets] | None = None  # known together with ``terms``
        self._restored_seq = 0  # the highest ``seq`` of the restored deliveries

    # ---- from the disk

    def restore(
        self,
        image: OutboxImage,
        now: float,
        passed: float = 0.0,
        *,
        time_known: bool = True,
    ) -> None:
        """Add the stored deliveries; those that are here already stay as they are.

        ``passed``: seconds since they were stored, as far as that is known. A delivery that may be
        attempted only once is dead if a courier may have had it: no one knows how far it came.
        """
        self.rows.time_known = time_known
        self._restored_seq = image.ledger.seq
        has_counts = image.ledger.seq > 0  # an image of a part of an outbox has none
        if has_counts:
            self.rows.ledger = image.ledger

        for lane, thread in image.threads:
            self.rows.remember_thread(lane, thread)

        for stored in sorted(image.rows, key=_seq):
            if stored.delivery_id in self.rows.by_id:
                continue
            row = stored.shifted(now - image.clock - passed)
            if not has_counts:
                row = self._accept(replace(row, seq=0))
            self.rows.put(row)
            if row.begun and row.state == "pending":
                self._bury(row, INTERRUPTED, now)

    def advance(self, seconds: float) -> None:
        """Correct the times of the restored deliveries: from now on the time is known.

        ``seconds`` had passed before they were restored, and were not counted.
        """
        self.rows.time_known = True
        for row in self.rows.chosen():
            if row.seq <= self._restored_seq:
                self.rows.put(row.shifted(-seconds))
            else:
                self.rows.put(row)  # a reminder may be due now

    # ---- changes of events

    def take(
        self,
        change: Change,
        deliveries: Sequence[Delivery],
        now: float,
        wall: float,
        last: Delivery | None = None,
    ) -> list[str]:
        """Add the deliveries of a change, and withdraw those that it makes needless.

        ``wall``: Unix seconds of ``now``. ``last``: see ``delivery.last_message``; it also goes to
        the sinks that opened something for the event. Return those of them that are no longer
        configured: what they opened stays open.
        """
        key = change.event.key
        if change.kind in OUTCOMES:
            self._end(key, now)
        elif change.no_longer_affected:
            self.no_longer_affected([key], now)
        elif change.kind == "started" or change.not_before_changed:
            self._withdraw_reminders(self.rows.of_event(key), now)  # the change has new ones

        final = [replace(delivery, final=is_last(change)) for delivery in deliveries]
        copies: list[Delivery] = []
        removed: list[str] = []
        if last is not None:
            routed = {delivery.sink for delivery in deliveries}
            opened = [sink for sink in self._opened(key) if sink not in routed]
            removed = [sink for sink in opened if not self._is_configured(sink)]
            copies = [self._last_copy(last, sink) for sink in opened if sink not in removed]
        self.put([*final, *copies], now, wall)

        if copies:  # these sinks get no older message after the end
            self._spare(self.rows.of_event(key), [copy.sink for copy in copies])
        for sink in removed:
            self.rows.remember_thread((sink, key), None)
        return removed

    def put(self, deliveries: Iterable[Delivery], now: float, wall: float) -> None:
        """Add deliveries, except those whose id is here already; ``wall``: as in ``take``."""
        for delivery in deliveries:
            self._add(delivery.shifted(now - wall), now)

    def make_room(self, now: float) -> list[Delivery]:
        """Remove expired deliveries, then those that exceed the bounds; return the latter."""
        self._expire(now)
        removed: list[Delivery] = []
        if not self._is_too_full():
            return removed

        for row in self._removal_order():
            self.rows.remove(row, "overflowed")
            removed.append(row)
            if not self._is_too_full():
                break
        return removed

    def no_longer_affected(self, event_keys: Iterable[str], now: float) -> None:
        """Withdraw the reminders of events that no longer affect this VM.

        This also ends their repetitions.
        """
        for key in event_keys:
            for row in self.rows.of_event(key):
                if row.state == "pending" and row.is_reminder:
                    self._withdraw(row, now)
                else:
                    self._end_repetition(row)

    def leave(self, event_keys: Collection[str]) -> None:
        """Remove all deliveries of these events: another outbox sends them now."""
        for key in event_keys:
            for row in self.rows.of_event(key):
                self.rows.remove(row, "withdrawn")

        for lane in list(self.rows.threads):
            _, event_key = lane
            if event_key in event_keys:
                self.rows.remember_thread(lane, None)

    def _end(self, event_key: str, now: float) -> None:
        """Withdraw the deliveries that are useless after the end of an event; end repetitions."""
        for row in self.rows.of_event(event_key):
            if row.state == "pending" and row.expires_with_event:
                self._withdraw(row, now)
            else:
                self._end_repetition(row)

    def _end_repetition(self, row: Delivery) -> None:
        """Remove a repetition; note that another delivery is not to be repeated.

        The note is also for a dead letter, which an operator may send again.
        """
        if row.state == "repeating":
            self.rows.remove(row)
        else:
            self.rows.put(replace(row, final=True))

    def _withdraw_reminders(self, rows: Iterable[Delivery], now: float) -> None:
        for row in rows:
            if row.state == "pending" and row.is_reminder:
                self._withdraw(row, now)

    def _withdraw(self, row: Delivery, now: float) -> None:
        """Withdraw a pending delivery that is no longer needed."""
        if self.rows.is_given(row):
            # the courier may be sending it: its result counts, and it is not tried again
            expires = min(row.expires, now)
            self.rows.put(replace(row, expires=expires, fallback_at=None, final=True))
        elif row.is_reminder and row.attempts == 0:
            self.rows.remove(row, "withdrawn")  # no one missed it
        else:
            self.rows.remove(row, "expired")  # it was not delivered in time

    def _spare(self, rows: Iterable[Delivery], sinks: Collection[str]) -> None:
        """Remove these sinks from the fallback of these deliveries."""
        for row in rows:
            fallback = tuple(sink for sink in row.fallback if sink not in sinks)
            if fallback != row.fallback:
                self.rows.put(replace(row, fallback=fallback))

    def _add(self, delivery: Delivery, now: float) -> None:
        """Add a delivery; it replaces the repetition and the reminders of its lane."""
        if delivery.delivery_id in self.rows.by_id:
            return

        others = list(self.rows.lane_rows(delivery.lane).others.values())
        for other in others:
            if other.state == "repeating":
                self.rows.remove(other)
        if delivery.kind not in KEEPS_REMINDERS:
            self._withdraw_reminders(others, now)

        self.rows.hold(delivery.lane, now)
        self.rows.put(self._accept(delivery))

    def _accept(self, delivery: Delivery) -> Delivery:
        """Count a new delivery, unless it only repeats; return it with its place in the order."""
        if delivery.state != "repeating":
            self.rows.count(delivery.sink, "accepted")
        seq = self.rows.ledger.seq + 1
        self.rows.ledger = replace(self.rows.ledger, seq=seq)
        if delivery.seq:
            return delivery  # it was moved from another sink, and keeps its place
        return replace(delivery, seq=seq)

    def _opened(self, event_key: str) -> list[str]:
        """Return the sinks that have a thread of an event, or will have one."""
        opened: dict[str, None] = {}
        for sink, lane_key in self.rows.threads:
            if lane_key == event_key:
                opened[sink] = None
        for row in self.rows.of_event(event_key):
            if row.state == "pending" and (row.note or self._terms_of(row.sink).needs_end):
                opened[row.sink] = None
        return list(opened)

    def _last_copy(self, last: Delivery, sink: str) -> Delivery:
        """Return the last message of an event for a sink that no route of the change leads to."""
        terms = self._terms_of(sink)
        return replace(
            for_sink(last, sink, terms),
            expires=last.created + terms.expire_after,
            note="an earlier message of this event came here",
            final=True,
        )

    def _is_configured(self, sink: str) -> bool:
        return self.terms is None or sink in self.terms

    def _terms_of(self, sink: str) -> Terms:
        if self.terms is None:
            return Terms()
        return self.terms.get(sink, Terms())

    # ---- the courier

    def exchange(
        self,
        results: Iterable[SendResult],
        limits: Mapping[str, int],
        now: float,
    ) -> list[Delivery]:
        """Record results, and return due deliveries, the most severe first.

        ``limits``: sink -> how many it may have at a time, only one of each event.
        """
        for result in results:
            self._record(result, now)
        self._expire(now)
        self._fall_back(now)

        under_way = Counter(row.sink for row in self.rows.under_way)
        batch: list[Delivery] = []
        for sink, limit in limits.items():
            batch += self._give(sink, limit - under_way[sink], now)
        return batch

    def release(self, now: float, ids: Collection[str] | None = None) -> list[Delivery]:
        """Make the deliveries of an ended courier due again: those with these ids, or all.

        Those that may be attempted only once are dead instead, and returned.
        """
        released = self.rows.under_way
        if ids is not None:
            released = [row for row in released if row.delivery_id in ids]
        for row in released:
            self.rows.take_back(row)

        dead: list[Delivery] = []
        for row in released:
            if row.once:
                dead.append(self._bury(row, INTERRUPTED, now))
            else:
                self.rows.put(row)
        self._expire(now)
        return dead

    def _give(self, sink: str, count: int, now: float) -> list[Delivery]:
        """Return the deliveries that a courier gets for a sink, ``count`` at most."""
        batch: list[Delivery] = []
        room = count - self.rows.beginning(sink, now)
        while len(batch) < room:
            row = self.rows.pop(sink, now)
            if row is None:
                break

            if row.once and not row.begun:  # the disk must know first that it begins
                if self.rows.hold(row.lane, now):
                    room -= 1
                self.rows.put(replace(row, begun=True))
                continue

            self.rows.give(row)
            batch.append(replace(row, thread=self.rows.threads.get(row.lane)))
        return batch

    def _fall_back(self, now: float) -> None:
        """Copy deliveries that are dead, or have waited too long, to their fallback sinks."""
        while True:
            fallback_id = self.rows.fallbacks.pop(now)
            if fallback_id is None:
                return

            row = self.rows.by_id[fallback_id]
            for sink in row.fallback:
                self._add(self._fallback_copy(row, sink, now), now)
            self.rows.put(replace(row, fallback_at=None))

            # if another sink also fails, the fallback must not get the same change twice
            event_rows = self.rows.of_event(row.event_key)
            same_change = [other for other in event_rows if other.change_id == row.change_id]
            self._spare(same_change, row.fallback)

    def _fallback_copy(self, row: Delivery, sink: str, now: float) -> Delivery:
        """Return the copy of a delivery for a sink of its fallback."""
        note = f"{row.sink} has not accepted it so far"
        if row.state == "dead":
            note = f"{row.sink} refused it"
        if row.error:
            note = f"{note}: {row.error}"
        copy = _alone(for_sink(row, sink, self._terms_of(sink)))
        return replace(copy, note=note, seq=0, due=now, expires=now + A_DAY)

    # ---- results

    def _record(self, result: SendResult, now: float) -> None:
        """Record the result of a delivery that a courier had."""
        row = self.rows.by_id.get(result.delivery_id)
        if row is None:
            return
        was_given = self.rows.take_back(row)
        if row.state == "dead":
            return
        if not was_given and result.outcome != "accepted":
            return  # the courier was given up: only a late acceptance counts

        self.rows.hold(row.lane, now)
        if result.outcome != "accepted" and result.thread is not None:
            self._store_thread(row.lane, result.thread)  # the next attempt continues there
        if result.outcome == "accepted":
            self._record_acceptance(row, result, now)
        elif result.outcome == "returned":
            self.rows.put(row)
        elif result.outcome == "refused" and _can_be_refused(row, now):
            self._bury(replace(row, attempts=row.attempts + 1), result.error, now)
        else:
            self.rows.count(row.sink, "failed")
            self.rows.put(_after_failure(row, result, self._dice(), now))

        if result.retry_after is not None:
            self.rows.pause(row.sink, now + min(result.retry_after, LONGEST_ASKED), now)

    def _record_acceptance(self, row: Delivery, result: SendResult, now: float) -> None:
        """Count an accepted delivery; remove it, or repeat it while its event lasts."""
        self._remember_thread(row, result)
        if row.state != "repeating":
            self.rows.count(row.sink, "delivered")
            latency = _observed(self.rows.ledger.latency, row, now)
            self.rows.ledger = replace(self.rows.ledger, latency=latency)

        if result.repeat is None or row.final or self._is_superseded(row):
            self.rows.remove(row)
        else:
            self._repeat(row, result.repeat, now)

    def _remember_thread(self, row: Delivery, result: SendResult) -> None:
        """Remember that a sink has opened something for an event, until its last message."""
        if row.final and not self._is_superseded(row):
            self.rows.remember_thread(row.lane, None)
            return

        thread = result.thread
        is_fallback = row.note != ""
        must_get_end = is_fallback or self._terms_of(row.sink).needs_end
        if thread is None and must_get_end:
            thread = ""
        if thread is not None:
            self._store_thread(row.lane, thread)

    def _store_thread(self, lane: Lane, thread: str) -> None:
        """Store what a sink has opened for an event; above the bound, forget the oldest."""
        self.rows.remember_thread(lane, thread)
        if len(self.rows.threads) > self._bounds.rows:
            oldest = next(iter(self.rows.threads))
            self.rows.remember_thread(oldest, None)

    def _is_superseded(self, row: Delivery) -> bool:
        """Whether another message of its lane waits, which will be repeated instead."""
        queued = self.rows.lane_rows(row.lane).queued
        if row.delivery_id in queued:
            return len(queued) > 1
        return len(queued) > 0

    def _repeat(self, row: Delivery, seconds: float, now: float) -> None:
        """Repeat an accepted delivery after ``seconds``, in place of the one repeated so far."""
        for other in list(self.rows.lane_rows(row.lane).others.values()):
            if other.state == "repeating" and other.delivery_id != row.delivery_id:
                self.rows.remove(other)

        expires = row.expires
        if row.state != "repeating":
            expires = now + REPEAT_SECONDS
        repetition = replace(
            row,
            state="repeating",
            due=now + seconds,
            expires=expires,
            fallback_at=None,
            attempts=0,
            error="",
        )
        self.rows.put(repetition)

    # ---- requests of operators

    def retry(self, ids: Collection[str], now: float) -> int:
        """Make deliveries due now, for a day, as if never tried; return how many.

        Those that a courier has stay as they are. This ends the pauses of their sinks.
        """
        rows = self._at_hand(ids)
        for row in rows:
            self.rows.paused.pop(row.sink, None)
            untried = replace(row, due=now, attempts=0, begun=False)
            if row.state != "repeating":
                untried = replace(untried, state="pending", expires=now + A_DAY)
            self.rows.put(untried)
        self.redirect(now)
        return len(rows)

    def drop(self, ids: Collection[str]) -> int:
        """Delete deliveries, and count them as dropped; return how many.

        Those that a courier has stay as they are.
        """
        rows = self._at_hand(ids)
        for row in rows:
            self.rows.remove(row, "dropped")
        return len(rows)

    # ---- the configured sinks

    def use_sinks(
        self, terms: Mapping[str, Terms], targets: Callable[[Delivery], Targets], now: float
    ) -> list[Delivery]:
        """Set the configured sinks, and ``targets``: where the routes send a delivery.

        Then ``redirect``. This ends all pauses: a sink may have another receiver now.
        """
        self.terms = terms
        self._targets = targets
        self.rows.paused.clear()
        return self.redirect(now)

    def redirect(self, now: float) -> list[Delivery]:
        """Move deliveries from removed sinks to those of the present routes; return them.

        Without a route they are dead. A repetition is sent again, so that an alert continues under
        another name; without a route it ends. A fallback that names a removed sink is replaced in
        the same way.
        """
        if self.terms is None or self._targets is None:
            return []
        self._replace_removed_fallbacks(self.terms, self._targets)

        at_hand = self._at_hand(self.rows.by_id)
        without_sink = [row for row in at_hand if row.sink not in self.terms]
        redirected = [row for row in without_sink if row.state != "dead"]
        for row in redirected:
            self._redirect(row, self.terms, self._targets(row), now)
        return redirected

    def _replace_removed_fallbacks(
        self, terms: Mapping[str, Terms], targets: Callable[[Delivery], Targets]
    ) -> None:
        for row in self._at_hand(self.rows.by_id):
            if not set(row.fallback) <= terms.keys():
                self.rows.put(replace(row, fallback=targets(row).fallback))

    def _redirect(
        self, row: Delivery, terms: Mapping[str, Terms], targets: Targets, now: float
    ) -> None:
        """Move a delivery whose sink was removed."""
        candidates = targets.sinks
        if row.note:  # it came to its sink as a fallback
            candidates = targets.fallback
        sinks = [sink for sink in candidates if sink in terms and sink not in row.others]

        if sinks:
            self._move(row, sinks, terms, now)
        elif row.state == "repeating":
            self.rows.remove(row)
        else:
            self._bury(row, f"no sink named {row.sink} is configured", now)

    def _move(
        self,
        row: Delivery,
        sinks: Iterable[str],
        terms: Mapping[str, Terms],
        now: float,
    ) -> None:
        """Replace a delivery by one for each of these sinks."""
        self.rows.remove(row, "withdrawn")
        others = tuple(sink for sink in row.others if sink in terms)
        expires = row.expires
        if row.state == "repeating":
            expires = now + A_DAY
        for sink in sinks:
            copy = for_sink(row, sink, self._terms_of(sink))  # its ``seq`` is for ``advance``
            self._add(replace(copy, others=others, expires=expires), now)

    # ---- the bounds

    def _at_hand(self, ids: Iterable[str]) -> list[Delivery]:
        """Return the deliveries with these ids that exist, and that no courier has."""
        rows = [self.rows.by_id[each_id] for each_id in ids if each_id in self.rows.by_id]
        return [row for row in rows if not self.rows.is_given(row)]

    def _expire(self, now: float) -> None:
        """Remove the expired deliveries.

        One that a courier has is checked again after its result.
        """
        if not self.rows.time_known:
            return
        while True:
            expired_id = self.rows.expiries.pop(now)
            if expired_id is None:
                return
            row = self.rows.by_id[expired_id]
            if not self.rows.is_given(row):
                self.rows.remove(row, "expired")

    def _is_too_full(self) -> bool:
        return len(self.rows.by_id) > self._bounds.rows or self.rows.size > self._bounds.size

    def _removal_order(self) -> list[Delivery]:
        """Return all deliveries in the order in which a full outbox removes them.

        Repetitions come first, then dead letters, then the deliveries of the fullest sinks. Of a
        sink, the least severe and oldest come first. So a sink that is stuck fills the outbox at
        its own cost, and not at that of the others.
        """
        ranks: Counter[str] = Counter()  # by sink; the delivery with the highest is removed first
        ranked: list[tuple[bool, bool, int, Delivery]] = []
        rows = sorted(self._at_hand(self.rows.by_id), key=_most_severe_and_newest_first)
        for row in rows:
            ranks[row.sink] += 1
            is_repetition = row.state == "repeating"
            is_dead = row.state == "dead"
            ranked.append((not is_repetition, not is_dead, -ranks[row.sink], row))
        ranked.sort(key=_without_row)
        return [row for _, _, _, row in ranked]

    def _bury(self, row: Delivery, error: str, now: float) -> Delivery:
        """Make a delivery dead: it is kept, and only an operator may send it again."""
        self.rows.count(row.sink, "dead")
        expires = now + DEAD_SECONDS
        if row.kind == "heartbeat":
            expires = row.expires  # it is of no use once the next one is due

        fallback_at = row.fallback_at
        if fallback_at is not None:
            fallback_at = min(fallback_at, now)

        dead = replace(
            row,
            state="dead",
            error=error,
            expires=expires,
            fallback_at=fallback_at,
            begun=False,
        )
        self.rows.put(dead)
        return dead


# ---- one delivery


def _can_be_refused(row: Delivery, now: float) -> bool:
    """Whether a delivery is dead once its receiver refuses it; otherwise it is tried again."""
    if row.state == "repeating":  # its message was delivered before
        return False
    return row.expires > now  # a delivery that was withdrawn meanwhile, or is too late, expires


def _after_failure(row: Delivery, result: SendResult, dice: float, now: float) -> Delivery:
    """Return the delivery with the time of its next attempt."""
    attempts = row.attempts + 1
    pause = back_off(attempts, FIRST_PAUSE, LONGEST_PAUSE) * dice
    fallback_at = row.fallback_at
    if result.by_hand and fallback_at is not None:
        fallback_at = min(fallback_at, now)
    return replace(
        row,
        attempts=attempts,
        due=now + pause,
        error=result.error,
        begun=False,
        fallback_at=fallback_at,
    )


def _alone(row: Delivery) -> Delivery:
    """Return a copy without a fallback of its own, and without other sinks."""
    return replace(row, fallback=(), fallback_at=None, others=())


def _observed(latency: Mapping[str, Latency], row: Delivery, now: float) -> dict[str, Latency]:
    """Return the latencies with that of a delivery accepted now."""
    empty = (0,) * (len(LATENCY_BOUNDS) + 1)
    counts, total = latency.get(row.sink, (empty, 0.0))
    seconds = max(0.0, now - row.created)
    observed = list(counts)
    observed[bisect_left(LATENCY_BOUNDS, seconds)] += 1
    return {**latency, row.sink: (tuple(observed), total + seconds)}


# ---- orders


def _seq(row: Delivery) -> int:
    return row.seq


def _most_severe_and_newest_first(row: Delivery) -> tuple[int, int]:
    return SEVERITIES.index(row.severity), -row.seq


def _without_row(ranked: tuple[bool, bool, int, Delivery]) -> tuple[bool, bool, int]:
    is_kept_message, is_alive, rank, _ = ranked
    return is_kept_message, is_alive, rank
