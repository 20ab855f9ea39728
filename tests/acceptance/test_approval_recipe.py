"""The recipe of docs/approval.md approves an event of three VMs when all three are prepared."""

import http.server
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from notbefore.courier.sinks.command import run, variables
from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, RunningAgent, eventually, notbefore
from support.azure import FUTURE, body, item
from support.needs import needs
from support.peers import Answer, HttpPeer

VMS: Final = ("web_0", "web_1", "web_2")
RECIPE: Final = (
    Path(__file__)
    .parents[2]
    .joinpath("docs/approval.md")
    .read_text(encoding="utf-8")
    .partition("## Approve when all VMs are prepared")[2]
)

(SCRIPT,) = re.findall(r"```sh\n(.*?)```", RECIPE, re.DOTALL)


class PreparedVms(HttpPeer):
    """Answers for each VM whether it is prepared, and installs the recipe that asks this."""

    def __init__(self, directory: Path) -> None:
        needs("curl")
        super().__init__()
        self.vms = set[str]()  # those that are prepared
        self.script = directory / "all-prepared"
        self.config = self._install(directory)

    def __exit__(self, *error: object) -> None:
        """Wait for the end of the scripts, which outlive their agent and would ask another test."""
        self.vms.update(VMS)
        eventually(lambda: not self._is_script_running())
        super().__exit__(*error)

    def _is_script_running(self) -> bool:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if str(self.script).encode() in (process / "cmdline").read_bytes():
                    return True
        return False

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:  # noqa: ARG002 - it has answers of its own
        vm = handler.path.split("/")[1]
        status = 200 if vm in self.vms else 404
        super().answer(handler, Answer(status))

    def asked(self, vm: str) -> int:
        """Return how many times the scripts have asked whether this VM is prepared."""
        return sum(request.path.startswith(f"/{vm}/") for request in list(self.requests))

    def _install(self, directory: Path) -> Path:
        text = SCRIPT.replace("http://$vm:8080/", f"{self.url}/$vm/")
        here = f"{sys.executable} -m notbefore approve --state-dir {directory}/$NOTBEFORE_VM"
        self.script.write_text(text.replace("notbefore approve", here), "utf-8")
        self.script.chmod(0o755)
        (settings,) = re.findall(r"```yaml\n(.*?)```", RECIPE, re.DOTALL)
        values = yaml.safe_load(settings)
        values["sinks"]["prepared"]["command"]["command"] = [str(self.script)]
        config = directory / "notbefore.yml"
        config.write_text(json.dumps(values), encoding="utf-8")
        return config


@pytest.fixture
def imds() -> Iterator[Simulator]:
    with Simulator(VMS) as simulator:
        yield simulator


def agent_of(imds: Simulator, vm: str, prepared: PreparedVms, directory: Path) -> RunningAgent:
    """Start the agent of a VM with the configuration of the recipe."""
    words = (str(prepared.config), "--allow-approval")
    return RunningAgent(imds.endpoint_of(vm), directory / vm, *words)


def approvals(agents: list[RunningAgent]) -> list[dict[str, Any]]:
    """Return the records of approvals by operators."""
    records: list[dict[str, Any]] = []
    for agent in agents:
        for record in agent.records:
            if "azure.scheduled_event.approval.by" in record:
                records.append(record)
    return records


def test_recipe_approves_once_all_three_vms_are_prepared(imds: Simulator, tmp_path: Path) -> None:
    with ExitStack() as stack:
        prepared = stack.enter_context(PreparedVms(tmp_path))
        agents = [stack.enter_context(agent_of(imds, vm, prepared, tmp_path)) for vm in VMS]
        for agent in agents:
            agent.wait_until_listening()
        event_id = imds.start("user-reboot", resources=VMS)
        for agent in agents:
            agent.wait_for_changes("announced")
        prepared.vms.update(VMS[:2])
        # each script waits for the last VM now
        eventually(lambda: prepared.asked(VMS[2]) >= 2 * len(VMS))
        assert imds.start_requests == []

        prepared.vms.add(VMS[2])

        eventually(lambda: imds.start_requests)
        for agent in agents:
            eventually(lambda: "started" in agent.kinds)
        eventually(lambda: approvals(agents))

    # several VMs may have asked at the same moment
    assert set(imds.start_requests) == {event_id}
    for record in approvals(agents):
        assert record["azure.scheduled_event.approval.reason"] == "all VMs are prepared"


