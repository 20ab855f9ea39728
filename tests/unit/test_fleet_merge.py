"""Many VMs' reports of one event become one story, and each of its steps is notified once."""

import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from notbefore.core.change import LifecycleKind
from notbefore.core.document import Event
from notbefore.core.record import Vm
from notbefore.core.routing import Match, Route
from notbefore.fleet import notification
from notbefore.fleet.hub_records import Report, read
from notbefore.fleet.notification import Notification
from notbefore.fleet.shown_waves import ShownWave, coming
from notbefore.fleet.snapshot import FORM, compressed, read_snapshot
from notbefore.fleet.story import Standing, Story
from notbefore.fleet.wave import Wave, event_of_wave
from notbefore.fleet.waves import Grouping
from notbefore.wording.records import heartbeat_of, record_of
from support.azure import T0, at
from support.fleet_log import EACH, LIMIT, VMS, WAVES, A, B, C, D, Log, grouped, snapshot_of
from support.fleet_records import body, report, vm

A_DAY = 86_400


def read_report(*args: Any, **fields: Any) -> Report:
    """Return a VM's report as the fold reads it."""
    fields.setdefault("at", T0)
    record = read(body(report(*args, **fields)))
    assert isinstance(record, Report)
    return record


def merge(reports: Sequence[Report]) -> Story:
    story = Story.begin(reports[0])
    for each_report in reports:
        story.add(each_report)
    return story


def change_ids(notifications: Iterable[Notification]) -> list[str]:
    return [notification.change.id for notification in notifications]


def event_ids(notifications: Iterable[Notification]) -> list[str]:
    return [notification.change.event.event_id for notification in notifications]


def assert_ids_differ(log: Log) -> None:
    ids = change_ids(log.notifications)
    assert len(set(ids)) == len(ids)


def coming_waves(log: Log) -> tuple[ShownWave, ...]:
    return coming(log.fold.events.waves.open.values(), at(0))


KINDS: list[LifecycleKind] = ["announced", "updated", "started", "canceled", "finished", "ended"]
STEP = st.tuples(
    st.integers(0, 3),  # the VM that reports it
    st.sampled_from(KINDS),
    st.integers(0, 20),  # second
    st.sampled_from([600.0, 900.0]),  # seconds of notice
    st.booleans(),  # an announced event came back
)


@given(
    st.lists(STEP, min_size=1, max_size=12),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
)
def test_story_does_not_depend_on_order_or_repetition(
    steps: list[tuple[int, LifecycleKind, int, float, bool]],
    dice: random.Random,
    times: int,
) -> None:
    reporters: list[Vm] = []
    for number, affected in enumerate(VMS):
        reporters.append(vm(affected.name, zone=str(number % 2), team="web", number=str(number)))
    unique: dict[tuple[str, str], Report] = {}
    for number, kind, second, notice, is_listed_again in steps:
        marks = {}
        if is_listed_again and kind == "announced":
            marks["reason"] = "came_back"
        vm_report = read_report(
            reporters[number],
            kind,
            at=at(second),
            resources=[A.name, B.name],
            notice=notice,
            id=f"{number}-{kind}-{second}",
            **marks,
        )
        unique[vm_report.vm, vm_report.change_id] = vm_report  # a VM repeats a step unchanged
    repeated = list(unique.values()) * times
    dice.shuffle(repeated)

    story = merge(list(unique.values()))
    shuffled_story = merge(repeated)

    # the sender is the VM that was heard from first
    assert replace(shuffled_story, sender=story.sender) == story


# ---- one event


def came_back(number: int = 1) -> dict[str, Any]:
    """Return the fields of a report of an event that was gone and is listed again.

    The change id is the same on each VM.
    """
    return {"reason": "came_back", "id": f"again-{number}"}


def play(log: Log, affected: str, script: str) -> None:
    """Add the reports of a script, one a second.

    A step is a VM, a kind, and marks. ``came_back``: the EventId is listed again. ``again``: the
    report is about the event that came back. ``@3``: it was made at second 3, and repeated now.
    """
    vms = {"A": A, "B": B, "C": C, "D": D}
    resources = [vms[name].name for name in affected.split()]

    for step in script.split(", "):
        name, kind, *marks = step.split()
        fields: dict[str, Any] = {"resources": resources}
        if kind == "came_back":
            kind = "announced"
            fields |= came_back()
        for mark in marks:
            if mark == "again":
                fields["id"] = f"again-{kind}"
            else:
                fields["at"] = at(float(mark.removeprefix("@")))
        log.add(vms[name], kind, **fields)


