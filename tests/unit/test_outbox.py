"""The rules of the outbox: order, retries, expiry, repetition, fallback, and what is counted."""

from collections.abc import Iterator
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.core.delivery import EXPIRING_KINDS, Delivery, Targets, Terms, delivery_id
from notbefore.core.outbox import DEAD_SECONDS, INTERRUPTED, LONGEST_ASKED, REPEAT_SECONDS, Bounds, Outbox, SendResult
from notbefore.core.outbox_rows import OutboxImage
from notbefore.metrics.totals import view_of
from support.azure import T0, event
from support.box import Box, accepted, delivery, failed, ids, refused


@pytest.fixture
def box() -> Box:
    return Box()


# ---- what is given, in which order


def test_the_most_severe_goes_first_then_the_earliest_not_before_then_the_oldest(box: Box) -> None:
    keys = {"a": ("info", 5.0), "b": ("critical", 70.0), "c": ("critical", 20.0), "d": ("critical", 20.0)}
    box.put(*[delivery(key, severity=severity, not_before=time) for key, (severity, time) in keys.items()])
    assert [one.event_key for one in box.lease(1, chat=3)] == ["c", "d", "b"]
    assert [one.event_key for one in box.lease(1, chat=4)] == ["a"]


def test_an_approval_replaces_no_reminder_and_is_none(box: Box) -> None:
    box.put(delivery(kind="reminder", due=100.0), delivery(kind="approved"))
    assert [one.kind for one in box.rows()] == ["reminder", "approved"]
    box.put(delivery(kind="updated"))
    assert [one.kind for one in box.rows()] == ["approved", "updated"]


def test_a_dead_letter_and_a_reminder_hold_nothing_back_and_beside_what_is_on_its_way_nothing_goes(box: Box) -> None:
    dead, one = delivery(), delivery(kind="approved")
    box.put(dead, delivery(kind="reminder", due=50.0), one)
    box.lease(1)
    assert ids(box.lease(2, refused(dead))) == [one.delivery_id]
    box.put(delivery(kind="approved"))
    assert box.lease(60) == []


def test_what_is_on_its_way_is_not_pushed_out() -> None:
    box = Box(Bounds(2, 1 << 20))
    box.put(delivery("a"))
    box.lease(1)
    box.put(delivery("b"), delivery("c"))
    assert [row.event_key for row in box.rows()] == ["a", "c"]


# ---- results


@pytest.mark.parametrize("refuse", [failed, refused])
def test_a_repetition_is_tried_again_whatever_the_receiver_says_and_can_be_sent_now(box: Box, refuse: Any) -> None:
    box.put(delivery())
    (one,) = box.lease(1)
    box.lease(2, accepted(one, repeat=30.0))
    assert ids(box.lease(32)) == [one.delivery_id]
    box.lease(33, refuse(one, error="401"))
    (row,) = box.rows(state="repeating")
    assert (row.due, row.error, box.count("failed"), box.count("dead")) == (34, "401", 1, 0)
    assert box.outbox.retry([one.delivery_id], 40) == 1
    box.lease(41, *[accepted(again, repeat=30.0) for again in box.lease(40)])
    (row,) = box.rows(state="repeating")
    assert (row.attempts, row.error) == (0, "")  # the next failure is a first one


def test_pauses_grow_up_to_five_minutes_and_are_diced() -> None:
    outbox = Outbox(lambda: 0.5, patience=0.0)
    one, now, pauses = delivery(expires=1e9), 0.0, list[float]()
    outbox.put([one], now, now)
    for _ in range(11):
        assert outbox.exchange([], {"chat": 1}, now)
        outbox.exchange([failed(one)], {}, now)
        (row,) = outbox.rows.chosen()
        pauses.append(row.due - now)
        now = row.due
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 64, 128, 150, 150]


