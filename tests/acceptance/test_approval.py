"""Approval, as the installed agent does it: what reaches IMDS is counted there."""

import html
import signal
import stat
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from notbefore.errors import NotBeforeError
from notbefore.process.control_socket import ControlReply, ControlRequest, ask_agent
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, get, notbefore, wait_for_polls
from support.azure import FUTURE, ID, ME, PEER, body, item
from support.needs import needs, ordinary_user

APPROVALS = 'azure_scheduled_event_approvals_total{result="%s",rule="%s"}'
SWITCHES = ((True, True, False), (True, True, True), (True, False, False), (False, True, False))
USERS = {"match": {"event_source": "User"}, "name": "users"}


def listed(incarnation: int = 2, **fields: Any) -> bytes:
    return body(
        item(**{"NotBefore": FUTURE, "EventSource": "User", **fields}), incarnation=incarnation
    )


def agent_of(
    imds: Simulator, tmp_path: Path, *rules: dict[str, Any], allowed: bool = True, **switches: bool
) -> RunningAgent:
    policy = {"enabled": True, "dry_run": False, "rules": list(rules), **switches}
    tmp_path.mkdir(exist_ok=True)
    words = ["--allow-approval"] if allowed else []
    return RunningAgent(imds.endpoint, tmp_path / "state", {"approval": policy}, *words)


def last(agent: RunningAgent, kind: str) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [
            record for record in agent.records if record["azure.scheduled_event.change"] == kind
        ]

    eventually(found)
    assert len(found()) == 1
    return {
        name.removeprefix("azure.scheduled_event.").removeprefix("approval."): value
        for name, value in found()[0].items()
    }


def test_agent_approves_only_when_both_keys_are_on_without_a_dry_run(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = []
        for number, (allowed, enabled, dry_run) in enumerate(SWITCHES):
            imds = stack.enter_context(Simulator((ME, PEER)))
            imds.set_document(listed())
            agent = agent_of(
                imds,
                tmp_path / f"{number}",
                USERS,
                allowed=allowed,
                enabled=enabled,
                dry_run=dry_run,
            )
            running.append((allowed, enabled, dry_run, imds, stack.enter_context(agent)))
        for allowed, enabled, dry_run, imds, agent in running:
            wait_for_polls(imds, 10)
            by_hand = notbefore("approve", ID, "--yes", "--state-dir", str(agent.state))
            both = allowed and enabled and not dry_run
            assert (len(imds.start_requests) > 0) == both, (allowed, enabled, dry_run)
            assert (by_hand.returncode == 0) == both, by_hand
            missing = {
                (True, False): "approval.enabled is not true",
                (False, True): "without --allow-approval",
                (True, True): "approval.dry_run is true" if dry_run else "approval is on",
            }[allowed, enabled]
            assert missing in agent.log
            if allowed and enabled and dry_run:
                assert last(agent, "approval_skipped")["reason"] == "dry_run"
                assert agent.metric(APPROVALS % ("dry_run", "users")) == 1


def test_plan_is_shown_on_page_and_in_commands_while_approval_is_off(
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
        leader.wait_for_changes("announced", "approved", "started")
        assert imds.start_requests == [first_event]
        leader.stop(signal.SIGKILL)

        announced = time.monotonic()
        second_event = imds.start("user-reboot", resources=vms)
        eventually(lambda: second_event in imds.start_requests, patience=90)
        waited = time.monotonic() - announced
        eventually(lambda: third.kinds.count("started") == 2)

        assert imds.start_requests == [first_event, second_event]
        assert waited > 29
        assert second.kinds.count("approved") == 1
        assert "approved" not in third.kinds


def test_agent_stops_without_waiting_for_an_answer_of_imds(imds: Simulator, tmp_path: Path) -> None:
    imds.fault("start-freeze", 60)
    with agent_of(imds, tmp_path, USERS) as agent:
        imds.set_document(listed())
        eventually(lambda: imds.start_requests)

        begun = time.monotonic()
        assert agent.stop() == 0  # IMDS has 10 s to answer
        assert time.monotonic() - begun < 8


def test_approve_shows_the_event_asks_and_records_the_operator(
    imds: Simulator, tmp_path: Path
) -> None:
    with agent_of(imds, tmp_path) as agent:
        agent.wait_until_listening()
        event_id = imds.start("live-migration", resources=(ME, PEER))
        agent.wait_for_changes("announced")
        state = ("--state-dir", str(agent.state))
        nobody_to_ask = notbefore("approve", event_id, *state)

        assert nobody_to_ask.returncode == 1
        assert f"all 2 VMs: {ME}, {PEER}" in nobody_to_ask.stdout
        assert "--yes" in nobody_to_ask.stderr
        assert imds.start_requests == []
        assert (
            "no event nonsense is listed"
            in notbefore("approve", "nonsense", "--yes", *state).stderr
        )
        assert (
            notbefore("approve", event_id, "--yes", "--reason", "x" * 501, *state).returncode == 2
        )

        done = notbefore(
            "approve",
            event_id.lower(),
            "--yes",
            "--reason",
            "CHG-1: ready\n",
            *state,
            SUDO_USER="eve",
        )

        assert done.returncode == 0
        assert done.stdout.splitlines()[-1] == "approved (accepted)"
        assert imds.start_requests == [event_id]

        record = last(agent, "approved")

        assert record["rule"] == "operator"
        assert record["by"] == "eve (sudo)"
        for changes in (
            agent.records,
            agent.json("/api/v1/history")["changes"],
        ):  # it starts after two seconds
            assert "CHG-1: ready\n" in [
                change.get("azure.scheduled_event.approval.reason") for change in changes
            ]


def test_approve_is_refused_to_other_users(imds: Simulator, tmp_path: Path) -> None:
    needs("root")
    with agent_of(imds, tmp_path) as agent:
        path = agent.state / "control.sock"
        eventually(path.is_socket)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

        # even where the file's mode would let somebody in, the kernel says who it is
        for place in (agent.state, path):
            place.chmod(0o777)
        for place in tmp_path.parents:
            if place.stat().st_mode & 0o055 != 0o055:
                place.chmod(place.stat().st_mode | 0o055)
        tmp_path.chmod(0o755)
        imds.set_document(listed())
        agent.wait_for_changes("announced")

        with (
            ordinary_user(),
            pytest.raises(
                NotBeforeError, match=r"^only root and the agent's own user may ask this$"
            ),
        ):
            ask_agent(agent.state, ControlRequest(ID, "x"), ControlReply)
        assert imds.start_requests == []
