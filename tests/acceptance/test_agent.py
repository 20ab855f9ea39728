"""The installed command: watched, stopped, killed, frozen and started again, against a simulated
IMDS.
"""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, get, notbefore, wait_for_polls
from support.azure import FUTURE, ID, ME, body, item
from support.peers import HttpPeer
from support.state_file import change_state, read_records, read_state

PENDING = 'azure_scheduled_events_pending{event_status="%s",event_type="%s",scope="%s"}'
CHANGES = 'azure_scheduled_event_changes_total{change="%s",event_type="%s"}'


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

        countdown = agent.metric(f'azure_scheduled_event_seconds_to_not_before{{event_id="{ID}"}}')

        assert countdown is not None
        assert countdown > 0
        assert agent.json("/api/v1/events")["events"][0]["event_id"] == ID

        imds.set_document(started())
        agent.wait_for_changes("announced", "started")

        assert (
            agent.metric(f'azure_scheduled_event_seconds_to_not_before{{event_id="{ID}"}}') is None
        )

        imds.set_document(body(incarnation=4))
        *_, last = agent.wait_for_changes("announced", "started", "finished")

        assert last["azure.scheduled_event.outcome"] == "finished"
        assert last["host.name"] == ME
        assert agent.metric(PENDING % ("Started", "Freeze", "self")) is None
        assert agent.metric(CHANGES % ("finished", "Freeze")) == 1
        assert [change["event.name"] for change in agent.json("/api/v1/history")["changes"]] == [
            f"azure.scheduled_event.{kind}" for kind in ("announced", "started", "finished")
        ]


def test_durations_are_measured_across_a_killed_agent(imds: Simulator, tmp_path: Path) -> None:
    scheduled_count = 'azure_scheduled_event_scheduled_duration_seconds_count{event_type="Reboot"}'
    started_name = "azure_scheduled_event_started_duration_seconds"
    with RunningAgent(imds.endpoint, tmp_path) as first:
        imds.set_document(scheduled("Reboot"))
        first.wait_for_changes("announced")
        imds.set_document(started("Reboot"))

        first.wait_for_changes("announced", "started")

        assert first.metric(scheduled_count) == 1

        first.stop(signal.SIGKILL)
    killed = time.time()

    with RunningAgent(imds.endpoint, tmp_path) as second:
        imds.set_document(body(incarnation=4))
        second.wait_for_changes("finished")

        assert second.metric(scheduled_count) == 1
        assert second.metric(f'{started_name}_count{{event_type="Reboot"}}') == 1

        longest = time.time() - killed + 60
        duration = second.metric(f'{started_name}_sum{{event_type="Reboot"}}')

        assert duration is not None
        assert 0 < duration < longest


@pytest.mark.alone
@pytest.mark.parametrize("hanging", [False, True])
def test_sigterm_stops_agent_within_two_seconds(
    imds: Simulator, tmp_path: Path, *, hanging: bool
) -> None:
    with RunningAgent(imds.endpoint, tmp_path) as agent:
        if hanging:
            imds.fault("freeze", 30)
            eventually(lambda: re.search(rb"IMDS is [2-9]\.", get(agent.port, "/readyz")[1]))
            assert (agent.metric("notbefore_poll_delay_seconds") or 0) < 1, (
                "that one takes long: none begins late"
            )

        begun = time.monotonic()

        assert agent.stop() == 0
        assert time.monotonic() - begun < 2


