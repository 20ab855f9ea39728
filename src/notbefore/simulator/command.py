"""``notbefore simulate``."""

import argparse
import signal
import sys
import time
from types import FrameType
from typing import Final

from notbefore.errors import ConfigError, SimulatorError
from notbefore.simulator.scenarios import SCENARIOS
from notbefore.simulator.server import Simulator
from notbefore.simulator.state import FAULTS

DEFAULT_LISTEN: Final = "127.0.0.1:16925"
PAUSE: Final = 5.0  # seconds between two rounds of --loop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    parser.add_argument("--listen", default=DEFAULT_LISTEN, help=f"HOST:PORT (default {DEFAULT_LISTEN})")
    parser.add_argument(
        "--vm", action="append", metavar="NAME", help="a VM, several times for several: its endpoint is /vm/NAME"
    )
    parser.add_argument(
        "--scenario", action="append", choices=SCENARIOS, default=[], metavar="NAME", help="play it; see --list"
    )
    parser.add_argument("--all", action="store_true", help="play all of them, one after the other")
    parser.add_argument("--speed", type=float, default=1.0, help="60: an hour in a minute (default 1, real time)")
    parser.add_argument("--cancel", action="store_true", help="the events are canceled halfway to NotBefore")
    parser.add_argument("--reschedule", action="store_true", help="NotBefore is put off once")
    parser.add_argument("--loop", action="store_true", help="begin again when all are over")
    parser.add_argument(
        "--fault", action="append", default=[], metavar="KIND[:VALUE][xTIMES]", help="order a fault; see --list"
    )
    parser.add_argument("--list", action="store_true", help="list scenarios and faults")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raises ``ConfigError``."""
    if options.list:
        return _list()
    host, _, port = options.listen.rpartition(":")
    if not port.isdigit() or options.speed <= 0:
        raise ConfigError("--listen: expected HOST:PORT" if options.speed > 0 else "--speed: expected more than 0")
    try:
        simulator = Simulator(options.vm or ("WestNO_0",), listen=(host or "127.0.0.1", int(port)), speed=options.speed)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen at {options.listen}: {error}") from None
    for spec in options.fault:
        _order_fault(simulator, spec)
    signal.signal(signal.SIGTERM, _stop)
    with simulator:
        sys.stdout.write(f"IMDS at {simulator.endpoint}: notbefore run --imds {simulator.endpoint}\n")
        sys.stdout.flush()
        try:
            _play(simulator, options)
        except KeyboardInterrupt:
            return 0
    return 0


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _play(simulator: Simulator, options: argparse.Namespace) -> None:
    names = list(SCENARIOS) if options.all else options.scenario
    while True:
        for name in names:
            simulator.start(name, cancel=options.cancel, reschedule=options.reschedule)
            while options.all and not simulator.idle():
                time.sleep(0.05)
        while not simulator.idle() or not (names and options.loop):
            time.sleep(0.2)
        time.sleep(PAUSE)


def _order_fault(simulator: Simulator, spec: str) -> None:
    rest, _, times = spec.partition("x") if spec.rpartition("x")[2].isdigit() else (spec, "", "1")
    kind, _, value = rest.partition(":")
    try:
        simulator.fault(kind, float(value) if value else None, int(times))
    except (ValueError, SimulatorError) as error:
        raise ConfigError(f"--fault: expected KIND[:VALUE][xTIMES] such as slow:3x10, got {spec!r} ({error})") from None


def _list() -> int:
    for title, rows in (
        ("SCENARIO", [(s.name, f"{s.event_type}, notice {s.notice:g} s: {s.title}") for s in SCENARIOS.values()]),
        ("FAULT", list(FAULTS.items())),
    ):
        width = max(len(name) for name, _ in rows) + 2
        sys.stdout.write(f"{title}\n" + "".join(f"  {name.ljust(width)}{text}\n" for name, text in rows))
    return 0
