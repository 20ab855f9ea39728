"""The rules of the outbox: order, retries, expiry, repetition, fallback, and what it counts."""

from collections.abc import Iterable
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from notbefore.core.change import LifecycleKind
from notbefore.core.delivery import EXPIRING_KINDS, Delivery, Targets, delivery_id
from notbefore.core.outbox import (
    DEAD_SECONDS,
    INTERRUPTED,
    LONGEST_ASKED,
    REPEAT_SECONDS,
    Bounds,
    Outbox,
    SendResult,
)
from notbefore.core.outbox_rows import OutboxImage
from notbefore.core.routing import A_DAY, Terms
from notbefore.metrics.totals import view_of
from support.azure import T0, event
from support.box import Box, accepted, delivery, failed, ids, refused

A_MEBIBYTE = 1 << 20
BYTES_OF_TWO_ROWS = 2 * 602


@pytest.fixture
def box() -> Box:
    return Box()


def event_keys(deliveries: Iterable[Delivery]) -> list[str]:
    return [delivery.event_key for delivery in deliveries]


def kinds(deliveries: Iterable[Delivery]) -> list[str]:
    return [delivery.kind for delivery in deliveries]


def sinks(deliveries: Iterable[Delivery]) -> list[str]:
    return [delivery.sink for delivery in deliveries]


def begun_events(box: Box) -> list[str]:
    """Return the events of the deliveries that are marked as begun."""
    return [row.event_key for row in box.rows() if row.begun]


def repeat(box: Box, *deliveries: Delivery, every: float = 30.0) -> None:
    """Put deliveries at 0 s, give them to a courier at 1 s, and have them accepted at 2 s."""
    box.put(*deliveries)
    box.lease(1)
    box.lease(2, *[accepted(delivery, repeat=every) for delivery in deliveries])


PAGER = Terms(expire_after=7 * A_DAY, keeps_incidents=True)


def no_targets(_row: Delivery) -> Targets:
    return Targets()


def always_one() -> float:
    return 1.0


def always_half() -> float:
    return 0.5


def restarted_outbox() -> Outbox:
    return Outbox(always_one, patience=0.0)


# ---- the order in which deliveries leave


def test_deliveries_leave_by_severity_not_before_and_age(box: Box) -> None:
    info = delivery("info", severity="info", not_before=5.0)
    late = delivery("late", severity="critical", not_before=70.0)
    early = delivery("early", severity="critical", not_before=20.0)
    newer = delivery("newer", severity="critical", not_before=20.0)
    box.put(info, late, early, newer)

    first_three = box.lease(1, chat=3)
    last = box.lease(1, chat=4)

    assert event_keys(first_three) == ["early", "newer", "late"]
    assert event_keys(last) == ["info"]


def test_approval_replaces_no_reminder(box: Box) -> None:
    box.put(delivery(kind="reminder", due=100.0))

    box.put(delivery(kind="approved"))

    assert kinds(box.rows()) == ["reminder", "approved"]


def test_update_replaces_reminder_but_no_approval(box: Box) -> None:
    box.put(delivery(kind="reminder", due=100.0), delivery(kind="approved"))

    box.put(delivery(kind="updated"))

    assert kinds(box.rows()) == ["approved", "updated"]


def test_update_replaces_reminders_of_its_own_lane_alone(box: Box) -> None:
    of_another_sink = delivery(kind="reminder", due=100.0, sink="hub")
    of_another_event = delivery("f", kind="reminder", due=100.0)
    update = delivery(kind="updated")
    box.put(delivery(kind="reminder", due=100.0), of_another_sink, of_another_event)

    box.put(update)

    assert ids(box.rows()) == ids([of_another_sink, of_another_event, update])


def test_reminder_waits_until_it_is_due(box: Box) -> None:
    announced = delivery()
    box.put(announced, delivery(kind="reminder", due=100.0))
    box.lease(1)

    assert box.lease(2, accepted(announced)) == []
    assert box.outbox.rows.next_due() == 100


def test_due_reminder_waits_for_the_delivery_before_it(box: Box) -> None:
    announced = delivery()
    reminder = delivery(kind="reminder")
    box.put(announced, reminder)

    assert ids(box.lease(1)) == [announced.delivery_id]
    assert ids(box.lease(2, accepted(announced))) == [reminder.delivery_id]


def test_later_delivery_gets_the_thread_of_its_event(box: Box) -> None:
    first = delivery()
    box.put(first, delivery(kind="started"), delivery(sink="hub"))
    assert [leased.thread for leased in box.lease(1)] == [None, None]

    (second,) = box.lease(2, accepted(first, thread="1234.5"))

    assert second.thread == "1234.5"


def test_failed_attempt_continues_in_the_thread_that_it_opened(box: Box) -> None:
    first = delivery()
    box.put(first)
    box.lease(1)

    box.lease(2, failed(first, thread="1234.5"), chat=0)
    (second,) = box.lease(100)

    assert second.thread == "1234.5"


def test_refused_message_of_an_ended_event_keeps_its_thread(box: Box) -> None:
    last = delivery(kind="finished", final=True)
    box.put(last)
    box.lease(1)
    box.lease(2, refused(last, thread="1234.5"), chat=0)

    box.outbox.retry([last.delivery_id], 3)
    (retried,) = box.lease(4)

    assert retried.thread == "1234.5"


def test_dead_letter_and_waiting_reminder_delay_nothing(box: Box) -> None:
    dead = delivery()
    approval = delivery(kind="approved")
    box.put(dead, delivery(kind="reminder", due=50.0), approval)
    box.lease(1)

    leased = box.lease(2, refused(dead))

    assert ids(leased) == [approval.delivery_id]


def test_lane_sends_nothing_while_a_delivery_is_under_way(box: Box) -> None:
    box.put(delivery(kind="reminder", due=50.0), delivery(kind="approved"))
    box.lease(1)

    box.put(delivery(kind="approved"))

    assert box.lease(60) == []


def test_full_outbox_keeps_delivery_under_way() -> None:
    box = Box(Bounds(2, A_MEBIBYTE))
    box.put(delivery("a"))
    box.lease(1)

    box.put(delivery("b"), delivery("c"))

    assert event_keys(box.rows()) == ["a", "c"]


def test_delivery_under_way_does_not_expire() -> None:
    box = Box(Bounds(2, A_MEBIBYTE))
    under_way = delivery("a", expires=10.0)
    box.put(under_way)
    box.lease(1)

    box.put(delivery("b"), delivery("c"), now=11)

    assert event_keys(box.rows()) == ["a", "c"]
    assert box.count("accepted") == 3
    assert box.count("overflowed") == 1
    assert box.count("expired") == 0


def test_delivery_that_was_under_way_expires_when_its_attempt_fails(box: Box) -> None:
    under_way = delivery(expires=10.0)
    box.put(under_way)
    box.lease(1)

    box.lease(12, failed(under_way), chat=0)
    box.lease(12, chat=0)

    assert box.rows() == []
    assert box.count("expired") == 1


def test_outbox_exceeds_its_bound_while_all_rows_are_under_way() -> None:
    box = Box(Bounds(2, A_MEBIBYTE))
    box.put(delivery("a"), delivery("b"))
    box.lease(1)
    box.outbox.rows.put(delivery("c"))
    box.outbox.rows.give(box.outbox.rows.of_event("c")[0])

    removed = box.outbox.make_room(2)

    assert removed == []
    assert event_keys(box.rows()) == ["a", "b", "c"]


# ---- results


@pytest.mark.parametrize("result", [failed, refused])
def test_repetition_is_tried_again_when_not_accepted(box: Box, result: Any) -> None:
    repeated = delivery()
    repeat(box, repeated, every=30.0)
    box.lease(32)

    box.lease(33, result(repeated, error="401"))

    (row,) = box.rows(state="repeating")
    assert row.due == 34
    assert row.error == "401"
    assert box.count("failed") == 1
    assert box.count("dead") == 0


