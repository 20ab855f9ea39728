"""The installed agent watches a simulated IMDS, and is stopped, killed, frozen and restarted."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.simulator.server import Simulator
from support.agent import (
    PATIENCE,
    RunningAgent,
    becomes,
    eventually,
    get,
    notbefore,
    wait_for_polls,
)
from support.azure import FUTURE, ID, ME, body, item
from support.peers import HttpPeer
from support.state_file import change_state, read_records, read_state

PENDING = 'azure_scheduled_events_pending{event_status="%s",event_type="%s",scope="%s"}'
CHANGES = 'azure_scheduled_event_changes_total{change="%s",event_type="%s"}'
COUNTDOWN = f'azure_scheduled_event_seconds_to_not_before{{event_id="{ID}"}}'
RELOADS = 'notbefore_config_reloads_total{result="%s"}'


def scheduled(event_type: str = "Freeze", **fields: Any) -> bytes:
    return body(item(EventType=event_type, NotBefore=FUTURE, **fields), incarnation=2)


def started(event_type: str = "Freeze", **fields: Any) -> bytes:
    return body(
        item(EventType=event_type, EventStatus="Started", NotBefore="", **fields), incarnation=3
    )


def test_event_is_reported_from_its_announcement_to_its_end(
    imds: Simulator, tmp_path: Path
) -> None:
    with RunningAgent(imds.endpoint, tmp_path) as agent:
        imds.set_document(scheduled())
        agent.wait_for_changes("announced")

        assert agent.metric(PENDING % ("Scheduled", "Freeze", "self")) == 1

        assert (agent.metric(COUNTDOWN) or 0) > 0
        assert agent.json("/api/v1/events")["events"][0]["event_id"] == ID

        imds.set_document(started())
        agent.wait_for_changes("announced", "started")

        assert agent.metric(COUNTDOWN) is None

        imds.set_document(body(incarnation=4))
        *_, last = agent.wait_for_changes("announced", "started", "finished")

        def history_kinds() -> list[str]:
            return [change["event.name"] for change in agent.json("/api/v1/history")["changes"]]

        assert last["azure.scheduled_event.outcome"] == "finished"
        assert last["host.name"] == ME
        assert agent.metric(PENDING % ("Started", "Freeze", "self")) is None
        assert agent.metric(CHANGES % ("finished", "Freeze")) == 1
        # a disk that is slow now shows only the newest changes
        becomes(
            history_kinds,
            [
                "azure.scheduled_event.announced",
                "azure.scheduled_event.started",
                "azure.scheduled_event.finished",
            ],
        )


def test_durations_are_measured_across_a_killed_agent(imds: Simulator, tmp_path: Path) -> None:
    scheduled_count = 'azure_scheduled_event_scheduled_duration_seconds_count{event_type="Reboot"}'
    started_name = "azure_scheduled_event_started_duration_seconds"
    with RunningAgent(imds.endpoint, tmp_path) as first:
        imds.set_document(scheduled("Reboot"))
        first.wait_for_changes("announced")
        before_start = time.monotonic()
        imds.set_document(started("Reboot"))
        first.wait_for_changes("announced", "started")
        # a disk that takes more than a second does not delay the records
        eventually(lambda: len(read_records(tmp_path)) == 2)

        assert first.metric(scheduled_count) == 1

        first.stop(signal.SIGKILL)

    with RunningAgent(imds.endpoint, tmp_path) as second:
        imds.set_document(body(incarnation=4))
        second.wait_for_changes("finished")
        longest = time.monotonic() - before_start
        duration = second.metric(f'{started_name}_sum{{event_type="Reboot"}}')

        assert second.metric(scheduled_count) == 1
        assert second.metric(f'{started_name}_count{{event_type="Reboot"}}') == 1
        assert duration is not None
        assert 0 < duration < longest + 1, "the Date of IMDS counts whole seconds"


@pytest.mark.alone
@pytest.mark.parametrize("hanging", [False, True])
def test_sigterm_stops_agent_within_two_seconds(
    imds: Simulator, tmp_path: Path, *, hanging: bool
) -> None:
    with RunningAgent(imds.endpoint, tmp_path) as agent:
        if hanging:
            imds.fault("freeze", 30, times=100)
            two_seconds = rb"IMDS is ([2-9]|\d\d+)\."
            eventually(lambda: re.search(two_seconds, get(agent.port, "/readyz")[1]))
            poll_delay = agent.metric("notbefore_poll_delay_seconds") or 0
            assert poll_delay < 1, "a poll takes long, but none begins late"

        stopped = time.monotonic()
        exit_code = agent.stop()

        assert exit_code == 0
        assert time.monotonic() - stopped < 2


def test_agent_that_a_reboot_killed_reports_the_reboot(imds: Simulator, tmp_path: Path) -> None:
    with RunningAgent(imds.endpoint, tmp_path) as first:
        before_start = time.monotonic()
        imds.set_document(started("Reboot"))
        first.wait_for_changes("started")
        eventually(lambda: read_records(tmp_path))  # in one transaction with the state
        first.stop(signal.SIGKILL)
    last_answer = read_state(tmp_path, "seen")["wall"]
    for key in ("seen", "last_running"):
        change_state(tmp_path, key, boot="the boot before")
    imds.set_document(body(incarnation=9))

    with RunningAgent(imds.endpoint, tmp_path) as second:
        (record,) = second.wait_for_changes("finished")
        longest = time.monotonic() - before_start
    interruption = record["azure.scheduled_event.interruption_seconds"]

    assert record["azure.scheduled_event.outcome"] == "finished"
    assert record["azure.scheduled_event.reason"] == "machine_rebooted"
    assert 0 < interruption < longest + 1, "the Date of IMDS counts whole seconds"
    assert last_answer.isoformat() < record["time"]


def test_interruption_by_a_freeze_is_measured(imds: Simulator, tmp_path: Path) -> None:
    imds.set_document(scheduled())

    with RunningAgent(imds.endpoint, tmp_path) as agent:
        imds.set_document(started())
        agent.wait_for_changes("announced", "started")
        before_freeze = time.monotonic()
        wait_for_polls(imds, 2)  # it measures from the end of the poll that reported the start
        agent.process.send_signal(signal.SIGSTOP)
        time.sleep(3)  # this is the freeze itself
        agent.process.send_signal(signal.SIGCONT)
        wait_for_polls(imds, 2)
        imds.set_document(body(incarnation=9))
        *_, last = agent.wait_for_changes("announced", "started", "finished")
        longest = time.monotonic() - before_freeze

    assert 2.5 < last["azure.scheduled_event.interruption_seconds"] < longest


def bytes_written(pid: int) -> str:
    """Return how many bytes a process has caused to be written to a disk."""
    text = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
    (count,) = re.findall(r"(?m)^write_bytes: (\d+)", text)
    return str(count)


def test_idle_agent_writes_nothing_to_the_disk(imds: Simulator, tmp_path: Path) -> None:
    with RunningAgent(imds.endpoint, tmp_path) as agent:
        agent.metric("up")  # a scrape opens the last files
        # The main thread wakes each 10 s, and once more reads the outbox after the last commit,
        # which SQLite notes. So wait for one waking, and measure over another (5 polls a second).
        wait_for_polls(imds, 65)
        os.sync()
        before = bytes_written(agent.process.pid)

        wait_for_polls(imds, 60)

        assert bytes_written(agent.process.pid) == before


def write_sink(config: Path, name: str, hook: HttpPeer) -> None:
    """Write a configuration with one webhook, whose path is its name."""
    url = f"{hook.url}/{name}"
    sink = {"webhook": {"url": url, "allow_private": True, "timeout": "60s"}}
    config.write_text(yaml.safe_dump({"sinks": {name: sink}}), encoding="utf-8")


def test_sighup_with_a_bad_configuration_keeps_the_old_one(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    config = tmp_path / "notbefore.yml"
    write_sink(config, "old", hook)
    with RunningAgent(imds.endpoint, tmp_path / "state", str(config)) as agent:
        config.write_text("vm: {name: [5]}\n", encoding="utf-8")

        agent.process.send_signal(signal.SIGHUP)

        eventually(lambda: agent.metric(RELOADS % "failure") == 1)
        eventually(lambda: f"{config}:1:6: vm.name" in agent.log)
        assert agent.metric("notbefore_config_last_reload_successful") == 0
        imds.set_document(scheduled())
        eventually(lambda: agent.count("delivered", "old") == 1)


def test_sighup_with_a_good_configuration_uses_its_sinks(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    config = tmp_path / "notbefore.yml"
    write_sink(config, "old", hook)
    with RunningAgent(imds.endpoint, tmp_path / "state", str(config)) as agent:
        imds.set_document(scheduled())
        eventually(lambda: agent.count("delivered", "old") == 1)
        write_sink(config, "new", hook)

        agent.process.send_signal(signal.SIGHUP)

        eventually(lambda: agent.metric(RELOADS % "success") == 1)
        assert agent.metric('notbefore_deliveries_total{result="delivered",sink="new"}') == 0
        assert agent.metric("notbefore_config_last_reload_successful") == 1
        imds.set_document(started())
        eventually(lambda: agent.count("delivered", "new") == 1)

    assert [request.path for request in hook.requests] == ["/old", "/new"]


def test_agent_works_in_memory_without_a_state_directory(imds: Simulator, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the directory should be", encoding="utf-8")

    with RunningAgent(imds.endpoint, tmp_path / "state").without_waiting() as agent:
        eventually(lambda: agent.answers("/healthz"))
        eventually(lambda: agent.json("/api/v1/events")["last_successful_poll"] is not None)
        assert agent.metric("notbefore_store_degraded") == 1

        status, reasons = get(agent.port, "/readyz")
        assert status == 503
        assert b"new data does not survive a restart" in reasons

        imds.set_document(scheduled())
        agent.wait_for_changes("announced")
        assert len(agent.json("/api/v1/history")["changes"]) == 1

        (tmp_path / "state").unlink()
        agent.wait_until_ready()
        assert len(read_records(tmp_path / "state")) == 1


def test_agent_reports_a_state_directory_that_cannot_be_created(imds: Simulator) -> None:
    missing = b"No such file or directory: '/proc/notbefore'"
    with RunningAgent(imds.endpoint, Path("/proc/notbefore")).without_waiting() as agent:
        eventually(lambda: agent.answers("/healthz"))
        eventually(lambda: missing in get(agent.port, "/readyz")[1])

        status, _ = get(agent.port, "/readyz")

    assert status == 503


def test_second_agent_does_not_share_the_state_of_the_first(
    imds: Simulator, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with RunningAgent(imds.endpoint, state):
        words = ("--imds", imds.endpoint, "--state-dir", state, "--listen", "127.0.0.1:0")

        second = notbefore("run", *words)

    assert second.returncode == 3
    assert "another notbefore is running" in second.stderr


def test_log_is_json_lines_and_state_directory_is_private(imds: Simulator, tmp_path: Path) -> None:
    with RunningAgent(imds.endpoint, tmp_path / "state") as agent:
        agent.stop()

    assert all(line.startswith('{"time":') for line in agent.log.splitlines())
    assert "SIGTERM: stopping" in agent.log
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


@pytest.mark.alone
def test_blocked_standard_output_does_not_block_the_agent(imds: Simulator, tmp_path: Path) -> None:
    events = [item(f"id-{number}", NotBefore=FUTURE) for number in range(500)]
    with RunningAgent(imds.endpoint, tmp_path, reading=False) as agent:
        imds.set_document(body(*events, incarnation=2))
        eventually(lambda: agent.metric(CHANGES % ("announced", "Freeze")) == 500)
        wait_for_polls(imds, 5)
        agent.wait_until_ready()

        stopped = time.monotonic()
        agent.process.terminate()
        agent.process.wait(PATIENCE)

        assert time.monotonic() - stopped < 2
        agent.read()


def listed_by(agent: RunningAgent, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `notbefore events`."""
    return notbefore("events", "--url", f"http://127.0.0.1:{agent.port}", *words)


