"""``notbefore fleet`` under faults, with an account of what must have been notified that shares no code with it.

A writer sends the changes of many VMs to the hub, as bytes of its own making; a receiver notes what arrives. Each event
is announced, started and finished by each VM of its scale set: so three notifications are wanted of it, in this order,
each under one delivery id of its own.
"""

import asyncio
import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml
from azure.eventhub import EventData
from azure.eventhub.aio import EventHubProducerClient
from azure.eventhub.exceptions import EventHubError

from support.agent import eventually
from support.azurite import Azurite
from support.fleet_instance import RunningFleet, configured
from support.hub import Hub
from support.peers import HttpPeer
from support.random_fleets import record_of

STEPS = ("announced", "started", "finished")
VMS = 3  # of each scale set
SETS = 40
PAUSE = 0.5  # seconds between two turns of the writer
LIFE = 6  # of an event, in such turns
PATIENCE = 240.0  # seconds without anything new, after which the rest counts as lost
STORE = "notbefore_fleet_errors_total"


def change_of(event: str, vm: str, step: str, not_before: datetime) -> bytes:
    """What the agent of a VM sends."""
    scale_set, now = vm.partition("_")[0], datetime.now(UTC).isoformat()
    return record_of(
        vm, step, ("sub", "rg"), scale_set=scale_set, time=now, first_seen=now, not_before=not_before.isoformat(),
        id=event, change_id=f"{event}-{step}", type="Reboot", resources=[f"{scale_set}_0"],
    )  # fmt: skip