def test_a_pause_that_the_receiver_asks_for_is_for_the_sink(box: Box) -> None:
    asks, waits, other = delivery("b"), delivery("c"), delivery("f", sink="hub")
    box.put(asks, waits, other)
    box.lease(1, chat=1)
    assert ids(box.lease(2, failed(asks, retry_after=88.0))) == [other.delivery_id]
    assert box.outbox.rows.next_due() == 90
    assert box.lease(89) == []
    assert ids(box.lease(90)) == [asks.delivery_id, waits.delivery_id]
    box.lease(91, failed(asks, retry_after=1e9))
    assert box.outbox.rows.next_due() == 91 + LONGEST_ASKED
    box.lease(92, accepted(waits))
    assert box.outbox.rows.next_due() == 91 + LONGEST_ASKED  # whatever else it takes
    box.outbox.retry([asks.delivery_id], 93)  # an operator knows better
    assert ids(box.lease(93)) == [asks.delivery_id]
    box.lease(94, failed(asks, retry_after=99.0))
    box.put(later := delivery("g", created=94.0, due=94.0))
    assert box.lease(95) == []
    box.outbox.use_sinks({"chat": Terms(), "hub": Terms()}, lambda _row: Targets(), 96)  # it may be another receiver
    assert ids(box.lease(96)) == [asks.delivery_id, later.delivery_id]


def test_latency_is_from_the_change_to_its_acceptance_by_buckets(box: Box) -> None:
    for at, (created, now) in enumerate([(1.0, 1.09), (1.0, 1.11), (1.0, 30_000.0), (5.0, 4.0)]):
        box.put(delivery(str(at), created=created, due=0.0))
        (one,) = box.lease(1)
        box.lease(now, accepted(one))
    counts, total = box.outbox.rows.ledger.latency["chat"]
    assert counts == (2, 1, 0, 0, 0, 0, 1)
    assert total == pytest.approx(0.09 + 0.11 + 29_999)


def test_what_a_courier_says_after_it_was_given_up_counts_only_if_it_was_accepted(box: Box) -> None:
    one = delivery()
    box.put(one)
    box.lease(1)
    box.outbox.release(2)
    assert ids(box.lease(2, refused(one))) == [one.delivery_id]
    box.outbox.release(2)
    assert box.lease(2, accepted(one)) == []
    assert (box.count("delivered"), box.rows()) == (1, [])


def test_of_threads_the_newest_are_remembered() -> None:
    box = Box(Bounds(2, 1 << 20))
    for key in "abca":
        box.put(delivery(key))
        box.lease(1, *[accepted(one, thread=key) for one in box.lease(1)])
    assert box.outbox.rows.threads == {("chat", "c"): "c", ("chat", "a"): "a"}


# ---- what an event's life does


def test_what_only_helps_before_the_end_expires_with_the_event(box: Box) -> None:
    announced, started = delivery(), delivery(kind="started", expires_with_event=False)
    box.put(announced, started)
    box.take("finished")
    assert ids(box.lease(6)) == [started.delivery_id]
    assert box.count("expired") == 1


@pytest.mark.parametrize("outcome", ["failed", "returned", "refused"])
def test_what_is_on_its_way_when_the_event_ends_is_delivered_or_expires(box: Box, outcome: Any) -> None:
    arrives, fails = delivery(), delivery("f")
    box.put(arrives, fails)
    box.lease(1)
    for key in ("e", "f"):
        box.take("canceled", key)
    assert len(box.rows()) == 2
    box.lease(3, accepted(arrives), SendResult(fails.delivery_id, outcome))
    assert (box.count("delivered"), box.count("expired"), box.rows()) == (1, 1, [])


BEFORE = msgspec.structs.replace(event(), event_id="e", not_before=T0)
AFTER = msgspec.structs.replace(BEFORE, not_before=None)


