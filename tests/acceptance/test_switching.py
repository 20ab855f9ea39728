"""The recipes of docs/switching.md, run: its configurations, its handler, and for users of
azure-scheduledevents-manager their drain commands, variables and probe.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
import trustme
import yaml
from prometheus_client.parser import text_string_to_metric_families

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, get, notbefore
from support.azure import FUTURE, ME, PEER, body, item
from support.needs import needs
from support.peers import HttpPeer

ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = ROOT / "config" / "commands" / "webdevops.sh"
PENDING: Final = "/readyz?pending=Reboot,Redeploy,Preempt,Terminate"
VARIABLES: Final = ("ID", "SOURCE", "STATUS", "TYPE", "NOTBEFORE", "RESOURCES", "RESOURCETYPE")


PAGE: Final = (ROOT / "docs" / "switching.md").read_text(encoding="utf-8")
# those of users of webdevops are parts of a file
WHOLE_FILES: Final = re.findall(r"```yaml\n(.*?)```", PAGE[: PAGE.index("## webdevops")], re.DOTALL)
SECRETS: Final = {
    "hub-key": "Endpoint=sb://fleet.servicebus.windows.net/;SharedAccessKeyName=send;"
    "SharedAccessKey=a2V5;EntityPath=scheduled-events",
    "telegram-url": "tgram://123456789:ABCdefGHIjklMNOpqrsTUVwxyz012345678/987654321/",
    "gateway-url": "http://127.0.0.1:9091/metrics/job/notbefore",
}


def section(heading: str, language: str) -> str:
    """Return the last example in a language below a heading."""
    text = PAGE[PAGE.index(f"## {heading}\n") :]
    text = text[: text.index("\n## ", 1)]
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

    with RunningAgent(imds.endpoint, tmp_path / "state", values) as agent:
        for incarnation, listed in enumerate(([event], [started], []), start=2):
            imds.set_document(body(*listed, incarnation=incarnation))
            eventually(lambda: agent.count("delivered", "handler") == incarnation - 1)

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


def recipe(directory: Path) -> str:
    """The configuration of the page, with commands that write down the variables of the manager
    that they see.
    """
    needs("grep")
    text = (ROOT / "docs" / "switching.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"## Drain commands.*?```yaml\n(.*?)```", text, re.DOTALL)
    values = yaml.safe_load(found)
    settings = values["sinks"]["drain"]["command"]
    assert Path(settings["command"][0]).relative_to(
        "/opt/notbefore/share/notbefore"
    ) == SCRIPT.relative_to(ROOT / "config")
    seen = directory / "seen"
    settings["command"] = [
        str(SCRIPT),
        f"(echo drain; env | grep ^EVENT_ | sort) >>{seen}",
        f"(echo uncordon; env | grep ^EVENT_ | sort) >>{seen}",
    ]
    file = directory / "notbefore.yml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(file)


def test_drain_and_uncordon_run_with_the_variables_of_the_manager(
    imds: Simulator, tmp_path: Path
) -> None:
    event = item("E-1", EventType="Reboot", NotBefore=FUTURE, Resources=[ME, PEER])
    seen = tmp_path / "seen"

    def lines() -> list[str]:
        return seen.read_text(encoding="utf-8").splitlines() if seen.exists() else []

    with RunningAgent(imds.endpoint, tmp_path / "state", recipe(tmp_path)) as agent:
        eventually(lambda: get(agent.port, PENDING)[0] == 200)

        imds.set_document(body(event, incarnation=2))

        eventually(lambda: get(agent.port, PENDING)[0] == 503)
        eventually(lambda: len(lines()) == 1 + len(VARIABLES))
        assert lines() == [
            "drain",
            "EVENT_ID=E-1",
            f"EVENT_NOTBEFORE={FUTURE}",
            f"EVENT_RESOURCES={ME} {PEER}",
            "EVENT_RESOURCETYPE=VirtualMachine",
            "EVENT_SOURCE=Platform",
            "EVENT_STATUS=Scheduled",
            "EVENT_TYPE=Reboot",
        ]

        imds.set_document(body({**event, "EventStatus": "Started", "NotBefore": ""}, incarnation=3))
        eventually(lambda: agent.json("/api/v1/events")["events"][0]["event_status"] == "Started")
        assert get(agent.port, PENDING)[0] == 503

        imds.set_document(body(incarnation=4))

        eventually(lambda: lines()[-1] == "uncordon")
        eventually(lambda: get(agent.port, PENDING)[0] == 200)
        assert lines().count("drain") == 1, (
            "the start of an event that was announced starts no second drain"
        )
        assert get(agent.port, "/readyz?pending=drain")[0] == 400

        others = (
            item("E-2", NotBefore=FUTURE),
            item("E-3", EventType="Reboot", NotBefore=FUTURE, Resources=[PEER]),
        )
        imds.set_document(body(*others, incarnation=5))
        agent.wait_for_changes("announced", "started", "finished", "announced", "announced")

        eventually(lambda: get(agent.port, PENDING)[0] == 200)

        at_first_sight = item("E-4", EventType="Redeploy", EventStatus="Started", NotBefore="")
        imds.set_document(body(*others, at_first_sight, incarnation=6))

        eventually(lambda: lines()[-1] == "EVENT_TYPE=Redeploy")

        found = dict(line.split("=", 1) for line in lines()[-len(VARIABLES) :])

        assert found["EVENT_ID"] == "E-4"
        assert found["EVENT_STATUS"] == "Started"
        assert found["EVENT_NOTBEFORE"] == ""
        assert lines().count("drain") == 2, "a Freeze, and what affects another VM, are left alone"


def test_switching_script_names_the_commands_that_it_expects() -> None:
    assert os.access(SCRIPT, os.X_OK)

    done = subprocess.run(
        [SCRIPT, "drain"], capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == 64
    assert "expected two commands" in done.stderr
