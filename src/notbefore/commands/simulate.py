"""``notbefore simulate``: serve a simulated IMDS, for trials and tests."""

import argparse
import signal
import sys
import threading
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Final

from notbefore.config.extras import check_extra
from notbefore.config.model import host_and_port
from notbefore.errors import ConfigError, ListenError
from notbefore.simulator.control import EVENTS_PATH
from notbefore.simulator.event_grid import (
    DELIVERY_FAULTS,
    SCHEMAS,
    DeliveryFaults,
    EventGrid,
)
from notbefore.simulator.server import Simulator
from notbefore.simulator.state import FASTEST, FAULTS, NAMED, SLOWEST

DEFAULT_LISTEN: Final = "127.0.0.1:16925"
# seconds between two looks for due messages; Windows handles no signal during a longer wait
LOOK_SECONDS: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the VMs, their events, the faults, and the hub."""
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
        help="the VMs of the group; the endpoint of each is /vm/NAME",
    )
    _add_events(parser)
    _add_faults(parser)
    _add_event_grid(parser)


def _add_events(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scenario",
        action="extend",
        nargs="+",
        choices=NAMED,
        default=[],
        metavar="NAME",
        help=f"the events to play, all at the same time: {', '.join(NAMED)}",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="how fast to play: 60 is an hour in a minute (default 1, real time)",
    )
    parser.add_argument(
        "--cancel", action="store_true", help="cancel the events halfway to NotBefore"
    )


def _add_faults(parser: argparse.ArgumentParser) -> None:
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


def _add_event_grid(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--event-grid",
        type=Path,
        metavar="FILE",
        help="also send the events to an Event Hub, as Event Grid does; FILE contains its"
        " connection string",
    )
    parser.add_argument(
        "--event-grid-schema",
        choices=SCHEMAS,
        default=SCHEMAS[0],
        help=f"the schema of these messages (default {SCHEMAS[0]})",
    )
    parser.add_argument(
        "--event-grid-fault",
        action="append",
        default=[],
        metavar="KIND[:VALUE]",
        help=f"deliver these messages with a fault; KIND is {', '.join(DELIVERY_FAULTS)}, and VALUE"
        " seconds, or how often to repeat each message",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raises ``ConfigError`` and ``ListenError``."""
    stopped = threading.Event()

    def stop(_number: int, _frame: object) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)

    faults = _event_grid_faults(options)
    with ExitStack() as stack:
        simulator = stack.enter_context(_make_simulator(options))
        for version in options.refuse_version:
            simulator.refuse_version(version, HTTPStatus.BAD_REQUEST)
        for fault in options.fault:
            _add_fault(simulator, fault)
        for name in options.scenario:
            simulator.start(NAMED[name].name, cancel=options.cancel)

        writer = None
        if options.event_grid is not None:
            check_extra("eventhub")
            from notbefore.commands.hub_writer import make_hub_writer  # Azure's SDK

            event_grid = EventGrid(simulator, options.event_grid_schema, faults)
            writer = stack.enter_context(make_hub_writer(options.event_grid, event_grid))

        _print_endpoints(simulator)
        while not stopped.wait(LOOK_SECONDS):
            if writer is not None:
                writer.write_due()
    return 0


def _event_grid_faults(options: argparse.Namespace) -> DeliveryFaults:
    """Return how ``--event-grid-fault`` delivers messages. Raises ``ConfigError``."""
    faults = DeliveryFaults()
    for text in options.event_grid_fault:
        kind, _, value = text.partition(":")
        try:
            number = None
            if value:
                number = float(value)
            faults = faults.with_fault(kind, number)
        except ValueError as error:
            raise ConfigError(f"--event-grid-fault {text}: {error}") from None
    return faults


def _make_simulator(options: argparse.Namespace) -> Simulator:
    if not SLOWEST <= options.speed <= FASTEST:
        raise ConfigError(f"--speed: expected {SLOWEST:g} to {FASTEST:g}")
    vms = options.vm or ["WestNO_0"]
    try:
        host, port = host_and_port(options.listen)
        return Simulator(vms, listen=(host or "127.0.0.1", port), speed=options.speed)
    except ValueError as error:
        raise ConfigError(f"--listen: {error}") from None
    except OSError as error:
        raise ListenError(
            f"cannot listen at {options.listen} ({error}): choose another address with --listen"
        ) from None


def _print_endpoints(simulator: Simulator) -> None:
    sys.stdout.write(f"IMDS at {simulator.endpoint}: notbefore run --imds {simulator.endpoint}\n")
    if len(simulator.vms) > 1:
        sys.stdout.writelines(f"  {vm}: {simulator.endpoint_of(vm)}\n" for vm in simulator.vms)
    sys.stdout.write(f"Events while it runs: POST {simulator.endpoint}{EVENTS_PATH}\n")
    sys.stdout.flush()


def _add_fault(simulator: Simulator, text: str) -> None:
    """Let one answer fail as ``--fault`` says. Raises ``ConfigError``."""
    kind, _, value = text.partition(":")
    try:
        if value:
            simulator.fault(kind, float(value))
        else:
            simulator.fault(kind)
    except ValueError:
        expected = (
            f"KIND is {', '.join(FAULTS)}, and VALUE a status from 300 to 599, or seconds"
            " up to a day"
        )
        raise ConfigError(f"--fault {text}: expected KIND or KIND:VALUE: {expected}") from None
