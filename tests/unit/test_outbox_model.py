"""The outbox against a model that shares no code with it: an account of what was put in, and of
what receivers took.

Clocks jump, couriers and owners are killed, the disk is late or sick. What holds: at least once, in
order, under one id; no row is stuck; and each delivery is in the outbox or counted as what became
of it.
"""

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


class Account(RuleBasedStateMachine):
    """One outbox.

    ``waiting`` is what it owes to receivers, by their sinks and events, in the order of the
    changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.disk = 1_000.0, OutboxImage()  # what was written
        self.outbox = Outbox(lambda: 0.5, BOUNDS)
        self.number = 0
        self.queued: dict[tuple[str, str], list[str]] = {}  # what has to arrive in this order
        self.reached: set[str] = set()  # ids that a receiver has accepted
        self.under_way: dict[str, Delivery] = {}
        self.held_back: set[tuple[str, str]] = set()
        self.excused: set[str] = set()  # ids that may go without having arrived
        self.expired = 0  # how many have, at the last look

    @rule(
        key=st.sampled_from("abc"),
        sink=st.sampled_from(SINKS),
        kind=st.sampled_from(["announced", "updated", "started", "finished", "reminder"]),
        severity=st.sampled_from(["critical", "info"]),
        wait=st.sampled_from([0.0, 0.0, 5.0, 400.0]),
        extra=st.sampled_from([{}, {}, {"once": True}]),
    )
    def change_is_seen(
        self, *, key: str, sink: str, kind: Any, severity: str, wait: float, extra: dict[str, Any]
    ) -> None:
        self.number += 1
        made = {
            "kind": kind,
            "severity": severity,
            "delivery_id": f"{self.number:06d}",
            "created": self.now,
        }
        made |= {"expires_with_event": kind in ("announced", "updated", "reminder"), **extra}
        one = delivery(key, sink, due=self.now + wait, expires=self.now + 3_000, **made)
        self._excuse(key, kind)
        if kind == "reminder":
            self.outbox.put([one], self.now, self.now)
            # whoever knows that the event moved or ended needs none
            self.excused.add(one.delivery_id)
        else:
            self.outbox.take(change(kind, key), [one], self.now, self.now)
            self.queued.setdefault(lane_of(one), []).append(one.delivery_id)
        self.outbox.make_room(self.now)
        if len(self.outbox.rows.chosen()) >= BOUNDS.rows:
            self.excused |= {row.delivery_id for row in self.outbox.rows.chosen()} | {
                one.delivery_id
            }

    def _excuse(self, key: str, kind: str) -> None:
        """What this change makes needless."""
        for row in self.outbox.rows.chosen():
            if row.event_key == key and kind == "finished" and row.expires_with_event:
                self.excused.add(row.delivery_id)

    @rule(
        outcomes=st.lists(st.sampled_from(OUTCOMES), max_size=4),
        room=st.integers(0, 3),
        repeat=st.booleans(),
    )
    def courier_takes_a_turn(self, outcomes: list[Any], room: int, *, repeat: bool) -> None:
        results = []
        for one, drawn in zip(list(self.under_way.values()), outcomes, strict=False):
            del self.under_way[one.delivery_id]
            # what was given after one that is to be tried again, of the same event, comes back
            outcome: Any = "returned" if lane_of(one) in self.held_back else drawn
            if outcome in ("failed", "returned"):
                self.held_back.add(lane_of(one))
            if outcome == "accepted":
                self._arrive(one)
            elif outcome == "refused":
                self.excused.add(one.delivery_id)
            results.append(SendResult(one.delivery_id, outcome, repeat=20.0 if repeat else None))
        self.held_back &= {lane_of(one) for one in self.under_way.values()}
        self._give(results, dict.fromkeys(SINKS, room))

    def _give(self, results: list[SendResult], room: dict[str, int]) -> None:
        for one in self.outbox.exchange(results, room, self.now):
            assert one.delivery_id not in self.under_way, "given twice"
            beside = [other for other in self.under_way.values() if lane_of(other) == lane_of(one)]
            assert all(other.delivery_id < one.delivery_id for other in beside), (
                "an earlier one beside a later one"
            )
            self.under_way[one.delivery_id] = one

    def _arrive(self, one: Delivery) -> None:
        if one.delivery_id in self.reached:
            return
        self.reached.add(one.delivery_id)
        order = self.queued.get(lane_of(one), [])
        if one.delivery_id in order:
            before = order[: order.index(one.delivery_id)]
            missing = [earlier for earlier in before if earlier not in self.reached | self.excused]
            assert not missing, f"{one.delivery_id} came before {missing}"

    @rule(seconds=st.sampled_from([0.01, 1.0, 8.0, 100.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def disk_writes(self) -> None:
        self.disk = self.outbox.rows.take(self.now)
        self.outbox.rows.written()

    @rule()
    def disk_does_not_say_that_it_has_written(self) -> None:
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
        """What only its memory knew is gone; another boot has another clock."""
        self.now = uptime if boot else self.now + passed
        image = self.disk
        known = {row.delivery_id for row in image.rows}
        self.excused |= {
            row.delivery_id for row in self.outbox.rows.chosen()
        } - known  # nobody knows of them any more
        self.excused |= {row.delivery_id for row in image.rows if row.begun}
        self.outbox, self.under_way = Outbox(lambda: 0.5, BOUNDS), {}
        self.outbox.restore(
            image, self.now, 0.0 if boot else self.now - image.clock, time_known=not boot
        )
        self.outbox.make_room(self.now)
        self.expired = sum(
            count for (_, name), count in image.ledger.counts.items() if name == "expired"
        )

    @precondition(lambda self: not self.outbox.rows.time_known)
    @rule(seconds=st.sampled_from([0.0, 60.0, 4_000.0]))
    def imds_says_the_time(self, seconds: float) -> None:
        self.outbox.advance(seconds)

    @rule(nth=st.integers(0, 5), again=st.booleans())
    def somebody_retries_or_drops(self, nth: int, *, again: bool) -> None:
        for row in self.outbox.rows.chosen()[nth : nth + 1]:
            if again:
                self.outbox.retry([row.delivery_id], self.now)
                continue
            if self.outbox.drop([row.delivery_id]):
                self.excused.add(row.delivery_id)

    @invariant()
    def each_is_there_or_counted(self) -> None:
        for sink in SINKS:
            counts = {
                name: count
                for (of, name), count in self.outbox.rows.ledger.counts.items()
                if of == sink
            }
            gone = ("delivered", "expired", "withdrawn", "overflowed", "dropped")
            rows = sum(row.state != "repeating" for row in self.outbox.rows.chosen(sink=sink))
            assert counts.get("accepted", 0) == sum(counts.get(name, 0) for name in gone) + rows

    @invariant()
    def nothing_is_lost(self) -> None:
        """What has not arrived is there, unless its time was over or something made it needless."""
        rows = {row.delivery_id for row in self.outbox.rows.chosen()}
        owed = (
            {one for order in self.queued.values() for one in order}
            - rows
            - self.reached
            - self.excused
        )
        expired = sum(
            count
            for (_, name), count in self.outbox.rows.ledger.counts.items()
            if name == "expired"
        )
        assert len(owed) <= expired - self.expired, f"lost: {owed}"
        self.excused |= owed
        self.expired = expired

    def teardown(self) -> None:
        """Whatever the clock did: a courier that can do all gets all, and nothing is left to be
        sent.
        """
        self.courier_is_killed()
        if not self.outbox.rows.time_known:
            self.outbox.advance(0.0)
        for _ in range(200):
            due = self.outbox.rows.next_due()
            if due == inf and not self.under_way:
                break
            self.now = max(self.now, due if due < inf else 0.0)
            self.nothing_is_lost()  # what has expired meanwhile is excused
            results = [SendResult(one, "accepted") for one in self.under_way]
            for one in self.under_way.values():
                self._arrive(one)
            self.under_way = {}
            self._give(results, dict.fromkeys(SINKS, 50))
        assert not self.under_way
        left = [row for row in self.outbox.rows.chosen() if row.state == "pending"]
        assert not left, f"stuck: {left}"


def lane_of(one: Delivery) -> tuple[str, str]:
    return one.sink, one.event_key


TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
