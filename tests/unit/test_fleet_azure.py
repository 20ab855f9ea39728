"""Azure also reports events: one test for each rule of the story, and random worlds."""

import os
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from notbefore.fleet.event_bounds import MAX_OPEN_OF_ONE
from notbefore.fleet.events import AZURE_VM_SECONDS
from notbefore.fleet.history import PastEvent
from notbefore.fleet.partition import Partition
from notbefore.fleet.shown_waves import coming
from notbefore.fleet.snapshot import Position, split_events
from support import azure_worlds
from support.azure import T0, at
from support.event_grid import as_cloud_event, encoded, message, resource_id
from support.fleet_log import EACH, LIMIT, WAVES, A, B, C, Log, snapshot_of, text_of_last
from support.fleet_records import vm

WAIT = EACH.group_wait


def past_of(log: Log) -> list[PastEvent]:
    return log.fold.state.past


# ---- Azure is a reporter, and no VM


def test_azure_alone_reports_an_event_from_its_beginning_to_its_end() -> None:
    log = Log()

    for status in ("Scheduled", "Started", "Completed"):
        log.azure(status)

    assert log.kinds == ["announced", "started", "finished"]
    assert log.last.change.reason == "azure_completed"
    assert log.last.change.outcome == "finished"
    assert log.last.facts.fleet_reported_by == 0
    assert log.last.facts.fleet_azure_status == "Completed"
    assert not log.fold.state.heard


def test_azure_is_not_counted_as_a_reporting_vm() -> None:
    log = Log()
    log.add(A, "announced")

    log.azure("Started")

    assert log.last.facts.fleet_reported_by == 1
    assert log.last.facts.fleet_azure_status == "Started"


def test_event_of_both_sources_is_announced_once() -> None:
    log = Log()

    log.azure("Scheduled", "event-1")
    log.add(A, "announced")
    log.add(B, "announced", resources=[A.name])

    assert log.kinds == ["announced"]
    assert log.fold.figures.first_notices == {"azure": 1}


# ---- Azure's end counts more than what VMs list


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        ("Completed", "finished", "azure_completed"),
        ("Canceled", "canceled", "azure_canceled"),
    ],
)
def test_azure_ends_an_event_that_vms_still_list(status: str, kind: str, reason: str) -> None:
    log = Log()
    log.add(A, "announced")
    log.add(B, "announced", resources=[A.name])

    log.azure(status)
    log.wait(WAIT)

    assert log.kinds == ["announced", kind]
    assert log.last.change.reason == reason


def test_event_that_azure_ended_never_opens_again() -> None:
    log = Log()
    log.add(A, "announced")
    log.azure("Canceled", after=500)
    log.wait(WAIT)

    log.add(A, "announced", reason="came_back", after=30)
    log.azure("Scheduled")
    log.azure("Started", at=at(502))
    log.wait(LIMIT)

    assert log.kinds == ["announced", "canceled", "finished"]
    assert log.last.change.reason == "corrected"
    assert not log.fold.events.open


def test_event_of_a_wave_stays_ended_by_azure_when_listed_again() -> None:
    log = Log(WAVES)
    log.add(A, "announced")
    log.azure("Canceled", after=20)

    log.add(A, "announced", reason="came_back")
    log.wait(WAVES.group_interval)

    assert log.kinds == ["announced", "canceled"]
    assert not log.fold.events.open


# ---- events whose end no one has reported


def test_event_that_no_vm_reports_stays_open() -> None:
    log = Log()
    log.azure("Scheduled")

    log.azure("Started", after=900)
    log.wait(60)

    assert log.kinds == ["announced", "started"]


def test_event_without_an_end_is_finished_as_far_as_known() -> None:
    log = Log()
    log.azure("Scheduled")
    log.azure("Started", after=900)

    log.wait(LIMIT + 60)

    assert log.kinds == ["announced", "started", "finished"]
    assert log.last.change.reason == "as_far_as_known"
    assert [past.ended_by for past in past_of(log)] == ["nobody"]


# ---- the wording is the VMs'


