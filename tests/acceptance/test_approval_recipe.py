"""The recipe of docs/approval.md: an event of three VMs is approved once, when the last of them is prepared."""

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually

VMS: Final = ("web_0", "web_1", "web_2")
RECIPE: Final = (
    Path(__file__).parents[2].joinpath("docs/approval.md").read_text(encoding="utf-8").partition("## When all")[2]
)


class Prepared:
    """Each VM's own word that it is prepared, and the recipe that asks for it."""

    def __init__(self, directory: Path, timeout: str) -> None:
        self._files = directory / "prepared"
        for vm in VMS:
            (self._files / vm).mkdir(parents=True)
        handler = partial(_Handler, directory=str(self._files))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.config = self._install(directory, timeout)

    def _install(self, directory: Path, timeout: str) -> Path:
        script = directory / "all-prepared"
        (text,) = re.findall(r"```sh\n(.*?)```", RECIPE, re.DOTALL)
        assert "http://$vm:8080/" in text
        script.write_text(text.replace("http://$vm:8080/", f"http://127.0.0.1:{self.server.server_port}/$vm/"), "utf-8")
        script.chmod(0o755)
        (settings,) = re.findall(r"```yaml\n(.*?)```", RECIPE, re.DOTALL)
        values = yaml.safe_load(settings)
        values["approval"]["rules"][0]["approve_when"] = {"command": [str(script)], "timeout": timeout}
        config = directory / "notbefore.yml"
        config.write_text(json.dumps(values), encoding="utf-8")
        return config

    def prepare(self, vm: str) -> None:
        (self._files / vm / "prepared").touch()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def imds() -> Iterator[Simulator]:
    with Simulator(VMS) as simulator:
        yield simulator


def has_started(agent: RunningAgent) -> bool:
    return "started" in agent.kinds


def waited(imds: Simulator, polls: int = 30) -> None:
    now = imds.requests
    eventually(lambda: imds.requests > now + polls)


def test_three_agents_approve_once_and_not_before_the_last_is_prepared(imds: Simulator, tmp_path: Path) -> None:
    prepared = Prepared(tmp_path, "60s")
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                RunningAgent(imds.endpoint_of(vm), tmp_path / vm, str(prepared.config), "--allow-approval")
            ).ready()
            for vm in VMS
        ]
        event_id = imds.start("user-reboot", resources=VMS)
        for agent in agents:
            agent.reported("announced")
        for vm in (VMS[1], VMS[0]):
            prepared.prepare(vm)
            waited(imds)
            assert imds.start_requests == []
        prepared.prepare(VMS[2])
        eventually(lambda: imds.start_requests)
        for agent in agents:
            eventually(partial(has_started, agent))
        waited(imds)
        assert imds.start_requests == [event_id]
        assert [agent.kinds.count("approved") for agent in agents] == [1, 0, 0]
    prepared.server.shutdown()
    prepared.server.server_close()


def test_the_next_vm_approves_where_the_leader_s_agent_is_down(imds: Simulator, tmp_path: Path) -> None:
    prepared = Prepared(tmp_path, "2s")
    for vm in VMS:
        prepared.prepare(vm)
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                RunningAgent(imds.endpoint_of(vm), tmp_path / vm, str(prepared.config), "--allow-approval")
            ).ready()
            for vm in VMS[1:]
        ]
        event_id = imds.start("user-reboot", resources=VMS)
        for agent in agents:
            agent.reported("announced")
        waited(imds)
        assert imds.start_requests == []  # it is the leader's turn
        eventually(lambda: imds.start_requests, 60)
        for agent in agents:
            eventually(partial(has_started, agent))
        waited(imds)
        assert imds.start_requests == [event_id]
        assert [agent.kinds.count("approved") for agent in agents] == [1, 0]
    prepared.server.shutdown()
    prepared.server.server_close()
