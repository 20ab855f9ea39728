"""One Reboot of five VMs of a scale set: what on-call gets on each road."""

import json
from collections import Counter
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


def both(hook: str, pager: str) -> dict[str, Any]:
    """The configuration of Alertmanager: everything goes to a webhook and to PagerDuty."""
    incidents = {"routing_key": ROUTING_KEY, "url": f"{pager}/v2/enqueue", "severity": "critical"}
    return {
        "route": {
            "receiver": "hook",
            "group_by": ["alertname", "event_id"],
            "group_wait": "2s",
            # longer than the other member waits: it sends what it saw before
            "group_interval": "12s",
            "routes": [{"receiver": "hook", "continue": True}, {"receiver": "pager"}],
        },
        "receivers": [
            {"name": "hook", "webhook_configs": [{"url": hook, "send_resolved": True}]},
            {"name": "pager", "pagerduty_configs": [incidents]},
        ],
    }


@pytest.mark.long
def test_reboot_of_five_vms_is_one_incident_that_is_closed_once(
    hook: HttpPeer, tmp_path: Path
) -> None:
    reboot: dict[str, Any] = {
        "Resources": list(VMS),
        "EventType": "Reboot",
        "DurationInSeconds": -1,
    }
    later = {"NotBefore": format_datetime(datetime.now(UTC) + timedelta(minutes=15), usegmt=True)}

    def statuses() -> list[str]:
        return [json.loads(request.body)["status"] for request in hook.requests]

    with ExitStack() as stack:
        chat = stack.enter_context(HttpPeer())
        workspace = stack.enter_context(SlackWorkspace())
        direct, routed = (stack.enter_context(PagerDuty()) for _ in range(2))
        members = stack.enter_context(cluster_of_two(tmp_path, both(hook.url, routed.url)))
        simulator = stack.enter_context(Simulator(VMS))
        sinks = {
            "each": {"slack": {"url": f"{chat.url}/services/T/B/each"}},
            "bot": {
                "slack": {
                    "token": workspace.token,
                    "channel": "#oncall",
                    "api_url": workspace.api_url,
                }
            },
            "pager": {"pagerduty": {"routing_key": ROUTING_KEY, "url": f"{direct.url}/v2/enqueue"}},
            "am": {"alertmanager": {"urls": [f"http://127.0.0.1:{port}" for port in members]}},
        }
        agents = [
            RunningAgent(simulator.endpoint_of(vm), tmp_path / vm, {"sinks": sinks}, interval="1s")
            for vm in VMS
        ]
        for agent in agents:
            stack.enter_context(agent)
        steps = [
            ([item(**reboot, **later)], "firing"),
            ([item(**reboot, **STARTED)], "firing"),
            ([], "resolved"),
        ]
        for step, (listed, status) in enumerate(steps, start=1):
            simulator.set_document(body(*listed, incarnation=step + 1))
            eventually(
                lambda: {agent.count("delivered", to) for agent in agents for to in sinks} == {step}
            )
            eventually(lambda: statuses()[-1:] == [status])
            eventually(lambda: bool(routed.open) is (step < 3))

    assert Counter(direct.effects) == {"opened": 1, "added": 9, "resolved": 1, "nothing": 4}
    assert statuses() == ["firing", "resolved"]
    assert [step for step in routed.effects if step != "added"] == ["opened", "resolved"]
    assert not direct.faults
    assert not routed.faults
    # all say the same, of all five
    assert all("web_0 " in json.loads(request.body)["text"] for request in chat.requests)
    # each VM has a message of its own, which is updated
    assert len(workspace.posted) == len(VMS)
    assert {posted.title for posted in workspace.posted} == {"Reboot of web_0 and 4 more is over"}
    assert {len(posted.thread) for posted in workspace.posted} == {3}
    assert workspace.faults == []
