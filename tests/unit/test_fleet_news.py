"""A fleet keeps VMs of one name apart, loses no notice by waiting, and notifies no history."""

import os
import random
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from notbefore.core.routing import Match, Route
from notbefore.fleet.event_bounds import MAX_OPEN_OF_ONE
from notbefore.fleet.mutes import Mute, is_muted
from notbefore.fleet.notification import Notification
from notbefore.fleet.partition import Partition
from notbefore.fleet.silence import LONGEST_INTERVAL
from notbefore.fleet.snapshot import Snapshot
from notbefore.fleet.story import MAX_REPORTERS
from notbefore.fleet.waves import Grouping
from support import random_fleets
from support.azure import T0, at
from support.fleet_log import LIMIT, WAVES, A, B, C, Log, grouped, snapshot_of, text_of_last
from support.fleet_records import body, report, vm

PROD = replace(
    vm("web01", scale_set=""),
    subscription_id="prod",
    resource_group="payments",
    tags={"team": "pay"},
    record_tags=("team",),
)
TEST = replace(
    vm("web01", scale_set=""),
    subscription_id="test",
    resource_group="lab",
    tags={"team": "lab"},
    record_tags=("team",),
)


def resource_groups(notifications: list[Notification]) -> list[str]:
    return [notification.vm.resource_group for notification in notifications]


def event_ids(notifications: list[Notification]) -> set[str]:
    return {notification.change.event.event_id for notification in notifications}


# ---- VMs of one name


def test_vm_is_silent_although_another_of_its_name_is_not() -> None:
    log = Log()
    log.pass_time(300, PROD, TEST)

    log.pass_time(1200, TEST)

    (silent,) = log.notifications
    assert silent.vm.resource_group == "payments"
    assert silent.change.event.resources == ("web01",)


def test_end_of_a_vm_explains_no_silence_of_another_of_its_name() -> None:
    log = Log()
    log.pass_time(300, PROD, TEST)
    log.add(TEST, "announced", event_type="Preempt")
    log.add(TEST, "started", event_type="Preempt")
    neighbor = replace(TEST, name="web02")
    log.add(neighbor, "finished", resources=["web01"], event_type="Preempt")

    log.pass_time(1500, replace(PROD, name="web02"))

    silent = [
        notification
        for notification in log.notifications
        if notification.change.event.event_type == "Silent"
    ]
    assert resource_groups(silent) == ["payments"]


def test_event_id_in_two_resource_groups_is_two_events() -> None:
    log = Log()

    log.add(PROD, "announced")
    log.add(TEST, "announced")
    log.add(TEST, "canceled")
    log.add(PROD, "started")

    assert log.kinds == ["announced", "announced", "canceled", "started"]
    assert resource_groups(log.notifications) == ["payments", "lab", "lab", "payments"]
    assert len({notification.change.event.key for notification in log.notifications}) == 2
    assert len({notification.change.id for notification in log.notifications}) == 4


# ---- waves


def test_events_for_different_receivers_are_two_waves() -> None:
    routes = (Route(Match(tags={"team": ("pay",)}), ("payments",)), Route(Match(), ("rest",)))
    log = Log(grouped(("resource_group", "subscription", "event_type"), routes=routes))
    for event_id, team in (("E0", "pay"), ("E1", "pay"), ("E2", "lab"), ("E3", "web")):
        log.add(vm(f"vm-{event_id}", team=team), "announced", event_id)

    log.wait(10)

    first, second = log.notifications
    teams = {
        tuple(place.tags["team"] for place in notification.routed)
        for notification in log.notifications
    }
    assert first.facts.fleet_events == 2
    assert second.facts.fleet_events == 2
    assert teams == {("pay",), ("lab",)}


def test_exercise_is_a_wave_of_its_own() -> None:
    log = Log(WAVES)
    log.read(body(replace(report(A, "announced", "DRILL", at=at(1)), exercise=True)))
    log.add(B, "announced", "E1")

    log.wait(10)

    events_by_exercise = {
        notification.exercise: notification.facts.fleet_events for notification in log.notifications
    }
    assert len(log.notifications) == 2
    assert events_by_exercise == {False: 1, True: 1}


def log_with_terminate() -> Log:
    """Return the log of a wave of a freeze and a worse event, after both were notified."""
    log = Log(grouped(("resource_group", "subscription")))
    log.add(A, "announced", "E0", event_type="Freeze", notice=3600)
    log.wait(10)
    log.add(B, "announced", "E1", event_type="Terminate", notice=300, not_before=at(310))
    log.wait(10)
    return log


