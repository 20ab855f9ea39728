"""The VMs of a fleet that know less than others, vanish, or join an event late."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.core.record import Vm
from notbefore.fleet.story import Standing
from support.azure import at
from support.fleet_log import EACH, LIMIT, WAVES, A, B, C, D, Log
from support.fleet_records import body, report

DETAILS: dict[str, Any] = {
    "description": "Host maintenance.",
    "event_source": "Platform",
    "expected_duration_seconds": 9,
}
UNKNOWN: dict[str, Any] = {
    "description": None,
    "event_source": None,
    "expected_duration_seconds": None,
}
HEARTBEAT_SECONDS = 300.0


def add_detailed(log: Log, reporter: Vm, kind: Any, details: dict[str, Any], **fields: Any) -> None:
    """Let a VM report an event with these details."""
    log.now += 1
    now = datetime.fromtimestamp(log.now, UTC)
    record = report(reporter, kind, at=now, not_before=at(900), **fields)
    log.read(body(replace(record, **details)))
    log.wait(0)


def open_details(log: Log) -> dict[str, Any]:
    (story,) = log.fold.events.open.values()
    return {
        "description": story.event.description,
        "event_source": story.event.event_source,
        "expected_duration_seconds": story.event.duration,
    }


# ---- missing values


def test_missing_details_change_nothing_when_api_versions_differ() -> None:
    log = Log(EACH)

    for reporter, details in ((A, DETAILS), (B, UNKNOWN), (C, DETAILS), (D, UNKNOWN)):
        add_detailed(log, reporter, "announced", details, resources=[A.name])

    assert log.kinds == ["announced"]
    assert open_details(log) == DETAILS


def test_details_are_learned_from_a_newer_api_version() -> None:
    log = Log(EACH)

    for reporter, details in ((A, UNKNOWN), (B, DETAILS), (C, UNKNOWN), (D, DETAILS)):
        add_detailed(log, reporter, "announced", details, resources=[A.name])

    assert log.kinds == ["announced"]
    assert open_details(log) == DETAILS


def test_detail_that_azure_changes_is_news_after_missing_ones() -> None:
    log = Log(EACH)
    add_detailed(log, A, "announced", DETAILS, resources=[A.name])
    add_detailed(log, B, "announced", UNKNOWN, resources=[A.name])

    changed = DETAILS | {"description": "Another text."}
    add_detailed(log, A, "updated", changed, resources=[A.name])
    add_detailed(log, B, "updated", UNKNOWN, resources=[A.name])

    assert log.kinds == ["announced", "updated"]
    assert open_details(log) == changed


def test_missing_not_before_and_resources_keep_the_known_ones() -> None:
    log = Log(EACH)
    add_detailed(log, A, "announced", DETAILS, resources=[A.name, B.name])

    add_detailed(log, B, "announced", {"not_before": None, "resources": ()})

    (story,) = log.fold.events.open.values()
    assert log.kinds == ["announced"]
    assert story.event.vms == (A.name, B.name)
    assert story.event.not_before == at(900)


def test_heartbeat_without_a_place_keeps_the_known_one() -> None:
    log = Log(EACH)
    tagged = replace(A, zone="1", tags={"team": "web"}, record_tags=("team",))
    log.beat(tagged)

    log.beat(replace(A, location="", scale_set="", tags={}, record_tags=()))

    (heard,) = log.fold.state.heard.values()
    assert heard.place.region == "westeurope"
    assert heard.place.zone == "1"
    assert heard.place.tags == (("team", "web"),)


WITHOUT_PLACE = replace(B, location="", scale_set="")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(A, WITHOUT_PLACE, id="known at first"),
        pytest.param(WITHOUT_PLACE, A, id="learned later"),
    ],
)
def test_report_without_a_place_keeps_the_known_one(first: Vm, second: Vm) -> None:
    log = Log(EACH)

    log.add(first, "announced", resources=[A.name, B.name])
    log.add(second, "announced", resources=[A.name, B.name])

    (story,) = log.fold.events.open.values()
    assert story.place.scale_set == "web"
    assert story.place.region == "westeurope"


# ---- VMs that vanish


def test_event_ends_when_its_silent_vm_is_left_out() -> None:
    log = Log(EACH)
    log.beat(A, B, C)
    for reporter in (A, B, C):
        log.add(reporter, "announced", resources=[A.name], event_type="Freeze")
    for reporter in (B, C):
        log.add(reporter, "canceled", resources=[A.name], event_type="Freeze")
    assert log.kinds == ["announced"]

    log.pass_time(4 * HEARTBEAT_SECONDS, B, C)

    assert log.kinds[:2] == ["announced", "canceled"]
    assert log.notifications[1].change.reason == "gone_before_start"
    assert log.fold.events.open == {}


def test_event_stays_open_when_a_silent_vm_comes_back() -> None:
    log = Log(EACH)
    log.beat(A, B, C)
    for reporter in (A, B, C):
        log.add(reporter, "announced", resources=[A.name, B.name], not_before=at(86_400))
    log.add(B, "canceled", resources=[A.name, B.name])

    log.pass_time(HEARTBEAT_SECONDS, A, B, C)
    log.pass_time(2 * HEARTBEAT_SECONDS, B, C)
    log.pass_time(2 * HEARTBEAT_SECONDS, A, B, C)

    (story,) = log.fold.events.open.values()
    assert story.standing is Standing.SCHEDULED
    assert story.gone == set()


def log_with_forgotten_vm() -> Log:
    """Return the log of an event of A, which was silent for so long that it is forgotten."""
    log = Log(EACH)
    log.beat(A, B, C)
    for reporter in (A, B, C):
        log.add(reporter, "announced", "LATER", resources=[A.name], not_before=at(5 * 86_400))
    log.pass_time(1.1 * 86_400, B, C)
    return log


def test_forgotten_vm_stays_left_out() -> None:
    log = log_with_forgotten_vm()

    (story,) = log.fold.events.open.values()
    assert story.gone == {A.name}
    assert f"sub/rg/{A.name}" not in log.fold.state.heard


def test_forgotten_vm_counts_again_once_it_is_heard() -> None:
    log = log_with_forgotten_vm()

    log.beat(A)
    log.pass_time(60, A, B, C)

    (story,) = log.fold.events.open.values()
    assert story.gone == set()


def test_event_ends_when_another_event_has_deleted_its_vm() -> None:
    log = Log(EACH)
    log.beat(A, B)
    for reporter in (A, B):
        log.add(reporter, "announced", "FREEZE", resources=[A.name], event_type="Freeze")
        log.add(reporter, "announced", "PREEMPT", resources=[A.name], event_type="Preempt")
    log.add(B, "canceled", "FREEZE", resources=[A.name], event_type="Freeze")
    log.add(B, "started", "PREEMPT", resources=[A.name], event_type="Preempt")

    log.add(B, "finished", "PREEMPT", resources=[A.name], event_type="Preempt")
    log.wait(60)

    assert "canceled" in log.kinds
    assert log.fold.events.open == {}


def test_preempt_continues_when_one_vm_loses_sight_of_it() -> None:
    log = Log(EACH)
    preempt: dict[str, Any] = {"resources": [A.name], "event_type": "Preempt"}
    log.beat(A, B, C)
    for reporter in (A, B, C):
        log.add(reporter, "announced", **preempt)
    log.add(C, "started", **preempt)

    log.add(B, "canceled", **preempt)
    log.add(B, "announced", reason="came_back", **preempt)
    kinds_while_listed = list(log.kinds)
    log.add(C, "finished", **preempt)
    log.add(B, "finished", **preempt)

    assert kinds_while_listed == ["announced", "started"]
    assert log.kinds == ["announced", "started", "finished"]


def test_preempt_ends_without_a_neighbor_that_fell_silent() -> None:
    log = Log(EACH)
    preempt: dict[str, Any] = {"resources": [A.name], "event_type": "Preempt"}
    log.beat(A, B, C)
    for reporter in (A, B, C):
        log.add(reporter, "announced", **preempt)
    log.add(B, "started", **preempt)
    log.add(B, "finished", **preempt)
    assert log.kinds == ["announced", "started"]

    log.pass_time(4 * HEARTBEAT_SECONDS, B)

    assert log.kinds[2] == "finished"
    assert log.notifications[2].change.reason == "gone_after_start"


# ---- VMs that join late


def test_vm_that_joins_an_event_is_notified_once_if_its_wave_named_it() -> None:
    log = Log(WAVES)
    log.add(A, "announced", "FIRST", resources=[A.name, B.name], not_before=at(900))
    log.add(C, "announced", "SECOND", resources=[C.name], not_before=at(1000))
    log.wait(400)
    before = len(log.notifications)

    log.add(C, "updated", "SECOND", resources=[C.name, B.name], not_before=at(1000))
    log.wait(250)

    assert log.kinds[before:] == ["updated"]
    log.wait(100)
    assert len(log.notifications) == before + 1


# ---- the ends of long waves


def test_end_that_all_vms_reported_is_known_when_its_wave_is_long() -> None:
    log = Log(WAVES)
    log.add(A, "announced", "FIRST", resources=[A.name])
    log.add(B, "announced", "SECOND", resources=[B.name], not_before=at(3 * LIMIT))
    log.add(A, "started", "FIRST", resources=[A.name])
    log.add(A, "finished", "FIRST", resources=[A.name])
    log.wait(2 * LIMIT)

    log.add(B, "started", "SECOND", resources=[B.name])
    log.add(B, "finished", "SECOND", resources=[B.name])
    log.wait(1000)

    assert log.last.change.kind == "finished"
    assert log.last.change.reason == "gone_after_start"
    assert not any(past.as_far_as_known for past in log.fold.state.past)


def test_end_is_known_when_the_last_vm_reports_it_after_the_limit() -> None:
    log = Log(WAVES)
    log.add(A, "announced", "FIRST", resources=[A.name])
    log.add(B, "announced", "SECOND", resources=[B.name], not_before=at(3 * LIMIT))
    log.wait(2 * LIMIT)
    assert any(story.given_up for story in log.fold.events.open.values())

    log.add(A, "canceled", "FIRST", resources=[A.name])

    assert not any(story.given_up for story in log.fold.events.open.values())
