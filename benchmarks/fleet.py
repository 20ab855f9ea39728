"""The fleet's figures: ``python benchmarks/fleet.py [figures | way | faults]``; ``--help`` lists the options of each.

``figures``: changes a second of the reading, of the merge, of the fold with both, of the SDK alone, and from the tests'
Event Hub peer to the stories; resident memory. ``way``: how long a change is on its way from IMDS to a receiver.
``faults``: what is lost, repeated or out of order. Times depend on the load of the machine, CPU times less.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from azure.eventhub import EventData
from azure.eventhub.aio import EventHubConsumerClient, PartitionContext

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.core.change import LIFECYCLE_KINDS
from notbefore.core.record import Record
from notbefore.fleet.partition import Item, Partition
from notbefore.fleet.reading import Report, read
from notbefore.fleet.waves import Grouping
from notbefore.simulator.scenarios import http_date
from notbefore.simulator.server import Simulator
from support import fleet_faults
from support.agent import RunningAgent, eventually
from support.azure import ME, item
from support.azure import body as azure_body
from support.azurite import Azurite
from support.fleet_instance import RunningFleet, configured, send
from support.fleet_records import body, report, vm
from support.hub import Hub, Stored
from support.peers import HttpPeer

STEPS = [kind for kind in LIFECYCLE_KINDS if kind in {"announced", "started", "finished"}]
RESULTS = ("news", "known", "late")


def reports(events: int, vms: int) -> list[Record]:
    """Every VM of a scale set reports three steps of each event, which affects one of them; ten scale sets."""
    begin = datetime.now(UTC) - timedelta(seconds=events)
    sets = [[vm(f"set{number}_{one}", scale_set=f"set{number}") for one in range(vms)] for number in range(10)]
    return [
        report(who, step, f"E{event}", at=begin + timedelta(seconds=event), resources=[group[event % vms].name])
        for event in range(events)
        for group in (sets[event % len(sets)],)
        for step in STEPS
        for who in group
    ]


def rate(what: str, count: int, seconds: float) -> None:
    print(f"{what}: {count / seconds:,.0f} changes/s")


def pure(bodies: list[bytes]) -> None:
    """What the core takes in, in the time of this process alone."""
    begin = time.process_time()
    found = [one for one in map(read, bodies) if isinstance(one, Report)]
    rate("reading", len(found), time.process_time() - begin)
    fold = Partition("0", Grouping(), 3600, lambda *_: None)
    begin = time.process_time()
    for one in found:
        fold._report(one, 0.0)  # noqa: SLF001 - the merge without the reading
    rate("merge alone", len(found), time.process_time() - begin)
    fold = Partition("0", Grouping(), 3600, lambda *_: None)
    items = [Item(data, number, str(number), 1e9 + number / 1000) for number, data in enumerate(bodies)]
    begin = time.process_time()
    made = sum(1 for item in items for _ in fold.add(item))
    rate("fold", len(items), time.process_time() - begin)
    print(f"notifications: {made}")


class Sample(NamedTuple):
    """What an instance had taken in at a moment, and the CPU time that it and the hub had used, in seconds."""

    time: float
    taken: float
    used: float
    hub: float


def sample(instances: list[RunningFleet], hub: Hub) -> Sample:
    names = [f'notbefore_fleet_records_total{{result="{one}"}}' for one in RESULTS]
    taken = sum(one.metric(name) or 0.0 for one in instances for name in names)
    return Sample(time.monotonic(), taken, sum(cpu(one.process.pid) for one in instances), cpu(hub.pid))


def cpu(process: int) -> float:
    """User and system time of a process, in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def watch(instances: list[RunningFleet], hub: Hub, count: int) -> list[Sample]:
    """Samples from the first record on, until all are taken in."""
    samples = [sample(instances, hub)]
    while samples[-1].taken < count:
        time.sleep(0.2)
        samples.append(sample(instances, hub))
    return [one for one in samples if one.taken][: len(samples)]


