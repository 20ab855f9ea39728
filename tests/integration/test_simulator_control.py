"""Requests drive a running simulator over HTTP; wrong requests change nothing."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from notbefore.simulator import control
from notbefore.simulator.server import Simulator
from notbefore.simulator.state import FAULTS, MAX_FAULTS, MAX_PLAYS, SCENARIOS
from support.agent import PATIENCE, RunningAgent
from support.azure import ID
from support.needs import needs

DOCUMENT = (Path(__file__).parents[2] / "docs/simulator.md").read_text(encoding="utf-8")
CURL = re.compile(r"^\$ (curl .+)\n(.+)$", re.MULTILINE)
METADATA = {"Metadata": "true"}


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with Simulator(("web_0", "web_1")) as running:
        yield running


def post(simulator: Simulator, path: str, body: Any, **headers: str) -> requests.Response:
    """Send bytes as they are, and any other body as JSON."""
    data = body
    if not isinstance(body, bytes):
        data = json.dumps(body).encode()
    with requests.Session() as session:
        session.trust_env = False
        return session.post(
            f"{simulator.endpoint}/simulator/{path}",
            data=data,
            headers={**METADATA, **headers},
            timeout=PATIENCE,
        )


def events(simulator: Simulator) -> list[dict[str, Any]]:
    """Return the events that the simulator lists."""
    listed: list[dict[str, Any]] = json.loads(simulator.body())["Events"]
    return listed


def test_commands_of_the_document_drive_a_simulator(simulator: Simulator) -> None:
    needs("curl")
    commands = CURL.findall(DOCUMENT)
    assert len(commands) == 4

    for command, expected_output in commands:
        words = shlex.split(command.replace("http://127.0.0.1:16925", simulator.endpoint))
        output = subprocess.run(
            [*words, "--noproxy", "*", "--fail"], capture_output=True, text=True, check=True
        ).stdout
        for event in events(simulator):  # the one that the second command starts
            assert event["Resources"] == ["web_0"]
            assert event["EventType"] == "Reboot"
            output = output.replace(event["EventId"], ID)  # the document shows this id

        assert output == expected_output

    assert events(simulator) == []


def test_document_lists_all_scenarios_and_faults() -> None:
    start = DOCUMENT.index("## Scenarios")
    end = DOCUMENT.index("## Event Grid")
    rows = re.findall(r"^\| `([a-z-]+)` \|", DOCUMENT[start:end], re.MULTILINE)

    assert sorted(rows) == sorted([*SCENARIOS, *FAULTS])


def test_agent_reports_events_that_are_started_over_http(
    simulator: Simulator, tmp_path: Path
) -> None:
    with RunningAgent(simulator.endpoint, tmp_path) as agent:
        reply = post(simulator, "events", {"scenario": "freeze", "speed": 1})
        agent.wait_for_changes("announced")
        post(simulator, "clear", {})
        records = agent.wait_for_changes("announced", "canceled")

    event_id = reply.json()["EventId"]
    assert {record["azure.scheduled_event.id"] for record in records} == {event_id}


def test_fault_over_http_affects_as_many_answers_as_it_says(simulator: Simulator) -> None:
    url = f"{simulator.endpoint}/metadata/scheduledevents?api-version=2020-07-01"

    reply = post(simulator, "faults", {"kind": "status", "value": 418, "times": 2})
    statuses = [requests.get(url, headers=METADATA, timeout=PATIENCE).status_code for _ in range(3)]

    assert reply.json() == {}
    assert statuses == [418, 418, 200]


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_clear_ends_events(simulator: Simulator, body: bytes) -> None:
    post(simulator, "events", {"scenario": "reboot"})

    reply = post(simulator, "clear", body)

    assert reply.status_code == 200
    assert events(simulator) == []


@pytest.mark.parametrize(
    ("path", "body", "mistake"),
    [
        ("events", b"", "missing required field `scenario`"),
        ("events", b"\xff", "malformed body"),
        ("events", b"[" * 60_000, "malformed body"),
        ("events", {}, "missing required field `scenario`"),
        ("events", {"scenario": "user-rebot"}, "did you mean 'user-reboot'?"),
        ("events", {"scenario": "x" * 61}, "length <= 60"),
        ("events", {"scenario": "reboot", "notice": 1}, "unknown field `notice`"),
        ("events", {"scenario": "reboot", "speed": 0}, "$.speed"),
        ("events", {"scenario": "reboot", "speed": 1e9}, "$.speed"),
        ("events", {"scenario": "reboot", "resources": [""]}, "$.resources[0]"),
        ("events", {"scenario": "reboot", "resources": "web_0"}, "$.resources"),
        ("events", {"scenario": "reboot", "resources": ["x"] * 501}, "length <= 500"),
        ("faults", {"kind": "earthquake"}, "no fault 'earthquake'"),
        ("faults", {"kind": "status", "value": 200}, "a status of 300 to 599"),
        ("faults", {"kind": "slow", "value": -1}, "0 to 86400 seconds"),
        ("faults", b'{"kind": "slow", "value": 1e999}', "malformed body"),
        ("faults", {"kind": "slow", "times": 1001}, "$.times"),
        ("clear", {"all": True}, "unknown field `all`"),
        ("clear", [], "malformed body"),
    ],
)
def test_wrong_request_is_refused_with_its_mistake(
    simulator: Simulator, path: str, body: Any, mistake: str
) -> None:
    event_id = simulator.start("live-migration")

    reply = post(simulator, path, body)

    assert reply.status_code == 400
    assert mistake in reply.json()["error"]
    assert [event["EventId"] for event in events(simulator)] == [event_id]
    assert simulator.take_fault() is None


def test_too_large_request_is_refused_unread(simulator: Simulator) -> None:
    reply = post(simulator, "events", b" " * (control.MAX_REQUEST + 1))

    assert reply.status_code == 413
    assert "more than 65536 bytes" in reply.json()["error"]


@pytest.mark.parametrize(
    ("headers", "mistake"),
    [
        ({"Metadata": "false"}, "Required metadata header"),
        ({"X-Forwarded-For": "192.0.2.1"}, "through a proxy"),
    ],
)
def test_request_from_a_web_page_or_a_proxy_changes_nothing(
    simulator: Simulator, headers: dict[str, str], mistake: str
) -> None:
    reply = post(simulator, "events", {"scenario": "reboot"}, **headers)

    assert reply.status_code == 400
    assert mistake in reply.json()["error"]
    assert events(simulator) == []


def test_control_paths_answer_only_posts(simulator: Simulator) -> None:
    url = f"{simulator.endpoint}/simulator/clear"

    reply = requests.get(url, headers=METADATA, timeout=PATIENCE)

    assert reply.status_code == 405


@pytest.mark.parametrize(
    ("address", "may_drive"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("10.0.0.4", False)],
)
def test_only_clients_on_this_machine_may_drive(address: str, *, may_drive: bool) -> None:
    assert control.may_drive(address) == may_drive


def test_client_elsewhere_changes_nothing(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_address: str) -> bool:
        return False

    monkeypatch.setattr(control, "may_drive", refuse)

    reply = post(simulator, "events", {"scenario": "reboot"})

    assert reply.status_code == 403
    assert "only clients on this machine" in reply.json()["error"]
    assert events(simulator) == []


def test_simulator_has_bounds_for_events_and_faults(simulator: Simulator) -> None:
    for _ in range(MAX_PLAYS):
        simulator.start("live-migration")
    simulator.fault("status", 500, times=MAX_FAULTS)

    events_reply = post(simulator, "events", {"scenario": "reboot"})
    faults_reply = post(simulator, "faults", {"kind": "status"})

    assert events_reply.status_code == 400
    assert "clear them first" in events_reply.json()["error"]
    assert faults_reply.status_code == 400
    assert "clear them first" in faults_reply.json()["error"]
