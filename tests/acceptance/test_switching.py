"""The configurations, the handler and the drain commands of docs/switching.md work."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import trustme
import yaml
from prometheus_client.parser import text_string_to_metric_families

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, get, notbefore, run
from support.azure import FUTURE, ME, PEER, STARTED, body, item
from support.needs import needs
from support.peers import HttpPeer

ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = ROOT / "config" / "commands" / "webdevops.sh"
PENDING: Final = "/readyz?pending=Reboot,Redeploy,Preempt,Terminate"
VARIABLES: Final = ("ID", "SOURCE", "STATUS", "TYPE", "NOTBEFORE", "RESOURCES", "RESOURCETYPE")
PAGE: Final = (ROOT / "docs" / "switching.md").read_text(encoding="utf-8")
# the examples for users of webdevops are only parts of a file
WHOLE_FILES: Final = re.findall(r"```yaml\n(.*?)```", PAGE[: PAGE.index("## webdevops")], re.DOTALL)
SECRETS: Final = {
    "hub-key": "Endpoint=sb://fleet.servicebus.windows.net/;SharedAccessKeyName=send;"
    "SharedAccessKey=a2V5;EntityPath=scheduled-events",
    "telegram-url": "tgram://123456789:ABCdefGHIjklMNOpqrsTUVwxyz012345678/987654321/",
    "gateway-url": "http://127.0.0.1:9091/metrics/job/notbefore",
}


def section(heading: str, language: str) -> str:
    """Return the last example in a language below a heading."""
    begin = PAGE.index(f"## {heading}\n")
    text, _, _ = PAGE[begin:].partition("\n## ")
    *_, example = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(example)


@pytest.mark.parametrize("text", WHOLE_FILES)
def test_configuration_of_the_page_passes_check_config(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, secret in SECRETS.items():
        (tmp_path / name).write_text(secret, encoding="utf-8")
    handler = tmp_path / "handle-event"
    handler.write_text("#!/bin/sh\n", encoding="utf-8")
    handler.chmod(0o755)
    in_a_pod(tmp_path, monkeypatch)
    text = text.replace("/usr/local/bin/handle-event", str(handler))
    token = f"{{token_file: {tmp_path / 'token'}, ca_file: {tmp_path / 'ca.crt'}}}"
    text = text.replace("kubernetes: {}", f"kubernetes: {token}")
    config = tmp_path / "notbefore.yml"
    config.write_text(text, encoding="utf-8")

    checked = notbefore("check-config", config, "--state-dir", tmp_path / "state")

    assert checked.returncode == 0, checked.stderr


def in_a_pod(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up what a pod of the Helm chart has."""
    monkeypatch.setenv("NODE_NAME", "aks-pool-12345-vmss00000c")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (directory / "token").write_text("token", encoding="utf-8")
    trustme.CA().cert_pem.write_to_path(str(directory / "ca.crt"))


def test_handler_of_the_page_prepares_and_recovers(imds: Simulator, tmp_path: Path) -> None:
    heading = "Microsoft's samples: prepare and recover"
    handled = tmp_path / "handled"
    handler = tmp_path / "handle-event"
    script = section(heading, "sh").replace("/var/lib/notbefore/handled", str(handled))
    handler.write_text(script, encoding="utf-8")
    handler.chmod(0o755)
    values = yaml.safe_load(section(heading, "yaml"))
    values["sinks"]["handler"]["command"]["command"] = [str(handler)]
    event = item("E-1", EventType="Reboot", NotBefore=FUTURE)
    started = {**event, "EventStatus": "Started", "NotBefore": ""}

    documents = (
        body(event, incarnation=2),
        body(started, incarnation=3),
        body(incarnation=4),
    )

    with RunningAgent(imds.endpoint, tmp_path / "state", values) as agent:
        for step, document in enumerate(documents, start=1):
            imds.set_document(document)
            eventually(lambda: agent.count("delivered", "handler") == step)

    assert handled.read_text(encoding="utf-8").splitlines() == [
        "prepare for Reboot E-1",
        "Reboot E-1 has started",
        "recover from Reboot E-1",
    ]