def end_to_end(records: list[Record], directory: Path, instances: int = 1) -> float:
    """From the hub to the stories, with the hub's log full at the start; returns changes a second of CPU time."""
    with Hub(directory, partitions=32) as hub, HttpPeer() as hook, ExitStack() as stack:
        send(hub, records)
        options = {}
        if instances > 1:
            blobs = stack.enter_context(Azurite(directory))
            store = {"connection_string": blobs.connection_string, "container": "notbefore"}
            options = {"checkpoints": store, "rebalance": "1s", "takeover": "5s"}
        config = configured(directory, hub, hook.url, **options)
        begin = time.monotonic()
        running = [stack.enter_context(RunningFleet(config, directory / f"state{one}")) for one in range(instances)]
        for one in running:
            one.ready()
        samples = watch(running, hub, len(records))
        status = Path(f"/proc/{running[0].process.pid}/status").read_text(encoding="ascii")
    resident = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    first, last = samples[0], samples[-1]
    taken, wall, used = last.taken - first.taken, last.time - first.time, last.used - first.used
    who = f"{instances} instance{'s' if instances > 1 else ''}, from hub to stories"
    rate(f"{who}, with the start ({last.time - begin:.1f} s)", len(records), last.time - begin)
    if taken:
        rate(f"{who}, steady, by the clock", int(taken), wall)
        rate(f"{who}, steady, by their own CPU time", int(taken), used)
        hub_share, own_share = (last.hub - first.hub) / wall, used / wall
        print(f"CPU time in it: {100 * own_share:.0f} % of a core, and the hub {100 * hub_share:.0f} %")
    print(f"resident: {int(resident) / 1024:.0f} MiB")
    return taken / used if used else 0.0


def sdk_alone(records: list[Record], directory: Path) -> None:
    """What the SDK's consumer reads from the same hub in the same way, with nothing done with it."""
    with Hub(directory, partitions=32) as hub:
        send(hub, records)
        found = 0
        enough = asyncio.Event()

        async def take(_context: PartitionContext, events: list[EventData]) -> None:
            nonlocal found
            found += len(events)
            if found >= len(records):
                enough.set()

        async def run() -> tuple[float, float]:
            async with EventHubConsumerClient.from_connection_string(hub.connection_string(), "$Default") as client:
                begin, used = time.monotonic(), time.process_time()
                receiving = asyncio.create_task(
                    client.receive_batch(
                        take, max_batch_size=300, max_wait_time=0.5, prefetch=1200, starting_position="-1"
                    )
                )
                await enough.wait()
                taken = time.monotonic() - begin, time.process_time() - used
                receiving.cancel()
                return taken

        wall, used = asyncio.run(run())
    rate("the SDK alone, by the clock", found, wall)
    rate("the SDK alone, by CPU time", found, used)


def figures(options: argparse.Namespace) -> None:
    """How much it takes in."""
    records = reports(options.events, options.vms)
    print(f"{len(records)} changes of {options.events} events")
    pure([body(one) for one in records])
    with tempfile.TemporaryDirectory() as directory:
        sdk_alone(records, Path(directory))
    for instances in range(1, options.instances + 1):
        with tempfile.TemporaryDirectory() as directory:
            end_to_end(records, Path(directory), instances)