@pytest.mark.parametrize(
    ("kind", "facts", "left"),
    [
        ("updated", {"event": AFTER, "previous": BEFORE}, 0),
        ("updated", {"event": BEFORE, "previous": BEFORE}, 1),
        ("started", {}, 0),
        ("finished", {}, 0),
    ],
)
def test_a_reminder_is_withdrawn_when_its_time_means_nothing_any_more(
    box: Box, kind: Any, facts: Any, left: int
) -> None:
    box.put(delivery(kind="reminder", due=100.0), delivery("f", kind="reminder", due=100.0))
    box.take(kind, "e", **facts)
    assert [row.event_key for row in box.rows()] == ["e"] * left + ["f"]
    assert box.count("withdrawn") == 1 - left


def test_an_event_that_is_anothers_is_neither_repeated_nor_reminded_of(box: Box) -> None:
    box.put(delivery("e"), delivery("f"))
    box.lease(2, *[accepted(one, repeat=30.0) for one in box.lease(1)])
    box.put(
        delivery("e", kind="reminder", sink="hub", due=100.0), delivery("e", kind="reminder", sink="hub", due=200.0)
    )
    box.outbox.no_longer_affected(["e"], 2)
    assert [(row.lane, row.state) for row in box.rows()] == [(("chat", "f"), "repeating")]
    assert box.count("withdrawn") == 2
    box.put(delivery("g"))
    (under_way,) = box.lease(3)
    box.take("updated", "g", scope="peer", previous_scope="self")
    box.lease(4, accepted(under_way, repeat=30.0))
    assert [row.lane for row in box.rows()] == [("chat", "f")]


# ---- repetition


def test_what_is_repeated_is_held_until_the_event_ends(box: Box) -> None:
    one = delivery(expires=20.0)
    box.put(one)
    box.lease(2, *[accepted(given, repeat=30.0) for given in box.lease(1)])
    assert [row.state for row in box.rows()] == ["repeating"]
    (again,) = box.lease(32)
    assert again.state == "repeating"
    box.lease(33, failed(one))
    assert box.lease(33.9) == []
    assert ids(box.lease(34)) == [one.delivery_id]
    box.lease(99, accepted(one, repeat=30.0))
    assert (box.rows()[0].due, box.rows()[0].expires) == (129, 2 + REPEAT_SECONDS)
    box.take("finished")
    assert box.rows() == []
    assert box.counts == {"accepted": 1, "delivered": 1, "failed": 1}


def test_a_repetition_that_another_outbox_sends_is_counted_nowhere(box: Box) -> None:
    box.put(delivery("f"))
    box.lease(2, *[accepted(one, repeat=60.0) for one in box.lease(1)])
    other = Box()
    other.outbox.restore(box.outbox.rows.image(3, ["f"]), 3)
    box.outbox.leave(["f"])
    assert (box.rows(), box.counts) == ([], {"accepted": 1, "delivered": 1})
    assert (len(other.rows()), other.counts) == (1, {})


def test_what_is_repeated_gives_way_to_what_is_newer(box: Box) -> None:
    one, newer = delivery(), delivery(kind="updated")
    box.put(one)
    box.lease(1)
    box.put(newer)
    assert ids(box.lease(2, accepted(one, repeat=30.0))) == [newer.delivery_id]
    assert ids(box.rows()) == [newer.delivery_id]
    box.lease(3, accepted(newer, repeat=30.0))
    box.put(newer)  # it is there already: its repetition goes on
    assert [row.state for row in box.rows()] == ["repeating"]
    box.put(delivery(kind="started"))
    assert [row.kind for row in box.rows()] == ["started"]


def test_a_reminder_that_waits_does_not_end_the_repetition_and_takes_its_place_once_sent(box: Box) -> None:
    announced, reminder = delivery(), delivery(kind="reminder", due=50.0)
    box.put(announced, reminder)
    box.lease(1)
    box.lease(2, accepted(announced, repeat=100.0))
    assert ids(box.rows(state="repeating")) == [announced.delivery_id]
    box.lease(50)
    box.lease(51, accepted(reminder, repeat=100.0))
    assert ids(box.rows(state="repeating")) == [reminder.delivery_id]