def test_gateway_of_the_page_gets_the_text_format_of_prometheus(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    values = yaml.safe_load(section("aks-node-termination-handler", "yaml"))
    (tmp_path / "gateway-url").write_text(f"{hook.url}/metrics/job/notbefore", encoding="utf-8")
    gateway = {
        "sinks": {"gateway": values["sinks"]["gateway"]},
        "routes": [{**values["routes"][0], "sinks": ["gateway"]}],
    }
    event = item("E-1", EventType="Preempt", NotBefore=FUTURE)

    with RunningAgent(imds.endpoint, tmp_path / "state", gateway) as agent:
        imds.set_document(body(event, incarnation=2))
        eventually(lambda: agent.count("delivered", "gateway") == 1)

    (request,) = hook.requests
    (family,) = text_string_to_metric_families(request.body.decode())
    (sample,) = family.samples
    assert request.path == "/metrics/job/notbefore"
    assert request.body.endswith(b"\n")
    assert sample.name == "node_termination_event"
    assert sample.value == 1


class Manager:
    """An agent with the drain commands of the page, which write their variables to a file."""

    def __init__(self, imds: Simulator, directory: Path) -> None:
        needs("grep")
        self._file = directory / "commands"
        values = yaml.safe_load(section("Drain commands", "yaml"))
        self.command: list[str] = values["sinks"]["drain"]["command"]["command"]
        values["sinks"]["drain"]["command"]["command"] = [
            str(SCRIPT),
            f"(echo drain; env | grep ^EVENT_ | sort) >>{self._file}",
            f"(echo uncordon; env | grep ^EVENT_ | sort) >>{self._file}",
        ]
        self.agent = RunningAgent(imds.endpoint, directory / "state", values)

    @property
    def lines(self) -> list[str]:
        """The name of each command that ran, followed by its variables."""
        if not self._file.exists():
            return []
        return self._file.read_text(encoding="utf-8").splitlines()

    def waits_for_probe(self, status: int) -> None:
        """Wait until the probe for pending events of the drained types has this status."""
        eventually(lambda: get(self.agent.port, PENDING)[0] == status)


@pytest.fixture
def manager(imds: Simulator, tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(imds, tmp_path)
    with manager.agent:
        yield manager


REBOOT: Final = item("E-1", EventType="Reboot", NotBefore=FUTURE, Resources=[ME, PEER])


def test_page_names_the_script_where_it_is_installed(manager: Manager) -> None:
    installed = Path(manager.command[0]).relative_to("/opt/notbefore/share/notbefore")

    assert installed == SCRIPT.relative_to(ROOT / "config")


def test_drain_runs_with_the_variables_of_the_manager(imds: Simulator, manager: Manager) -> None:
    manager.waits_for_probe(200)

    imds.set_document(body(REBOOT, incarnation=2))

    manager.waits_for_probe(503)
    eventually(lambda: len(manager.lines) == 1 + len(VARIABLES))
    assert manager.lines == [
        "drain",
        "EVENT_ID=E-1",
        f"EVENT_NOTBEFORE={FUTURE}",
        f"EVENT_RESOURCES={ME} {PEER}",
        "EVENT_RESOURCETYPE=VirtualMachine",
        "EVENT_SOURCE=Platform",
        "EVENT_STATUS=Scheduled",
        "EVENT_TYPE=Reboot",
    ]


def test_uncordon_runs_at_the_end_after_a_single_drain(imds: Simulator, manager: Manager) -> None:
    agent = manager.agent
    imds.set_document(body(REBOOT, incarnation=2))
    # the drain expires if the end comes before it runs
    eventually(lambda: agent.count("delivered", "drain") == 1)
    imds.set_document(body({**REBOOT, **STARTED}, incarnation=3))
    eventually(lambda: agent.count("delivered", "drain") == 2)
    manager.waits_for_probe(503)

    imds.set_document(body(incarnation=4))

    eventually(lambda: manager.lines[-1:] == ["uncordon"])
    manager.waits_for_probe(200)
    assert manager.lines.count("drain") == 1


def test_drain_runs_at_the_start_of_an_unannounced_event(imds: Simulator, manager: Manager) -> None:
    started = item("E-4", EventType="Redeploy", **STARTED)

    imds.set_document(body(started, incarnation=2))

    eventually(lambda: len(manager.lines) == 1 + len(VARIABLES))
    variables = dict(line.split("=", 1) for line in manager.lines[1:])
    assert variables["EVENT_ID"] == "E-4"
    assert variables["EVENT_STATUS"] == "Started"
    assert variables["EVENT_NOTBEFORE"] == ""
    assert variables["EVENT_TYPE"] == "Redeploy"


def test_freeze_and_event_of_another_vm_are_not_drained(imds: Simulator, manager: Manager) -> None:
    freeze = item("E-2", NotBefore=FUTURE)
    elsewhere = item("E-3", EventType="Reboot", NotBefore=FUTURE, Resources=[PEER])
    imds.set_document(body(freeze, elsewhere, incarnation=2))
    manager.agent.wait_for_changes("announced", "announced")
    manager.waits_for_probe(200)

    # once this event is drained, the others would be too
    imds.set_document(body(freeze, elsewhere, REBOOT, incarnation=3))

    eventually(lambda: manager.agent.count("delivered", "drain") == 1)
    assert [line for line in manager.lines if line.startswith("EVENT_ID=")] == ["EVENT_ID=E-1"]


def test_probe_refuses_an_unknown_event_type(manager: Manager) -> None:
    status, _ = get(manager.agent.port, "/readyz?pending=drain")

    assert status == 400


def test_switching_script_names_the_commands_that_it_expects() -> None:
    assert os.access(SCRIPT, os.X_OK)

    done = run(SCRIPT, "drain")

    assert done.returncode == 64
    assert "expected two commands" in done.stderr
