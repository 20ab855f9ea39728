"""What a fleet's notifications must not do: mix VMs of one name, lose notice by waiting, or tell
history as news.
"""

import os
import random
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from notbefore.config.sinks import Messages
from notbefore.core.delivery import deliveries
from notbefore.core.message import Message
from notbefore.core.routing import Match, Route, Routing, Terms
from notbefore.fleet.mutes import Mute, is_muted
from notbefore.fleet.partition import MAX_OPEN_OF_ONE, Partition
from notbefore.fleet.silence import LONGEST
from notbefore.fleet.snapshot import Snapshot
from notbefore.fleet.story import MAX_REPORTERS
from notbefore.fleet.waves import Grouping
from notbefore.wording.records import record_of
from notbefore.wording.texts import Text, text_of
from support import random_fleets
from support.azure import T0, at
from support.fleet_log import LIMIT, WAVES, A, B, C, Log, grouped, written
from support.fleet_records import body, report, vm

PROD = replace(
    vm("web01", scale_set=""),
    subscription_id="prod",
    resource_group="payments",
    tags={"team": "pay"},
)
TEST = replace(
    vm("web01", scale_set=""), subscription_id="test", resource_group="lab", tags={"team": "lab"}
)
BOTH = tuple(replace(one, record_tags=("team",)) for one in (PROD, TEST))
PROD, TEST = BOTH


def test_a_vm_that_dies_is_silent_although_another_one_of_its_name_is_not() -> None:
    log = Log()
    log.pass_time(300, PROD, TEST)
    log.pass_time(1200, TEST)
    (one,) = log.made
    assert (one.vm.resource_group, one.change.event.resources) == ("payments", ("web01",))


def test_the_end_of_one_vm_does_not_explain_the_silence_of_another_one_of_its_name() -> None:
    log = Log()
    log.pass_time(300, PROD, TEST)
    for kind in ("announced", "started"):
        log.add(TEST, kind, event_type="Preempt")
    log.add(replace(TEST, name="web02"), "finished", resources=["web01"], event_type="Preempt")
    log.pass_time(1500, replace(PROD, name="web02"))
    silent = [one for one in log.made if one.change.event.event_type == "Silent"]
    assert [one.vm.resource_group for one in silent] == ["payments"]


def test_one_eventid_of_two_resource_groups_is_two_events() -> None:
    log = Log()
    for who in (PROD, TEST):
        log.add(who, "announced")
    log.add(TEST, "canceled")
    log.add(PROD, "started")
    found = [(one.vm.resource_group, one.change.kind) for one in log.made]
    assert found == [
        ("payments", "announced"),
        ("lab", "announced"),
        ("lab", "canceled"),
        ("payments", "started"),
    ]
    assert len({one.change.event.key for one in log.made}) == 2
    assert len({one.change.id for one in log.made}) == 4


def test_events_of_one_wave_that_go_to_different_receivers_are_two_waves() -> None:
    routes = (Route(Match(tags={"team": ("pay",)}), ("payments",)), Route(Match(), ("rest",)))
    log = Log(grouped(("resource_group", "subscription", "event_type"), routes=routes))
    for event, team in (("E0", "pay"), ("E1", "pay"), ("E2", "lab"), ("E3", "web")):
        log.add(vm(f"vm-{event}", team=team), "announced", event)
    log.wait(10)
    assert sorted(one.facts.fleet_events for one in log.made) == [2, 2]
    assert {tuple(one.tags["team"] for one in made.routed) for made in log.made} == {
        ("pay",),
        ("lab",),
    }


def test_an_exercise_is_a_wave_of_its_own() -> None:
    log = Log(WAVES)
    log.read(body(replace(report(A, "announced", "DRILL", at=at(1)), exercise=True)))
    log.add(B, "announced", "E1")
    log.wait(10)
    assert sorted((one.exercise, one.facts.fleet_events) for one in log.made) == [
        (False, 1),
        (True, 1),
    ]


def test_a_worse_type_names_the_wave_and_does_not_wait() -> None:
    log = Log(grouped(("resource_group", "subscription")))
    log.add(A, "announced", "E0", event_type="Freeze", notice=3600)
    log.wait(10)
    log.add(B, "announced", "E1", event_type="Terminate", notice=300, not_before=at(310))
    log.wait(10)
    assert (log.last.change.kind, log.last.change.event.event_type) == ("updated", "Terminate")
    log.add(
        B, "updated", "E1", event_type="Terminate", not_before=at(310), resources=[B.name, C.name]
    )
    # one more VM does not wait for the digest either
    assert log.wait(100) == [
        "announced",
        "updated",
        "updated",
    ]
    log.add(
        B,
        "updated",
        "E1",
        event_type="Terminate",
        not_before=datetime.fromtimestamp(log.now + 12, UTC),
    )
    assert log.wait(5) == ["announced", *["updated"] * 3]  # a third of the 12 s that are left


def test_since_when_an_event_is_over_is_not_when_its_digest_was_sent() -> None:
    log = Log(WAVES)
    for kind in ("announced", "started", "finished"):
        log.add(A, kind, after=20)
    over = log.now
    log.wait(300)
    change = log.last.change
    assert change.over_since is not None
    assert change.over_since.timestamp() == pytest.approx(over, abs=0.01)
    assert (change.time - change.over_since).total_seconds() > 290


