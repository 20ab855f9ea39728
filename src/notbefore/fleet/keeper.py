"""``Keeper``: the partitions that this instance has, and the snapshot that it writes of each of them.

A snapshot holds the fold, what waits in the outbox, and the position. It is written soon after something was notified
or accepted, every few seconds otherwise, and before a partition is let go; where another instance has written it
meanwhile, the partition is that one's, and nothing of it is sent here any more.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any, Final

from msgspec import Struct

from notbefore.config.model import FleetConfig
from notbefore.fleet.checkpoints import FAILURES, STORE_ERRORS, LostPartitionError, Snapshots
from notbefore.fleet.history import History
from notbefore.fleet.hub_records import PartitionFigures
from notbefore.fleet.inventory import Inventory
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.partition import Partition
from notbefore.fleet.snapshot import Snapshot, compressed, read_snapshot
from notbefore.fleet.waves import Grouping

SOON: Final = 0.2  # seconds after something was notified or accepted
EVERY: Final = 5.0  # seconds between two snapshots otherwise, also where nothing is new: it may have been deleted
SHARE: Final = 5  # a snapshot that takes long to write is written less often: after so many times as long
LONGEST_PAUSE: Final = 30.0  # seconds until it is written again
MAX_WORDS: Final = 300  # characters of what an SDK says
TRUSTED: Final = 600.0  # seconds for which the newest record says the time: then one that seems older does

log = logging.getLogger("notbefore.fleet.keeper")


def in_words(error: BaseException) -> str:
    """An error of the hub, of the store or of a disk, in one line."""
    said = " ".join(str(error).split()).partition(" Error: ")[0]  # from there on the SDK says it again
    return f"{type(error).__name__}: {said or 'no answer in time'}"[:MAX_WORDS]


class NotTakenError(Exception):
    """A partition could not be taken: the store did not answer, or its snapshot cannot be read."""


class HubClock:
    """What time it is by the hub, whatever the clock of this machine says; ``monotonic`` is in seconds.

    Where a partition is quiet, time passes by the newest record of any partition, and the seconds since it came. So a
    clock of the machine that is an hour ahead, or is set, makes no VM silent and ends no event.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ahead: float | None = None  # the hub's Unix time, less the monotonic time
        self._heard = 0.0

    def hear(self, enqueued: float) -> None:
        """Note a record that has come just now, and that the hub took in at ``enqueued``, in Unix seconds."""
        now = self._monotonic()
        ahead = enqueued - now
        if self._ahead is None or ahead >= self._ahead or now - self._heard > TRUSTED:
            self._ahead, self._heard = ahead, now

    def now(self) -> float:
        """The hub's time in Unix seconds, or somewhat less; this machine's, where no record has come yet."""
        return time.time() if self._ahead is None else self._ahead + self._monotonic()


class Parts(Struct, frozen=True):
    """What a consumer works with."""

    snapshots: Snapshots
    outbox: FleetOutbox
    clock: HubClock
    history: History
    write_record: Callable[[bytes], None]
    inventory: Inventory | None = None
    credential: Any = None  # for the hub, and perhaps for the snapshots; ``None`` where there is a key


class Held:
    """One partition of this instance."""

    def __init__(self, fold: Partition) -> None:
        self.fold = fold
        self.written_at = time.monotonic()
        self.trouble = ""  # why the last snapshot could not be written
        self.lock = asyncio.Lock()  # one is written at a time
        self.task: asyncio.Task[None] | None = None  # that writes them


