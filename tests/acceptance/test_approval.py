"""The installed agent approves events; the simulated IMDS counts its start requests."""

import html
import signal
import stat
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from notbefore.errors import NotBeforeError
from notbefore.process.control_socket import ControlReply, ControlRequest, ask_agent
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, becomes, eventually, get, notbefore, wait_for_polls
from support.azure import FUTURE, ID, ME, PEER, body, item
from support.needs import needs, ordinary_user

APPROVALS = 'azure_scheduled_event_approvals_total{result="%s",rule="%s"}'
USERS = {"match": {"event_source": "User"}, "name": "users"}


def listed(incarnation: int = 2, **fields: Any) -> bytes:
    return body(
        item(**{"NotBefore": FUTURE, "EventSource": "User", **fields}), incarnation=incarnation
    )


def agent_of(
    imds: Simulator, tmp_path: Path, *rules: dict[str, Any], allowed: bool = True, **switches: bool
) -> RunningAgent:
    policy = {"enabled": True, "dry_run": False, "rules": list(rules), **switches}
    words = ["--allow-approval"] if allowed else []
    return RunningAgent(imds.endpoint, tmp_path / "state", {"approval": policy}, *words)


def only_record(agent: RunningAgent, kind: str) -> dict[str, Any]:
    """Wait for the only record of this kind; return it without the prefixes of its fields."""

    def records() -> list[dict[str, Any]]:
        return [
            record for record in agent.records if record["azure.scheduled_event.change"] == kind
        ]

    (record,) = eventually(records)
    return {
        name.removeprefix("azure.scheduled_event.").removeprefix("approval."): value
        for name, value in record.items()
    }


