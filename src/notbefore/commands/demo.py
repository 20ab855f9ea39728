"""``notbefore demo``: show a simulator, a real agent, and events in fast time.

Every printed line is a record that the agent writes, or a step of the script.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Final, NamedTuple

from notbefore.core.record import Record
from notbefore.simulator.server import Simulator

VMS: Final = ("WestNO_0", "WestNO_1")
END_AFTER: Final = 80.0  # seconds; the script below needs 40

NEXT: Final = """
The demo is complete. On a VM in Azure, with systemd, as root in this checkout:

  python3 -m venv /opt/notbefore && /opt/notbefore/bin/pip install '.[apprise]'  # install it
  /opt/notbefore/share/notbefore/fleet/install.sh                                # run it
  notbefore events --watch                                                       # try it

docs/getting-started.md has the rest: notifications, Kubernetes, fleets, Windows.
"""


class Step(NamedTuple):
    """A scenario that starts some seconds after the start of the demo."""

    time: float
    title: str
    scenario: str
    speed: float
    vm: str = VMS[0]
    is_canceled: bool = False


SCRIPT: Final = (
    Step(3.0, "a live migration of this VM", "live-migration", speed=90),
    Step(6.0, "a restart that is canceled", "user-reboot", speed=60, is_canceled=True),
    Step(22.0, "a neighbour's host fails", "hardware-failure", speed=75, vm=VMS[1]),
    Step(25.0, "Azure wants this Spot VM back", "spot-preemption", speed=6),
)


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Add nothing: there are no arguments."""


def run(_options: argparse.Namespace) -> int:
    """Run the demo; return 0 if the end of each event was seen."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free again when it is closed
    listen = f"127.0.0.1:{port}"
    with Simulator(VMS) as simulator, TemporaryDirectory(prefix="notbefore-demo-") as directory:
        agent = _start_agent(simulator.endpoint, f"{directory}/state", listen)
        try:
            return _play(agent, simulator, f"http://{listen}")
        except KeyboardInterrupt:
            return 0
        finally:
            agent.kill()
            agent.wait()


def _start_agent(endpoint: str, state_dir: str, listen: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "notbefore", "run"]
    command += ["--imds", endpoint]
    command += ["--state-dir", state_dir]
    command += ["--listen", listen]
    environment = {
        **os.environ,
        # five polls a second: the scenarios run up to ninety times as fast as in reality
        "NOTBEFORE_IMDS__INTERVAL": "200ms",
        "NOTBEFORE_LOG__LEVEL": "warning",
    }
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)  # noqa: S603 - our own command


def _play(agent: subprocess.Popen[bytes], simulator: Simulator, url: str) -> int:
    """Run the script, and print the records until every event has ended."""
    started = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - started:5.1f}s  {text}\n")
        sys.stdout.flush()

    def start(step: Step) -> None:
        say(f"-- {step.title}")
        simulator.start(
            step.scenario, resources=[step.vm], cancel=step.is_canceled, speed=step.speed
        )

    sys.stdout.write(
        f"notbefore watches a simulated IMDS at {simulator.endpoint}; this VM is {VMS[0]}, its"
        f" neighbour\n{VMS[1]}. Look around meanwhile: {url}/ in a browser, or `notbefore events"
        f" --url {url}`\nEvents run up to 90 times as fast as in reality.\n\n"
    )
    timers = [Timer(step.time, start, (step,)) for step in SCRIPT]
    timers.append(Timer(END_AFTER, agent.kill))
    for timer in timers:
        # so that Ctrl-C ends the process even while the timers are canceled: on Windows, it
        # interrupts no read, and may arrive only then
        timer.daemon = True
        timer.start()
    ended_events = 0
    try:
        for line in agent.stdout or ():
            record = Record.read(line)
            say(record.body)
            if record.outcome is not None:
                ended_events += 1
            if ended_events == len(SCRIPT):
                sys.stdout.write(NEXT)
                return 0
    finally:
        for timer in timers:
            timer.cancel()
    sys.stdout.write("\nSome expected changes are missing: see the agent's log above.\n")
    return 1