def test_wording_of_a_vm_replaces_that_of_azure_without_an_update() -> None:
    log = Log()
    log.azure("Scheduled", after=50, DurationInSeconds=30)
    log.add(A, "announced", at=at(2))

    log.azure("Scheduled", after=1, DurationInSeconds=30)
    log.wait(60)

    event = log.fold.events.open["sub/rg/event-1"].event
    assert log.kinds == ["announced"]
    assert event.duration == 9
    assert event.description == "As Azure words it."


def test_azure_changes_its_wording_without_an_update() -> None:
    log = Log()
    log.azure("Scheduled", DurationInSeconds=30)

    log.azure("Scheduled", DurationInSeconds=60)

    assert log.kinds == ["announced"]
    assert log.fold.events.open["sub/rg/event-1"].event.duration == 60


def test_wording_does_not_depend_on_the_order_of_the_sources() -> None:
    first = Log()
    first.add(A, "announced", at=at(1))
    first.azure("Scheduled", at=at(2))
    second = Log()
    second.azure("Scheduled", at=at(2))
    second.add(A, "announced", at=at(1))

    (story,) = first.fold.events.open.values()
    (other,) = second.fold.events.open.values()

    assert story.event == other.event


def test_newer_not_before_of_azure_is_an_update() -> None:
    log = Log()
    log.add(A, "announced")

    log.azure("Scheduled", not_before=at(1200))
    log.azure("Scheduled", not_before=at(900), at=at(0))

    assert log.kinds == ["announced", "updated"]
    assert log.last.change.not_before == at(1200)


def test_newer_type_and_vms_of_azure_are_an_update() -> None:
    log = Log()
    log.add(A, "announced")

    log.azure("Scheduled", EventType="Redeploy", Resources=[A.name, B.name])

    assert log.kinds == ["announced", "updated"]
    assert log.last.change.event.event_type == "Redeploy"
    assert log.last.change.event.resources == (A.name, B.name)


def test_empty_not_before_of_azure_is_no_update() -> None:
    log = Log()
    log.add(A, "announced")

    log.azure("Scheduled", NotBefore="")

    assert log.kinds == ["announced"]
    assert log.fold.events.open["sub/rg/event-1"].not_before == at(900)


# ---- an end waits for what the other source knows


def test_end_of_azure_waits_for_the_measured_interruption() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "started", after=900)

    log.azure("Completed")
    assert log.kinds == ["announced", "started"]

    log.add(A, "finished", interruption=4.2, after=5)

    assert log.kinds == ["announced", "started", "finished"]
    assert log.last.change.interruption == 4.2
    assert [past.ended_by for past in past_of(log)] == ["both"]


def test_end_of_azure_waits_at_most_for_group_wait() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "started", after=900)
    log.azure("Completed")

    log.azure("Completed", after=WAIT - 1)
    log.wait(1)

    assert log.kinds == ["announced", "started", "finished"]
    assert log.last.change.interruption is None
    assert [past.ended_by for past in past_of(log)] == ["azure"]


def test_unknown_end_waits_for_azure_when_azure_reported_the_event() -> None:
    log = Log()
    log.add(A, "announced")
    log.azure("Scheduled")
    log.add(A, "ended", after=1000)

    log.azure("Completed", after=WAIT - 1)

    assert log.kinds == ["announced", "finished"]


def test_unknown_end_does_not_wait_when_azure_is_silent() -> None:
    log = Log()
    log.add(A, "announced")

    log.add(A, "ended", after=1000)

    assert log.kinds == ["announced", "ended"]


# ---- corrections


def test_late_answer_of_azure_corrects_an_unknown_end() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "ended", after=1000)

    log.azure("Completed", after=600, at=at(990))
    log.wait(WAIT)

    assert log.kinds == ["announced", "ended", "finished"]
    assert log.last.change.reason == "corrected"
    assert log.last.facts.fleet_azure_status == "Completed"
    assert [past.outcome for past in past_of(log)] == ["unknown", "finished"]
    assert len({past.key for past in past_of(log)}) == 1
    assert log.fold.figures.ends == {"nobody": 1, "azure": 1}
    assert log.fold.figures.first_notices == {"vm": 1}


def test_old_started_of_azure_turns_an_unknown_end_into_a_finish() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "ended", after=1000)

    log.azure("Started", after=600, at=at(905))
    log.wait(WAIT)

    assert log.kinds == ["announced", "ended", "finished"]
    assert not log.fold.events.open


