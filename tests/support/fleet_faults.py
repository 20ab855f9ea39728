"""``notbefore fleet`` under faults, with an account of what must have been notified that shares no code with it.

A writer sends the changes of many VMs to the hub, as bytes of its own making; a receiver notes what arrives. Each event
is announced, started and finished by each VM of its scale set: so three notifications are wanted of it, in this order,
each under one delivery id of its own.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml
from azure.eventhub import EventData
from azure.eventhub.aio import EventHubProducerClient
from azure.eventhub.exceptions import EventHubError

from support.agent import eventually, free_port
from support.azurite import Azurite
from support.hub import Hub
from support.needs import needs
from support.peers import HttpPeer

STEPS = ("announced", "started", "finished")
VMS = 3  # of each scale set
SETS = 40
LIFE = 6  # of an event, in turns of the writer
PATIENCE = 240.0  # seconds without anything new, after which the rest counts as lost


def change_of(event: str, vm: str, step: str, not_before: datetime, clock: float = 0.0) -> bytes:
    """What the agent of a VM sends; ``clock``: seconds by which its clock is ahead."""
    scale_set = vm.partition("_")[0]
    now = datetime.now(UTC) + timedelta(seconds=clock)
    status = "Scheduled" if step == "announced" else "Started"
    data = {
        "time": now.isoformat(),
        "event.name": f"azure.scheduled_event.{step}",
        "body": step,
        "cloud.region": "westeurope",
        "cloud.account.id": "sub",
        "azure.resource_group.name": "rg",
        "azure.vm.scaleset.name": scale_set,
        "host.id": f"id-{vm}",
        "host.name": vm,
        "azure.scheduled_event.change_id": f"{event}-{step}",
        "azure.scheduled_event.change": step,
        "azure.scheduled_event.reason": "status_started" if step == "started" else "first_seen_scheduled",
        "azure.scheduled_event.id": event,
        "azure.scheduled_event.type": "Reboot",
        "azure.scheduled_event.status": status,
        "azure.scheduled_event.source": "Platform",
        "azure.scheduled_event.scope": "self" if vm.endswith("_0") else "peer",
        "azure.scheduled_event.resource_type": "VirtualMachine",
        "azure.scheduled_event.resources": [f"{scale_set}_0"],
        "azure.scheduled_event.first_seen": now.isoformat(),
        "azure.scheduled_event.not_before": not_before.isoformat(),
    }
    return json.dumps({"specversion": "1.0", "type": f"notbefore.scheduled_event.{step}.v1", "data": data}).encode()


def beat_of(vm: str, interval: float) -> bytes:
    """The sign of life of a VM; ``interval``: the seconds until its next one, as it says."""
    data = {
        "time": datetime.now(UTC).isoformat(),
        "cloud.region": "westeurope",
        "cloud.account.id": "sub",
        "azure.resource_group.name": "rg",
        "azure.vm.scaleset.name": vm.partition("_")[0],
        "host.id": f"id-{vm}",
        "host.name": vm,
        "notbefore.heartbeat.interval_seconds": interval,
    }
    return json.dumps({"specversion": "1.0", "type": "notbefore.heartbeat.v1", "data": data}).encode()


class Writer:
    """Begins ``rate`` events a second while it runs, and sends all of their changes, until the hub has each of them."""

    def __init__(self, hub: Hub, rate: float = 2.0, clocks: float = 0.0, beats: float = 0.0) -> None:
        self._hub, self._pause, self._clocks, self._beats = hub, 1 / rate, clocks, beats
        self._over = threading.Event()
        self.reading = threading.Event()  # somebody reads the hub: what is over before is history, and nobody's news
        self._client: EventHubProducerClient | None = None
        self._not_before = datetime.now(UTC) + timedelta(hours=1)  # Azure's, the same on each VM
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.begun: list[str] = []
        self.extra: list[bytes] = []  # sent as they are, with what comes next

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.reading.set()
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.to_thread(self.reading.wait)
        turn, last = 0, None
        while last is None or turn < last:
            if self._over.is_set() and last is None:
                last = turn + 2 * LIFE  # what has begun comes to its end
            for key, bodies in self._turn(turn, begins=last is None).items():
                await self._send(key, bodies)
            turn += 1
            await asyncio.sleep(self._pause)
        if self._client is not None:
            await self._client.close()

    def _turn(self, turn: int, *, begins: bool) -> dict[str, list[bytes]]:
        """The changes of one turn, by partition key: an event begins, an older one starts, a still older one ends."""
        found: dict[str, list[bytes]] = {}
        if self.extra:
            found["sub/rg/extra"] = [self.extra.pop() for _ in range(len(self.extra))]
        if self._beats:  # each VM sends a sign of life each SETS turns
            name = f"set{turn % SETS}"
            found[f"sub/rg/{name}"] = [beat_of(f"{name}_{vm}", self._beats) for vm in range(VMS)]
        if begins:
            self.begun.append(f"E{turn}")
        for age, step in enumerate(STEPS):
            number = turn - age * LIFE
            if 0 <= number < len(self.begun):
                name = f"set{number % SETS}"
                clocks = [self._clocks * (vm - 1) for vm in range(VMS)]  # one is behind, one right, one ahead
                found.setdefault(f"sub/rg/{name}", []).extend(
                    change_of(f"E{number}", f"{name}_{vm}", step, self._not_before, clock)
                    for vm, clock in enumerate(clocks)
                )
        return found

    async def _send(self, key: str, bodies: list[bytes]) -> None:
        """Send until the hub has it: what comes next waits, so the order is kept."""
        while True:
            try:
                self._client = self._client or EventHubProducerClient.from_connection_string(
                    self._hub.connection_string(), retry_total=0
                )
                async with asyncio.timeout(10):
                    await self._client.send_batch([EventData(one) for one in bodies], partition_key=key)
            except (EventHubError, TimeoutError, OSError):
                with suppress(EventHubError, TimeoutError, OSError):
                    if self._client is not None:
                        await asyncio.wait_for(self._client.close(), 5)
                self._client = None
                await asyncio.sleep(0.5)
            else:
                return


class Account(NamedTuple):
    """What came of it."""

    wanted: int  # notifications
    lost: int
    out_of_order: int
    twice: int  # under another delivery id: people were notified of the same step again
    repeated: int  # under the same delivery id
    takeovers: int = 0  # partitions that an instance began to read, where they were counted

    @classmethod
    def of(cls, events: list[str], hook: HttpPeer, without: Callable[[str, str], bool] = lambda *_: False) -> "Account":
        """``without``: of which event and step nothing is wanted."""
        found = notified(hook)
        first: dict[tuple[str, str], int] = {}
        ids: dict[tuple[str, str], set[str]] = {}
        for place, (event, step, delivery) in enumerate(found):
            first.setdefault((event, step), place)
            ids.setdefault((event, step), set()).add(delivery)
        wanted = [(event, step) for event in events for step in STEPS if not without(event, step)]
        places = [[first[event, step] for step in STEPS if (event, step) in first] for event in events]
        return cls(
            wanted=len(wanted),
            lost=sum(1 for one in wanted if one not in first),
            out_of_order=sum(1 for one in places if one != sorted(one)),
            twice=sum(len(one) - 1 for one in ids.values()),
            repeated=sum(count - 1 for count in Counter(delivery for *_, delivery in found).values()),
        )

    @property
    def line(self) -> str:
        return (
            f"{self.wanted:,} notifications wanted, {self.lost} lost, {self.out_of_order} events out of order,"
            f" {self.twice} notified twice, {self.repeated} repeated under the same id"
        )


def notified(hook: HttpPeer) -> list[tuple[str, str, str]]:
    """Event, step and delivery id of what the receiver has accepted, in the order in which it came."""
    found = []
    for one in list(hook.requests):
        if not one.body.endswith(b"}"):  # its courier was killed while it sent it
            continue
        record = json.loads(one.body)
        event, step = record["azure.scheduled_event.id"], record["azure.scheduled_event.change"]
        found.append((event, step, one.headers["x-notbefore-delivery-id"]))
    return found


class Instance:
    """``notbefore fleet``, as a process."""

    def __init__(self, config: Path, state: Path, disk: int = 0) -> None:
        """``disk``: MiB of a disk of its own for the state, which nobody else sees."""
        self._config, self.state, self._size = config, state, disk
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        words = ["fleet", str(self._config), "--state-dir", str(self.state), "--listen", f"127.0.0.1:{self.port}"]
        command = [sys.executable, "-m", "notbefore", *words]
        if self._size:
            needs("the right to mount")
            self.state.mkdir(exist_ok=True)
            mount = f'mount -t tmpfs -o size={self._size}m,mode=0700 tmpfs "$0" && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mount, str(self.state), *command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=dict(os.environ))
        return self

    @property
    def disk(self) -> Path:
        """Its state directory, as it sees it."""
        assert self._process
        return Path(f"/proc/{self._process.pid}/root{self.state}")

    @property
    def log(self) -> Path:
        return self.state.with_suffix(".log")

    def signal(self, number: signal.Signals) -> None:
        assert self._process
        self._process.send_signal(number)

    def kill(self, *, disk: bool = False) -> None:
        """``disk``: its machine is gone with its disk."""
        self.signal(signal.SIGKILL)
        assert self._process
        self._process.wait(60)
        if disk:
            eventually(lambda: _removed(self.state))  # its courier may write for a moment yet

    def stop(self) -> None:
        self.signal(signal.SIGTERM)
        assert self._process
        self._process.wait(90)

    def metric(self, name: str) -> float:
        """The sum of a metric's series; 0 where it does not answer."""
        with suppress(OSError):
            url = f"http://127.0.0.1:{self.port}/metrics"
            text = urllib.request.urlopen(url, timeout=20).read().decode()
            return sum(
                float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
            )
        return 0.0


