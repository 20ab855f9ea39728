"""``notbefore fleet`` under faults, with an account of what must have been notified that shares no
code with it.

A writer sends the changes of many VMs and Azure's own messages to the hub, as bytes of its own
making; a receiver notes what arrives. Each event is announced, started and finished by each VM of
its scale set, by Azure, or by both: so three notifications are wanted of it, in this order, each
under one delivery id of its own.
"""

import json
import random
import shutil
import signal
import threading
import time
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml
from azure.eventhub.exceptions import EventHubError

from support.agent import eventually
from support.azurite import Azurite
from support.event_grid import encoded, message, resource_id
from support.fleet_instance import RunningFleet, configured, send
from support.hub import Hub
from support.peers import HttpPeer
from support.random_fleets import record_of

STEPS = ("announced", "started", "finished")
# the statuses that Azure itself reports
STATUSES = {"announced": "Scheduled", "started": "Started", "finished": "Completed"}
# every third event is known from one source, and every third from both
ONLY_VMS = 1
ONLY_AZURE = 2
VMS = 3  # of each scale set
SETS = 40
PAUSE = 0.5  # seconds between two turns of the writer
LIFE = 6  # of an event, in such turns
PATIENCE = 240.0  # seconds without anything new, after which the rest counts as lost
STORE = "notbefore_fleet_errors_total"


def change_of(event: str, vm: str, step: str, not_before: datetime) -> bytes:
    """What the agent of a VM sends."""
    scale_set = vm.partition("_")[0]
    now = datetime.now(UTC).isoformat()
    return record_of(
        vm,
        step,
        ("sub", "rg"),
        scale_set=scale_set,
        time=now,
        first_seen=now,
        not_before=not_before.isoformat(),
        id=event,
        change_id=f"{event}-{step}",
        type="Reboot",
        resources=[f"{scale_set}_0"],
    )


def message_of(event: str, scale_set: str, step: str, not_before: datetime) -> bytes:
    """What Event Grid delivers of the same step."""
    return encoded(
        message(
            STATUSES[step],
            event,
            at=datetime.now(UTC),
            not_before=not_before if step == "announced" else None,
            resource=resource_id(name=scale_set, event_id=event),
            Resources=[f"{scale_set}_0"],
        )
    )


class Writer(threading.Thread):
    """Begins an event each turn until it is to end, and sends all of their changes, until the hub
    has each of them.
    """

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub
        self._over = threading.Event()
        self._not_before = datetime.now(UTC) + timedelta(hours=1)  # Azure's, the same on each VM
        self.begun: list[str] = []

    def end(self) -> None:
        """Begin nothing more; what has begun comes to its end."""
        self._over.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        turn = 0
        while not self._over.is_set() or turn < len(self.begun) + 2 * LIFE:
            if not self._over.is_set():
                self.begun.append(f"E{turn}")
            for age, step in enumerate(
                STEPS
            ):  # an event begins, an older one starts, a still older one ends
                number = turn - age * LIFE
                if 0 <= number < len(self.begun):
                    name = f"set{number % SETS}"
                    changes: list[bytes] = []
                    if number % 3 != ONLY_AZURE:
                        for vm in range(VMS):
                            change = change_of(f"E{number}", f"{name}_{vm}", step, self._not_before)
                            changes.append(change)
                    if number % 3 != ONLY_VMS:
                        changes.append(message_of(f"E{number}", name, step, self._not_before))
                    self._send(f"sub/rg/{name}", changes)
            turn += 1
            time.sleep(PAUSE)

    def _send(self, key: str, bodies: list[bytes]) -> None:
        """Send until the hub has it: what comes next waits, so the order is kept."""
        while True:
            with suppress(EventHubError, OSError):
                send(self._hub, bodies, key)
                return
            time.sleep(PAUSE)


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
        places = [
            [first[event, step] for step in STEPS if (event, step) in first] for event in events
        ]
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
            f"{self.wanted:,} notifications wanted, {self.lost} lost, {self.out_of_order} events"
            f" out of order, {self.twice} notified twice, {self.repeated} repeated under the"
            " same id"
        )


def notified(hook: HttpPeer) -> list[tuple[str, str, str]]:
    """Event, step and delivery id of what the receiver has accepted, in the order in
    which it came.
    """
    found = []
    for one in list(hook.requests):
        if not one.body.endswith(b"}"):  # its courier was killed while it sent it
            continue
        record = json.loads(one.body)
        event = record["azure.scheduled_event.id"]
        step = record["azure.scheduled_event.change"]
        found.append((event, step, one.headers["x-notbefore-delivery-id"]))
    return found


