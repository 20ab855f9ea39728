"""What is shown of a fleet: what can still be prepared for first, what is asked for, one line for
what is under way.
"""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from notbefore.fleet.history import report as report_of
from notbefore.fleet.hub_records import Place
from notbefore.fleet.mutes import MAX_MUTES, Mute, read_mutes, write_mutes
from notbefore.fleet.shown_waves import ShownWave, calendar, coming, names_of, under_way, wanted_vms
from notbefore.fleet.silence import Heard
from support.azure import at
from support.fleet_log import WAVES, Log
from support.fleet_records import body, report, vm
from support.past import past


def waves_of(log: Log) -> tuple[ShownWave, ...]:
    return coming(log.fold.events.waves.open.values(), at(60))


def many(started: int, scheduled: int) -> Log:
    log = Log()
    for number in range(started):
        for kind in ("announced", "started"):
            log.add(
                vm(f"web_{number}", zone="1"), kind, f"S{number}", after=0.001, not_before=at(30)
            )
    for number in range(scheduled):
        who = vm(f"data_{number}", scale_set="data", team="store")
        log.add(
            who,
            "announced",
            f"A{number}",
            after=0.001,
            event_type="Redeploy",
            not_before=at(7200 + number),
        )
    return log


def test_what_can_still_be_prepared_for_comes_before_what_is_under_way() -> None:
    log = many(started=50, scheduled=3)
    log.add(vm("spot_0"), "announced", "T", event_type="Terminate", not_before=at(120))
    found = waves_of(log)
    assert [one.event_id for one in found[:4]] == ["T", "A0", "A1", "A2"]
    (line,) = under_way(reversed(found))
    assert {(one.event_type, one.scale_set, one.under_way) for one in line} == {
        ("Reboot", "web", 1)
    }
    assert [one.vms for one in line] == [(f"web_{number}",) for number in range(50)]


def test_a_wave_that_has_begun_is_under_way_and_still_to_come() -> None:
    log = Log(WAVES)
    for number in range(3):
        log.add(vm(f"web_{number}"), "announced", f"E{number}", not_before=at(900))
    log.add(vm("web_0"), "started", "E0")
    (wave,) = waves_of(log)
    assert under_way([wave]) == [[wave]]
    assert (wave.events, wave.to_come, wave.under_way, wave.over, wave.resource_group) == (
        3,
        2,
        1,
        0,
        "rg",
    )
    # the first names are those of VMs that one can still prepare
    assert wave.vms == (
        "web_1",
        "web_2",
        "web_0",
    )
    assert all(wave.matches({"status": one}) for one in ("scheduled", "started"))
    log.add(vm("web_1"), "canceled", "E1")
    assert waves_of(log)[0].vms == ("web_2", "web_0")


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({}, 5),
        ({"event_type": "redeploy"}, 3),
        ({"status": "started"}, 2),
        ({"status": "Scheduled"}, 3),
        ({"scale_set": "data", "resource_group": "RG"}, 3),
        ({"subscription": "other"}, 0),
        ({"tag": "team=store"}, 3),
        ({"tag": "Team"}, 3),
        ({"tag": "team=web"}, 0),
        ({"vm": "data_1"}, 1),
    ],
)
def test_it_is_shown_what_is_asked_for(wanted: dict[str, str], count: int) -> None:
    assert len([one for one in waves_of(many(2, 3)) if one.matches(wanted)]) == count


def test_what_is_empty_in_a_record_is_shown_as_unknown() -> None:
    log = Log()
    log.read(
        body(report(vm("web_0"), "announced", at=at(0))).replace(
            b'source":"Platform"', b'source":""'
        )
    )
    assert [one.event_source for one in waves_of(log)] == [None]


def test_equal_names_of_vms_and_of_scale_sets_are_shown_with_their_resource_groups() -> None:
    found = [
        Heard(name, 0.0, 1.0, Place("sub", group))
        for name, group in (("a", "x"), ("A", "y"), ("b", "x"))
    ]
    assert names_of(found) == ("b", "sub/x/a", "sub/y/A")
    assert names_of(wanted_vms(found, {"resource_group": "Y", "status": "started"})) == ("A",)
    log = many(0, 2)
    for group in ("x", "y"):
        log.add(
            replace(vm("web_0"), resource_group=group),
            "announced",
            f"B{group}",
            not_before=at(9000),
        )
    assert [one.group for one in waves_of(log)] == ["data", "data", "sub/x/web", "sub/y/web"]