def _removed(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


class Scene:
    """A hub, perhaps a checkpoint store, a receiver, a writer and instances, each of which is ended."""

    def __init__(self, directory: Path, stack: ExitStack, partitions: int, *, store: bool, **writer: float) -> None:
        self._directory = directory
        self.hub = stack.enter_context(Hub(directory, partitions=partitions))
        self.hook = stack.enter_context(HttpPeer())
        self.blobs = stack.enter_context(Azurite(directory)) if store else None
        self._stack = stack
        self.instances: list[Instance] = []
        self.config = self._configured()
        self.writer = stack.enter_context(Writer(self.hub, **writer))

    def _configured(self) -> Path:
        (self._directory / "hub-key").write_text(self.hub.connection_string(), encoding="utf-8")
        fleet: dict[str, Any] = {"hub": {"connection_string_file": "hub-key"}, "rebalance": "1s", "takeover": "5s"}
        if self.blobs is not None:
            fleet["checkpoints"] = {"connection_string": self.blobs.connection_string, "container": "notbefore"}
        # by default what announces an event is not sent any more once that is over: here it is wanted
        hook = {"webhook": {"url": self.hook.url, "allow_private": True, "expire_on_end": False}}
        sinks = {"hook": hook}
        path = self._directory / "fleet.yaml"
        path.write_text(yaml.safe_dump({"fleet": fleet, "sinks": sinks}), encoding="utf-8")
        return path

    def add(self, disk: int = 0) -> Instance:
        made = Instance(self.config, self._directory / f"instance{len(self.instances)}", disk).start()
        self.instances.append(made)
        self._stack.callback(_end, made)
        if not self.writer.reading.is_set():
            eventually(lambda: made.metric("notbefore_fleet_hub_connected"), patience=PATIENCE)
            self.writer.reading.set()
        return made

    def notified(self) -> int:
        return len(set(notified(self.hook)))

    def progress(self, count: int = 1, patience: float = PATIENCE) -> None:
        """Wait until so many more steps were notified."""
        wanted = self.notified() + count
        eventually(lambda: self.notified() >= wanted, patience=patience)

    def metric(self, name: str) -> float:
        """The sum of a metric over the instances."""
        return sum(one.metric(name) for one in self.instances)

    def takeovers(self) -> int:
        """How often an instance began to read a partition, by their logs."""
        return sum(one.log.read_text(encoding="utf-8").count(": reading from sequence") for one in self.instances)

    def settle(self, without: Callable[[str, str], bool] = lambda *_: False) -> Account:
        """Have the writer end, wait for what is wanted, and count."""
        self.writer.__exit__(None, None, None)
        account, since, seen = Account.of(self.writer.begun, self.hook, without), time.monotonic(), 0
        while account.lost and time.monotonic() - since < PATIENCE:
            time.sleep(0.5)
            if len(self.hook.requests) > seen:
                since, seen = time.monotonic(), len(self.hook.requests)
            account = Account.of(self.writer.begun, self.hook, without)
        return account


def _end(instance: Instance) -> None:
    with suppress(Exception):
        instance.stop()  # in order, so that coverage knows what it ran
    with suppress(Exception):
        instance.kill()


@contextmanager
def scene(directory: Path, partitions: int = 8, *, store: bool = True, **writer: float) -> Iterator[Scene]:
    """``writer``: see ``Writer``."""
    with ExitStack() as stack:
        yield Scene(directory, stack, partitions, store=store, **writer)


# ---- the faults; each returns the account, and what else is to be known


def kills(directory: Path, times: int, instances: int = 2, stops: int = 0) -> tuple[Account, str]:
    """Instances of which one is killed again and again; every other time its disk is gone with it.

    ``stops``: how often another one hangs as well, for some seconds.
    """
    return _kill(directory, times, 60.0, instances, stops)


def kills_alone(directory: Path, times: int, minutes: float = 60.0) -> tuple[Account, str]:
    """One instance that keeps its checkpoints on its own disk is killed, and started again."""
    return _kill(directory, times, minutes, instances=1)


def _kill(directory: Path, times: int, minutes: float, instances: int, stops: int = 0) -> tuple[Account, str]:
    with scene(directory, store=instances > 1) as at:
        for _ in range(instances):
            at.add()
        at.progress(6)
        chance = random.Random(16)  # noqa: S311 - no secret
        end, killed = time.monotonic() + minutes * 60, 0
        while killed < times and time.monotonic() < end:
            time.sleep(chance.random())
            victim = at.instances[killed % instances]
            victim.kill(disk=instances > 1 and killed % 4 < 2)
            victim.start()
            killed += 1
            if killed <= stops:
                other = at.instances[(killed + 1) % instances]
                other.signal(signal.SIGSTOP)
                time.sleep(1 + 8 * chance.random())
                other.signal(signal.SIGCONT)
            at.progress()
        account = at.settle()._replace(takeovers=at.takeovers())
        what = f"{instances} instances, killed {killed} times, stopped {min(stops, killed)} times"
        return account, f"{what}, {account.takeovers} takeovers of a partition"


def fights(directory: Path, partitions: int = 32) -> tuple[Account, str]:
    """Two and three instances for 32 partitions; one hangs, one is stopped."""

    def shares() -> list[int]:
        return [int(one.metric("notbefore_fleet_partitions")) for one in at.instances]

    with scene(directory, partitions) as at:
        said = []
        for number in (2, 3):
            while len(at.instances) < number:
                at.add()
            eventually(lambda: sum(shares()) == partitions and max(shares()) - min(shares()) <= 2, patience=PATIENCE)
            said.append(f"{number} instances have {shares()}")
            at.progress(3)
        first = at.instances[0]
        first.signal(signal.SIGSTOP)  # longer than `takeover`: the others have its partitions when it wakes up
        at.progress(6)
        time.sleep(8)
        first.signal(signal.SIGCONT)
        at.progress(6)
        at.instances.pop().stop()
        at.progress(6)
        return at.settle(), "; ".join(said) + "; one hung, one was stopped"


def store_away(directory: Path, seconds: float, kill_every: float = 0.0) -> tuple[Account, str]:
    """The checkpoint store is away, and then it hangs; ``kill_every``: so often an instance is killed meanwhile."""
    with scene(directory) as at:
        assert at.blobs
        at.add(), at.add()
        at.progress(6)
        at.blobs.stop()
        began, killed = at.notified(), _kill_for(at, seconds, kill_every)
        said = f"away for {seconds:.0f} s, in which {at.notified() - began} were notified, {killed} kills"
        at.blobs.start()
        at.progress(6)
        time.sleep(20)  # every partition is written, and shared by both again
        at.blobs.hang(signal.SIGSTOP)
        began, killed = at.notified(), _kill_for(at, seconds / 2, kill_every)
        said += f"; hung for {seconds / 2:.0f} s, in which {at.notified() - began} were, {killed} kills"
        at.blobs.hang(signal.SIGCONT)
        at.progress(6)
        return at.settle(), said


def _kill_for(at: Scene, seconds: float, every: float) -> int:
    """Kill the last instance so often and start it again, without its disk every other time; returns how often."""
    end, killed = time.monotonic() + seconds, 0
    while every and time.monotonic() + every < end:
        time.sleep(every)
        at.instances[-1].kill(disk=killed % 2 == 1)
        at.instances[-1].start()
        killed += 1
    time.sleep(max(0.0, end - time.monotonic()))
    return killed


def container_deleted(directory: Path) -> tuple[Account, str]:
    """Somebody deletes the container of the checkpoints under running instances."""
    with scene(directory) as at:
        assert at.blobs
        at.add(), at.add()
        at.progress(12)
        time.sleep(6)  # snapshots are written
        at.blobs.delete_container()
        eventually(lambda: at.metric("notbefore_store_degraded") or at.metric("notbefore_fleet_errors_total"))
        at.blobs.make_container()  # by whoever deleted it
        at.progress(12)
        victim = at.instances[-1]
        victim.kill()
        victim.start()
        at.progress(12)
        eventually(lambda: at.metric("notbefore_fleet_partitions") == 8)
        at.progress(12)
        return at.settle(), "deleted, and an instance killed after it"


def disk_full(directory: Path, seconds: float) -> tuple[Account, str]:
    """The disk of the only instance is full for a while, on which its checkpoints are as well."""
    with scene(directory, store=False) as at:
        one = at.add(disk=8)
        at.progress(6)
        fill, began = one.disk / "fill", at.notified()
        with suppress(OSError), fill.open("wb") as file:
            while True:
                file.write(b"x" * 65536)
                file.flush()
        at.progress(40)  # six steps come each second: nothing waits for the disk
        time.sleep(seconds)
        said = f"full for {seconds:.0f} s and more, in which {at.notified() - began} were notified"
        fill.unlink()
        eventually(lambda: one.metric("notbefore_store_degraded") == 0)
        at.progress(6)
        return at.settle(), said


def hub_away(directory: Path, seconds: float) -> tuple[Account, str]:
    """The hub is away, throttles, ends connections."""
    with scene(directory) as at:
        at.add(), at.add()
        at.progress(6)
        at.hub.kill()
        time.sleep(seconds)
        at.hub.start()
        at.progress(6)
        at.hub.order("busy")
        time.sleep(seconds)
        at.hub.order("calm")
        at.progress(6)
        for word in ("drop", "close"):
            at.hub.order(word)
            at.progress(6)
        return at.settle(), f"away for {seconds:.0f} s, throttling for {seconds:.0f} s, all connections ended twice"


def tail_lost(directory: Path) -> tuple[Account, str]:
    """Retention deletes what no instance has read; then the hub is made anew, so that offsets are beyond its end."""
    with scene(directory, store=False) as at:
        begun = at.writer.begun

        def more(count: int) -> int:
            wanted = len(begun) + count
            eventually(lambda: len(begun) >= wanted, patience=PATIENCE)
            return len(begun)

        one = at.add()
        at.progress(6)
        more(4 * LIFE)
        one.kill()
        killed = len(begun)
        more(2 * LIFE)
        at.hub.order("forget:0")
        forgotten = len(begun)
        one.start()
        at.progress(1)
        more(6 * LIFE)
        eventually(lambda: any(event == f"E{forgotten + 3}" for event, *_ in notified(at.hook)), patience=PATIENCE)
        missing = one.metric("notbefore_fleet_records_missing_total")
        anew = len(begun)
        at.hub.order("anew")
        made = more(4 * LIFE)

        def touched(event: str, _step: str) -> bool:
            """Some of what belongs to it may have been in what the hub has lost."""
            number = int(event[1:])
            return killed - 3 * LIFE <= number <= forgotten + 2 or anew - 3 * LIFE <= number <= made - 3 * LIFE

        account = at.settle(touched)
        assert missing > 0
        return account, f"{missing:.0f} records counted as missing; then a hub that was made anew"


def made_anew(directory: Path) -> tuple[Account, str]:
    """Somebody deletes the hub under two instances, and makes another one of this name."""
    with scene(directory) as at:
        at.add(), at.add()
        at.progress(12)
        time.sleep(6)  # snapshots are written
        anew = len(at.writer.begun)
        at.hub.order("anew")
        at.progress(40)

        def touched(event: str, _step: str) -> bool:
            """Some of what belongs to it may have been in what the hub has lost."""
            return anew - 3 * LIFE <= int(event[1:]) <= anew + 1

        return at.settle(touched), "made anew"


def poison(directory: Path, each: int = 20) -> tuple[Account, str]:
    """Records of another schema, of a newer version, of another product, and huge ones."""
    bad = [
        b"{",
        b'{"type": "com.example.other", "data": {}}',
        b'{"type": "notbefore.scheduled_event.announced.v9", "data": {}}',
        b'{"type": "notbefore.scheduled_event.announced.v1", "data": {"time": 5}}',
        json.dumps({"type": "notbefore.x.v1", "data": "x" * 900_000}).encode(),
    ]
    with scene(directory, store=False) as at:
        one = at.add()
        at.progress(3)
        for _ in range(each):
            at.writer.extra += bad[:4]
        for _ in range(3):  # a batch holds one of them
            at.writer.extra.append(bad[4])
            eventually(lambda: not at.writer.extra)
        account = at.settle()
        wanted = each * 4 + 3
        eventually(lambda: one.metric("notbefore_fleet_poison_records_total") >= wanted)
        counted = one.metric("notbefore_fleet_poison_records_total")
        rows = [json.loads(line) for line in (one.state / "poison.jsonl").read_text(encoding="utf-8").splitlines()]
        places = {(row["partition"], row["offset"]) for row in rows}
        assert counted == wanted == len(places), (counted, wanted, len(places))
        return account, f"{wanted} sent, {counted:.0f} counted, {len(places)} set aside with partition and offset"


def clocks(directory: Path, seconds: float = 300.0, events: int = 30) -> tuple[Account, str]:
    """The clocks of the VMs of one scale set differ by minutes."""
    with scene(directory, store=False, clocks=seconds) as at:
        at.add()
        at.progress(events)
        return at.settle(), f"clocks from {-seconds / 60:+.0f} to {seconds / 60:+.0f} minutes"
