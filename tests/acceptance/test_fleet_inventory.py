"""A running instance measures, shows and notifies of VMs that its inventory names and it misses."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from notbefore.core.record import Heartbeat, Vm
from notbefore.wording.records import heartbeat_of
from support.agent import becomes, eventually, get, notbefore
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.json_output import parsed_output
from support.peers import HttpPeer

# in different partitions
A = vm("web_0")
B = vm("data_0", scale_set="data")
GROUP = f"{A.subscription_id}/{A.resource_group}"


def heartbeat(who: Vm) -> Heartbeat:
    return heartbeat_of(who, (), "1", datetime.now(UTC), 3600.0)


def is_notified_as_missing(hook: HttpPeer, name: str) -> bool:
    """Return whether the last notification of silent VMs is about this one."""
    records = [json.loads(request.body) for request in hook.requests]
    silent = [record for record in records if record["azure.scheduled_event.type"] == "Silent"]
    if not silent:
        return False
    last = silent[-1]
    change = last["azure.scheduled_event.change"]
    names = last["azure.scheduled_event.resources"]
    return (change, names) == ("started", [name])


def write_inventory(file: Path, *lines: str) -> None:
    """Replace the file in one step, because the instance may read it at any moment."""
    new_file = file.with_suffix(".new")
    new_file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    new_file.replace(file)


def events(fleet: RunningFleet, *words: str) -> str:
    done = notbefore("events", "--fleet", "--url", f"http://127.0.0.1:{fleet.port}", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def missing(fleet: RunningFleet) -> list[str]:
    names: list[str] = fleet.json("/api/v1/fleet/events")["missing"]
    return names


@pytest.mark.timeout(300)  # the instance looks for missing VMs each 30 s
@pytest.mark.long
def test_vm_of_the_inventory_is_missing_until_it_is_removed(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    inventory = tmp_path / "inventory.txt"
    write_inventory(inventory, f"{GROUP}/web_0", f"{GROUP}/data_0", f"{GROUP}/web_9")
    config = write_fleet_config(
        tmp_path, hub, hook.url, inventory_file="inventory.txt", missing_after="3s"
    )
    send(hub, [heartbeat(A), heartbeat(B), report(A, "announced", "E-1")])
    with RunningFleet(config, tmp_path / "state") as fleet:
        eventually(lambda: is_notified_as_missing(hook, "web_9"))
        becomes(lambda: missing(fleet), ["web_9"])
        assert fleet.metric_sum("notbefore_fleet_vms_missing") == 1
        assert "1 VM is missing: web_9" in events(fleet)
        page = get(fleet.port, "/")[1].decode()
        assert "1 VM is missing." in page
        assert "<bdi>web_9</bdi>" in page

        write_inventory(inventory, "web 0")
        mistake = "line 1: expected SUBSCRIPTION/RESOURCE_GROUP/NAME, got 'web 0'"
        eventually(lambda: f"inventory: ValueError: {mistake}" in fleet.log)
        eventually(lambda: fleet.metric('notbefore_fleet_errors_total{part="inventory"}'))
        assert missing(fleet) == ["web_9"], "the last readable inventory stays in use"

        write_inventory(inventory, f"{GROUP}/web_0".upper(), f"{GROUP}/data_0".upper())
        becomes(lambda: missing(fleet), [])
        assert fleet.stop() == 0


def test_events_command_lists_the_waves_of_an_instance(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    send(hub, [report(A, "announced", "E-1")])
    with RunningFleet(write_fleet_config(tmp_path, hub, hook.url), tmp_path / "state") as fleet:
        eventually(lambda: fleet.json("/api/v1/fleet/events")["waves"])
        table = events(fleet)
        (wave,) = parsed_output("events --fleet", events(fleet, "--json"))

    head, row = [line.split() for line in table.splitlines()]
    assert head[:2] == ["TYPE", "STATUS"]
    assert row[:2] == ["Reboot", "scheduled"]
    assert row[-2:] == ["E-1", "web_0"]
    assert wave["event_id"] == "E-1"
    assert wave["vms"] == ["web_0"]
    assert wave["reported_by"] == 1
