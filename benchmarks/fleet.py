"""The fleet's figures: ``python benchmarks/fleet.py [figures | way | faults]``; ``--help`` lists the options of each.

``figures``: changes a second of the reading, of the merge, of the fold with both, of the SDK alone, and from the tests'
Event Hub peer to the stories, by one instance and by two; resident memory. ``way``: how long a change is on its way
from IMDS to a receiver. ``faults``: what is lost, repeated or out of order. Times depend on the load of the machine,
CPU times less.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from azure.eventhub import EventData
from azure.eventhub.aio import EventHubConsumerClient, PartitionContext

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.core.change import LIFECYCLE_KINDS
from notbefore.core.record import Heartbeat, Record
from notbefore.fleet.hub_records import Report, read
from notbefore.fleet.partition import Item, Partition
from notbefore.fleet.waves import Grouping
from notbefore.simulator.scenarios import http_date
from notbefore.simulator.server import Simulator
from support import fleet_faults, random_fleets
from support.agent import RunningAgent, eventually
from support.azure import ME, item
from support.azure import body as azure_body
from support.azurite import Azurite
from support.fleet_instance import RunningFleet, configured, send
from support.fleet_records import body, report, vm
from support.hub import Hub, Stored
from support.peers import HttpPeer

STEPS = [kind for kind in LIFECYCLE_KINDS if kind in {"announced", "started", "finished"}]
RESULTS = ("news", "known", "late", "beat")
SETS = 64  # scale sets: enough for 32 partitions
CORES = sorted(os.sched_getaffinity(0))
PEERS, INSTANCES = CORES[0], CORES[-1]  # the core of the hub, the store and the receiver, and the one of an instance


def reports(events: int, vms: int) -> list[Record]:
    """Every VM of a scale set reports three steps of each event, which affects one of them; 64 scale sets."""
    begin = datetime.now(UTC) - timedelta(seconds=events)
    sets = [[vm(f"set{number}_{one}", scale_set=f"set{number}") for one in range(vms)] for number in range(SETS)]
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
    fold = Partition("0", Grouping(), lambda *_: None)
    begin = time.process_time()
    for one in found:
        fold._report(one, Item(b"", 0, "0", 0.0))  # noqa: SLF001 - the merge without the reading
    rate("merge alone", len(found), time.process_time() - begin)
    fold = Partition("0", Grouping(), lambda *_: None)
    items = [Item(data, number, str(number), 1e9 + number / 1000) for number, data in enumerate(bodies)]
    begin = time.process_time()
    made = sum(1 for item in items for one in fold.add(item) if one is not None)
    rate("fold", len(items), time.process_time() - begin)
    print(f"notifications: {made}")


@contextmanager
def on(core: int) -> Iterator[None]:
    """What this thread does, and the processes that it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Sample(NamedTuple):
    """What the instances had taken in at a moment, and the CPU time that they and the hub had used, in seconds."""

    time: float
    taken: float
    used: float
    hub: float


def sample(instances: list[RunningFleet], hub: Hub) -> Sample:
    taken = sum(one.metric_sum("notbefore_fleet_records_total") for one in instances)
    return Sample(time.monotonic(), taken, sum(cpu(one.process.pid) for one in instances), cpu(hub.pid))


def cpu(process: int) -> float:
    """User and system time of a process, in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def resident(process: int, what: str = "VmRSS") -> float:
    """MiB; ``VmHWM``: the most that it ever was."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what)) / 1024


@contextmanager
def fleet(directory: Path, instances: int) -> Iterator[tuple[Hub, list[RunningFleet]]]:
    """Instances that read a hub of 32 partitions, each on a core of its own as far as there are any."""
    with ExitStack() as stack:
        with on(PEERS):
            hub = stack.enter_context(Hub(directory, partitions=32))
            hook = stack.enter_context(HttpPeer())
            options: dict[str, Any] = {}
            if instances > 1:
                blobs = stack.enter_context(Azurite(directory))
                options["checkpoints"] = {"connection_string": blobs.connection_string, "container": "notbefore"}
                options["rebalance"] = "1s"
        config = configured(directory, hub, hook.url, **options)
        running = []
        for number in range(instances):
            with on(CORES[-1 - number % len(CORES)]):
                running.append(stack.enter_context(RunningFleet(config, directory / f"state{number}")))
        for one in running:
            one.ready()
        share = 32 / instances
        eventually(lambda: all(one.metric_sum("notbefore_fleet_partitions") == share for one in running), patience=120)
        yield hub, running


