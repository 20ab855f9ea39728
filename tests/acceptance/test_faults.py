"""A full, hanging or read-only disk, or a slow IMDS, keeps no notification from the receivers."""

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from notbefore.core.outbox import DISK_PATIENCE
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, becomes, eventually, get, notbefore
from support.azure import listed
from support.hanging_disk import EVERYTHING, WRITES, HangingDisk
from support.needs import needs
from support.peers import Answer, HttpPeer
from support.state_file import read_records


class AgentOnSmallDisk(RunningAgent):
    """Its state directory is a disk of 1 MiB that no other process sees."""

    mount = 'mount -t tmpfs -o size=1m,mode=0700 tmpfs "$0"'

    @classmethod
    def prefix(cls, state: Path) -> Sequence[str]:
        needs("the right to mount")
        return ("unshare", "--mount", "sh", "-c", f'{cls.mount} && exec "$@"', str(state))

    @property
    def disk(self) -> Path:
        return Path(f"/proc/{self.process.pid}/root{self.state}")


class AgentOnReadOnlyDisk(AgentOnSmallDisk):
    """Its state directory is a disk that takes nothing."""

    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'


def fill(filler: Path) -> None:
    """Take all room of a disk with a file on it, which may have taken some before."""
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    directory.mkdir()
    return directory


@pytest.fixture
def config(hook: HttpPeer) -> dict[str, Any]:
    # a busy receiver gets each delivery once: no attempt ends before its answer
    webhook = {"url": hook.url, "allow_private": True, "timeout": "60s"}
    return {"sinks": {"hook": {"webhook": webhook}}}


def events_at(hook: HttpPeer) -> list[str]:
    return [json.loads(request.body)["azure.scheduled_event.id"] for request in hook.requests]


def events_once_at(hook: HttpPeer) -> list[str]:
    """Return the events without repetitions, each of which must have the id of the first."""
    ids: dict[str, str] = {}
    for request in list(hook.requests):
        event = json.loads(request.body)["azure.scheduled_event.id"]
        delivery_id = request.headers["x-notbefore-delivery-id"]
        assert ids.setdefault(event, delivery_id) == delivery_id
    return list(ids)


def is_unready(agent: RunningAgent, reason: bytes) -> bool:
    status, reasons = get(agent.port, "/readyz")
    return status == 503 and reason in reasons


def test_agent_is_ready_and_names_slow_answers_of_imds(imds: Simulator, tmp_path: Path) -> None:
    slow = rb"IMDS is slow: its last answer took \d+ s"

    def is_ready_and_slow() -> bool:
        status, reasons = get(agent.port, "/readyz")
        return status == 200 and re.search(slow, reasons) is not None

    with RunningAgent(imds.endpoint, tmp_path / "state") as agent:
        imds.fault("slow", 2.2, times=5_000)

        eventually(is_ready_and_slow)

        imds.clear()
        imds.fault("status", 500, times=5_000)

        # with the error: after it, no late answer makes IMDS slow again
        failing = b"server_error"
        eventually(lambda: is_unready(agent, failing))
        _, reasons = get(agent.port, "/readyz")
        assert b"the last good answer of IMDS is" in reasons
        assert not re.search(slow, reasons)


def test_full_disk_does_not_prevent_notifications(
    imds: Simulator, hook: HttpPeer, config: dict[str, Any], state: Path
) -> None:
    unwritten = b"the state cannot be written, so new data does not survive a restart"
    with AgentOnSmallDisk(imds.endpoint, state, config) as agent:
        imds.set_document(listed("a"))
        eventually(lambda: agent.count("delivered") == 1)
        filler = agent.disk / "filler"

        def is_full() -> bool:
            fill(filler)  # again: the end of a transaction may have left room
            return is_unready(agent, unwritten)

        fill(filler)
        imds.set_document(listed("a", "b"))

        eventually(lambda: events_at(hook) == ["a", "b"])
        eventually(is_full)
        assert agent.metric("notbefore_store_degraded") == 1
        eventually(lambda: agent.count("delivered") == 2)

        hook.default = Answer(how="hang")  # an idle courier would end by itself
        imds.set_document(listed("a", "b", "c"))
        eventually(lambda: events_at(hook) == ["a", "b", "c"])
        hook.default = Answer()
        os.kill(agent.courier(), signal.SIGKILL)

        eventually(lambda: events_at(hook) == ["a", "b", "c", "c"])
        eventually(lambda: agent.count("delivered") == 3)

        filler.unlink()
        agent.wait_until_ready()
        eventually(lambda: agent.metric("notbefore_store_degraded") == 0)

        imds.set_document(listed("a", "b", "c", "d"))
        eventually(lambda: agent.count("delivered") == 4)
        becomes(lambda: len(agent.json("/api/v1/history")["changes"]), 4)  # also on a slow disk

    assert events_at(hook) == ["a", "b", "c", "c", "d"]
    assert events_once_at(hook) == ["a", "b", "c", "d"]
    assert agent.log.count("cannot be written") == 1


@pytest.fixture
def disk(state: Path, monkeypatch: pytest.MonkeyPatch) -> HangingDisk:
    hanging_disk = HangingDisk(state, state.parent)
    for name, value in hanging_disk.variables.items():
        monkeypatch.setenv(name, value)
    return hanging_disk


def unchanged_polls(agent: RunningAgent) -> float:
    return agent.metric('notbefore_polls_total{result="unchanged"}') or 0.0


