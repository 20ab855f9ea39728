"""How Azure treated a fleet: what the report counts."""

from datetime import timedelta

from notbefore.fleet.report import Report
from support.past import THEN, past

SINCE, UNTIL = THEN - timedelta(days=7), THEN + timedelta(days=1)


def report(*events: object) -> Report:
    return Report.of(events, SINCE, UNTIL)  # type: ignore[arg-type]  # they are events


def test_notice_is_counted_by_vm_and_compared_with_nine_tenths_of_the_promise() -> None:
    found = report(past("A", notice=(900.0, 811.0, 809.0)), past("B", notice=(60.0,)))
    (row,) = found.rows
    assert (row.events, row.vms, row.measured_notice, row.short_notice) == (2, 4, 4, 2)
    assert row.notice == (60.0, 809.0, 900.0)


def test_types_and_regions_are_rows_of_their_own() -> None:
    found = report(past("A"), past("B", "Freeze"), past("C", region="eastus"))
    assert [row.key for row in found.rows] == [
        ("Freeze", "westeurope"), ("Reboot", "eastus"), ("Reboot", "westeurope"),
    ]  # fmt: skip


def test_outcomes_are_counted_and_what_is_not_known_is_called_unknown() -> None:
    found = report(past("A"), past("B", outcome="canceled"), past("C", outcome="unknown", as_far_as_known=True))
    (row,) = found.rows
    assert (row.finished, row.canceled, row.unknown, row.as_far_as_known) == (1, 1, 1, 1)


def test_a_type_without_a_promise_has_no_short_notice() -> None:
    (row,) = report(past("A", "Defragment", notice=(1.0,))).rows
    assert (row.promised, row.short_notice) == (None, None)


def test_exercises_are_left_out_and_said_to_be() -> None:
    found = report(past("A"), past("B", exercise=True))
    assert (len(found.events), found.exercises) == (1, 1)


def test_what_nobody_measured_has_no_figures() -> None:
    (row,) = report(past("A", notice=())).rows
    assert (row.notice, row.measured_notice, row.short_notice, row.interruption) == (None, 0, 0, None)


def test_a_report_may_be_by_subscription_scale_set_and_tag() -> None:
    events = [
        past(str(number), subscription=one, tags={"team": two})
        for number, (one, two) in enumerate([("a", "b"), ("a", "c")])
    ]
    found = Report.of(events, SINCE, UNTIL, ("subscription", "tags.Team"))
    assert [(row.key, row.events) for row in found.rows] == [(("a", "b"), 1), (("a", "c"), 1)]


def test_of_several_types_there_is_no_one_promise() -> None:
    found = Report.of([past("A"), past("B", "Freeze"), past("C", "Preempt")], SINCE, UNTIL, ("region",))
    assert found.rows[0].promised is None
