"""A Preempt deletes a VM with its agent: the neighbors report the end of the event."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from notbefore.simulator.server import Simulator
from peers.pagerduty import ROUTING_KEY, PagerDuty
from support.agent import RunningAgent, becomes, eventually, write_config
from support.alertmanager import cluster_of_two
from support.azure import FUTURE, STARTED, body, item
from support.fleet_instance import RunningFleet, write_fleet_config
from support.hub import Hub
from support.peers import HttpPeer

GONE = "web_0"
NEIGHBOR = "web_1"
PREEMPT: dict[str, Any] = {"Resources": [GONE], "EventType": "Preempt", "DurationInSeconds": -1}
REBOOT: dict[str, Any] = {**PREEMPT, "EventType": "Reboot"}
MAX_SECONDS_TO_CLOSE = 30.0  # from the end of the event until its incident is closed
# seconds; longer than the second Alertmanager waits for the first: otherwise both notify
GROUP_INTERVAL = 12.0


@contextmanager
def two_agents(
    imds: Simulator, directory: Path, settings: dict[str, Any]
) -> Iterator[tuple[RunningAgent, RunningAgent]]:
    gone = RunningAgent(imds.endpoint_of(GONE), directory / GONE, settings)
    neighbor = RunningAgent(imds.endpoint_of(NEIGHBOR), directory / NEIGHBOR, settings)
    with gone, neighbor:
        yield gone, neighbor


@pytest.fixture
def imds() -> Iterator[Simulator]:
    with Simulator((GONE, NEIGHBOR)) as simulator:
        yield simulator


def pagerduty_sink(pager: PagerDuty) -> dict[str, Any]:
    return {"pagerduty": {"routing_key": ROUTING_KEY, "url": f"{pager.url}/v2/enqueue"}}


def webhook_sink(hook: HttpPeer, **settings: Any) -> dict[str, Any]:
    return {"webhook": {"url": hook.url, "allow_private": True, **settings}}


def changes_at(hook: HttpPeer) -> list[str]:
    return [json.loads(request.body)["azure.scheduled_event.change"] for request in hook.requests]


def list_events(imds: Simulator, number: int, *events: dict[str, Any]) -> None:
    imds.set_document(body(*events, incarnation=number))


def reported_by_both(agents: tuple[RunningAgent, RunningAgent], *changes: str) -> None:
    """Wait until both agents have reported exactly these changes, in any order.

    Each polls at its own times, so the next document may come between their polls. An agent that
    has missed a document reports other changes than a test expects.
    """
    for agent in agents:
        becomes(lambda: sorted(agent.kinds), sorted(changes))


def test_neighbor_closes_incidents_of_a_preempted_vm(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        pager = stack.enter_context(PagerDuty())
        chat = stack.enter_context(HttpPeer())
        sinks = {
            "chat": webhook_sink(chat),
            "hook": webhook_sink(hook, dedup_key="incident"),
            "pager": pagerduty_sink(pager),
        }
        agents = stack.enter_context(two_agents(imds, tmp_path, {"sinks": sinks}))
        list_events(imds, 2, item(**PREEMPT))
        reported_by_both(agents, "announced")
        becomes(lambda: pager.effects, ["opened"])
        list_events(imds, 3, item(**PREEMPT, **STARTED))
        reported_by_both(agents, "announced", "started")
        becomes(lambda: pager.effects, ["opened", "added"])
        eventually(lambda: changes_at(hook) == changes_at(chat) == ["announced", "started"])

        gone, _neighbor = agents
        gone.stop(signal.SIGKILL)
        ended = time.monotonic()
        list_events(imds, 4)

        becomes(lambda: pager.effects, ["opened", "added", "resolved"])
        eventually(lambda: changes_at(hook) == ["announced", "started", "finished"])
        assert time.monotonic() - ended < MAX_SECONDS_TO_CLOSE
        assert changes_at(chat) == ["announced", "started"]
        keys = {json.loads(request.body)["incident"] for request in hook.requests}
        assert keys == {pager.steps[0].dedup_key}
        assert pager.faults == []


def test_neighbor_sends_only_its_own_events_besides_preempts(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    with PagerDuty() as pager:
        sinks = {"hook": webhook_sink(hook), "pager": pagerduty_sink(pager)}
        neighbor = RunningAgent(imds.endpoint_of(NEIGHBOR), tmp_path / NEIGHBOR, {"sinks": sinks})
        with neighbor:
            list_events(imds, 2, item(**REBOOT))
            neighbor.wait_for_changes("announced")
            list_events(imds, 3, item(**REBOOT, **STARTED))
            neighbor.wait_for_changes("announced", "started")
            list_events(imds, 4)
            neighbor.wait_for_changes("announced", "started", "finished")
            list_events(imds, 5, item("own", Resources=[NEIGHBOR]))

            becomes(lambda: pager.effects, ["opened"])
            becomes(lambda: changes_at(hook), ["announced"])


def test_end_without_an_incident_does_no_harm(imds: Simulator, tmp_path: Path) -> None:
    with PagerDuty() as pager:
        settings = {"sinks": {"pager": pagerduty_sink(pager)}}
        neighbor = RunningAgent(imds.endpoint_of(NEIGHBOR), tmp_path / NEIGHBOR, settings)
        with neighbor:
            list_events(imds, 2, item(**PREEMPT))
            neighbor.wait_for_changes("announced")

            list_events(imds, 3)

            becomes(lambda: pager.effects, ["nothing"])
            eventually(lambda: neighbor.count("delivered", "pager") == 1)
            assert pager.open == set()


@pytest.mark.long
def test_neighbor_ends_alert_of_a_preempted_vm_once(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    routing = {
        "route": {
            "receiver": "hook",
            "group_by": ["alertname", "event_id"],
            "group_wait": "1s",
            "group_interval": f"{GROUP_INTERVAL:g}s",
        },
        "receivers": [
            {"name": "hook", "webhook_configs": [{"url": hook.url, "send_resolved": True}]}
        ],
    }

    def statuses() -> list[str]:
        return [json.loads(request.body)["status"] for request in hook.requests]

    with ExitStack() as stack:
        members = stack.enter_context(cluster_of_two(tmp_path, routing))
        urls = [f"http://127.0.0.1:{port}" for port in members]
        settings = {"sinks": {"am": {"alertmanager": {"urls": urls}}}}
        agents = stack.enter_context(two_agents(imds, tmp_path, settings))
        gone, neighbor = agents
        never_opened = {**PREEMPT, "Resources": ["web_9"], "NotBefore": FUTURE}
        list_events(imds, 2, item("never-opened", **never_opened))
        reported_by_both(agents, "announced")
        list_events(imds, 3, item(**PREEMPT))
        reported_by_both(agents, "announced", "canceled", "announced")
        eventually(lambda: neighbor.count("delivered", "am") == 1)
        becomes(statuses, ["firing"])
        list_events(imds, 4, item(**PREEMPT, **STARTED))
        reported_by_both(agents, "announced", "canceled", "announced", "started")
        eventually(lambda: gone.count("delivered", "am") >= 3)

        gone.stop(signal.SIGKILL)
        ended = time.monotonic()
        list_events(imds, 5)

        becomes(lambda: statuses()[-1], "resolved")
        assert time.monotonic() - ended < MAX_SECONDS_TO_CLOSE
        assert statuses() == ["firing", "resolved"]


def test_fleet_closes_preempt_whose_agent_died(
    hub: Hub, hook: HttpPeer, imds: Simulator, tmp_path: Path
) -> None:
    fleet_config = write_fleet_config(tmp_path, hub, hook.url, group_by=["event_id"])
    key = tmp_path / "hub-key"
    settings = {
        "sinks": {"hub": {"event_hub": {"connection_string_file": str(key)}}},
        "routes": [{"sinks": ["hub"]}],
    }
    with ExitStack() as stack:
        fleet = stack.enter_context(RunningFleet(fleet_config, tmp_path / "fleet"))
        agents = stack.enter_context(two_agents(imds, tmp_path, settings))
        gone, neighbor = agents
        list_events(imds, 2, item(**PREEMPT))
        reported_by_both(agents, "announced")
        becomes(lambda: changes_at(hook), ["announced"])
        list_events(imds, 3, item(**PREEMPT, **STARTED))
        becomes(lambda: changes_at(hook), ["announced", "started"])
        eventually(lambda: neighbor.count("delivered", "hub") == 2)

        gone.stop(signal.SIGKILL)
        list_events(imds, 4)

        becomes(lambda: changes_at(hook), ["announced", "started", "finished"])
        eventually(lambda: fleet.json("/api/v1/fleet/events")["waves"] == [])


def test_moved_route_does_not_leave_incident_open(imds: Simulator, tmp_path: Path) -> None:
    with ExitStack() as stack:
        before = stack.enter_context(PagerDuty())
        after = stack.enter_context(PagerDuty())
        sinks = {"before": pagerduty_sink(before), "after": pagerduty_sink(after)}
        settings = {"sinks": sinks, "routes": [{"sinks": ["before"]}]}
        agent = RunningAgent(imds.endpoint_of(GONE), tmp_path / GONE, settings)
        stack.enter_context(agent)
        list_events(imds, 2, item(**REBOOT, **STARTED))
        eventually(lambda: agent.count("delivered", "before") == 1)

        reload_with(agent, {"sinks": sinks, "routes": [{"sinks": ["after"]}]})
        list_events(imds, 3)

        becomes(lambda: before.effects, ["opened", "resolved"])
        becomes(lambda: after.effects, ["nothing"])
        assert before.open == set()


def test_restart_with_moved_route_does_not_leave_incident_open(
    imds: Simulator, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        before = stack.enter_context(PagerDuty())
        after = stack.enter_context(PagerDuty())
        sinks = {"before": pagerduty_sink(before), "after": pagerduty_sink(after)}
        settings = {"sinks": sinks, "routes": [{"sinks": ["before"]}]}
        with RunningAgent(imds.endpoint_of(GONE), tmp_path / GONE, settings) as agent:
            list_events(imds, 2, item(**REBOOT, **STARTED))
            eventually(lambda: agent.count("delivered", "before") == 1)

        moved = {"sinks": sinks, "routes": [{"sinks": ["after"]}]}
        with RunningAgent(imds.endpoint_of(GONE), tmp_path / GONE, moved):
            list_events(imds, 3)

            becomes(lambda: before.effects, ["opened", "resolved"])


def test_removed_sink_is_named_when_its_event_ends(imds: Simulator, tmp_path: Path) -> None:
    with ExitStack() as stack:
        before = stack.enter_context(PagerDuty())
        after = stack.enter_context(PagerDuty())
        settings = {"sinks": {"before": pagerduty_sink(before)}}
        agent = RunningAgent(imds.endpoint_of(GONE), tmp_path / GONE, settings)
        stack.enter_context(agent)
        list_events(imds, 2, item(**REBOOT, **STARTED))
        eventually(lambda: agent.count("delivered", "before") == 1)

        reload_with(agent, {"sinks": {"after": pagerduty_sink(after)}})
        list_events(imds, 3)

        becomes(lambda: after.effects, ["nothing"])
        eventually(lambda: "sink before is no longer configured" in agent.log)
        assert "does not get the end of event" in agent.log


def reload_with(agent: RunningAgent, settings: dict[str, Any]) -> None:
    """Write another configuration, and let the agent read it."""
    write_config(agent.state, settings)
    agent.process.send_signal(signal.SIGHUP)
    eventually(lambda: "configuration reloaded" in agent.log)