def test_what_arrives_after_the_event_has_ended_is_not_repeated_also_if_it_was_dead(box: Box) -> None:
    started, dead = (delivery(kind="started", sink=sink, expires_with_event=False) for sink in ("chat", "hub"))
    box.put(started, dead)
    box.lease(1)
    box.lease(1, refused(dead))
    box.take("finished", "e", delivery(kind="finished", expires_with_event=False))
    box.outbox.retry([dead.delivery_id], 2)
    given = box.lease(3, *[accepted(one, repeat=30.0) for one in (started, *box.lease(2))])
    box.lease(4, *[accepted(one, repeat=30.0) for one in given])
    assert box.rows() == []


# ---- time, bounds


def test_a_dead_letter_is_kept_for_a_month_and_a_heartbeat_no_longer_than_before(box: Box) -> None:
    box.put(delivery("a", expires=100.0), delivery("b", kind="heartbeat", expires=100.0))
    box.lease(2, *[refused(one, error="404") for one in box.lease(1)])
    dead = [("dead", 1, 2 + DEAD_SECONDS), ("dead", 1, 100)]
    assert [(one.state, one.attempts, one.expires) for one in box.rows()] == dead
    assert box.outbox.rows.next_due() == inf
    box.lease(1 + DEAD_SECONDS)
    assert [row.event_key for row in box.rows()] == ["a"]
    box.lease(2 + DEAD_SECONDS)
    assert box.rows() == []


@pytest.mark.parametrize("bounds", [Bounds(2, 1 << 20), Bounds(100, 2 * 602)])
def test_a_full_outbox_pushes_out_the_oldest_of_the_least_severe_and_counts_it(bounds: Bounds) -> None:
    box = Box(bounds)
    critical, old, new = delivery("a", severity="critical"), delivery("b"), delivery("c")
    box.put(critical, old)
    assert box.count("overflowed") == 0
    box.put(new)
    assert ids(box.rows()) == [critical.delivery_id, new.delivery_id]
    assert box.count("overflowed") == 1


def test_a_sink_that_is_stuck_fills_the_outbox_at_its_own_cost() -> None:
    box = Box(Bounds(3, 1 << 20))
    box.put(*(delivery(key, severity="critical", sink="stuck") for key in "abc"), delivery("d", severity="info"))
    assert [[row.event_key for row in rows] for rows in (box.removed, box.rows())] == [["a"], ["b", "c", "d"]]


def test_a_full_outbox_pushes_out_repetitions_first_and_counts_none_then_dead_letters() -> None:
    box = Box(Bounds(2, 1 << 20))
    repeated, dead = delivery("a", severity="critical"), delivery("b", severity="critical")
    box.put(repeated, dead)
    box.lease(1)
    box.lease(2, accepted(repeated, repeat=30.0), refused(dead))
    box.put(delivery("c"))
    assert ([row.event_key for row in box.rows()], box.count("overflowed")) == (["b", "c"], 0)
    box.put(delivery("d"))
    assert ([row.event_key for row in box.rows()], box.count("overflowed")) == (["c", "d"], 1)


# ---- by hand


def test_a_dead_letter_is_sent_again_when_asked_for(box: Box) -> None:
    one = delivery(expires=10.0)
    box.put(one)
    box.lease(1)
    box.lease(2, refused(one, error="404"))
    assert box.lease(500) == []
    assert box.outbox.retry([one.delivery_id, "unheard of"], 1000) == 1
    assert box.rows()[0].expires == 1000 + 86_400
    assert ids(box.lease(1001)) == [one.delivery_id]
    box.lease(1002, failed(one), chat=0)
    assert box.outbox.retry([one.delivery_id], 1003) == 1
    assert [(one.due, one.attempts) for one in box.rows()] == [(1003, 0)]


