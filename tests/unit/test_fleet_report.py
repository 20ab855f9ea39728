"""How Azure treated a fleet: what the report counts."""

from datetime import timedelta

import pytest

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


def test_types_and_regions_are_rows_of_their_own_with_their_outcomes() -> None:
    guessed = past("C", "Freeze", outcome="unknown", as_far_as_known=True)
    found = report(past("A", "Freeze"), past("B", "Freeze", outcome="canceled"), guessed, past("D", region="eastus"))
    counts = [(row.key, row.finished, row.canceled, row.unknown, row.as_far_as_known) for row in found.rows]
    assert counts == [(("Freeze", "westeurope"), 1, 1, 1, 1), (("Reboot", "eastus"), 1, 0, 0, 0)]


def test_exercises_are_left_out_and_said_to_be() -> None:
    found = report(past("A"), past("B", exercise=True))
    assert (len(found.events), found.exercises) == (1, 1)


def test_a_report_may_be_by_subscription_scale_set_and_tag() -> None:
    events = [
        past(str(number), subscription=one, tags={"team": two})
        for number, (one, two) in enumerate([("a", "b"), ("a", "c")])
    ]
    found = Report.of(events, SINCE, UNTIL, ("subscription", "tags.Team"))
    assert [(row.key, row.events) for row in found.rows] == [(("a", "b"), 1), (("a", "c"), 1)]


@pytest.mark.parametrize("types", [("Reboot", "Freeze", "Preempt"), ("Defragment",)])
def test_of_several_types_or_an_unknown_one_there_is_no_one_promise(types: tuple[str, ...]) -> None:
    (row,) = Report.of([past(one, one, notice=(1.0,)) for one in types], SINCE, UNTIL, ("region",)).rows
    assert (row.promised, row.short_notice) == (None, None)
