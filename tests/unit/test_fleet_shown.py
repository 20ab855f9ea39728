"""The waves, calendar and reports of a fleet: events that are still to come are shown first."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from notbefore.fleet.calendar_feed import calendar
from notbefore.fleet.history_report import report as report_of
from notbefore.fleet.hub_records import Place
from notbefore.fleet.mutes import MAX_MUTES, Mute, read_mutes, write_mutes
from notbefore.fleet.shown_waves import (
    ShownVm,
    ShownWave,
    coming,
    names_of,
    under_way,
    wanted_vms,
)
from support.azure import at
from support.fleet_log import WAVES, Log
from support.fleet_records import body, report, vm
from support.past_events import past_event


def coming_waves(log: Log) -> tuple[ShownWave, ...]:
    return coming(log.fold.events.waves.open.values(), at(60))


def log_with_events(started: int, scheduled: int) -> Log:
    """Return the log of started reboots (S0, S1, ...) and of redeploys to come (A0, A1, ...)."""
    log = Log()
    for number in range(started):
        web = vm(f"web_{number}", zone="1")
        for kind in ("announced", "started"):
            log.add(web, kind, f"S{number}", after=0.001, not_before=at(30))
    for number in range(scheduled):
        data = vm(f"data_{number}", scale_set="data", team="store")
        log.add(
            data,
            "announced",
            f"A{number}",
            after=0.001,
            event_type="Redeploy",
            not_before=at(7200 + number),
        )
    return log


# ---- waves


def test_events_to_come_are_shown_before_those_under_way() -> None:
    log = log_with_events(started=50, scheduled=3)
    log.add(vm("spot_0"), "announced", "T", event_type="Terminate", not_before=at(120))

    waves = coming_waves(log)

    assert [wave.event_id for wave in waves[:4]] == ["T", "A0", "A1", "A2"]


def test_similar_events_under_way_are_shown_on_one_line() -> None:
    waves = coming_waves(log_with_events(started=50, scheduled=3))

    (place,) = under_way(reversed(waves))

    assert place.event_type == "Reboot"
    assert place.group == "web"
    assert place.under_way == 50
    assert place.over == 0
    assert place.to_come == 0
    assert place.vms == tuple(f"web_{number}" for number in range(50))
    assert place.started == min(wave.started for wave in waves if wave.started is not None)


def log_with_begun_wave() -> Log:
    """Return the log of a wave of three events, of which one has started."""
    log = Log(WAVES)
    for number in range(3):
        log.add(vm(f"web_{number}"), "announced", f"E{number}", not_before=at(900))
    log.add(vm("web_0"), "started", "E0")
    return log


def test_started_wave_is_under_way_and_still_to_come() -> None:
    (wave,) = coming_waves(log_with_begun_wave())

    (place,) = under_way([wave])
    assert place.under_way == 1
    assert place.to_come == 2
    assert wave.resource_group == "rg"
    assert wave.events == 3
    assert wave.to_come == 2
    assert wave.under_way == 1
    assert wave.over == 0


@pytest.mark.parametrize("status", ["scheduled", "started"])
def test_started_wave_matches_both_statuses(status: str) -> None:
    (wave,) = coming_waves(log_with_begun_wave())

    assert wave.matches({"status": status})


def test_started_wave_names_vms_to_come_first() -> None:
    (wave,) = coming_waves(log_with_begun_wave())

    assert wave.vms == ("web_1", "web_2", "web_0")


def test_started_wave_omits_vm_when_its_event_was_canceled() -> None:
    log = log_with_begun_wave()

    log.add(vm("web_1"), "canceled", "E1")

    (wave,) = coming_waves(log)
    assert wave.vms == ("web_2", "web_0")


@pytest.mark.parametrize(
    ("filters", "count"),
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
def test_filters_select_waves(filters: dict[str, str], count: int) -> None:
    waves = coming_waves(log_with_events(started=2, scheduled=3))

    assert len([wave for wave in waves if wave.matches(filters)]) == count


def test_empty_field_of_a_record_is_shown_as_unknown() -> None:
    log = Log()
    record = body(report(vm("web_0"), "announced", at=at(0)))

    log.read(record.replace(b'source":"Platform"', b'source":""'))

    (wave,) = coming_waves(log)
    assert wave.event_source is None


# ---- names

HEARD = [
    ShownVm("a", Place("sub", "x")),
    ShownVm("A", Place("sub", "y")),
    ShownVm("b", Place("sub", "x")),
]


def test_vms_of_one_name_are_shown_with_their_resource_groups() -> None:
    assert names_of(HEARD) == ("b", "sub/x/a", "sub/y/A")


def test_vm_is_shown_by_name_alone_when_others_of_its_name_are_hidden() -> None:
    vms = wanted_vms(HEARD, {"resource_group": "Y", "status": "started"})

    assert names_of(vms) == ("A",)


def test_scale_sets_of_one_name_are_shown_with_their_resource_groups() -> None:
    log = log_with_events(started=0, scheduled=2)
    for group in ("x", "y"):
        web = replace(vm("web_0"), resource_group=group)
        log.add(web, "announced", f"B{group}", not_before=at(9000))

    groups = [wave.group for wave in coming_waves(log)]

    assert groups == ["data", "data", "sub/x/web", "sub/y/web"]


# ---- mutes


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
        ({"vm": "web_0"}, "web_0 web_1", False),  # it delays no news of others
        ({"vm": "web_0"}, "web_01", False),
    ],
)
def test_mute_applies_when_all_its_matchers_do(
    match: dict[str, str],
    vms: str,
    applies: bool,
) -> None:
    place = Place("sub", "rg", scale_set="web", tags=(("team", "web"),))

    assert mute(**match).applies("Freeze", place, vms.split()) is applies


LATER = replace(mute(vm="a"), until=200.0)


def test_mutes_are_forgotten_once_over() -> None:
    note = write_mutes([mute(vm="b"), LATER], 150.0)

    assert read_mutes(note) == [LATER]


def test_mutes_are_none_without_a_note() -> None:
    assert read_mutes(b"") == []


@pytest.mark.parametrize(
    "note",
    [
        pytest.param(b"\xff", id="not UTF-8"),
        pytest.param(b'[{"x":' + b"[" * 100_000, id="nested"),
        pytest.param(msgspec.json.encode([mute()]), id="no matcher"),
        pytest.param(msgspec.json.encode([mute(unknown="")]), id="empty matcher"),
        pytest.param(msgspec.json.encode([replace(LATER, until=1e300)]), id="end too late"),
        pytest.param(msgspec.json.encode([replace(LATER, until=-1.0)]), id="end too early"),
    ],
)
def test_damaged_note_of_mutes_is_refused(note: bytes) -> None:
    reason = r"`mutes` next to the snapshots cannot be read \(.*: delete it"

    with pytest.raises(ValueError, match=reason):
        read_mutes(note)


def test_mute_is_refused_above_the_bound() -> None:
    with pytest.raises(ValueError, match="end one first"):
        write_mutes([LATER] * (MAX_MUTES + 1), 150.0)


# ---- the calendar


def calendar_text(log: Log) -> str:
    return calendar(coming_waves(log), at(60)).decode()


def test_calendar_has_the_events_to_come() -> None:
    log = log_with_events(started=2, scheduled=2)
    log.add(vm("x_0"), "announced", "X", not_before=at(300))

    text = calendar_text(log)

    assert text.startswith("BEGIN:VCALENDAR\r\n")
    assert text.count("BEGIN:VEVENT") == 3
    assert text.count("SUMMARY:Redeploy of 1 VM in data") == 2
    assert "DTSTART:20260301T120500Z" in text


def test_calendar_escapes_and_folds_its_lines() -> None:
    log = Log()
    strange: dict[str, Any] = {"scale_set": "a,b;c\\d\r\n" + "ü" * 60}
    log.add(vm("x_0", **strange), "announced", "X", not_before=at(300))

    text = calendar_text(log)

    unfolded = text.replace("\r\n ", "")
    assert "a\\,b\\;c\\\\d" in unfolded
    assert max(len(line.encode()) for line in text.split("\r\n")) <= 75
    assert "\n" not in text.replace("\r\n", "")


# ---- reports of the past


def test_notice_is_short_below_nine_tenths_of_the_promise() -> None:
    events = [past_event("A", notice=(900.0, 811.0, 809.0)), past_event("B", notice=(60.0,))]

    (row,) = report_of(events)

    assert row["events"] == 2
    assert row["vms"] == 4
    assert row["measured_notice"] == 4
    assert row["short_notice"] == 2
    assert row["notice_min"] == 60.0
    assert row["notice_median"] == 809.0
    assert row["notice_max"] == 900.0


def test_report_has_a_row_per_type_and_region() -> None:
    events = [past_event("A", "Freeze"), past_event("B", region="eastus")]

    rows = report_of(events)

    types_and_regions = [(row["event_type"], row["region"]) for row in rows]
    assert types_and_regions == [("Freeze", "westeurope"), ("Reboot", "eastus")]


def test_report_counts_events_by_outcome() -> None:
    events = [
        past_event("A", "Freeze"),
        past_event("B", "Freeze", outcome="canceled"),
        past_event("C", "Freeze", outcome="unknown", as_far_as_known=True),
    ]

    (row,) = report_of(events)

    assert row["finished"] == 1
    assert row["canceled"] == 1
    assert row["unknown"] == 1
    assert row["as_far_as_known"] == 1


def test_report_has_zeros_for_other_outcomes() -> None:
    (row,) = report_of([past_event("D", region="eastus")])

    assert row["finished"] == 1
    assert row["canceled"] == 0
    assert row["unknown"] == 0
    assert row["as_far_as_known"] == 0


def test_report_omits_exercises() -> None:
    (row,) = report_of([past_event("D"), past_event("E", exercise=True)])

    assert row["events"] == 1


def test_report_is_grouped_by_subscription_and_tag() -> None:
    events = [past_event(team, subscription="a", tags={"team": team}) for team in ("b", "c")]

    rows = report_of(events, ("subscription", "tags.Team"))

    assert [list(row.values())[:3] for row in rows] == [["a", "b", 1], ["a", "c", 1]]


@pytest.mark.parametrize("types", [("Reboot", "Freeze", "Preempt"), ("Defragment",)])
def test_report_has_no_promise_when_types_differ_or_are_unknown(types: tuple[str, ...]) -> None:
    events = [past_event(event_type, event_type, notice=(1.0,)) for event_type in types]

    (row,) = report_of(events, ("region",))

    assert row["promised"] is None
    assert row["short_notice"] is None
