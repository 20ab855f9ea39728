"""A running instance keeps its history through faults, and ``notbefore fleet report`` shows it."""

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


def history_of(fleet: RunningFleet) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = fleet.json("/api/v1/fleet/history")["events"]
    return events


def send_event(hub: Hub, event_id: str, *kinds: LifecycleKind) -> None:
    """Let two VMs report the steps of an event that affects the first, which measures it."""
    for kind in kinds:
        interruption = 4.2 if kind == "finished" else None
        affected = report(A, kind, event_id, notice=600.0, interruption=interruption)
        neighbor = report(B, kind, event_id, resources=[A.name])
        send(hub, [affected, neighbor])


def url_of(fleet: RunningFleet, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{fleet.port}"


def report_of(fleet: RunningFleet, *words: str) -> str:
    """Run `notbefore fleet report`, and return its output."""
    done = notbefore("fleet", "report", "--url", url_of(fleet), *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_history_keeps_events_once_through_a_kill_and_lost_snapshots(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    config = write_fleet_config(tmp_path, hub, hook.url)
    state = tmp_path / "state"
    with RunningFleet(config, state) as fleet:
        send_event(hub, "E-1", *STEPS)
        eventually(lambda: len(history_of(fleet)) == 1)
        fleet.stop(signal.SIGKILL)
    # without its snapshots, the next instance reads everything again
    shutil.rmtree(state / "partitions", ignore_errors=True)

    with RunningFleet(config, state) as fleet:
        send_event(hub, "E-2", "announced", "canceled")
        eventually(lambda: len(history_of(fleet)) == 2)

        first, second = history_of(fleet)
        assert fleet.stop() == 0

    assert first["event_id"] == "E-1"
    assert first["outcome"] == "finished"
    assert first["reported_by"] == 2
    assert first["measured"] == {"web_0": {"notice": 600.0, "interruption": 4.2}}
    assert second["event_id"] == "E-2"
    assert second["outcome"] == "canceled"


def test_history_that_cannot_be_written_is_unknown_until_it_can(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    (state / FILE_NAME).mkdir(parents=True)  # a directory in the place of the file
    with RunningFleet(write_fleet_config(tmp_path, hub, hook.url), state) as fleet:
        send_event(hub, "E-1", *STEPS)
        eventually(lambda: "finished" in hook.kinds)
        eventually(lambda: fleet.metric('notbefore_fleet_errors_total{part="history"}'))

        unknown = notbefore("fleet", "report", "--url", url_of(fleet))
        _, page = get(fleet.port, "/")
        (state / FILE_NAME).rmdir()

        eventually(lambda: len(history_of(fleet)) == 1)
        assert fleet.stop() == 0

    assert unknown.returncode == 1
    assert "cannot be read" in unknown.stderr
    assert b"Not known: the " in page


def test_report_counts_the_events_of_the_history(hub: Hub, hook: HttpPeer, tmp_path: Path) -> None:
    with RunningFleet(write_fleet_config(tmp_path, hub, hook.url), tmp_path / "state") as fleet:
        send_event(hub, "E-1", *STEPS)
        send_event(hub, "E-2", "announced", "canceled")
        eventually(lambda: len(history_of(fleet)) == 2)

        table = report_of(fleet, "--since", "1h").splitlines()
        (json_row,) = parsed_output("fleet report", report_of(fleet, "--since", "1h", "--json"))
        csv_text = report_of(fleet, "--csv", "--by", "scale_set,event_type")
        two_urls = f"{url_of(fleet)},{url_of(fleet, 'localhost')}"
        of_two = notbefore("fleet", "report", "--url", two_urls, "--since", "1h")

    head = table[1].split()
    row = table[2].split()
    assert head[:4] == ["TYPE", "REGION", "EVENTS", "VMS"]
    assert row[:4] == ["Reboot", "westeurope", "2", "2"]
    assert row[7] == "2", "notice of ten minutes is short: Azure promises fifteen"

    assert json_row["event_type"] == "Reboot"
    assert json_row["vms"] == 2

    (csv_row,) = csv.DictReader(io.StringIO(csv_text))
    assert csv_row["scale_set"] == "web"
    assert csv_row["event_type"] == "Reboot"
    assert csv_row["events"] == "2"

    assert of_two.stdout.splitlines()[1:] == table[1:], "an event counts once"
