"""``notbefore fleet`` under faults, with an account of its notifications.

A writer sends the changes of many VMs, and Azure's own messages, to the hub. A receiver keeps the
notifications. Each event is announced, started and finished; each VM of its scale set reports that,
or Azure, or both. The account expects three notifications of each event, in this order, under three
delivery ids. It shares no code with the fleet.
"""

import json
import random
import shutil
import signal
import threading
import time
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml
from azure.eventhub.exceptions import EventHubError

from support.agent import eventually
from support.azurite import Azurite
from support.event_grid import encoded, message, resource_id
from support.fleet_instance import RunningFleet, send, write_fleet_config
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
PARTITIONS = 8
PAUSE = 0.5  # seconds between two turns of the writer
LIFE = 6  # turns from the announcement of an event to its start, and from there to its end
PATIENCE = 240.0  # seconds without a new notification, after which the rest counts as lost
ERRORS = "notbefore_fleet_errors_total"


def change_of(event: str, vm: str, step: str, not_before: datetime) -> bytes:
    """Return a change as the agent of a VM sends it."""
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
    """Return the message of Event Grid about the same step."""
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
    """Announces an event each turn until ``end``, and sends the later changes of these events."""

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub
        self._ending = threading.Event()
        self._not_before = datetime.now(UTC) + timedelta(hours=1)  # the same on each VM
        self.events: list[str] = []  # ids

    def end(self) -> None:
        """Announce no more events, and wait until those that were announced are finished."""
        self._ending.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """In each turn, announce an event, start an older one, and finish a still older one."""
        turn = 0
        while not self._ending.is_set() or turn < len(self.events) + 2 * LIFE:
            if not self._ending.is_set():
                self.events.append(f"E{turn}")
            for age, step in enumerate(STEPS):
                number = turn - age * LIFE
                if 0 <= number < len(self.events):
                    self._report(number, step)
            turn += 1
            time.sleep(PAUSE)

    def _report(self, number: int, step: str) -> None:
        """Send a step of an event as the VMs of a scale set, Azure, or both report it."""
        event = f"E{number}"
        name = f"set{number % SETS}"
        changes: list[bytes] = []
        if number % 3 != ONLY_AZURE:
            for vm in range(VMS):
                changes.append(change_of(event, f"{name}_{vm}", step, self._not_before))
        if number % 3 != ONLY_VMS:
            changes.append(message_of(event, name, step, self._not_before))
        self._send(f"sub/rg/{name}", changes)

    def _send(self, key: str, bodies: list[bytes]) -> None:
        """Send until the hub accepts. The next change waits, so that the order is kept."""
        while True:
            with suppress(EventHubError, OSError):
                send(self._hub, bodies, key)
                return
            time.sleep(PAUSE)


class Account(NamedTuple):
    """Counts the differences between the expected and the received notifications."""

    wanted: int  # notifications
    lost: int
    out_of_order: int  # events
    twice: int  # the same step under another delivery id, so that people see it again
    repeated: int  # the same step under the same delivery id

    @classmethod
    def of(cls, events: list[str], hook: HttpPeer) -> "Account":
        """Compare the notifications at the receiver with those expected for these events."""
        notifications = notified(hook)
        first: dict[tuple[str, str], int] = {}  # event and step -> index of the first notification
        for index, (event, step, _) in enumerate(notifications):
            first.setdefault((event, step), index)
        lost = 0
        out_of_order = 0
        for event in events:
            indices = [first[event, step] for step in STEPS if (event, step) in first]
            lost += len(STEPS) - len(indices)
            out_of_order += indices != sorted(indices)
        different = set(notifications)
        return cls(
            wanted=len(events) * len(STEPS),
            lost=lost,
            out_of_order=out_of_order,
            twice=len(different) - len(first),
            repeated=len(notifications) - len(different),
        )

    @property
    def line(self) -> str:
        """The account in words."""
        return (
            f"{self.wanted:,} notifications wanted, {self.lost} lost, {self.out_of_order} events"
            f" out of order, {self.twice} notified twice, {self.repeated} repeated under the"
            " same id"
        )


