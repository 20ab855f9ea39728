"""``notbefore demo``: a simulator and a real agent, and events in fast time.

Everything shown comes from the agent: the records from its standard output, the countdown from its API.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final

from notbefore.commands.client import USUAL_PORT, AgentClient
from notbefore.commands.history import ask_changes, show_history
from notbefore.core.document import FREEZE
from notbefore.core.duration import span
from notbefore.core.record import Record
from notbefore.errors import NotBeforeError
from notbefore.simulator.server import Simulator

VMS: Final = ("WestNO_0", "WestNO_1")
START_PATIENCE: Final = 20.0  # seconds for the agent to answer
END_AFTER: Final = 80.0  # seconds; the script below needs 40
LAST: Final = 3.0  # seconds for the last change: the agent sees the end one poll later than the simulator
TICK: Final = 2.0  # seconds between two lines of the countdown
STOPPED: Final = 1.5  # seconds for which the agent is really stopped, as a freeze of its VM would

Step = tuple[float, str, Callable[[Simulator], object]]
SCRIPT: Final[tuple[Step, ...]] = (  # seconds after the start, what is printed, what is done
    (0.0, "a live migration of this VM", lambda sim: sim.start("live-migration", speed=90)),
    (3.0, "a restart that is canceled", lambda sim: sim.start("user-reboot", speed=90, cancel=True)),
    (19.0, "a neighbour's host fails", lambda sim: sim.start("hardware-failure", speed=75, resources=VMS[1:])),
    (22.0, "Azure wants this Spot VM back", lambda sim: sim.start("spot-preemption", speed=6)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether to stay."""
    parser.add_argument("--keep", action="store_true", help="go on until Ctrl-C")


def run(options: argparse.Namespace) -> int:
    """Play; returns 0 if every expected change was seen. Raises ``NotBeforeError`` when the agent does not start."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notbefore-demo-")))
        simulator = stack.enter_context(Simulator(VMS))
        output = stack.enter_context((directory / "records").open("wb"))
        records = stack.enter_context((directory / "records").open("rb"))
        listen = f"127.0.0.1:{_free_port()}"
        words = ["run", "--imds", simulator.endpoint, "--state-dir", str(directory / "state"), "--listen", listen]
        # five polls a second: the scenarios run up to ninety times as fast as in reality
        environment = {**os.environ, "NOTBEFORE_IMDS__INTERVAL": "200ms", "NOTBEFORE_LOG__LEVEL": "warning"}
        agent = subprocess.Popen([sys.executable, "-m", "notbefore", *words], stdout=output, env=environment)  # noqa: S603 - our own command
        stack.callback(_stop, agent)
        try:
            show = _Show(agent, AgentClient(f"http://{listen}"), simulator, records)
            complete = show.play()
            if options.keep:
                show.stay()
        except KeyboardInterrupt:
            return 0
    return 0 if complete else 1


def _free_port() -> int:
    """Return the usual port where it is free, else another."""
    for wanted in (USUAL_PORT, 0):
        with suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", wanted))
            return int(probe.getsockname()[1])
    raise NotBeforeError("no free port on 127.0.0.1")


def _stop(agent: subprocess.Popen[bytes]) -> None:
    agent.terminate()
    try:
        agent.wait(5)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


class _Show:
    """Prints what happens, as it happens."""

    def __init__(
        self, agent: subprocess.Popen[bytes], client: AgentClient, simulator: Simulator, records: BinaryIO
    ) -> None:
        self._agent, self._client, self._simulator, self._records = agent, client, simulator, records
        self._begun = time.monotonic()
        self._kinds: list[str] = []

    def play(self) -> bool:
        """Run the script and print the changes, until everything is over; returns whether all expected ones came."""
        self._wait_for_agent()
        url = self._client.url
        _say(f"notbefore watches a simulated IMDS at {self._simulator.endpoint}; this VM is {VMS[0]}, its neighbour")
        _say(f"{VMS[1]}. Look around meanwhile: {url}/ in a browser, or `notbefore events --url {url}`")
        _say("Events run up to 90 times as fast as in reality.\n")
        steps = list(SCRIPT)
        self._begun = time.monotonic()
        over = self._begun + END_AFTER
        for _ in self._ticks():
            now = time.monotonic()
            if now > over or self._agent.poll() is not None:
                break
            if steps and now - self._begun >= steps[0][0]:
                _, text, act = steps.pop(0)
                self._say(f"-- {text}")
                act(self._simulator)
            elif not steps and self._simulator.idle():
                over = min(over, now + LAST)
        _say("\nnotbefore history:")
        show_history(ask_changes(self._client, None, 100), sys.stdout, as_json=False)
        complete = {"announced", "started", "finished", "canceled"} <= set(self._kinds)
        said = "The demo is complete." if complete else "Some expected changes are missing: see the agent's log above."
        _say(f"\n{said}")
        return complete

    def stay(self) -> None:
        """Go on until Ctrl-C."""
        _say(f"Still running: {self._client.url}/metrics and {self._simulator.endpoint}. Ctrl-C ends it.")
        for _ in self._ticks():
            if self._agent.poll() is not None:
                return
            if self._simulator.idle():
                self._simulator.start("live-migration", speed=30)

    def _wait_for_agent(self) -> None:
        deadline = time.monotonic() + START_PATIENCE
        while self._agent.poll() is None and time.monotonic() < deadline:
            with suppress(NotBeforeError):
                self._client.ask("/readyz")
                return
            time.sleep(0.05)
        raise NotBeforeError("the agent did not start: see its log above")

    def _ticks(self) -> Iterator[None]:
        """Print what comes, without an end; yields ten times a second."""
        printed = 0.0
        while True:
            yield
            line = self._records.readline()
            if line.endswith(b"\n"):
                self._show(Record.read(line))
                printed = time.monotonic()
                continue
            self._records.seek(-len(line), os.SEEK_CUR)  # the rest of it comes later
            if time.monotonic() - printed >= TICK:
                printed = time.monotonic()
                self._count_down()
            time.sleep(0.1)

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

    def _count_down(self) -> None:
        with suppress(NotBeforeError):  # it has ended: `play` sees it
            for event in self._client.ask("/api/v1/events")["events"]:
                if (left := event["seconds_to_not_before"]) is not None:
                    self._say(f"{'':<10} {event['event_type']} may start in {span(left)}")

    def _say(self, text: str) -> None:
        _say(f"{time.monotonic() - self._begun:5.1f}s  {text}")


def _measured(record: Record) -> str:
    """Return what was measured of an event that is over, in words; empty where nothing was."""
    measured = (
        ("notice", record.notice_seconds),
        ("started for", record.started_seconds),
        ("measured interruption", record.interruption_seconds),
    )
    parts = [f"{text} {seconds:.1f} s" for text, seconds in measured if seconds is not None]
    return f" ({', '.join(parts)})" if parts and record.outcome is not None else ""


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
