"""The fleet's figures: ``python benchmarks/fleet.py figures | faults | worlds``.

``--help`` lists the options.

``figures``: changes a second of its CPU time; resident memory, and the bytes of snapshots in a
time. ``faults``: what is lost, repeated or out of order. ``worlds``: the same of random worlds in
which Azure reports events as well. Times depend on the load of the machine.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable  # noqa: TC003 - a benchmark needs no such block
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from _machine import describe, resident

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.core.record import Record
from notbefore.wording.records import heartbeat_of
from support import azure_worlds, fleet_faults
from support.agent import eventually
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.peers import HttpPeer

SETS = 100  # scale sets
RECORDS = "notbefore_fleet_records_total"


def reports(events: int, vms: int, *steps: str) -> list[Record]:
    """Let every VM of a scale set report these steps of each event; an event affects one VM."""
    begin = datetime.now(UTC) - timedelta(seconds=events)
    records: list[Record] = []
    for event in range(events):
        scale_set = f"set{event % SETS}"
        affected = f"{scale_set}_{event // SETS % vms}"
        for step in steps:
            for index in range(vms):
                record = report(
                    vm(f"{scale_set}_{index}", scale_set=scale_set),
                    step,  # type: ignore[arg-type] # of a change
                    f"E{event}",
                    at=begin + timedelta(seconds=event),
                    resources=[affected],
                    notice=36_000.0,
                )
                records.append(record)
    return records


def cpu(process: int) -> float:
    """Return the user and system time of a process, in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def figures(options: argparse.Namespace) -> None:
    """How much it takes in, how much memory it needs, and what it writes of 1,000 open events."""
    records = reports(1000, options.vms, "announced")
    print(f"{len(records):,} changes of 1,000 events; {describe()}")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        hub = stack.enter_context(Hub(directory, partitions=32))
        hook = stack.enter_context(HttpPeer())
        instance = stack.enter_context(
            RunningFleet(write_fleet_config(directory, hub, hook.url), directory / "state")
        )
        eventually(lambda: instance.metric_sum("notbefore_fleet_partitions") == 32)
        process = instance.process.pid
        idle = resident(process)
        used = cpu(process)
        send(hub, records)
        eventually(lambda: instance.metric_sum(RECORDS) >= len(records), patience=600)
        print(
            f"an instance, by its CPU time: {len(records) / (cpu(process) - used):,.0f} changes/s"
        )
        written = _send_heartbeats(hub, directory / "state" / "partitions", options)
        size = resident(process)
        most = resident(process, "VmHWM")
        print(
            f"{options.vms * SETS:,} VMs,"
            f" {instance.metric_sum('notbefore_fleet_events_pending'):,.0f} open events"
        )
    print(
        f"  {size:.0f} MiB resident, {most:.0f} MiB at most, {idle:.0f} MiB before the first record"
    )
    print(
        f"  {written / 1e6:.1f} MB of snapshots in {options.seconds:.0f} s; load"
        f" {os.getloadavg()[0]:.1f}"
    )


def _send_heartbeats(hub: Hub, partitions: Path, options: argparse.Namespace) -> int:
    """Send the heartbeats of the fleet, spread over their interval of 300 s.

    Returns the bytes of snapshots that the instance writes meanwhile.
    """
    heartbeats = []
    for number in range(SETS):
        for index in range(options.vms):
            sender = vm(f"set{number}_{index}", scale_set=f"set{number}")
            heartbeats.append(heartbeat_of(sender, (), "1", datetime.now(UTC), 300.0))
    written = 0
    last_change: dict[str, int] = {}  # of each snapshot
    begin = time.monotonic()
    for turn in range(round(options.seconds)):
        send(hub, heartbeats[turn % 300 :: 300])
        while time.monotonic() < begin + turn + 1:
            for path in partitions.glob("[0-9]*"):
                if not path.name.isdigit():  # a snapshot that is being written
                    continue
                status = path.stat()
                if last_change.get(path.name) != status.st_mtime_ns:
                    last_change[path.name] = status.st_mtime_ns
                    written += status.st_size
            time.sleep(0.05)
    return written


def faults(options: argparse.Namespace) -> None:
    """Count what is lost, repeated, or out of order, fault by fault; nothing may be lost."""
    kills = fleet_faults.kills
    stops = options.kills // 2
    scenes: dict[str, Callable[[Path], tuple[fleet_faults.Account, str]]] = {
        "alone": partial(kills, times=options.kills, instances=1),
        "kills": partial(kills, times=options.kills, instances=2, stops=stops),
        "three": partial(kills, times=options.kills, instances=3, stops=stops),
        "store": partial(fleet_faults.store_away, seconds=options.seconds),
        "container": fleet_faults.container_deleted,
        "hub": partial(fleet_faults.hub_away, seconds=options.seconds),
    }
    failed = False
    for name in options.only or scenes:
        with tempfile.TemporaryDirectory() as directory:
            began = time.monotonic()
            account, description = scenes[name](Path(directory))
            duration = time.monotonic() - began
            print(f"{name} ({duration:.0f} s): {description}: {account.line}", flush=True)
            failed |= bool(account.lost or account.out_of_order or account.twice)
    sys.exit(failed)


def worlds(options: argparse.Namespace) -> None:
    """Judge random worlds with Azure's messages: nothing is false, early, twice, late or stuck."""
    logging.disable()  # it warns of records that are not used
    failed = False
    for name, count in (("both", 3_000), ("azure", 1_000), ("late", 1_000), ("agents", 1_000)):
        if options.only and name not in options.only:
            continue
        began = time.process_time()
        total = azure_worlds.Account()
        for seed in range(count):
            account = azure_worlds.account_of(seed, name)  # type: ignore[arg-type] # one of them
            total.wrong += account.wrong
            total.events += account.events
            total.planned += account.planned
            total.with_outcome += account.with_outcome
        print(
            f"{name}: {count:,} worlds, {total.planned:,} events, {total.events:,} reported,"
            f" {total.with_outcome:,} ends known ({total.with_outcome / total.planned:.1%} of all);"
            f" {len(total.wrong)} wrong; {time.process_time() - began:.0f} s of CPU time",
            flush=True,
        )
        for text in total.wrong[:20]:
            print(f"  {text}", flush=True)
        failed |= bool(total.wrong)
    sys.exit(failed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for command, seconds in ((figures, 120.0), (faults, 60.0), (worlds, 0.0)):
        arguments = commands.add_parser(command.__name__, help=command.__doc__)
        arguments.add_argument(
            "only",
            nargs="*",
            help="faults: alone, kills, three, store, container, hub;"
            " worlds: both, azure, late, agents",
        )
        arguments.add_argument(
            "--vms", type=int, default=60, help="figures: of each of 100 scale sets"
        )
        arguments.add_argument("--kills", type=int, default=40, help="faults: how many of each")
        arguments.add_argument(
            "--seconds", type=float, default=seconds, help="of weighing snapshots, or of a fault"
        )
        arguments.set_defaults(run=command)
    options = parser.parse_args(sys.argv[1:] or ["figures"])
    options.run(options)


if __name__ == "__main__":
    main()
