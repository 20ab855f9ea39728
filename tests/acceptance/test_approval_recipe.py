"""The recipe of docs/approval.md: an event of three VMs is approved once, when the last of them is
prepared.
"""

import http.server
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import pytest
import yaml

from notbefore.courier.sinks.command import run, variables
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, notbefore, wait_for_polls
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


class Prepared(HttpPeer):
    """Each VM's own word that it is prepared, and the recipe that asks for it."""

    def __init__(self, directory: Path) -> None:
        needs("curl")
        super().__init__()
        self.vms = set[str]()
        self.script = directory / "all-prepared"
        self.config = self._install(directory)

    def __exit__(self, *error: object) -> None:
        """End the scripts: they outlive their agent, and would ask whoever has this port next."""
        self.vms.update(VMS)
        eventually(lambda: not any(map(self._runs, Path("/proc").glob("[0-9]*"))))
        super().__exit__(*error)

    def _runs(self, process: Path) -> bool:
        with suppress(OSError):  # it has just ended
            return str(self.script).encode() in (process / "cmdline").read_bytes()
        return False

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:  # noqa: ARG002 - it has answers of its own
        super().answer(handler, Answer(200 if handler.path.split("/")[1] in self.vms else 404))

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


def test_recipe_approves_once_all_three_vms_are_prepared(imds: Simulator, tmp_path: Path) -> None:
    with ExitStack() as stack:
        prepared = stack.enter_context(Prepared(tmp_path))
        agents = [
            stack.enter_context(
                RunningAgent(
                    imds.endpoint_of(vm), tmp_path / vm, str(prepared.config), "--allow-approval"
                )
            )
            for vm in VMS
        ]
        event_id = imds.start("user-reboot", resources=VMS)
        for agent in agents:
            agent.wait_for_changes("announced")
        for vm in (VMS[1], VMS[0]):
            prepared.vms.add(vm)
            wait_for_polls(imds, 30)
            assert imds.start_requests == []
        prepared.vms.add(VMS[2])

        eventually(lambda: imds.start_requests)
        for agent in agents:
            eventually(lambda: "started" in agent.kinds)

        wait_for_polls(imds, 30)
        # the deputies may have asked in the same moment
        assert set(imds.start_requests) == {event_id}

        by = [
            record
            for agent in agents
            for record in agent.records
            if "azure.scheduled_event.approval.by" in record
        ]
        assert {record["azure.scheduled_event.approval.reason"] for record in by} == {
            "all VMs are prepared"
        }


def test_recipe_asks_each_of_400_vms_by_its_whole_name(tmp_path: Path) -> None:
    names = [f"a-scale-set-with-a-long-name_{number}" for number in range(400)]
    for name, script in (
        ("curl", 'for url; do :; done; echo "$url" >> asked'),
        ("notbefore", 'echo "$@" > approved'),
    ):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ncd {tmp_path}; {script}\n", encoding="utf-8")
        program.chmod(0o755)
    environment = variables(
        {"azure.scheduled_event.id": "a", "azure.scheduled_event.resources": names}, {}
    )
    record = json.dumps({"azure.scheduled_event.resources": names}).encode()
    code, output = run(
        ["/bin/sh", "-c", SCRIPT], record, environment | {"PATH": f"{tmp_path}:/usr/bin:/bin"}, 60
    )

    assert code == 0
    assert output == ""

    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == [f"http://{name}:8080/prepared" for name in names]
    assert (
        (tmp_path / "approved")
        .read_text(encoding="utf-8")
        .startswith("approve a --yes --unchanged -")
    )


@pytest.mark.parametrize("named", [{"Resources": []}, {}])
def test_recipe_approves_no_event_without_resources(
    imds: Simulator, tmp_path: Path, named: dict[str, list[str]]
) -> None:
    event = item("a", NotBefore=FUTURE)
    del event["Resources"]
    with (
        Prepared(tmp_path) as prepared,
        RunningAgent(
            imds.endpoint_of(VMS[0]), tmp_path / VMS[0], str(prepared.config), "--allow-approval"
        ) as agent,
    ):
        prepared.vms.update(VMS)
        imds.set_document(body({**event, **named}, incarnation=2))

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
        Prepared(tmp_path) as prepared,
        RunningAgent(
            imds.endpoint_of(VMS[0]), tmp_path / VMS[0], str(prepared.config), "--allow-approval"
        ) as agent,
    ):
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