def test_repetition_forgets_failures_once_accepted(box: Box) -> None:
    repeated = delivery()
    repeat(box, repeated, every=30.0)
    box.lease(32)
    box.lease(33, failed(repeated, error="401"))
    box.lease(34)

    box.lease(35, accepted(repeated, repeat=30.0))

    (row,) = box.rows(state="repeating")
    assert row.attempts == 0
    assert row.error == ""


def test_operator_sends_repetition_early(box: Box) -> None:
    repeated = delivery()
    repeat(box, repeated, every=100.0)

    retried = box.outbox.retry([repeated.delivery_id], 40)

    assert retried == 1
    assert ids(box.lease(40)) == [repeated.delivery_id]


def test_pauses_double_up_to_five_minutes() -> None:
    outbox = Outbox(always_half, patience=0.0)
    failing = delivery(expires=1e9)
    outbox.put([failing], 0.0, 0.0)
    now = 0.0
    pauses: list[float] = []

    for _ in range(11):
        outbox.exchange([], {"chat": 1}, now)
        outbox.exchange([failed(failing)], {}, now)
        (row,) = outbox.rows.chosen()
        pauses.append(row.due - now)
        now = row.due

    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 64, 128, 150, 150]


def test_retry_after_pauses_its_sink_alone(box: Box) -> None:
    throttled = delivery("throttled")
    waiting = delivery("waiting")
    elsewhere = delivery("elsewhere", sink="hub")
    box.put(throttled, waiting, elsewhere)
    box.lease(1, chat=1)

    leased = box.lease(2, failed(throttled, retry_after=88.0))

    assert ids(leased) == [elsewhere.delivery_id]
    assert box.outbox.rows.next_due() == 90
    assert box.lease(89) == []
    assert ids(box.lease(90)) == [throttled.delivery_id, waiting.delivery_id]


def test_retry_after_is_shortened_to_an_hour(box: Box) -> None:
    throttled = delivery()
    box.put(throttled)
    box.lease(1)

    box.lease(2, failed(throttled, retry_after=1e9))

    assert box.outbox.rows.next_due() == 2 + LONGEST_ASKED


def test_acceptance_does_not_end_pause(box: Box) -> None:
    throttled = delivery("throttled")
    other = delivery("other")
    box.put(throttled, other)
    box.lease(1)
    box.lease(2, failed(throttled, retry_after=88.0))

    box.lease(3, accepted(other))

    assert box.outbox.rows.next_due() == 90


def test_operator_ends_pause(box: Box) -> None:
    throttled = delivery()
    box.put(throttled)
    box.lease(1)
    box.lease(2, failed(throttled, retry_after=88.0))

    box.outbox.retry([throttled.delivery_id], 3)

    assert ids(box.lease(3)) == [throttled.delivery_id]


def test_paused_sink_gets_no_new_delivery(box: Box) -> None:
    throttled = delivery("throttled")
    box.put(throttled)
    box.lease(1)
    box.lease(2, failed(throttled, retry_after=88.0))

    box.put(delivery("new", created=3.0, due=3.0))

    assert box.lease(4) == []


def test_pause_ends_for_new_delivery_that_would_lose_its_notice(box: Box) -> None:
    throttled = delivery("throttled")
    box.put(throttled)
    box.lease(1)
    box.lease(2, failed(throttled, retry_after=1e9))

    preempt = delivery("preempt", created=10.0, due=10.0, not_before=40.0, severity="critical")
    box.put(preempt, now=10.0)

    assert box.outbox.rows.next_due() == 10
    assert ids(box.lease(10)) == [preempt.delivery_id, throttled.delivery_id]


def test_pause_spares_waiting_delivery_that_would_lose_its_notice(box: Box) -> None:
    throttled = delivery("throttled")
    freeze = delivery("freeze", not_before=900.0)
    box.put(throttled, freeze)
    box.lease(1, chat=1)

    leased = box.lease(2, failed(throttled, retry_after=1e9), chat=1)

    assert ids(leased) == [freeze.delivery_id]


def test_pause_ends_when_a_reminder_is_due(box: Box) -> None:
    throttled = delivery("throttled")
    reminder = delivery("later", kind="reminder", due=600.0, not_before=1200.0)
    box.put(throttled, reminder)
    box.lease(1)

    box.lease(2, failed(throttled, retry_after=1e9))

    assert box.outbox.rows.next_due() == 600
    assert reminder.delivery_id in ids(box.lease(600))


def test_delivery_that_would_lose_its_notice_backs_off_during_pause(box: Box) -> None:
    preempt = delivery(not_before=30.0)
    box.put(preempt)
    box.lease(1)

    box.lease(2, failed(preempt, retry_after=1e9))

    assert box.lease(2.9) == []
    assert ids(box.lease(3)) == [preempt.delivery_id]


@pytest.mark.parametrize(
    "fields",
    [
        {"not_before": 95.0},  # the notice is longer than the pause
        {"not_before": 1.5},  # its notice is over
        {"not_before": 0.0},  # unknown
        {"kind": "started", "not_before": 30.0},
        {"kind": "heartbeat", "not_before": 30.0},
    ],
)
def test_pause_holds_for_delivery_that_loses_no_notice(box: Box, fields: dict[str, Any]) -> None:
    throttled = delivery("throttled")
    other = delivery("other", **fields)
    box.put(throttled, other)
    box.lease(1, chat=1)

    box.lease(2, failed(throttled, retry_after=88.0))

    assert box.outbox.rows.next_due() == 90
    assert box.lease(89) == []


def test_pause_of_one_sink_ends_for_its_own_deliveries_alone(box: Box) -> None:
    throttled = delivery("throttled")
    box.put(throttled)
    box.lease(1)
    box.lease(2, failed(throttled, retry_after=88.0))

    box.put(delivery("preempt", sink="hub", not_before=30.0), now=3.0)

    assert box.lease(4, chat=100) == []


def test_notbefore_of_delivery_is_on_the_clock_of_the_outbox() -> None:
    outbox = Outbox(always_one, patience=0.0)

    outbox.put([delivery(not_before=1_000_030.0), delivery("unknown")], 5.0, 1_000_000.0)

    dated, unknown = outbox.rows.chosen()
    assert dated.not_before == 35.0
    assert unknown.not_before == 0.0


def test_new_configuration_ends_pause(box: Box) -> None:
    throttled = delivery()
    box.put(throttled)
    box.lease(1)
    box.lease(2, failed(throttled, retry_after=88.0))

    box.outbox.use_sinks({"chat": Terms()}, no_targets, 4)  # it may be another receiver

    assert ids(box.lease(4)) == [throttled.delivery_id]


@pytest.mark.parametrize(
    ("created", "accepted_at", "bucket"),
    [(1.0, 1.09, 0), (1.0, 1.11, 1), (1.0, 30_000.0, 6), (5.0, 4.0, 0)],
)
def test_latency_is_counted_by_bucket(
    box: Box,
    created: float,
    accepted_at: float,
    bucket: int,
) -> None:
    box.put(delivery(created=created, due=0.0))
    (under_way,) = box.lease(1)

    box.lease(accepted_at, accepted(under_way))

    counts, total = box.outbox.rows.ledger.latency["chat"]
    assert counts[bucket] == 1
    assert sum(counts) == 1
    assert total == pytest.approx(max(0.0, accepted_at - created))


def test_latencies_add_up(box: Box) -> None:
    first = delivery("first", created=1.0)
    second = delivery("second", created=1.0)
    box.put(first, second)
    box.lease(1)

    box.lease(3, accepted(first))
    box.lease(4, accepted(second))

    counts, total = box.outbox.rows.ledger.latency["chat"]
    assert counts == (0, 0, 2, 0, 0, 0, 0)
    assert total == 5.0


def test_refusal_is_ignored_when_courier_was_released(box: Box) -> None:
    released = delivery()
    box.put(released)
    box.lease(1)
    box.outbox.release(2)

    leased = box.lease(2, refused(released))

    assert ids(leased) == [released.delivery_id]


