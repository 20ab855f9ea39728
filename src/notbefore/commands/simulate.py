"""``notbefore simulate``: serve a simulated IMDS, for trials and tests."""

import argparse
import signal
import sys
import threading
from http import HTTPStatus
from typing import Final

from notbefore.config.model import host_and_port
from notbefore.errors import ConfigError, ListenError
from notbefore.simulator.server import Simulator
from notbefore.simulator.state import FAULTS, NAMED

DEFAULT_LISTEN: Final = "127.0.0.1:16925"
SPEEDS: Final = (0.01, 100_000.0)  # within these limits, every year has four digits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the VMs, their events, and the faults."""
    parser.add_argument(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help=f"where to serve (default {DEFAULT_LISTEN})",
    )
    parser.add_argument(
        "--vm",
        action="extend",
        nargs="+",
        metavar="NAME",
        help="the VMs of the group; each one's endpoint is /vm/NAME",
    )
    parser.add_argument(
        "--scenario",
        action="extend",
        nargs="+",
        choices=NAMED,
        default=[],
        metavar="NAME",
        help=f"play these at the same time: {', '.join(NAMED)}",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="60 is an hour in a minute (default 1, real time)",
    )
    parser.add_argument(
        "--cancel", action="store_true", help="the events are canceled halfway to NotBefore"
    )
    parser.add_argument(
        "--refuse-version",
        action="append",
        default=[],
        metavar="VERSION",
        help="answer this api-version with 400, as an older IMDS does",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND[:VALUE]",
        help=f"let one answer fail; KIND is {', '.join(FAULTS)}, and VALUE a status or seconds",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raises ``ConfigError`` and ``ListenError``."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    if not SPEEDS[0] <= options.speed <= SPEEDS[1]:
        raise ConfigError(f"--speed: expected {SPEEDS[0]:g} to {SPEEDS[1]:g}")
    try:
        host, port = host_and_port(options.listen)
        simulator = Simulator(
            options.vm or ("WestNO_0",), listen=(host or "127.0.0.1", port), speed=options.speed
        )
    except ValueError as error:
        raise ConfigError(f"--listen: {error}") from None
    except OSError as error:
        raise ListenError(f"cannot listen at {options.listen}: {error}") from None
    with simulator:
        for version in options.refuse_version:
            simulator.refuse_version(version, HTTPStatus.BAD_REQUEST)
        for spec in options.fault:
            _add_fault(simulator, spec)
        for name in options.scenario:
            simulator.start(NAMED[name].name, cancel=options.cancel)
        sys.stdout.write(
            f"IMDS at {simulator.endpoint}: notbefore run --imds {simulator.endpoint}\n"
        )
        if len(simulator.vms) > 1:
            sys.stdout.writelines(f"  {vm}: {simulator.endpoint_of(vm)}\n" for vm in simulator.vms)
        sys.stdout.flush()
        while not ended.wait(0.2):  # Windows handles no signal during a longer wait
            pass
    return 0


def _add_fault(simulator: Simulator, spec: str) -> None:
    """Let one answer fail as an option ``--fault`` says. Raises ``ConfigError``."""
    kind, _, value = spec.partition(":")
    try:
        simulator.fault(kind, float(value) if value else None)
    except ValueError:
        expected = (
            f"KIND is {', '.join(FAULTS)}, and VALUE a status from 300 to 599, or seconds"
            " up to a day"
        )
        raise ConfigError(f"--fault {spec}: expected KIND or KIND:VALUE: {expected}") from None
