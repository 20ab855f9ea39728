"""Approval, as the installed agent does it: what reaches IMDS is counted there."""

import json
import os
import signal
import socket
import stat
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from notbefore.agent.control_socket import ControlRequest, ask
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, notbefore
from support.azure import FUTURE, ID, ME, PEER, body, item
from support.needs import needs

APPROVALS = 'azure_scheduled_event_approvals_total{result="%s",rule="%s"}'
USERS = {"match": {"event_source": "User"}, "name": "users"}


def listed(incarnation: int = 2, **fields: Any) -> bytes:
    return body(item(**{"NotBefore": FUTURE, "EventSource": "User", **fields}), incarnation=incarnation)


def started(incarnation: int = 3, **fields: Any) -> bytes:
    return listed(incarnation, EventStatus="Started", NotBefore="", **fields)


def configuration(directory: Path, *rules: dict[str, Any], enabled: bool = True, dry_run: bool = False) -> str:
    directory.mkdir(exist_ok=True)
    path = directory / "notbefore.yml"
    policy = {"enabled": enabled, "dry_run": dry_run, "rules": list(rules)}
    path.write_text(json.dumps({"approval": policy}), encoding="utf-8")
    return str(path)


def agent_of(imds: Simulator, tmp_path: Path, *rules: dict[str, Any], **switches: bool) -> RunningAgent:
    config = configuration(tmp_path, *rules, **switches)
    return RunningAgent(imds.endpoint, tmp_path / "state", config, "--allow-approval")


def waited(imds: Simulator, polls: int = 10) -> None:
    """So many polls have passed: what was to be sent would have been."""
    now = imds.requests
    eventually(lambda: imds.requests > now + polls)


def reload(agent: RunningAgent) -> None:
    agent.process.send_signal(signal.SIGHUP)
    eventually(lambda: agent.metric('notbefore_config_reloads_total{result="success"}') == 1)


def last(agent: RunningAgent, kind: str) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [record for record in agent.records if record["azure.scheduled_event.change"] == kind]

    eventually(found)
    assert len(found()) == 1
    return {
        name.removeprefix("azure.scheduled_event.").removeprefix("approval."): value
        for name, value in found()[0].items()
    }