def texts(log: Log) -> list[Text]:
    """The messages in words."""
    routing = Routing((Route(sinks=("it",)),), {"it": Terms()})
    made = [(one, record_of(one.change, one.vm, fleet=one.facts).line()) for one in log.made]
    found = [deliveries(one.change, line, routing, one.vm)[0] for one, line in made]
    sent = [Message.of(one, datetime.fromtimestamp(one.created, UTC)) for one in found]
    return [text_of(one, Messages()) for one in sent]


def test_the_messages_of_a_wave_say_whose_it_is_and_once_it_has_begun_what_comes_next() -> None:
    log, vms = Log(WAVES), [vm(f"web_{number}", team="web", env="prod") for number in range(3)]
    log.add(vms[0], "announced", "E0")
    log.wait(10)
    for kind in ("started", "finished"):
        log.add(vms[0], kind, "E0", after=20)
    for number in (1, 2):
        log.add(vms[number], "announced", f"E{number}", not_before=at(900 * number))
    log.wait(300)
    between = texts(log)[-1]
    assert "Tags: env: prod, team: web\n" in between.plain
    assert between.title.endswith(" web in 9 min: 1 of 3 events is over, 2 are to come (changed)")
    assert "Affected VMs: web_1, web_2, web_0\n" in between.plain
    log.wait(900)
    log.add(vms[2], "updated", "E2", not_before=at(2000))
    log.wait(10)
    # it is overdue, and not hidden by the one after it
    assert log.last.change.event.not_before == at(900)
    log.add(vms[1], "started", "E1")
    log.wait(300)
    goes_on = texts(log)[-1]
    assert goes_on.title.endswith(
        "goes on: 1 of 3 events is over, 1 is under way, 1 is to come (changed)"
    )
    assert "Next: not before 2026-03-01 12:33:20 UTC, in " in goes_on.plain


def test_who_is_affected_and_reports_an_event_later_than_others_is_routed_as_well() -> None:
    vms = [vm(f"web_{number}", team=str(number)) for number in range(6)]
    routes = tuple(Route(Match(tags={"team": (str(number),)}), ("it",)) for number in range(6))
    log = Log(grouped(("resource_group", "event_type"), routes=routes))
    for reporters in ([vms[0]] * 6, vms):
        for who, hit in zip(reporters, vms, strict=True):
            log.add(who, "announced", hit.name, resources=[hit.name], after=0.1)
    log.wait(10)
    assert [one.tags["team"] for one in log.last.routed] == ["0", "1", "2", "3", "4", "5"]


def test_what_was_cut_off_corrects_the_story_once() -> None:
    log = Log()
    log.add(A, "announced")
    assert log.wait(900 + LIMIT + 60) == ["announced", "ended"]
    for kind, seconds in (("started", 905), ("finished", 1200)):
        for who in (A, B):
            log.add(who, kind, after=0.1, at=at(seconds), resources=[A.name], not_before=at(900))
    log.wait(60)
    assert log.kinds == ["announced", "ended", "finished"]
    assert (log.last.change.reason, log.last.change.outcome) == ("corrected", "finished")
    assert log.last.change.over_since == at(1200)
    assert [one.outcome for one in log.fold.state.past] == ["unknown", "finished"]
    assert texts(log)[-1].title == "Reboot of web_0 is over (correction)"


def test_what_was_canceled_and_is_learnt_late_is_a_correction_as_well() -> None:
    log = Log()
    log.add(A, "announced")
    log.wait(900 + LIMIT + 60)
    log.add(B, "canceled", at=at(700), resources=[A.name])
    log.add(A, "updated", at=at(600))
    log.wait(60)
    log.add(A, "canceled", at=at(700))
    log.wait(60)
    assert (log.kinds[2:], log.last.change.reason, log.fold.figures.errors) == (
        ["canceled"],
        "corrected",
        {},
    )
    assert is_muted(
        [Mute("id", {"event_type": "Reboot"}, "me", "why", log.now + 60)], log.now, log.last, set()
    )


def of_backlog(grouping: Grouping, backlog: int) -> Log:
    log = Log(grouping)
    log.fold = Partition("0", grouping, Snapshot(backlog=backlog))
    return log


@pytest.mark.parametrize("grouping", [grouped(), WAVES])
def test_what_was_over_before_the_first_reading_is_history(grouping: Grouping) -> None:
    log = of_backlog(grouping, backlog=4)
    for kind in ("announced", "started", "finished"):
        log.add(A, kind, "E0", after=400)
    log.add(B, "finished", "E1", after=400)  # it was announced before the window
    log.add(B, "announced", "E2", after=400, not_before=at(9000))
    log.wait(400)
    log.add(A, "announced", "E3", after=400, not_before=at(9000))
    log.wait(400)
    assert {one.event_id for made in log.made for one in [made.change.event]} <= {
        "E2",
        "E3",
        *_waves(log),
    }
    assert log.kinds[0] == "announced"
    assert set(log.kinds) <= {"announced", "updated"}
    closed = [one.event_id for one in log.fold.state.past]
    assert sorted(closed) == ["E0", "E1"]