@pytest.mark.parametrize(
    ("affected", "script", "notified"),
    [
        pytest.param(
            "A",
            "B announced, A announced, C announced, C started",
            ["announced", "started"],
            id="start-seen-by-a-peer",
        ),
        pytest.param(
            "A",
            "A announced, A canceled, B started, B finished",
            ["announced", "canceled", "started", "finished"],
            id="start-after-it-looked-canceled",
        ),
        pytest.param(
            "A B",
            "A finished, B ended",
            ["finished"],
            id="finish-is-stronger-than-unknown-end",
        ),
        pytest.param(
            "A B",
            "A announced, A canceled, B ended",
            ["announced", "canceled"],
            id="cancellation-is-stronger-than-unknown-end",
        ),
        pytest.param(
            "A B",
            "A announced, A ended, B ended",
            ["announced", "ended"],
            id="unknown-end",
        ),
        pytest.param(
            "A B",
            "B announced, A canceled, B finished",
            ["announced", "finished"],
            id="finish-is-stronger-than-cancellation",
        ),
        pytest.param(
            "A B",
            "A announced, B announced, A finished, B started, C finished",
            ["announced", "started"],
            id="one-affected-vm-has-not-finished",
        ),
        pytest.param(
            "A B",
            "A announced, B started, C finished, A finished, B finished",
            ["announced", "started", "finished"],
            id="both-affected-vms-have-finished",
        ),
    ],
)
def test_story_takes_the_strongest_claim(affected: str, script: str, notified: list[str]) -> None:
    log = Log()

    play(log, affected, script)

    assert log.kinds == notified
    assert_ids_differ(log)


BACK_ON_A = "A announced, B announced, A canceled, A came_back"
BACK_AMONG_FOUR = "A announced, B announced, C announced, D announced, A canceled, A came_back"


@pytest.mark.parametrize(
    ("affected", "script", "notified"),
    [
        pytest.param(
            "A",
            "A announced, A canceled, A came_back, A canceled again, A came_back @3",
            ["announced", "canceled", "announced", "canceled"],
            id="late-repetition-opens-nothing",
        ),
        pytest.param(
            "A",
            f"{BACK_ON_A}, B canceled, B came_back, A canceled @3, B canceled @3",
            ["announced", "canceled", "announced"],
            id="late-end-of-the-first-event-ends-nothing",
        ),
        pytest.param(
            "A B",
            f"{BACK_AMONG_FOUR}, A started, B started, C started, D started, B finished",
            ["announced", "started"],
            id="one-vm-lost-sight-and-has-not-finished",
        ),
        pytest.param(
            "A B",
            f"{BACK_AMONG_FOUR}, A started, B started, B finished, A finished",
            ["announced", "started", "finished"],
            id="one-vm-lost-sight-and-has-finished",
        ),
        pytest.param(
            "A B",
            f"{BACK_ON_A}, A canceled @3, B announced, A canceled again, A came_back @4",
            ["announced"],
            id="repetitions-end-nothing",
        ),
        pytest.param(
            "A B",
            f"{BACK_ON_A}, B announced, A canceled again, A came_back @4, B canceled",
            ["announced", "canceled"],
            id="repetition-does-not-hide-the-end",
        ),
    ],
)
def test_repeated_reports_change_nothing_when_event_came_back(
    affected: str,
    script: str,
    notified: list[str],
) -> None:
    log = Log()

    play(log, affected, script)

    assert log.kinds == notified
    assert_ids_differ(log)


def test_preempt_is_over_when_any_vm_reports_the_end() -> None:
    log = Log()
    log.add(A, "announced", event_type="Preempt")
    log.add(B, "announced", resources=[A.name], event_type="Preempt")

    log.add(B, "finished", resources=[A.name], event_type="Preempt")

    assert log.kinds == ["announced", "finished"]


def test_started_event_is_finished_as_far_as_known_after_limit() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "started")
    log.wait(900 + LIMIT - 60)
    assert log.kinds == ["announced", "started"]

    log.wait(200)

    assert log.kinds == ["announced", "started", "finished"]
    assert log.last.change.reason == "as_far_as_known"