def test_what_waits_is_told_by_sink_and_severity(box: Box) -> None:
    box.put(delivery(created=5.0), delivery("f", created=2.0))
    box.put(delivery("h", severity="critical", sink="hub"))
    box.put(delivery("k", sink="mail"))
    box.lease(5, *[refused(one) for one in box.lease(5, mail=9)], mail=9)
    box.lease(6, *[failed(one, error="503") for one in box.lease(5, hub=9)])
    view = view_of(box.outbox, 10, 1_010.0)
    assert view.oldest == {("chat", "info"): 1_002.0, ("hub", "critical"): 1_000.0}
    assert view.rows == {("chat", "pending"): 2, ("hub", "pending"): 1, ("mail", "dead"): 1}
    assert view.errors["hub"] == "503"


# ---- a sink that was renamed or removed


def test_what_waits_for_a_sink_that_is_gone_goes_where_the_routes_lead_now(box: Box) -> None:
    gone, reminder = delivery(others=("mail", "past")), delivery(kind="reminder", due=50.0, expires=99.0)
    box.put(delivery("r", others=("mail",)), gone, reminder, delivery("f", sink="hub"))
    box.lease(2, *[accepted(one, repeat=30.0) for one in box.lease(1, chat=1)], chat=0)
    terms = dict.fromkeys(("ops", "mail", "hub"), Terms())
    assert len(box.outbox.use_sinks(terms, lambda _row: Targets(("ops", "mail", "old")), 5)) == 3
    assert [(row.sink, row.kind, row.due, row.expires) for row in box.rows()] == [
        ("hub", "announced", 0, 1e9), ("ops", "announced", 32, 5 + 86_400), ("ops", "announced", 0, 1e9),
        ("ops", "reminder", 50, 99), ("mail", "reminder", 50, 99),
    ]  # fmt: skip
    assert box.outbox.rows.ledger.counts[("chat", "withdrawn")] == 2
    assert box.rows(sink="ops")[1].others == ("mail",)  # once there is a sink `past` again, it may go there
    assert [one.sink for one in box.lease(5, ops=9, chat=9)] == ["ops"]


def test_what_goes_to_another_sink_is_sent_by_the_terms_of_that_one(box: Box) -> None:
    box.put(critical(once=True))
    terms = {"chat": Terms(once=True), "mail": Terms(expire_on_end=False), "hub": Terms(once=True)}
    box.outbox.use_sinks(terms, lambda _row: Targets(), 60)
    box.lease(60, chat=0)
    found = {row.sink: (row.once, row.expires_with_event) for row in box.rows() if row.note}
    assert found == {"mail": (False, False), "hub": (True, True)}


def test_a_fallback_that_is_gone_is_that_of_the_routes_now_for_what_waits_there_and_what_may_come(box: Box) -> None:
    now = Targets(("chat",), ("pager", "hub"))
    box.put(critical(), msgspec.structs.replace(critical(event_key="f"), change_id="d", fallback_at=110.0))
    box.lease(60, chat=0)  # of the first one there are copies
    assert len(box.outbox.use_sinks(dict.fromkeys(("chat", "hub", "pager"), Terms()), lambda _row: now, 61)) == 1
    box.lease(110)
    assert sorted((row.event_key, row.sink) for row in box.rows() if row.note) == [
        ("e", "hub"), ("e", "pager"), ("f", "hub"), ("f", "pager"),
    ]  # fmt: skip


def test_what_no_route_names_another_sink_for_is_dead_with_that_reason(box: Box) -> None:
    box.put(delivery(), delivery("f"), delivery("g"))
    box.lease(2, *[accepted(one, repeat=60.0) for one in box.lease(1, chat=1)], chat=0)
    (under_way,) = box.lease(2, chat=1)
    assert len(box.outbox.use_sinks({"hub": Terms()}, lambda _row: Targets(), 3)) == 2
    assert [(row.state, row.error) for row in box.rows()] == [
        ("pending", ""),  # a courier has it
        ("dead", "no sink named chat is configured"),
    ]
    box.lease(4, failed(under_way))
    assert len(box.outbox.redirect(5)) == 1
    assert {row.state for row in box.rows()} == {"dead"}


# ---- what may run once