def test_new_started_of_azure_starts_an_event_after_its_cancellation() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "canceled", after=100)

    log.azure("Started", after=800)
    log.azure("Completed", after=5)
    log.wait(WAIT)

    assert log.kinds == ["announced", "canceled", "started", "finished"]


def test_canceled_after_a_start_finishes_and_is_a_contradiction() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "started", after=900)

    log.azure("Canceled")
    log.azure("Canceled")
    log.wait(WAIT)

    assert log.kinds == ["announced", "started", "finished"]
    assert log.fold.figures.contradictions == 1


def test_message_that_is_hours_late_opens_no_event() -> None:
    log = Log()

    log.azure("Scheduled", after=10 * 3600.0, at=at(0))
    log.azure("Started", at=at(900))
    log.azure("Completed", at=at(910))
    log.wait(60)

    assert log.kinds == ["ended", "finished"]
    assert not log.fold.events.open


def test_overdue_event_of_a_wave_continues_when_azure_postpones_it() -> None:
    log = Log(WAVES)
    log.azure("Scheduled")
    log.wait(WAIT)
    log.wait(900 + LIMIT + 60)

    log.azure("Scheduled", not_before=at(9000))
    log.wait(WAVES.group_interval)

    (story,) = log.fold.events.open.values()
    assert log.kinds[0] == "announced"
    assert "ended" not in log.kinds
    assert story.not_before == at(9000)


def test_postponed_event_is_announced_again_after_its_unknown_end() -> None:
    log = Log()
    log.azure("Scheduled")
    log.wait(900 + LIMIT + 60)

    log.azure("Scheduled", after=600, not_before=at(90_000))
    log.azure("Started", after=600)
    log.azure("Completed", after=60)

    assert log.kinds == ["announced", "ended", "announced", "started", "finished"]
    assert len({notification.change.id for notification in log.notifications}) == 5


@pytest.mark.parametrize("seconds", [0, 900])
def test_old_message_announces_no_event_again(seconds: float) -> None:
    log = Log()
    log.azure("Scheduled", not_before=at(9000))
    log.add(A, "ended", resources=["web_0"], after=1000)
    log.wait(WAIT)

    log.azure("Scheduled", at=at(seconds), not_before=at(9000))

    assert log.kinds == ["announced", "ended"]


# ---- the place


def test_place_of_azure_is_used_until_a_vm_reports_more() -> None:
    log = Log()
    log.azure("Scheduled", location="northeurope")
    (story,) = log.fold.events.open.values()
    place_of_azure = story.place

    peer = vm("web_9", zone="2", team="web")
    log.add(peer, "announced", resources=[A.name])

    assert place_of_azure.region == "northeurope"
    assert place_of_azure.scale_set == "web"
    assert story.place.region == "westeurope"
    assert story.place.zone == "2"
    assert story.place.tags == (("team", "web"),)


def test_place_of_a_heartbeat_is_used_for_an_event_of_azure() -> None:
    log = Log()
    log.beat(vm(A.name, zone="3", team="web"))

    log.azure("Scheduled")

    assert log.last.place.tags == (("team", "web"),)


# ---- repetitions, bounds, snapshots


@given(st.permutations(["Scheduled", "Started", "Completed", "Started", "Completed"]))
def test_last_outcome_does_not_depend_on_the_order_of_messages(statuses: list[str]) -> None:
    log = Log()
    times = {"Scheduled": 1, "Started": 900, "Completed": 910}

    for status in statuses:
        log.azure(status, after=2000, at=at(times[status]))
    log.wait(LIMIT + 100)

    assert log.last.change.outcome == "finished"
    assert not log.fold.events.open
    assert len([kind for kind in log.kinds if kind == "finished"]) == 1


def test_array_with_all_statuses_is_applied_in_one_step() -> None:
    log = Log()
    statuses = ("Scheduled", "Started", "Completed")

    log.read(encoded(*[message(status, at=at(number)) for number, status in enumerate(statuses)]))
    log.wait(WAIT)

    assert log.kinds == ["finished"]
    assert log.fold.figures.azure_messages == dict.fromkeys(statuses, 1)
    assert log.fold.figures.records == {"news": 1}


