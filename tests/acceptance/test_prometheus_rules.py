"""From Azure to the pager by way of Prometheus: simulator, agent, scrape, rule, Alertmanager, receiver.

Debian's Prometheus and Alertmanager run what is in ``config/``, with shorter times and receivers of ours.
"""

import http.client
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, RunningAgent, eventually, free_port, get
from support.azure import ME, body, item
from support.needs import needs
from support.peers import HttpPeer

CONFIG: Final = Path(__file__).parents[2] / "config"
WITHIN: Final = 15.0  # seconds from a change to those who are notified, at intervals of 1 s; 3 are usual


@contextmanager
def running(port: int, *words: str, log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    try:
        eventually(lambda: process.poll() is not None or answers(port))
        assert process.poll() is None, log.read_text(encoding="utf-8")
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def answers(port: int) -> bool:
    with suppress(OSError, http.client.HTTPException):
        return get(port, "/-/ready")[0] == 200
    return False


def alertmanager(receiver: HttpPeer, directory: Path) -> None:
    """The example, with our receivers: ``/oncall`` and ``/chat``."""
    config: dict[str, Any] = yaml.safe_load((CONFIG / "alertmanager/alertmanager.yml").read_text(encoding="utf-8"))

    def hasten(route: dict[str, Any]) -> None:
        route.update(group_wait="1s", group_interval="1s")
        for inner in route.get("routes", []):
            hasten(inner)

    hasten(config["route"])
    config["global"] = {"resolve_timeout": "1m"}
    config["receivers"] = [
        {"name": one["name"], "webhook_configs": [{"url": f"{receiver.url}/{one['name']}", "send_resolved": True}]}
        for one in config["receivers"]
    ]
    (directory / "alertmanager.yml").write_text(yaml.safe_dump(config), encoding="utf-8")


def managing(port: int, directory: Path) -> tuple[str, ...]:
    needs("prometheus-alertmanager")
    return (
        "prometheus-alertmanager",
        f"--config.file={directory / 'alertmanager.yml'}",
        f"--storage.path={directory / 'am'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    )


def prometheus(agent: int, manager: int, directory: Path) -> None:
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(CONFIG / "prometheus/notbefore.rules.yml")],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{manager}"]}]}]},
        "scrape_configs": [{"job_name": "notbefore", "static_configs": [{"targets": [f"127.0.0.1:{agent}"]}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")


def notified(receiver: HttpPeer, path: str, event_id: str) -> list[str]:
    """What a receiver was sent of an event, in turn."""
    bodies = [json.loads(request.body) for request in receiver.requests if request.path == path]
    return [one["status"] for one in bodies if one["groupLabels"].get("event_id") == event_id]


def within(look: Callable[[], bool], what: str) -> None:
    begun = time.monotonic()
    eventually(look, WITHIN)
    print(f"{what} after {time.monotonic() - begun:.1f} s")  # noqa: T201 - for who runs it with -s


@pytest.mark.alone
def test_an_event_reaches_the_pager_and_its_end_does(tmp_path: Path) -> None:
    needs("prometheus", "prometheus-alertmanager")
    soon = f"{datetime.now(UTC) + timedelta(minutes=20):%a, %d %b %Y %H:%M:%S GMT}"
    reboot = item("reboot", EventType="Reboot", NotBefore=soon, DurationInSeconds=-1)
    freeze = item("freeze", NotBefore=soon)
    with ExitStack() as stack:
        simulator = stack.enter_context(Simulator((ME,)))
        receiver, sink = stack.enter_context(HttpPeer()), stack.enter_context(HttpPeer())
        simulator.set_document(body())
        config = tmp_path / "notbefore.yaml"
        config.write_text(yaml.safe_dump({"sinks": {"am": {"alertmanager": {"urls": [sink.url]}}}}), encoding="utf-8")
        agent = stack.enter_context(RunningAgent(simulator.endpoint, tmp_path / "state", str(config))).ready()
        managed, served = free_port(), free_port()
        alertmanager(receiver, tmp_path)
        prometheus(agent.port, managed, tmp_path)
        stack.enter_context(running(managed, *managing(managed, tmp_path), log=tmp_path / "am.log"))
        stack.enter_context(
            running(
                served,
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{served}",
                log=tmp_path / "prometheus.log",
            )
        )
        eventually(lambda: b'"health":"up"' in get(served, "/api/v1/targets")[1])

        simulator.set_document(body(reboot, freeze, incarnation=2))
        within(lambda: notified(receiver, "/oncall", "reboot") == ["firing"], "on call")
        within(lambda: notified(receiver, "/chat", "reboot") == ["firing"], "chat")
        # the Freeze of the same VM is known, and held back
        alerts = {one["labels"]["event_id"]: one for one in json.loads(get(managed, "/api/v2/alerts")[1])}
        assert alerts.keys() == {"reboot", "freeze"}
        assert alerts["freeze"]["status"]["inhibitedBy"] == [alerts["reboot"]["fingerprint"]]
        assert alerts["reboot"]["annotations"]["summary"].startswith(f"Reboot of {ME}, not before ")
        # notbefore's own sink gives an alert the same labels
        eventually(lambda: len(sink.requests) == 2)
        sent = {one["labels"]["event_id"]: one for request in sink.requests for one in json.loads(request.body)}
        for event_id, alert in alerts.items():
            assert alert["labels"] == sent[event_id]["labels"]

        simulator.set_document(body(incarnation=3))
        within(lambda: notified(receiver, "/oncall", "reboot") == ["firing", "resolved"], "its end, on call")
        within(lambda: notified(receiver, "/chat", "reboot") == ["firing", "resolved"], "its end, chat")
        assert notified(receiver, "/chat", "freeze") == []


def test_an_exercise_holds_back_nothing_that_is_real(tmp_path: Path) -> None:
    def alert(event_id: str, event_type: str, vm: str, **more: str) -> dict[str, Any]:
        place = {"subscription": "s", "resource_group": "g", "vm": vm}
        severity = "critical" if event_type == "Reboot" else "warning"
        labels = {"alertname": "AzureScheduledEvent", "event_id": event_id, "event_type": event_type}
        return {"labels": {**labels, **place, "severity": severity, **more}}

    managed = free_port()
    with HttpPeer() as receiver:
        alertmanager(receiver, tmp_path)
        with running(managed, *managing(managed, tmp_path), log=tmp_path / "am.log"):
            sent = [
                alert("drill", "Reboot", "web_0", exercise="true"),
                alert("freeze", "Freeze", "web_0"),
                alert("reboot", "Reboot", "web_1"),
                alert("held back", "Freeze", "web_1"),
            ]
            connection = http.client.HTTPConnection("127.0.0.1", managed, timeout=PATIENCE)
            connection.request("POST", "/api/v2/alerts", json.dumps(sent), {"Content-Type": "application/json"})
            assert connection.getresponse().status == 200
            connection.close()
            for event_id in ("drill", "freeze", "reboot"):
                eventually(lambda: notified(receiver, "/chat", event_id) == ["firing"])  # noqa: B023 - called here
            alerts = json.loads(get(managed, "/api/v2/alerts")[1])
            assert [one["labels"]["event_id"] for one in alerts if one["status"]["inhibitedBy"]] == ["held back"]