def test_recipe_asks_each_of_400_vms_by_its_whole_name(tmp_path: Path) -> None:
    names = [f"a-scale-set-with-a-long-name_{number}" for number in range(400)]
    write_program(tmp_path / "curl", 'for url; do :; done; echo "$url" >> asked')
    write_program(tmp_path / "notbefore", 'echo "$@" > approved')
    fields = {"azure.scheduled_event.id": "a", "azure.scheduled_event.resources": names}
    environment = variables(fields, {}) | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    record = json.dumps(fields).encode()

    code, output = run(["/bin/sh", "-c", SCRIPT], record, environment, PATIENCE)

    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    approved = (tmp_path / "approved").read_text(encoding="utf-8")
    assert code == 0
    assert output == ""
    assert asked == [f"http://{name}:8080/prepared" for name in names]
    assert approved.startswith("approve a --yes --unchanged -")


def write_program(path: Path, script: str) -> None:
    """Write a shell script that runs in its own directory."""
    path.write_text(f"#!/bin/sh\ncd {path.parent}; {script}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize("resources", [{"Resources": []}, {}])
def test_recipe_approves_no_event_without_resources(
    imds: Simulator, tmp_path: Path, resources: dict[str, list[str]]
) -> None:
    event = item("a", NotBefore=FUTURE)
    del event["Resources"]
    with (
        PreparedVms(tmp_path) as prepared,
        agent_of(imds, VMS[0], prepared, tmp_path) as agent,
    ):
        agent.wait_until_listening()
        prepared.vms.update(VMS)
        imds.set_document(body({**event, **resources}, incarnation=2))

        eventually(lambda: "the event names no VM" in agent.log)
        assert imds.start_requests == []

        state = ("--state-dir", str(agent.state))
        refused = notbefore("approve", "a", "--yes", *state)

        assert refused.returncode == 1
        assert "--without-resources" in refused.stdout
        assert imds.start_requests == []

        approved = notbefore("approve", "a", "--yes", "--without-resources", *state)
        assert approved.returncode == 0
        assert imds.start_requests == ["a"]


def test_event_that_changed_since_its_record_is_not_approved(
    imds: Simulator, tmp_path: Path
) -> None:
    with (
        PreparedVms(tmp_path) as prepared,
        agent_of(imds, VMS[0], prepared, tmp_path) as agent,
    ):
        agent.wait_until_listening()
        event = item("a", NotBefore=FUTURE, Resources=[VMS[0]])
        imds.set_document(body(event, incarnation=2))
        agent.wait_for_changes("announced")
        record = tmp_path / "record.json"
        record.write_text(json.dumps(agent.records[0]), encoding="utf-8")
        imds.set_document(body({**event, "Resources": list(VMS)}, incarnation=3))
        agent.wait_for_changes("announced", "updated")
        words = ("approve", "a", "--yes", "--state-dir", str(agent.state), "--unchanged")
        refused = notbefore(*words, str(record))

        assert refused.returncode == 1
        assert "no longer the one in the record" in refused.stderr

        record.write_text("no record", encoding="utf-8")

        assert notbefore(*words, str(record)).returncode == 2
        assert notbefore(*words, str(tmp_path / "nothing")).returncode == 2
        assert imds.start_requests == []

        record.write_text(json.dumps(agent.records[1]), encoding="utf-8")
        assert notbefore(*words, str(record)).returncode == 0
