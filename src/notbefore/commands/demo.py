"""``notbefore demo``: a simulator and a real agent, and events in fast time.

Everything shown comes from the API of the agent.
"""

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from notbefore.commands.client import AgentClient
from notbefore.commands.history import ask_changes
from notbefore.core.document import FREEZE
from notbefore.core.duration import span
from notbefore.core.record import Record
from notbefore.errors import NotBeforeError
from notbefore.simulator.server import Simulator

VMS: Final = ("WestNO_0", "WestNO_1")
END_AFTER: Final = 80.0  # seconds; the script below needs 40
LAST: Final = 3.0  # seconds for the last change: the agent sees the end one poll later than the simulator
MANY: Final = 1000  # changes: more than a demo has in hours
TICK: Final = 2.0  # seconds between two lines of the countdown
STOPPED: Final = 1.5  # seconds for which the agent is really stopped, as a freeze of its VM would

Step = tuple[float, str, Callable[[Simulator], object]]
SCRIPT: Final[tuple[Step, ...]] = (  # seconds after the start, what is printed, what is done
    (2.0, "a live migration of this VM", lambda sim: sim.start("live-migration", speed=90)),
    (5.0, "a restart that is canceled", lambda sim: sim.start("user-reboot", speed=90, cancel=True)),
    (21.0, "a neighbour's host fails", lambda sim: sim.start("hardware-failure", speed=75, resources=VMS[1:])),
    (24.0, "Azure wants this Spot VM back", lambda sim: sim.start("spot-preemption", speed=6)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether to stay."""
    parser.add_argument("--keep", action="store_true", help="go on until Ctrl-C")


def run(options: argparse.Namespace) -> int:
    """Play; returns 0 if every expected change was seen."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with Simulator(VMS) as simulator, TemporaryDirectory(prefix="notbefore-demo-") as directory:
        words = ["run", "--imds", simulator.endpoint, "--state-dir", f"{directory}/state", "--listen", listen]
        # five polls a second: the scenarios run up to ninety times as fast as in reality
        environment = {**os.environ, "NOTBEFORE_IMDS__INTERVAL": "200ms", "NOTBEFORE_LOG__LEVEL": "warning"}
        agent = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "notbefore", *words], stdout=subprocess.DEVNULL, env=environment
        )
        try:
            return _Show(agent, AgentClient(f"http://{listen}"), simulator).play(keep=options.keep)
        except KeyboardInterrupt:
            return 0
        finally:
            agent.terminate()
            try:
                agent.wait(5)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


class _Show:
    """Prints what happens, as it happens."""

    def __init__(self, agent: subprocess.Popen[bytes], client: AgentClient, simulator: Simulator) -> None:
        self._agent, self._client, self._simulator = agent, client, simulator
        self._begun = self._printed = time.monotonic()
        self._kinds: list[str] = []  # of the changes that were shown

    def play(self, *, keep: bool) -> int:
        """Run the script and print the changes, until everything is over; returns 0 if all expected ones came."""
        url = self._client.url
        _say(f"notbefore watches a simulated IMDS at {self._simulator.endpoint}; this VM is {VMS[0]}, its neighbour")
        _say(f"{VMS[1]}. Look around meanwhile: {url}/ in a browser, or `notbefore events --url {url}`")
        _say("Events run up to 90 times as fast as in reality.\n")
        steps = list(SCRIPT)
        self._begun = now = time.monotonic()
        over = math.inf if keep else now + END_AFTER
        while now <= over and self._agent.poll() is None:
            if steps and now - self._begun >= steps[0][0]:
                _, text, act = steps.pop(0)
                self._say(f"-- {text}")
                act(self._simulator)
            elif not steps and self._simulator.idle():
                if keep:
                    self._simulator.start("live-migration", speed=30)
                else:
                    over = min(over, now + LAST)
            with suppress(NotBeforeError):  # the agent does not answer yet, or has ended
                self._look()
            time.sleep(0.1)
            now = time.monotonic()
        complete = {"announced", "started", "finished", "canceled"} <= set(self._kinds)
        said = "The demo is complete." if complete else "Some expected changes are missing: see the agent's log above."
        _say(f"\n{said}")
        return 0 if complete else 1

    def _look(self) -> None:
        """Print the changes that are new, or else, from time to time, the countdown."""
        new = ask_changes(self._client, None, MANY)[len(self._kinds) :]
        for change in new:
            self._show(msgspec.convert(change, Record))
        if not new and time.monotonic() - self._printed >= TICK:
            self._printed = time.monotonic()
            for event in self._client.ask("/api/v1/events")["events"]:
                if (left := event["seconds_to_not_before"]) is not None:
                    self._say(f"{'':<10} {event['event_type']} may start in {span(left)}")

    def _show(self, record: Record) -> None:
        self._say(f"{record.change:<10} {record.body}{_measured(record)}")
        own_freeze = (record.change, record.scope, record.event_type) == ("started", "self", FREEZE)
        if own_freeze and "started" not in self._kinds and hasattr(signal, "SIGSTOP"):
            _say(f"        (the process of the agent is stopped for {STOPPED} s, as in a freeze of its VM)")
            time.sleep(0.3)
            self._agent.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED)
            self._agent.send_signal(signal.SIGCONT)
        self._kinds.append(record.change)

    def _say(self, text: str) -> None:
        self._printed = time.monotonic()
        _say(f"{self._printed - self._begun:5.1f}s  {text}")


def _measured(record: Record) -> str:
    """Return what was measured of an event that is over, in words; empty where nothing was."""
    measured = {
        "notice": record.notice_seconds,
        "started for": record.started_seconds,
        "measured interruption": record.interruption_seconds,
    }
    parts = [f"{text} {seconds:.1f} s" for text, seconds in measured.items() if seconds is not None]
    return f" ({', '.join(parts)})" if parts and record.outcome is not None else ""


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