def test_unknown_end_is_late_when_event_is_closed() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "started")
    log.wait(900 + LIMIT + 200)
    notified = list(log.kinds)

    log.add(B, "ended", resources=[A.name], after=20 * A_DAY)  # the VM was off

    assert log.kinds == notified
    assert log.fold.figures.records["late"] == 1


def test_event_reopens_when_it_starts_after_limit() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "updated", not_before=at(1200))
    log.wait(1200 + LIMIT + 60)
    assert log.kinds == ["announced", "updated", "ended"]

    log.add(B, "started", resources=[A.name])
    log.add(B, "updated", resources=[A.name, C.name])
    log.add(B, "finished")

    assert log.kinds[3:] == ["started", "updated", "finished"]
    reasons = [notification.change.reason for notification in log.notifications[3:]]
    assert reasons == ["corrected", "content_changed", "gone_after_start"]
    assert_ids_differ(log)


def test_event_given_up_may_start_while_its_wave_is_open() -> None:
    log = Log(WAVES)
    log.add(A, "announced")
    log.wait(20)
    log.wait(900 + LIMIT + 60)  # the end of the wave waits for other VMs

    log.add(A, "started")
    assert log.kinds == ["announced", "started"]
    log.add(A, "finished")
    log.wait(400)

    assert log.kinds == ["announced", "started", "finished"]
    assert log.last.change.reason == "gone_after_start"


def test_fold_skips_records_of_a_fleet() -> None:
    log = Log()
    log.add(A, "announced")

    log.read(body(record_of(log.last.change, log.last.vm, fleet=log.last.facts)))

    assert log.fold.figures.records == {"news": 1, "skipped": 1}


def test_event_stays_open_while_heartbeats_list_it() -> None:
    log = Log()
    log.add(A, "announced")

    for _ in range(4):
        log.wait(LIMIT / 2)
        log.read(body(heartbeat_of(A, ("Event-1",), "1", at(0), 300.0)))

    assert log.kinds == ["announced"]


def test_event_ends_when_heartbeats_no_longer_list_it() -> None:
    log = Log()
    log.add(A, "announced")
    log.wait(LIMIT / 2)
    log.read(body(heartbeat_of(A, ("Event-1",), "1", at(0), 300.0)))

    log.wait(900 + LIMIT + 60)

    assert log.kinds == ["announced", "ended"]


def test_wave_continues_when_its_event_comes_back() -> None:
    log = Log(WAVES)
    log.add(A, "announced", "E0")
    log.wait(10)
    log.add(A, "canceled", "E0")
    log.add(A, "announced", "E0", after=5, **came_back())
    log.add(A, "canceled", "E0", at=at(12))  # repeated
    log.wait(400)
    assert log.kinds == ["announced"]

    log.add(A, "started", "E0", id="again-started")
    log.add(A, "finished", "E0", id="again-finished")
    log.wait(400)

    assert log.kinds == ["announced", "started", "finished"]
    assert [past.nth for past in log.fold.state.past] == [0, 1]


def log_with_event_in_another_wave() -> Log:
    """Return a log whose event E0 was in the wave of reboots, and came back in that of freezes."""
    log = Log(WAVES)
    log.add(C, "announced", "E2", event_type="Freeze")
    log.add(A, "announced", "E0")
    log.add(B, "announced", "E1")
    log.wait(10)
    log.add(A, "canceled", "E0")
    log.add(A, "announced", "E0", event_type="Freeze", **came_back())
    log.wait(300)
    return log


def test_event_leaves_its_wave_when_it_comes_back_in_another() -> None:
    log = log_with_event_in_another_wave()
    assert log.kinds == ["announced", "announced", "updated", "updated"]

    successor = log.taken_over()
    successor.add(B, "canceled", "E1")
    successor.wait(400)

    assert successor.kinds == ["canceled"]
    assert not successor.last.change.not_before_changed
    assert successor.fold.events.open.keys() == {"sub/rg/e0", "sub/rg/e2"}


def test_event_starts_the_wave_in_which_it_came_back() -> None:
    log = log_with_event_in_another_wave().taken_over()

    log.add(A, "started", "E0", event_type="Freeze", id="again-started")

    assert log.kinds == ["started"]
    assert log.last.facts.fleet_events == 2


def test_moved_not_before_is_notified_once() -> None:
    log = Log()
    later = at(7200)
    log.add(A, "announced")

    for reporter in (A, B, C):
        log.add(reporter, "updated", resources=[A.name], not_before=later)

    assert log.kinds == ["announced", "updated"]
    assert log.last.change.not_before == later