def test_release_spares_deliveries_of_another_courier(box: Box) -> None:
    released = delivery("e-1", delivery_id="d-1")
    spared = delivery("e-2", delivery_id="d-2")
    box.put(released, spared)
    box.lease(1)

    box.outbox.release(2, [released.delivery_id])

    assert ids(box.outbox.rows.under_way) == [spared.delivery_id]
    assert ids(box.lease(2)) == [released.delivery_id]


def test_acceptance_counts_when_courier_was_released(box: Box) -> None:
    released = delivery()
    box.put(released)
    box.lease(1)
    box.outbox.release(2)

    leased = box.lease(2, accepted(released))

    assert leased == []
    assert box.rows() == []
    assert box.count("delivered") == 1


def test_outbox_forgets_oldest_threads() -> None:
    box = Box(Bounds(2, A_MEBIBYTE))

    for event_key in "abca":
        threaded = delivery(event_key)
        box.put(threaded)
        box.lease(1)
        box.lease(1, accepted(threaded, thread=event_key))

    assert box.outbox.rows.threads == {("chat", "c"): "c", ("chat", "a"): "a"}


# ---- the life of an event


def test_end_expires_announcement_but_not_start(box: Box) -> None:
    announced = delivery()
    started = delivery(kind="started", expires_with_event=False)
    box.put(announced, started)

    box.take("finished")

    assert ids(box.lease(6)) == [started.delivery_id]
    assert box.count("expired") == 1


def test_end_spares_delivery_under_way(box: Box) -> None:
    under_way = delivery()
    box.put(under_way)
    box.lease(1)

    box.take("canceled")
    assert ids(box.rows()) == [under_way.delivery_id]
    box.lease(3, accepted(under_way))

    assert box.rows() == []
    assert box.count("delivered") == 1
    assert box.count("expired") == 0


@pytest.mark.parametrize("outcome", ["failed", "returned", "refused"])
def test_delivery_under_way_expires_when_not_accepted_after_end(box: Box, outcome: Any) -> None:
    under_way = delivery()
    box.put(under_way)
    box.lease(1)
    box.take("canceled")

    box.lease(3, SendResult(under_way.delivery_id, outcome))

    assert box.rows() == []
    assert box.count("expired") == 1


WITH_NOT_BEFORE = replace(event(), event_id="e", not_before=T0)
WITHOUT_NOT_BEFORE = replace(WITH_NOT_BEFORE, not_before=None)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("updated", {"event": WITHOUT_NOT_BEFORE, "previous": WITH_NOT_BEFORE}),
        ("started", {}),
        ("finished", {}),
    ],
)
def test_change_withdraws_reminder_when_its_time_is_void(box: Box, kind: Any, fields: Any) -> None:
    box.put(delivery(kind="reminder", due=100.0), delivery("f", kind="reminder", due=100.0))

    box.take(kind, "e", **fields)

    assert event_keys(box.rows()) == ["f"]
    assert box.count("withdrawn") == 1


def test_update_keeps_reminder_when_not_before_is_unchanged(box: Box) -> None:
    box.put(delivery(kind="reminder", due=100.0))

    box.take("updated", "e", event=WITH_NOT_BEFORE, previous=WITH_NOT_BEFORE)

    assert event_keys(box.rows()) == ["e"]
    assert box.count("withdrawn") == 0


def test_reminders_are_withdrawn_when_vm_is_no_longer_affected(box: Box) -> None:
    first_reminder = delivery(kind="reminder", sink="hub", due=100.0)
    second_reminder = delivery(kind="reminder", sink="hub", due=200.0)
    box.put(first_reminder, second_reminder)

    box.outbox.no_longer_affected(["e"], 2)

    assert box.rows() == []
    assert box.count("withdrawn") == 2


def test_repetition_ends_when_vm_is_no_longer_affected(box: Box) -> None:
    repeat(box, delivery("e"), delivery("f"))

    box.outbox.no_longer_affected(["e"], 2)

    assert event_keys(box.rows(state="repeating")) == ["f"]


def test_delivery_is_not_repeated_when_its_event_moves_to_a_peer(box: Box) -> None:
    under_way = delivery()
    box.put(under_way)
    box.lease(3)

    box.take("updated", "e", scope="peer", previous_scope="self")
    box.lease(4, accepted(under_way, repeat=30.0))

    assert box.rows() == []


# ---- repetition


def test_accepted_delivery_is_repeated_after_its_interval(box: Box) -> None:
    repeated = delivery()

    repeat(box, repeated, every=30.0)

    assert box.lease(31.9) == []
    (repetition,) = box.lease(32)
    assert repetition.delivery_id == repeated.delivery_id
    assert repetition.state == "repeating"


def test_failed_repetition_is_due_after_a_pause(box: Box) -> None:
    repeated = delivery()
    repeat(box, repeated, every=30.0)
    box.lease(32)

    box.lease(33, failed(repeated))

    assert box.lease(33.9) == []
    assert ids(box.lease(34)) == [repeated.delivery_id]


def test_repetition_outlives_expiry_of_its_delivery(box: Box) -> None:
    repeated = delivery(expires=20.0)
    repeat(box, repeated, every=30.0)
    box.lease(32)

    box.lease(99, accepted(repeated, repeat=30.0))

    (row,) = box.rows()
    assert row.due == 129
    assert row.expires == 2 + REPEAT_SECONDS


def test_repetition_lasts_for_a_year_at_most(box: Box) -> None:
    repeated = delivery()
    box.put(repeated)
    box.lease(1)
    box.lease(4, accepted(repeated, repeat=30.0))
    (row,) = box.rows()
    assert row.due == 34
    assert row.expires == 4 + REPEAT_SECONDS

    assert box.lease(4 + REPEAT_SECONDS) == []
    assert box.rows() == []
    assert box.count("expired") == 0


def test_operator_drops_repetition_uncounted(box: Box) -> None:
    repeated = delivery()
    repeat(box, repeated)

    dropped = box.outbox.drop([repeated.delivery_id])

    assert dropped == 1
    assert box.count("accepted") == 1
    assert box.count("delivered") == 1
    assert box.count("dropped") == 0


def test_end_removes_repetition_uncounted(box: Box) -> None:
    repeat(box, delivery())

    box.take("finished")

    assert box.rows() == []
    assert box.counts == {"accepted": 1, "delivered": 1}


def test_moved_repetition_is_not_counted(box: Box) -> None:
    repeat(box, delivery("f"), every=60.0)
    other_box = Box()

    other_box.outbox.restore(box.outbox.rows.image(3, ["f"]), 3)
    box.outbox.leave(["f"])

    assert box.rows() == []
    assert box.counts == {"accepted": 1, "delivered": 1}
    assert len(other_box.rows()) == 1
    assert other_box.counts == {}


def test_accepted_delivery_is_not_repeated_when_a_newer_one_waits(box: Box) -> None:
    older = delivery()
    newer = delivery(kind="updated")
    box.put(older)
    box.lease(1)
    box.put(newer)

    leased = box.lease(2, accepted(older, repeat=30.0))

    assert ids(leased) == [newer.delivery_id]
    assert ids(box.rows()) == [newer.delivery_id]


def test_repetition_continues_when_its_delivery_is_put_again(box: Box) -> None:
    repeated = delivery()
    repeat(box, repeated)

    box.put(repeated)

    (row,) = box.rows()
    assert row.state == "repeating"


def test_newer_delivery_replaces_repetition(box: Box) -> None:
    repeat(box, delivery())

    box.put(delivery(kind="started"))

    assert kinds(box.rows()) == ["started"]


def test_waiting_reminder_does_not_end_repetition(box: Box) -> None:
    announced = delivery()
    box.put(announced, delivery(kind="reminder", due=50.0))
    box.lease(1)

    box.lease(2, accepted(announced, repeat=100.0))

    assert ids(box.rows(state="repeating")) == [announced.delivery_id]


