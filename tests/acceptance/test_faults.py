"""What the disk, the state file and its lock do to the installed agent: everybody is notified all
the same, once.
"""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually, get, notbefore
from support.azure import listed
from support.hanging_disk import EVERYTHING, WRITES, HangingDisk
from support.needs import needs
from support.peers import HttpPeer
from support.state_file import read_records


class AgentOnDiskOfItsOwn(RunningAgent):
    """Its state directory is a disk that nobody else sees: of 1 MiB, or (``ReadOnly``) one that
    takes nothing.
    """

    mount = 'mount -t tmpfs -o size=1m,mode=0700 tmpfs "$0"'

    @classmethod
    def prefix(cls, state: Path) -> Sequence[str]:
        needs("the right to mount")
        return ("unshare", "--mount", "sh", "-c", f'{cls.mount} && exec "$@"', str(state))

    @property
    def disk(self) -> Path:
        return Path(f"/proc/{self.process.pid}/root{self.state}")


class ReadOnly(AgentOnDiskOfItsOwn):
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'


def fill(disk: Path) -> Path:
    """Leave no room on a disk; returns the file that takes it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


@pytest.fixture
def state(tmp_path: Path) -> Path:
    found = tmp_path / "state"
    found.mkdir()
    return found


@pytest.fixture
def config(hook: HttpPeer) -> dict[str, Any]:
    return {"sinks": {"hook": {"webhook": {"url": hook.url, "allow_private": True}}}}


def events(hook: HttpPeer) -> list[str]:
    return [json.loads(request.body)["azure.scheduled_event.id"] for request in hook.requests]


def once(hook: HttpPeer) -> list[str]:
    """The same without repetitions, each of which has to have the id of the first."""
    found = {
        (event, one.headers["x-notbefore-delivery-id"])
        for event, one in zip(events(hook), hook.requests, strict=False)
    }
    assert len(found) == len({event for event, _ in found})
    return list(dict.fromkeys(events(hook)))


def not_ready(agent: RunningAgent, why: bytes) -> bool:
    status, said = get(agent.port, "/readyz")
    return status == 503 and why in said


def test_agent_is_ready_and_says_slow_while_slow_answers_arrive(
    imds: Simulator, tmp_path: Path
) -> None:
    slow = b"IMDS is slow: its last answer took 2 s"
    with RunningAgent(imds.endpoint, tmp_path / "state") as agent:
        agent.wait_until_ready()
        imds.fault("slow", 2.2, times=100)

        eventually(lambda: slow in get(agent.port, "/readyz")[1])

        status, body = get(agent.port, "/readyz")
        assert status == 200
        assert slow in body

        imds.clear()
        imds.fault("status", 500, times=100)

        eventually(lambda: not_ready(agent, b"the last good answer of IMDS is"))
        assert slow not in get(agent.port, "/readyz")[1]


def test_full_disk_does_not_prevent_notifications(
    imds: Simulator, hook: HttpPeer, config: dict[str, Any], state: Path
) -> None:
    with AgentOnDiskOfItsOwn(imds.endpoint, state, config) as agent:
        imds.set_document(listed("a"))
        eventually(lambda: events(hook) == ["a"])

        filler = fill(agent.disk)
        imds.set_document(listed("a", "b"))

        eventually(lambda: events(hook) == ["a", "b"])
        eventually(
            lambda: not_ready(
                agent, b"the state cannot be written, so new data does not survive a restart"
            )
        )
        assert agent.metric("notbefore_store_degraded") == 1
        eventually(lambda: agent.count("delivered") == 2)

        os.kill(agent.courier(), signal.SIGKILL)
        imds.set_document(listed("a", "b", "c"))

        eventually(lambda: events(hook) == ["a", "b", "c"])

        filler.unlink()
        agent.wait_until_ready()

        eventually(lambda: agent.metric("notbefore_store_degraded") == 0)

        imds.set_document(listed("a", "b", "c", "d"))
        eventually(lambda: agent.count("delivered") == 4)
        assert len(agent.json("/api/v1/history")["changes"]) == 4

    assert events(hook) == ["a", "b", "c", "d"]
    assert agent.log.count("cannot be written") == 1


@pytest.fixture
def disk(state: Path, monkeypatch: pytest.MonkeyPatch) -> HangingDisk:
    made = HangingDisk(state, state.parent)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.mark.long
def test_hanging_disk_delays_neither_polls_nor_scrapes_nor_messages(
    imds: Simulator, hook: HttpPeer, config: dict[str, Any], disk: HangingDisk
) -> None:
    state = disk.directory
    with RunningAgent(imds.endpoint, state, config) as agent:
        imds.set_document(listed("a"))
        eventually(lambda: agent.count("delivered") == 1)

        courier = agent.courier()
        disk.hang(EVERYTHING)
        imds.set_document(listed("a", "b"))

        eventually(lambda: once(hook) == ["a", "b"])
        eventually(lambda: not_ready(agent, b"the disk has not answered"))

        polls = agent.metric('notbefore_polls_total{result="unchanged"}') or 0

        eventually(
            lambda: (agent.metric('notbefore_polls_total{result="unchanged"}') or 0) > polls + 10
        )
        assert agent.answers("/healthz")
        assert agent.answers("/api/v1/history")

        with suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(courier, signal.SIGKILL)  # the next one begins on a disk that hangs
        imds.set_document(listed("a", "b", "c"))

        eventually(lambda: once(hook) == ["a", "b", "c"])
        eventually(
            lambda: agent.metric('notbefore_outbox_deliveries{sink="hook",state="pending"}') == 0
        )

        disk.resume()
        agent.wait_until_ready()
        imds.set_document(listed("a", "b", "c", "d"))

        eventually(lambda: agent.count("delivered") == 4)
        assert len(agent.json("/api/v1/history")["changes"]) == 4

        disk.hang(EVERYTHING)
        imds.set_document(listed("a", "b", "c", "d", "e"))

        eventually(lambda: once(hook) == ["a", "b", "c", "d", "e"])
        assert agent.stop() == 0

        disk.resume()

    with RunningAgent(imds.endpoint, state, config) as agent:  # what was not written is news to it
        eventually(lambda: agent.kinds == ["announced"])
        eventually(lambda: agent.count("delivered") == 5)

    assert once(hook) == ["a", "b", "c", "d", "e"]
    assert len(read_records(state)) == 5


@pytest.mark.parametrize(
    ("kind", "what", "said"),
    [(ReadOnly, 0, b"readonly database"), (RunningAgent, WRITES, b"the disk has not answered")],
)
def test_agent_that_starts_on_a_hanging_disk_keeps_the_outbox(
    imds: Simulator,
    hook: HttpPeer,
    config: dict[str, Any],
    disk: HangingDisk,
    *,
    kind: type[RunningAgent],
    what: int,
    said: bytes,
) -> None:
    state = disk.directory
    with RunningAgent(imds.endpoint, state, config) as agent:
        imds.set_document(listed("a"))

        eventually(lambda: agent.count("delivered") == 1)
    disk.hang(what)
    with kind(imds.endpoint, state, config).without_waiting() as agent:
        imds.set_document(listed("a", "b"))
        eventually(lambda: once(hook) == ["a", "b"])
        eventually(lambda: not_ready(agent, said))

        agent.wait_for_changes("announced")
        other = notbefore(
            "run", "--imds", imds.endpoint, "--state-dir", state, "--listen", "127.0.0.1:0"
        )

        assert other.returncode == 3, other.stderr
    disk.resume()

    with RunningAgent(
        imds.endpoint, state, config
    ) as agent:  # what only memory knew is forgotten: it is said again
        eventually(lambda: agent.kinds == ["announced"])
        eventually(lambda: agent.count("delivered") == 2)

    assert once(hook) == ["a", "b"]
    assert len(read_records(state)) == 2


def test_records_of_killed_agents_are_on_standard_output_at_most_once(
    imds: Simulator, state: Path
) -> None:
    ids: list[str] = []
    names: list[str] = []

    for number in range(10):
        with RunningAgent(imds.endpoint, state, interval="100ms") as agent:
            names.append(f"event-{number}")
            imds.set_document(listed(*names))
            eventually(lambda: bool(agent.records))
            agent.stop(signal.SIGKILL)
        ids += [record["azure.scheduled_event.change_id"] for record in agent.records]

    assert len(ids) == len(set(ids))
    assert len(ids) >= 10
