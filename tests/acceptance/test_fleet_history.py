"""The history of a real instance, through a kill, a disk that cannot be written, and the command
that reports it.
"""

import csv
import io
import shutil
import signal
from pathlib import Path
from typing import Any

from notbefore.core.change import LifecycleKind
from notbefore.fleet.history import FILE_NAME
from support.agent import eventually, get, notbefore
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.json_output import parsed_output
from support.peers import HttpPeer

A = vm("web_0")
B = vm("web_1")
STEPS: tuple[LifecycleKind, ...] = ("announced", "started", "finished")


def events(fleet: RunningFleet) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fleet.json("/api/v1/fleet/history")["events"]
    return found


def happen(hub: Hub, event_id: str, *kinds: LifecycleKind) -> None:
    """Two VMs report the steps of an event that affects the first; it measures."""
    for kind in kinds:
        measured: dict[str, Any] = {"interruption": 4.2} if kind == "finished" else {}
        send(
            hub,
            [
                report(A, kind, event_id, notice=600.0, **measured),
                report(B, kind, event_id, resources=[A.name]),
            ],
        )


def test_history_keeps_an_event_once_through_disk_trouble_and_a_kill(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    config = write_fleet_config(tmp_path, hub, hook.url)
    state = tmp_path / "state"
    (state / FILE_NAME).mkdir(parents=True)  # a directory, where a file is to be
    with RunningFleet(config, state) as fleet:
        happen(hub, "E-1", *STEPS)
        eventually(lambda: b'"finished"' in b"".join(request.body for request in hook.requests))
        eventually(lambda: fleet.metric('notbefore_fleet_errors_total{part="history"}'))

        unknown = notbefore("fleet", "report", "--url", f"http://127.0.0.1:{fleet.port}")
        page = get(fleet.port, "/")
        (state / FILE_NAME).rmdir()

        eventually(lambda: len(events(fleet)) == 1)

        fleet.stop(signal.SIGKILL)
    # nothing is remembered: all is read again
    shutil.rmtree(state / "partitions", ignore_errors=True)

    with RunningFleet(config, state) as fleet:
        happen(hub, "E-2", "announced", "canceled")
        eventually(lambda: len(events(fleet)) == 2)

        first, second = events(fleet)
        url = f"http://127.0.0.1:{fleet.port}"
        found = notbefore("fleet", "report", "--url", url, "--since", "1h")
        as_json = notbefore("fleet", "report", "--url", url, "--since", "1h", "--json")
        head, row = [line.split() for line in found.stdout.splitlines()[1:3]]
        by = ("--by", "scale_set,event_type")
        rows = list(
            csv.DictReader(
                io.StringIO(notbefore("fleet", "report", "--url", url, "--csv", *by).stdout)
            )
        )
        twice = notbefore(
            "fleet", "report", "--url", f"{url},http://localhost:{fleet.port}", "--since", "1h"
        )

        assert fleet.stop() == 0

    assert unknown.returncode == 1
    assert "cannot be read" in unknown.stderr
    assert "Not known: the " in str(page)
    assert first["event_id"] == "E-1"
    assert first["outcome"] == "finished"
    assert first["reported_by"] == 2
    assert first["measured"] == {"web_0": {"notice": 600.0, "interruption": 4.2}}
    assert second["event_id"] == "E-2"
    assert second["outcome"] == "canceled"
    assert head[:4] == ["TYPE", "REGION", "EVENTS", "VMS"]
    assert row[:4] == ["Reboot", "westeurope", "2", "2"]
    assert row[7] == "2"  # short notice: ten minutes, where Azure promises fifteen
    (object_row,) = parsed_output("fleet report", as_json.stdout)
    assert object_row["event_type"] == "Reboot"
    assert object_row["vms"] == 2
    assert [(row["scale_set"], row["event_type"], row["events"]) for row in rows] == [
        ("web", "Reboot", "2")
    ]
    assert twice.stdout.splitlines()[1:] == found.stdout.splitlines()[1:]  # an event counts once
