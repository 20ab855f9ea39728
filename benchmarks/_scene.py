"""The scene of ``kills.py``: scheduled events, a receiver of their notifications, and an agent."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from _machine import Receiver, first_child

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.simulator.server import Simulator
from support.agent import eventually, free_port, notbefore
from support.azure import FUTURE, ME, STARTED, body, item

LISTED_EVENTS: Final = 20  # at a time
START_SHARE: Final = 0.8  # of the events that start before they end
# seconds between two lists, at least and at most; the agent polls every 0.2 s
OFTEN: Final = (0.2, 0.9)
SELDOM: Final = (1.2, 2.2)  # the agent also waits 0.5 s for a lock
STEPS: Final = ("announced", "started", "over")
# what the receiver does with a delivery -> how often, in percent
ACTIONS: Final = {
    "take": 60,
    "fail": 15,
    "take and answer 500": 10,
    "cut": 5,
    "take and cut": 5,
    "hang": 3,
    "throttle": 2,
}


class EventStep(NamedTuple):
    """A step in the life of an event."""

    event_id: str
    step: str  # of ``STEPS``


class UnreliableReceiver(Receiver):
    """Fails, hangs and cuts connections, or takes a delivery and answers that it did not.

    While it is calm, it accepts everything.
    """

    def __init__(self, *, calm: bool) -> None:
        self.actions = Counter[str]()
        self.calm = calm
        super().__init__(self._next_action)

    def _next_action(self) -> str:
        action = "take"
        if not self.calm:
            action = random.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        self.actions[action] += 1
        return action

    def arrivals(self) -> dict[EventStep, float]:
        """Return when each step of an event first arrived, in order of arrival."""
        arrivals: dict[EventStep, float] = {}
        for delivery in self.received:
            record = delivery.record
            step = record["notbefore.delivery.kind"]
            if step not in STEPS:
                step = "over"
            arrivals.setdefault(EventStep(record["azure.scheduled_event.id"], step), delivery.at)
        return arrivals


def out_of_order(arrivals: Iterable[EventStep]) -> int:
    """Return the number of events whose steps arrived out of order."""
    steps: dict[str, list[int]] = {}
    for event_id, step in arrivals:
        steps.setdefault(event_id, []).append(STEPS.index(step))
    return sum(numbers != sorted(numbers) for numbers in steps.values())


class World(threading.Thread):
    """Lists scheduled events that come, start and go: always 20 at a time, until ``stop``."""

    def __init__(self, simulator: Simulator, pace: tuple[float, float]) -> None:
        super().__init__(daemon=True)
        self._simulator = simulator
        self._pace = pace
        self._stopping = threading.Event()
        self._events = 0
        self._listed: dict[str, dict[str, Any]] = {}  # by EventId
        self.shown: dict[EventStep, float] = {}  # when each step was listed

    def run(self) -> None:
        for incarnation in itertools.count(2):
            is_last = self._stopping.wait(random.uniform(*self._pace))
            if is_last:
                time.sleep(self._pace[1])  # the list before it is visible as long as the others
                steps = self._end_all()
            else:
                steps = self._advance()
            document = body(*self._listed.values(), incarnation=incarnation)
            self._simulator.set_document(document)
            self.shown |= dict.fromkeys(steps, time.monotonic())
            if is_last:
                return

    def _advance(self) -> list[EventStep]:
        """Start or end two events, and announce new ones in place of those that ended."""
        steps: list[EventStep] = []
        for event_id in random.sample(list(self._listed), min(2, len(self._listed))):
            event = self._listed[event_id]
            if event["EventStatus"] == "Scheduled" and random.random() < START_SHARE:
                event.update(STARTED)
                steps.append(EventStep(event_id, "started"))
            else:
                del self._listed[event_id]
                steps.append(EventStep(event_id, "over"))
        while len(self._listed) < LISTED_EVENTS:
            self._events += 1
            event_id = f"e-{self._events}"
            self._listed[event_id] = item(event_id, NotBefore=FUTURE)
            steps.append(EventStep(event_id, "announced"))
        return steps

    def _end_all(self) -> list[EventStep]:
        steps = [EventStep(event_id, "over") for event_id in self._listed]
        self._listed.clear()
        return steps

    def stop(self) -> None:
        """End all events, and wait for that."""
        self._stopping.set()
        self.join()


@dataclass(frozen=True)
class Scene:
    """The events, the receiver of their notifications, and the agent's command and state."""

    world: World
    receiver: UnreliableReceiver
    directory: Path
    state: Path
    command: list[str]
    port: int


@contextmanager
def prepared_scene(pace: tuple[float, float] = OFTEN, *, calm: bool = False) -> Iterator[Scene]:
    """Prepare everything; the agent and the events are not started yet."""
    port = free_port()
    receiver = UnreliableReceiver(calm=calm)
    with tempfile.TemporaryDirectory() as name, Simulator((ME,)) as simulator:
        directory = Path(name)
        state = directory / "state"
        state.mkdir(mode=0o700)
        hook = {"url": receiver.url, "allow_private": True, "timeout": "1s", "expire_on_end": False}
        config = directory / "notbefore.yaml"
        config.write_text(json.dumps({"sinks": {"hook": {"webhook": hook}}}), encoding="utf-8")
        command = [sys.executable, "-m", "notbefore", "run", str(config)]
        command += ["--imds", simulator.endpoint]
        command += ["--state-dir", str(state)]
        command += ["--listen", f"127.0.0.1:{port}"]
        yield Scene(World(simulator, pace), receiver, directory, state, command, port)


def start(command: list[str], **variables: str) -> subprocess.Popen[bytes]:
    """Start an agent; ``variables``: more environment variables."""
    environment = {
        **os.environ,
        "NOTBEFORE_IMDS__INTERVAL": "200ms",
        "NOTBEFORE_LOG__LEVEL": "error",
        **variables,
    }
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )


def wait_for_agent(port: int) -> None:
    """Wait until the agent is healthy."""
    eventually(lambda: notbefore("health", "--url", f"http://127.0.0.1:{port}").returncode == 0)


def kill_often(
    command: list[str], times: int, pause: tuple[float, float], **variables: str
) -> Counter[str]:
    """Kill the agent or its courier at random; return how often each was killed.

    ``pause``: seconds between two kills, at least and at most.
    """
    killed = Counter[str]()
    agent = start(command, **variables)
    while killed.total() < times:
        time.sleep(random.uniform(*pause))
        if random.random() < 0.5:
            agent.kill()
            agent.wait()
            killed["agent"] += 1
            agent = start(command, **variables)
        elif _kill_courier(agent.pid):
            killed["courier"] += 1
    agent.kill()
    agent.wait()
    return killed


def _kill_courier(agent: int) -> bool:
    """Kill the courier of an agent; return whether it has one."""
    courier = first_child(agent)
    if courier == 0:
        return False
    try:
        os.kill(courier, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
