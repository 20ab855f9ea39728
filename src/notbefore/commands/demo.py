"""``notbefore demo``: a simulator, a real agent, and events in fast time.

Every line shown is a record that the agent writes, or an action of the script.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Final

from notbefore.core.record import Record
from notbefore.simulator.server import Simulator

VMS: Final = ("WestNO_0", "WestNO_1")
END_AFTER: Final = 80.0  # seconds; the script below needs 40

Step = tuple[float, str, Callable[[Simulator], object]]
SCRIPT: Final[tuple[Step, ...]] = (  # seconds after the start, what is printed, what is done
    (3.0, "a live migration of this VM", lambda sim: sim.start("live-migration", speed=90)),
    (
        6.0,
        "a restart that is canceled",
        lambda sim: sim.start("user-reboot", speed=60, cancel=True),
    ),
    (
        22.0,
        "a neighbour's host fails",
        lambda sim: sim.start("hardware-failure", speed=75, resources=VMS[1:]),
    ),
    (25.0, "Azure wants this Spot VM back", lambda sim: sim.start("spot-preemption", speed=6)),
)


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Add nothing: there are no arguments."""


def run(_options: argparse.Namespace) -> int:
    """Run the demo; return 0 if the end of each event was seen."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with Simulator(VMS) as simulator, TemporaryDirectory(prefix="notbefore-demo-") as directory:
        words = [
            "run",
            "--imds",
            simulator.endpoint,
            "--state-dir",
            f"{directory}/state",
            "--listen",
            listen,
        ]
        # five polls a second: the scenarios run up to ninety times as fast as in reality
        environment = {
            **os.environ,
            "NOTBEFORE_IMDS__INTERVAL": "200ms",
            "NOTBEFORE_LOG__LEVEL": "warning",
        }
        agent = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "notbefore", *words], stdout=subprocess.PIPE, env=environment
        )
        try:
            return _play(agent, simulator, f"http://{listen}")
        except KeyboardInterrupt:
            return 0
        finally:
            agent.kill()
            agent.wait()


def _play(agent: subprocess.Popen[bytes], simulator: Simulator, url: str) -> int:
    """Run the script, and print the records until every event is over."""
    begun = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - begun:5.1f}s  {text}\n")
        sys.stdout.flush()

    def act(text: str, step: Callable[[Simulator], object]) -> None:
        say(f"-- {text}")
        step(simulator)

    sys.stdout.write(
        f"notbefore watches a simulated IMDS at {simulator.endpoint}; this VM is {VMS[0]}, its"
        f" neighbour\n{VMS[1]}. Look around meanwhile: {url}/ in a browser, or `notbefore events"
        f" --url {url}`\nEvents run up to 90 times as fast as in reality.\n\n"
    )
    timers = [
        Timer(END_AFTER, agent.kill),
        *(Timer(at, act, (text, step)) for at, text, step in SCRIPT),
    ]
    for timer in timers:
        # on Windows, Ctrl-C interrupts no read: it may come only while they are canceled
        timer.daemon = True
        timer.start()
    over = 0
    try:
        for line in agent.stdout or ():
            record = Record.read(line)
            say(record.body)
            over += record.outcome is not None
            if over == len(SCRIPT):
                sys.stdout.write("\nThe demo is complete.\n")
                return 0
    finally:
        for timer in timers:
            timer.cancel()
    sys.stdout.write("\nSome expected changes are missing: see the agent's log above.\n")
    return 1
