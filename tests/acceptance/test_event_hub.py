"""The agent with an Event Hub: its changes in the stream, its signs of life, and what the commands
say of it.
"""

import os
import signal
from pathlib import Path

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually
from support.azure import FUTURE, ME, body, item
from support.hub import Hub


def types(hub: Hub) -> list[str]:
    return [
        event.envelope["type"].removeprefix("notbefore.").removesuffix(".v1")
        for event in hub.stored
    ]


def test_hub_gets_changes_and_heartbeats_when_hub_and_courier_are_killed(
    hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "hub-key").write_text(hub.connection_string(), encoding="utf-8")
    sink = {"event_hub": {"connection_string_file": "hub-key", "heartbeat": "5m"}}
    config = {"records": {"tags": ["Role", "absent"]}, "sinks": {"hub": sink}}
    with Simulator((ME,)) as imds, RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
        eventually(lambda: types(hub) == ["heartbeat"])
        assert hub.stored[0].envelope["data"]["host.name"] == ME

        imds.set_document(body(item("e", NotBefore=FUTURE), incarnation=2))
        eventually(lambda: len(hub.stored) == 2)

        hub.kill()
        imds.set_document(body(item("e", EventStatus="Started", NotBefore=""), incarnation=3))
        agent.wait_for_changes("announced", "started")
        os.kill(agent.courier(), signal.SIGKILL)
        hub.start()
        imds.set_document(body(incarnation=4))

        eventually(lambda: len({event.envelope["id"] for event in hub.stored}) == 4)
    found = [kind for kind in types(hub) if kind != "heartbeat"]

    assert list(dict.fromkeys(found)) == [
        f"scheduled_event.{kind}" for kind in ("announced", "started", "finished")
    ]
    assert {event.envelope["data"].get("azure.tag.role") for event in hub.stored} == {"simulated"}
    assert "absent" not in str(hub.stored)

    # all that the group of this VM reports, signs of life included
    keys = {event.key for event in hub.stored}
    assert [key.rpartition("/")[2] for key in keys if key] == ["westno"]
