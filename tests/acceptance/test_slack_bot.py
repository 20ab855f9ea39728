"""The message of a Slack bot continues after a kill, and on another instance of the fleet."""

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.simulator.server import Simulator
from peers.slack import SlackWorkspace
from support.agent import PATIENCE, RunningAgent, eventually, notbefore
from support.azure import ME, STARTED, body, item
from support.azurite import Azurite
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.peers import Answer, HttpPeer

REBOOT = {"EventType": "Reboot"}
ANNOUNCED_DOCUMENT = body(item("e", **REBOOT))
STARTED_DOCUMENT = body(item("e", **REBOOT, **STARTED), incarnation=2)
ENDED_DOCUMENT = body(incarnation=3)
TITLES = [f"Reboot of {ME} has started", f"Reboot of {ME} is over"]
DRILL_TITLE = f"[EXERCISE] Reboot of {ME} is over"


@pytest.fixture
def slack() -> Iterator[SlackWorkspace]:
    with SlackWorkspace() as workspace:
        yield workspace
        assert workspace.faults == []


def bot(workspace: SlackWorkspace, directory: Path) -> dict[str, Any]:
    """Return the configuration of a sink, whose token is in a file."""
    token_file = directory / "slack-token"
    token_file.write_text(f"{workspace.token}\n", encoding="utf-8")
    token_file.chmod(0o600)
    settings = {
        "token_file": str(token_file),
        "channel": "#oncall",
        "api_url": workspace.api_url,
    }
    return {"slack": settings}


def configuration(
    workspace: SlackWorkspace, directory: Path, routes: list[dict[str, Any]] | None = None
) -> str:
    path = directory / "notbefore.yml"
    values = {"sinks": {"oncall": bot(workspace, directory)}, "routes": routes or []}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def stored_threads(state: Path) -> int:
    """Return how many events have a message in Slack by the state file."""
    with closing(sqlite3.connect(state / "notbefore.db", timeout=PATIENCE)) as db:
        count: int = db.execute("SELECT count(*) FROM rows WHERE kind = 'thread'").fetchone()[0]
    return count


def test_message_continues_after_kills_of_the_agent_and_its_courier(
    imds: Simulator, slack: SlackWorkspace, tmp_path: Path
) -> None:
    config = configuration(slack, tmp_path)
    state = tmp_path / "state"
    with RunningAgent(imds.endpoint, state, config) as agent:
        imds.set_document(ANNOUNCED_DOCUMENT)
        eventually(lambda: agent.count("delivered", "oncall") == 1)
        eventually(lambda: stored_threads(state) == 1)
        agent.stop(signal.SIGKILL)

    with RunningAgent(imds.endpoint, state, config) as agent:
        imds.set_document(STARTED_DOCUMENT)
        eventually(lambda: agent.count("delivered", "oncall") == 2)
        requests = len(slack.requests)
        slack.default = Answer(how="hang")
        imds.set_document(ENDED_DOCUMENT)
        # an idle courier may end at any time, but not during an attempt
        eventually(lambda: len(slack.requests) > requests)
        os.kill(agent.courier(), signal.SIGKILL)
        slack.default = Answer()
        eventually(lambda: agent.count("delivered", "oncall") == 3)
        eventually(lambda: stored_threads(state) == 0)

    (posted,) = slack.posted
    assert posted.title == TITLES[-1]
    assert posted.thread[1:] == TITLES
    assert posted.broadcast == TITLES[:1]
    assert slack.token not in agent.log


def test_reply_that_slack_limits_follows_in_the_same_thread(
    imds: Simulator, slack: SlackWorkspace, tmp_path: Path
) -> None:
    limit = Answer(429, (("Retry-After", "1"),), b'{"ok":false,"error":"ratelimited"}')
    slack.answers.extend([Answer(), limit])  # the message is posted, its reply is not
    config = configuration(slack, tmp_path)

    with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
        imds.set_document(ANNOUNCED_DOCUMENT)
        eventually(lambda: agent.count("delivered", "oncall") == 1)
        assert agent.count("failed", "oncall") == 1

    assert [len(posted.replies) for posted in slack.posted] == [1]
    assert slack.methods[2:] == ["chat.update", "chat.postMessage"]


def test_end_updates_the_message_when_no_route_leads_there(
    imds: Simulator, slack: SlackWorkspace, tmp_path: Path
) -> None:
    routes = [{"match": {"change": "started"}, "sinks": ["oncall"]}]
    config = configuration(slack, tmp_path, routes)
    with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
        imds.set_document(STARTED_DOCUMENT)
        eventually(lambda: agent.count("delivered", "oncall") == 1)
        imds.set_document(ENDED_DOCUMENT)
        # the update of the message and the reply are two requests
        eventually(lambda: agent.count("delivered", "oncall") == 2)

    (posted,) = slack.posted
    assert posted.title == TITLES[-1]
    assert posted.thread == [f"Reboot of {ME} has started without notice", TITLES[-1]]


def test_drill_ends_its_message_when_no_route_sends_the_end(
    imds: Simulator, slack: SlackWorkspace, tmp_path: Path
) -> None:
    routes = [{"match": {"change": "announced"}, "sinks": ["oncall"]}]
    config = configuration(slack, tmp_path, routes)
    state = tmp_path / "state"
    with RunningAgent(imds.endpoint, state, config) as agent:
        agent.wait_until_listening()
        drill = notbefore("drill", config, "--state-dir", str(state))

    assert drill.returncode == 0, drill.stdout + drill.stderr
    assert "No route sends the end of an event to oncall" in drill.stdout
    assert [posted.title for posted in slack.posted] == [DRILL_TITLE]


def test_check_config_names_a_token_of_another_kind(slack: SlackWorkspace, tmp_path: Path) -> None:
    config = configuration(slack, tmp_path)
    (tmp_path / "slack-token").write_text("xapp-1-canary", encoding="utf-8")

    done = notbefore("check-config", config)

    assert done.returncode == 2
    assert "expected a bot token, which begins with xoxb-" in done.stderr
    assert "canary" not in done.stderr + done.stdout


def test_another_fleet_instance_continues_the_message(
    slack: SlackWorkspace, hook: HttpPeer, tmp_path: Path
) -> None:
    web = vm("web_0")
    with Hub(tmp_path) as hub, Azurite(tmp_path) as blobs:
        checkpoints = {"connection_string": blobs.connection_string, "container": "notbefore"}
        config = write_fleet_config(tmp_path, hub, hook.url, checkpoints=checkpoints)
        values = yaml.safe_load(config.read_text(encoding="utf-8"))
        values["sinks"] = {"oncall": bot(slack, tmp_path)}
        config.write_text(yaml.safe_dump(values), encoding="utf-8")

        with RunningFleet(config, tmp_path / "one") as first:
            send(hub, [report(web, "announced", "E", event_type="Reboot")])
            eventually(lambda: len(slack.posted) == 1)
            eventually(lambda: [part for part in blobs.snapshots() if part.outbox.threads])
            first.stop(signal.SIGKILL)

        with RunningFleet(config, tmp_path / "one") as second:
            send(hub, [report(web, "started", "E", event_type="Reboot")])
            send(hub, [report(web, "finished", "E", event_type="Reboot")])
            eventually(lambda: len(slack.posted[0].thread) == 3)
            assert second.stop() == 0

    (posted,) = slack.posted
    assert posted.title == "Reboot of web_0 is over"