def test_accepted_reminder_replaces_repetition(box: Box) -> None:
    announced = delivery()
    reminder = delivery(kind="reminder", due=50.0)
    box.put(announced, reminder)
    box.lease(1)
    box.lease(2, accepted(announced, repeat=100.0))
    box.lease(50)

    box.lease(51, accepted(reminder, repeat=100.0))

    assert ids(box.rows(state="repeating")) == [reminder.delivery_id]


def test_delivery_accepted_after_end_is_not_repeated(box: Box) -> None:
    started = delivery(kind="started", expires_with_event=False)
    finished = delivery(kind="finished", expires_with_event=False)
    box.put(started)
    box.lease(1)
    box.take("finished", "e", finished)

    box.lease(3, accepted(started, repeat=30.0))
    box.lease(4, accepted(finished, repeat=30.0))

    assert box.rows() == []


def test_dead_letter_retried_after_end_is_not_repeated(box: Box) -> None:
    started = delivery(kind="started", expires_with_event=False)
    box.put(started)
    box.lease(1)
    box.lease(1, refused(started))
    box.take("finished")
    box.outbox.retry([started.delivery_id], 2)
    box.lease(2)

    box.lease(3, accepted(started, repeat=30.0))

    assert box.rows() == []


# ---- expiry and bounds


def test_dead_letter_is_kept_for_thirty_days(box: Box) -> None:
    dead = delivery(expires=100.0)
    box.put(dead)
    box.lease(1)

    box.lease(2, refused(dead, error="404"))

    (row,) = box.rows()
    assert row.state == "dead"
    assert row.attempts == 1
    assert row.expires == 2 + DEAD_SECONDS
    box.lease(1 + DEAD_SECONDS)
    assert ids(box.rows()) == [dead.delivery_id]
    box.lease(2 + DEAD_SECONDS)
    assert box.rows() == []


def test_dead_heartbeat_expires_as_before(box: Box) -> None:
    heartbeat = delivery(kind="heartbeat", expires=100.0)
    box.put(heartbeat)
    box.lease(1)

    box.lease(2, refused(heartbeat, error="404"))

    (row,) = box.rows(state="dead")
    assert row.expires == 100.0


def test_dead_letter_needs_no_courier(box: Box) -> None:
    dead = delivery()
    box.put(dead)
    box.lease(1)

    box.lease(2, refused(dead))

    assert box.outbox.rows.next_due() == inf


def test_result_of_unknown_delivery_is_ignored(box: Box) -> None:
    box.lease(1, accepted(delivery()))

    assert box.rows() == []
    assert box.counts == {}


def test_late_result_of_dead_letter_is_ignored(box: Box) -> None:
    dead = delivery()
    box.put(dead)
    box.lease(1)
    box.lease(2, refused(dead))
    counts = box.counts

    box.lease(3, accepted(dead))

    assert [row.state for row in box.rows()] == ["dead"]
    assert box.counts == counts


def test_full_outbox_removes_as_many_as_were_added() -> None:
    box = Box(Bounds(2, A_MEBIBYTE))
    box.put(delivery("a"), delivery("b"))

    box.put(delivery("c"), delivery("d"))

    assert len(box.rows()) == 2
    assert box.count("overflowed") == 2


@pytest.mark.parametrize("bounds", [Bounds(2, A_MEBIBYTE), Bounds(100, BYTES_OF_TWO_ROWS)])
def test_full_outbox_removes_oldest_of_least_severe(bounds: Bounds) -> None:
    box = Box(bounds)
    critical = delivery("a", severity="critical")
    newest = delivery("c")
    box.put(critical, delivery("b"))
    assert box.count("overflowed") == 0

    box.put(newest)

    assert ids(box.rows()) == [critical.delivery_id, newest.delivery_id]
    assert box.count("overflowed") == 1


def test_full_outbox_removes_from_sink_with_most_rows() -> None:
    box = Box(Bounds(3, A_MEBIBYTE))
    stuck = [delivery(event_key, severity="critical", sink="stuck") for event_key in "abc"]

    box.put(*stuck, delivery("d", severity="info"))

    assert event_keys(box.removed) == ["a"]
    assert event_keys(box.rows()) == ["b", "c", "d"]


def test_full_outbox_removes_repetition_first_uncounted() -> None:
    box = Box(Bounds(2, A_MEBIBYTE))
    dead = delivery("b", severity="critical")
    repeat(box, delivery("a", severity="critical"))
    box.put(dead)
    box.lease(3)
    box.lease(4, refused(dead))

    box.put(delivery("c"))

    assert event_keys(box.rows()) == ["b", "c"]
    assert box.count("overflowed") == 0


def test_full_outbox_removes_dead_letter_before_pending_ones() -> None:
    box = Box(Bounds(2, A_MEBIBYTE))
    dead = delivery("b", severity="critical")
    box.put(dead)
    box.lease(1)
    box.lease(2, refused(dead))

    box.put(delivery("c"), delivery("d"))

    assert event_keys(box.rows()) == ["c", "d"]
    assert box.count("overflowed") == 1


# ---- requests of operators


def test_operator_sends_dead_letter_within_a_day(box: Box) -> None:
    dead = delivery(expires=10.0)
    box.put(dead)
    box.lease(1)
    box.lease(2, refused(dead, error="404"))
    assert box.lease(500) == []

    box.outbox.retry([dead.delivery_id], 1000)

    (row,) = box.rows()
    assert row.expires == 1000 + A_DAY
    assert ids(box.lease(1001)) == [dead.delivery_id]


def test_operator_resets_attempts(box: Box) -> None:
    failing = delivery()
    box.put(failing)
    box.lease(1)
    box.lease(2, failed(failing), chat=0)

    box.outbox.retry([failing.delivery_id], 1003)

    (row,) = box.rows()
    assert row.due == 1003
    assert row.attempts == 0


def test_retry_counts_only_known_deliveries(box: Box) -> None:
    waiting = delivery()
    box.put(waiting)

    retried = box.outbox.retry([waiting.delivery_id, "unknown"], 1000)

    assert retried == 1


def test_drop_deletes_and_counts_deliveries(box: Box) -> None:
    dropped = delivery()
    staying = delivery("f")
    box.put(dropped, staying)

    count = box.outbox.drop([dropped.delivery_id])

    assert count == 1
    assert ids(box.rows()) == [staying.delivery_id]
    assert box.count("dropped") == 1


def test_retry_spares_delivery_under_way(box: Box) -> None:
    under_way = delivery()
    box.put(under_way)
    box.lease(1)

    retried = box.outbox.retry([under_way.delivery_id], 1e6)

    assert retried == 0
    assert box.lease(1e6) == []


def test_operator_retries_and_drops_delivery_of_a_released_courier(box: Box) -> None:
    released = delivery()
    box.put(released)
    box.lease(1)
    box.outbox.release(2)

    retried = box.outbox.retry([released.delivery_id], 2)
    dropped = box.outbox.drop([released.delivery_id, "unknown"])

    assert retried == 1
    assert dropped == 1
    assert box.count("accepted") == 1
    assert box.count("dropped") == 1


def test_drop_spares_delivery_under_way(box: Box) -> None:
    under_way = delivery()
    box.put(under_way)
    box.lease(1)

    count = box.outbox.drop([under_way.delivery_id])

    assert count == 0
    assert ids(box.rows()) == [under_way.delivery_id]


def test_view_shows_oldest_pending_by_sink_and_severity(box: Box) -> None:
    box.put(delivery(created=5.0))
    box.put(delivery("f", created=2.0))
    box.put(delivery("h", severity="critical", sink="hub"))

    view = view_of(box.outbox, 10, 1_010.0)

    assert view.oldest == {("chat", "info"): 1_002.0, ("hub", "critical"): 1_000.0}