def silence_imds(imds: Simulator, agent: RunningAgent) -> None:
    """Let IMDS fail from now on, and wait until the agent calls this a silence."""
    imds.fault("status", times=10_000)
    # with the error: a late poll is a silence without one, and its answer ends it
    silence = rb"the last good answer of IMDS is .*: server_error"
    eventually(lambda: re.search(silence, get(agent.port, "/readyz")[1]))


def test_no_output_says_nothing_is_scheduled_when_imds_is_silent(
    imds: Simulator, tmp_path: Path
) -> None:
    unknown = "it is not known what is scheduled now: the last good answer of IMDS is"
    with RunningAgent(imds.endpoint, tmp_path / "state") as agent:
        # again and again: a late poll is a silence too
        eventually(lambda: listed_by(agent).stdout == "Nothing is scheduled.\n")
        silence_imds(imds, agent)

        for words in ((), ("--json",)):
            command = listed_by(agent, *words)
            assert command.returncode == 1
            assert command.stdout == ""
            assert unknown in command.stderr
        _, page = get(agent.port, "/")

    assert b"Nothing was scheduled when IMDS last answered" in page


def test_outputs_show_the_last_known_events_when_imds_is_silent(
    imds: Simulator, tmp_path: Path
) -> None:
    imds.set_document(scheduled())
    with RunningAgent(imds.endpoint, tmp_path / "state") as agent:
        agent.wait_for_changes("announced")
        silence_imds(imds, agent)

        command = listed_by(agent)
        _, page = get(agent.port, "/")

    assert command.returncode == 1
    assert command.stdout.splitlines()[0] == "Events that were listed when IMDS last answered:"
    assert b"is not known" in page