def test_what_may_run_once_is_given_after_it_is_written_that_it_has_begun() -> None:
    box = Box(patience=1.0)
    box.put(delivery(once=True))
    box.outbox.rows.take(1)
    assert box.outbox.rows.written()
    assert box.lease(1) == []
    assert [row.begun for row in box.outbox.rows.take(1).rows] == [True]
    assert box.lease(1.5) == []
    assert box.outbox.rows.written()
    (given,) = box.lease(1.5)
    (dead,) = box.outbox.release(2)
    assert (dead.delivery_id, dead.state, dead.error) == (given.delivery_id, "dead", INTERRUPTED)
    assert box.lease(3) == []


def test_only_what_a_courier_may_have_next_is_marked_as_begun() -> None:
    box = Box(patience=1.0)
    box.put(*[delivery(key, once=True) for key in "abc"])
    for now in (1.0, 1.1):
        assert box.lease(now, chat=1) == []
    assert [row.event_key for row in box.rows() if row.begun] == ["a"]
    box.put(delivery("d", once=True, severity="critical"), now=1.2)
    assert [row.event_key for row in box.lease(2.5, chat=1)] == ["a"]  # the disk is sick; it is not overtaken
    assert [row.event_key for row in box.rows() if row.begun] == ["a"]


@pytest.mark.parametrize(("answered", "left"), [(True, ("pending", "503")), (False, ("dead", INTERRUPTED))])
def test_what_may_have_run_when_its_owner_was_killed_is_dead(
    box: Box, *, answered: bool, left: tuple[str, str]
) -> None:
    box.put(delivery(once=True))
    (one,) = box.lease(1)
    if answered:
        box.lease(2, failed(one, error="503"), chat=0)
    again = Outbox(lambda: 1.0, patience=0.0)
    again.restore(box.outbox.rows.take(2), 2)
    assert [(row.state, row.error) for row in again.rows.chosen()] == [left]


# ---- what waits to be written


def test_the_next_of_an_event_waits_until_the_result_of_the_one_before_is_written() -> None:
    box = Box(patience=1.0)
    first, second, third = delivery(), delivery(), delivery("f")
    box.put(first, second, third)
    box.outbox.rows.take(1)
    box.outbox.rows.written()
    assert ids(box.lease(5)) == [first.delivery_id, third.delivery_id]
    assert box.lease(6, accepted(first)) == []
    box.outbox.rows.take(1)
    assert box.lease(6.5, accepted(third)) == []
    assert box.outbox.rows.written()
    assert ids(box.lease(6.5)) == [second.delivery_id]
    assert box.outbox.rows.changed
    box.outbox.rows.take(1)
    assert not box.outbox.rows.changed


def test_an_image_comes_back_as_it_was_on_another_clock(box: Box) -> None:
    under_way, later = delivery(fallback=("hub",), fallback_at=60.0), delivery("f", due=20.0, expires=90.0)
    box.put(under_way, later, delivery("g"))
    a, b = box.lease(1, chat=2)
    box.lease(2, accepted(b, thread="t"), chat=0)
    image = msgspec.msgpack.decode(msgspec.msgpack.encode(box.outbox.rows.take(10)), type=OutboxImage)
    again = Outbox(lambda: 1.0, patience=0.0)
    again.restore(image, 1010, passed=3)
    assert again.rows.ledger == box.outbox.rows.ledger
    assert [(row.delivery_id, row.due, row.expires, row.fallback_at) for row in again.rows.chosen()] == [
        (a.delivery_id, 997, 1e9 + 997, 1057), (later.delivery_id, 1017, 1087, None),
    ]  # fmt: skip
    assert again.rows.changed  # on a clock of its own
    assert ids(again.exchange([], {"chat": 9}, 1010)) == [a.delivery_id]