class Speed(NamedTuple):
    """Changes a second."""

    clock: float
    cpu: float  # by the CPU time of the instances


def end_to_end(records: list[Record], directory: Path, instances: int = 1) -> Speed:
    """From the hub to the stories. The hub's log is filled while the instances are stopped, so that nobody sends."""
    with fleet(directory, instances) as (hub, running):
        for one in running:
            one.process.send_signal(signal.SIGSTOP)
        with on(PEERS):
            send(hub, records)
        first = Sample(time.monotonic(), 0.0, sum(cpu(one.process.pid) for one in running), cpu(hub.pid))
        for one in running:
            one.process.send_signal(signal.SIGCONT)
        last = first
        while last.taken < len(records):
            time.sleep(0.5)
            last = sample(running, hub)
        size = max(resident(one.process.pid) for one in running)
    wall, used = last.time - first.time, last.used - first.used
    found = Speed(len(records) / wall, len(records) / used)
    who = f"{instances} instance{'s' if instances > 1 else ''}, from the hub to the stories"
    print(f"{who}: {found.clock:,.0f} changes/s by the clock, {found.cpu:,.0f} by their own CPU time")
    print(f"  CPU time in it: {100 * used / wall:.0f} % of a core, the hub {100 * (last.hub - first.hub) / wall:.0f} %")
    print(f"  resident: {size:.0f} MiB")
    return found