def test_reboot_is_reported_by_the_agent_that_it_killed(imds: Simulator, tmp_path: Path) -> None:
    with RunningAgent(imds.endpoint, tmp_path) as first:
        imds.set_document(started("Reboot"))

        first.wait_for_changes("started")

        eventually(lambda: read_records(tmp_path))  # in one transaction with the state

        first.stop(signal.SIGKILL)
    beat = read_state(tmp_path, "seen")["wall"]
    for key in ("seen", "last_running"):  # the last good answer and the last beat
        change_state(tmp_path, key, boot="the boot before")
    imds.set_document(body(incarnation=9))

    with RunningAgent(imds.endpoint, tmp_path) as second:
        (record,) = second.wait_for_changes("finished")

    assert record["azure.scheduled_event.outcome"] == "finished"
    assert record["azure.scheduled_event.reason"] == "machine_rebooted"
    assert 0 < record["azure.scheduled_event.interruption_seconds"] < 60
    assert beat.isoformat() < record["time"]


def test_interruption_by_a_freeze_is_measured(imds: Simulator, tmp_path: Path) -> None:
    imds.set_document(scheduled())

    with RunningAgent(imds.endpoint, tmp_path) as agent:
        imds.set_document(started())
        agent.wait_for_changes("announced", "started")
        wait_for_polls(imds, 2)  # it measures from the end of the poll that reported the start
        agent.process.send_signal(signal.SIGSTOP)
        time.sleep(3)  # this is the freeze itself
        agent.process.send_signal(signal.SIGCONT)
        wait_for_polls(imds, 2)
        imds.set_document(body(incarnation=9))
        *_, last = agent.wait_for_changes("announced", "started", "finished")

    assert 2.5 < last["azure.scheduled_event.interruption_seconds"] < 15


def test_idle_agent_writes_nothing_to_the_disk(imds: Simulator, tmp_path: Path) -> None:
    with RunningAgent(imds.endpoint, tmp_path) as agent:
        agent.metric("up")  # a scrape: all that is opened is open now
        # the main thread wakes each 10 s, and reads the outbox once more after the last commit:
        # SQLite notes that in its memory-mapped index. It is measured from then on, and over
        # another waking (a poll each 0.2 s)
        wait_for_polls(imds, 65)
        os.sync()
        before = written(agent.process.pid)

        wait_for_polls(imds, 60)

        assert written(agent.process.pid) == before


def written(pid: int) -> str:
    found = re.search(r"write_bytes: (\d+)", Path(f"/proc/{pid}/io").read_text(encoding="ascii"))
    assert found
    return found[1]