def test_while_the_time_is_not_known_nothing_expires_and_no_reminder_is_due(box: Box) -> None:
    box.put(delivery(expires=10.0, due=5.0), delivery("f", kind="reminder", due=5.0))
    again = Outbox(lambda: 1.0, patience=0.0)
    again.restore(box.outbox.rows.take(0), 100, time_known=False)
    (given,) = again.exchange([], {"chat": 9}, 1e6)
    assert given.kind == "announced"
    again.release(1e6)
    again.advance(20)
    assert [one.kind for one in again.exchange([], {"chat": 9}, 106)] == ["reminder"]
    assert again.rows.ledger.counts[("chat", "expired")] == 1


# ---- other sinks


def critical(**fields: Any) -> Delivery:
    return delivery(severity="critical", change_id="c", fallback=("mail", "hub"), fallback_at=60.0, **fields)


def test_what_somebody_has_to_put_right_goes_to_the_fallback_at_once_and_is_tried_again(box: Box) -> None:
    box.put(one := critical())
    box.lease(1, chat=9)
    assert box.outbox.rows.next_due() == 60.0  # at the latest
    mail, hub = box.lease(2, failed(one, error="401", by_hand=True), mail=9, hub=9)
    assert (mail.note, hub.sink) == ("chat has not accepted it so far: 401", "hub")
    assert ids(box.lease(100, failed(mail, by_hand=True), accepted(hub), chat=9)) == [one.delivery_id]


def test_what_may_run_once_and_goes_to_another_sink_is_written_as_begun_there_too() -> None:
    box = Box(patience=1.0)
    box.put(delivery(once=True))
    box.lease(1)  # it is marked as begun
    box.outbox.use_sinks({"ops": Terms(once=True)}, lambda _row: Targets(("ops",)), 1)
    assert [row.begun for row in box.rows()] == [False]


def test_what_was_accepted_has_no_fallback_and_what_two_sinks_refuse_is_one_message(box: Box) -> None:
    box.put(critical())
    box.lease(2, *[accepted(one) for one in box.lease(1, chat=9)])
    assert box.lease(100, mail=9, hub=9) == []
    box.put(critical(), critical(sink="pager"))
    assert len(box.lease(100, mail=9, hub=9)) == 2


def test_the_end_of_an_event_follows_to_those_of_its_fallback_that_got_its_beginning(box: Box) -> None:
    box.put(critical())
    mail, hub = box.lease(60, mail=9, hub=9)
    box.lease(61, accepted(mail), mail=0)  # it names no thread; and the hub has not answered yet
    end = critical(kind="finished", created=200.0, due=220.0, others=("mail",))
    end = msgspec.structs.replace(end, change_id="end", fallback=("mail", "hub", "pager"), expires_with_event=False)
    box.take("finished", "e", end, now=200)
    followed = [row for row in box.rows() if row.kind == "finished"]
    assert [row.sink for row in followed] == ["chat", "mail", "hub"]
    for row in followed[1:]:
        assert row.note == "an earlier message of this event came here instead of chat"
        assert (row.fallback, row.fallback_at, row.others, row.due) == ((), None, (), 200.0)
        assert row.delivery_id not in ids([end, mail, hub])
    assert followed[0].fallback == ("pager",)


STEPS: list[Any] = ["announced", "updated", "started", "finished"]


def both(kind: Any, number: int, now: float, after: float) -> Iterator[Delivery]:
    """A change that goes to two sinks with one fallback, the second of which is waited for longer."""
    for at, sink in enumerate(("chat", "hub")):
        late = now + after * (1 + at)
        one = delivery(kind=kind, sink=sink, created=now, due=now, expires_with_event=kind in EXPIRING_KINDS)
        yield msgspec.structs.replace(
            one, change_id=str(number), fallback=("mail",), fallback_at=late if late < inf else None
        )


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.booleans(), st.sampled_from([1.0, 40.0, 70.0])), max_size=8))
def test_a_fallback_is_sent_each_change_once_and_nothing_that_is_older_than_the_end(
    steps: list[tuple[Any, bool, float]],
) -> None:
    """Of one event, whose sinks are refused every message; ``steps``: a change, its severity, the seconds after it."""
    box, now, sent = Box(), 0.0, list[Delivery]()
    for number, (kind, is_critical, seconds) in enumerate([*steps, ("updated", False, 200.0)]):
        box.take(kind, "e", *both(kind, number, now, 60.0 if is_critical else inf), now=now)
        had = box.lease(now, chat=9, hub=9, mail=9)
        while had:
            now += seconds / 10
            sent += [each for each in had if each.sink == "mail"]
            had = box.lease(now, *[(accepted if each.sink == "mail" else failed)(each) for each in had], mail=9)
        now += seconds
    changes = [one.change_id for one in sent]
    assert len(set(changes)) == len(changes)
    for at, one in enumerate(sent):
        assert one.kind != "finished" or all(later.change_id > one.change_id for later in sent[at:][1:])


