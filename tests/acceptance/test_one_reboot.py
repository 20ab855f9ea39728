"""On-call gets one incident for a Reboot of five VMs, from agents and from Alertmanager."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from notbefore.simulator.server import Simulator
from peers.pagerduty import ROUTING_KEY, PagerDuty
from peers.slack import SlackWorkspace
from support.agent import RunningAgent, eventually
from support.alertmanager import cluster_of_two
from support.azure import STARTED, body, item
from support.peers import HttpPeer

VMS = tuple(f"web_{number}" for number in range(5))


def alertmanager_config(hook: str, pager: str) -> dict[str, Any]:
    """Return a configuration that sends everything to a webhook and to PagerDuty."""
    incidents = {"routing_key": ROUTING_KEY, "url": f"{pager}/v2/enqueue", "severity": "critical"}
    return {
        "route": {
            "receiver": "hook",
            "group_by": ["alertname", "event_id"],
            "group_wait": "2s",
            # longer than the second member waits for the first: otherwise both notify
            "group_interval": "12s",
            "routes": [{"receiver": "hook", "continue": True}, {"receiver": "pager"}],
        },
        "receivers": [
            {"name": "hook", "webhook_configs": [{"url": hook, "send_resolved": True}]},
            {"name": "pager", "pagerduty_configs": [incidents]},
        ],
    }


class OnCall:
    """Five agents that notify on-call, directly and through two Alertmanagers."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.chat = stack.enter_context(HttpPeer())
        self.workspace = stack.enter_context(SlackWorkspace())
        self.direct = stack.enter_context(PagerDuty())
        self.routed = stack.enter_context(PagerDuty())  # behind Alertmanager, like the hook
        self.hook = stack.enter_context(HttpPeer())
        config = alertmanager_config(self.hook.url, self.routed.url)
        members = stack.enter_context(cluster_of_two(directory, config))
        self.imds = stack.enter_context(Simulator(VMS))
        self.sinks = self._sinks(members)
        self.agents: list[RunningAgent] = []
        for vm in VMS:
            endpoint = self.imds.endpoint_of(vm)
            agent = RunningAgent(endpoint, directory / vm, {"sinks": self.sinks}, interval="1s")
            self.agents.append(stack.enter_context(agent))

    def _sinks(self, alertmanagers: list[int]) -> dict[str, Any]:
        workspace = self.workspace
        bot = {"token": workspace.token, "channel": "#oncall", "api_url": workspace.api_url}
        pager = {"routing_key": ROUTING_KEY, "url": f"{self.direct.url}/v2/enqueue"}
        urls = [f"http://127.0.0.1:{port}" for port in alertmanagers]
        return {
            "each": {"slack": {"url": f"{self.chat.url}/services/T/B/each"}},
            "bot": {"slack": bot},
            "pager": {"pagerduty": pager},
            "am": {"alertmanager": {"urls": urls}},
        }

    @property
    def statuses(self) -> list[str]:
        """The notifications of Alertmanager."""
        return [json.loads(request.body)["status"] for request in self.hook.requests]

    def wait_for_deliveries(self, count: int) -> None:
        """Wait until each agent has sent so many changes to each sink."""
        for agent in self.agents:
            for sink in self.sinks:
                eventually(lambda: agent.count("delivered", sink) == count)


@pytest.fixture
def on_call(tmp_path: Path) -> Iterator[OnCall]:
    with ExitStack() as stack:
        yield OnCall(stack, tmp_path)


@pytest.mark.long
def test_reboot_of_five_vms_is_one_incident_that_is_closed_once(on_call: OnCall) -> None:
    reboot: dict[str, Any] = {
        "Resources": list(VMS),
        "EventType": "Reboot",
        "DurationInSeconds": -1,
    }
    not_before = format_datetime(datetime.now(UTC) + timedelta(minutes=15), usegmt=True)

    on_call.imds.set_document(body(item(**reboot, NotBefore=not_before), incarnation=2))
    on_call.wait_for_deliveries(1)
    eventually(lambda: on_call.statuses == ["firing"])
    eventually(lambda: on_call.routed.open)

    on_call.imds.set_document(body(item(**reboot, **STARTED), incarnation=3))
    on_call.wait_for_deliveries(2)

    on_call.imds.set_document(body(incarnation=4))
    on_call.wait_for_deliveries(3)
    eventually(lambda: on_call.statuses[-1] == "resolved")
    eventually(lambda: not on_call.routed.open)

    direct = on_call.direct
    routed = on_call.routed
    assert Counter(direct.effects) == {"opened": 1, "added": 9, "resolved": 1, "nothing": 4}
    assert on_call.statuses == ["firing", "resolved"]
    assert [effect for effect in routed.effects if effect != "added"] == ["opened", "resolved"]
    assert direct.faults == []
    assert routed.faults == []

    # the messages of all agents name the event by its first VM
    for request in on_call.chat.requests:
        assert "web_0 " in json.loads(request.body)["text"]

    # the bot of each agent posts a message, and updates it
    posted = on_call.workspace.posted
    assert len(posted) == len(VMS)
    assert {message.title for message in posted} == {"Reboot of web_0 and 4 more is over"}
    assert {len(message.thread) for message in posted} == {3}
    assert on_call.workspace.faults == []