def test_worse_type_names_the_wave_and_is_notified_before_the_digest() -> None:
    log = log_with_terminate()

    assert log.kinds == ["announced", "updated"]
    assert log.last.change.event.event_type == "Terminate"


def test_another_vm_is_notified_before_the_digest() -> None:
    log = log_with_terminate()
    both = [B.name, C.name]
    log.add(B, "updated", "E1", event_type="Terminate", not_before=at(310), resources=both)

    log.wait(100)

    assert log.kinds == ["announced", "updated", "updated"]


def test_another_vm_is_notified_before_the_digest_when_time_is_short() -> None:
    log = Log(WAVES)
    log.add(A, "announced")
    log.wait(840)
    log.add(A, "updated", resources=[A.name, B.name])

    log.wait(20)

    assert log.kinds == ["announced", "updated"]


def test_moved_not_before_waits_a_third_of_the_remaining_time() -> None:
    log = log_with_terminate()
    soon = datetime.fromtimestamp(log.now + 12, UTC)
    log.add(B, "updated", "E1", event_type="Terminate", not_before=soon)
    before = len(log.notifications)

    log.wait(5)

    assert log.kinds[before:] == ["updated"]


def test_end_of_an_event_is_dated_before_its_digest() -> None:
    log = Log(WAVES)
    for kind in ("announced", "started", "finished"):
        log.add(A, kind, after=20)
    end = log.now

    log.wait(300)

    change = log.last.change
    assert change.over_since is not None
    assert change.over_since.timestamp() == pytest.approx(end, abs=0.01)
    assert (change.time - change.over_since).total_seconds() > 290


def test_vm_that_reports_late_is_routed_with_the_others() -> None:
    vms = [vm(f"web_{number}", team=str(number)) for number in range(6)]
    routes = tuple(Route(Match(tags={"team": (str(number),)}), ("it",)) for number in range(6))
    log = Log(grouped(("resource_group", "event_type"), routes=routes))
    for affected in vms:
        log.add(vms[0], "announced", affected.name, resources=[affected.name], after=0.1)
    for affected in vms:
        log.add(affected, "announced", affected.name, resources=[affected.name], after=0.1)

    log.wait(10)

    teams = [place.tags["team"] for place in log.last.routed]
    assert teams == ["0", "1", "2", "3", "4", "5"]


# ---- the messages of a wave


def test_message_has_the_tags_of_the_vms() -> None:
    log = Log()

    log.add(vm("web_0", team="web", env="prod"), "announced")

    assert "Tags: env: prod, team: web" in text_of_last(log).plain


def wave_after_its_first_event() -> Log:
    """Return the log of a wave of three events: E0 is over, E1 is due at 900 s, E2 at 1800 s."""
    vms = [vm(f"web_{number}", team="web", env="prod") for number in range(3)]
    log = Log(WAVES)
    log.add(vms[0], "announced", "E0")
    log.wait(10)
    log.add(vms[0], "started", "E0", after=20)
    log.add(vms[0], "finished", "E0", after=20)
    log.add(vms[1], "announced", "E1", not_before=at(900))
    log.add(vms[2], "announced", "E2", not_before=at(1800))
    log.wait(300)
    return log


def test_message_between_two_events_says_what_comes_next() -> None:
    log = wave_after_its_first_event()

    text = text_of_last(log)

    progress = " web in 9 min: 1 of 3 events is over, 2 are to come (changed)"
    assert text.title.endswith(progress)
    assert "Affected VMs: web_1, web_2, web_0\n" in text.plain
    assert "Tags: env: prod, team: web\n" in text.plain


def test_overdue_event_is_not_hidden_by_the_one_after_it() -> None:
    log = wave_after_its_first_event()
    log.wait(900)

    log.add(vm("web_2", team="web", env="prod"), "updated", "E2", not_before=at(2000))
    log.wait(10)

    assert log.last.change.event.not_before == at(900)


def test_message_during_an_event_says_what_comes_next() -> None:
    log = wave_after_its_first_event()

    log.add(vm("web_1", team="web", env="prod"), "started", "E1")
    log.wait(300)

    text = text_of_last(log)
    progress = "continues: 1 of 3 events is over, 1 is under way, 1 is to come (changed)"
    assert text.title.endswith(progress)
    assert "Next: not before 2026-03-01 12:30:00 UTC, in " in text.plain


