"""The installed ``notbefore fleet`` reads a simulated Event Hub, and notifies a webhook."""

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notbefore.core.change import LifecycleKind
from notbefore.core.record import Vm
from support.agent import eventually, notbefore
from support.azurite import Azurite
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.json_output import parsed_output
from support.peers import Answer, HttpPeer

STEPS: tuple[LifecycleKind, ...] = ("announced", "started", "finished")
A = vm("web_0")
B = vm("web_1")
C = vm("web_2")
SETS = [
    vm(f"{name}_0", scale_set=name) for name in ("web", "data", "batch", "cache", "queue", "front")
]
PARTITIONS = 4  # of the hub of these tests


def bodies(hook: HttpPeer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in hook.requests]


def kinds(hook: HttpPeer) -> list[str]:
    return [body["azure.scheduled_event.change"] for body in bodies(hook)]


def ids(hook: HttpPeer) -> list[str]:
    return [request.headers["x-notbefore-delivery-id"] for request in hook.requests]


def accepted_ids(hook: HttpPeer) -> list[str]:
    return [
        request.headers["x-notbefore-delivery-id"]
        for request in hook.requests
        if request.status == 200
    ]


def partitions(instance: RunningFleet) -> float | None:
    """Return how many partitions an instance reads."""
    return instance.metric("notbefore_fleet_partitions")


def records_read(fleet: RunningFleet) -> float:
    """Return how many records an instance has read, whether they were news or not."""
    total = 0.0
    for result in ("news", "known", "late"):
        total += fleet.metric(f'notbefore_fleet_records_total{{result="{result}"}}') or 0.0
    return total