# ---- where its VMs are

WEB_1 = vm("a", zone="1", Team="web", role="x")
WEB_2 = vm("b", "WEB", zone="2", team="web", role="y")
DATA_3 = vm("c", zone="3", team="data")
WEB_NAMES = [WEB_1.name, WEB_2.name]


def test_place_comes_from_a_peer_until_an_affected_vm_reports() -> None:
    log = Log()

    log.add(DATA_3, "announced", resources=WEB_NAMES)

    assert log.last.vm.zone == "3"
    assert log.last.vm.tags == {"team": "data"}


def test_place_comes_from_the_affected_vm_once_it_reports() -> None:
    log = Log()
    log.add(DATA_3, "announced", resources=WEB_NAMES)
    log.add(WEB_1, "announced", resources=WEB_NAMES)

    log.add(WEB_1, "started", resources=WEB_NAMES)

    assert log.last.vm.scale_set == "web"
    assert log.last.vm.zone == "1"
    assert log.last.vm.tags == {"team": "web", "role": "x"}


def test_place_has_the_values_that_affected_vms_have_in_common() -> None:
    log = Log()
    log.add(DATA_3, "announced", resources=WEB_NAMES)
    log.add(WEB_1, "started", resources=WEB_NAMES)
    log.add(WEB_2, "started", resources=WEB_NAMES)

    log.add(WEB_1, "finished", resources=WEB_NAMES)
    log.add(WEB_2, "finished", resources=WEB_NAMES)

    assert log.kinds == ["announced", "started", "finished"]
    assert log.last.vm.scale_set == "WEB"  # names differ in case only
    assert log.last.vm.zone == ""
    assert log.last.vm.tags == {"team": "web"}


def test_wave_is_routed_by_every_place_with_other_routes() -> None:
    routes = (Route(Match(tags={"team": ("web",)}), ("web",)), Route(Match(), ("rest",)))
    log = Log(grouped(routes=routes))
    log.add(DATA_3, "announced", resources=WEB_NAMES)
    log.add(WEB_1, "announced", resources=WEB_NAMES)

    log.add(WEB_2, "started", resources=WEB_NAMES)

    tags = [place.tags for place in log.last.routed]
    assert tags == [{"team": "data"}, {"team": "web", "role": "x"}]


def test_place_follows_event_to_another_vm() -> None:
    left = vm("a", zone="1", team="web")
    joined = vm("b", zone="2", team="data")
    log = Log()
    log.add(left, "announced")
    log.add(joined, "announced", resources=[left.name])
    log.add(joined, "updated", resources=[joined.name])
    log.add(left, "updated", resources=[joined.name])

    log.add(joined, "started")

    assert log.kinds == ["announced", "updated", "started"]
    assert log.last.vm.zone == "2"
    assert log.last.vm.tags == {"team": "data"}


def test_waves_are_grouped_by_tag() -> None:
    log = Log(grouped(("tags.Team", "event_type"), 10.0, 300.0))
    log.add(vm("vm_0", team="web"), "announced", "E0")
    log.add(vm("vm_1", team="data"), "announced", "E1")
    log.add(vm("vm_2", team="web"), "announced", "E2")
    log.add(vm("vm_3"), "announced", "E3")

    log.wait(10)

    web, data, untagged = log.notifications
    assert web.vm.tags == {"team": "web"}
    assert web.facts.fleet_events == 2
    assert data.vm.tags == {"team": "data"}
    assert data.facts.fleet_events == 1
    assert untagged.vm.tags == {}
    assert untagged.facts.fleet_events == 1


def test_event_stays_in_its_wave_when_its_tags_become_known() -> None:
    log = Log(grouped(("tags.team", "scale_set"), 10.0, 300.0))
    tagged = vm("vm_0", team="web")
    log.add(B, "announced", resources=[tagged.name])
    log.wait(10)

    log.add(tagged, "announced")
    log.add(tagged, "started")
    log.add(tagged, "finished")
    log.wait(301)

    assert log.kinds == ["announced", "started", "finished"]
    assert len(set(event_ids(log.notifications))) == 1


# ---- waves


def announce_three(log: Log) -> None:
    """Announce E0, E1 and E2, one for each of three VMs, until the wave is notified."""
    for number, affected in enumerate(VMS[:3]):
        log.add(affected, "announced", f"E{number}")
    log.wait(10)