def _waves(log: Log) -> set[str]:
    return {
        made.change.event.event_id
        for made in log.made
        if made.change.event.event_id.startswith("wave-")
    }


def test_who_takes_over_in_the_middle_of_the_backlog_notifies_nobody_of_it_either() -> None:
    log = of_backlog(grouped(), backlog=2)
    log.add(A, "announced")
    log.add(A, "started")
    second = log.taken_over()
    second.add(A, "finished")
    second.wait(60)
    assert second.made == []
    assert [(one.event_id, one.outcome) for one in second.fold.state.past] == [
        ("EVENT-1", "finished")
    ]


@pytest.mark.parametrize("year", [1, 9999])
def test_a_forged_year_costs_no_other_event_anything(year: int) -> None:
    log = Log(WAVES)
    log.add(A, "announced", "E0")
    forged = datetime(year, 6, 1, tzinfo=UTC)
    log.add(B, "announced", "E1", not_before=forged, first_seen=forged, at=forged)
    log.wait(10)
    assert log.kinds == ["announced"]
    change = log.last.change
    assert set(change.event.resources) == {A.name, B.name}
    assert change.not_before == at(900)
    assert abs(change.first_seen - T0) < timedelta(days=367)


def test_one_vm_cannot_open_more_than_so_many_events_and_the_others_are_notified() -> None:
    log = Log()
    for number in range(MAX_OPEN_OF_ONE + 10):
        log.add(A, "announced", f"forged-{number}", after=0.001)
    log.add(B, "announced", "true")
    assert log.fold.figures.poison == {"too_many": 10}
    assert log.last.change.event.event_id == "true"


def test_events_with_many_long_names_count_as_several() -> None:
    log = Log()
    for number in range(100):
        names = [f"{number}-{vm:0>200}" for vm in range(500)]
        log.add(A, "announced", f"forged-{number}", resources=names, after=0.001)
        log.add(A, "announced", f"small-{number}", resources=[], after=0.001)
        log.add(A, "updated", f"small-{number}", resources=names, after=0.001)
    assert len(log.fold.snapshot(0.0)) < 8 * 1024 * 1024
    log.add(B, "announced", "true")
    assert log.last.change.event.event_id == "true"
    written(log.fold)


def test_the_names_of_those_that_report_one_event_have_a_bound_in_bytes() -> None:
    log = Log()
    for number in range(MAX_REPORTERS // 1000 + 10):
        log.add(
            vm(f"{number:03}" + "\N{GRINNING FACE}" * 250),
            "announced",
            resources=[A.name],
            after=0.001,
        )
    (story,) = log.fold.events.open.values()
    assert (
        MAX_REPORTERS - 2000 < sum(len(name.encode()) for name in story.reported) <= MAX_REPORTERS
    )


def test_events_that_are_over_count_no_longer() -> None:
    log = Log()
    for number in range(MAX_OPEN_OF_ONE + 1):
        for kind in ("announced", "canceled"):
            log.add(A, kind, f"E{number}", after=0.001)
    assert not log.fold.events.open
    assert log.fold.figures.poison == {}


@pytest.mark.parametrize("seconds", [-1, 10 * 365 * 86_400 + 1, 2**64, 10**30])
def test_a_forged_duration_keeps_no_snapshot_from_being_written(seconds: int) -> None:
    log = Log()
    forged = body(report(A, "announced", "E0", at=T0)).replace(
        b'duration_seconds":9', f'duration_seconds":{seconds}'.encode()
    )
    log.read(forged)
    log.add(B, "announced", "E1")
    assert log.fold.figures.poison == {"wrong_shape": 1}
    assert {wave.event_key for wave in written(log.fold).waves.values()} == {"e1"}


def test_an_interval_of_ages_keeps_no_vm_for_ever() -> None:
    log = Log()
    log.beat(A, interval=3e11)
    assert log.fold.silence.heard["sub/rg/web_0"].interval == LONGEST
    for _ in range(3 * 864 + 2):
        log.wait(100)
    assert not log.fold.silence.heard


def test_thousands_of_vms_that_fall_silent_at_once_are_all_notified_step_by_step() -> None:
    log = Log()
    vms = [
        replace(vm(f"vm-{number}", scale_set=""), resource_group=f"rg-{number}")
        for number in range(3000)
    ]
    log.beat(*vms)
    for _ in range(20):
        log.wait(100)
    assert len(log.made) == len(vms)


@pytest.mark.parametrize("group_by", random_fleets.GROUPINGS)
def test_of_random_fleets_nothing_is_false_untold_or_out_of_order(
    group_by: tuple[str, ...],
) -> None:
    for seed in range(int(os.environ.get("NOTBEFORE_FLEETS", "40"))):
        plan = random_fleets.planned(random.Random(seed))  # noqa: S311 - a seed
        made = random_fleets.notified(plan, random.Random(seed), group_by)  # noqa: S311 - as above
        assert list(random_fleets.wrong(plan, made)) == [], seed