def test_view_counts_rows_by_sink_and_state(box: Box) -> None:
    dead = delivery(sink="mail")
    box.put(delivery("e"), delivery("f"), dead)
    box.lease(5, mail=9)
    box.lease(5, refused(dead), mail=9)

    view = view_of(box.outbox, 10, 1_010.0)

    assert view.rows == {("chat", "pending"): 2, ("mail", "dead"): 1}


def test_view_shows_last_error_by_sink(box: Box) -> None:
    failing = delivery(sink="hub")
    box.put(failing)
    box.lease(5, hub=9)
    box.lease(6, failed(failing, error="503"), hub=0)

    view = view_of(box.outbox, 10, 1_010.0)

    assert view.errors["hub"] == "503"


def test_view_shows_latency_by_sink(box: Box) -> None:
    sent = delivery(created=1.0)
    box.put(sent)
    box.lease(1)
    box.lease(3, accepted(sent))

    view = view_of(box.outbox, 10, 1_010.0)

    assert view.latency["chat"].sum == 2.0
    assert sum(view.latency["chat"].counts) == 1


# ---- a sink that was renamed or removed

NEW_TERMS = dict.fromkeys(("ops", "mail", "hub"), Terms())


def to_ops(_row: Delivery) -> Targets:
    return Targets(("ops",))


def to_ops_mail_and_old(_row: Delivery) -> Targets:
    return Targets(("ops", "mail", "old"))


def test_pending_delivery_moves_to_sinks_of_present_routes(box: Box) -> None:
    box.put(delivery(kind="reminder", due=50.0, expires=99.0))

    moved = box.outbox.use_sinks(NEW_TERMS, to_ops_mail_and_old, 5)

    assert len(moved) == 1
    assert sinks(box.rows()) == ["ops", "mail"]
    for row in box.rows():
        assert row.due == 50
        assert row.expires == 99
    assert box.count("withdrawn") == 1


def test_moved_delivery_skips_sinks_that_have_it(box: Box) -> None:
    box.put(delivery(others=("mail", "past")))

    box.outbox.use_sinks(NEW_TERMS, to_ops_mail_and_old, 5)

    (row,) = box.rows()
    assert row.sink == "ops"
    assert row.others == ("mail",)  # a sink called `past` may get it again


def test_moved_repetition_is_sent_for_a_day(box: Box) -> None:
    repeat(box, delivery(others=("mail",)))

    box.outbox.use_sinks(NEW_TERMS, to_ops_mail_and_old, 5)

    (row,) = box.rows()
    assert row.sink == "ops"
    assert row.state == "pending"
    assert row.due == 32
    assert row.expires == 5 + A_DAY
    assert box.count("withdrawn") == 0


def test_delivery_stays_when_its_sink_is_configured(box: Box) -> None:
    staying = delivery(sink="hub")
    box.put(staying)

    moved = box.outbox.use_sinks(NEW_TERMS, to_ops_mail_and_old, 5)

    assert moved == []
    assert ids(box.rows()) == [staying.delivery_id]


def test_moved_delivery_is_sent_to_its_new_sink(box: Box) -> None:
    box.put(delivery())

    box.outbox.use_sinks(NEW_TERMS, to_ops, 5)

    assert sinks(box.lease(5, ops=9, chat=9)) == ["ops"]


def test_fallback_copy_follows_terms_of_its_sink(box: Box) -> None:
    box.put(critical(once=True))
    terms = {
        "chat": Terms(once=True),
        "mail": Terms(expire_on_end=False),
        "hub": Terms(once=True),
    }
    box.outbox.use_sinks(terms, no_targets, 60)

    box.lease(60, chat=0)

    (mail,) = box.rows(sink="mail")
    assert not mail.once
    assert not mail.expires_with_event
    (hub,) = box.rows(sink="hub")
    assert hub.once
    assert hub.expires_with_event


def to_chat_with_fallback(_row: Delivery) -> Targets:
    return Targets(("chat",), ("pager", "hub"))


def test_fallback_copy_moves_when_its_sink_is_gone(box: Box) -> None:
    box.put(critical())
    box.lease(60, chat=0)

    terms = dict.fromkeys(("chat", "hub", "pager"), Terms())
    moved = box.outbox.use_sinks(terms, to_chat_with_fallback, 61)

    assert sinks(moved) == ["mail"]
    copies = [row for row in box.rows() if row.note]
    assert sorted(sinks(copies)) == ["hub", "pager"]


def test_fallback_is_replaced_when_its_sink_is_gone(box: Box) -> None:
    box.put(replace(critical(), fallback_at=110.0))

    terms = dict.fromkeys(("chat", "hub", "pager"), Terms())
    box.outbox.use_sinks(terms, to_chat_with_fallback, 61)
    box.lease(110, chat=0)

    copies = [row for row in box.rows() if row.note]
    assert sorted(sinks(copies)) == ["hub", "pager"]


def test_delivery_is_dead_when_no_route_replaces_its_sink(box: Box) -> None:
    box.put(delivery())

    box.outbox.use_sinks({"hub": Terms()}, no_targets, 3)

    (row,) = box.rows()
    assert row.state == "dead"
    assert row.error == "no sink named chat is configured"


def test_repetition_ends_when_no_route_replaces_its_sink(box: Box) -> None:
    repeat(box, delivery())

    box.outbox.use_sinks({"hub": Terms()}, no_targets, 3)

    assert box.rows() == []


def test_delivery_under_way_is_redirected_after_its_result(box: Box) -> None:
    under_way = delivery()
    box.put(under_way)
    box.lease(2)

    box.outbox.use_sinks({"hub": Terms()}, no_targets, 3)
    (row,) = box.rows()
    assert row.state == "pending"

    box.lease(4, failed(under_way), chat=0)
    box.outbox.redirect(5)
    (row,) = box.rows()
    assert row.state == "dead"


# ---- deliveries that may be attempted only once


def test_once_delivery_is_given_after_its_begin_is_on_disk() -> None:
    box = Box(patience=1.0)
    box.put(delivery(once=True))
    box.outbox.rows.take(1)
    box.outbox.rows.written()

    assert box.lease(1) == []
    (stored,) = box.outbox.rows.take(1).rows
    assert stored.begun
    assert box.lease(1.5) == []
    assert box.outbox.rows.written()
    assert len(box.lease(1.5)) == 1


def test_once_delivery_is_dead_when_its_courier_ends(box: Box) -> None:
    box.put(delivery(once=True))
    (leased,) = box.lease(1)

    (dead,) = box.outbox.release(2)

    assert dead.delivery_id == leased.delivery_id
    assert dead.state == "dead"
    assert dead.error == INTERRUPTED
    assert box.lease(3) == []


def test_only_next_once_delivery_is_marked_as_begun() -> None:
    box = Box(patience=1.0)
    box.put(delivery("a", once=True), delivery("b", once=True))

    box.lease(1.0, chat=1)
    box.lease(1.1, chat=1)

    assert begun_events(box) == ["a"]


def test_begun_delivery_is_not_overtaken_when_disk_is_sick() -> None:
    box = Box(patience=1.0)
    box.put(delivery("a", once=True))
    box.lease(1.0, chat=1)
    box.put(delivery("d", once=True, severity="critical"), now=1.2)

    leased = box.lease(2.5, chat=1)

    assert event_keys(leased) == ["a"]
    assert begun_events(box) == ["a"]


def test_restored_once_delivery_is_dead_when_it_had_begun(box: Box) -> None:
    box.put(delivery(once=True))
    box.lease(1)
    outbox = restarted_outbox()

    outbox.restore(box.outbox.rows.take(2), 2)

    (row,) = outbox.rows.chosen()
    assert row.state == "dead"
    assert row.error == INTERRUPTED


def test_restored_once_delivery_waits_when_its_attempt_failed(box: Box) -> None:
    box.put(delivery(once=True))
    (leased,) = box.lease(1)
    box.lease(2, failed(leased, error="503"), chat=0)
    outbox = restarted_outbox()

    outbox.restore(box.outbox.rows.take(2), 2)

    (row,) = outbox.rows.chosen()
    assert row.state == "pending"
    assert row.error == "503"


