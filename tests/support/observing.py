"""An agent's tracker and its real state file in a ``World``: started, polled, disturbed, killed at
a commit, judged.
"""

import itertools
import json
import random
from collections.abc import Sequence
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
    """The process is gone."""


class WorldClock(Clock):
    """The machine's clocks, as the world has them."""

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
        self.taken = self.lag = 0.0
        self.offset = world.wall_offset

    @property
    def running(self) -> bool:
        return self.on

    def switch(self, *, on: bool) -> None:
        if on and not self.on:
            self.taken = self.world.now
            self.offset = self.world.wall_offset
        self.on = on

    def take(self) -> Gap:
        paused = [
            end - begin for begin, end, right in self.world.pauses if begin >= self.taken and right
        ]
        stepped = max(0.0, self.world.wall_offset - self.offset)
        self.taken = self.world.now
        self.offset = self.world.wall_offset
        return Gap(max([0.0, *paused]) + stepped, 0.0)


def ignore_record(_line: bytes) -> None:
    """Nobody reads the records: the judge reads the history."""


class FragileStore(Store):
    """Dies with its process before or after the next commit, where that is asked for."""

    die: str | None = None

    def commit(self, state: StoredState, changes: Sequence[StoredChange] = ()) -> None:
        if self.die == "before":
            raise KilledError
        super().commit(state, changes)
        if self.die == "after":
            raise KilledError


class Observer:
    """One agent after the other on one state file, in a world; every report is judged."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.world = World(random.Random(seed))  # noqa: S311 - chance, not secrets
        self.account = Account(self.world)
        self.directory = directory
        self.read = 0  # rows of the history
        self.tracker: Tracker | None = None
        self.named = False
        self.unknown_disk = False  # it was moved, and IMDS has not named its VM yet
        self.start(named=True)

    def start(self, *, named: bool) -> None:
        """An agent; ``named``: IMDS says at once which VM this is."""
        self.clock = WorldClock(self.world)
        self.store = FragileStore(self.directory, self.clock)
        self.state = AgentState(self.store, self.clock, runtime_of(Config()), ignore_record)
        self.tracker = Tracker(self.state, self.store, WorldMeter(self.world))
        self.tracker.use("http://imds", "2020-07-01")
        self.last_body: bytes | None = None
        self.waited_from = (self.world.now, self.world.wall_offset)
        self.first_answer: float | None = None
        self.named = False
        self.account.perturb()
        if named:
            self.learn_name()

    def learn_name(self) -> None:
        """IMDS says which VM this is."""
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
        """The process is gone, without a word."""
        if self.tracker is not None:
            self.store.close()
        self.tracker = None

    def stop(self) -> None:
        """The process stops in order."""
        if self.tracker is not None:
            with suppress(KilledError):
                self.state.write_stop()
        self.kill()

    def poll(self) -> None:
        """A good answer."""
        self.answer(self.body(self.world.ask()), {})

    def poll_spoilt(self, how: str) -> None:
        """An answer in which a part of the first event cannot be read."""
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
        item, unread = spoilt[how]
        self.answer(self.body([item, *rest]), unread)

    def body(self, items: list[dict[str, Any]]) -> bytes:
        """A document as bytes."""
        return json.dumps({"DocumentIncarnation": self.world.incarnation, "Events": items}).encode()

    def answer(self, body: bytes, unread: dict[str, bool]) -> None:
        """A good answer.

        ``unread``: which events of it, or fields of events, are spoilt (see ``Account.shown``).
        """
        if self.tracker is None:
            return
        try:
            self.tracker.handle(
                Poll(
                    0.0,
                    0.01,
                    body=None if body == self.last_body else body,
                    date=self.world.date,
                    wall_lag=self.late(),
                )
            )
        except KilledError:
            died = self.store.die
            if died == "after":
                self.judge()
                self.account.shown(self.world.ask(), unread)
            self.kill()
            return
        self.last_body = body
        self.judge()
        if not self.waits():
            self.account.shown(self.world.ask(), unread)

    def waits(self) -> bool:
        """The agent says that it has not looked at an answer yet: for ten seconds it waits for the
        VM's name.
        """
        if self.first_answer is None:
            self.first_answer = self.world.uptime
        waits = self.state.snapshot.poll.answered is None
        assert not (waits and self.named), "it waits for a name that it knows"
        assert not (waits and self.world.uptime - self.first_answer > 10), "it waits for too long"
        return waits

    def fail(self) -> None:
        """No good answer."""
        if self.tracker is not None:
            error = ImdsError("refused", "no")
            self.tracker.handle(Poll(0.0, 0.01, error=error, wall_lag=self.late()))

    def late(self) -> float:
        """By how many seconds a poll is late on the wall clock; on the other there is no pause."""
        since, offset = self.waited_from
        self.waited_from = (self.world.now, self.world.wall_offset)
        paused = [end - begin for begin, end, _ in self.world.pauses if begin >= since]
        return max(0.0, sum(paused) + self.world.wall_offset - offset)

    def seconds(self, count: int, *, answers: bool = True) -> None:
        """Second after second."""
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
        """Hold what was written since the last time against what happened."""
        if self.tracker is None:
            return
        history = Store.history(self.store, None, 1_000_000)
        unread = itertools.islice(history.records, self.read, None)
        records = [json.loads(record) for record in unread]
        self.read += len(records)
        self.account.judge(records, self.world.vm if self.named else None)


def on_a_quick_disk(patch: pytest.MonkeyPatch) -> None:
    """In the world a disk does not hang, however busy this machine is."""
    do = DiskThread.do
    patch.setattr(
        DiskThread, "do", lambda disk, action, _patience=None, *rest: do(disk, action, 600.0, *rest)
    )
    patch.setattr(DiskThread, "hangs", False)
