"""Another version is installed over a running agent: everybody is notified, once, until the restart and after it."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, get
from support.azure import ME, listed
from support.installed import VERSION, Installed
from support.peers import HttpPeer

NEWER = {  # file -> what is another in the newer version
    "pyproject.toml": (VERSION, 'version = "9.9.9"'),
    "src/notbefore/store/schema.py": (
        r"(?s)SCHEMA_VERSION: Final = 1\n.*?= \{\}",
        'SCHEMA_VERSION: Final = 2\nMIGRATIONS: Final = {1: "CREATE TABLE newer (x);"}',
    ),
}

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory to keep the package in")


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed.make(tmp_path, NEWER)


def agent_of(installed: Installed, imds: Simulator, hook: HttpPeer, tmp_path: Path) -> RunningAgent:
    class Agent(RunningAgent):
        python = str(installed.place / "bin" / "python")

    config = tmp_path / "agent.yml"
    sink = {"webhook": {"url": hook.url, "allow_private": True}}
    config.write_text(yaml.safe_dump({"sinks": {"hook": sink}, "routes": [{"sinks": ["hook"]}]}), encoding="utf-8")
    return Agent(imds.endpoint, tmp_path / "state", str(config))


def arrived(hook: HttpPeer) -> list[str]:
    """The events that were announced, in the order of their arrival."""
    return [name for request in hook.requests for name in re.findall(r'"(E\d)"', request.body.decode())[:1]]


def copied(agent: RunningAgent) -> bool:
    """The agent has its copy: the process that makes it has ended."""
    found = []
    for one in Path(f"/proc/{agent.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed in the meantime
            found.append(one.readlink().name)
    children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text(encoding="ascii")
    return any(name.startswith("memfd:notbefore") for name in found) and not children


@pytest.mark.long
def test_deliveries_go_on_while_another_version_is_on_disk_and_after_the_restart(
    installed: Installed, hook: HttpPeer, tmp_path: Path
) -> None:
    with Simulator((ME,)) as imds:
        imds.set_document(listed())
        with agent_of(installed, imds, hook, tmp_path).ready() as agent:
            eventually(lambda: copied(agent))
            assert agent.metric("notbefore_restart_needed") == 0
            installed.install(installed.newer)
            eventually(lambda: agent.metric("notbefore_restart_needed"))
            eventually(lambda: b"(9.9.9) is not the one that runs" in get(agent.port, "/readyz")[1])
            assert get(agent.port, "/readyz")[0] == 200
            imds.set_document(listed("E1"))
            eventually(lambda: arrived(hook) == ["E1"])
            assert agent.metric('notbefore_courier_starts_total{reason="crashed"}') == 0
        assert "restart the agent; deliveries go on until then" in agent.log
        with agent_of(installed, imds, hook, tmp_path).ready() as newer:
            imds.set_document(listed("E1", "E2"))
            eventually(lambda: arrived(hook)[1:])
            assert newer.metric("notbefore_restart_needed") == 0
            eventually(lambda: newer.metric('notbefore_deliveries_total{result="delivered",sink="hook"}') == 2)
    assert arrived(hook) == ["E1", "E2"]


def test_a_courier_that_runs_while_another_version_is_installed_is_replaced(
    installed: Installed, hook: HttpPeer, tmp_path: Path
) -> None:
    with Simulator((ME,)) as imds:
        imds.set_document(listed("E1"))
        with agent_of(installed, imds, hook, tmp_path).ready() as agent:
            eventually(lambda: arrived(hook) == ["E1"])  # and its courier lingers for a minute
            installed.install(installed.newer)
            eventually(lambda: agent.metric("notbefore_restart_needed"))
            imds.set_document(listed("E1", "E2"))
            eventually(lambda: arrived(hook)[1:])
            eventually(lambda: agent.metric('notbefore_courier_starts_total{reason="upgrade"}'))
    assert arrived(hook) == ["E1", "E2"]


def test_deliveries_go_on_while_an_installation_has_removed_the_package(
    installed: Installed, hook: HttpPeer, tmp_path: Path
) -> None:
    with Simulator((ME,)) as imds:
        imds.set_document(listed())
        with agent_of(installed, imds, hook, tmp_path).ready() as agent:
            eventually(lambda: copied(agent))
            for path in installed.packages.glob("*notbefore*"):
                shutil.rmtree(path)
            imds.set_document(listed("E1"))
            eventually(lambda: arrived(hook) == ["E1"])
            eventually(lambda: b"restart the agent" in get(agent.port, "/readyz")[1])
