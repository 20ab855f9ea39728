"""The inventory of a real instance: missing VMs are measured, shown and notified of.

A file that changes.
"""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from notbefore.core.record import Heartbeat, Vm
from notbefore.wording.records import heartbeat_of
from support.agent import eventually, get, notbefore
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.json_output import parsed_output
from support.peers import HttpPeer

A = vm("web_0")  # in different partitions
B = vm("data_0", scale_set="data")


def beat(who: Vm) -> Heartbeat:
    return heartbeat_of(who, (), "1", datetime.now(UTC), 3600.0)


def notified(hook: HttpPeer) -> list[tuple[str, list[str]]]:
    bodies = [json.loads(request.body) for request in hook.requests]
    prefix = "azure.scheduled_event."
    return [
        (body[f"{prefix}change"], body[f"{prefix}resources"])
        for body in bodies
        if body[f"{prefix}type"] == "Silent"
    ]


def events(fleet: RunningFleet, *words: str) -> str:
    done = notbefore("events", "--fleet", "--url", f"http://127.0.0.1:{fleet.port}", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)  # the fold looks each 30 s for what is silent or missing
@pytest.mark.long
def test_vm_of_the_inventory_is_missing_until_it_is_removed(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    inventory = tmp_path / "inventory.txt"
    whose = f"{A.subscription_id}/{A.resource_group}"
    inventory.write_text("".join(f"{whose}/{name}\n" for name in ("web_0", "data_0", "web_9")))
    config = write_fleet_config(
        tmp_path, hub, hook.url, inventory_file="inventory.txt", missing_after="3s"
    )
    send(hub, [beat(A), beat(B), report(A, "announced", "E-1")])
    with RunningFleet(config, tmp_path / "state") as fleet:
        eventually(lambda: notified(hook)[-1:] == [("started", ["web_9"])])
        assert fleet.json("/api/v1/fleet/events")["missing"] == ["web_9"]
        assert fleet.metric_sum("notbefore_fleet_vms_missing") == 1

        shown = events(fleet)
        assert "1 VM is missing: web_9" in shown

        page = get(fleet.port, "/")[1].decode()
        assert "1 VM is missing." in page
        assert "<bdi>web_9</bdi>" in page

        head, row = [line.split() for line in shown.splitlines()[1:3]]

        assert head[:2] == ["TYPE", "STATUS"]
        assert row[:2] == ["Reboot", "scheduled"]
        assert row[-2:] == ["E-1", "web_0"]

        (wave,) = parsed_output("events --fleet", events(fleet, "--json"))

        assert wave["event_id"] == "E-1"
        assert wave["vms"] == ["web_0"]
        assert wave["reported_by"] == 1

        inventory.write_text("web 0\n")
        said = (
            "inventory: ValueError: line 1: expected SUBSCRIPTION/RESOURCE_GROUP/NAME, got 'web 0'"
        )

        eventually(
            lambda: (
                said in fleet.log and fleet.metric('notbefore_fleet_errors_total{part="inventory"}')
            )
        )
        assert fleet.json("/api/v1/fleet/events")["missing"] == ["web_9"]

        inventory.write_text(f"{whose}/web_0\n{whose}/DATA_0\n".upper())
        eventually(lambda: fleet.json("/api/v1/fleet/events")["missing"] == [])
        assert fleet.stop() == 0