def mute(**match: str) -> Mute:
    return Mute("id", match, "me", "why", 100.0)


@pytest.mark.parametrize(
    ("match", "vms", "applies"),
    [
        ({"event_type": "freeze"}, "web_0", True),
        ({"event_type": "Reboot"}, "web_0", False),
        ({"scale_set": "web", "resource_group": "rg"}, "web_0", True),
        ({"tag": "team=web"}, "web_0", True),
        ({"a_matcher_of_a_newer_version": "web"}, "web_0", False),
        ({"vm": "web_0"}, "web_0", True),
        ({"vm": "web_0"}, "web_0 web_1", False),  # it keeps no news of others back
        ({"vm": "web_0"}, "web_01", False),
    ],
)
def test_a_mute_applies_where_all_of_its_matchers_do(
    match: dict[str, str], vms: str, applies: bool
) -> None:
    shared = Place("sub", "rg", scale_set="web", tags=(("team", "web"),))
    assert mute(**match).applies("Freeze", shared, vms.split()) is applies


def test_mutes_that_are_over_are_left_out_and_what_is_no_note_is_refused() -> None:
    later = replace(mute(vm="a"), until=200.0)
    assert read_mutes(write_mutes([mute(vm="b"), later], 150.0)) == [later]
    assert read_mutes(b"") == []
    wrong = mute(), mute(unknown=""), replace(later, until=1e300), replace(later, until=-1.0)
    for note in (
        b"\xff",
        b'[{"x":' + b"[" * 100_000,
        *(msgspec.json.encode([one]) for one in wrong),
    ):
        with pytest.raises(
            ValueError, match=r"`mutes` beside the snapshots cannot be read \(.*: delete it"
        ):
            read_mutes(note)
    with pytest.raises(ValueError, match="end one first"):
        write_mutes([later] * (MAX_MUTES + 1), 150.0)


def test_the_calendar_has_what_is_planned_in_lines_that_calendars_read() -> None:
    log = many(2, 2)
    strange: dict[str, Any] = {"scale_set": "a,b;c\\d\r\n" + "ü" * 60}
    log.add(vm("x_0", **strange), "announced", "X", not_before=at(300))
    text = calendar(waves_of(log), at(60)).decode()
    assert (text.count("BEGIN:VEVENT"), text.count("SUMMARY:Redeploy of 1 VM in data")) == (3, 2)
    assert text.startswith("BEGIN:VCALENDAR\r\n")
    assert "DTSTART:20260301T120500Z" in text
    assert "a\\,b\\;c\\\\d" in text.replace("\r\n ", "")
    assert max(len(line.encode()) for line in text.split("\r\n")) <= 75
    assert "\n" not in text.replace("\r\n", "")


def test_notice_is_counted_by_vm_and_compared_with_nine_tenths_of_the_promise() -> None:
    (row,) = report_of([past("A", notice=(900.0, 811.0, 809.0)), past("B", notice=(60.0,))])
    assert [row[name] for name in ("events", "vms", "measured_notice", "short_notice")] == [
        2,
        4,
        4,
        2,
    ]
    assert [row[f"notice_{name}"] for name in ("min", "median", "max")] == [60.0, 809.0, 900.0]


def test_report_has_a_row_per_type_and_region_and_no_exercises() -> None:
    guessed = past("C", "Freeze", outcome="unknown", as_far_as_known=True)
    others = (
        past("B", "Freeze", outcome="canceled"),
        guessed,
        past("D", region="eastus"),
        past("E", exercise=True),
    )
    named = ("event_type", "region", "finished", "canceled", "unknown", "as_far_as_known")
    counts = [[row[name] for name in named] for row in report_of([past("A", "Freeze"), *others])]
    assert counts == [["Freeze", "westeurope", 1, 1, 1, 1], ["Reboot", "eastus", 1, 0, 0, 0]]


def test_a_report_may_be_by_subscription_scale_set_and_tag() -> None:
    events = [past(team, subscription="a", tags={"team": team}) for team in ("b", "c")]
    found = [list(row.values())[:3] for row in report_of(events, ("subscription", "tags.Team"))]
    assert found == [["a", "b", 1], ["a", "c", 1]]


@pytest.mark.parametrize("types", [("Reboot", "Freeze", "Preempt"), ("Defragment",)])
def test_of_several_types_or_an_unknown_one_there_is_no_one_promise(types: tuple[str, ...]) -> None:
    (row,) = report_of([past(one, one, notice=(1.0,)) for one in types], ("region",))
    assert (row["promised"], row["short_notice"]) == (None, None)