def test_nothing_is_sent_unless_both_keys_are_on_and_it_is_no_dry_run(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = []
        for number, (allowed, enabled, dry_run) in enumerate(product((False, True), repeat=3)):
            imds = stack.enter_context(Simulator((ME, PEER)))
            imds.set_document(listed())
            config = configuration(tmp_path / str(number), USERS, enabled=enabled, dry_run=dry_run)
            words = ("--allow-approval",) if allowed else ()
            agent = RunningAgent(imds.endpoint, tmp_path / str(number) / "state", config, *words)
            running.append((allowed, enabled, dry_run, imds, stack.enter_context(agent)))
        for allowed, enabled, dry_run, imds, agent in running:
            agent.ready()
            waited(imds)
            by_hand = notbefore("approve", ID, "--yes", "--state-dir", str(agent.state))
            both = allowed and enabled and not dry_run
            assert (len(imds.start_requests) > 0) == both, (allowed, enabled, dry_run)
            assert (by_hand.returncode == 0) == both, by_hand
            missing = {
                (True, False): "approval.enabled is not true",
                (False, True): "without --allow-approval",
                (True, True): "dry run" if dry_run else "approval is on",
                (False, False): "",
            }[allowed, enabled]
            assert missing in agent.log
            assert ("approv" in agent.log) == (allowed or enabled)
            if allowed and enabled and dry_run:
                assert last(agent, "approval_skipped")["reason"] == "dry_run"
                assert agent.metric(APPROVALS % ("dry_run", "users")) == 1


def test_an_event_that_a_rule_names_is_approved_once_and_reported(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path, USERS) as agent:
        agent.ready()
        assert agent.metric(APPROVALS % ("approved", "users")) is None
        event_id = imds.start("user-reboot")
        record = last(agent, "approved")
        assert (record["rule"], record["by"], record["reason"], record["requests"]) == ("users", "rule", "accepted", 1)
        eventually(lambda: "started" in agent.kinds)
        waited(imds)
        assert imds.start_requests == [event_id]
        assert agent.kinds == ["announced", "approved", "started"]
        assert agent.metric(APPROVALS % ("approved", "users")) == 1
        changes = agent.json("/api/v1/history")["changes"]
        assert [change["azure.scheduled_event.change"] for change in changes] == agent.kinds


def test_on_a_shared_host_it_is_asked_for_once_though_it_does_not_start(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path, USERS) as agent:
        agent.ready()
        event_id = imds.start("user-reboot", hold=True)
        last(agent, "approved")
        waited(imds)
        agent.stop(signal.SIGKILL)
    with agent_of(imds, tmp_path, USERS) as again:
        again.ready()
        waited(imds)
        assert imds.start_requests == [event_id]
        assert again.records == []
        (event,) = again.json("/api/v1/events")["events"]
        assert (event["approval"]["state"], event["approval"]["mode"]) == ("approved (accepted)", "on")


def test_it_waits_for_its_time(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path, {**USERS, "approve_after": "1s"}) as agent:
        agent.ready()
        imds.set_document(listed())
        announced, approved = (datetime.fromisoformat(last(agent, one)["time"]) for one in ("announced", "approved"))
        assert approved - announced >= timedelta(seconds=1)


def test_what_is_switched_off_while_imds_confirms_the_event_is_not_approved(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path, {**USERS, "approve_after": "1s"}) as agent:
        agent.ready()
        imds.set_document(listed())
        agent.reported("announced")
        imds.fault("slow", 4, times=2)  # the poll, and the question right before the request: it waits 5 s
        asked = imds.requests
        eventually(lambda: imds.requests >= asked + 2)
        configuration(tmp_path, USERS, enabled=False)
        reload(agent)
        assert "approval is off, nothing is sent" in agent.log
        record = last(agent, "approval_skipped")
        assert (record["reason"], record["detail"]) == ("switched_off", "approval.enabled is not true")
        assert imds.start_requests == []


def test_stopping_does_not_wait_for_an_answer(imds: Simulator, tmp_path: Path) -> None:
    imds.fault("start-freeze", 60)
    with agent_of(imds, tmp_path, USERS) as agent:
        agent.ready()
        imds.set_document(listed())
        eventually(lambda: imds.start_requests)
        assert agent.stop() == 0


def test_what_no_rule_names_is_left_alone_and_shown_why(imds: Simulator, tmp_path: Path) -> None:
    leave = {"match": {"event_type": "Redeploy"}, "action": "leave", "name": "never"}
    with agent_of(imds, tmp_path, leave, USERS) as agent:
        agent.ready()
        items = [
            item("a", EventType="Redeploy", EventSource="User", NotBefore=FUTURE),
            item("b", NotBefore=FUTURE),
            item("c", EventSource="User", NotBefore=FUTURE, Resources=[PEER]),
            item("d", EventSource="User", NotBefore=FUTURE, Resources=[ME, PEER]),
        ]
        imds.set_document(body(*items, incarnation=2))
        assert last(agent, "approval_skipped")["reason"] == "several_resources"
        waited(imds)
        assert imds.start_requests == []
        shown = notbefore("events", "--url", f"http://127.0.0.1:{agent.port}").stdout.splitlines()
        words = {line.split()[0]: " ".join(line.split()[1:]) for line in shown[shown.index("") + 2 :]}
        assert words["a"] == "leave by never: the rule says so"
        assert words["b"] == words["c"] == "leave: no rule matches"
        assert words["d"].startswith("leave by users: it affects 2 VMs")


def test_a_refusal_is_final_and_other_failures_are_not(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path, USERS) as agent:
        agent.ready()
        imds.fault("start-status", 400)
        imds.set_document(listed())
        record = last(agent, "approval_failed")
        assert (record["reason"], record["requests"]) == ("refused", 1)
        waited(imds)
        assert imds.start_requests == []
        imds.fault("start-status", 503, times=2)
        imds.set_document(listed(3, NotBefore="Sat, 02 Mar 2058 12:00:00 GMT"))  # a new step of the event
        record = last(agent, "approved")
        assert (record["reason"], record["requests"]) == ("accepted", 3)
        assert agent.metric(APPROVALS % ("failed", "users")) == 1


def test_nothing_is_approved_on_old_knowledge(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path, {**USERS, "approve_after": "16s"}) as agent:
        agent.ready()
        first_seen = time.monotonic()
        imds.set_document(listed())
        agent.reported("announced")
        imds.fault("error", times=10_000)  # 15 s later what is known is old
        while time.monotonic() - first_seen < 18:  # this is the silence itself
            assert imds.start_requests == []
            time.sleep(0.2)
        imds.clear()
        imds.set_document(listed())
        last(agent, "approved")


def test_what_cannot_be_written_down_is_not_sent(imds: Simulator, tmp_path: Path) -> None:
    config = configuration(tmp_path, USERS)
    (tmp_path / "state").write_text("a file where the directory should be", encoding="utf-8")
    with RunningAgent(imds.endpoint, tmp_path / "state", config, "--allow-approval") as agent:
        eventually(lambda: agent.answers("/healthz"))  # it is not ready while it cannot write
        imds.set_document(listed())
        agent.reported("announced")
        lines = agent.log.count("\n")
        waited(imds)
        assert imds.start_requests == []
        assert agent.log.count("\n") - lines < 10  # waiting is quiet


def test_a_request_without_an_answer_ends_at_not_before(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path, USERS) as agent:
        agent.ready()
        imds.fault("start-freeze", 60, times=10)
        imds.set_document(listed(NotBefore=format_datetime(datetime.now(UTC) + timedelta(seconds=8), usegmt=True)))
        record = last(agent, "approval_failed")
        assert record["reason"] == "no_answer"
        assert record["detail"].startswith("NotBefore came first; ")
        assert imds.start_requests


def test_the_first_of_its_resources_speaks_for_all(imds: Simulator, tmp_path: Path) -> None:
    rule = {**USERS, "for_all_resources": "leader"}
    config = configuration(tmp_path, rule)
    words = (config, "--allow-approval")
    with (
        RunningAgent(imds.endpoint_of(ME), tmp_path / "a", *words) as first,
        RunningAgent(imds.endpoint_of(PEER), tmp_path / "b", *words) as second,
    ):
        first.ready()
        second.ready()
        event_id = imds.start("user-reboot", resources=(ME, PEER))
        last(first, "approved")
        eventually(lambda: "started" in second.kinds)
        assert imds.start_requests == [event_id]
        assert second.kinds == ["announced", "started"]


@pytest.mark.parametrize("meanwhile", ["scheduled", "started", "gone"])
def test_killed_before_the_answer_it_asks_again_only_if_it_is_scheduled(
    imds: Simulator, tmp_path: Path, meanwhile: str
) -> None:
    with agent_of(imds, tmp_path, USERS) as agent:
        agent.ready()
        imds.fault("start-freeze", 60)
        imds.set_document(listed())
        eventually(lambda: len(imds.start_requests) == 1)
        agent.stop(signal.SIGKILL)
    if meanwhile != "scheduled":
        imds.set_document(started(4) if meanwhile == "started" else body(incarnation=4))
    with agent_of(imds, tmp_path, USERS) as again:
        again.ready()
        if meanwhile == "scheduled":
            record = last(again, "approved")
            assert (record["requests"], imds.start_requests) == (2, [ID, ID])
        else:
            record = last(again, "approval_failed")
            assert (record["reason"], record["requests"], imds.start_requests) == ("no_answer", 1, [ID])


def test_what_was_a_rehearsal_is_approved_once_it_is_none(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path, USERS, dry_run=True) as agent:
        agent.ready()
        imds.set_document(listed())
        assert last(agent, "approval_skipped")["reason"] == "dry_run"
        configuration(tmp_path, USERS)
        agent.process.send_signal(signal.SIGHUP)
        last(agent, "approved")
        assert imds.start_requests == [ID]


@pytest.mark.parametrize(
    "fields", [{"Resources": [ME, None]}, {"NotBefore": "yesterday"}, {"DurationInSeconds": "five"}], ids=str
)
def test_what_cannot_be_read_in_full_is_not_approved(imds: Simulator, tmp_path: Path, fields: dict[str, Any]) -> None:
    with agent_of(imds, tmp_path, USERS) as agent:
        agent.ready()
        imds.set_document(listed(**fields))
        agent.reported("announced")
        waited(imds)
        assert imds.start_requests == []
        (event,) = agent.json("/api/v1/events")["events"]
        assert event["approval"]["reason"] == "a part of it could not be read"
        by_hand = notbefore("approve", ID, "--yes", "--state-dir", str(agent.state))
        assert "could not be read" in by_hand.stdout


def test_the_preview_version_is_given_the_incarnation(imds: Simulator, tmp_path: Path) -> None:
    config = configuration(tmp_path, {"match": {"event_type": "Freeze"}, "for_all_resources": "each"})
    old = Path(config)
    values = json.loads(old.read_text(encoding="utf-8")) | {"imds": {"api_version": "2017-03-01"}}
    old.write_text(json.dumps(values), encoding="utf-8")
    with RunningAgent(imds.endpoint, tmp_path / "state", config, "--allow-approval") as agent:
        agent.ready()
        event_id = imds.start("live-migration")
        last(agent, "approved")
        assert imds.start_requests == [event_id]


# ---- by hand


def test_by_hand_it_shows_what_it_means_asks_and_records_who(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path) as agent:
        agent.ready()
        event_id = imds.start("live-migration", resources=(ME, PEER))
        agent.reported("announced")
        state = ("--state-dir", str(agent.state))
        nobody_to_ask = notbefore("approve", event_id, *state)
        assert nobody_to_ask.returncode == 1
        assert f"all 2 VMs: {ME}, {PEER}" in nobody_to_ask.stdout
        assert "--yes" in nobody_to_ask.stderr
        assert imds.start_requests == []
        assert "no event nonsense is listed" in notbefore("approve", "nonsense", "--yes", *state).stderr
        assert notbefore("approve", event_id, "--yes", "--reason", "x" * 501, *state).returncode == 2
        done = notbefore("approve", event_id.lower(), "--yes", "--reason", "CHG-1: ready\n", *state, SUDO_USER="eve")
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "approved (accepted)")
        assert imds.start_requests == [event_id]
        record = last(agent, "approved")
        assert (record["rule"], record["by"]) == ("operator", "eve (sudo)")
        assert agent.records[-1]["azure.scheduled_event.approval.reason"] == "CHG-1: ready\n"
        assert agent.json("/api/v1/history")["changes"][-1]["azure.scheduled_event.approval.reason"] == "CHG-1: ready\n"


