"""``notbefore demo``: a simulator and a real agent, and events in fast time.

Everything shown comes from the agent: the records from its standard output, the figures below them from /metrics.
"""

import argparse
import http.client
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import IO, Final

from notbefore.commands.client import AgentClient
from notbefore.commands.demo_agent import start_agent
from notbefore.commands.history import ask_changes, show_history
from notbefore.core.record import Record
from notbefore.errors import NotBeforeError
from notbefore.simulator.server import Simulator

VMS: Final = ("WestNO_0", "WestNO_1")
START_PATIENCE: Final = 20.0  # seconds for the agent to answer
END_AFTER: Final = 80.0  # seconds; the script below needs 40
TICK: Final = 2.0  # seconds between two lines of the countdown
FREEZE: Final = 1.5  # seconds for which the agent is really stopped, as a freeze of its VM would

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
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="notbefore-demo-"))
        simulator = stack.enter_context(Simulator(VMS))
        try:
            start = partial(_start_agent, stack, simulator.endpoint, state)
            show = _Show(*start_agent(stack, start, START_PATIENCE))
            show.introduce(simulator.endpoint)
            show.play(simulator)
            complete = show.conclude()
            if options.keep:
                show.stay(simulator)
        except KeyboardInterrupt:
            return 0
    return 0 if complete else 1


def _start_agent(stack: ExitStack, imds: str, state: str, listen: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "notbefore", "run", "--imds", imds, "--state-dir", state, "--listen", listen]
    # five polls a second: the scenarios run up to ninety times as fast as in reality
    environment = {**os.environ, "NOTBEFORE_IMDS__INTERVAL": "200ms", "NOTBEFORE_LOG__LEVEL": "warning"}
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)  # noqa: S603 - our own command
    stack.callback(_stop_agent, agent)
    return agent


def _stop_agent(agent: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, AttributeError):
        agent.send_signal(signal.SIGCONT)  # it may be stopped, to simulate a freeze
    agent.terminate()
    try:
        agent.wait(5)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


class _Show:
    """Prints what happens, as it happens."""

    def __init__(self, agent: subprocess.Popen[bytes], client: AgentClient) -> None:
        self._agent = agent
        self._url = client.url
        self._client = client
        self._records: queue.Queue[Record] = queue.Queue()
        self._begun = time.monotonic()
        self._frozen = False
        self._kinds: list[str] = []
        if agent.stdout is not None:
            threading.Thread(target=self._read, args=(agent.stdout,), daemon=True).start()

    def _read(self, stdout: IO[bytes]) -> None:
        for line in stdout:
            self._records.put(Record.read(line))

    def introduce(self, imds: str) -> None:
        """Say where to look."""
        _say(f"notbefore watches a simulated IMDS at {imds}; this VM is {VMS[0]}, its neighbour {VMS[1]}.")
        _say(f"Look around meanwhile: {self._url}/ in a browser, or `notbefore events --url {self._url}`")
        _say("Events run up to 90 times as fast as in reality. Below each change: the agent's metric at that time.\n")

    def play(self, simulator: Simulator) -> None:
        """Run the script and print the changes, until everything is over."""
        steps = list(SCRIPT)
        ticked = 0.0
        while steps or not simulator.idle() or not self._records.empty():
            elapsed = time.monotonic() - self._begun
            if elapsed > END_AFTER or self._agent.poll() is not None:
                break
            if steps and elapsed >= steps[0][0]:
                _, text, act = steps.pop(0)
                _say(f"{elapsed:5.1f}s  -- {text}")
                act(simulator)
            with suppress(queue.Empty):
                self._show(self._records.get(timeout=0.1))
                ticked = time.monotonic()
            if time.monotonic() - ticked >= TICK:
                ticked = time.monotonic()
                self._count_down()
        self._drain()

    def _drain(self) -> None:
        """Wait for the last changes: the agent sees the end one poll later than the simulator."""
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline and self._pending():
            time.sleep(0.1)
        with suppress(queue.Empty):
            while True:
                self._show(self._records.get(timeout=0.5))

    def _pending(self) -> bool:
        with suppress(NotBeforeError):
            return bool(self._client.ask("/api/v1/events")["events"])
        return False

    def _show(self, record: Record) -> None:
        self._kinds.append(record.change)
        labels = f'{{change="{record.change}",event_type="{record.event_type}"}}'
        _say(f"{time.monotonic() - self._begun:5.1f}s  {record.change:<10} {record.body}{_measured(record)}")
        if figures := _read_metrics(self._url, "azure_scheduled_event_changes_total" + labels):  # none of a neighbour's
            _say(_indented(figures))
        if (record.change, record.scope, record.event_type) == ("started", "self", "Freeze") and not self._frozen:
            self._freeze()

    def _freeze(self) -> None:
        """Stop the agent's process, as a freeze of its VM would, so that it has an interruption to measure."""
        if not hasattr(signal, "SIGSTOP"):
            return
        self._frozen = True
        _say(f"        (the process of the agent is stopped for {FREEZE} s, as in a freeze of its VM)")
        time.sleep(0.3)
        self._agent.send_signal(signal.SIGSTOP)
        time.sleep(FREEZE)
        self._agent.send_signal(signal.SIGCONT)

    def _count_down(self) -> None:
        figures = _read_metrics(self._url, "azure_scheduled_event_seconds_to_not_before{")
        if figures:
            _say(f"{time.monotonic() - self._begun:5.1f}s  counting down\n{_indented(figures)}")

    def conclude(self) -> bool:
        """Print the history; returns whether every expected change was seen."""
        _say("\nnotbefore history:")
        show_history(ask_changes(self._client, None, 100), sys.stdout, as_json=False)
        complete = {"announced", "started", "finished", "canceled"} <= set(self._kinds)
        _say(
            "\nThe demo is complete." if complete else "\nSome expected changes are missing: see the agent's log above."
        )
        return complete

    def stay(self, simulator: Simulator) -> None:
        """Go on until Ctrl-C."""
        _say(f"Still running: {self._url}/metrics and {simulator.endpoint}. Ctrl-C ends it.")
        while self._agent.poll() is None:
            if simulator.idle():
                simulator.start("live-migration", speed=30)
            with suppress(queue.Empty):
                self._show(self._records.get(timeout=1))


def _indented(lines: str) -> str:
    return "\n".join(f"{'':19}{line}" for line in lines.splitlines())


def _measured(record: Record) -> str:
    """Return what was measured of an event that is over, in words; empty where nothing was."""
    if record.outcome is None:
        return ""
    measured = (
        ("notice", record.notice_seconds),
        ("started for", record.started_seconds),
        ("measured interruption", record.interruption_seconds),
    )
    parts = [f"{text} {seconds:.1f} s" for text, seconds in measured if seconds is not None]
    return f" ({', '.join(parts)})" if parts else ""


def _read_metrics(url: str, start: str) -> str:
    """Return the lines of /metrics that begin with ``start``; none if the agent does not answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
    return "\n".join(line for line in lines if line.startswith(start))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
