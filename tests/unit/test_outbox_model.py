"""The outbox against a model that shares no code with it.

The model keeps an account of the deliveries that were put in and of those that receivers accepted.
Clocks jump, couriers and owners are killed, the disk is late or sick. Still each delivery arrives
at least once, in order, under one id; no row is stuck; and each delivery is in the outbox, or
counted by its outcome.
"""

from collections.abc import Iterable
from math import inf
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from notbefore.core.delivery import Delivery
from notbefore.core.outbox import Bounds, Outbox, SendResult
from notbefore.core.outbox_rows import OutboxImage
from support.box import change, delivery

SINKS = ("chat", "hub")
BOUNDS = Bounds(12, 1 << 20)
OUTCOMES = ("accepted", "accepted", "accepted", "failed", "refused", "returned")
OUTCOMES_OF_ACCEPTED = ("delivered", "expired", "withdrawn", "overflowed", "dropped")
EXPIRING_KINDS = ("announced", "updated", "reminder")

Lane = tuple[str, str]  # a sink and an event: their deliveries leave in order


def lane_of(delivery: Delivery) -> Lane:
    return delivery.sink, delivery.event_key


def ids(deliveries: Iterable[Delivery]) -> set[str]:
    return {delivery.delivery_id for delivery in deliveries}


def half() -> float:
    return 0.5


def expired_in(counts: dict[tuple[str, str], int]) -> int:
    return sum(count for (_, outcome), count in counts.items() if outcome == "expired")


