"""``Keeper``: the partitions that this instance has, and the snapshot that it writes of each of them.

A snapshot holds the fold, what waits in the outbox, and the position. It is written soon after something was notified
or accepted, every few seconds otherwise, and before a partition is let go; where another instance has written it
meanwhile, the partition is that one's, and nothing of it is sent here any more.
"""

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from azure.core.exceptions import AzureError
from msgspec import Struct

from notbefore.config.fleet import FleetConfig
from notbefore.core.delivery import Routing
from notbefore.core.digest import sha256
from notbefore.core.lifecycle import OUTCOMES
from notbefore.fleet.checkpoints import LostPartitionError, Position, SnapshotGoneError, Snapshots
from notbefore.fleet.history import History, PastEvent
from notbefore.fleet.hub_clock import HubClock
from notbefore.fleet.hub_errors import store_explained
from notbefore.fleet.inventory import Inventory
from notbefore.fleet.mutes import NOTE, Mute, is_muted, read_mutes
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.partition import Item, Partition, compressed, read_snapshot
from notbefore.fleet.reading import Poison
from notbefore.fleet.waves import Grouping, Notification

LOOK_EVERY: Final = 0.05  # seconds between two looks at what is to be written
SOON: Final = 0.2  # seconds after something was notified or accepted
EVERY: Final = 5.0  # seconds between two snapshots otherwise
SHARE: Final = 5  # a snapshot that takes long to write is written less often: so many times as long
MUTES_EVERY: Final = 10.0  # seconds between two looks at what is muted
STORE_PAUSE: Final = 2.0  # seconds until what could not be written is tried again
MAX_WAITING: Final = 5_000  # events, and notifications, that wait for the disk of the history
READ_ANEW: Final = "the hub %s: reading what it has of the last %s"
STORE_ERRORS: Final = (AzureError, OSError, TimeoutError)

log = logging.getLogger("notbefore.fleet.keeper")


class UnreadableSnapshotError(Exception):
    """A snapshot cannot be read: it was put aside, and its partition is to be read from the window on."""


class Parts(Struct, frozen=True):
    """What a consumer works with; ``snapshots`` makes the store, with a credential."""

    snapshots: Callable[[Any], Snapshots]
    outbox: FleetOutbox
    clock: HubClock
    history: History
    on_poison: Callable[[str, Item, Poison], None]
    write_record: Callable[[bytes], None]
    inventory: Inventory | None = None


class Held:
    """One partition of this instance. Times are monotonic seconds."""

    def __init__(self, fold: Partition) -> None:
        self.fold = fold
        self.past: deque[PastEvent] = deque(maxlen=MAX_WAITING)  # that are not in the history yet
        self.muted: set[str] = set()  # event keys of open waves that nobody was notified of
        self.news_since: float | None = None  # when something was notified or accepted that no snapshot has
        self.written = fold.sequence  # the sequence number of the snapshot
        self.written_at = time.monotonic()
        self.not_before = 0.0  # the next snapshot
        self.writing = asyncio.Lock()

    def is_due(self, now: float) -> bool:
        """Whether it is time for a snapshot."""
        if self.fold.sequence < 0 or now < self.not_before or self.writing.locked():
            return False
        if self.news_since is not None and now >= self.news_since + SOON:
            return True
        return self.fold.sequence != self.written and now >= self.written_at + EVERY