class Writer:
    """Begins an event each turn while it runs, and sends all of their changes, until the hub has each of them."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._over = threading.Event()
        self.reading = threading.Event()  # somebody reads the hub: what is over before is history, and nobody's news
        self._client: EventHubProducerClient | None = None
        self._not_before = datetime.now(UTC) + timedelta(hours=1)  # Azure's, the same on each VM
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.begun: list[str] = []

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
            await asyncio.sleep(PAUSE)
        if self._client is not None:
            await self._client.close()

    def _turn(self, turn: int, *, begins: bool) -> dict[str, list[bytes]]:
        """The changes of one turn, by partition key: an event begins, an older one starts, a still older one ends."""
        found: dict[str, list[bytes]] = {}
        if begins:
            self.begun.append(f"E{turn}")
        for age, step in enumerate(STEPS):
            number = turn - age * LIFE
            if 0 <= number < len(self.begun):
                name = f"set{number % SETS}"
                changes = [change_of(f"E{number}", f"{name}_{vm}", step, self._not_before) for vm in range(VMS)]
                found.setdefault(f"sub/rg/{name}", []).extend(changes)
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

    @classmethod
    def of(cls, events: list[str], hook: HttpPeer) -> "Account":
        """What of these events the receiver was notified of."""
        found = notified(hook)
        first: dict[tuple[str, str], int] = {}
        for place, (event, step, _) in enumerate(found):
            first.setdefault((event, step), place)
        wanted = [(event, step) for event in events for step in STEPS]
        places = [[first[event, step] for step in STEPS if (event, step) in first] for event in events]
        return cls(
            wanted=len(wanted),
            lost=sum(one not in first for one in wanted),
            out_of_order=sum(one != sorted(one) for one in places),
            twice=len(set(found)) - len(first),
            repeated=len(found) - len(set(found)),
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


class Scene:
    """A hub, perhaps a checkpoint store, a receiver, a writer and instances, each of which is ended."""

    def __init__(self, directory: Path, stack: ExitStack, *, store: bool) -> None:
        self._directory = directory
        self.hub = stack.enter_context(Hub(directory, partitions=8))
        self.hook = stack.enter_context(HttpPeer())
        self.blobs = stack.enter_context(Azurite(directory)) if store else None
        self.instances: list[RunningFleet] = []
        self._ended: list[RunningFleet] = []
        stack.callback(self._end)
        options: dict[str, Any] = {"rebalance": "1s", "takeover": "5s"}
        if self.blobs is not None:
            options["checkpoints"] = {"connection_string": self.blobs.connection_string, "container": "notbefore"}
        self._config = configured(directory, self.hub, self.hook.url, **options)
        values = yaml.safe_load(self._config.read_text(encoding="utf-8"))
        # by default what announces an event is not sent any more once that is over: here it is wanted
        values["sinks"]["hook"]["webhook"]["expire_on_end"] = False
        self._config.write_text(yaml.safe_dump(values), encoding="utf-8")
        self.writer = stack.enter_context(Writer(self.hub))

    def _end(self) -> None:
        for one in self.instances:
            one.__exit__()

    def add(self, state: Path | None = None) -> RunningFleet:
        made = RunningFleet(self._config, state or self._directory / f"instance{len(self.instances)}")
        self.instances.append(made)
        if not self.writer.reading.is_set():
            eventually(lambda: self.metric("notbefore_fleet_hub_connected"), patience=PATIENCE)
            self.writer.reading.set()
        return made

    def kill(self, number: int = -1, *, disk: bool = False) -> Path:
        """Kill an instance; ``disk``: its machine is gone with its disk. Returns its state."""
        one = self.instances.pop(number)
        self._ended.append(one)
        one.stop(signal.SIGKILL)
        if disk:
            eventually(lambda: _removed(one.state))  # its courier may write for a moment yet
        return one.state

    def notified(self) -> int:
        return len(set(notified(self.hook)))

    def progress(self, count: int = 6) -> None:
        """Wait until so many more steps were notified."""
        wanted = self.notified() + count
        eventually(lambda: self.notified() >= wanted, patience=PATIENCE)

    def metric(self, name: str) -> float:
        """The sum of a metric over the instances that answer."""
        found = 0.0
        for one in self.instances:
            with suppress(OSError):
                found += one.metric_sum(name)
        return found

    def takeovers(self) -> int:
        """How often an instance began to read a partition, by their logs."""
        return sum(one.log.count(": reading from sequence") for one in self.instances + self._ended)

    def settle(self) -> Account:
        """Have the writer end, wait for what is wanted, and count."""
        self.writer.__exit__(None, None, None)
        account, since, seen = Account.of(self.writer.begun, self.hook), time.monotonic(), 0
        while account.lost and time.monotonic() - since < PATIENCE:
            time.sleep(0.5)
            if len(self.hook.requests) > seen:
                since, seen = time.monotonic(), len(self.hook.requests)
            account = Account.of(self.writer.begun, self.hook)
        return account


def _removed(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


@contextmanager
def scene(directory: Path, *, store: bool = True) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(directory, stack, store=store)


# ---- the faults; each returns the account, and what else is to be known


def kills(directory: Path, times: int, instances: int = 2, stops: int = 0) -> tuple[Account, str]:
    """Instances of which one is killed again and again; every other time its disk is gone with it, if it has a store.

    ``stops``: how often another one hangs as well, for some seconds, perhaps longer than ``takeover``.
    """
    with scene(directory, store=instances > 1) as at:
        for _ in range(instances):
            at.add()
        at.progress()
        chance = random.Random(16)  # noqa: S311 - no secret
        for killed in range(times):
            time.sleep(chance.random())
            at.add(at.kill(0, disk=instances > 1 and killed % 4 < 2))
            if killed < stops:
                at.instances[0].process.send_signal(signal.SIGSTOP)
                time.sleep(1 + 8 * chance.random())
                at.instances[0].process.send_signal(signal.SIGCONT)
            at.progress(1)
        account = at.settle()
        return (
            account,
            f"{instances} instances, {times} kills, {stops} stops, {at.takeovers()} takeovers of a partition",
        )


def store_away(directory: Path, seconds: float) -> tuple[Account, str]:
    """The checkpoint store is away, and then it hangs; meanwhile an instance is killed."""
    with scene(directory) as at:
        assert at.blobs
        at.add(), at.add()
        at.progress()
        began = at.notified()
        for away, back in (
            (at.blobs.stop, at.blobs.start),
            (partial(at.blobs.hang, signal.SIGSTOP), partial(at.blobs.hang, signal.SIGCONT)),
        ):
            away()
            time.sleep(seconds / 2)
            at.add(at.kill(disk=True))
            time.sleep(seconds / 2)
            back()
            at.progress()
            time.sleep(20)  # every partition is written, and shared by both again
        return at.settle(), f"away and hung for {seconds:.0f} s each: {at.notified() - began} were notified meanwhile"


def container_deleted(directory: Path) -> tuple[Account, str]:
    """Somebody deletes the container of the checkpoints under running instances, and makes it again."""
    with scene(directory) as at:
        assert at.blobs
        at.add(), at.add()
        at.progress(12)
        time.sleep(6)  # snapshots are written
        at.blobs.delete_container()
        eventually(lambda: at.metric(STORE))
        at.blobs.make_container()
        time.sleep(12)  # each instance has written what it has: before that, only its memory knows it
        at.add(at.kill())
        at.progress(12)
        eventually(lambda: at.metric("notbefore_fleet_partitions") == 8)
        return at.settle(), "deleted and made again, and an instance killed after it"


def hub_away(directory: Path, seconds: float) -> tuple[Account, str]:
    """The hub is away, throttles, ends connections."""
    with scene(directory, store=False) as at:
        one = at.add().ready()
        at.progress()
        at.hub.kill()
        eventually(lambda: not one.answers("/readyz"))
        assert one.answers("/healthz")
        time.sleep(seconds)
        at.hub.start()
        at.progress()
        at.hub.order("busy")
        time.sleep(seconds)
        at.hub.order("calm")
        at.progress()
        for word in ("drop", "close"):
            at.hub.order(word)
            at.progress()
        return at.settle(), f"away for {seconds:.0f} s, throttling for {seconds:.0f} s, all connections ended twice"
