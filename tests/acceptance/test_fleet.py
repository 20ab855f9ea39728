"""``notbefore fleet``: the installed command reads the tests' Event Hub, and notifies a webhook."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notbefore.core.change import LIFECYCLE_KINDS
from support.agent import eventually, notbefore
from support.azurite import Azurite
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.json_output import parsed_output
from support.peers import Answer, HttpPeer

A = vm("web_0")
B = vm("web_1")
C = vm("web_2")
SETS = [
    vm(f"{name}_0", scale_set=name) for name in ("web", "data", "batch", "cache", "queue", "front")
]
PARTITIONS = 4  # of the hub of these tests
RECORDS = 'notbefore_fleet_records_total{result="%s"}'


def bodies(hook: HttpPeer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in hook.requests]


def kinds(hook: HttpPeer) -> list[str]:
    return [body["azure.scheduled_event.change"] for body in bodies(hook)]


def ids(hook: HttpPeer) -> list[str]:
    return [request.headers["x-notbefore-delivery-id"] for request in hook.requests]


def accepted(hook: HttpPeer) -> list[str]:
    return [
        request.headers["x-notbefore-delivery-id"]
        for request in hook.requests
        if request.status == 200
    ]


def test_step_of_an_event_is_notified_once_when_three_vms_report_it(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    with RunningFleet(write_fleet_config(tmp_path, hub, hook.url), tmp_path / "state") as fleet:
        steps = [step for step in LIFECYCLE_KINDS if step in {"announced", "started", "finished"}]
        for number, step in enumerate(steps, start=1):
            send(hub, [report(one, step, resources=[A.name]) for one in (B, A, C)])
            eventually(lambda: kinds(hook) == steps[:number])
        counted = ("news", "known", "late")

        eventually(lambda: sum(fleet.metric(RECORDS % one) or 0 for one in counted) == 9)
        assert kinds(hook) == ["announced", "started", "finished"]

        last = bodies(hook)[-1]

        assert last["azure.scheduled_event.id"] == "EVENT-1"
        assert last["azure.scheduled_event.fleet.reported_by"] == 3
        assert last["azure.scheduled_event.outcome"] == "finished"
        assert fleet.json("/api/v1/fleet/events")["waves"] == []

        hub.order("freeze")  # its connections stay open
        eventually(
            lambda: "no answer in time" in fleet.json("/api/v1/fleet/events")["trouble"],
            patience=60,
        )
        assert fleet.stop() == 0


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[Azurite]:
    with Azurite(tmp_path) as running:
        yield running


def shared(directory: Path, hub: Hub, hook: HttpPeer, blobs: Azurite, **fleet: Any) -> Path:
    """A configuration for several instances, which look for partitions each second."""
    checkpoints = {"connection_string": blobs.connection_string, "container": "notbefore"}
    quick = {"rebalance": "1s", "takeover": "60s"}
    return write_fleet_config(directory, hub, hook.url, checkpoints=checkpoints, **quick, **fleet)


def test_killed_instance_has_its_partitions_back_before_takeover(
    hub: Hub, hook: HttpPeer, blobs: Azurite, tmp_path: Path
) -> None:
    config = shared(tmp_path, hub, hook, blobs)  # its takeover is a minute
    with RunningFleet(config, tmp_path / "one") as killed:
        eventually(lambda: killed.metric("notbefore_fleet_partitions") == PARTITIONS)

        killed.process.kill()
        killed.process.wait()

    with RunningFleet(config, tmp_path / "one") as restarted:
        eventually(
            lambda: restarted.metric("notbefore_fleet_partitions") == PARTITIONS, patience=40
        )


def test_any_instance_shows_the_whole_fleet_with_the_age_of_its_data(
    hub: Hub, hook: HttpPeer, blobs: Azurite, tmp_path: Path
) -> None:
    config = shared(tmp_path, hub, hook, blobs)
    with (
        RunningFleet(config, tmp_path / "one") as one,
        RunningFleet(config, tmp_path / "two") as two,
    ):
        eventually(
            lambda: (
                (one.metric("notbefore_fleet_partitions"), two.metric("notbefore_fleet_partitions"))
                == (2, 2)
            )
        )

        send(hub, [report(who, "announced", f"E-{who.scale_set}") for who in SETS])
        for instance in (one, two):
            eventually(lambda: len(instance.json("/api/v1/fleet/events")["waves"]) == len(SETS))
            found = instance.json("/api/v1/fleet/events?scale_set=data")
            assert [wave["event_id"] for wave in found["waves"]] == ["E-data"]
            ages = [part["age"] for part in found["partitions"]]
            assert len(ages) == 4
            assert ages.count(None) == 2


def test_muted_event_is_not_notified_nor_is_its_end(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    config = write_fleet_config(tmp_path, hub, hook.url)
    state = tmp_path / "state"
    mute = ("fleet", "mute", config, "--state-dir", state)
    muted = (*mute, "--match", "scale_set=data", "--for", "1h", "--comment", "moves today")

    refused = notbefore(*muted)

    # made by root it would be of no use to the service
    assert refused.returncode == 1
    assert not state.exists()
    assert "start the instance first" in refused.stderr

    with RunningFleet(config, state) as fleet:
        eventually((state / "partitions").exists)
        assert notbefore(*muted).returncode == 0
        (listed,) = parsed_output("fleet mute", notbefore(*mute, "--json").stdout)
        assert listed["match"] == {"scale_set": "data"}

        fleet.stop()
    with RunningFleet(config, state) as fleet:
        send(hub, [report(A, "announced", "E-web"), report(SETS[1], "announced", "E-data")])
        send(hub, [report(SETS[1], "canceled", "E-data"), report(A, "canceled", "E-web")])

        eventually(lambda: len(fleet.json("/api/v1/fleet/history")["events"]) == 2)
        eventually(lambda: kinds(hook).count("canceled") == 1)
        assert {body["azure.scheduled_event.id"] for body in bodies(hook)} == {"E-web"}
        assert {record["azure.scheduled_event.id"] for record in fleet.records} == {"E-web"}
        assert fleet.metric_sum("notbefore_fleet_changes_total") == 2  # announced and canceled

        (listed,) = notbefore(*mute).stdout.splitlines()
        assert "scale_set data. moves today" in listed

        ended = notbefore(*mute, "--end", listed.split()[0])
        assert ended.returncode == 0
        assert ended.stdout == ""


def test_deliveries_are_sent_by_the_instance_that_takes_over(
    hub: Hub, hook: HttpPeer, blobs: Azurite, tmp_path: Path
) -> None:
    config = shared(tmp_path, hub, hook, blobs)
    hook.default = Answer(503)

    with RunningFleet(config, tmp_path / "one") as one:
        send(hub, [report(who, "announced", f"E-{who.scale_set}") for who in SETS])

        eventually(lambda: len(set(ids(hook))) == len(SETS))

        with RunningFleet(
            config, tmp_path / "two"
        ) as two:  # takes two of the four, while the other one goes on
            both = (one, two)
            eventually(
                lambda: [each.metric("notbefore_fleet_partitions") for each in both] == [2, 2]
            )

            hook.default = Answer()
            eventually(lambda: len(set(accepted(hook))) == len(SETS))
            # all is accepted
            eventually(
                lambda: not [snapshot for snapshot in blobs.snapshots() if snapshot.outbox.rows]
            )

            found = accepted(hook)

            # twice at most: what the first one was just sending
            assert max(Counter(found).values()) <= 2
            assert one.stop() == 0
            eventually(lambda: two.metric("notbefore_fleet_partitions") == 4)
            assert two.stop() == 0

    assert accepted(hook) == found  # what had been accepted is not sent again