def test_while_vm_name_contradicts_imds_nothing_is_approved(imds: Simulator, tmp_path: Path) -> None:
    config = Path(configuration(tmp_path, USERS))
    values = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(values | {"vm": {"name": PEER}}), encoding="utf-8")
    with RunningAgent(imds.endpoint, tmp_path / "state", str(config), "--allow-approval") as agent:
        agent.ready()
        eventually(lambda: f"vm.name is {PEER}, and IMDS says that this VM is {ME}" in agent.log)
        imds.set_document(listed(Resources=[PEER]))
        agent.reported("announced")
        waited(imds)
        (event,) = agent.json("/api/v1/events")["events"]
        assert event["approval"]["mode"] == "off"
        assert f"IMDS says that this VM is {ME}" in event["approval"]["off"]
        by_hand = notbefore("approve", ID, "--yes", "--state-dir", str(agent.state))
        assert (by_hand.returncode, "nothing is sent: vm.name is" in by_hand.stdout) == (1, True)
        assert imds.start_requests == []
        config.write_text(json.dumps(values | {"vm": {"name": ME.upper()}}), encoding="utf-8")
        reload(agent)
        imds.set_document(listed(3, Resources=[ME]))
        eventually(lambda: imds.start_requests)


def test_by_hand_as_well_it_is_sent_once_for_an_event_and_its_content(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path, USERS) as agent:
        agent.ready()
        imds.set_document(listed())
        last(agent, "approved")
        command = ("approve", ID, "--state-dir", str(agent.state))
        for words in ((), ("--yes",)):
            again = notbefore(*command, *words)
            assert (again.returncode, again.stderr) == (0, "")
            assert "it is approved already, by rule users at 20" in again.stdout.splitlines()[-1]
        shown = ask(agent.state, ControlRequest(ID))  # as it is shown where it is approved in the moment between
        assert "approved already" in ask(agent.state, ControlRequest(ID, shown.content)).words
        imds.set_document(listed(3, EventSource="Platform"))
        agent.reported("announced", "approved", "updated")
        assert notbefore(*command, "--yes").returncode == 0
        eventually(lambda: agent.kinds.count("approved") == 2)
        assert "by operator root at 20" in notbefore(*command).stdout
        assert imds.start_requests == [ID, ID]