def test_other_messages_are_counted_as_skipped() -> None:
    log = Log()

    log.read(encoded(as_cloud_event(message("Started", at=at(0), ResourceType="ManagedCluster"))))

    assert log.kinds == []
    assert log.fold.figures.records == {"skipped": 1}
    assert log.fold.figures.azure_messages == {"skipped": 1}
    assert log.fold.figures.poison == {}


def test_unreadable_message_is_poison() -> None:
    log = Log()

    log.read(encoded(message("Started", at=at(0), EventId="")))

    assert log.fold.figures.poison == {"wrong_shape": 1}
    assert log.fold.figures.records == {"poison": 1}


def test_delay_of_messages_is_measured() -> None:
    log = Log()

    log.azure("Scheduled", after=100, at=at(40))

    assert log.fold.figures.azure_delays.sum == pytest.approx(60.0)


def test_azure_opens_more_events_than_one_vm() -> None:
    log = Log()

    for number in range(MAX_OPEN_OF_ONE + 10):
        log.azure("Scheduled", f"E{number}", after=0.001)

    assert log.fold.figures.poison == {}
    assert len(log.fold.events.open) == MAX_OPEN_OF_ONE + 10


def test_status_of_azure_survives_a_takeover() -> None:
    log = Log()
    log.add(A, "announced")
    log.add(A, "started", after=900)
    log.azure("Canceled", after=5)

    successor = log.taken_over()
    successor.wait(WAIT)
    last = successor.taken_over()
    last.add(A, "announced", reason="came_back", after=20)

    assert successor.kinds == ["finished"]
    assert last.kinds == []
    assert not last.fold.events.open


def test_preempt_that_azure_completed_deletes_its_vm() -> None:
    log = Log()
    log.beat(A)

    log.azure("Scheduled", EventType="Preempt")
    log.azure("Completed", after=40, EventType="Preempt")
    log.pass_time(2000, B)

    assert log.silent == []
    event_types = [notification.change.event.event_type for notification in log.notifications]
    assert event_types == ["Preempt", "Preempt"]


def test_event_of_azure_explains_the_silence_of_its_vm() -> None:
    log = Log()
    log.beat(A, B)
    log.azure("Started")

    log.pass_time(1500, B)

    assert log.silent == []


# ---- VMs without an agent


def test_vm_that_only_azure_names_has_no_agent() -> None:
    log = Log()
    log.beat(A)

    log.azure("Scheduled", Resources=[A.name, B.name, C.name])
    log.add(C, "announced", resources=[A.name, B.name, C.name])

    assert [azure_vm.name for azure_vm in log.fold.state.azure_vms.values()] == [B.name]


def test_vm_that_sends_a_heartbeat_has_an_agent() -> None:
    log = Log()
    log.azure("Scheduled")

    log.beat(A)

    assert not log.fold.state.azure_vms


def test_vm_that_azure_has_not_named_for_long_is_forgotten() -> None:
    log = Log()
    log.azure("Scheduled")
    log.azure("Completed")
    assert snapshot_of(log.fold).azure_vms

    log.wait(AZURE_VM_SECONDS + 100)

    assert not log.fold.state.azure_vms


# ---- the notice


@pytest.mark.parametrize(
    ("status", "notice"), [("Scheduled", 840.0), ("Started", 0.0), ("Canceled", None)]
)
def test_notice_of_azure_is_measured_at_its_first_message(
    status: str, notice: float | None
) -> None:
    log = Log()
    log.azure(status, after=60)
    log.azure("Completed", after=900)
    log.wait(WAIT)

    assert past_of(log)[-1].azure_notice == notice


# ---- identity


@pytest.mark.parametrize("kind", ["virtualMachines", "virtualMachineScaleSets", "availabilitySets"])
def test_azure_and_agents_report_one_event_for_any_resource_type(kind: str) -> None:
    log = Log()
    log.add(replace(A, scale_set=""), "announced")
    resource = resource_id(kind, "WEB_0", subscription="SUB", resource_group="RG")

    log.azure("Started", "event-1", resource=resource, Resources=["WEB_0"], after=900)

    assert log.kinds == ["announced", "started"]
    assert len(log.fold.events.open) == 1