# ---- the disk and the clock


def test_delivery_waits_until_it_is_on_disk() -> None:
    box = Box(patience=1.0)
    written = delivery()
    box.put(written)
    assert box.lease(0.5) == []
    assert box.outbox.rows.next_due() == 1.0

    box.outbox.rows.take(0.5)
    assert box.outbox.rows.written()

    assert not box.outbox.rows.written()  # nothing else waits for the disk
    assert ids(box.lease(0.5)) == [written.delivery_id]


def test_delivery_waits_a_second_at_most_for_the_disk() -> None:
    box = Box(patience=1.0)
    written = delivery()
    unwritten = delivery("f")
    box.put(written)
    box.outbox.rows.take(1)
    box.put(unwritten, now=0.5)
    box.outbox.rows.written()

    assert ids(box.lease(0.5)) == [written.delivery_id]
    assert box.outbox.rows.next_due() == 1.5
    assert ids(box.lease(1.5)) == [unwritten.delivery_id]


def test_next_delivery_waits_until_previous_result_is_on_disk() -> None:
    box = Box(patience=1.0)
    first = delivery()
    second = delivery()
    box.put(first, second)
    box.outbox.rows.take(1)
    box.outbox.rows.written()
    box.lease(5)

    assert box.lease(6, accepted(first)) == []
    box.outbox.rows.take(6)
    assert box.lease(6.5) == []
    assert box.outbox.rows.written()
    assert ids(box.lease(6.5)) == [second.delivery_id]


def test_change_after_take_stays_unwritten() -> None:
    box = Box(patience=1.0)
    first = delivery()
    second = delivery("f")
    box.put(first, second)
    box.lease(5)
    box.lease(6, accepted(first))
    box.outbox.rows.take(6)

    box.lease(6.5, accepted(second))
    box.outbox.rows.written()

    assert box.outbox.rows.changed == {second.lane}
    box.outbox.rows.take(7)
    assert not box.outbox.rows.changed


def test_restored_outbox_keeps_its_times_on_another_clock(box: Box) -> None:
    waiting = delivery("e", fallback=("hub",), fallback_at=60.0)
    expiring = delivery("f", due=20.0, expires=90.0)
    box.put(waiting, expiring)
    stored = msgspec.msgpack.encode(box.outbox.rows.take(10))
    outbox = restarted_outbox()

    outbox.restore(msgspec.msgpack.decode(stored, type=OutboxImage), 1010, passed=3)

    first, second = outbox.rows.chosen()
    assert first.due == 997
    assert first.expires == 1e9 + 997
    assert first.fallback_at == 1057
    assert second.due == 1017
    assert second.expires == 1087
    assert second.fallback_at is None
    assert outbox.rows.changed  # the file has the times of the earlier clock


def test_restored_outbox_keeps_its_counts(box: Box) -> None:
    threaded = delivery()
    box.put(threaded)
    box.lease(1)
    box.lease(2, accepted(threaded, thread="t"))
    outbox = restarted_outbox()

    outbox.restore(box.outbox.rows.take(10), 1010)

    assert outbox.rows.ledger == box.outbox.rows.ledger


def test_restored_outbox_sends_delivery_that_was_under_way(box: Box) -> None:
    under_way = delivery()
    box.put(under_way)
    box.lease(1)
    outbox = restarted_outbox()

    outbox.restore(box.outbox.rows.take(10), 1010)

    assert ids(outbox.exchange([], {"chat": 9}, 1010)) == [under_way.delivery_id]


def test_nothing_expires_until_time_is_known(box: Box) -> None:
    waiting = delivery(expires=10.0, due=5.0)
    box.put(waiting)
    outbox = restarted_outbox()
    outbox.restore(box.outbox.rows.take(0), 100, time_known=False)

    assert ids(outbox.exchange([], {"chat": 9}, 1e6)) == [waiting.delivery_id]
    outbox.release(1e6)
    outbox.advance(20)

    assert outbox.exchange([], {"chat": 9}, 106) == []
    assert outbox.rows.ledger.counts[("chat", "expired")] == 1


def test_reminder_is_not_due_until_time_is_known(box: Box) -> None:
    reminder = delivery(kind="reminder", due=5.0)
    box.put(reminder)
    outbox = restarted_outbox()
    outbox.restore(box.outbox.rows.take(0), 100, time_known=False)

    assert outbox.exchange([], {"chat": 9}, 1e6) == []
    outbox.advance(20)

    assert ids(outbox.exchange([], {"chat": 9}, 106)) == [reminder.delivery_id]


def test_reminder_that_was_due_waits_when_time_gets_unknown(box: Box) -> None:
    box.put(delivery(kind="reminder", due=5.0))

    box.outbox.restore(OutboxImage(), 10, time_known=False)

    assert box.lease(20) == []


def test_new_reminder_keeps_its_time_when_time_gets_known(box: Box) -> None:
    box.put(delivery("earlier", sink="hub"))
    outbox = restarted_outbox()
    outbox.restore(box.outbox.rows.take(0), 100, time_known=False)
    reminder = delivery("new", kind="reminder", due=105.0)
    outbox.put([reminder], 100, 100)

    outbox.advance(20)

    assert outbox.exchange([], {"chat": 9}, 104) == []
    assert ids(outbox.exchange([], {"chat": 9}, 106)) == [reminder.delivery_id]


# ---- fallback sinks


def critical(**fields: Any) -> Delivery:
    """Return a critical delivery that goes to `mail` and `hub` if `chat` has not accepted it."""
    fallback = ("mail", "hub")
    return delivery(
        severity="critical",
        change_id="c",
        fallback=fallback,
        fallback_at=60.0,
        **fields,
    )


def test_fallback_gets_delivery_that_is_not_accepted_in_time(box: Box) -> None:
    failing = critical()
    box.put(failing)
    box.lease(1, chat=9, mail=9, hub=9)
    box.lease(2, failed(failing, error="503", retry_after=98.0))
    assert box.lease(59, chat=9, mail=9, hub=9) == []
    assert box.outbox.rows.next_due() == 60.0

    mail, hub = box.lease(60, chat=9, mail=9, hub=9)

    assert mail.sink == "mail"
    assert hub.sink == "hub"
    assert mail.note == "chat has not accepted it so far: 503"
    (copy,) = box.rows(sink="mail")
    assert copy.due == 60.0
    assert copy.expires == 60.0 + A_DAY
    assert copy.fallback == ()


def test_fallback_copies_are_sent_once_and_their_original_again(box: Box) -> None:
    failing = critical()
    box.put(failing)
    box.lease(1, chat=9)
    box.lease(2, failed(failing, error="503", retry_after=98.0))
    mail, hub = box.lease(60, mail=9, hub=9)

    leased = box.lease(100, accepted(mail), accepted(hub), chat=9, mail=9, hub=9)

    assert ids(leased) == [failing.delivery_id]
    assert box.lease(1000, accepted(failing), chat=9, mail=9, hub=9) == []


def test_fallback_is_immediate_when_a_person_must_act(box: Box) -> None:
    failing = critical()
    box.put(failing)
    box.lease(1, chat=9)
    assert box.outbox.rows.next_due() == 60.0

    mail, hub = box.lease(2, failed(failing, error="401", by_hand=True), mail=9, hub=9)

    assert mail.sink == "mail"
    assert mail.note == "chat has not accepted it so far: 401"
    assert hub.sink == "hub"


def test_delivery_is_tried_again_after_its_fallback(box: Box) -> None:
    failing = critical()
    box.put(failing)
    box.lease(1, chat=9)
    mail, hub = box.lease(2, failed(failing, error="401", by_hand=True), mail=9, hub=9)

    leased = box.lease(100, failed(mail, by_hand=True), accepted(hub), chat=9)

    assert ids(leased) == [failing.delivery_id]