def memory(directory: Path) -> None:
    """10,000 VMs in 100 scale sets, each of which sends heartbeats, and 1,000 events that are open."""
    begin = datetime.now(UTC)
    sets = [[vm(f"set{number}_{one}", scale_set=f"set{number}") for one in range(100)] for number in range(100)]
    with fleet(directory, 1) as (hub, (instance,)):
        idle = resident(instance.process.pid)
        events = [
            report(who, "announced", f"E{event}", at=begin, resources=[group[event // 100].name], notice=36_000.0)
            for event in range(1000)
            for group in (sets[event % 100],)
            for who in group
        ]
        with on(PEERS):
            for turn in range(3):
                at = begin + timedelta(seconds=turn)
                send(hub, [Heartbeat.of(who, (), "1", at, 300.0) for group in sets for who in group])
            send(hub, events)
        wanted = 30_000 + len(events)
        eventually(lambda: instance.metric_sum("notbefore_fleet_records_total") >= wanted, patience=600)
        heard = instance.metric_sum("notbefore_fleet_vms_heard")
        pending = instance.metric_sum("notbefore_fleet_events_pending")
        time.sleep(10)  # a snapshot of all partitions is written
        size, most = resident(instance.process.pid), resident(instance.process.pid, "VmHWM")
    print(
        f"{heard:,.0f} VMs heard from and {pending:,.0f} open events, each reported by 100 VMs: {size:.0f} MiB resident"
    )
    print(f"  {most:.0f} MiB at most, {idle:.0f} MiB before the first record")


def sdk_alone(records: list[Record], directory: Path) -> float:
    """What the SDK's consumer reads from the same hub in the same way, with nothing done with it: records/s of CPU."""
    with ExitStack() as stack:
        with on(PEERS):
            hub = stack.enter_context(Hub(directory, partitions=32))
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

        with on(INSTANCES):
            wall, used = asyncio.run(run())
    print(f"the SDK alone: {found / wall:,.0f} changes/s by the clock, {found / used:,.0f} by CPU time")
    return found / used


def figures(options: argparse.Namespace) -> None:
    """How much it takes in, and how much memory it needs."""
    records = reports(options.events, options.vms)
    print(f"{len(records):,} changes of {options.events} events; load {os.getloadavg()[0]:.1f} on {len(CORES)} cores")
    print(f"the instance on core {INSTANCES}; the hub and the receiver on core {PEERS}; nobody sends meanwhile")
    pure([body(one) for one in records])
    with tempfile.TemporaryDirectory() as directory:
        sdk = sdk_alone(records, Path(directory))
    with tempfile.TemporaryDirectory() as directory:
        one = end_to_end(records, Path(directory))
    print(f"the SDK's share of the CPU time: {100 * one.cpu / sdk:.0f} %")
    with tempfile.TemporaryDirectory() as directory:
        two = end_to_end(records, Path(directory), 2)
    print(f"two instances against one: {two.clock / one.clock:.2f} times by the clock, with the hub on their cores;")
    print(f"  {2 * two.cpu / one.cpu:.2f} times where the hub is elsewhere, by CPU time for a change")
    with tempfile.TemporaryDirectory() as directory:
        memory(Path(directory))
    print(f"load {os.getloadavg()[0]:.1f}")


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
    scenes: dict[str, Callable[[Path], tuple[fleet_faults.Account, str]]] = {
        "alone": lambda path: fleet_faults.kills_alone(path, options.kills, options.minutes),
        "kills": lambda path: fleet_faults.kills(path, options.kills, 2, options.kills // 2),
        "three": lambda path: fleet_faults.kills(path, options.kills, 3, options.kills // 2),
        "fights": fleet_faults.fights,
        "store": lambda path: fleet_faults.store_away(path, options.seconds, kill_every=25.0),
        "disk": lambda path: fleet_faults.disk_full(path, options.seconds),
        "container": fleet_faults.container_deleted,
        "hub": lambda path: fleet_faults.hub_away(path, options.seconds),
        "tail": fleet_faults.tail_lost,
        "anew": fleet_faults.made_anew,
        "poison": fleet_faults.poison,
        "clocks": fleet_faults.clocks,
    }
    failed = False
    for name in options.only or scenes:
        with tempfile.TemporaryDirectory() as directory:
            began = time.monotonic()
            account, said = scenes[name](Path(directory))
            print(f"{name} ({time.monotonic() - began:.0f} s): {said}: {account.line}", flush=True)
            failed |= bool(account.lost or account.out_of_order or account.twice)
    sys.exit(failed)


def fleets(options: argparse.Namespace) -> None:
    """Random fleets, beside an account of what must be notified: 0 false, untold and out of order are wanted."""
    events = notifications = mistakes = 0
    for seed in range(options.fleets):
        group_by = random_fleets.GROUPINGS[seed % len(random_fleets.GROUPINGS)]
        plan = random_fleets.planned(random.Random(seed))
        made = random_fleets.notified(plan, random.Random(seed), group_by)
        found = list(random_fleets.wrong(plan, made))
        events, notifications, mistakes = events + len(plan), notifications + len(made), mistakes + len(found)
        for text in found:
            print(f"seed {seed}, {group_by}: {text}")
    print(f"{options.fleets} fleets, {events} events, {notifications} notifications: {mistakes} are wrong")
    sys.exit(bool(mistakes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    found = commands.add_parser("figures", help=figures.__doc__)
    found.add_argument("--events", type=int, default=320)
    found.add_argument("--vms", type=int, default=100, help="of each of 64 scale sets")
    found.set_defaults(run=figures)
    found = commands.add_parser("way", help=way.__doc__)
    found.add_argument("--changes", type=int, default=100)
    found.set_defaults(run=way)
    found = commands.add_parser("faults", help=faults.__doc__)
    names = "alone, kills, three, fights, store, disk, container, hub, tail, anew, poison, clocks"
    found.add_argument("only", nargs="*", help=names)
    found.add_argument("--kills", type=int, default=200)
    found.add_argument("--minutes", type=float, default=60.0, help="after which no more are killed")
    found.add_argument("--seconds", type=float, default=240.0, help="for which the hub or the store is away")
    found.set_defaults(run=faults)
    found = commands.add_parser("fleets", help=fleets.__doc__)
    found.add_argument("--fleets", type=int, default=1_000)
    found.set_defaults(run=fleets)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
