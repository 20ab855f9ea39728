"""How Azure treated a fleet: what the report counts, and where the plots draw it."""

from datetime import timedelta

import pytest

from notbefore.fleet import plots
from notbefore.fleet.page import report_page
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
    assert [(row.event_type, row.region) for row in found.rows] == [
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


def test_the_course_stacks_the_types_of_one_day() -> None:
    found = plots.course(report(past("A"), past("B", "Freeze"), past("C", closed=SINCE)))
    assert found.greatest == 2
    days: dict[float, list[plots.Bar]] = {}
    for bar in found.bars:
        days.setdefault(bar.x, []).append(bar)
    assert [len(bars) for bars in days.values()] == [1, 2]
    last = days[max(days)]
    assert sum(bar.height for bar in last) == plots.HEIGHT
    assert {bar.y + bar.height for bar in last} == {plots.HEIGHT, plots.HEIGHT / 2}
    assert found.kinds == ("Freeze", "Reboot")


def test_a_year_is_drawn_in_weeks() -> None:
    found = plots.course(Report.of([past(closed=THEN - timedelta(days=30))], THEN - timedelta(days=365), THEN))
    assert found.bars[0].text == "1 Reboot, 2026-02-02 to 2026-02-09"
    assert len(found.labels) <= 7


def test_a_distribution_marks_the_promise_and_shows_a_single_vm() -> None:
    (row,) = plots.notices(report(past("A", notice=(900.0,) * 500 + (30.0,))))
    assert row.mark == plots.NOTICE.x(900.0)
    assert (row.vms, row.short) == (501, 1)
    left, right = row.bars
    assert (left.text, right.text) == ("1 VM", "500 VMs")
    assert 0 < left.height < right.height
    assert left.x <= plots.NOTICE.x(30.0) < left.x + 100 / plots.BINS


@pytest.mark.parametrize("axis", [plots.NOTICE, plots.INTERRUPTION])
def test_an_axis_begins_at_nought_and_keeps_what_is_longer(axis: plots.Axis) -> None:
    assert (axis.x(0), axis.x(-1), axis.x(10**9)) == (0, 0, 100)
    places = [axis.x(seconds) for seconds, _ in axis.ticks]
    assert places == sorted(set(places))


def test_the_page_loads_nothing_and_escapes_what_it_shows() -> None:
    page = report_page(report(past("A", "Reboot<script>", region="\u202eevil", interruption=(3.0,)))).decode()
    assert "<script" not in page
    assert "\\u202eevil" in page
    assert "src=" not in page
    assert "href=" not in page
    assert "url(" not in page


def test_the_page_of_no_events_says_so() -> None:
    assert "No event was over in this time." in report_page(report()).decode()