def test_moved_once_delivery_has_not_begun() -> None:
    box = Box(patience=1.0)
    box.put(delivery(once=True))
    box.lease(1)
    assert begun_events(box) == ["e"]

    box.outbox.use_sinks({"ops": Terms(once=True)}, to_ops, 1)

    assert sinks(box.rows()) == ["ops"]
    assert begun_events(box) == []


def test_accepted_delivery_needs_no_fallback(box: Box) -> None:
    delivered = critical()
    box.put(delivered)
    box.lease(1, chat=9)

    box.lease(2, accepted(delivered), chat=9)

    assert box.lease(100, mail=9, hub=9) == []


def test_change_goes_to_a_fallback_sink_once(box: Box) -> None:
    box.put(critical(sink="chat"), critical(sink="pager"))

    leased = box.lease(100, mail=9, hub=9)

    assert sorted(sinks(leased)) == ["hub", "mail"]


def end_with_fallback(*fallback: str) -> Delivery:
    """Return the end of the event, as its route makes it."""
    end = critical(kind="finished", created=200.0, due=220.0, others=("mail",))
    return replace(end, change_id="end", fallback=fallback, expires_with_event=False)


def test_end_goes_to_fallback_sinks_that_got_the_start(box: Box) -> None:
    box.put(critical())
    mail, hub = box.lease(60, mail=9, hub=9)
    box.lease(61, accepted(mail), mail=0)  # the hub has not answered yet
    end = end_with_fallback("mail", "hub", "pager")

    box.take("finished", "e", end, now=200)

    ends = [row for row in box.rows() if row.kind == "finished"]
    assert sinks(ends) == ["chat", "mail", "hub"]
    for follower in ends[1:]:
        assert follower.note == "an earlier message of this event came here"
        assert follower.delivery_id not in ids([end, mail, hub])
        assert follower.fallback == ()
        assert follower.fallback_at is None
        assert follower.others == ()
        assert follower.due == 200.0


def test_end_falls_back_only_to_sinks_without_it(box: Box) -> None:
    box.put(critical())
    box.lease(60, mail=9, hub=9)

    box.take("finished", "e", end_with_fallback("mail", "hub", "pager"), now=200)

    (end,) = [row for row in box.rows(sink="chat") if row.kind == "finished"]
    assert end.fallback == ("pager",)


STEPS: list[LifecycleKind] = ["announced", "updated", "started", "finished"]
STEP = st.tuples(st.sampled_from(STEPS), st.booleans(), st.sampled_from([1.0, 40.0, 70.0]))


def change_for_two_sinks(
    kind: LifecycleKind,
    number: int,
    now: float,
    fallback_after: float | None,
) -> list[Delivery]:
    """Return a change for two sinks with one fallback; the second sink gets twice the time."""
    messages: list[Delivery] = []
    for position, sink in enumerate(("chat", "hub"), start=1):
        fallback_at = None
        if fallback_after is not None:
            fallback_at = now + fallback_after * position

        message = delivery(
            kind=kind,
            sink=sink,
            created=now,
            due=now,
            expires_with_event=kind in EXPIRING_KINDS,
            change_id=str(number),
            fallback=("mail",),
            fallback_at=fallback_at,
        )
        messages.append(message)
    return messages


def fallback_messages(steps: list[tuple[LifecycleKind, bool, float]]) -> list[Delivery]:
    """Return what `mail` gets of one event when the other sinks fail every message.

    ``steps``: a change, whether it is critical, and the seconds until the next one.
    """
    box = Box()
    now = 0.0
    received: list[Delivery] = []
    last_step: tuple[LifecycleKind, bool, float] = ("updated", False, 200.0)

    for number, (kind, is_critical, seconds) in enumerate([*steps, last_step]):
        fallback_after = 60.0 if is_critical else None
        box.take(kind, "e", *change_for_two_sinks(kind, number, now, fallback_after), now=now)

        leased = box.lease(now, chat=9, hub=9, mail=9)
        while leased:
            now += seconds / 10
            results: list[SendResult] = []
            for message in leased:
                if message.sink == "mail":
                    received.append(message)
                    results.append(accepted(message))
                else:
                    results.append(failed(message))
            leased = box.lease(now, *results, mail=9)
        now += seconds
    return received


@given(st.lists(STEP, max_size=8))
def test_fallback_sink_gets_each_change_once(
    steps: list[tuple[LifecycleKind, bool, float]],
) -> None:
    received = fallback_messages(steps)

    change_ids = [message.change_id for message in received]
    assert len(set(change_ids)) == len(change_ids)


@given(st.lists(STEP, max_size=8))
def test_fallback_sink_gets_nothing_older_after_an_end(
    steps: list[tuple[LifecycleKind, bool, float]],
) -> None:
    received = fallback_messages(steps)

    for position, message in enumerate(received):
        if message.kind == "finished":
            for later in received[position + 1 :]:
                assert later.change_id > message.change_id


def test_fallback_copy_changes_only_routing_fields(box: Box) -> None:
    original = replace(critical(created=5.0, not_before=900.0, others=("mail",)), fallback=("hub",))
    box.put(original, now=10)
    box.lease(20, chat=9)

    box.lease(30, refused(original, error="401"), chat=0)

    (copy,) = box.rows(sink="hub")
    assert copy == replace(
        original,
        sink="hub",
        delivery_id=delivery_id("c", "hub"),
        note="chat refused it: 401",
        due=30,
        expires=30 + A_DAY,
        fallback=(),
        fallback_at=None,
        others=(),
        seq=2,
    )


def test_refused_delivery_keeps_its_place_but_not_its_fallback_time(box: Box) -> None:
    original = critical()
    box.put(original, now=10)
    box.lease(20, chat=9)

    box.lease(30, refused(original, error="401"), chat=0)

    (dead,) = box.rows(sink="chat")
    assert dead.state == "dead"
    assert dead.seq == 1
    assert dead.fallback_at is None


def test_redirected_delivery_copies_all_but_routing_fields(box: Box) -> None:
    original = replace(critical(created=5.0, not_before=900.0, others=("mail",)), fallback=("hub",))
    box.put(original, now=10)
    box.lease(20, chat=1)
    box.lease(21, failed(original, error="503"), chat=0)

    box.outbox.use_sinks({"ops": Terms()}, to_ops_with_hub_as_fallback, 25)

    (moved,) = box.rows()
    identity = delivery_id("c", "ops")
    assert moved == replace(original, sink="ops", delivery_id=identity, due=22, seq=1, others=())


def test_redirected_reminder_copies_all_but_routing_fields(box: Box) -> None:
    reminder = delivery(kind="reminder", due=50.0, expires=99.0)
    box.put(reminder, now=10)

    box.outbox.use_sinks({"ops": Terms()}, to_ops_with_hub_as_fallback, 25)

    (moved,) = box.rows()
    identity = delivery_id(reminder.delivery_id, "ops")
    assert moved == replace(reminder, sink="ops", delivery_id=identity, seq=1)


# ---- ends for sinks with an open incident or message, although no route leads there


def open_at_pager(box: Box) -> None:
    """Let a delivery open an incident at `pager`."""
    box.outbox.use_sinks({"chat": Terms(), "pager": PAGER}, no_targets, 0)
    start = delivery("e", "pager", kind="started", expires_with_event=False, change_id="start")
    box.put(start)
    box.lease(1, chat=9, pager=9)
    box.lease(2, accepted(start, thread="incident"), chat=0)


def routed_end(sink: str = "chat") -> Delivery:
    return delivery("e", sink, kind="finished", expires_with_event=False, change_id="end")


@pytest.mark.parametrize("ends", [[routed_end()], []])
def test_end_goes_to_sinks_with_an_open_incident(box: Box, ends: list[Delivery]) -> None:
    open_at_pager(box)

    removed = box.take("finished", "e", *ends, now=100)

    (end,) = box.rows(sink="pager")
    assert removed == []
    assert end.kind == "finished"
    assert end.note == "an earlier message of this event came here"
    assert end.final
    assert end.due == 100.0
    assert end.expires == 100.0 + PAGER.expire_after
    (leased,) = box.lease(101, pager=9)
    assert leased.thread == "incident"