def test_message_during_an_event_has_the_moved_time_of_the_next() -> None:
    log = wave_after_its_first_event()
    log.wait(900)
    log.add(vm("web_2", team="web", env="prod"), "updated", "E2", not_before=at(2000))
    log.wait(10)

    log.add(vm("web_1", team="web", env="prod"), "started", "E1")
    log.wait(300)

    assert "Next: not before 2026-03-01 12:33:20 UTC, in " in text_of_last(log).plain


# ---- corrections


def test_late_reports_correct_an_event_once() -> None:
    log = Log()
    log.add(A, "announced")
    log.wait(900 + LIMIT + 60)
    assert log.kinds == ["announced", "ended"]

    for kind, seconds in (("started", 905), ("finished", 1200)):
        for reporter in (A, B):
            fields = {"at": at(seconds), "resources": [A.name], "not_before": at(900)}
            log.add(reporter, kind, after=0.1, **fields)
    log.wait(60)

    assert log.kinds == ["announced", "ended", "finished"]
    assert log.last.change.reason == "corrected"
    assert log.last.change.outcome == "finished"
    assert log.last.change.over_since == at(1200)
    assert [past.outcome for past in log.fold.state.past] == ["unknown", "finished"]
    assert text_of_last(log).title == "Reboot of web_0 is over (correction)"


def log_with_late_cancellation() -> Log:
    log = Log()
    log.add(A, "announced")
    log.wait(900 + LIMIT + 60)
    log.add(B, "canceled", at=at(700), resources=[A.name])
    log.add(A, "updated", at=at(600))
    log.wait(60)
    log.add(A, "canceled", at=at(700))
    log.wait(60)
    return log


def test_late_cancellation_is_a_correction() -> None:
    log = log_with_late_cancellation()

    assert log.kinds[2:] == ["canceled"]
    assert log.last.change.reason == "corrected"
    assert log.fold.figures.errors == {}


def test_correction_can_be_muted() -> None:
    log = log_with_late_cancellation()
    mute = Mute("id", {"event_type": "Reboot"}, "me", "why", log.now + 60)

    assert is_muted([mute], log.now, log.last, set())


# ---- history


def log_with_backlog(grouping: Grouping, backlog: int) -> Log:
    log = Log(grouping)
    log.fold = Partition("0", grouping, Snapshot(backlog=backlog))
    return log


@pytest.mark.parametrize("grouping", [grouped(), WAVES], ids=["each event", "waves"])
def test_event_that_was_over_before_the_first_read_is_history(grouping: Grouping) -> None:
    log = log_with_backlog(grouping, backlog=4)

    for kind in ("announced", "started", "finished"):
        log.add(A, kind, "E0", after=400)
    log.add(B, "finished", "E1", after=400)  # it was announced before the window
    log.add(B, "announced", "E2", after=400, not_before=at(9000))
    log.wait(400)
    log.add(A, "announced", "E3", after=400, not_before=at(9000))
    log.wait(400)

    events = {
        event_id for event_id in event_ids(log.notifications) if not event_id.startswith("wave-")
    }
    history = sorted(past.event_id for past in log.fold.state.past)
    assert events <= {"E2", "E3"}
    assert log.kinds[0] == "announced"
    assert set(log.kinds) <= {"announced", "updated"}
    assert history == ["E0", "E1"]


def test_takeover_within_the_backlog_notifies_no_history() -> None:
    log = log_with_backlog(grouped(), backlog=2)
    log.add(A, "announced")
    log.add(A, "started")

    successor = log.taken_over()
    successor.add(A, "finished")
    successor.wait(60)

    (past,) = successor.fold.state.past
    assert successor.notifications == []
    assert past.event_id == "EVENT-1"
    assert past.outcome == "finished"


# ---- forged and excessive reports


@pytest.mark.parametrize("year", [1, 9999])
def test_forged_year_does_not_affect_other_events(year: int) -> None:
    log = Log(WAVES)
    log.add(A, "announced", "E0")
    forged = datetime(year, 6, 1, tzinfo=UTC)

    log.add(B, "announced", "E1", not_before=forged, first_seen=forged, at=forged)
    log.wait(10)

    change = log.last.change
    assert log.kinds == ["announced"]
    assert set(change.event.resources) == {A.name, B.name}
    assert change.not_before == at(900)
    assert abs(change.first_seen - T0) < timedelta(days=367)