@pytest.mark.long
def test_hanging_disk_delays_neither_polls_nor_scrapes_nor_messages(
    imds: Simulator, hook: HttpPeer, config: dict[str, Any], disk: HangingDisk
) -> None:
    state = disk.directory
    with RunningAgent(imds.endpoint, state, config) as agent:
        imds.set_document(listed("a"))
        eventually(lambda: agent.count("delivered") == 1)

        courier = agent.courier()
        agent.wait_until_ready()  # else the last slow transaction stays the trouble of the disk
        disk.hang(EVERYTHING)
        imds.set_document(listed("a", "b"))

        eventually(lambda: events_once_at(hook) == ["a", "b"])
        eventually(lambda: is_unready(agent, b"the disk has not answered"))
        polls = unchanged_polls(agent)
        eventually(lambda: unchanged_polls(agent) > polls + 10)
        assert agent.answers("/healthz")
        assert agent.answers("/api/v1/history")

        with suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(courier, signal.SIGKILL)  # the next one begins on a disk that hangs
        imds.set_document(listed("a", "b", "c"))

        eventually(lambda: events_once_at(hook) == ["a", "b", "c"])
        eventually(
            lambda: agent.metric('notbefore_outbox_deliveries{sink="hook",state="pending"}') == 0
        )

        disk.resume()
        agent.wait_until_ready()
        imds.set_document(listed("a", "b", "c", "d"))

        eventually(lambda: agent.count("delivered") == 4)
        becomes(lambda: len(agent.json("/api/v1/history")["changes"]), 4)  # also on a slow disk

        # a slow disk does not delay deliveries
        eventually(lambda: len(read_records(state)) == 4)
        disk.hang(EVERYTHING)
        imds.set_document(listed("a", "b", "c", "d", "e"))

        eventually(lambda: events_once_at(hook) == ["a", "b", "c", "d", "e"])
        assert agent.stop() == 0

        disk.resume()

    # only the memory of the first agent knew the last event: the next one reports it again
    with RunningAgent(imds.endpoint, state, config) as agent:
        eventually(lambda: agent.kinds == ["announced"])
        eventually(lambda: agent.count("delivered") == 5)
        eventually(lambda: len(read_records(state)) == 5)

    assert events_once_at(hook) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("agent_type", "hanging", "reason"),
    [
        (AgentOnReadOnlyDisk, 0, b"readonly database"),
        (RunningAgent, WRITES, b"the disk has not answered"),
    ],
)
def test_agent_that_starts_on_a_sick_disk_keeps_the_outbox(
    imds: Simulator,
    hook: HttpPeer,
    config: dict[str, Any],
    disk: HangingDisk,
    *,
    agent_type: type[RunningAgent],
    hanging: int,
    reason: bytes,
) -> None:
    state = disk.directory
    with RunningAgent(imds.endpoint, state, config) as agent:
        imds.set_document(listed("a"))
        eventually(lambda: agent.count("delivered") == 1)
        # the end of an agent does not wait for a slow disk
        eventually(lambda: len(read_records(state)) == 1)

    disk.hang(hanging)
    with agent_type(imds.endpoint, state, config).without_waiting() as agent:
        imds.set_document(listed("a", "b"))
        eventually(lambda: events_once_at(hook) == ["a", "b"])
        eventually(lambda: is_unready(agent, reason))
        agent.wait_for_changes("announced")
        words = ("--imds", imds.endpoint, "--state-dir", state, "--listen", "127.0.0.1:0")
        other = notbefore("run", *words)
        assert other.returncode == 3, other.stderr
    disk.resume()

    # only the memory of the second agent knew the last event: the next one reports it again
    with RunningAgent(imds.endpoint, state, config) as agent:
        eventually(lambda: agent.kinds == ["announced"])
        eventually(lambda: agent.count("delivered") == 2)
        eventually(lambda: len(read_records(state)) == 2)

    assert events_once_at(hook) == ["a", "b"]


def event_of(record: dict[str, Any]) -> str:
    return str(record["azure.scheduled_event.id"])


def change_ids(records: Iterable[dict[str, Any]]) -> list[str]:
    return [record["azure.scheduled_event.change_id"] for record in records]


def test_killed_agents_print_each_record_at_most_once(imds: Simulator, state: Path) -> None:
    printed_ids: list[str] = []
    names: list[str] = []

    for number in range(10):
        with RunningAgent(imds.endpoint, state, interval="100ms") as agent:
            # again those that the last kill has lost
            eventually(lambda: len(read_records(state)) == number)
            name = f"event-{number}"
            names.append(name)
            announced = time.monotonic()
            imds.set_document(listed(*names))
            eventually(lambda: name in [event_of(record) for record in agent.records])
            waited = time.monotonic() - announced
            agent.stop(signal.SIGKILL)

        written_ids = change_ids(read_records(state))
        unwritten_ids = set(change_ids(agent.records)).difference(written_ids)
        # a record waits for the disk, but not longer than DISK_PATIENCE
        assert not unwritten_ids or waited > DISK_PATIENCE
        # the next agent does not know the unwritten records, and prints them again
        printed_ids += [key for key in change_ids(agent.records) if key not in unwritten_ids]

    assert len(printed_ids) == len(set(printed_ids))
    assert set(change_ids(read_records(state))) >= set(printed_ids)