def test_wave_waits_for_more_events_before_its_first_notification() -> None:
    log = Log(WAVES)
    for number, affected in enumerate(VMS[:3]):
        log.add(affected, "announced", f"E{number}")
    assert log.kinds == []

    log.wait(10)

    assert log.kinds == ["announced"]
    assert log.last.facts.fleet_events == 3
    assert log.last.facts.fleet_vms == 3
    assert log.last.vm.scale_set == "web"


def test_wave_adds_later_events_in_a_digest() -> None:
    log = Log(WAVES)
    announce_three(log)
    log.add(vm(D.name, "WEB"), "announced", "E3")
    log.wait(250)
    assert log.kinds == ["announced"]

    log.wait(60)

    assert log.kinds == ["announced", "updated"]
    assert log.last.facts.fleet_events == 4


def test_wave_starts_with_its_first_event() -> None:
    log = Log(WAVES)
    announce_three(log)

    log.add(A, "started", "E0")

    assert log.kinds == ["announced", "started"]


def test_wave_finishes_once_all_its_events_have_finished() -> None:
    log = Log(WAVES)
    announce_three(log)
    log.add(A, "started", "E0")
    log.add(A, "finished", "E0")
    for number, affected in enumerate(VMS[1:3], start=1):
        log.add(affected, "started", f"E{number}")
        log.add(affected, "finished", f"E{number}", interruption=9.0 - number)
    assert log.kinds == ["announced", "started"]

    log.wait(301)

    assert log.kinds == ["announced", "started", "finished"]
    assert log.last.change.interruption == 8.0
    assert log.last.change.event.event_status == "Started"
    assert log.last.change.ahead_seconds is None
    assert len(set(event_ids(log.notifications))) == 1
    assert not log.fold.events.waves.open


@pytest.mark.parametrize("pause", [0.5, 4.0])
def test_short_events_are_one_wave_that_is_notified_while_more_come(pause: float) -> None:
    log = Log(WAVES)

    for number in range(12):
        log.add(A, "announced", f"E{number}", after=pause)
        # the report of a peer changes only the place
        log.add(B, "announced", f"E{number}", resources=[A.name], after=8.0 - pause)
        log.add(A, "canceled", f"E{number}", after=pause)
    assert log.kinds[:1] == ["announced"]
    log.wait(11)  # the end does not wait for the digest

    assert log.kinds == ["announced", "canceled"]
    assert log.last.facts.fleet_events == 12


def test_coming_wave_counts_its_events_that_are_over() -> None:
    log = Log(WAVES)
    for event_id in ("E0", "E1"):
        log.add(A, "announced", event_id)
        log.add(A, "started", event_id)

    log.add(A, "finished", "E0")

    (wave,) = coming_waves(log)
    assert wave.status == "started"
    assert wave.events == 2
    assert wave.over == 1


def test_wave_is_not_coming_when_only_its_notification_waits() -> None:
    log = Log(WAVES)
    log.add(A, "announced", "E0")
    log.add(A, "started", "E0")

    log.add(A, "finished", "E0")

    assert log.fold.events.waves.open
    assert coming_waves(log) == ()


@pytest.mark.parametrize(
    ("first_end", "second_end", "notified"),
    [
        ("finished", "canceled", "finished"),
        ("finished", "ended", "ended"),
        ("canceled", "ended", "ended"),
    ],
)
def test_wave_ends_with_the_least_known_end(first_end: str, second_end: str, notified: str) -> None:
    log = Log(WAVES)
    log.add(A, "announced", "E0")
    log.add(A, first_end, "E0")
    log.add(A, "announced", "E1")
    log.add(A, second_end, "E1")

    log.wait(400)

    assert log.kinds[-1] == notified


def test_wave_reopens_when_a_canceled_event_starts() -> None:
    log = Log(WAVES)
    log.add(A, "announced", "E0")
    log.add(A, "announced", "E1")
    log.wait(10)
    log.add(A, "canceled", "E0")
    log.add(A, "started", "E1")
    log.add(A, "finished", "E1")
    log.wait(400)
    assert log.kinds == ["announced", "started", "finished"]

    log.add(B, "started", "E0", resources=[A.name])
    log.wait(10)
    log.add(B, "finished", "E0", resources=[A.name])
    log.wait(400)

    assert log.kinds[3:] == ["started", "finished"]
    assert_ids_differ(log)


