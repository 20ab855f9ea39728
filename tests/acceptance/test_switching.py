"""What docs/switching.md says to users of azure-scheduledevents-manager: their drain commands,
variables and probe.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import yaml

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, get
from support.azure import FUTURE, ME, PEER, body, item
from support.needs import needs

ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = ROOT / "config" / "commands" / "webdevops.sh"
PENDING: Final = "/readyz?pending=Reboot,Redeploy,Preempt,Terminate"
VARIABLES: Final = ("ID", "SOURCE", "STATUS", "TYPE", "NOTBEFORE", "RESOURCES", "RESOURCETYPE")


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
        agent.reported("announced", "started", "finished", "announced", "announced")

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
