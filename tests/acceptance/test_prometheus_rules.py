"""Prometheus and Alertmanager of Debian notify of an event by the files in ``config/``.

Only the times are shorter, and the receivers are simulated.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from notbefore.simulator.server import Simulator
from peers.pagerduty import ROUTING_KEY, PagerDuty
from support.agent import RunningAgent, eventually
from support.alertmanager import alerts, cluster_of_two
from support.azure import body, item
from support.peers import HttpPeer
from support.scraping import Prometheus

CONFIG: Final = Path(__file__).parents[2] / "config"
RULES: Final = CONFIG / "prometheus/notbefore.rules.yml"
VMS: Final = ("web_0", "web_1")


def alertmanager_config(slack: str, pager: str, directory: Path) -> dict[str, Any]:
    """Return the example for Alertmanager with shorter times, and with these receivers."""
    config: dict[str, Any] = yaml.safe_load(
        (CONFIG / "alertmanager/alertmanager.yml").read_text(encoding="utf-8")
    )

    def hasten(route: dict[str, Any]) -> None:
        route.update(group_wait="1s", group_interval="1s")
        for inner in route.get("routes", []):
            hasten(inner)

    hasten(config["route"])
    config["templates"] = [str(CONFIG / "alertmanager/notbefore.tmpl")]
    config["global"] = {"slack_api_url": slack, "pagerduty_url": f"{pager}/v2/enqueue"}
    key_file = directory / "routing-key"
    key_file.write_text(ROUTING_KEY, encoding="utf-8")
    config["receivers"][0]["pagerduty_configs"][0]["routing_key_file"] = str(key_file)
    return config


class Watched:
    """Two agents, whose Prometheus alerts through Alertmanager, and receivers of the alerts."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.imds = stack.enter_context(Simulator(VMS))
        self.slack = stack.enter_context(HttpPeer())
        self.pager = stack.enter_context(PagerDuty())
        self.sink = stack.enter_context(HttpPeer())  # gets the alerts of the agents themselves
        self.agents: list[RunningAgent] = []
        sinks = {"am": {"alertmanager": {"urls": [self.sink.url]}}}
        for name in VMS:
            agent = RunningAgent(self.imds.endpoint_of(name), directory / name, {"sinks": sinks})
            self.agents.append(stack.enter_context(agent))

        config = alertmanager_config(self.slack.url, self.pager.url, directory)
        self.members = stack.enter_context(cluster_of_two(directory, config))
        addresses = [f"127.0.0.1:{port}" for port in self.members]
        alerting = {"alertmanagers": [{"static_configs": [{"targets": addresses}]}]}
        targets = [{"targets": [f"127.0.0.1:{agent.port}" for agent in self.agents]}]
        prometheus = Prometheus(directory, targets, rule_files=[str(RULES)], alerting=alerting)
        stack.enter_context(prometheus)

    def show(self, incarnation: int, *events: dict[str, Any]) -> None:
        """Let IMDS list these events, and wait until both agents have seen them."""
        self.imds.set_document(body(*events, incarnation=incarnation))
        for agent in self.agents:
            eventually(lambda: agent.json("/api/v1/events")["incarnation"] == incarnation)

    @property
    def in_slack(self) -> str:
        """The titles and texts of all messages."""
        lines: list[str] = []
        for request in self.slack.requests:
            attachment = json.loads(request.body)["attachments"][0]
            lines += [attachment["title"], attachment.get("text", "")]
        return "\n".join(lines)

    @property
    def in_pagerduty(self) -> list[str]:
        """The summaries of all events; the end has none."""
        return [step.event.get("payload", {}).get("summary", "") for step in self.pager.steps]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with ExitStack() as stack:
        yield Watched(stack, tmp_path)


@pytest.mark.long
def test_alertmanager_notifies_slack_and_pagerduty_of_start_and_end(watched: Watched) -> None:
    """The texts are printed, for a look at them with ``pytest -s``."""
    soon = format_datetime(datetime.now(UTC) + timedelta(minutes=20), usegmt=True)
    reboot = item(
        "reboot", EventType="Reboot", NotBefore=soon, DurationInSeconds=-1, Resources=list(VMS)
    )

    watched.show(2, reboot)

    eventually(lambda: "Reboot of web_0, web_1, not before 20" in watched.in_slack)
    eventually(lambda: watched.pager.effects[:1] == ["opened"])
    assert watched.in_pagerduty[0].startswith("Reboot of web_0, web_1, not before 20")
    assert "UTC" in watched.in_pagerduty[0]
    assert "Azure will reboot web_0, web_1. What to do: Move or stop" in watched.in_slack
    assert "Azure says: Virtual machine is being paused" in watched.in_slack

    # the sink of an agent gives an alert the same labels as the rules
    (alert,) = eventually(lambda: alerts(watched.members[0]))
    request = eventually(lambda: watched.sink.requests)[0]
    (alert_of_sink,) = json.loads(request.body)
    assert alert_of_sink["labels"] == alert["labels"]

    watched.show(3, {**reboot, "EventStatus": "Started", "NotBefore": ""})

    eventually(lambda: "Reboot of web_0, web_1 has started" in watched.in_slack)
    eventually(lambda: "has started" in "\n".join(watched.in_pagerduty))
    assert "Azure started the Reboot reboot at 20" in watched.in_slack
    assert "is over" not in watched.in_slack

    watched.show(4)

    eventually(lambda: "Reboot of web_0, web_1 is over" in watched.in_slack)
    eventually(lambda: watched.pager.effects[-1] == "resolved")
    assert "any moment" not in watched.in_slack
    assert watched.pager.faults == []
    summaries = "\n".join(watched.in_pagerduty)
    sys.stdout.write(f"Slack:\n{watched.in_slack}\nPagerDuty:\n{summaries}\n")
