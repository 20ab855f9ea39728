"""Which VMs fall silent: three intervals without a word, and no event that explains it; once for a wave of them."""

from datetime import UTC, datetime
from typing import Any

from notbefore.core.record import Heartbeat, Vm
from notbefore.fleet.partition import Partition
from support.fleet_records import body, report, vm
from unit.test_fleet_merge import EACH, LIMIT, WAVES, Log, written

A, B, C = vm("web_0"), vm("web_1"), vm("web_2")
BEAT = 300.0


class Vms(Log):
    """A log in which VMs send heartbeats, each in its interval."""

    def pass_time(self, seconds: float, *alive: Vm) -> list[str]:
        end = self.now + seconds
        while self.now < end:
            for who in alive:
                self.read(body(Heartbeat.of(who, (), "1", datetime.fromtimestamp(self.now, UTC), BEAT)))
            self.wait(60)
        return self.kinds

    @property
    def silent(self) -> list[str]:
        return [one.name for one in self.fold.silence.silent]


def test_a_vm_that_is_silent_for_three_intervals_is_notified_and_counted_once() -> None:
    log = Vms()
    log.pass_time(600, A, B, C)
    assert log.pass_time(3 * BEAT - 60, A, B) == []
    assert log.pass_time(180, A, B) == ["started"]
    assert (log.silent, log.last.change.event.resources, log.last.change.event.event_type) == (
        ["web_2"], ("web_2",), "Silent",
    )  # fmt: skip
    log.pass_time(3600, A, B)
    assert (log.kinds, log.fold.figures.fell_silent) == (["started"], 1)


def test_silent_vms_of_a_scale_set_are_one_wave_until_all_are_back() -> None:
    log = Vms(WAVES)
    log.pass_time(600, A, B, C)
    log.pass_time(1200, A)
    assert (log.kinds, log.last.facts.vms) == (["started"], 2)
    log.pass_time(600, A, B)
    assert log.kinds == ["started", "updated"]
    log.pass_time(900, A, B, C)
    assert log.kinds == ["started", "updated", "finished"]
    assert {one.change.event.key for one in log.made} == {log.last.change.event.key}
    assert log.fold.figures.fell_silent == 2


def test_an_event_that_has_started_explains_the_silence() -> None:
    log = Vms()
    log.pass_time(300, A, B)
    log.add(B, "announced", resources=[A.name])
    log.add(B, "started", resources=[A.name])
    log.pass_time(1800, B)
    assert log.silent == []
    log.add(B, "finished", resources=[A.name])
    log.pass_time(3 * LIMIT, B)
    assert log.silent == ["web_0"]  # the event is over, and the VM did not come back


def test_a_vm_that_was_evicted_is_no_longer_expected() -> None:
    log = Vms()
    log.pass_time(300, A, B)
    for kind in ("announced", "started", "finished"):
        log.add(B, kind, resources=[A.name], event_type="Preempt")
    log.pass_time(3600, B)
    assert log.silent == []
    assert "web_0" not in log.fold.silence.heard


def test_while_the_hub_is_away_nobody_is_silent() -> None:
    log = Vms()
    log.pass_time(600, A, B)
    log.now += 7200  # nothing was read for two hours
    assert log.pass_time(600, A, B) == []
    assert log.silent == []


def test_a_vm_that_is_gone_for_a_day_is_forgotten() -> None:
    log = Vms()
    log.pass_time(600, A, B)
    log.pass_time(86_400 + 3600, A)
    assert log.kinds == ["started", "finished"]
    assert list(log.fold.silence.heard) == ["sub/rg/web_0"]


def test_who_takes_over_knows_the_vms_and_who_is_silent() -> None:
    log = Vms()
    log.pass_time(600, A, B, C)
    log.pass_time(1200, A, B)
    again = Vms(sequence=log.sequence)
    again.fold = Partition("0", EACH, lambda *_: None)
    again.fold.restore(written(log.fold))
    again.now = log.now
    again.pass_time(1200, A, B)
    assert (again.silent, again.kinds) == (["web_2"], [])
    assert again.pass_time(600, A, B, C) == ["finished"]


def test_a_report_is_a_sign_of_life_as_well() -> None:
    log = Vms()
    log.pass_time(60, A)

    def updated(**fields: Any) -> bytes:
        return body(report(A, "updated", at=datetime.fromtimestamp(log.now, UTC), **fields))

    for _ in range(10):
        log.read(updated())
        log.wait(BEAT)
    assert log.silent == []


def test_a_vm_whose_tags_are_others_now_is_heard_from_as_before() -> None:
    log = Vms()
    before, now = vm(A.name, team="web"), vm(A.name, team="data")
    log.pass_time(600, before, vm(B.name, team="web"))
    log.pass_time(1200, now)
    assert log.kinds == ["started"]
    assert log.last.vm.tags == {"team": "web"}
    log.pass_time(600, now, vm(B.name, team="data"))
    assert log.kinds == ["started", "finished"]
    assert [one.place.tags for one in log.fold.silence.heard.values()] == [(("team", "data"),)] * 2


def test_the_vms_of_a_place_share_it_also_after_a_restart() -> None:
    log = Vms()
    log.pass_time(60, A, B, C)
    again = Partition("0", EACH, lambda *_: None)
    again.restore(written(log.fold))
    for fold in (log.fold, again):
        assert len({id(one.place) for one in fold.silence.heard.values()}) == 1


def test_a_vm_that_was_evicted_is_no_longer_expected_by_who_takes_the_partition_over() -> None:
    log = Vms()
    log.pass_time(300, A, B)
    for kind in ("announced", "started", "finished"):
        log.add(B, kind, resources=[A.name], event_type="Preempt")
    again = Vms(sequence=log.sequence)
    again.fold.restore(written(log.fold))
    again.now = log.now
    again.pass_time(3600, B)
    assert again.silent == again.kinds == []


def test_a_vm_that_comes_back_after_its_eviction_is_expected_again() -> None:
    log = Vms()
    log.pass_time(300, A, B)
    for kind in ("announced", "started", "finished"):
        log.add(B, kind, resources=[A.name], event_type="Preempt")
    log.pass_time(3600, A, B)
    log.pass_time(1200, B)
    assert log.silent == ["web_0"]


def test_vms_with_different_tags_that_fall_silent_at_once_are_all_named() -> None:
    log = Vms(WAVES)
    one, two = vm("web_0", team="web"), vm("web_1", team="data")
    log.pass_time(600, one, two, C)
    log.pass_time(1200, C)
    assert log.kinds == ["started"]
    assert sorted(log.last.change.event.resources) == ["web_0", "web_1"]
    assert (log.last.vm.scale_set, log.last.vm.tags) == ("web", {})
