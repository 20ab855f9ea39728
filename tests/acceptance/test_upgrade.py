"""A running agent ends for a newer version that works, and not for one that does not."""

import json
import sys
from pathlib import Path

import pytest

from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, RunningAgent, eventually, get, run
from support.azure import ME, listed
from support.installed import NEWER, environment, install, wheel
from support.peers import HttpPeer

REFUSING = {  # a newer version with another name for a key
    **NEWER,
    "src/notbefore/config/model.py": (
        r"    records: Records = Records\(\)",
        "    recordz: Records = Records()",
    ),
}


def agent_of(place: Path, imds: Simulator, hook: HttpPeer) -> RunningAgent:
    class Agent(RunningAgent):
        python = str(place / "opt/bin/python")

    sink = {"webhook": {"url": hook.url, "allow_private": True}}
    return Agent(imds.endpoint, place / "state", {"sinks": {"hook": sink}})


def wheels(place: Path, changes: dict[str, tuple[str, str]]) -> tuple[Path, Path]:
    """Build this version and the newer one with these changes; install this version."""
    older = wheel(place / "older", {})
    newer = wheel(place / "newer", changes)
    environment(place / "opt", older)
    return older, newer


def arrived(hook: HttpPeer) -> list[str]:
    """Return the events that were announced, in the order of their arrival."""
    return [json.loads(request.body)["azure.scheduled_event.id"] for request in hook.requests]


def test_agent_continues_when_a_newer_version_refuses_its_config(
    hook: HttpPeer, tmp_path: Path
) -> None:
    older, newer = wheels(tmp_path, REFUSING)
    with Simulator((ME,)) as imds:
        imds.set_document(listed())
        with agent_of(tmp_path, imds, hook) as agent:
            # the first scrape imports modules of the older version
            assert agent.metric("notbefore_restart_needed") == 0

            with (tmp_path / "state.yaml").open("a", encoding="utf-8") as config:
                config.write("records: {tags: [team]}\n")
            install(tmp_path / "opt", newer)
            imds.set_document(listed("E1"))
            agent.wait_for_changes("announced")

            eventually(lambda: b"records" in get(agent.port, "/readyz")[1])
            assert agent.metric("notbefore_restart_needed") == 1
            assert agent.process.poll() is None

            install(tmp_path / "opt", older)
            eventually(lambda: arrived(hook) == ["E1"])


COMMAND_THAT_DISAPPEARS = f"""#!{sys.executable}
import sys
from pathlib import Path
from notbefore.courier.upgrade import UpgradeCheck

Path(sys.argv[0]).unlink()
try:
    UpgradeCheck(["--help"]).end()
except FileNotFoundError as error:
    print("missing:", error.filename)
"""


def test_check_fails_while_the_command_is_missing(tmp_path: Path) -> None:
    command = tmp_path / "notbefore"
    command.write_text(COMMAND_THAT_DISAPPEARS)
    command.chmod(0o755)

    done = run(command)

    assert done.stdout == f"missing: {command}\n"


@pytest.mark.long
def test_agent_ends_for_a_newer_version_that_works(hook: HttpPeer, tmp_path: Path) -> None:
    _, newer = wheels(tmp_path, NEWER)

    with Simulator((ME,)) as imds:
        imds.set_document(listed("E1"))

        with agent_of(tmp_path, imds, hook) as agent:
            eventually(lambda: agent.count("delivered") == 1)

            install(tmp_path / "opt", newer)
            assert agent.process.wait(PATIENCE) == 0, "a service manager starts the new version"

        assert "notbefore 9.9.9 is installed, and works" in agent.log

        imds.set_document(listed("E1", "E2"))
        with agent_of(tmp_path, imds, hook) as agent:
            eventually(lambda: agent.count("delivered") == 2)
            assert agent.metric("notbefore_restart_needed") == 0

    assert arrived(hook) == ["E1", "E2"]