class Account(RuleBasedStateMachine):
    """An account of the deliveries of one outbox."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0
        self.disk = OutboxImage()  # the last one that was written
        self.outbox = Outbox(half, BOUNDS)
        self.number = 0  # of the last delivery; ids rise with it
        self.in_order: dict[Lane, list[str]] = {}  # the ids that must arrive in this order
        self.arrived: set[str] = set()  # the ids that a receiver has accepted
        self.under_way: dict[str, Delivery] = {}  # the deliveries that the courier has, by id
        self.held_back: set[Lane] = set()  # lanes with a failure that the courier still holds
        self.excused: set[str] = set()  # the ids that need not arrive
        self.expired = 0  # the count of expired deliveries at the last check

    @rule(
        key=st.sampled_from("abc"),
        sink=st.sampled_from(SINKS),
        kind=st.sampled_from(["announced", "updated", "started", "finished", "reminder"]),
        severity=st.sampled_from(["critical", "info"]),
        wait=st.sampled_from([0.0, 0.0, 5.0, 400.0]),
        extra=st.sampled_from([{}, {}, {"once": True}]),
    )
    def change_is_seen(
        self,
        *,
        key: str,
        sink: str,
        kind: Any,
        severity: str,
        wait: float,
        extra: dict[str, Any],
    ) -> None:
        self.number += 1
        new = delivery(
            key,
            sink,
            kind=kind,
            severity=severity,
            delivery_id=f"{self.number:06d}",
            created=self.now,
            due=self.now + wait,
            expires=self.now + 3_000,
            expires_with_event=kind in EXPIRING_KINDS,
            **extra,
        )
        if kind == "finished":
            self._excuse_expiring_rows(key)

        if kind == "reminder":
            self.outbox.put([new], self.now, self.now)
            self.excused.add(new.delivery_id)  # it is withdrawn when the event moves or ends
        else:
            self.outbox.take(change(kind, key), [new], self.now, self.now)
            self.in_order.setdefault(lane_of(new), []).append(new.delivery_id)

        self.outbox.make_room(self.now)
        rows = self.outbox.rows.chosen()
        if len(rows) >= BOUNDS.rows:  # any of them, or the new one, may be pushed out
            self.excused |= ids(rows)
            self.excused.add(new.delivery_id)

    def _excuse_expiring_rows(self, key: str) -> None:
        """Excuse the rows that expire with the end of this event."""
        for row in self.outbox.rows.chosen():
            if row.event_key == key and row.expires_with_event:
                self.excused.add(row.delivery_id)

    @rule(
        outcomes=st.lists(st.sampled_from(OUTCOMES), max_size=4),
        room=st.integers(0, 3),
        repeat=st.booleans(),
    )
    def courier_takes_a_turn(self, outcomes: list[Any], room: int, *, repeat: bool) -> None:
        results = []
        for sent, drawn_outcome in zip(list(self.under_way.values()), outcomes, strict=False):
            del self.under_way[sent.delivery_id]
            outcome: Any = drawn_outcome
            if lane_of(sent) in self.held_back:
                outcome = "returned"  # it follows a failed delivery of the same event

            if outcome in ("failed", "returned"):
                self.held_back.add(lane_of(sent))
            elif outcome == "accepted":
                self._arrive(sent)
            elif outcome == "refused":
                self.excused.add(sent.delivery_id)

            repeat_after = 20.0 if repeat else None
            results.append(SendResult(sent.delivery_id, outcome, repeat=repeat_after))
        self.held_back &= {lane_of(sent) for sent in self.under_way.values()}
        self._exchange(results, room)

    def _exchange(self, results: list[SendResult], room: int) -> None:
        """Give results to the outbox, and take up to ``room`` deliveries for each sink."""
        for new in self.outbox.exchange(results, dict.fromkeys(SINKS, room), self.now):
            assert new.delivery_id not in self.under_way, "given twice"
            for other in self.under_way.values():
                if lane_of(other) == lane_of(new):
                    assert other.delivery_id < new.delivery_id, (
                        f"{new.delivery_id} leaves after {other.delivery_id}"
                    )
            self.under_way[new.delivery_id] = new

    def _arrive(self, sent: Delivery) -> None:
        """Note that a receiver has accepted a delivery; none before it may be missing."""
        if sent.delivery_id in self.arrived:
            return
        self.arrived.add(sent.delivery_id)
        order = self.in_order.get(lane_of(sent), [])
        if sent.delivery_id in order:
            earlier = set(order[: order.index(sent.delivery_id)])
            missing = earlier - self.arrived - self.excused
            assert not missing, f"{sent.delivery_id} came before {missing}"

    @rule(seconds=st.sampled_from([0.01, 1.0, 8.0, 100.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def disk_writes(self) -> None:
        self.disk = self.outbox.rows.take(self.now)
        self.outbox.rows.written()

    @rule()
    def disk_writes_without_confirming_it(self) -> None:
        self.disk = self.outbox.rows.take(self.now)

    @rule()
    def courier_is_killed(self) -> None:
        for row in self.outbox.release(self.now):
            assert row.once
            self.excused.add(row.delivery_id)
        self.under_way = {}

    @rule(
        boot=st.booleans(),
        uptime=st.sampled_from([0.0, 5.0, 1e6]),
        passed=st.sampled_from([0.0, 30.0]),
    )
    def owner_is_killed(self, *, boot: bool, uptime: float, passed: float) -> None:
        """Lose all that is not on the disk; another boot has another clock."""
        seconds_since_the_image = 0.0
        if boot:
            self.now = uptime
        else:
            self.now += passed
            seconds_since_the_image = self.now - self.disk.clock

        self.excused |= ids(self.outbox.rows.chosen()) - ids(self.disk.rows)
        self.excused |= ids(row for row in self.disk.rows if row.begun)
        self.under_way = {}

        self.outbox = Outbox(half, BOUNDS)
        self.outbox.restore(self.disk, self.now, seconds_since_the_image, time_known=not boot)
        self.outbox.make_room(self.now)
        self.expired = expired_in(self.disk.ledger.counts)

    @precondition(lambda self: not self.outbox.rows.time_known)
    @rule(seconds=st.sampled_from([0.0, 60.0, 4_000.0]))
    def imds_says_the_time(self, seconds: float) -> None:
        self.outbox.advance(seconds)

    @rule(index=st.integers(0, 5), retries=st.booleans())
    def operator_retries_or_drops(self, index: int, *, retries: bool) -> None:
        rows = self.outbox.rows.chosen()
        if index >= len(rows):
            return
        delivery_id = rows[index].delivery_id
        if retries:
            self.outbox.retry([delivery_id], self.now)
        elif self.outbox.drop([delivery_id]):
            self.excused.add(delivery_id)

    @invariant()
    def accepted_deliveries_are_in_the_outbox_or_counted(self) -> None:
        counts = self.outbox.rows.ledger.counts
        for sink in SINKS:
            rows = self.outbox.rows.chosen(sink=sink)
            waiting = [row for row in rows if row.state != "repeating"]
            ended = sum(counts.get((sink, outcome), 0) for outcome in OUTCOMES_OF_ACCEPTED)
            assert counts.get((sink, "accepted"), 0) == ended + len(waiting)

    @invariant()
    def no_delivery_is_lost(self) -> None:
        """Each delivery has arrived, is in the outbox, has expired, or is excused."""
        owed: set[str] = set()
        for order in self.in_order.values():
            owed.update(order)
        missing = owed - ids(self.outbox.rows.chosen()) - self.arrived - self.excused

        expired = expired_in(self.outbox.rows.ledger.counts)
        assert len(missing) <= expired - self.expired, f"lost: {missing}"
        self.excused |= missing
        self.expired = expired

    def teardown(self) -> None:
        """Let a perfect courier take everything, and check that nothing is left to be sent."""
        self.courier_is_killed()
        if not self.outbox.rows.time_known:
            self.outbox.advance(0.0)

        for _ in range(200):
            due = self.outbox.rows.next_due()
            if due == inf and not self.under_way:
                break
            if due < inf:
                self.now = max(self.now, due)
            self.no_delivery_is_lost()  # it excuses what has expired meanwhile
            results = [SendResult(delivery_id, "accepted") for delivery_id in self.under_way]
            for sent in self.under_way.values():
                self._arrive(sent)
            self.under_way = {}
            self._exchange(results, room=50)

        stuck = [row for row in self.outbox.rows.chosen() if row.state == "pending"]
        assert not self.under_way
        assert not stuck


TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
