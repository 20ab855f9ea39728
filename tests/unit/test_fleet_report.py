"""How Azure treated a fleet: what the report counts."""

import pytest

from notbefore.fleet.history import report
from support.past import past


def test_notice_is_counted_by_vm_and_compared_with_nine_tenths_of_the_promise() -> None:
    (row,) = report([past("A", notice=(900.0, 811.0, 809.0)), past("B", notice=(60.0,))])
    assert [row[name] for name in ("events", "vms", "measured_notice", "short_notice")] == [2, 4, 4, 2]
    assert [row[f"notice_{name}"] for name in ("min", "median", "max")] == [60.0, 809.0, 900.0]


def test_types_and_regions_are_rows_of_their_own_with_their_outcomes_and_exercises_are_left_out() -> None:
    guessed = past("C", "Freeze", outcome="unknown", as_far_as_known=True)
    others = past("B", "Freeze", outcome="canceled"), guessed, past("D", region="eastus"), past("E", exercise=True)
    named = ("event_type", "region", "finished", "canceled", "unknown", "as_far_as_known")
    counts = [[row[name] for name in named] for row in report([past("A", "Freeze"), *others])]
    assert counts == [["Freeze", "westeurope", 1, 1, 1, 1], ["Reboot", "eastus", 1, 0, 0, 0]]


def test_a_report_may_be_by_subscription_scale_set_and_tag() -> None:
    events = [past(team, subscription="a", tags={"team": team}) for team in ("b", "c")]
    found = [list(row.values())[:3] for row in report(events, ("subscription", "tags.Team"))]
    assert found == [["a", "b", 1], ["a", "c", 1]]


@pytest.mark.parametrize("types", [("Reboot", "Freeze", "Preempt"), ("Defragment",)])
def test_of_several_types_or_an_unknown_one_there_is_no_one_promise(types: tuple[str, ...]) -> None:
    (row,) = report([past(one, one, notice=(1.0,)) for one in types], ("region",))
    assert (row["promised"], row["short_notice"]) == (None, None)