class Scene(ExitStack):
    """A hub, perhaps a checkpoint store, a receiver, instances that read the hub, and a writer."""

    def __init__(self, directory: Path, instances: int, *, store: bool = True) -> None:
        super().__init__()
        self._directory = directory
        self.hub = self.enter_context(Hub(directory, partitions=8))
        self.hook = self.enter_context(HttpPeer())
        self.blobs = self.enter_context(Azurite(directory)) if store else None
        self.instances: list[RunningFleet] = []
        self._ended: list[RunningFleet] = []
        self.callback(self._end)
        options: dict[str, Any] = {"rebalance": "1s", "takeover": "5s"}
        if self.blobs is not None:
            options["checkpoints"] = {
                "connection_string": self.blobs.connection_string,
                "container": "notbefore",
            }
        self._config = configured(directory, self.hub, self.hook.url, **options)
        values = yaml.safe_load(self._config.read_text(encoding="utf-8"))
        # by default what announces an event is not sent any more once that is over: here it is
        # wanted
        values["sinks"]["hook"]["webhook"]["expire_on_end"] = False
        self._config.write_text(yaml.safe_dump(values), encoding="utf-8")
        self.writer = Writer(self.hub)
        for _ in range(instances):
            self.add()

    def __enter__(self) -> Self:
        # what is over before somebody reads its partition is history, and nobody's news
        eventually(lambda: self.metric("notbefore_fleet_partitions") == 8, patience=PATIENCE)
        self.writer.start()
        self.progress()
        return self

    def _end(self) -> None:
        self.writer.end()
        for one in self.instances:
            one.__exit__()

    def add(self, state: Path | None = None) -> None:
        number = len(self.instances) + len(self._ended)
        self.instances.append(
            RunningFleet(self._config, state or self._directory / f"instance{number}")
        )

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
        self.writer.end()
        since = time.monotonic()
        seen = 0
        while (
            account := Account.of(self.writer.begun, self.hook)
        ).lost and time.monotonic() - since < PATIENCE:
            time.sleep(0.5)
            if len(self.hook.requests) > seen:
                since = time.monotonic()
                seen = len(self.hook.requests)
        return account


def _removed(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


# ---- the faults; each returns the account, and what else is to be known


def kills(directory: Path, times: int, instances: int = 2, stops: int = 0) -> tuple[Account, str]:
    """Instances of which one is killed again and again.

    Every other time its disk is gone with it, if it has a store.

    ``stops``: how often another one hangs as well, for some seconds, perhaps longer than
    ``takeover``.
    """
    with Scene(directory, instances, store=instances > 1) as at:
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
        said = (
            f"{instances} instances, {times} kills, {stops} stops, {at.takeovers()} takeovers of a"
            " partition"
        )
        return account, said


def store_away(directory: Path, seconds: float) -> tuple[Account, str]:
    """The checkpoint store is away, and then it hangs; meanwhile an instance is killed."""
    with Scene(directory, 2) as at:
        assert at.blobs
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
        return (
            at.settle(),
            (
                f"away and hung for {seconds:.0f} s each: {at.notified() - began} were notified"
                " meanwhile"
            ),
        )


def container_deleted(directory: Path) -> tuple[Account, str]:
    """Somebody deletes the container of the checkpoints under running instances, and makes it
    again.
    """
    with Scene(directory, 2) as at:
        assert at.blobs
        at.progress()
        time.sleep(6)  # snapshots are written
        at.blobs.delete_container()
        eventually(lambda: at.metric(STORE))
        at.blobs.make_container()
        # each instance has written what it has: before that, only its memory knows it
        time.sleep(12)
        at.add(at.kill())
        at.progress(12)
        eventually(lambda: at.metric("notbefore_fleet_partitions") == 8)
        return at.settle(), "deleted and made again, and an instance killed after it"


def hub_away(directory: Path, seconds: float) -> tuple[Account, str]:
    """The hub is away, throttles, ends connections."""
    with Scene(directory, 1, store=False) as at:
        one = at.instances[0].ready()
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
        return (
            at.settle(),
            (
                f"away for {seconds:.0f} s, throttling for {seconds:.0f} s, all connections ended"
                " twice"
            ),
        )