def test_step_that_three_vms_report_is_notified_once(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    with RunningFleet(write_fleet_config(tmp_path, hub, hook.url), tmp_path / "state") as fleet:
        for number, step in enumerate(STEPS, start=1):
            send(hub, [report(reporter, step, resources=[A.name]) for reporter in (B, A, C)])
            eventually(lambda: kinds(hook) == list(STEPS[:number]))
        eventually(lambda: records_read(fleet) == 9)

        last = bodies(hook)[-1]
        assert kinds(hook) == list(STEPS)
        assert last["azure.scheduled_event.id"] == "EVENT-1"
        assert last["azure.scheduled_event.fleet.reported_by"] == 3
        assert last["azure.scheduled_event.outcome"] == "finished"
        assert fleet.json("/api/v1/fleet/events")["waves"] == []


def test_instance_names_a_hub_that_hangs_and_stops(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    with RunningFleet(write_fleet_config(tmp_path, hub, hook.url), tmp_path / "state") as fleet:
        eventually(lambda: partitions(fleet) == PARTITIONS)

        hub.order("freeze")  # its connections stay open

        eventually(lambda: "no answer in time" in fleet.json("/api/v1/fleet/events")["trouble"])
        assert fleet.stop() == 0


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[Azurite]:
    with Azurite(tmp_path) as running:
        yield running


def shared(directory: Path, hub: Hub, hook: HttpPeer, blobs: Azurite, **fleet: Any) -> Path:
    """Write a configuration for several instances, which look for partitions each second."""
    checkpoints = {"connection_string": blobs.connection_string, "container": "notbefore"}
    times = {"rebalance": "1s", "takeover": "10m"}
    return write_fleet_config(directory, hub, hook.url, checkpoints=checkpoints, **times, **fleet)


def announce(hub: Hub, vms: list[Vm]) -> None:
    """Let each VM report an event of its own."""
    send(hub, [report(vm, "announced", f"E-{vm.scale_set}") for vm in vms])


def share_partitions(first: RunningFleet, second: RunningFleet) -> None:
    """Wait until each of two instances reads half of the partitions."""
    eventually(lambda: [partitions(first), partitions(second)] == [2, 2])


def test_killed_instance_has_its_partitions_back_before_takeover(
    hub: Hub, hook: HttpPeer, blobs: Azurite, tmp_path: Path
) -> None:
    config = shared(tmp_path, hub, hook, blobs)
    with RunningFleet(config, tmp_path / "one") as killed:
        eventually(lambda: partitions(killed) == PARTITIONS)
        killed.stop(signal.SIGKILL)

    with RunningFleet(config, tmp_path / "one") as restarted:
        eventually(lambda: partitions(restarted) == PARTITIONS)


def test_each_instance_shows_the_whole_fleet_with_ages(
    hub: Hub, hook: HttpPeer, blobs: Azurite, tmp_path: Path
) -> None:
    config = shared(tmp_path, hub, hook, blobs)
    with (
        RunningFleet(config, tmp_path / "one") as first,
        RunningFleet(config, tmp_path / "two") as second,
    ):
        share_partitions(first, second)
        announce(hub, SETS)

        for instance in (first, second):
            eventually(lambda: len(instance.json("/api/v1/fleet/events")["waves"]) == len(SETS))
            listed = instance.json("/api/v1/fleet/events?scale_set=data")
            ages = [partition["age"] for partition in listed["partitions"]]
            assert [wave["event_id"] for wave in listed["waves"]] == ["E-data"]
            assert len(ages) == PARTITIONS
            assert ages.count(None) == 2, "the instance reads these itself"


def muting(config: Path, state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `notbefore fleet mute`."""
    return notbefore("fleet", "mute", config, "--state-dir", state, *words)


MUTE_DATA = ("--match", "scale_set=data", "--for", "1h", "--comment", "moves today")


def test_mute_is_refused_before_the_first_start(hub: Hub, hook: HttpPeer, tmp_path: Path) -> None:
    state = tmp_path / "state"

    refused = muting(write_fleet_config(tmp_path, hub, hook.url), state, *MUTE_DATA)

    assert refused.returncode == 1
    assert "start the instance first" in refused.stderr
    assert not state.exists(), "a directory of root is of no use to the service"


def test_muted_event_and_its_end_are_not_notified(hub: Hub, hook: HttpPeer, tmp_path: Path) -> None:
    config = write_fleet_config(tmp_path, hub, hook.url)
    state = tmp_path / "state"
    with RunningFleet(config, state):
        eventually((state / "partitions").exists)
        assert muting(config, state, *MUTE_DATA).returncode == 0

    with RunningFleet(config, state) as fleet:
        send(hub, [report(A, "announced", "E-web"), report(SETS[1], "announced", "E-data")])
        send(hub, [report(SETS[1], "canceled", "E-data"), report(A, "canceled", "E-web")])

        eventually(lambda: len(fleet.json("/api/v1/fleet/history")["events"]) == 2)
        eventually(lambda: fleet.kinds == ["announced", "canceled"])
        # the announcement expires if the end comes before it is sent
        eventually(lambda: "canceled" in kinds(hook))
        assert {body["azure.scheduled_event.id"] for body in bodies(hook)} == {"E-web"}
        assert {record["azure.scheduled_event.id"] for record in fleet.records} == {"E-web"}
        assert fleet.metric_sum("notbefore_fleet_changes_total") == 2


def test_mute_is_listed_until_it_is_ended(hub: Hub, hook: HttpPeer, tmp_path: Path) -> None:
    config = write_fleet_config(tmp_path, hub, hook.url)
    state = tmp_path / "state"
    with RunningFleet(config, state):
        eventually((state / "partitions").exists)
        muting(config, state, *MUTE_DATA)

        (mute,) = parsed_output("fleet mute", muting(config, state, "--json").stdout)
        (line,) = muting(config, state).stdout.splitlines()
        ended = muting(config, state, "--end", line.split()[0])

    assert mute["match"] == {"scale_set": "data"}
    assert "scale_set data. moves today" in line
    assert ended.returncode == 0
    assert ended.stdout == ""


def test_deliveries_are_sent_by_the_instance_that_takes_over(
    hub: Hub, hook: HttpPeer, blobs: Azurite, tmp_path: Path
) -> None:
    config = shared(tmp_path, hub, hook, blobs)
    hook.default = Answer(503)

    def all_outboxes_are_empty() -> bool:
        return not any(snapshot.outbox.rows for snapshot in blobs.snapshots())

    with RunningFleet(config, tmp_path / "one") as first:
        announce(hub, SETS)
        eventually(lambda: len(set(ids(hook))) == len(SETS))

        with RunningFleet(config, tmp_path / "two") as second:
            share_partitions(first, second)

            hook.default = Answer()
            eventually(lambda: len(set(accepted_ids(hook))) == len(SETS))
            eventually(all_outboxes_are_empty)

            accepted = accepted_ids(hook)
            most = max(Counter(accepted).values())
            assert most <= 2, "only a delivery that the first instance was sending is repeated"
            assert first.stop() == 0
            eventually(lambda: partitions(second) == PARTITIONS)
            assert second.stop() == 0

    assert accepted_ids(hook) == accepted, "an accepted delivery is not sent again"