def notified(hook: HttpPeer) -> list[tuple[str, str, str]]:
    """Return event, step and delivery id of each notification, in the order of arrival."""
    notifications: list[tuple[str, str, str]] = []
    for request in list(hook.requests):
        if not request.body.endswith(b"}"):  # a courier was killed while it sent this
            continue
        record = json.loads(request.body)
        event = record["azure.scheduled_event.id"]
        step = record["azure.scheduled_event.change"]
        notifications.append((event, step, request.headers["x-notbefore-delivery-id"]))
    return notifications


class Scene(ExitStack):
    """A hub, a receiver, a writer and instances, and with ``store`` a checkpoint store."""

    def __init__(self, directory: Path, instances: int, *, store: bool = True) -> None:
        super().__init__()
        self._directory = directory
        self.hub = self.enter_context(Hub(directory, partitions=PARTITIONS))
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
        self._config = write_fleet_config(directory, self.hub, self.hook.url, **options)
        values = yaml.safe_load(self._config.read_text(encoding="utf-8"))
        # otherwise the courier drops the announcement of an event that has ended
        values["sinks"]["hook"]["webhook"]["expire_on_end"] = False
        self._config.write_text(yaml.safe_dump(values), encoding="utf-8")
        self.writer = Writer(self.hub)
        for _ in range(instances):
            self.add()

    def __enter__(self) -> Self:
        try:
            # the fleet does not notify events that end before an instance reads their partition
            self.wait_until_all_are_read()
            self.writer.start()
            self.progress()
        except BaseException:
            self.close()
            raise
        return self

    def wait_until_all_are_read(self) -> None:
        """Wait until the instances read all partitions."""

        def all_read() -> bool:
            return self.metric("notbefore_fleet_partitions") == PARTITIONS

        eventually(all_read, patience=PATIENCE)

    def _end(self) -> None:
        self.writer.end()
        for instance in self.instances:
            instance.__exit__()

    def add(self, state: Path | None = None) -> None:
        """Start an instance, on this state directory or a new one."""
        if state is None:
            number = len(self.instances) + len(self._ended)
            state = self._directory / f"instance{number}"
        self.instances.append(RunningFleet(self._config, state))

    def kill(self, number: int = -1, *, disk: bool = False) -> Path:
        """Kill an instance, and return its state directory; with ``disk``, delete that too."""
        instance = self.instances.pop(number)
        self._ended.append(instance)
        instance.stop(signal.SIGKILL)
        if disk:
            # its courier may still write for a moment
            eventually(lambda: _removed(instance.state))
        return instance.state

    def notified(self) -> int:
        """Return how many different notifications have arrived."""
        return len(set(notified(self.hook)))

    def progress(self, count: int = 6) -> None:
        """Wait for so many more notifications."""
        wanted = self.notified() + count
        eventually(lambda: self.notified() >= wanted, patience=PATIENCE)

    def wait_for_snapshots(self) -> None:
        """Wait until the checkpoint store has a new snapshot of each partition."""
        assert self.blobs is not None
        store = self.blobs
        start = time.time()

        def all_written() -> bool:
            times = [snapshot.at for snapshot in store.snapshots()]
            return len(times) == PARTITIONS and min(times) > start

        eventually(all_written, patience=PATIENCE)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over the instances that answer."""
        total = 0.0
        for instance in self.instances:
            with suppress(OSError):
                total += instance.metric_sum(name)
        return total

    def takeovers(self) -> int:
        """Return how often instances began to read a partition, according to their logs."""
        instances = self.instances + self._ended
        return sum(instance.log.count(": reading from sequence") for instance in instances)

    def settle(self) -> Account:
        """End the writer, wait for the missing notifications, and return the account.

        Without progress for ``PATIENCE`` seconds, they count as lost.
        """
        self.writer.end()
        last_progress = time.monotonic()
        seen = 0
        account = Account.of(self.writer.events, self.hook)
        while account.lost and time.monotonic() - last_progress < PATIENCE:
            time.sleep(0.5)
            if len(self.hook.requests) > seen:
                last_progress = time.monotonic()
                seen = len(self.hook.requests)
            account = Account.of(self.writer.events, self.hook)
        return account


def _removed(path: Path) -> bool:
    """Remove a directory, and return whether it is gone."""
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


# ---- the faults; each returns the account, and a description


def kills(directory: Path, times: int, instances: int = 2, stops: int = 0) -> tuple[Account, str]:
    """Kill one instance again and again.

    With a checkpoint store, every other kill also deletes the disk. ``stops``: how often another
    instance hangs for some seconds, perhaps longer than ``takeover``.
    """
    has_store = instances > 1
    with Scene(directory, instances, store=has_store) as scene:
        dice = random.Random(16)  # noqa: S311 - no secret
        for number in range(times):
            time.sleep(dice.random())
            scene.add(scene.kill(0, disk=has_store and number % 4 < 2))
            if number < stops:
                scene.instances[0].process.send_signal(signal.SIGSTOP)
                time.sleep(1 + 8 * dice.random())
                scene.instances[0].process.send_signal(signal.SIGCONT)
            scene.progress(1)
        account = scene.settle()
        description = (
            f"{instances} instances, {times} kills, {stops} stops, {scene.takeovers()} takeovers"
            " of a partition"
        )
        return account, description


def store_away(directory: Path, seconds: float) -> tuple[Account, str]:
    """Stop the checkpoint store, and then let it hang; kill an instance meanwhile."""
    with Scene(directory, 2) as scene:
        assert scene.blobs
        before = scene.notified()

        scene.blobs.stop()
        _kill_meanwhile(scene, seconds)
        scene.blobs.start()
        _recover(scene)

        scene.blobs.hang()
        _kill_meanwhile(scene, seconds)
        scene.blobs.resume()
        _recover(scene)

        account = scene.settle()
        description = (
            f"away and hung for {seconds:.0f} s each: {scene.notified() - before} notifications"
            " meanwhile"
        )
        return account, description


def _kill_meanwhile(scene: Scene, seconds: float) -> None:
    """Kill an instance with its disk in the middle of so many seconds."""
    time.sleep(seconds / 2)
    scene.add(scene.kill(disk=True))
    time.sleep(seconds / 2)


def _recover(scene: Scene) -> None:
    """Wait until the instances have shared and written all partitions again."""
    scene.progress()
    scene.wait_until_all_are_read()
    scene.wait_for_snapshots()


def container_deleted(directory: Path) -> tuple[Account, str]:
    """Delete the container of the checkpoints under running instances, and make it again."""
    with Scene(directory, 2) as scene:
        assert scene.blobs
        scene.progress()
        scene.wait_for_snapshots()
        scene.blobs.delete_container()
        eventually(lambda: scene.metric(ERRORS))
        scene.blobs.make_container()
        scene.wait_for_snapshots()
        scene.add(scene.kill())
        scene.progress(12)
        scene.wait_until_all_are_read()
        account = scene.settle()
        return account, "deleted and made again, and an instance killed after it"


def hub_away(directory: Path, seconds: float) -> tuple[Account, str]:
    """Kill the hub, let it throttle, and let it end connections."""
    with Scene(directory, 1, store=False) as scene:
        instance = scene.instances[0].wait_until_ready()
        scene.hub.kill()
        eventually(lambda: not instance.answers("/readyz"))
        assert instance.answers("/healthz")
        time.sleep(seconds)
        scene.hub.start()
        scene.progress()

        scene.hub.order("busy")
        time.sleep(seconds)
        scene.hub.order("calm")
        scene.progress()

        for order in ("drop", "close"):
            scene.hub.order(order)
            scene.progress()

        account = scene.settle()
        description = (
            f"away for {seconds:.0f} s, throttling for {seconds:.0f} s, all connections ended twice"
        )
        return account, description
