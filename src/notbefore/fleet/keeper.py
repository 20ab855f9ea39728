"""``Keeper``: the partitions that this instance has, and what it writes down of each of them.

Two things are written, so that whoever takes a partition over goes on without a gap and repeats next to nothing:

- the snapshot of the fold, with the deliveries that no receiver has accepted yet, each few seconds;
- the marks of deliveries that were accepted since that snapshot. A sink is given its next delivery once the mark of the
  last one is written, so one delivery of each sink at most is accepted and not marked (``store.outbox.CONFIRMED``).

Each partition is written by a task of its own. Once the store has failed, sinks do not wait for it, and one partition
at a time tries it again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final, Protocol

from azure.core.exceptions import AzureError
from msgspec import MsgspecError

from notbefore.config.fleet import FleetConfig
from notbefore.core.delivery import Delivery, Routing, SinkThread
from notbefore.core.digest import sha256
from notbefore.fleet.checkpoints import LostPartitionError, Position, SnapshotGoneError, Snapshots
from notbefore.fleet.history import History
from notbefore.fleet.hub_clock import HubClock
from notbefore.fleet.partition import Item, Partition, mark_of, read_snapshot, read_vms
from notbefore.fleet.reading import Poison
from notbefore.fleet.silence import Heard
from notbefore.fleet.waves import Grouping, Notification

LOOK_EVERY: Final = 0.05  # seconds between two looks at what is to be written
SETTLE_EVERY: Final = 0.01  # the same while something is to be sent: the next delivery waits for it
STORE_PAUSE: Final = 2.0  # seconds until what could not be written is tried again
SNAPSHOT_EVERY: Final = 5.0  # seconds between two snapshots
SNAPSHOT_SHARE: Final = 20  # a snapshot that takes long to write is written less often: so many times as long
HISTORY_SECONDS: Final = 2.0  # for the history to be written; a disk that cannot be written is not waited for
VMS_EVERY: Final = 120.0  # seconds between two writings of the VMs that were heard from
MAX_MARKS: Final = 200  # of each kind: metadata of a blob is 8 KB at most
READ_ANEW: Final = "the hub %s: reading what it has of the last %s"
STORE_ERRORS: Final = (AzureError, OSError, TimeoutError)

log = logging.getLogger("notbefore.fleet.keeper")


class Outbox(Protocol):
    """Where notifications are put down."""

    def commit(self, made: Sequence[Notification], accepted: Collection[str]) -> list[Delivery]:
        """Write notifications with their deliveries, but for those with a mark in ``accepted``; returns all."""
        ...

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Have deliveries of another instance, or of an earlier life, sent."""
        ...

    def threads(self, event_keys: Collection[str]) -> list[SinkThread] | None:
        """What the sinks have said of these events; ``None`` where that cannot be read now."""
        ...

    def put_threads(self, threads: Sequence[SinkThread]) -> None:
        """Go on with events that another instance, or an earlier life, has notified of."""
        ...

    def settled(self, waiting: Collection[str]) -> set[str]:
        """Which of these were accepted, refused or have expired, as far as that is news."""
        ...

    def confirm(self, ids: Collection[str]) -> None:
        """It is written down that these were accepted: their sinks go on."""
        ...

    def leave(self, ids: Collection[str]) -> None:
        """Do not send these: another instance does."""
        ...

    def close(self) -> None:
        """Let go of what ``settled`` has opened."""
        ...

    def set_aside(self, partition: str, item: Item, poison: Poison) -> None:
        """Keep a record that cannot be read, with its place."""
        ...

    @property
    def routing(self) -> Routing:
        """The routes and sinks."""
        ...