# ---- snapshots

OTHER_GROUP = [replace(vm, resource_group="other") for vm in (A, B)]  # with the same EventIds
TAKEOVER_STEP = st.tuples(
    st.sampled_from([A, B, *OTHER_GROUP]),  # the VM that reports
    st.sampled_from([*KINDS, "came back"]),
    st.integers(0, 1),  # the number of the event
    st.sampled_from([0.0, 1.0, 40.0, 400.0]),  # seconds after the previous report
    st.sampled_from([0.0, 5.0, 1000.0]),  # seconds by which it is late
    st.booleans(),  # another instance takes over before it
)


def take_over(log: Log) -> Log:
    """Return the log as another instance continues it, with the notifications so far."""
    continued = log.taken_over()
    continued.notifications = log.notifications
    return continued


@given(st.lists(TAKEOVER_STEP, max_size=30), st.sampled_from([EACH, WAVES]))
def test_takeover_changes_no_notification(
    steps: list[tuple[Vm, Any, int, float, float, bool]], grouping: Grouping
) -> None:
    uninterrupted = Log(grouping)
    taken_over = Log(grouping)

    for number, (reporter, step, event, after, late, is_taken_over) in enumerate(steps):
        if is_taken_over:
            taken_over = take_over(taken_over)

        kind = step
        fields: dict[str, Any] = {"id": f"{event}-{kind}-{number % 3}"}
        if step == "came back":
            kind = "announced"
            fields = came_back(number % 3)
        fields["resources"] = [A.name, B.name]
        fields["at"] = datetime.fromtimestamp(uninterrupted.now + after - late, UTC)

        uninterrupted.add(reporter, kind, f"E{event}", after=after, **fields)
        taken_over.add(reporter, kind, f"E{event}", after=after, **fields)
    for log in (uninterrupted, taken_over):
        log.wait(20_000)
        log.wait(20_000)

    changes = [notification.change for notification in uninterrupted.notifications]
    assert [notification.change for notification in taken_over.notifications] == changes
    assert_ids_differ(uninterrupted)
    assert uninterrupted.fold.figures.errors.total() == 0
    assert not uninterrupted.fold.events.open


def test_records_before_the_snapshot_are_not_notified_again() -> None:
    log = Log()
    log.add(A, "announced")
    continued = log.taken_over()

    continued.sequence = 0
    continued.add(A, "announced", after=0)

    assert continued.notifications == []


def snapshot_with_event() -> bytes:
    log = Log()
    log.add(A, "announced")
    return compressed(log.fold.snapshot(0.0))


@pytest.mark.parametrize("length", [0, 1, 20, -1])
def test_truncated_snapshot_is_refused(length: int) -> None:
    truncated = snapshot_with_event()[:length]

    with pytest.raises(ValueError, match="it is cut off"):
        read_snapshot(truncated)


def test_damaged_snapshot_is_refused() -> None:
    snapshot = snapshot_with_event()
    damaged = snapshot[:30] + b"\xff" + snapshot[31:]

    with pytest.raises(ValueError, match="while decompressing"):
        read_snapshot(damaged)


def test_foreign_bytes_are_refused_as_snapshot() -> None:
    with pytest.raises(ValueError, match="while decompressing"):
        read_snapshot(b"not a snapshot")


def test_snapshot_of_another_form_is_refused() -> None:
    newer = replace(snapshot_of(Log().fold), form=FORM + 1)

    with pytest.raises(ValueError, match=f"form {FORM + 1}"):
        read_snapshot(compressed(msgspec.msgpack.encode(newer)))


def test_deleted_records_are_counted_as_missing() -> None:
    log = Log()

    for event_id in ("E0", "E1", "E2"):
        log.add(A, "announced", event_id)
        log.sequence += 5

    assert log.fold.figures.missing == 10


def test_fold_continues_when_the_hub_was_created_again() -> None:
    log = Log()
    log.sequence = 10
    log.add(A, "announced", "E0")

    log.sequence = 0
    log.add(A, "started", "E0")
    log.add(A, "announced", "E1")

    assert log.kinds == ["announced", "started", "announced"]
    assert log.fold.state.position.sequence == 1


# ---- records that cannot be used