def test_by_hand_nothing_is_sent_beside_an_approval_that_is_under_way(imds: Simulator, tmp_path: Path) -> None:
    imds.fault("start-freeze", 60)
    with agent_of(imds, tmp_path, USERS) as agent:
        agent.ready()
        imds.set_document(listed())
        eventually(lambda: imds.start_requests)
        reply = ask(agent.state, ControlRequest(ID, ask(agent.state, ControlRequest(ID)).content))
        assert (reply.done, "an approval of it is under way" in reply.words) == (False, True)
        assert imds.start_requests == [ID]


def test_only_root_and_the_agents_user_may(imds: Simulator, tmp_path: Path) -> None:
    needs("root")
    with agent_of(imds, tmp_path) as agent:
        agent.ready()
        path = agent.state / "control.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        # even where the file's mode would let somebody in, the kernel says who it is
        for place in (agent.state, path):
            place.chmod(0o777)
        for place in tmp_path.parents:
            if place.stat().st_mode & 0o005 != 0o005:
                place.chmod(place.stat().st_mode | 0o005)
        tmp_path.chmod(0o755)
        imds.set_document(listed())
        agent.reported("announced")
        assert "only root and the agent's own user" in asked_by(65534, path, {"event_id": ID, "content": "x"})
        assert imds.start_requests == []


