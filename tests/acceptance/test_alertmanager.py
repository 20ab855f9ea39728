"""Three VMs tell a cluster of two Alertmanagers of the same event: one notification of it, and one of its end."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually
from support.alertmanager import alerts, cluster_of_two
from support.azure import FUTURE, body, item
from support.peers import HttpPeer

VMS = ("WestNO_0", "WestNO_1", "WestNO_2")


@pytest.fixture
def members(tmp_path: Path, hook: HttpPeer) -> Iterator[list[int]]:
    configuration = {
        "global": {"resolve_timeout": "12s"},
        "route": {
            "receiver": "hook",
            "group_by": ["alertname", "event_id"],
            # longer than one agent is behind another: it sends the alert again until it has seen the end as well
            "group_wait": "5s",
            "group_interval": "5s",
        },
        "receivers": [{"name": "hook", "webhook_configs": [{"url": hook.url, "send_resolved": True}]}],
    }
    with cluster_of_two(tmp_path, configuration) as ports:
        yield ports


def test_whatever_changes_of_an_event_it_stays_one_alert(members: list[int], tmp_path: Path) -> None:
    config = tmp_path / "notbefore.yaml"
    sink = {"alertmanager": {"urls": [f"http://127.0.0.1:{port}" for port in members], "resolve_timeout": "5m"}}
    routes = [{"match": {"scope": "self"}, "sinks": ["am"], "severity": "critical"}]
    config.write_text(yaml.safe_dump({"sinks": {"am": sink}, "routes": routes}), encoding="utf-8")
    first: dict[str, Any] = {"Resources": [VMS[0]], "EventType": "Reboot", "NotBefore": FUTURE}
    changes: list[dict[str, Any]] = [
        {"Resources": list(VMS[:2])},
        {"Resources": [VMS[1], VMS[0], VMS[2]]},
        {"Resources": [VMS[1]]},
        {"EventSource": "User"},
        {"EventType": "Redeploy"},
        {"DurationInSeconds": 5},
        {"NotBefore": "Mon, 02 Mar 2026 12:00:00 GMT"},
        {"EventStatus": "Started", "NotBefore": ""},
    ]
    with Simulator(VMS) as simulator, ExitStack() as stack:
        simulator.set_document(body())
        for vm in VMS[:2]:
            stack.enter_context(RunningAgent(simulator.endpoint_of(vm), tmp_path / vm, str(config))).ready()
        labels: list[dict[str, str]] = []
        for number, fields in enumerate([{}, *changes]):
            first |= fields | {"Description": f"step {number}"}
            simulator.set_document(body(item("first", **first), incarnation=number + 2))
            for port in members:
                eventually(lambda: any(f"step {number}" in said for said in descriptions(port)))  # noqa: B023 - called here
                labels += [one["labels"] for one in alerts(port)]
        simulator.set_document(body(incarnation=99))
        for port in members:
            eventually(lambda: alerts(port) == [])  # noqa: B023 - called here
    assert {tuple(sorted(one.items())) for one in labels} == {tuple(sorted(labels[0].items()))}


def descriptions(port: int) -> list[str]:
    return [one["annotations"]["description"] for one in alerts(port)]
