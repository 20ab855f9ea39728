"""The fleet's figures: ``python benchmarks/fleet.py figures | faults | worlds``.

``--help`` after a command lists its options. Without a command: ``figures``.

figures: changes that an instance reads, per second of its CPU time; its resident memory in MiB; and
MB of snapshots that it writes.

faults: notifications that are lost, out of order or repeated while instances are killed, or the
hub or the store is away.

worlds: the same in random worlds in which Azure reports events too.

Times depend on the load of the machine. ``faults`` and ``worlds`` exit with 1 if anything is wrong.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

from _machine import add_names, describe, peak, resident

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.core.record import Heartbeat, Record
from notbefore.wording.records import heartbeat_of
from support import azure_worlds, fleet_faults
from support.agent import eventually
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.peers import HttpPeer

RECORDS: Final = "notbefore_fleet_records_total"
SCALE_SETS: Final = 100
EVENTS: Final = 1_000
PARTITIONS: Final = 32
HEARTBEAT_INTERVAL: Final = 300  # seconds
# the random worlds of each kind
WORLDS: Final[dict[azure_worlds.Sources, int]] = {
    "both": 3_000,
    "azure": 1_000,
    "late": 1_000,
    "agents": 1_000,
}
SHOWN: Final = 20  # mistakes of each kind of worlds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    add_figures(commands.add_parser("figures", help=figures.__doc__))
    add_faults(commands.add_parser("faults", help=faults.__doc__))
    add_worlds(commands.add_parser("worlds", help=worlds.__doc__))
    options = parser.parse_args(sys.argv[1:] or ["figures"])
    sys.exit(options.run(options))


# ---- figures


def add_figures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vms", type=int, default=60, help=f"of each of {SCALE_SETS} scale sets")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="for which snapshots are counted"
    )
    parser.set_defaults(run=figures)


def figures(options: argparse.Namespace) -> int:
    """Measure how fast an instance reads, its memory, and the snapshots that it writes."""
    changes = announcements(options.vms)
    print(f"{len(changes):,} changes of {EVENTS:,} events; {describe()}")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        hub = stack.enter_context(Hub(directory, partitions=PARTITIONS))
        hook = stack.enter_context(HttpPeer())
        config = write_fleet_config(directory, hub, hook.url)
        instance = stack.enter_context(RunningFleet(config, directory / "state"))
        eventually(lambda: instance.metric_sum("notbefore_fleet_partitions") == PARTITIONS)
        pid = instance.process.pid
        memory_before = resident(pid)

        cpu_before = cpu_seconds(pid)
        send(hub, changes)
        eventually(lambda: instance.metric_sum(RECORDS) >= len(changes), patience=600)
        cpu = cpu_seconds(pid) - cpu_before
        print(f"read: {len(changes) / cpu:,.0f} changes per second of its CPU time")

        written = bytes_written_during_heartbeats(
            hub, directory / "state" / "partitions", options.vms, options.seconds
        )
        pending = instance.metric_sum("notbefore_fleet_events_pending")
        memory_after = resident(pid)
        memory_peak = peak(pid)
    print(
        f"resident memory: {memory_before:.0f} MiB before the first record, {memory_after:.0f} MiB"
        f" with {options.vms * SCALE_SETS:,} VMs and {pending:,.0f} open events,"
        f" {memory_peak:.0f} MiB at most"
    )
    print(f"snapshots: {written / 1e6:.1f} MB in {options.seconds:.0f} s, with heartbeats")
    return 0


def announcements(vms: int) -> list[Record]:
    """Let every VM of a scale set announce each event; an event affects one VM."""
    begin = datetime.now(UTC) - timedelta(seconds=EVENTS)
    records: list[Record] = []
    for event in range(EVENTS):
        scale_set = f"set{event % SCALE_SETS}"
        affected = f"{scale_set}_{event // SCALE_SETS % vms}"
        for index in range(vms):
            record = report(
                vm(f"{scale_set}_{index}", scale_set=scale_set),
                "announced",
                f"E{event}",
                at=begin + timedelta(seconds=event),
                resources=[affected],
                notice=36_000.0,
            )
            records.append(record)
    return records


def heartbeats(vms: int) -> list[Heartbeat]:
    """Return one heartbeat of each VM."""
    now = datetime.now(UTC)
    records: list[Heartbeat] = []
    for number in range(SCALE_SETS):
        scale_set = f"set{number}"
        for index in range(vms):
            sender = vm(f"{scale_set}_{index}", scale_set=scale_set)
            records.append(heartbeat_of(sender, (), "1", now, float(HEARTBEAT_INTERVAL)))
    return records


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    fields = stat.rpartition(")")[2].split()
    user = int(fields[11])
    system = int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def bytes_written_during_heartbeats(hub: Hub, partitions: Path, vms: int, seconds: float) -> int:
    """Send heartbeats, spread over their interval; return the bytes of the snapshots meanwhile."""
    records = heartbeats(vms)
    written = 0
    last_changes: dict[str, int] = {}  # of each snapshot
    started = time.monotonic()
    for second in range(round(seconds)):
        send(hub, records[second % HEARTBEAT_INTERVAL :: HEARTBEAT_INTERVAL])
        while time.monotonic() < started + second + 1:
            written += bytes_of_new_snapshots(partitions, last_changes)
            time.sleep(0.05)
    return written


def bytes_of_new_snapshots(partitions: Path, last_changes: dict[str, int]) -> int:
    """Return the bytes of the snapshots that were written since the last call."""
    written = 0
    for path in partitions.glob("[0-9]*"):
        is_complete = path.name.isdigit()  # else it is still being written
        if not is_complete:
            continue
        status = path.stat()
        if last_changes.get(path.name) != status.st_mtime_ns:
            last_changes[path.name] = status.st_mtime_ns
            written += status.st_size
    return written


# ---- faults


def add_faults(parser: argparse.ArgumentParser) -> None:
    add_names(parser, "faults", "FAULT", FAULTS)
    parser.add_argument("--kills", type=int, default=40, help="and half as many stops (default 40)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long the hub or the store is away"
    )
    parser.set_defaults(run=faults)


def faults(options: argparse.Namespace) -> int:
    """Count the notifications that are lost, repeated, or out of order, for each fault."""
    failed = False
    for name in options.faults or FAULTS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            account, description = FAULTS[name](Path(directory), options)
        seconds = time.monotonic() - started
        print(f"{name} ({seconds:.0f} s): {description}: {account.line}", flush=True)
        if account.lost or account.out_of_order or account.twice:
            failed = True
    return int(failed)


Result = tuple[fleet_faults.Account, str]  # and a description


def alone(directory: Path, options: argparse.Namespace) -> Result:
    return fleet_faults.kills(directory, options.kills, instances=1)


def killed(directory: Path, options: argparse.Namespace, instances: int) -> Result:
    stops = options.kills // 2
    return fleet_faults.kills(directory, options.kills, instances, stops)


def store_away(directory: Path, options: argparse.Namespace) -> Result:
    return fleet_faults.store_away(directory, options.seconds)


def container_deleted(directory: Path, _: argparse.Namespace) -> Result:
    return fleet_faults.container_deleted(directory)


def hub_away(directory: Path, options: argparse.Namespace) -> Result:
    return fleet_faults.hub_away(directory, options.seconds)


FAULTS: Final[dict[str, Callable[[Path, argparse.Namespace], Result]]] = {
    "alone": alone,
    "kills": partial(killed, instances=2),
    "three": partial(killed, instances=3),
    "store": store_away,
    "container": container_deleted,
    "hub": hub_away,
}


# ---- worlds


def add_worlds(parser: argparse.ArgumentParser) -> None:
    add_names(parser, "kinds", "KIND", WORLDS)
    parser.add_argument("--worlds", type=int, help="how many of each kind (default: 3000 or 1000)")
    parser.set_defaults(run=worlds)


def worlds(options: argparse.Namespace) -> int:
    """Judge random worlds with Azure's messages: nothing is false, early, twice, late or stuck."""
    logging.disable()  # the fold warns of records that it cannot use
    kinds: Sequence[azure_worlds.Sources] = options.kinds or list(WORLDS)
    failed = False
    for kind in kinds:
        count = options.worlds or WORLDS[kind]
        started = time.process_time()
        total = total_account(kind, count)
        seconds = time.process_time() - started
        print(
            f"{kind}: {count:,} worlds, {total.planned:,} events, {total.events:,} reported,"
            f" {total.with_outcome:,} ends known ({total.with_outcome / total.planned:.1%} of all);"
            f" {len(total.wrong)} wrong; {seconds:.0f} s of CPU time",
            flush=True,
        )
        for mistake in total.wrong[:SHOWN]:
            print(f"  {mistake}", flush=True)
        if total.wrong:
            failed = True
    return int(failed)


def total_account(kind: azure_worlds.Sources, count: int) -> azure_worlds.Account:
    """Add up the accounts of so many worlds."""
    total = azure_worlds.Account()
    for seed in range(count):
        account = azure_worlds.account_of(seed, kind)
        total.wrong += account.wrong
        total.events += account.events
        total.planned += account.planned
        total.with_outcome += account.with_outcome
    return total


if __name__ == "__main__":
    main()
