"""``Tracking`` is an agent's state and tracker on a real state file.

``SteppedClock`` has clocks that a test sets.
"""

import json
from datetime import datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

from notbefore.agent.approver import ListedEvents
from notbefore.agent.freeze import FreezeMeter
from notbefore.agent.runtime import Published, Runtime
from notbefore.agent.state import AgentSnapshot, AgentState
from notbefore.agent.tracker import Tracker
from notbefore.config.model import Config
from notbefore.process.clock import Clock
from notbefore.store.store import Store
from support.azure import T0


class SteppedClock(Clock):
    """Clocks of a machine and of IMDS that stand still until a test moves them."""

    def __init__(self, boot_id: str = "first") -> None:
        self.boot_id = boot_id
        self.wall = T0
        self.booted = 1000.0
        self.true = T0  # what IMDS's clock shows

    def now(self) -> datetime:
        return self.wall

    def time(self) -> float:
        return self.wall.timestamp()

    def boot_time(self) -> float:
        return self.booted

    @property
    def date(self) -> str:
        """IMDS's ``Date`` header."""
        return format_datetime(self.true.replace(microsecond=0), usegmt=True)

    def go(self, seconds: float, *, booted: float | None = None) -> None:
        """Move all clocks; ``booted``: the seconds of the clock since the boot, if others."""
        if booted is None:
            booted = seconds
        self.true += timedelta(seconds=max(seconds, booted))
        self.wall += timedelta(seconds=seconds)
        self.booted += booted


def runtime_of(config: Config) -> Published[Runtime]:
    """Return the runtime of an agent that starts with ``config``."""
    return Published(Runtime(config, config.imds.endpoint))


class Tracking:
    """A tracker with its state, its store and its meter; ``records``: what it has reported."""

    def __init__(self, directory: Path, clock: Clock, config: Config | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.changes = 0  # how often the listener for changes was called
        self.deliveries = 0  # how often the listener for deliveries was called
        self.runtime = runtime_of(config or Config())
        self.clock = clock
        self.store = Store(directory, clock, to_deliver=self._to_deliver)
        self.state = AgentState(self.store, clock, self.runtime, self._add_record)
        self.state.add_listener(self)
        self.freeze_meter = FreezeMeter(clock)
        self.tracker = Tracker(self.state, self.store, self.freeze_meter)
        self.tracker.use("http://imds", "2020-07-01")

    @property
    def config(self) -> Config:
        return self.runtime.current.config

    @config.setter
    def config(self, config: Config) -> None:
        self.runtime.replace(config=config)

    def wake(self) -> None:
        self.changes += 1

    def _add_record(self, line: bytes) -> None:
        self.records.append(json.loads(line))

    def _to_deliver(self) -> None:
        self.deliveries += 1

    @property
    def snapshot(self) -> AgentSnapshot:
        return self.state.snapshot

    @property
    def listed(self) -> ListedEvents:
        return ListedEvents(self.snapshot, self.state.instant())

    def certain(self, key: str) -> bool:
        """Return whether IMDS's answers let the agent approve an event."""
        return self.listed.certain(key, self.runtime.current)

    def close(self) -> None:
        self.freeze_meter.switch(on=False)
        self.store.close()