def approve(
    agent: RunningAgent, event_id: str, *words: str, sudo_user: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `notbefore approve` once the agent listens to commands."""
    agent.wait_until_listening()
    state = ("--state-dir", str(agent.state))
    return notbefore("approve", event_id, *words, *state, SUDO_USER=sudo_user)


def test_agent_approves_by_rule_when_both_switches_are_on(imds: Simulator, tmp_path: Path) -> None:
    imds.set_document(listed())

    with agent_of(imds, tmp_path, USERS) as agent:
        eventually(lambda: imds.start_requests)
        only_record(agent, "approved")
        by_hand = approve(agent, ID, "--yes")

    assert imds.start_requests == [ID]
    assert by_hand.returncode == 0
    assert "it is approved already" in by_hand.stdout
    assert "approval is on" in agent.log


@pytest.mark.parametrize(
    ("allowed", "enabled", "why"),
    [
        (True, False, "approval.enabled is not true"),
        (False, True, "without --allow-approval"),
    ],
)
def test_agent_sends_nothing_when_one_switch_is_off(
    imds: Simulator, tmp_path: Path, *, allowed: bool, enabled: bool, why: str
) -> None:
    imds.set_document(listed())

    with agent_of(imds, tmp_path, USERS, allowed=allowed, enabled=enabled) as agent:
        agent.wait_for_changes("announced")
        by_hand = approve(agent, ID, "--yes")
        wait_for_polls(imds, 10)

    assert by_hand.returncode == 1
    assert imds.start_requests == []
    assert why in agent.log


def test_dry_run_records_the_approval_and_sends_nothing(imds: Simulator, tmp_path: Path) -> None:
    imds.set_document(listed())

    with agent_of(imds, tmp_path, USERS, dry_run=True) as agent:
        record = only_record(agent, "approval_skipped")
        by_hand = approve(agent, ID, "--yes")
        dry_runs = agent.metric(APPROVALS % ("dry_run", "users"))
        wait_for_polls(imds, 10)

    assert record["reason"] == "dry_run"
    assert dry_runs == 1
    assert by_hand.returncode == 1
    assert imds.start_requests == []
    assert "approval.dry_run is true" in agent.log


def test_plan_is_shown_on_page_and_in_commands_when_approval_is_off(
    imds: Simulator, tmp_path: Path
) -> None:
    later = {**USERS, "approve_after": "1h"}
    with agent_of(imds, tmp_path, later, allowed=False) as agent:
        imds.set_document(listed())
        agent.wait_for_changes("announced")

        (event,) = agent.json("/api/v1/events")["events"]
        _, page = get(agent.port, "/")
        address = f"http://127.0.0.1:{agent.port}"
        command = notbefore("events", "--url", address)

        plan = event["approval"]
        assert plan["action"] == "off"
        assert plan["rule"] == "users"
        assert plan["words"].startswith("would approve it at ")
        assert plan["words"].endswith("`notbefore run` was started without --allow-approval")
        assert plan["words"] in html.unescape(page.decode())
        assert plan["words"] in command.stdout
        assert imds.start_requests == []


def test_second_vm_approves_when_the_leader_is_dead(tmp_path: Path) -> None:
    vms = ("web_0", "web_1", "web_2")
    rule = {**USERS, "for_all_resources": "leader"}
    policy = {"enabled": True, "dry_run": False, "rules": [rule]}
    with ExitStack() as stack:
        imds = stack.enter_context(Simulator(vms))
        agents: list[RunningAgent] = []
        for vm in vms:
            agent = RunningAgent(
                imds.endpoint_of(vm), tmp_path / vm, {"approval": policy}, "--allow-approval"
            )
            agents.append(stack.enter_context(agent))
        leader, second, third = agents
        first_event = imds.start("user-reboot", resources=vms)
        # a slow leader may see the start before it has recorded its approval
        becomes(lambda: sorted(leader.kinds), ["announced", "approved", "started"])
        assert imds.start_requests == [first_event]
        leader.stop(signal.SIGKILL)

        announced = time.monotonic()
        second_event = imds.start("user-reboot", resources=vms)
        eventually(lambda: second_event in imds.start_requests)
        waited = time.monotonic() - announced
        eventually(lambda: third.kinds.count("started") == 2)
        # the third may see the start before the second has recorded its approval
        only_record(second, "approved")

        assert imds.start_requests == [first_event, second_event]
        assert waited > 29
        assert "approved" not in third.kinds


def test_agent_stops_without_waiting_for_an_answer_of_imds(imds: Simulator, tmp_path: Path) -> None:
    imds.fault("start-freeze", 600)
    with agent_of(imds, tmp_path, USERS) as agent:
        imds.set_document(listed())
        eventually(lambda: imds.start_requests)

        exit_code = agent.stop()

    assert exit_code == 0
    assert "again in" not in agent.log, "IMDS has 10 s to answer: the agent ends before"


def test_approve_shows_the_event_and_sends_nothing_without_yes(
    imds: Simulator, tmp_path: Path
) -> None:
    with agent_of(imds, tmp_path) as agent:
        event_id = imds.start("live-migration", resources=(ME, PEER))
        agent.wait_for_changes("announced")

        unconfirmed = approve(agent, event_id)
        unlisted = approve(agent, "nonsense", "--yes")
        too_long = approve(agent, event_id, "--yes", "--reason", "x" * 501)

    assert unconfirmed.returncode == 1
    assert f"all 2 VMs: {ME}, {PEER}" in unconfirmed.stdout
    assert "--yes" in unconfirmed.stderr
    assert "no event nonsense is listed" in unlisted.stderr
    assert too_long.returncode == 2
    assert imds.start_requests == []


def test_approve_sends_a_start_request_and_records_the_operator(
    imds: Simulator, tmp_path: Path
) -> None:
    with agent_of(imds, tmp_path) as agent:
        event_id = imds.start("live-migration", resources=(ME, PEER))
        agent.wait_for_changes("announced")
        words = ("--yes", "--reason", "CHG-1: ready\n")

        approved = approve(agent, event_id.lower(), *words, sudo_user="eve")

        record = only_record(agent, "approved")
        history = agent.json("/api/v1/history")["changes"]

    assert approved.returncode == 0
    assert approved.stdout.splitlines()[-1] == "approved (accepted)"
    assert imds.start_requests == [event_id]
    assert record["rule"] == "operator"
    assert record["by"] == "eve (sudo)"
    assert record["reason"] == "CHG-1: ready\n"
    assert "CHG-1: ready\n" in [
        change.get("azure.scheduled_event.approval.reason") for change in history
    ]


def let_others_enter(socket_path: Path, tmp_path: Path) -> None:
    """Give all users the socket and its directories."""
    for path in (socket_path.parent, socket_path):
        path.chmod(0o777)
    for directory in tmp_path.parents:
        mode = directory.stat().st_mode
        if mode & 0o055 != 0o055:
            directory.chmod(mode | 0o055)
    tmp_path.chmod(0o755)


def test_approve_is_refused_to_other_users(imds: Simulator, tmp_path: Path) -> None:
    needs("root")
    with agent_of(imds, tmp_path) as agent:
        agent.wait_until_listening()
        path = agent.state / "control.sock"
        mode = stat.S_IMODE(path.stat().st_mode)
        # the kernel says which user asks, even where the mode of the file lets everyone in
        let_others_enter(path, tmp_path)
        imds.set_document(listed())
        agent.wait_for_changes("announced")

        with (
            ordinary_user(),
            pytest.raises(
                NotBeforeError, match=r"^only root and the agent's own user may ask this$"
            ),
        ):
            ask_agent(agent.state, ControlRequest(ID, "x"), ControlReply)

    assert mode == 0o600
    assert imds.start_requests == []