def test_heartbeat_pings_failure_when_imds_is_silent(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    config = {"heartbeat": {"every": "10s", "ping_url": f"{hook.url}/uuid"}}
    silence = b"the last good answer of IMDS is"

    def was_pinged(paths: set[str], text: bytes = b"") -> bool:
        return any(request.path in paths and text in request.body for request in hook.requests)

    with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
        # IMDS may have answered before the first ping
        eventually(lambda: was_pinged({"/uuid/start", "/uuid"}))

        imds.fault("status", times=10_000)

        eventually(lambda: was_pinged({"/uuid/fail"}, silence))
        assert agent.metric("notbefore_courier_running") == 0, "pings need no courier"


def test_unreadable_event_is_reported_everywhere(imds: Simulator, tmp_path: Path) -> None:
    with RunningAgent(imds.endpoint, tmp_path) as agent:
        imds.set_document(body(item(EventType=None), incarnation=2))

        eventually(lambda: agent.json("/api/v1/events")["unreadable"] == 1)
        assert b"1 listed event cannot be read" in get(agent.port, "/readyz")[1]
        assert b"cannot be read" in get(agent.port, "/")[1]

        command = listed_by(agent)
        assert "1 listed event cannot be read" in command.stdout
        assert "Nothing is scheduled" not in command.stdout
