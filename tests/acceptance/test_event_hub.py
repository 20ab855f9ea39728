"""The installed agent sends changes and heartbeats to a simulated Event Hub."""

import os
import signal
from pathlib import Path

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually
from support.azure import FUTURE, ME, body, item
from support.hub import Hub


def types(hub: Hub) -> list[str]:
    """Return the types of the stored events in order; a repetition counts once."""
    types_by_id = {event.envelope["id"]: event.envelope["type"] for event in hub.stored}
    return list(types_by_id.values())


def test_hub_gets_changes_and_heartbeats_despite_kills(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub-key").write_text(hub.connection_string(), encoding="utf-8")
    sink = {"event_hub": {"connection_string_file": "hub-key", "heartbeat": "5m"}}
    config = {"records": {"tags": ["Role", "absent"]}, "sinks": {"hub": sink}}
    with Simulator((ME,)) as imds, RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
        eventually(lambda: types(hub) == ["notbefore.heartbeat.v1"])
        assert hub.stored[0].envelope["data"]["host.name"] == ME

        imds.set_document(body(item("e", NotBefore=FUTURE), incarnation=2))
        eventually(lambda: len(types(hub)) == 2)

        hub.kill()
        imds.set_document(body(item("e", EventStatus="Started", NotBefore=""), incarnation=3))
        agent.wait_for_changes("announced", "started")
        os.kill(agent.courier(), signal.SIGKILL)
        hub.start()
        imds.set_document(body(incarnation=4))

        eventually(lambda: len(types(hub)) == 4)

    assert types(hub) == [
        "notbefore.heartbeat.v1",
        "notbefore.scheduled_event.announced.v1",
        "notbefore.scheduled_event.started.v1",
        "notbefore.scheduled_event.finished.v1",
    ]
    assert {event.envelope["data"].get("azure.tag.role") for event in hub.stored} == {"simulated"}
    assert "absent" not in str(hub.stored)

    # the group of this VM has one partition key, for changes and heartbeats
    (key,) = {event.key for event in hub.stored}
    assert key is not None
    assert key.endswith("/westno")