class Held:
    """One partition of this instance. Marks are held in the order in which they came."""

    def __init__(self, fold: Partition) -> None:
        self.fold = fold
        self.unsettled: dict[str, Delivery] = {}  # in the outbox
        self.inherited: dict[str, None] = {}  # marks of what the fold, read again, will make again
        self.accepted: dict[str, None] = {}  # marks of what was accepted since the snapshot
        self.threads: list[SinkThread] = []  # what the sinks have said of the events that are open
        self.unsaved: list[str] = []  # ids of those whose mark is not written yet
        self.stored = False  # there is a snapshot
        self.changed = False  # something was made or accepted since the snapshot
        self.written = fold.sequence  # the sequence number of the snapshot
        self.not_before = 0.0  # monotonic seconds: no snapshot before; the next one as well
        self.vms_written_at = 0.0
        self.keeping = False  # a task is writing it
        self.writing = asyncio.Lock()

    def is_due(self, now: float) -> bool:
        """Whether it is time for a snapshot; ``now``: monotonic seconds."""
        if self.fold.sequence < 0 or not (self.changed or self.fold.sequence != self.written):
            return False
        return now >= self.not_before or len(self.accepted) > MAX_MARKS or not self.stored


class Keeper:
    """Of the consumer's event loop alone. ``failed`` is called with what the store raises."""

    def __init__(
        self,
        config: FleetConfig,
        snapshots: Snapshots,
        outbox: Outbox,
        history: History,
        failed: Callable[[Exception], None],
    ) -> None:
        self._config = config
        self._snapshots = snapshots
        self._outbox = outbox
        self._history = history
        self._failed = failed
        self.partitions: dict[str, Held] = {}
        self.ends: dict[str, int] = {}  # the last record of each partition as this client began to read
        self.clock = HubClock()
        self._configured = _digest(config, repr(outbox.routing))
        self._warned: set[str] = set()  # digests of others, of which the log says something already
        self._of_hub = 0  # how many partitions the hub has
        self._created = 0.0  # Unix seconds: since when there is the hub
        self._lost: dict[str, float] = {}  # since when, in monotonic seconds
        self._trouble = False  # the store failed at the last attempt
        self._try_at = 0.0  # monotonic seconds: when it is tried again then

    def now(self) -> float:
        """By the hub, in Unix seconds."""
        return self.clock.now(time.monotonic(), time.time())

    # ---- taking over and letting go

    async def hub_is(self, partitions: int, created: float) -> None:
        """Note how many partitions the hub has, and since when there is it, before any of them is taken.

        What was read before that was of another hub of this name: the log begins anew. While the store is away, that
        is found out later, by the offset or by the first record. ``created``: Unix seconds of the hub's clock.
        """
        self._of_hub, self._created = partitions, created
        folds = {name: held.fold for name, held in self.partitions.items()}
        known = {name: fold.enqueued if fold.sequence >= 0 else 0.0 for name, fold in folds.items()}
        with suppress(*STORE_ERRORS, MsgspecError):
            known = await self._snapshots.enqueued() | known
        for name, enqueued in known.items():
            if self._is_of_another_hub(enqueued):
                self._snapshots.begin_anew(name)
                if name in folds:
                    folds[name].begin_anew()
                log.error("partition %s: %s", name, READ_ANEW % ("was made anew", self._config.window))

    def _is_of_another_hub(self, enqueued: float) -> bool:
        return 0.0 < enqueued < self._created

    async def take(self, name: str) -> Held:
        """Go on with a partition: from memory where nobody else has had it since, else from the snapshot."""
        held = self.partitions.get(name)
        if held is None or not await self._holds(held):
            self.forget(name)
            held = await self._restored(name)
        self._lost.pop(name, None)
        self.partitions[name] = held
        log.info("partition %s: reading from sequence number %d on", name, held.fold.sequence + 1)
        return held

    async def _holds(self, held: Held) -> bool:
        """Whether nobody else has had a partition since; what was deleted was nobody's."""
        try:
            return await self._snapshots.holds(held.fold.name)
        except SnapshotGoneError:
            self._write_anew()
            return True

    def _write_anew(self) -> None:
        """Somebody has deleted what was written: all of it has to be written again."""
        for held in self.partitions.values():
            held.stored, held.changed = False, True

    async def of(self, name: str) -> Held | None:
        """A partition of which records came; ``None``: another instance has it by now."""
        return None if name in self._lost else self.partitions.get(name) or await self.take(name)

    def lost_for(self, name: str) -> float:
        """Seconds since another instance was seen to have taken a partition; 0 where none has."""
        return time.monotonic() - self._lost.get(name, time.monotonic())

    async def let_go(self, name: str) -> None:
        """Another instance is to have it: write all down, and send nothing of it any more."""
        held = self.partitions.get(name)
        if held is not None:
            with suppress(*STORE_ERRORS, LostPartitionError, SnapshotGoneError):  # what is missing, the log has
                await self._write(held, whole=True)
        self.forget(name)

    async def begin_anew(self, name: str) -> None:
        """The hub does not know the offset: it was made anew, say. The next reading starts at the window."""
        held = self.partitions.get(name) or await self.take(name)
        self._snapshots.begin_anew(name)
        held.fold.begin_anew()
        log.error("partition %s: %s", name, READ_ANEW % ("does not know the offset", self._config.window))

    async def write_all(self) -> None:
        """Write a snapshot of all, as far as that is possible."""
        for held in list(self.partitions.values()):
            with suppress(*STORE_ERRORS, LostPartitionError, SnapshotGoneError):
                await self._write(held, whole=True)

    def forget(self, name: str) -> None:
        """Send nothing of a partition any more; who takes it next goes on from what is written down."""
        held = self.partitions.pop(name, None)
        if held is not None and held.unsettled:
            self._outbox.leave(held.unsettled)

    async def _restored(self, name: str) -> Held:
        fold = self.new_fold(name)
        body, accepted = await self._snapshots.take(name)
        waiting: list[Delivery] = []
        threads: list[SinkThread] = []
        if body:
            try:
                found = read_snapshot(body)
            except (MsgspecError, ValueError) as error:
                log.error("partition %s: its snapshot cannot be read, events that are open are new: %s", name, error)  # noqa: TRY400 - its text says all
            else:
                fold.restore(found, await self._heard(name))
                self._compare(found.configured)
                if self._is_of_another_hub(found.enqueued):
                    fold.begin_anew()
                threads = found.threads
                waiting = [one for one in found.unsettled if mark_of(one.delivery_id) not in accepted]
        held = Held(fold)
        held.stored = bool(body)
        held.inherited = dict.fromkeys(accepted)
        held.unsettled = {one.delivery_id: one for one in waiting}
        held.threads = threads
        self._outbox.put_threads(threads)
        self._outbox.put(waiting)
        return held

    def _compare(self, configured: str) -> None:
        """Say that another instance, or an earlier life, groups or routes in another way; once."""
        if configured not in ("", self._configured, *self._warned):
            self._warned.add(configured)
            log.warning(
                "partitions were written down by an instance with another configuration (group_by, group_wait,"
                " group_interval, over_after, routes or the names of sinks): where it still runs, waves are split and"
                " notifications go to other sinks, depending on who reads a partition. Give all instances the same one"
            )

    async def _heard(self, name: str) -> dict[str, Heard]:
        """The VMs that were heard from; none where that cannot be read: they are, as they send their next heartbeat."""
        body = await self._snapshots.read_vms(name)
        try:
            return read_vms(body) if body else {}
        except (MsgspecError, ValueError) as error:
            log.error("partition %s: the VMs that were heard from cannot be read: %s", name, error)  # noqa: TRY400 - as above
            return {}

    def new_fold(self, name: str) -> Partition:
        """The fold of a partition of which nothing is known."""
        config = self._config
        times = config.group_wait.seconds, config.group_interval.seconds, config.over_after.seconds
        grouping = Grouping(config.group_by, *times, self._configured, self._outbox.routing.routes)
        backlog = self.ends.get(name, -1)
        return Partition(name, grouping, self._outbox.set_aside, partitions=self._of_hub, backlog=backlog)

    # ---- what is made and accepted

    def commit(self, held: Held, made: Sequence[Notification]) -> None:
        """Have notifications sent, but for what was accepted before the partition was taken over."""
        for one in self._outbox.commit(made, held.inherited):
            mark = mark_of(one.delivery_id)
            if mark in held.inherited:
                del held.inherited[mark]
                held.accepted[mark] = None
            else:
                held.unsettled[one.delivery_id] = one
        held.changed = True

    async def run(self) -> None:
        """Write down what is to be, until this is canceled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                busy = any(held.unsettled for held in self.partitions.values())
                await asyncio.sleep(SETTLE_EVERY if busy else LOOK_EVERY)
                self._settle()
                for held in list(self.partitions.values()):
                    self._begin(held, time.monotonic(), tasks)

    def _begin(self, held: Held, now: float, tasks: asyncio.TaskGroup) -> None:
        """Have a partition written, if that is due."""
        if self._trouble and held.unsaved:
            self._outbox.confirm(held.unsaved)
            held.unsaved = []
        if held.keeping or not (held.unsaved or held.is_due(now)) or (self._trouble and now < self._try_at):
            return
        self._try_at = now + STORE_PAUSE
        held.keeping = True
        tasks.create_task(self._keep(held, whole=held.is_due(now)))

    def _settle(self) -> None:
        """Note what was accepted, refused for good, or has expired: whoever takes over is not to send it again."""
        every = {one for held in self.partitions.values() for one in held.unsettled}
        found = self._outbox.settled(every) if every else set()
        for held in self.partitions.values() if found else ():
            settled = [one for one in held.unsettled if one in found]
            for one in settled:
                del held.unsettled[one]
            held.accepted |= dict.fromkeys(mark_of(one) for one in settled)
            held.unsaved += settled
            held.changed |= bool(settled)

    async def _keep(self, held: Held, *, whole: bool) -> None:
        accepted, held.unsaved = held.unsaved, []
        try:
            await self._write(held, whole=whole)
            self._trouble = False
        except LostPartitionError:
            log.warning("partition %s: another instance has it by now", held.fold.name)
            self._lost[held.fold.name] = time.monotonic()
            self.forget(held.fold.name)
        except SnapshotGoneError:
            log.warning("partition %s: its checkpoint was deleted: it is written anew", held.fold.name)
            self._write_anew()
        except STORE_ERRORS as error:
            self._trouble, self._try_at = True, time.monotonic() + STORE_PAUSE
            self._failed(error)
        held.keeping = False
        if accepted:  # written or not: a store that is away keeps no notification waiting
            self._outbox.confirm(accepted)

    async def _write(self, held: Held, *, whole: bool) -> None:
        """Write a snapshot with its marks, or the marks alone."""
        fold = held.fold
        async with held.writing:
            if not whole and held.stored:
                await self._snapshots.mark(fold.name, [*held.inherited, *held.accepted])
                return
            if fold.sequence < 0 or not (held.changed or fold.sequence != held.written):
                return
            began = time.monotonic()
            covered, inherited = list(held.accepted), list(held.inherited)[-MAX_MARKS:]
            threads = self._outbox.threads(fold.event_keys())
            held.threads = held.threads if threads is None else threads
            body = fold.snapshot(list(held.unsettled.values()), held.threads)
            position = Position(fold.offset, fold.sequence, fold.partitions, fold.enqueued)
            held.changed = False  # what comes while this is written is for the next one
            try:
                if self._history.waiting:  # events that the snapshot no longer has
                    await asyncio.to_thread(self._history.flush, HISTORY_SECONDS)
                await self._snapshots.write(fold.name, body, position, inherited)
            except BaseException:
                held.changed = True
                raise
            for mark in covered:
                held.accepted.pop(mark, None)
            held.stored, held.written = True, position.sequence
            took = time.monotonic() - began
            held.not_before = time.monotonic() + max(SNAPSHOT_EVERY, SNAPSHOT_SHARE * took)
            if time.monotonic() - held.vms_written_at > VMS_EVERY:
                held.vms_written_at = time.monotonic()
                await self._snapshots.write_vms(fold.name, fold.vms())


def _digest(config: FleetConfig, routes: str) -> str:
    """What two instances have to have in common, as 16 hex digits."""
    times = (config.group_wait.seconds, config.group_interval.seconds, config.over_after.seconds)
    return sha256(repr((config.group_by, times, routes)).encode())[:16]