def test_sighup_applies_a_good_configuration_and_refuses_a_bad_one(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    config = tmp_path / "notbefore.yml"

    def write(sink: str) -> None:
        config.write_text(
            f"sinks: {{{sink}: {{webhook: {{url: '{hook.url}/{sink}', allow_private: true}}}}}}\n",
            "utf-8",
        )

    write("old")
    with RunningAgent(imds.endpoint, tmp_path / "state", str(config)) as agent:
        config.write_text("vm: {name: [5]}\n", encoding="utf-8")
        agent.process.send_signal(signal.SIGHUP)

        eventually(lambda: agent.metric('notbefore_config_reloads_total{result="failure"}') == 1)
        # it is logged after it is counted
        eventually(lambda: f"{config}:1:6: vm.name" in agent.log)
        assert agent.metric("notbefore_config_last_reload_successful") == 0

        imds.set_document(scheduled())
        eventually(lambda: agent.count("delivered", "old") == 1)

        write("new")
        agent.process.send_signal(signal.SIGHUP)

        eventually(lambda: agent.metric('notbefore_config_reloads_total{result="success"}') == 1)
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

        status, answer = get(agent.port, "/readyz")
        assert status == 503
        assert b"new data does not survive a restart" in answer

        imds.set_document(scheduled())
        agent.wait_for_changes("announced")

        assert len(agent.json("/api/v1/history")["changes"]) == 1

        (tmp_path / "state").unlink()
        agent.wait_until_ready()

    assert len(read_records(tmp_path / "state")) == 1


def test_agent_reports_a_state_directory_that_cannot_be_created(imds: Simulator) -> None:
    with RunningAgent(imds.endpoint, Path("/proc/notbefore")).without_waiting() as agent:
        eventually(lambda: agent.answers("/healthz"))

        status, reasons = get(agent.port, "/readyz")

    assert status == 503
    assert b"No such file or directory: '/proc/notbefore'" in reasons


def test_second_agent_does_not_share_the_state_of_the_first(
    imds: Simulator, tmp_path: Path
) -> None:
    with RunningAgent(imds.endpoint, tmp_path / "state") as first:
        words = (
            "--imds",
            imds.endpoint,
            "--state-dir",
            tmp_path / "state",
            "--listen",
            "127.0.0.1:0",
        )

        second = notbefore("run", *words)

        assert second.returncode == 3
        assert "another notbefore is running" in second.stderr

        first.stop()

    assert all(line.startswith('{"time":') for line in first.log.splitlines())
    assert "SIGTERM: stopping" in first.log
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


@pytest.mark.alone
def test_blocked_standard_output_does_not_block_the_agent(imds: Simulator, tmp_path: Path) -> None:
    with RunningAgent(imds.endpoint, tmp_path, reading=False) as agent:
        imds.set_document(
            body(*(item(f"id-{number}", NotBefore=FUTURE) for number in range(500)), incarnation=2)
        )
        eventually(lambda: agent.metric(CHANGES % ("announced", "Freeze")) == 500)

        wait_for_polls(imds, 5)
        agent.wait_until_ready()
        begun = time.monotonic()
        agent.process.terminate()
        agent.process.wait(20)

        assert time.monotonic() - begun < 2

        agent.read()


def test_no_output_claims_that_nothing_is_scheduled_while_imds_is_silent(
    imds: Simulator, hook: HttpPeer, tmp_path: Path
) -> None:
    def asked(agent: RunningAgent, *words: str) -> tuple[int, str, str]:
        done = notbefore("events", "--url", f"http://127.0.0.1:{agent.port}", *words)
        return done.returncode, done.stdout, done.stderr

    config = {"heartbeat": {"every": "10s", "ping_url": f"{hook.url}/uuid"}}
    with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
        # a late poll is a silence, too
        eventually(lambda: asked(agent) == (0, "Nothing is scheduled.\n", ""))
        # IMDS may have been faster
        eventually(lambda: {request.path for request in hook.requests} & {"/uuid/start", "/uuid"})

        imds.fault("status", times=10_000)
        eventually(lambda: get(agent.port, "/readyz")[0] == 503)

        for words in ((), ("--json",)):
            code, out, error = asked(agent, *words)
            assert code == 1
            assert out == ""
            assert "it is not known what is scheduled now: the last good answer of IMDS is" in error

        assert b"Nothing was scheduled when IMDS last answered" in get(agent.port, "/")[1]
        eventually(lambda: hook.requests[-1].path == "/uuid/fail")
        assert b"the last good answer of IMDS is" in hook.requests[-1].body
        assert agent.metric("notbefore_courier_running") == 0  # no process was started for it

        imds.clear()
        imds.set_document(scheduled())
        agent.wait_for_changes("announced")
        imds.fault("status", times=10_000)

        eventually(lambda: get(agent.port, "/readyz")[0] == 503)

        code, out, error = asked(agent)

        assert code == 1
        assert out.splitlines()[0] == "Events that were listed when IMDS last answered:"
        assert b"is not known" in get(agent.port, "/")[1]


def test_unreadable_event_is_reported_everywhere(imds: Simulator, tmp_path: Path) -> None:
    with RunningAgent(imds.endpoint, tmp_path) as agent:
        imds.set_document(body(item(EventType=None), incarnation=2))

        eventually(lambda: agent.json("/api/v1/events")["unreadable"] == 1)
        assert b"1 listed events cannot be read" in get(agent.port, "/readyz")[1]
        assert b"cannot be read" in get(agent.port, "/")[1]

        done = notbefore("events", "--url", f"http://127.0.0.1:{agent.port}").stdout
        assert "1 listed events cannot be read" in done
        assert "Nothing is scheduled" not in done
