"""Which VMs fall silent: three intervals without a word, and no event that explains it.

Once for a wave of them.
"""

from typing import Any

import pytest

from support.azure import at
from support.fleet_log import LIMIT, WAVES, Log
from support.fleet_records import vm

A, B, C = vm("web_0"), vm("web_1"), vm("web_2")
BEAT = 300.0


def test_a_vm_that_is_silent_for_three_intervals_is_notified_once() -> None:
    log = Log()
    # a clock that was ahead before the first record
    assert not any(log.fold.advance(log.now + 86_400))
    log.pass_time(600, A, B, C)
    assert log.pass_time(3 * BEAT - 60, A, B) == []
    assert log.pass_time(180, A, B) == ["started"]
    assert (log.silent, log.last.change.event.resources, log.last.change.event.event_type) == (
        ["web_2"],
        ("web_2",),
        "Silent",
    )
    log.pass_time(3600, A, B)
    assert log.kinds == ["started"]


def test_silent_vms_of_a_scale_set_are_one_wave_until_all_are_back() -> None:
    log = Log(WAVES)
    log.pass_time(600, A, B, C)
    log.pass_time(1200, A)
    assert (log.kinds, log.last.facts.fleet_vms) == (["started"], 2)
    log.pass_time(600, A, B)
    assert log.kinds == ["started", "updated"]
    log.pass_time(900, A, B, C)
    assert log.kinds == ["started", "updated", "finished"]
    assert {one.change.event.key for one in log.made} == {log.last.change.event.key}


def test_an_event_that_has_started_explains_the_silence() -> None:
    log = Log()
    log.pass_time(300, A, B)
    log.add(B, "announced", resources=[A.name])
    log.add(B, "started", resources=[A.name])
    log.pass_time(1800, B)
    assert log.silent == []
    log.add(B, "finished", resources=[A.name])
    log.pass_time(3 * LIMIT, B)
    assert log.silent == ["web_0"]  # the event is over, and the VM did not come back


@pytest.mark.parametrize(
    ("event_type", "end", "silent"),
    [
        ("Reboot", "finished", ["web_0"]),
        ("Preempt", "canceled", ["web_0"]),
        ("Preempt", "finished", []),
    ],
)
def test_an_event_that_is_over_explains_no_silence(
    event_type: Any, end: Any, silent: list[str]
) -> None:
    log = Log(WAVES)
    log.pass_time(300, A, B, C)
    log.add(B, "announced", resources=[A.name], event_type=event_type)
    log.add(
        B, "announced", "LATER", resources=[C.name], event_type=event_type, not_before=at(86_400)
    )
    for kind in ["started", end] if end == "finished" else [end]:
        log.add(A, kind, resources=[A.name], event_type=event_type)
    log.pass_time(LIMIT, B, C)
    assert log.silent == silent
    log.pass_time(LIMIT, A, B, C)
    log.pass_time(LIMIT, B, C)
    assert log.silent == ["web_0"]  # it had come back, also after a Preempt
    log.add(C, "canceled", "LATER", resources=[C.name], event_type=event_type)
    log.pass_time(LIMIT, B, C)
    assert log.silent == ["web_0"]  # the wave is over


def test_while_the_hub_is_away_nobody_is_silent() -> None:
    log = Log()
    log.pass_time(600, A, B)
    log.now += 7200  # nothing was read for two hours
    assert log.pass_time(600, A, B) == []
    assert log.silent == []


def test_where_the_hub_has_more_partitions_nobody_is_expected_in_one_that_was_read_before() -> None:
    log = Log()
    log.fold.hub_has(1)
    log.beat(A)
    log.fold.hub_has(2)  # its VMs may send to the other one by now
    log.pass_time(2000)
    assert (log.kinds, log.silent) == ([], [])


def test_a_vm_that_is_gone_for_a_day_is_forgotten() -> None:
    log = Log()
    log.pass_time(600, A, B)
    log.pass_time(86_400 + 3600, A)
    assert log.kinds == ["started", "finished"]
    assert list(log.fold.silence.heard) == ["sub/rg/web_0"]


def test_who_takes_over_knows_who_is_silent_also_where_nobody_sends() -> None:
    for alive in ((A, B), ()):
        log = Log()
        log.pass_time(600, A, B, C)
        log.pass_time(1500, *alive)
        again = log.taken_over()
        assert again.pass_time(1200, *alive) == []
        assert again.silent == log.silent
        assert again.pass_time(600, A, B, C) == ["finished"]


def test_a_report_is_a_sign_of_life_as_well() -> None:
    log = Log()
    log.pass_time(60, A)
    for _ in range(30):
        log.add(A, "updated", resources=[B.name], after=60)
    assert log.silent == []


def test_a_vm_whose_tags_are_others_now_is_heard_from_as_before() -> None:
    log = Log()
    before, now = vm(A.name, team="web"), vm(A.name, team="data")
    log.pass_time(600, before, vm(B.name, team="web"))
    log.pass_time(1200, now)
    assert log.kinds == ["started"]
    assert log.last.vm.tags == {"team": "web"}
    log.pass_time(600, now, vm(B.name, team="data"))
    assert log.kinds == ["started", "finished"]
    assert [one.place.tags for one in log.fold.silence.heard.values()] == [(("team", "data"),)] * 2


def test_the_vms_of_a_place_share_it_also_after_a_restart() -> None:
    log = Log()
    log.pass_time(60, A, B, C)
    assert len({id(one.place) for one in log.taken_over().fold.silence.heard.values()}) == 1


def evicted() -> Log:
    """Another VM has reported to the end that one was evicted."""
    log = Log()
    log.pass_time(300, A, B)
    for kind in ("announced", "started", "finished"):
        log.add(B, kind, resources=[A.name], event_type="Preempt")
    return log


def test_a_vm_that_was_evicted_is_no_longer_expected_by_who_takes_the_partition_over_either() -> (
    None
):
    log = evicted()
    for one in (log.taken_over(), log):
        before = len(one.kinds)
        one.pass_time(3600, B)
        assert one.silent == one.kinds[before:] == []
        assert "web_0" not in one.fold.silence.heard


def test_a_vm_that_comes_back_after_its_eviction_is_expected_again() -> None:
    log = evicted()
    log.pass_time(3600, A, B)
    log.pass_time(1200, B)
    assert log.silent == ["web_0"]


def test_vms_with_different_tags_that_fall_silent_at_once_are_all_named() -> None:
    log = Log(WAVES)
    one, two = vm("web_0", team="web"), vm("web_1", team="data")
    log.pass_time(600, one, two, C)
    log.pass_time(1200, C)
    assert log.kinds == ["started"]
    assert sorted(log.last.change.event.resources) == ["web_0", "web_1"]
    assert (log.last.vm.scale_set, log.last.vm.tags) == ("web", {})