def test_vm_opens_a_bounded_number_of_events_and_others_are_notified() -> None:
    log = Log()
    for number in range(MAX_OPEN_OF_ONE + 10):
        log.add(A, "announced", f"forged-{number}", after=0.001)

    log.add(B, "announced", "true")

    assert log.fold.figures.poison == {"too_many": 10}
    assert log.last.change.event.event_id == "true"


def log_with_long_names() -> Log:
    """Return a log in which A has reported many events, each with many long names."""
    log = Log()
    for number in range(100):
        names = [f"{number}-{index:0>200}" for index in range(500)]
        log.add(A, "announced", f"forged-{number}", resources=names, after=0.001)
        log.add(A, "announced", f"small-{number}", resources=[], after=0.001)
        log.add(A, "updated", f"small-{number}", resources=names, after=0.001)
    return log


def test_events_with_many_long_names_are_bounded_in_bytes() -> None:
    log = log_with_long_names()

    assert len(log.fold.snapshot(0.0)) < 8 * 1024 * 1024
    snapshot_of(log.fold)  # raises if the snapshot cannot be read


def test_events_with_many_long_names_leave_room_for_other_vms() -> None:
    log = log_with_long_names()

    log.add(B, "announced", "true")

    assert log.last.change.event.event_id == "true"
    snapshot_of(log.fold)  # raises if the snapshot cannot be read


def test_names_of_reporters_of_an_event_are_bounded_in_bytes() -> None:
    log = Log()

    for number in range(MAX_REPORTERS // 1000 + 10):
        reporter = vm(f"{number:03}" + "\N{GRINNING FACE}" * 250)
        log.add(reporter, "announced", resources=[A.name], after=0.001)

    (story,) = log.fold.events.open.values()
    size = sum(len(name.encode()) for name in story.reported)
    assert size > MAX_REPORTERS - 2000
    assert size <= MAX_REPORTERS


def test_events_that_are_over_do_not_count_as_open() -> None:
    log = Log()

    for number in range(MAX_OPEN_OF_ONE + 1):
        log.add(A, "announced", f"E{number}", after=0.001)
        log.add(A, "canceled", f"E{number}", after=0.001)

    assert not log.fold.events.open
    assert log.fold.figures.poison == {}


@pytest.mark.parametrize("seconds", [-1, 10 * 365 * 86_400 + 1, 2**64, 10**30])
def test_snapshot_is_written_when_a_duration_is_forged(seconds: int) -> None:
    log = Log()
    duration = f'duration_seconds":{seconds}'.encode()
    record = body(report(A, "announced", "E0", at=T0))
    log.read(record.replace(b'duration_seconds":9', duration))
    log.add(B, "announced", "E1")

    snapshot = snapshot_of(log.fold)

    assert log.fold.figures.poison == {"wrong_shape": 1}
    assert {wave.event_key for wave in snapshot.waves.values()} == {"e1"}


def test_vm_with_an_endless_heartbeat_interval_is_forgotten() -> None:
    log = Log()
    log.beat(A, interval=3e11)
    assert log.fold.silence.heard["sub/rg/web_0"].interval == LONGEST_INTERVAL

    for _ in range(3 * 864 + 2):
        log.wait(100)

    assert not log.fold.silence.heard


def test_thousands_of_silent_vms_are_all_notified() -> None:
    log = Log()
    vms = [
        replace(vm(f"vm-{number}", "", f"region-{number}"), resource_group=f"rg-{number}")
        for number in range(3000)
    ]
    log.beat(*vms)

    for _ in range(20):
        log.wait(100)

    assert len(log.notifications) == len(vms)


# ---- random fleets


def seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - not for cryptography


@pytest.mark.parametrize("seed", range(int(os.environ.get("NOTBEFORE_FLEETS", "40"))))
@pytest.mark.parametrize("group_by", random_fleets.GROUPINGS)
def test_random_fleet_is_notified_correctly_completely_and_in_order(
    group_by: tuple[str, ...],
    seed: int,
) -> None:
    plan = random_fleets.planned(seeded(seed))

    notifications = random_fleets.notified(plan, seeded(seed), group_by)

    assert list(random_fleets.wrong(plan, notifications)) == []