class Keeper:
    """Of the consumer's event loop alone."""

    def __init__(self, config: FleetConfig, parts: Parts) -> None:
        times = config.group_wait.seconds, config.group_interval.seconds, config.over_after.seconds
        self._grouping = Grouping(config.group_by, *times, routes=parts.outbox.routing.routes)
        self._parts = parts
        self.figures = PartitionFigures()
        self.said: dict[str, str] = {}  # what was wrong the last time, by part: see ``failed``
        self.partitions: dict[str, Held] = {}
        self.ends: dict[str, int] = {}  # the last record of each partition of the hub as this client began to read

    @property
    def folds(self) -> list[Partition]:
        """The partitions of this instance now. From any thread."""
        return [held.fold for held in list(self.partitions.values())]

    @property
    def trouble(self) -> str:
        """Why a snapshot cannot be written, in words; empty where they are."""
        return next((held.trouble for held in list(self.partitions.values()) if held.trouble), "")

    def failed(self, part: str, error: BaseException) -> None:
        """Count and log an error of the hub, store, history, or inventory, or one that nobody foresaw (`fold`)."""
        self.figures.errors[part] += 1
        self.said[part] = text = in_words(error)
        unforeseen = part == "fold"
        remark = "an error that nobody foresaw. Please report it. " if unforeseen else ""
        log.warning("%s: %s%s", part, remark, text, exc_info=error if unforeseen else None)

    # ---- taking over and letting go

    async def take(self, name: str) -> Partition:
        """Go on with a partition: from memory where nobody else has had it since, else from the snapshot.

        Raises ``NotTakenError``, and ``LostPartitionError`` where another instance was faster.
        """
        try:
            held = self.partitions.get(name)
            if held is not None:
                with suppress(LostPartitionError):
                    await self._write(held)
            if name not in self.partitions:
                self.partitions[name] = held = await self._restored(name)
                held.task = asyncio.create_task(self._keep(held))
        except FAILURES as error:
            raise NotTakenError from error
        fold = self.partitions[name].fold
        fold.hub_has(len(self.ends))
        log.info("partition %s: reading from sequence number %d on", name, fold.position.sequence + 1)
        return fold

    async def let_go(self, *names: str) -> None:
        """Other instances are to have them: write all down at once, and send nothing of them any more."""
        await self.write_all(*names)
        for name in names:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Send nothing of a partition any more; who takes it next goes on from what is written down."""
        if self.partitions.pop(name, None) is not None:
            self._parts.outbox.leave(name)

    async def _restored(self, name: str) -> Held:
        """Raises what the store does, ``LostPartitionError``, and ``ValueError`` where it cannot be read."""
        body = await self._parts.snapshots.take(name)
        if not body:
            held = Held(Partition(name, self._grouping, Snapshot(backlog=self.ends.get(name, -1)), self.figures))
            await self._write(held)  # at once: who reads it next knows what was news then
            return held
        try:
            found = read_snapshot(body)
        except ValueError as error:
            await self._parts.snapshots.change(f"{name}.unreadable", lambda _: body)
            # what was over by now may not have been notified: it is no history
            await self._write(Held(Partition(name, self._grouping)))
            text = "partition %s: its snapshot cannot be read (%s): it is %s.unreadable now, and read from `window` on"
            log.error(text, name, error, name)  # noqa: TRY400 - as its text says
            raise
        held = Held(Partition(name, self._grouping, found, self.figures))
        if self._parts.inventory is None:  # any more: then nobody is missing
            held.fold.missing.expect({}, 0.0, 0.0)
        self._parts.outbox.adopt(name, found.outbox, max(0.0, self._parts.clock.now() - found.at))
        return held

    # ---- what is written

    async def write_history(self) -> None:
        """Write what is not in the history yet; what cannot be written waits.

        Raises ``OSError`` and ``sqlite3.Error``. Not to be called again before it has returned.
        """
        lists = [fold.state.past for fold in self.folds]  # meanwhile they grow at their ends alone
        past = list(map(list, lists))
        if any(past):
            await asyncio.to_thread(self._parts.history.write, list(chain(*past)), self._parts.clock.now())
        for waiting, written in zip(lists, past, strict=True):
            del waiting[: len(written)]

    async def _keep(self, held: Held) -> None:
        """Write a partition down each time it is due, as long as it is this instance's."""
        name = held.fold.name
        while self.partitions.get(name) is held:
            began = time.monotonic()
            pause = SOON
            if self._parts.outbox.has_news(name) or began - held.written_at > EVERY:
                try:
                    await self._write(held)
                    held.trouble = ""
                except LostPartitionError:
                    log.warning("partition %s: somebody else has written its snapshot: it is let go", name)
                except Exception as error:  # noqa: BLE001 - of the store, or nobody foresaw it: it is tried again
                    held.trouble = in_words(error)
                    self.failed("store" if isinstance(error, STORE_ERRORS) else "fold", error)
                pause = max(SOON, SHARE * (time.monotonic() - began) + (EVERY if held.trouble else 0.0))
            await asyncio.sleep(min(pause, LONGEST_PAUSE))

    async def write_all(self, *names: str) -> None:
        """Write these partitions, or all, at once, as far as that is possible: what is missing, the log has."""

        async def try_to_write(held: Held) -> None:
            with suppress(*STORE_ERRORS, LostPartitionError):
                await self._write(held)

        held = [one for name, one in self.partitions.items() if not names or name in names]
        await asyncio.gather(*map(try_to_write, held))

    async def _write(self, held: Held) -> None:
        """Raises what the store does, and ``LostPartitionError``: then it is forgotten as well."""
        fold = held.fold
        async with held.lock:
            keys = fold.event_keys()
            fold.state.muted &= keys
            snapshot = fold.snapshot(self._parts.clock.now(), self._parts.outbox.part(fold.name, keys))
            position = fold.position
            try:
                await self._parts.snapshots.write(fold.name, await asyncio.to_thread(compressed, snapshot), position)
            except LostPartitionError:
                if self.partitions.get(fold.name) is held:
                    self.forget(fold.name)
                raise
            held.written_at = time.monotonic()