@pytest.mark.parametrize(("terms", "expected"), [(PAGER, ["plugin"]), (Terms(), [])])
def test_end_goes_to_sink_with_incidents_that_returned_no_thread(
    box: Box, terms: Terms, expected: list[str]
) -> None:
    box.outbox.use_sinks({"plugin": terms}, no_targets, 0)
    start = delivery("e", "plugin", kind="started", expires_with_event=False, change_id="start")
    box.put(start)
    box.lease(1, plugin=9)
    box.lease(2, accepted(start), plugin=0)

    box.take("finished", "e", now=100)

    assert sinks(box.rows()) == expected


def test_end_goes_to_waiting_start_that_will_open_a_message(box: Box) -> None:
    bot = Terms(updates_message=True)
    box.outbox.use_sinks({"chat": Terms(), "bot": bot}, no_targets, 0)
    box.put(delivery("e", "bot", kind="started", expires_with_event=False, change_id="start"))

    box.take("finished", "e", routed_end(), now=100)

    assert kinds(box.rows(sink="bot")) == ["started", "finished"]


def test_last_message_of_a_vm_goes_to_sinks_with_an_open_incident(box: Box) -> None:
    open_at_pager(box)

    box.take("updated", "e", scope="peer", previous_scope="self", now=100)

    assert kinds(box.rows(sink="pager")) == ["updated"]


def test_other_changes_go_only_where_routes_lead(box: Box) -> None:
    open_at_pager(box)

    box.take("updated", "e", delivery("e"), now=100)

    assert box.rows(sink="pager") == []


def test_end_is_not_sent_twice_to_a_routed_sink(box: Box) -> None:
    open_at_pager(box)
    end = routed_end("pager")

    box.take("finished", "e", end, now=100)

    assert ids(box.rows()) == [end.delivery_id]


def test_end_does_not_go_to_sinks_of_other_events(box: Box) -> None:
    open_at_pager(box)

    box.take("finished", "f", now=100)

    assert box.rows() == []


@pytest.mark.parametrize(
    ("sink", "expected"), [("pager", ["started", "finished"]), ("chat", ["started"])]
)
def test_end_follows_a_message_that_will_open_an_incident(
    box: Box, sink: str, expected: list[str]
) -> None:
    box.outbox.use_sinks({"chat": Terms(), "pager": PAGER}, no_targets, 0)
    box.put(delivery("e", sink, kind="started", expires_with_event=False, change_id="start"))

    box.take("finished", "e", now=100)

    assert kinds(box.rows(sink=sink)) == expected


def test_removed_sink_with_an_open_incident_is_returned_once(box: Box) -> None:
    open_at_pager(box)
    box.outbox.use_sinks({"chat": Terms()}, no_targets, 50)

    first = box.take("finished", "e", routed_end(), now=100)
    second = box.take("finished", "e", routed_end(), now=101)

    assert first == ["pager"]
    assert second == []
    assert box.rows(sink="pager") == []


def test_outbox_forgets_thread_once_its_end_is_accepted(box: Box) -> None:
    open_at_pager(box)
    end = routed_end("pager")
    box.take("finished", "e", end, now=100)
    box.lease(101, pager=9)
    box.lease(102, accepted(end, thread="incident"), chat=0)

    box.take("finished", "e", now=200)

    assert box.outbox.rows.threads == {}
    assert box.rows() == []


def test_late_acceptance_keeps_thread_for_the_end_that_waits(box: Box) -> None:
    open_at_pager(box)
    update = delivery("e", "pager", kind="updated", change_id="update")
    box.put(update)
    box.lease(3, pager=9)
    box.take("finished", "e", routed_end("pager"), now=100)

    (leased,) = box.lease(101, accepted(update, thread="incident"), pager=9)

    assert leased.kind == "finished"
    assert leased.thread == "incident"


def test_end_follows_fallback_that_its_route_does_not_have(box: Box) -> None:
    box.put(critical())
    (mail, _) = box.lease(60, mail=9, hub=9)
    box.lease(61, accepted(mail), mail=0)

    box.take("finished", "e", routed_end(), now=200)

    assert kinds(box.rows(sink="mail")) == ["finished"]


def to_ops_with_hub_as_fallback(_row: Delivery) -> Targets:
    return Targets(("ops",), ("hub",))


# ---- events that move from one outbox to another (`notbefore fleet`)


def test_moved_events_continue_in_the_other_outbox(box: Box) -> None:
    waiting = delivery("a")
    box.put(waiting, delivery("b"))
    part = box.outbox.rows.image(10, ["a"])
    other_box = Box()

    other_box.outbox.restore(part, 110, passed=5)

    assert ids(other_box.rows()) == [waiting.delivery_id]
    assert other_box.counts == {"accepted": 1}


def test_moved_part_leaves_threads_of_other_events(box: Box) -> None:
    sent = [delivery("a"), delivery("b")]
    box.put(*sent)
    box.lease(1)
    box.lease(2, *[accepted(row, thread=row.event_key) for row in sent], chat=0)

    part = box.outbox.rows.image(10, ["a"])

    assert part.threads == ((("chat", "a"), "a"),)


def test_courier_has_the_deliveries_that_were_given_to_it(box: Box) -> None:
    waiting = delivery("b")
    taken = delivery("a")
    box.put(taken, waiting)

    box.lease(1, chat=1)

    assert ids(box.outbox.rows.under_way) == [taken.delivery_id]


def test_moved_thread_continues_in_the_other_outbox(box: Box) -> None:
    sent = delivery("a")
    waiting = delivery("a")
    box.put(sent, waiting)
    box.lease(1)
    box.lease(2, accepted(sent, thread="t"), chat=0)
    other_box = Box()

    other_box.outbox.restore(box.outbox.rows.image(10, ["a"]), 110)

    (leased,) = other_box.lease(111)
    assert leased.delivery_id == waiting.delivery_id
    assert leased.thread == "t"


def test_moved_once_delivery_is_dead_when_it_had_begun(box: Box) -> None:
    running = delivery("a", sink="hub", once=True)
    box.put(running)
    box.lease(1)
    other_box = Box()

    other_box.outbox.restore(box.outbox.rows.image(10, ["a"]), 110)

    (row,) = other_box.rows()
    assert row.delivery_id == running.delivery_id
    assert row.state == "dead"
    assert other_box.counts == {"accepted": 1, "dead": 1}


def test_delivery_is_restored_once_when_its_image_comes_twice(box: Box) -> None:
    box.put(delivery("a"))
    part = box.outbox.rows.image(10, ["a"])
    other_box = Box()
    other_box.outbox.restore(part, 110)
    before = other_box.rows()

    other_box.outbox.restore(part, 200)

    assert other_box.rows() == before
    assert other_box.counts == {"accepted": 1}


def test_outbox_forgets_moved_events(box: Box) -> None:
    sent = delivery("a")
    staying = delivery("b")
    box.put(sent, delivery("a"), delivery("a", sink="hub"), staying)
    box.lease(1)
    box.lease(2, accepted(sent, thread="t"), chat=0)

    box.outbox.leave(["a"])

    assert ids(box.rows()) == [staying.delivery_id]
    assert box.count("withdrawn") == 2
    assert box.outbox.rows.threads == {}


def test_redirected_delivery_keeps_its_age_until_time_is_known(box: Box) -> None:
    box.put(delivery(expires=600.0))
    outbox = restarted_outbox()
    outbox.restore(box.outbox.rows.take(0), 5, time_known=False)
    outbox.use_sinks({"ops": Terms()}, to_ops, 5)

    outbox.advance(300)

    (row,) = outbox.rows.chosen()
    assert row.sink == "ops"
    assert row.expires == 305.0