class Keeper:
    """Of the consumer's event loop alone. ``failed`` is called with what the store, or the history, raises."""

    def __init__(
        self,
        config: FleetConfig,
        snapshots: Snapshots,
        parts: Parts,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._config = config
        self._snapshots = snapshots
        self._outbox = parts.outbox
        self._history = parts.history
        self._on_poison = parts.on_poison
        self._failed = failed
        self.partitions: dict[str, Held] = {}
        self.ends: dict[str, int] = {}  # the last record of each partition as this client began to read
        self.clock = parts.clock
        self.notified: deque[tuple[float, bytes]] = deque(maxlen=MAX_WAITING)  # that are not in the history yet
        self._grouping = grouping_of(config, parts.outbox.routing)
        self._warned: set[str] = set()  # digests of others, of which the log says something already
        self._of_hub = 0  # how many partitions the hub has
        self._created = 0.0  # Unix seconds: since when there is the hub
        self._lost: dict[str, float] = {}  # since when, in monotonic seconds
        self.trouble = ""  # why no snapshot can be written, in words
        self._try_at = 0.0  # monotonic seconds: when a store that failed is tried again
        self._tasks: set[asyncio.Task[None]] = set()
        self._history_busy = False
        self.mutes: list[Mute] = []
        self._mutes_at = 0.0  # monotonic seconds: when they are read next

    def now(self) -> float:
        """By the hub, in Unix seconds."""
        return self.clock.now(time.monotonic(), time.time())

    # ---- taking over and letting go

    def hub_is(self, partitions: int, created: float) -> None:
        """Note how many partitions the hub has, and since when there is it, before any of them is taken.

        What was read before that was of another hub of this name: the log begins anew. While the store is away, that
        is found out later, by the offset or by the first record. ``created``: Unix seconds of the hub's clock.
        """
        self._of_hub, self._created = partitions, created
        for name, held in self.partitions.items():
            if self._is_of_another_hub(held.fold.enqueued):
                self._read_anew(held.fold, name, "was made anew")

    def _is_of_another_hub(self, enqueued: float) -> bool:
        return 0.0 < enqueued < self._created

    def _read_anew(self, fold: Partition, name: str, why: str) -> None:
        self._snapshots.begin_anew(name)
        fold.begin_anew()
        log.error("partition %s: %s", name, READ_ANEW % (why, self._config.window))

    async def take(self, name: str) -> Held:
        """Go on with a partition: from memory where nobody else has had it since, else from the snapshot.

        Raises ``UnreadableSnapshotError``, and what the store raises.
        """
        held = self.partitions.get(name)
        if held is None or not await self._is_ours(held):
            self.forget(name)
            held = await self._restored(name)
        self._lost.pop(name, None)
        self.partitions[name] = held
        log.info("partition %s: reading from sequence number %d on", name, held.fold.sequence + 1)
        return held

    async def _is_ours(self, held: Held) -> bool:
        """Whether nobody else has had a partition since; what was deleted was nobody's."""
        try:
            await self._write(held)
        except LostPartitionError:
            return False
        except SnapshotGoneError:
            pass
        return True

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
            await self._try_to_write(held)
        self.forget(name)

    async def begin_anew(self, name: str) -> None:
        """The hub does not know the offset: it was made anew, say. The next reading starts at the window."""
        held = self.partitions.get(name) or await self.take(name)
        self._read_anew(held.fold, name, "does not know the offset")

    async def write_all(self) -> None:
        """Write a snapshot of all at once, as far as that is possible: a slow store keeps nobody waiting for each."""
        await asyncio.gather(*map(self._try_to_write, list(self.partitions.values())))
        await self._write_history()

    async def _try_to_write(self, held: Held) -> None:
        with suppress(*STORE_ERRORS, LostPartitionError, SnapshotGoneError):  # what is missing, the log has
            await self._write(held)

    def forget(self, name: str) -> None:
        """Send nothing of a partition any more; who takes it next goes on from what is written down."""
        if self.partitions.pop(name, None) is not None:
            self._outbox.leave(name)

    async def offsets(self, names: Sequence[str]) -> dict[str, str]:
        """Where to go on reading, of the partitions that have a snapshot of this hub. Raises what the store does."""
        found = {}
        for name in names:
            with suppress(ValueError):  # `take` puts it aside
                snapshot = read_snapshot(await self._snapshots.read(name) or b"")
                if snapshot.offset and not self._is_of_another_hub(snapshot.enqueued):
                    found[name] = snapshot.offset
        held = {name: one.fold.offset for name, one in self.partitions.items()}
        return {name: offset for name, offset in (found | held).items() if offset}

    async def _restored(self, name: str) -> Held:
        body = await self._snapshots.take(name)
        if not body:
            return await self._begun(name)
        held = Held(self._fold(name))
        try:
            found = read_snapshot(body)
            held.fold.restore(found)
        except ValueError as error:
            held = await self._put_aside(name, body, error)
            if self._snapshots.sdk_store is None:  # `offsets` has left it out: it is read from the window on
                return held
            raise UnreadableSnapshotError(name) from error
        self._compare(found.configured)
        if self._is_of_another_hub(found.enqueued):
            held.fold.begin_anew()
        held.past.extend(found.past)
        held.muted = set(found.muted)
        held.written = held.fold.sequence
        self._outbox.adopt(name, found.outbox, max(0.0, self.now() - found.at))
        return held

    async def _begun(self, name: str) -> Held:
        """Read a partition for the first time. That is written before: who reads it next knows what was news then."""
        held = Held(self._fold(name, self.ends.get(name, -1)))
        try:
            with suppress(SnapshotGoneError):  # the container has just been made: it is written with the first record
                await self._write(held)
        except LostPartitionError:  # another instance was faster
            return await self._restored(name)
        return held

    async def _put_aside(self, name: str, body: bytes, error: ValueError) -> Held:
        """Keep what cannot be read, and write that the partition is to be read from the window on."""
        where = await self._snapshots.put_aside(name, body)
        self._snapshots.begin_anew(name)
        held = Held(self._fold(name))  # what was over by now may not have been notified: it is no history
        await self._write(held)
        log.error(
            "partition %s: its snapshot cannot be read (%s). It is in %s now. Events that are open are new: reading"
            " what the hub has of the last %s",
            name, error, where, self._config.window,
        )  # fmt: skip
        return held

    def _compare(self, configured: str) -> None:
        """Say that another instance, or an earlier life, groups or routes in another way; once."""
        if configured not in ("", self._grouping.configured, *self._warned):
            self._warned.add(configured)
            log.warning(
                "partitions were written down by an instance with another configuration (group_by, group_wait,"
                " group_interval, over_after, routes or the names of sinks): where it still runs, waves are split and"
                " notifications go to other sinks, depending on who reads a partition. Give all instances the same one"
            )

    def _fold(self, name: str, backlog: int = -1) -> Partition:
        return Partition(name, self._grouping, self._on_poison, partitions=self._of_hub, backlog=backlog)

    # ---- what is made and written

    def commit(self, held: Held, made: Sequence[Notification]) -> list[bytes]:
        """Have notifications sent, but for those that are muted; returns their records."""
        sent = {one.change.id for one in made if not self._is_muted(held, one)}
        lines = self._outbox.commit(held.fold.name, made, sent)
        self.notified.extend((one.change.time.timestamp(), line) for one, line in zip(made, lines, strict=True))
        if held.news_since is None:
            held.news_since = time.monotonic()
        return lines

    def _is_muted(self, held: Held, made: Notification) -> bool:
        """Whether nobody is notified. What ends is muted only where its beginning was."""
        key = made.change.event.key
        if made.change.kind in OUTCOMES:
            return key in held.muted
        if not is_muted(self.mutes, self.now(), made):
            held.muted.discard(key)
            return False
        if made.change.previous is None:
            held.muted.add(key)
        return True

    async def _read_mutes(self) -> None:
        try:
            self.mutes = read_mutes(await self._snapshots.read_note(NOTE))
        except (*STORE_ERRORS, ValueError) as error:
            self._failed("store", error)

    async def run(self) -> None:
        """Write down what is to be, until this is canceled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            now = time.monotonic()
            if now >= self._mutes_at and self._of_hub:
                self._mutes_at = now + MUTES_EVERY
                self._begin(self._read_mutes())
            for name in self._outbox.settled():
                held = self.partitions.get(name)
                if held is not None and held.news_since is None:
                    held.news_since = now
            for held in list(self.partitions.values()):
                if held.is_due(now) and now >= self._try_at:
                    self._begin(self._keep(held))
                    await asyncio.sleep(0)  # it holds the lock now
            if (self.notified or any(held.past for held in self.partitions.values())) and not self._history_busy:
                self._begin(self._write_history())

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, held: Held) -> None:
        name = held.fold.name
        try:
            await self._write(held)
            self.trouble = ""
        except LostPartitionError:
            log.warning("partition %s: another instance has it by now", name)
            self._lost[name] = time.monotonic()
            self.forget(name)
        except SnapshotGoneError:
            log.warning("partition %s: its checkpoint was deleted: all are written anew", name)
            for one in self.partitions.values():
                one.news_since = time.monotonic()
        except STORE_ERRORS as error:
            self._try_at, self.trouble = time.monotonic() + STORE_PAUSE, store_explained(error)
            self._failed("store", error)

    async def _write(self, held: Held) -> None:
        fold = held.fold
        async with held.writing:
            began, news = time.monotonic(), held.news_since
            outbox = self._outbox.part(fold.name, fold.event_keys())
            held.muted &= fold.event_keys()
            snapshot = fold.snapshot(self.now(), outbox, held.past, held.muted)
            position = Position(fold.offset, fold.sequence, fold.enqueued if fold.sequence >= 0 else 0.0)
            held.news_since = None  # what comes while this is written is for the next one
            try:
                body = await asyncio.to_thread(compressed, snapshot)
                await self._snapshots.write(fold.name, body, position)
            except BaseException:
                held.news_since = news if news is not None else held.news_since
                raise
            held.written, held.written_at = position.sequence, time.monotonic()
            held.not_before = held.written_at + SHARE * (held.written_at - began)

    async def _write_history(self) -> None:
        """Write events and notifications that are not in the history yet; they wait where that fails."""
        self._history_busy = True
        waiting = {name: list(held.past) for name, held in self.partitions.items()}
        past = [one for found in waiting.values() for one in found]
        notified = list(self.notified)
        try:
            await asyncio.to_thread(self._history.write, past, notified, self.now())
        except (sqlite3.Error, OSError) as error:
            self._failed("history", error)
            await asyncio.sleep(STORE_PAUSE)
        else:
            for held in self.partitions.values():
                _drop(held.past, waiting.get(held.fold.name, ()))
            _drop(self.notified, notified)
        finally:
            self._history_busy = False


def _drop(waiting: deque[Any], written: Iterable[Any]) -> None:
    """Take out what was written; what came too early was pushed out meanwhile."""
    for one in written:
        if waiting and waiting[0] is one:
            waiting.popleft()


def grouping_of(config: FleetConfig, routing: Routing) -> Grouping:
    """How an instance groups, with what two instances have to have in common as 16 hex digits."""
    times = config.group_wait.seconds, config.group_interval.seconds, config.over_after.seconds
    digest = sha256(repr((config.group_by, times, routing)).encode())[:16]
    return Grouping(config.group_by, *times, digest, routing.routes)
