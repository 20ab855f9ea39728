"""``notbefore simulate``: an IMDS to try everything against."""

import argparse
import re
import signal
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from typing import Final

from notbefore.commands.options import add_json
from notbefore.commands.tables import print_json, table
from notbefore.config.model import host_and_port
from notbefore.errors import ConfigError, ListenError, SimulatorError
from notbefore.simulator.scenarios import SCENARIOS
from notbefore.simulator.server import Simulator
from notbefore.simulator.state import FAULTS

DEFAULT_LISTEN: Final = "127.0.0.1:16925"
PAUSES: Final = 25  # of 0.2 s between two rounds of --loop
_FAULT: Final = re.compile(r"([a-z-]+)(?::(\d{1,9}(?:\.\d{1,9})?))?(?:x(\d{1,9}))?", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The VMs, what happens to them, and what fails."""
    parser.add_argument(
        "--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=f"where to serve (default {DEFAULT_LISTEN})"
    )
    parser.add_argument(
        "--vm", action="extend", nargs="+", metavar="NAME", help="the VMs of the group; each one's endpoint is /vm/NAME"
    )
    parser.add_argument(
        "--scenario",
        action="extend",
        nargs="+",
        choices=SCENARIOS,
        default=[],
        metavar="NAME",
        help="play these at the same time; see --list",
    )
    parser.add_argument("--all", action="store_true", help="play all of them, one after the other")
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="FACTOR", help="60: an hour in a minute (default 1, real time)"
    )
    parser.add_argument("--cancel", action="store_true", help="the events are canceled halfway to NotBefore")
    parser.add_argument("--reschedule", action="store_true", help="NotBefore is moved once, to a later time")
    parser.add_argument("--loop", action="store_true", help="start again when all are over")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND[:VALUE][xTIMES]",
        help="let an answer fail; see --list",
    )
    parser.add_argument("--list", action="store_true", help="list scenarios and faults")
    add_json(parser, "the list as JSON")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raises ``ConfigError`` and ``ListenError``."""
    if options.list:
        return _list(as_json=options.json)
    try:
        host, port = host_and_port(options.listen)
    except ValueError as error:
        raise ConfigError(f"--listen: {error}") from None
    signals: list[int] = []  # that came; an exception raised by their handler can be lost within a generator's end
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.append(number))
    with _simulator(options, host or "127.0.0.1", port) as simulator:
        for spec in options.fault:
            _order_fault(simulator, spec)
        _introduce(simulator)
        steps = _play(simulator, options)
        while not signals:
            time.sleep(next(steps))
    return 0


def _simulator(options: argparse.Namespace, host: str, port: int) -> Simulator:
    try:
        return Simulator(options.vm or ("WestNO_0",), listen=(host, port), speed=options.speed)
    except SimulatorError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ListenError(f"cannot listen at {options.listen}: {error}") from None


def _introduce(simulator: Simulator) -> None:
    lines = [f"IMDS at {simulator.endpoint}: notbefore run --imds {simulator.endpoint}\n"]
    if len(simulator.vms) > 1:
        lines += [f"  {vm}: {simulator.endpoint_of(vm)}\n" for vm in simulator.vms]
    sys.stdout.writelines(lines)
    sys.stdout.flush()


def _play(simulator: Simulator, options: argparse.Namespace) -> Iterator[float]:
    """Play what is wanted, without an end; yields the seconds to wait before each step."""
    names = list(SCENARIOS) if options.all else options.scenario
    while True:
        for name in names:
            simulator.start(name, cancel=options.cancel, reschedule=options.reschedule)
            while options.all and not simulator.idle():
                yield 0.05
        while not simulator.idle() or not (names and options.loop):
            yield 0.2
        yield from repeat(0.2, PAUSES)


def _order_fault(simulator: Simulator, spec: str) -> None:
    words = _FAULT.fullmatch(spec)
    if words is None:
        raise ConfigError(f"--fault: expected KIND[:VALUE][xTIMES] such as slow:3x10, not {spec!r}")
    kind, value, times = words.groups()
    try:
        simulator.fault(kind, float(value) if value else None, int(times) if times else 1)
    except SimulatorError as error:
        raise ConfigError(f"--fault {spec}: {error}") from None


def _list(*, as_json: bool) -> int:
    faults = [(name, kind.text) for name, kind in FAULTS.items()]
    if as_json:
        print_json([{"scenarios": {s.name: s.title for s in SCENARIOS.values()}, "faults": dict(faults)}], sys.stdout)
        return 0
    scenarios = [(s.name, s.event_type, f"{s.notice:g} s", s.title) for s in SCENARIOS.values()]
    table(("SCENARIO", "TYPE", "NOTICE", "WHAT HAPPENS"), scenarios, sys.stdout)
    sys.stdout.write("\n")
    table(("FAULT", "WHAT HAPPENS"), faults, sys.stdout)
    return 0
