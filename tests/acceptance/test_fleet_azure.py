"""The fleet reads Azure's own messages from its hub, and notifies of them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import requests

from support.agent import PATIENCE, RunningAgent, eventually, get, notbefore
from support.event_grid import as_cloud_event, encoded, message, resource_id
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.peers import HttpPeer

A = vm("web_0")


def bodies(hook: HttpPeer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in hook.requests]


def reasons(hook: HttpPeer) -> list[str]:
    return [body["azure.scheduled_event.reason"] for body in bodies(hook)]


def azure_message(status: str, event_id: str, name: str) -> dict[str, Any]:
    """Return a message about a VM without a scale set."""
    now = datetime.now(UTC)
    not_before = None
    if status == "Scheduled":
        not_before = now + timedelta(seconds=900)
    return message(
        status,
        event_id,
        at=now,
        not_before=not_before,
        resource=resource_id("virtualMachines", name, event_id),
        Resources=[name],
    )


def test_event_of_a_vm_without_an_agent_is_notified_and_shown(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    config = write_fleet_config(tmp_path, hub, hook.url)
    with RunningFleet(config, tmp_path / "state") as fleet:
        url = f"http://127.0.0.1:{fleet.port}"
        send(hub, [encoded(azure_message("Scheduled", "E-1", "db_1"))], "sub/rg")
        eventually(lambda: len(hook.requests) == 1)
        # the state that others see is published after the notification
        eventually(lambda: fleet.json("/api/v1/fleet/events")["waves"])
        table = notbefore("events", "--fleet", "--url", url)
        answer = fleet.json("/api/v1/fleet/events")
        page = get(fleet.port, "/")[1]

        started = as_cloud_event(azure_message("Started", "E-1", "db_1"))
        completed = azure_message("Completed", "E-1", "db_1")
        send(hub, [encoded(started), encoded(completed, started)], "sub/rg")
        eventually(lambda: reasons(hook)[-1] == "azure_completed")
        eventually(lambda: len(fleet.json("/api/v1/fleet/history")["events"]) == 1)
        eventually(lambda: fleet.metric("notbefore_fleet_azure_delay_seconds_count") == 4)

        past = fleet.json("/api/v1/fleet/history")["events"][0]
        summary = notbefore("fleet", "report", "--url", url, "--since", "1h")
        scheduled = fleet.metric('notbefore_fleet_azure_messages_total{event_status="Scheduled"}')
        ends = fleet.metric('notbefore_fleet_ends_total{known_by="azure"}')
        assert fleet.stop() == 0

    last = bodies(hook)[-1]
    assert last["azure.scheduled_event.fleet.reported_by"] == 0
    assert last["azure.scheduled_event.fleet.azure_status"] == "Completed"
    assert "1 VM is without an agent" in table.stdout
    assert "db_1 (no agent)" in table.stdout
    assert answer["waves"][0]["azure_status"] == "Scheduled"
    assert answer["waves"][0]["without_agent"] == ["db_1"]
    assert "1 VM without an agent" in str(page)
    assert past["ended_by"] == "azure"
    assert 880 < past["azure_notice"] <= 900
    assert "KNOWN BY AZURE" in summary.stdout
    assert scheduled == 1
    assert ends == 1


def test_azure_corrects_the_unknown_end_that_vms_report(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    with RunningFleet(
        write_fleet_config(tmp_path, hub, hook.url, group_wait="1s"), tmp_path
    ) as fleet:
        send(hub, [report(A, "announced")])
        eventually(lambda: len(hook.requests) == 1)  # no one is notified of an end read at once
        send(hub, [report(A, "ended", reason="not_watched")])
        eventually(lambda: len(hook.requests) == 2)

        send(hub, [encoded(message("Completed", at=datetime.now(UTC)))])
        eventually(lambda: len(hook.requests) == 3)
        assert fleet.stop() == 0

    last = bodies(hook)[-1]
    assert last["azure.scheduled_event.change"] == "finished"
    assert last["azure.scheduled_event.reason"] == "corrected"


def test_readiness_and_log_name_an_event_in_two_partitions(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    named = "the event sub/rg/event-1 is open in the partitions "
    with RunningFleet(write_fleet_config(tmp_path, hub, hook.url), tmp_path / "state") as fleet:
        send(hub, [report(A, "announced")])
        for key in ("other", "another", "one more", "and one"):  # one of them is elsewhere
            send(hub, [encoded(message("Scheduled", at=datetime.now(UTC)))], key)

        eventually(lambda: fleet.metric("notbefore_fleet_events_split") == 1)
        eventually(lambda: named in fleet.log)
        ready = get(fleet.port, "/readyz")[1]
        assert fleet.stop() == 0

    assert "1 event is open in several partitions (event-1 in " in str(ready)


@contextmanager
def simulator_with_event_grid(hub_key: Path) -> Iterator[str]:
    """Run the simulator, which plays an hour in a minute; yield its address."""
    words = ("--listen", "127.0.0.1:0", "--speed", "60", "--event-grid", str(hub_key))
    command = [sys.executable, "-m", "notbefore", "simulate", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rpartition(" ")[2].strip()
        finally:
            process.terminate()


def start_scenario(imds: str, scenario: str) -> None:
    """Let a running simulator play a scenario."""
    response = requests.post(
        f"{imds}/simulator/events",
        json={"scenario": scenario},
        headers={"Metadata": "true"},
        timeout=PATIENCE,
    )
    assert response.status_code == 200, response.text


def test_simulated_agent_and_event_grid_report_one_event(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    config = write_fleet_config(tmp_path, hub, hook.url)
    sink = {"event_hub": {"connection_string_file": str(tmp_path / "hub-key")}}
    agent_config = {"sinks": {"hub": sink}, "routes": [{"sinks": ["hub"]}]}
    with (
        RunningFleet(config, tmp_path / "state") as fleet,
        simulator_with_event_grid(tmp_path / "hub-key") as imds,
        RunningAgent(imds, tmp_path / "agent", agent_config),
    ):
        # only now: in fast motion the event would end before a slow agent has started
        start_scenario(imds, "user-reboot")
        eventually(lambda: len(hook.requests) == 3)
        split = fleet.metric("notbefore_fleet_events_split")

    changes = [body["azure.scheduled_event.change"] for body in bodies(hook)]
    last = bodies(hook)[-1]
    assert changes == ["announced", "started", "finished"]
    assert last["azure.scheduled_event.reason"] in ("azure_completed", "gone_after_start")
    assert last["azure.scheduled_event.fleet.azure_status"] in ("Started", "Completed")
    assert last["azure.scheduled_event.fleet.reported_by"] == 1
    assert split == 0