def test_what_is_made_for_another_sink_is_the_same_but_for_what_that_one_must_not_have(box: Box) -> None:
    """A fallback, and what waits for a sink that is gone, each as a whole."""
    replace, one = msgspec.structs.replace, critical(created=5.0, not_before=900.0, others=("mail",))
    one = replace(one, fallback=("hub",))
    box.put(one, now=10)
    box.lease(20, chat=9)
    box.lease(30, refused(one, error="401"), chat=0)
    dead, copy = box.rows()
    assert copy == replace(
        one, sink="hub", delivery_id=delivery_id("c", "hub"), note="chat refused it: 401", due=30,
        expires=30 + 86_400, fallback=(), fallback_at=None, others=(), seq=2,
    )  # fmt: skip
    assert (dead.state, dead.seq, dead.fallback_at) == ("dead", 1, None)
    box.outbox.drop(ids(box.rows()))
    reminder = delivery(kind="reminder", due=50.0, expires=99.0)
    box.put(one, reminder, now=10)
    box.lease(20, chat=1)
    box.lease(21, failed(one, error="503"), chat=0)
    box.outbox.use_sinks({"ops": Terms()}, lambda _row: Targets(("ops",), ("hub",)), 25)
    assert box.rows() == [
        replace(one, sink="ops", delivery_id=delivery_id("c", "ops"), due=22, seq=3, others=()),
        replace(reminder, sink="ops", delivery_id=delivery_id(reminder.delivery_id, "ops"), seq=4),
    ]


# ---- where events go from one outbox to another (`notbefore fleet`)


def test_a_part_of_an_outbox_goes_on_in_another_and_is_left_by_the_first(box: Box) -> None:
    said, waits, runs, stays = delivery("a"), delivery("a"), delivery("a", sink="hub", once=True), delivery("b")
    box.put(said, waits, runs, stays)
    box.lease(1)
    box.lease(2, accepted(said, thread="t"), chat=0)
    part = box.outbox.rows.image(10, ["a"])
    other = Box()
    other.outbox.restore(part, 110, passed=5)
    other.outbox.restore(part, 110, passed=5)  # what is there already stays as it is
    assert [(row.delivery_id, row.state) for row in other.rows()] == [
        (waits.delivery_id, "pending"),
        (runs.delivery_id, "dead"),
    ]
    assert other.counts == {"accepted": 2, "dead": 1}
    (given,) = other.lease(111)
    assert (given.delivery_id, given.thread) == (waits.delivery_id, "t")
    box.outbox.leave(["a"])
    assert ids(box.rows()) == [stays.delivery_id]
    assert (box.count("withdrawn"), box.outbox.rows.threads) == (2, {})


def test_what_goes_to_another_sink_before_the_time_is_known_is_as_old_as_it_was(box: Box) -> None:
    box.put(delivery(expires=600.0))
    again = Outbox(lambda: 1.0, patience=0.0)
    again.restore(box.outbox.rows.take(0), 5, time_known=False)
    again.use_sinks({"ops": Terms()}, lambda _row: Targets(("ops",)), 5)
    again.advance(300)
    assert [(row.sink, row.expires) for row in again.rows.chosen()] == [("ops", 305.0)]
