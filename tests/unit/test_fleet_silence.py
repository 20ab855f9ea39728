"""VMs are silent after three intervals without a record, unless an event explains it.

The silent VMs of a wave are notified together.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.core.record import Vm
from notbefore.core.routing import Match, Route
from notbefore.fleet.mutes import Mute, is_muted
from notbefore.wording.records import record_of
from support.azure import at
from support.fleet_log import LIMIT, WAVES, Log, grouped
from support.fleet_records import vm

A = vm("web_0")
B = vm("web_1")
C = vm("web_2")
BEAT = 300.0


# ---- silent VMs


def test_vm_is_silent_when_it_is_not_heard_for_three_intervals() -> None:
    log = Log()
    log.pass_time(600, A, B, C)
    log.pass_time(3 * BEAT - 60, A, B)
    assert log.kinds == []

    log.pass_time(180, A, B)

    event = log.last.change.event
    assert log.kinds == ["started"]
    assert log.silent == ["web_2"]
    assert event.resources == ("web_2",)
    assert event.event_type == "Silent"


def test_silent_vm_is_notified_once() -> None:
    log = Log()
    log.pass_time(600, A, B, C)

    log.pass_time(3 * BEAT + 3600, A, B)

    assert log.kinds == ["started"]


def test_no_vm_is_silent_when_the_clock_was_ahead_at_first() -> None:
    log = Log()
    notifications = log.fold.advance(log.now + 86_400)
    assert not any(notifications)

    log.pass_time(600, A, B, C)
    log.pass_time(3 * BEAT - 60, A, B)

    assert log.kinds == []


def test_silent_vms_of_a_scale_set_are_one_wave_until_all_are_back() -> None:
    log = Log(WAVES)
    log.pass_time(600, A, B, C)

    log.pass_time(1200, A)
    assert log.kinds == ["started"]
    assert log.last.facts.fleet_vms == 2

    log.pass_time(600, A, B)
    assert log.kinds == ["started", "updated"]

    log.pass_time(900, A, B, C)
    assert log.kinds == ["started", "updated", "finished"]
    assert len({notification.change.event.key for notification in log.notifications}) == 1


def test_silent_vms_with_different_tags_are_all_named() -> None:
    log = Log(WAVES)
    web = vm("web_0", team="web")
    data = vm("web_1", team="data")
    log.pass_time(600, web, data, C)

    log.pass_time(1200, C)

    assert log.kinds == ["started"]
    assert sorted(log.last.change.event.resources) == ["web_0", "web_1"]
    assert log.last.vm.scale_set == "web"
    assert log.last.vm.tags == {}


def test_silent_vm_is_forgotten_after_a_day() -> None:
    log = Log()
    log.pass_time(600, A, B)

    log.pass_time(86_400 + 3600, A)

    assert log.kinds == ["started", "finished"]
    assert list(log.fold.silence.heard) == ["sub/rg/web_0"]


def test_report_is_a_sign_of_life() -> None:
    log = Log()
    log.pass_time(60, A)

    for _ in range(30):
        log.add(A, "updated", resources=[B.name], after=60)

    assert log.silent == []


def test_vm_with_changed_tags_is_the_same_vm() -> None:
    log = Log()
    retagged = vm(A.name, team="data")
    log.pass_time(600, vm(A.name, team="web"), vm(B.name, team="web"))

    log.pass_time(1200, retagged)
    assert log.kinds == ["started"]
    assert log.last.vm.tags == {"team": "web"}

    log.pass_time(600, retagged, vm(B.name, team="data"))
    assert log.kinds == ["started", "finished"]
    tags = [heard.place.tags for heard in log.fold.silence.heard.values()]
    assert tags == [(("team", "data"),), (("team", "data"),)]


# ---- events that explain silence


def test_started_event_explains_silence_until_it_is_over() -> None:
    log = Log()
    log.pass_time(300, A, B)
    log.add(B, "announced", resources=[A.name])
    log.add(B, "started", resources=[A.name])
    log.pass_time(1800, B)
    assert log.silent == []

    log.add(B, "finished", resources=[A.name])
    log.pass_time(3 * LIMIT, B)

    assert log.silent == ["web_0"]  # the VM did not come back


def log_with_ended_event(event_type: Any, *ending: str) -> Log:
    """Return the log of a wave in which an event of A has ended, and one of C is to come."""
    log = Log(WAVES)
    log.pass_time(300, A, B, C)
    log.add(B, "announced", resources=[A.name], event_type=event_type)
    log.add(
        B,
        "announced",
        "LATER",
        resources=[C.name],
        event_type=event_type,
        not_before=at(86_400),
    )
    for kind in ending:
        log.add(A, kind, resources=[A.name], event_type=event_type)
    return log


@pytest.mark.parametrize(
    ("event_type", "ending", "silent"),
    [
        ("Reboot", ["started", "finished"], ["web_0"]),
        ("Preempt", ["canceled"], ["web_0"]),
        ("Preempt", ["started", "finished"], []),  # the VM is deleted
    ],
)
def test_ended_event_explains_no_silence_while_its_wave_continues(
    event_type: Any,
    ending: list[str],
    silent: list[str],
) -> None:
    log = log_with_ended_event(event_type, *ending)

    log.pass_time(LIMIT, B, C)

    assert log.silent == silent


@pytest.mark.parametrize(
    ("event_type", "ending"),
    [
        ("Reboot", ["started", "finished"]),
        ("Preempt", ["canceled"]),
        ("Preempt", ["started", "finished"]),
    ],
)
def test_vm_that_came_back_is_silent_when_it_vanishes_again(
    event_type: Any,
    ending: list[str],
) -> None:
    log = log_with_ended_event(event_type, *ending)
    log.pass_time(LIMIT, B, C)
    log.pass_time(LIMIT, A, B, C)

    log.pass_time(LIMIT, B, C)
    assert log.silent == ["web_0"]

    log.add(C, "canceled", "LATER", resources=[C.name], event_type=event_type)
    log.pass_time(LIMIT, B, C)
    assert log.silent == ["web_0"]  # the wave is over


def log_with_evicted_vm() -> Log:
    """Return a log in which B has reported to the end that A was evicted."""
    log = Log()
    log.pass_time(300, A, B)
    for kind in ("announced", "started", "finished"):
        log.add(B, kind, resources=[A.name], event_type="Preempt")
    return log


def test_evicted_vm_is_not_expected() -> None:
    log = log_with_evicted_vm()
    before = len(log.kinds)

    log.pass_time(3600, B)

    assert log.silent == []
    assert log.kinds[before:] == []
    assert "web_0" not in log.fold.silence.heard


def test_evicted_vm_is_not_expected_after_a_takeover() -> None:
    successor = log_with_evicted_vm().taken_over()

    successor.pass_time(3600, B)

    assert successor.silent == []
    assert successor.kinds == []
    assert "web_0" not in successor.fold.silence.heard


def test_evicted_vm_is_expected_again_when_it_comes_back() -> None:
    log = log_with_evicted_vm()
    log.pass_time(3600, A, B)

    log.pass_time(1200, B)

    assert log.silent == ["web_0"]


# ---- the hub, and other instances


def test_no_vm_is_silent_when_the_hub_was_away() -> None:
    log = Log()
    log.pass_time(600, A, B)
    log.now += 7200  # nothing was read for two hours

    log.pass_time(600, A, B)

    assert log.kinds == []
    assert log.silent == []


def test_no_vm_is_expected_when_the_hub_gets_another_partition() -> None:
    log = Log()
    log.fold.hub_has(1)
    log.beat(A)

    log.fold.hub_has(2)  # the VMs may send to the other one from now on
    log.pass_time(2000)

    assert log.kinds == []
    assert log.silent == []


@pytest.mark.parametrize("alive", [(A, B), ()], ids=["two alive", "none alive"])
def test_takeover_keeps_silent_vms_and_notifies_none_again(alive: tuple[Vm, ...]) -> None:
    log = Log()
    log.pass_time(600, A, B, C)
    log.pass_time(1500, *alive)
    successor = log.taken_over()

    successor.pass_time(1200, *alive)
    assert successor.kinds == []
    assert successor.silent == log.silent

    successor.pass_time(600, A, B, C)
    assert successor.kinds == ["finished"]


def test_vms_of_a_place_share_it_after_a_takeover() -> None:
    log = Log()
    log.pass_time(60, A, B, C)

    heard = log.taken_over().fold.silence.heard.values()

    assert len({id(heard_vm.place) for heard_vm in heard}) == 1


# ---- several groups of one region


def scale_sets(count: int, vms: int, region: str = "westeurope") -> list[Vm]:
    """Return the VMs of some scale sets of a region."""
    fleet: list[Vm] = []
    for number in range(count):
        name = f"set{number}"
        if region != "westeurope":
            name = f"{region}{number}"
        fleet += [vm(f"{name}_{index}", name, region) for index in range(vms)]
    return fleet


def body_of(log: Log) -> str:
    """Return the sentence of the last notification."""
    last = log.last
    return record_of(last.change, last.vm, fleet=last.facts).body


def test_region_that_falls_silent_is_one_wave_with_one_end() -> None:
    log = Log(WAVES)
    region = scale_sets(40, 5)
    elsewhere = vm("far_0", "far", "northeurope")
    log.pass_time(300, *region, elsewhere)

    log.pass_time(1800, elsewhere)

    assert log.kinds == ["started"]
    assert body_of(log) == "40 scale sets (200 VMs) in westeurope are silent"
    assert log.last.place.region == "westeurope"
    assert log.last.place.scale_set == ""

    log.pass_time(1200, *region, elsewhere)

    assert log.kinds == ["started", "finished"]
    assert body_of(log) == (
        "40 scale sets (200 VMs) in westeurope are heard from again, or no longer expected"
    )


def test_group_that_falls_silent_later_joins_the_wave_of_its_region() -> None:
    log = Log(WAVES)
    early = scale_sets(2, 2)
    late = vm("late_0", "late")
    log.pass_time(300, *early, late)
    log.pass_time(1200, late)
    assert log.kinds == ["started"]

    log.pass_time(1800)

    assert log.kinds == ["started", "updated"]
    assert body_of(log) == "3 scale sets (5 VMs) in westeurope are silent"
    assert {notification.change.event.key for notification in log.notifications} == {
        log.last.change.event.key
    }


def test_digest_of_a_silent_region_leaves_out_groups_that_are_back() -> None:
    log = Log(WAVES)
    fleet = scale_sets(3, 2)
    log.pass_time(300, *fleet)
    log.pass_time(1200)

    log.pass_time(900, *fleet[:2])

    assert log.kinds == ["started", "updated"]
    assert body_of(log) == "2 scale sets (4 VMs) in westeurope are silent"
    assert log.last.change.event.resources == ("set1_0", "set1_1", "set2_0", "set2_1")


def test_groups_of_two_regions_fall_silent_in_two_waves() -> None:
    log = Log(WAVES)
    log.pass_time(300, *scale_sets(2, 1), *scale_sets(2, 1, "northeurope"))

    log.pass_time(1800)

    assert log.kinds == ["started", "started"]
    assert {notification.place.region for notification in log.notifications} == {
        "westeurope",
        "northeurope",
    }


def test_vms_of_one_name_in_silent_groups_are_all_counted() -> None:
    log = Log(WAVES)
    log.pass_time(300, vm("web_0", "blue"), replace(vm("web_0", ""), resource_group="other"))

    log.pass_time(1800)

    assert body_of(log) == "1 scale set and 1 resource group (2 VMs) in westeurope are silent"


def test_next_owner_keeps_the_wave_of_a_silent_region() -> None:
    log = Log(WAVES)
    fleet = scale_sets(3, 1)
    log.pass_time(300, *fleet)
    log.pass_time(1200)

    later = log.taken_over()
    later.pass_time(900)
    assert later.kinds == []
    later.pass_time(1200, *fleet)

    assert later.kinds == ["finished"]
    assert later.last.change.event.key == log.last.change.event.key


def test_silent_groups_with_different_routes_are_different_waves() -> None:
    routes = (
        Route(match=Match(scale_set=("set0", "set1")), sinks=("web-team",)),
        Route(sinks=("oncall",)),
    )
    log = Log(grouped(("scale_set", "event_type"), routes=routes))
    log.pass_time(300, *scale_sets(4, 1))

    log.pass_time(1800)

    assert log.kinds == ["started", "started"]
    named = [set(notification.change.event.resources) for notification in log.notifications]
    assert named == [{"set0_0", "set1_0"}, {"set2_0", "set3_0"}]


@pytest.mark.parametrize(
    ("match", "muted"),
    [
        ({"region": "westeurope"}, True),
        ({"event_type": "Silent"}, True),
        ({"scale_set": "set0"}, False),  # the other scale sets are news
    ],
)
def test_silent_region_is_muted_when_all_its_vms_match(match: dict[str, str], muted: bool) -> None:
    log = Log(WAVES)
    log.pass_time(300, *scale_sets(2, 1))
    log.pass_time(1800)
    mute = Mute(id="1", match=match, by="me", comment="test", until=log.now + 60)

    assert is_muted([mute], log.now, log.last, set()) is muted
