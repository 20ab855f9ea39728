"""The history of a real instance, through a kill, a full disk and the command that reports it."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

from notbefore.core.change import LifecycleKind
from support.agent import eventually, notbefore
from support.fleet_instance import RunningFleet, configured, send
from support.fleet_records import report, vm
from support.hub import Hub
from support.peers import HttpPeer

A, B = vm("web_0"), vm("web_1")
STEPS: tuple[LifecycleKind, ...] = ("announced", "started", "finished")


def lines(state: Path) -> list[dict[str, Any]]:
    files = sorted((state / "history").glob("*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_bytes().splitlines()]


def happen(hub: Hub, event_id: str, *kinds: LifecycleKind) -> None:
    """Two VMs report the steps of an event that affects the first; it measures."""
    for kind in kinds:
        measured: dict[str, Any] = {"interruption": 4.2} if kind == "finished" else {}
        send(hub, [report(A, kind, event_id, notice=600.0, **measured), report(B, kind, event_id, resources=[A.name])])


def test_an_event_is_written_once_through_a_kill_and_a_replay_and_the_report_shows_it(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    config, state = configured(tmp_path, hub, hook.url), tmp_path / "state"
    with RunningFleet(config, state) as fleet:
        fleet.ready()
        happen(hub, "E-1", *STEPS)
        eventually(lambda: len(lines(state)) == 1)
        fleet.stop(signal.SIGKILL)
    shutil.rmtree(state / "partitions", ignore_errors=True)  # nothing is remembered: all is read again
    (history,) = (state / "history").glob("*.jsonl")
    with history.open("ab") as file:
        file.write(b'{"event_id": "to')  # as a kill in the middle of a write leaves it
    with RunningFleet(config, state) as fleet:
        fleet.ready()
        happen(hub, "E-2", "announced", "canceled")
        eventually(lambda: len(lines(state)) == 2)
        assert fleet.stop() == 0
    first, second = lines(state)
    assert (first["event_id"], first["outcome"], first["reported_by"]) == ("E-1", "finished", 2)
    assert first["measured"] == [{"vm": "web_0", "notice": 600.0, "started_for": None, "interruption": 4.2}]
    assert (second["event_id"], second["outcome"]) == ("E-2", "canceled")

    page = tmp_path / "report.html"
    found = notbefore("fleet", "report", "--dir", state / "history", "--since", "1h", "--html", page)
    assert found.returncode == 0
    head, row = [line.split() for line in found.stdout.splitlines()[1:3]]
    assert (head[:4], row[:4]) == (["TYPE", "REGION", "EVENTS", "VMS"], ["Reboot", "westeurope", "2", "2"])
    assert "2 of 2" in found.stdout  # ten minutes, where Azure promises fifteen
    assert "<svg" in page.read_text(encoding="utf-8")
    (shown,) = [json.loads(one) for one in notbefore("fleet", "report", config, "--json").stdout.splitlines() or ["{}"]]
    assert shown == {}  # the configuration names another directory


def test_while_the_history_cannot_be_written_people_are_notified_and_it_is_written_later(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    place = tmp_path / "history"
    place.write_bytes(b"")  # a file, where a directory is to be
    config = configured(tmp_path, hub, hook.url, history={"dir": str(place)})
    with RunningFleet(config, tmp_path / "state") as fleet:
        fleet.ready()
        happen(hub, "E-1", *STEPS)
        eventually(lambda: b'"finished"' in b"".join(one.body for one in hook.requests))
        eventually(lambda: fleet.metric('notbefore_fleet_errors_total{part="history"}'))
        place.unlink()
        eventually(lambda: [one["event_id"] for one in lines(tmp_path)] == ["E-1"])
        assert fleet.stop() == 0


def test_a_report_of_a_directory_that_is_not_there_says_what_to_give(tmp_path: Path) -> None:
    found = notbefore("fleet", "report", "--dir", tmp_path / "nowhere")
    assert found.returncode == 1
    assert "give CONFIG or --dir" in found.stderr