def way(options: argparse.Namespace) -> None:
    """How long a change is on its way: IMDS, agent, hub, fleet, receiver."""
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    seen: dict[str, float] = {}
    chance = random.Random(16)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        (directory / "fleet").mkdir()
        hub, hook = stack.enter_context(Hub(directory)), stack.enter_context(HttpPeer())
        sink = {"event_hub": {"connection_string_file": "hub-key"}}
        agent_config = directory / "notbefore.yaml"
        agent_config.write_text(yaml.safe_dump({"sinks": {"hub": sink}}), encoding="utf-8")
        imds = stack.enter_context(Simulator((ME,)))
        imds.set_document(azure_body())
        fleet = stack.enter_context(RunningFleet(configured(directory, hub, hook.url), directory / "fleet"))
        agent = RunningAgent(imds.endpoint, directory / "agent", str(agent_config), interval="1s")
        stack.enter_context(agent)
        fleet.ready()
        agent.ready()
        later = http_date(time.time() + 3600)
        for number in range(options.changes + 1):
            key = f"E{number}"
            begun[key] = time.time()
            imds.set_document(azure_body(item(key, NotBefore=later), incarnation=number + 2))
            eventually(lambda: any(key in str(one.body) for one in hook.requests[-3:]), patience=60)  # noqa: B023 - now
            ended[key] = time.time()
            time.sleep(chance.random())  # a change comes at any moment between two polls
        found = [json.loads(line) for line in (directory / "hub.changes").read_text(encoding="utf-8").splitlines()]
        enqueued = {
            one.envelope["data"]["azure.scheduled_event.id"]: row["t"] / 1000 for one, row in announced(hub, found)
        }
        seen = {
            one["azure.scheduled_event.id"]: datetime.fromisoformat(one["time"]).timestamp()
            for one in agent.records
            if one["azure.scheduled_event.change"] == "announced"
        }
    keys = list(begun)[1:]  # the first one starts the couriers
    spread("change at IMDS -> agent", [seen[key] - begun[key] for key in keys])
    spread("agent -> hub", [enqueued[key] - seen[key] for key in keys])
    spread("hub -> fleet -> receiver", [ended[key] - enqueued[key] for key in keys])
    spread("all the way", [ended[key] - begun[key] for key in keys])


def announced(hub: Hub, rows: list[dict[str, Any]]) -> list[tuple[Stored, dict[str, Any]]]:
    """What announces an event, with its row in the hub's log."""
    stored = zip(hub.stored, rows, strict=True)
    return [(one, row) for one, row in stored if one.envelope["type"] == "notbefore.scheduled_event.announced.v1"]


def spread(what: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    print(f"{what}: p50 {1000 * p50:,.0f} ms, p99 {1000 * p99:,.0f} ms, of {len(ordered)}")


def faults(options: argparse.Namespace) -> None:
    """What is lost, repeated, or out of order, fault by fault: 0 lost is wanted of each."""
    scenes = {
        "alone": lambda path: fleet_faults.kills_alone(path, options.kills, options.minutes),
        "kills": lambda path: fleet_faults.kills(path, options.kills, options.minutes),
        "fights": fleet_faults.fights,
        "store": lambda path: fleet_faults.store_away(path, options.seconds),
        "hub": lambda path: fleet_faults.hub_away(path, options.seconds),
        "tail": fleet_faults.tail_lost,
        "poison": fleet_faults.poison,
        "clocks": fleet_faults.clocks,
        "resized": fleet_faults.resized,
    }
    failed = False
    for name in options.only or scenes:
        with tempfile.TemporaryDirectory() as directory:
            began = time.monotonic()
            account, said = scenes[name](Path(directory))
            print(f"{name} ({time.monotonic() - began:.0f} s): {said}: {account.line}", flush=True)
            failed |= bool(account.lost or account.out_of_order or account.twice)
    sys.exit(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    found = commands.add_parser("figures", help=figures.__doc__)
    found.add_argument("--events", type=int, default=200)
    found.add_argument("--vms", type=int, default=100, help="of each of ten scale sets")
    found.add_argument("--instances", type=int, default=1, help="2: the same with two instances as well")
    found.set_defaults(run=figures)
    found = commands.add_parser("way", help=way.__doc__)
    found.add_argument("--changes", type=int, default=100)
    found.set_defaults(run=way)
    found = commands.add_parser("faults", help=faults.__doc__)
    found.add_argument("only", nargs="*", help="alone, kills, fights, store, hub, tail, poison, clocks, resized")
    found.add_argument("--kills", type=int, default=200)
    found.add_argument("--minutes", type=float, default=60.0, help="after which no more are killed")
    found.add_argument("--seconds", type=float, default=120.0, help="for which the hub or the store is away")
    found.set_defaults(run=faults)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
