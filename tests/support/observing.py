"""``Observer`` runs an agent's tracker with its real state file in a ``World``.

A test starts, polls, disturbs and kills the agent, also at a commit. The observer judges each of
its reports.
"""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from notbefore.agent.freeze import FreezeMeter
from notbefore.agent.state import AgentState
from notbefore.agent.tracker import Poll, Tracker
from notbefore.config.model import Config
from notbefore.core.clock import Gap
from notbefore.core.record import Vm
from notbefore.errors import ImdsError
from notbefore.process.clock import Clock
from notbefore.store.disk import DiskThread
from notbefore.store.file import StoredChange, StoredState
from notbefore.store.store import Store
from support.tracking import runtime_of
from support.world import Account, World


class KilledError(Exception):
    """Raised where the process is killed."""


class WorldClock(Clock):
    """Shows the clocks of the machine in the world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.boot_id = world.boot_id

    def now(self) -> datetime:
        return self.world.wall

    def time(self) -> float:
        return self.world.wall.timestamp()

    def boot_time(self) -> float:
        return self.world.uptime


class WorldMeter(FreezeMeter):
    """Measures the world's pauses, and the steps of its wall clock, without a thread."""

    def __init__(self, world: World) -> None:
        super().__init__(WorldClock(world))
        self.world = world
        self.on = False
        self.lag = 0.0
        self.taken_at = 0.0  # when the last measurement ended
        self.offset = world.wall_offset  # of the wall clock at that time

    @property
    def running(self) -> bool:
        return self.on

    def switch(self, *, on: bool) -> None:
        if on and not self.on:
            self.taken_at = self.world.now
            self.offset = self.world.wall_offset
        self.on = on

    def take(self) -> Gap:
        longest = 0.0
        for pause in self.world.pauses:
            if pause.begin >= self.taken_at and pause.put_right:
                longest = max(longest, pause.seconds)
        step = max(0.0, self.world.wall_offset - self.offset)
        self.taken_at = self.world.now
        self.offset = self.world.wall_offset
        return Gap(longest + step, 0.0)


def ignore_record(_line: bytes) -> None:
    """Drop a record: the observer reads the records of the history."""


class FragileStore(Store):
    """Kills the process ``before`` or ``after`` the next commit, depending on ``die``."""

    die: str | None = None

    def commit(self, state: StoredState, changes: Sequence[StoredChange] = ()) -> None:
        if self.die == "before":
            raise KilledError
        super().commit(state, changes)
        if self.die == "after":
            raise KilledError


