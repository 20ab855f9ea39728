"""One Reboot of five VMs of a scale set: what on-call gets on each road. It prints the transcript (``pytest -s``)."""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.simulator.server import Simulator
from peers.pagerduty import ROUTING_KEY, PagerDuty
from support.agent import RunningAgent, eventually
from support.alertmanager import cluster_of_two
from support.azure import STARTED, body, item
from support.needs import needs
from support.peers import HttpPeer

VMS = tuple(f"web_{number}" for number in range(5))


class OnCall:
    """The receivers on all roads, and what each of them got."""

    def __init__(self, stack: ExitStack) -> None:
        needs("prometheus-alertmanager")
        self.began = time.monotonic()
        self.each, self.hook = (stack.enter_context(HttpPeer()) for _ in range(2))
        self.direct, self.routed = (stack.enter_context(PagerDuty()) for _ in range(2))

    def chat(self, peer: HttpPeer) -> list[str]:
        return [json.loads(request.body)["text"] for request in peer.requests]

    @property
    def alertmanager(self) -> list[str]:
        return [json.loads(request.body)["status"] for request in self.hook.requests]

    def say(self, step: str) -> None:
        """Print what has arrived so far."""
        lines = {
            "Slack": f"{len(self.chat(self.each))} messages",
            "pagerduty": dict(Counter(self.direct.effects)),
            "Alertmanager, its webhook": self.alertmanager,
            "Alertmanager, its PagerDuty": self.routed.effects,
        }
        sys.stdout.write(f"\n{time.monotonic() - self.began:.1f} s: {step}\n")
        sys.stdout.writelines(f"  {road:29} {got}\n" for road, got in lines.items())


@pytest.fixture
def on_call() -> Iterator[OnCall]:
    with ExitStack() as stack:
        yield OnCall(stack)


def configuration(on_call: OnCall, members: list[int]) -> dict[str, Any]:
    return {
        "sinks": {
            "each": {"slack": {"url": f"{on_call.each.url}/services/T/B/each"}},
            "pager": {"pagerduty": {"routing_key": ROUTING_KEY, "url": f"{on_call.direct.url}/v2/enqueue"}},
            "am": {"alertmanager": {"urls": [f"http://127.0.0.1:{port}" for port in members]}},
        },
    }


def receivers(on_call: OnCall) -> dict[str, Any]:
    """The configuration of Alertmanager: everything goes to a webhook and to PagerDuty."""
    pager = {"routing_key": ROUTING_KEY, "url": f"{on_call.routed.url}/v2/enqueue", "severity": "critical"}
    return {
        "route": {
            "receiver": "hook",
            "group_by": ["alertname", "event_id"],
            "group_wait": "2s",
            "group_interval": "2s",
            "routes": [{"receiver": "hook", "continue": True}, {"receiver": "pager"}],
        },
        "receivers": [
            {"name": "hook", "webhook_configs": [{"url": on_call.hook.url, "send_resolved": True}]},
            {"name": "pager", "pagerduty_configs": [pager]},
        ],
    }


@pytest.mark.long
def test_on_call_is_notified_once_of_a_reboot_of_five_vms_and_the_incident_is_closed_once(
    on_call: OnCall, tmp_path: Path
) -> None:
    reboot: dict[str, Any] = {"Resources": list(VMS), "EventType": "Reboot", "DurationInSeconds": -1}
    later = {"NotBefore": format_datetime(datetime.now(UTC) + timedelta(minutes=15), usegmt=True)}
    config = tmp_path / "notbefore.yaml"
    with ExitStack() as stack:
        members = stack.enter_context(cluster_of_two(tmp_path, receivers(on_call)))
        simulator = stack.enter_context(Simulator(VMS))
        simulator.set_document(body())
        config.write_text(yaml.safe_dump(configuration(on_call, members)), encoding="utf-8")
        for vm in VMS:
            agent = RunningAgent(simulator.endpoint_of(vm), tmp_path / vm, str(config), interval="1s")
            stack.enter_context(agent).ready()
        on_call.say("five agents watch; the Reboot is announced")
        for step, (listed, so_far) in enumerate(
            [([item(**reboot, **later)], "announced"), ([item(**reboot, **STARTED)], "started"), ([], "over")], start=1
        ):
            simulator.set_document(body(*listed, incarnation=step + 1))
            eventually(lambda: len(on_call.chat(on_call.each)) == 5 * step)  # noqa: B023 - it is called here
            eventually(lambda: len(on_call.direct.effects) == 5 * step)  # noqa: B023 - as above
            eventually(lambda: on_call.alertmanager[-1:] == [("firing", "firing", "resolved")[step - 1]])  # noqa: B023 - as above
            eventually(lambda: bool(on_call.routed.open) is (step < 3))  # noqa: B023 - as above
            on_call.say(f"the Reboot is {so_far}")
    assert len(on_call.chat(on_call.each)) == 15
    assert Counter(on_call.direct.effects) == {"opened": 1, "added": 9, "resolved": 1, "nothing": 4}
    assert on_call.alertmanager == ["firing", "resolved"]
    assert [step for step in on_call.routed.effects if step != "added"] == ["opened", "resolved"]
    assert not on_call.direct.wrong
    assert not on_call.routed.wrong
    assert not any("web_0 " not in text for text in on_call.chat(on_call.each))  # all say the same, and of all five