READABLE = body(report(A, "announced", at=T0))
TIME = b"2026-03-01T12:00:00.000Z"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "not_json"),
        (READABLE.replace(b":00.000Z", b":00.000"), "wrong_shape"),
        (READABLE.replace(TIME, b"0001-01-01T00:00:00+14:00"), "wrong_shape"),
        (READABLE.replace(b'event.type":"Reboot"', b'event.type":""'), "wrong_shape"),
        (READABLE.replace(b'status":"Scheduled"', b'status":""'), "wrong_shape"),
        (b'{"x": ' + b"[" * 100_000, "not_json"),
        (b'{"type": "com.example.order", "data": {}}', "foreign"),
        (b'{"type": "notbefore.scheduled_event.started.v2", "data": {}}', "newer"),
        (b'{"type": "notbefore.scheduled_event.started.v1", "data": {}}', "wrong_shape"),
        (b'{"type": "notbefore.heartbeat.v1", "data": {"time": 3}}', "wrong_shape"),
        (b" " * (1024 * 1024 + 1), "too_large"),
    ],
)
def test_unreadable_record_is_counted_and_logged(
    data: bytes,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log()

    log.read(data)
    log.add(A, "announced")

    assert log.fold.figures.poison == {reason: 1}
    assert f"partition 0, sequence number 0: a record is not used ({reason}: " in caplog.text
    assert log.kinds == ["announced"]


def test_record_is_set_aside_when_the_fold_fails_on_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add = Story.add

    def fail_on_e1(story: Story, each_report: Report) -> bool:
        if each_report.event_id == "E1":
            raise KeyError("unforeseen")
        return add(story, each_report)

    monkeypatch.setattr(Story, "add", fail_on_e1)
    log = Log()

    for event_id in ("E0", "E1", "E2"):
        log.add(A, "announced", event_id)

    assert event_ids(log.notifications) == ["E0", "E2"]
    assert log.fold.figures.poison == {"failed": 1}
    assert log.fold.figures.errors == {"fold": 1}
    place = "sequence number 1: a record is not used"
    reason = "(failed: please report it: KeyError: 'unfore"
    assert f"{place} {reason}" in caplog.text


def break_wave_of_e0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the notification of the wave that contains E0 fail."""

    def fail_on_e0(wave: Wave, standing: Standing) -> Event:
        if "e0" in wave.stories:
            raise KeyError("unforeseen")
        return event_of_wave(wave, standing)

    monkeypatch.setattr(notification, "event_of_wave", fail_on_e0)


def test_failing_wave_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    break_wave_of_e0(monkeypatch)
    log = Log()
    log.add(A, "announced", "E0", after=0)
    log.add(A, "announced", "E1", after=0)

    log.wait(1)
    log.wait(1)

    assert event_ids(log.notifications) == ["E1"]
    assert log.fold.figures.errors == {"fold": 1}


def test_failed_wave_notifies_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    break_wave_of_e0(monkeypatch)
    log = Log()
    log.add(A, "announced", "E0")
    assert log.kinds == []

    monkeypatch.undo()
    log.add(A, "started", "E0")

    assert log.kinds == ["started"]


def test_report_counts_when_another_clock_is_ahead() -> None:
    log = Log()
    log.add(B, "announced")
    log.add(B, "canceled")
    log.wait(60)
    ahead = at(log.now - T0.timestamp() + 40)
    log.add(A, "announced", resources=[B.name], reason="came_back", id="again", at=ahead)

    log.add(B, "started", id="started-again", after=10)

    assert log.kinds[-1] == "started"


def log_with_overdue_events(number: int) -> Log:
    """Return a log at a time at which its events are overdue, and the fold has not ended them."""
    log = Log(WAVES)
    for event in range(number):
        log.add(A, "announced", f"E{event}")
    log.now += 900 + 2 * LIMIT
    return log


def test_fold_ends_overdue_events_in_chunks() -> None:
    log = log_with_overdue_events(20)

    chunks = 0
    while log.fold.is_due(log.now):
        log.notifications += log.fold.advance_chunk(log.now)
        chunks += 1

    assert chunks > 2
    assert log.kinds == log_with_overdue_events(20).wait(0)


def test_chunk_leaves_other_overdue_events_open() -> None:
    log = log_with_overdue_events(20)

    log.fold.advance_chunk(log.now)

    standings = [story.standing for story in log.fold.events.open.values()]
    assert Standing.ENDED in standings
    assert Standing.SCHEDULED in standings