class Observer:
    """Runs agents in turn on one state file in a world, and judges every report."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.world = World(random.Random(seed))  # noqa: S311 - chance, not secrets
        self.account = Account(self.world)
        self.directory = directory
        self.judged = 0  # how many records of the history were judged
        self.tracker: Tracker | None = None  # of the running agent
        self.named = False  # whether IMDS has named the VM to this agent
        self.unknown_disk = False  # whether the disk was moved, and IMDS has not yet named its VM
        self.start(named=True)

    def start(self, *, named: bool) -> None:
        """Start an agent; ``named``: IMDS names the VM at once."""
        self.clock = WorldClock(self.world)
        self.store = FragileStore(self.directory, self.clock)
        self.state = AgentState(self.store, self.clock, runtime_of(Config()), ignore_record)
        self.tracker = Tracker(self.state, self.store, WorldMeter(self.world))
        self.tracker.use("http://imds", "2020-07-01")
        self.last_body: bytes | None = None
        self.last_poll = self.world.now
        self.offset_at_last_poll = self.world.wall_offset
        self.first_answer: float | None = None
        self.named = False
        self.account.perturb()
        if named:
            self.learn_name()

    def learn_name(self) -> None:
        """Let IMDS name the VM."""
        if self.tracker is None:
            return
        self.named = True
        vm = self.world.vm
        try:
            self.tracker.identify(Vm(name=vm, vm_id=f"id-{vm}"))
        except KilledError:
            self.judge()
            self.kill()
            return
        self.unknown_disk = False
        self.judge()

    def kill(self) -> None:
        """Kill the process."""
        if self.tracker is not None:
            self.store.close()
        self.tracker = None

    def stop(self) -> None:
        """Stop the process in order."""
        if self.tracker is not None:
            with suppress(KilledError):
                self.state.write_stop()
        self.kill()

    def poll(self) -> None:
        """Poll, and get a good answer."""
        self.answer(self.body(self.world.ask()), {})

    def poll_spoilt(self, part: str) -> None:
        """Poll, and get an answer in which this part of the first event is unreadable."""
        items = self.world.ask()
        if not items:
            self.answer(self.body(items), {})
            return
        first = items[0]
        rest = items[1:]
        key = first["EventId"]
        spoilt = {
            "status": ({**first, "EventStatus": ""}, {key: True}),
            "id": ({**first, "EventId": 5}, {key: True, "": True}),
            "resources": ({**first, "Resources": 17}, {key: False}),
            "not_before": ({**first, "NotBefore": "soon"}, {key: False}),
        }
        item, unread = spoilt[part]
        self.answer(self.body([item, *rest]), unread)

    def body(self, items: list[dict[str, Any]]) -> bytes:
        """Return a document as bytes."""
        return json.dumps({"DocumentIncarnation": self.world.incarnation, "Events": items}).encode()

    def answer(self, body: bytes, unread: dict[str, bool]) -> None:
        """Hand an answer to the tracker, and judge its reports.

        ``unread``: see ``Account.shown``.
        """
        if self.tracker is None:
            return
        new_body = None if body == self.last_body else body
        poll = Poll(0.0, 0.01, body=new_body, date=self.world.date, wall_lag=self.lateness())
        try:
            self.tracker.handle(poll)
        except KilledError:
            if self.store.die == "after":
                self.judge()
                self.account.shown(self.world.ask(), unread)
            self.kill()
            return
        self.last_body = body
        self.judge()
        if not self.waits():
            self.account.shown(self.world.ask(), unread)

    def waits(self) -> bool:
        """Return whether the agent still waits for the name of its VM, at most ten seconds."""
        if self.first_answer is None:
            self.first_answer = self.world.uptime
        if self.state.snapshot.poll.answered is not None:
            return False
        assert not self.named, "the agent waits for a name that it has"
        assert self.world.uptime - self.first_answer <= 10, "the agent waits for too long"
        return True

    def fail(self) -> None:
        """Poll, and get no answer."""
        if self.tracker is not None:
            error = ImdsError("refused", "no")
            self.tracker.handle(Poll(0.0, 0.01, error=error, wall_lag=self.lateness()))

    def lateness(self) -> float:
        """Return by how many seconds this poll is late on the wall clock.

        Pauses and steps of the wall clock make it late. The clock since the boot shows no pause.
        """
        late = self.world.wall_offset - self.offset_at_last_poll
        for pause in self.world.pauses:
            if pause.begin >= self.last_poll:
                late += pause.seconds
        self.last_poll = self.world.now
        self.offset_at_last_poll = self.world.wall_offset
        return max(0.0, late)

    def seconds(self, count: int, *, answers: bool = True) -> None:
        """Let so many seconds pass with a poll in each."""
        for _ in range(count):
            self.world.run(1.0)
            if self.tracker is not None:
                with suppress(KilledError):
                    self.state.note_running()
            if answers:
                self.poll()
            else:
                self.fail()

    def judge(self) -> None:
        """Compare the records written since the last time with what happened."""
        if self.tracker is None:
            return
        history = Store.history(self.store, None, 1_000_000)
        new_records = itertools.islice(history.records, self.judged, None)
        records = [json.loads(record) for record in new_records]
        self.judged += len(records)
        self.account.judge(records, self.world.vm if self.named else None)


def disable_disk_timeouts(patch: pytest.MonkeyPatch) -> None:
    """Let no disk of the world count as hanging because this machine is busy."""
    do = DiskThread.do

    def do_with_patience(
        disk: DiskThread, action: Callable[[], None], _patience: object = None, *rest: Any
    ) -> object:
        return do(disk, action, 600.0, *rest)

    patch.setattr(DiskThread, "do", do_with_patience)
    patch.setattr(DiskThread, "hangs", False)