def asked_by(user: int, path: Path, order: dict[str, Any]) -> str:
    """What another user is answered; a fork, since that user cannot read this Python."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(20)
                connection.connect(str(path))
                connection.sendall(json.dumps(order).encode() + b"\n")
                os.write(writer, connection.recv(9999))
        except OSError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        return answer.read()


def test_what_has_changed_since_it_was_shown_is_not_approved(imds: Simulator, tmp_path: Path) -> None:
    with agent_of(imds, tmp_path) as agent:
        agent.ready()
        imds.set_document(listed())
        agent.reported("announced")
        shown = ask(agent.state, ControlRequest(ID))
        imds.set_document(listed(3, EventType="Redeploy", Resources=[ME, PEER]))
        agent.reported("announced", "updated")
        assert "changed since it was shown" in ask(agent.state, ControlRequest(ID, shown.content)).words
        assert imds.start_requests == []


@pytest.mark.parametrize(
    "order", [b"\n", b"{}\n", b'{"event_id": 5}\n', b'{"event_id": "a", "force": true}\n', b"\xff" * 100]
)
def test_what_is_no_order_is_answered_so(imds: Simulator, tmp_path: Path, order: bytes) -> None:
    with agent_of(imds, tmp_path) as agent:
        agent.ready()
        eventually((agent.state / "control.sock").exists)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(agent.state / "control.sock"))
            connection.sendall(order)
            connection.shutdown(socket.SHUT_WR)
            assert b"this is no request" in connection.recv(9999)
        assert agent.stop() == 0
        assert not (agent.state / "control.sock").exists()


def test_without_the_switch_there_is_nobody_to_ask(imds: Simulator, tmp_path: Path) -> None:
    with RunningAgent(imds.endpoint, tmp_path) as agent:
        agent.ready()
        asked = notbefore("approve", ID, "--yes", "--state-dir", str(tmp_path))
        assert asked.returncode == 1
        assert "without --allow-approval" in asked.stderr