# ---- random worlds


@pytest.mark.parametrize("seed", range(int(os.environ.get("NOTBEFORE_FLEETS", "40"))))
@pytest.mark.parametrize("sources", get_args(azure_worlds.Sources))
def test_random_world_is_notified_correctly_once_and_in_time(
    sources: azure_worlds.Sources, seed: int
) -> None:
    account = azure_worlds.account_of(seed, sources)

    assert account.wrong == []


def test_fold_gives_the_same_notifications_for_a_repeated_log() -> None:
    once = Log()
    twice = Log()

    for status in ("Scheduled", "Started", "Completed"):
        once.azure(status, after=10, at=at(10))
        twice.azure(status, after=10, at=at(10))
        twice.azure(status, after=10, at=at(10))

    ids = [notification.change.id for notification in once.notifications]
    assert once.kinds == twice.kinds
    assert [notification.change.id for notification in twice.notifications] == ids


def test_record_of_azure_advances_the_position() -> None:
    fold = Partition("0", EACH)

    fold.add(encoded(message("Started", at=at(0))), Position("7", 7, T0.timestamp()))

    assert fold.state.position.sequence == 7


# ---- one event in two partitions


def test_event_open_in_two_partitions_is_split() -> None:
    of_azure = Log()
    of_azure.azure("Scheduled", "event-1")
    of_azure.azure("Scheduled", "other")
    of_vms = Log()
    of_vms.add(A, "announced")

    split = split_events({"0": of_azure.fold.state, "3": of_vms.fold.state})

    assert split == {"sub/rg/event-1": ["0", "3"]}


def test_event_that_is_over_in_one_partition_is_not_split() -> None:
    of_azure = Log(WAVES)
    of_azure.azure("Canceled")
    of_vms = Log()
    of_vms.add(A, "announced")

    assert split_events({"0": of_azure.fold.state, "3": of_vms.fold.state}) == {}


def test_event_that_moved_to_an_added_partition_is_not_split() -> None:
    old = Log()
    old.add(A, "announced")
    old.fold.hub_has(1)
    old.fold.hub_has(2, (), old.now + 1)
    new = Log()
    new.add(A, "started", after=900)

    assert split_events({"0": old.fold.state, "1": new.fold.state}) == {}


# ---- shown


def test_wave_shows_who_reported_it_and_which_vms_have_no_agent() -> None:
    log = Log()
    log.azure("Scheduled", Resources=[A.name, B.name])
    log.add(A, "announced", resources=[A.name, B.name])

    (wave,) = coming(log.fold.state.waves.values(), at(60), log.fold.state.azure_vms.keys())

    assert wave.reporters == "Azure and 1 VM"
    assert wave.azure_status == "Scheduled"
    assert wave.without_agent == (B.name,)


def test_wave_of_azure_has_the_status_of_its_least_advanced_event() -> None:
    log = Log(WAVES)
    log.azure("Scheduled", "E0")
    log.azure("Scheduled", "E1", not_before=at(2000))
    log.wait(WAIT)
    log.azure("Started", "E0", after=900)
    log.azure("Completed", "E0", after=60)
    log.wait(WAVES.group_interval)
    status_before_the_end = log.last.facts.fleet_azure_status
    text = text_of_last(log).plain

    log.azure("Canceled", "E1", after=60)
    log.wait(WAVES.group_interval)

    assert status_before_the_end == "Scheduled"
    assert text.endswith("Reported by: Azure")
    assert log.last.change.kind == "finished"
    assert log.last.change.reason == "azure_completed"


def test_contradicted_end_is_not_explained_by_azure() -> None:
    log = Log()
    log.azure("Started")

    log.azure("Canceled")

    assert log.last.change.kind == "finished"
    assert log.last.change.reason == "gone_after_start"
    assert log.last.facts.fleet_azure_status == "Canceled"


def test_message_says_that_azure_reported_the_event() -> None:
    log = Log()
    log.azure("Scheduled")
    alone = text_of_last(log)
    log.add(A, "started", after=900)

    assert alone.plain.endswith("Reported by: Azure")
    assert text_of_last(log).plain.endswith("Reported by: Azure and 1 VM")
