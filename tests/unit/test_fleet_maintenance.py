"""The simulated VMs of a fleet: what they send is what an instance reads."""

from datetime import UTC, datetime
from typing import Any

from notbefore.fleet.merge import FINISHED, SCHEDULED, STARTED, Standing, Story
from notbefore.fleet.reading import Beat, Report, read
from support.fleet_maintenance import heartbeats, maintenance, message, scale_set

NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)
VMS = scale_set("web", 10)


def test_a_maintenance_goes_over_all_vms_each_once() -> None:
    events = maintenance(VMS, 4, NOW, 600.0)
    assert [len(event.resources) for event in events] == [4, 4, 2]
    assert {name for event in events for name in event.resources} == {vm.name for vm in VMS}
    assert [(event.not_before - NOW).total_seconds() for event in events] == [600.0, 605.0, 610.0]


def test_the_reports_of_all_vms_make_one_story() -> None:
    (event,) = maintenance(VMS, 10, NOW, 600.0)
    story = None
    steps: dict[Any, Standing] = {"announced": SCHEDULED, "started": STARTED, "finished": FINISHED}
    for kind, standing in steps.items():
        for vm in VMS:
            found = read(message(event.seen(vm, kind, NOW))[1])
            assert isinstance(found, Report)
            story = story or Story.begin(found)
            story.add(found)
        assert story is not None
        assert story.standing is standing
    assert story is not None
    assert {(one.notice, one.interruption) for one in story.measured.values()} == {(600.0, 2.0)}


def test_heartbeats_come_into_the_partition_of_the_scale_set() -> None:
    (event,) = maintenance(VMS, 10, NOW, 600.0)
    sent = [message(one) for one in heartbeats(VMS, NOW, 4.0)]
    assert {key for key, _ in sent} == {message(event.seen(VMS[0], "announced", NOW))[0]}
    found = [read(body) for _, body in sent]
    assert [(one.vm, one.interval) for one in found if isinstance(one, Beat)] == [(vm.name, 4.0) for vm in VMS]
