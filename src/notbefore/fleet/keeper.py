"""``Keeper``: the partitions of this instance; it writes their snapshots.

A snapshot contains the fold's state, the waiting deliveries, and the position in the log. It is
written soon after something was notified or accepted, every few seconds otherwise, and before a
partition is let go. If another instance has written it meanwhile, the partition belongs to that
instance, and this one sends nothing more of it.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from notbefore.config.model import FleetConfig
from notbefore.core.text import one_line
from notbefore.fleet.history import History
from notbefore.fleet.hub_clock import HubClock
from notbefore.fleet.hub_records import PartitionFigures
from notbefore.fleet.inventory import Inventory
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.partition import Partition
from notbefore.fleet.snapshot import (
    FROM_START,
    NewerSnapshotError,
    Snapshot,
    compressed,
    read_snapshot,
    split_events,
)
from notbefore.fleet.snapshot_store import (
    FAILURES,
    STORE_ERRORS,
    LostPartitionError,
    Others,
    Snapshots,
)
from notbefore.fleet.waves import Grouping

# seconds until the next snapshot after something was notified or accepted
SNAPSHOT_SOON: Final = 0.2
# seconds between two snapshots otherwise, even without news: one may have been deleted
SNAPSHOT_EVERY: Final = 5.0
PAUSE_FACTOR: Final = 5  # the pause after a snapshot, as a multiple of the time that it took
LONGEST_SNAPSHOT_PAUSE: Final = 30.0  # seconds
MAX_WORDS: Final = 300  # characters of an error in words

log = logging.getLogger("notbefore.fleet.keeper")


def in_words(error: BaseException) -> str:
    """Return an error of the hub, of the store or of a disk in one line."""
    text = in_one_line(error) or "no answer in time"
    return f"{type(error).__name__}: {text}"[:MAX_WORDS]


def in_one_line(error: BaseException) -> str:
    """Return the text of an error in one line, without its repetition.

    The SDK repeats the text after `Error:`, the store repeats it as XML after `Content:`.
    """
    return re.split(" (?:Error|Content): ", one_line(str(error)), maxsplit=1)[0]


class Parts(Struct, frozen=True):
    """The parts that a consumer works with."""

    snapshots: Snapshots
    outbox: FleetOutbox
    clock: HubClock
    history: History
    write_record: Callable[[bytes], None]
    inventory: Inventory | None = None
    # for the hub, and perhaps for the snapshots; ``None`` if the hub has a key
    credential: Any = None


class Held:
    """One partition of this instance."""

    def __init__(self, fold: Partition) -> None:
        self.fold = fold
        self.written_at = time.monotonic()
        self.trouble = ""  # why the last snapshot could not be written
        self.lock = asyncio.Lock()  # only one snapshot is written at a time
        self.task: asyncio.Task[None] | None = None  # writes the snapshots


class Keeper:
    """The partitions of this instance. Only the consumer's event loop uses it."""

    def __init__(self, config: FleetConfig, parts: Parts) -> None:
        self._grouping = Grouping(
            group_by=config.group_by,
            group_wait=config.group_wait.seconds,
            group_interval=config.group_interval.seconds,
            over_after=config.over_after.seconds,
            routes=parts.outbox.routing.routes,
        )
        self._window = config.window.seconds
        self._parts = parts
        self.figures = PartitionFigures()
        # the last error of the hub or the store: without the store no partition is taken
        self.hub_trouble = ""
        # partition -> why it is left to a newer version, in words
        self.refused: dict[str, str] = {}
        self.partitions: dict[str, Held] = {}
        self.others = Others(parts.snapshots, self.partitions)
        # partition of the hub -> its last record when this client began; -1: none
        self.ends: dict[str, int] = {}
        # events of this instance that are open in several partitions, and these partitions
        self.split: dict[str, list[str]] = {}

    @property
    def folds(self) -> list[Partition]:
        """The folds of this instance's partitions."""
        return [held.fold for held in self.partitions.values()]

    @property
    def trouble(self) -> str:
        """Why a snapshot cannot be written, in words; empty while all are written."""
        for held in self.partitions.values():
            if held.trouble:
                return held.trouble
        return ""

    def failed(self, part: str, error: BaseException) -> None:
        """Count and log an error.

        ``part``: hub, store, history or inventory; fold for an unforeseen error.
        """
        self.figures.errors[part] += 1
        text = in_words(error)
        if part == "fold":
            log.warning("fold: unforeseen error, please report it: %s", text, exc_info=error)
            return

        log.warning("%s: %s", part, text)
        if part == "hub":
            self.hub_trouble = text
        elif part == "store":
            self.hub_trouble = f"the checkpoint store: {text}"

    async def find_split(self) -> None:
        """Find the events that are open in several partitions, and log the new ones."""
        own_states = {fold.name: fold.state for fold in self.folds}
        if any(fold.events.has_word_of_azure for fold in self.folds):
            await self.others.look()
        split = split_events({**self.others.found, **own_states})
        for key, partitions in split.items():
            if key not in self.split:
                log.warning("the event %s is open in the partitions %s", key, ", ".join(partitions))
        self.split = {
            key: partitions
            for key, partitions in split.items()
            if not own_states.keys().isdisjoint(partitions)
        }

    # ---- taking over and letting go

    async def take(self, name: str) -> Partition:
        """Continue a partition, and return its fold.

        It continues from memory if no other instance has had it since, else from the snapshot.
        Raises ``LostPartitionError`` if another instance was faster, or the snapshot cannot be read
        or written.
        """
        try:
            await self._keep_or_restore(name)
        except FAILURES as error:
            self.failed("store", error)
            raise LostPartitionError(name) from None
        fold = self.partitions[name].fold
        await self._note_partitions(fold)
        log.info(
            "partition %s: reading from sequence number %d on",
            name,
            max(fold.state.position.sequence, -1) + 1,
        )
        return fold

    async def _keep_or_restore(self, name: str) -> None:
        """Hold a partition, with a task that writes its snapshots. Raises as ``_restored``."""
        held = self.partitions.get(name)
        if held is not None:
            with suppress(LostPartitionError):  # then it is forgotten, and restored below
                await self._write(held)
        if name not in self.partitions:
            held = await self._restored(name)
            self.partitions[name] = held
            held.task = asyncio.create_task(self._keep(held))

    async def _note_partitions(self, fold: Partition) -> None:
        """Let a fold know how many partitions the hub has.

        If there are more than before, its VMs may have moved, and those of others may come.
        """
        count = len(self.ends)
        if count != fold.state.partitions:
            await self.others.look()
            fold.hub_has(count, self.others_of(fold), self._parts.clock.now())

    def others_of(self, fold: Partition) -> list[Snapshot]:
        """Return the states of the other partitions, as far as they are known."""
        states = [other.state for other in self.folds if other is not fold]
        return [*states, *self.others.found.values()]

    async def let_go(self, *names: str) -> None:
        """Write the snapshots of these partitions, and leave them to other instances.

        This instance then sends nothing more of them.
        """
        await asyncio.gather(*map(self._leave, names))

    async def _leave(self, name: str) -> None:
        held = self.partitions.get(name)
        if held is not None:
            # if it fails, the next owner reads what is missing from the hub
            with suppress(*STORE_ERRORS, LostPartitionError):
                await self._write(held)
        self.forget(name)

    def forget(self, name: str) -> None:
        """Send nothing more of a partition; its next owner continues from the last snapshot."""
        if self.partitions.pop(name, None) is not None:
            self._parts.outbox.leave(name)

    async def _restored(self, name: str) -> Held:
        """Read the snapshot of a partition, or begin without one.

        Raises the store's errors, ``LostPartitionError``, or ``ValueError``.
        """
        body = await self._taken(name)
        if body:
            state = await self._state_in(name, body)
        else:
            state = Snapshot(backlog=self.ends.get(name, -1))
        held = Held(Partition(name, self._grouping, state, self.figures))
        if not body:
            await self._write(held)  # at once, so that the next owner has the same ``backlog``

        if self._parts.inventory is None:  # it was removed from the configuration: no VM is missing
            held.fold.missing.expect({}, 0.0, 0.0)
        clock = self._parts.clock
        if state.position.sequence >= 0:  # without a record, ``at`` is by the clock of a machine
            clock.advance_to(state.at)
        self._parts.outbox.adopt(name, state.outbox, clock.now() - state.at)
        return held

    async def _taken(self, name: str) -> bytes:
        """Take a partition; return its snapshot. Raises as ``_restored``."""
        try:
            body = await self._parts.snapshots.take(name)
        except NewerSnapshotError as error:
            self.refused[name] = f"partition {name} is left to a newer version: {error}"
            log.warning("%s", self.refused[name])
            raise LostPartitionError(name) from None
        self.refused.pop(name, None)
        return body

    async def _state_in(self, name: str, body: bytes) -> Snapshot:
        """Decode a snapshot; replace an unreadable one, and raise ``ValueError``."""
        try:
            return read_snapshot(body)
        except ValueError as error:
            await self._begin_again(name, body)
            raise ValueError(
                f"partition {name} is read from the start of the hub's retention: its snapshot"
                f" cannot be read, see {name}.unreadable ({error})"
            ) from None

    async def _begin_again(self, name: str, body: bytes) -> None:
        """Put an unreadable snapshot aside, and replace it by one that has read nothing.

        The hub is read from the start, because an open event may be days old. No one is notified
        again of events that were over before ``window``. The end of a later one may not have been
        notified yet.
        """

        def unreadable(_earlier: bytes) -> bytes:
            return body

        await self._parts.snapshots.change(f"{name}.unreadable", unreadable)
        now = self._parts.clock.now()
        state = Snapshot(
            position=FROM_START,
            backlog=0,
            quiet_until=now - self._window,
            lost_at=now,
        )
        await self._write(Held(Partition(name, self._grouping, state)))

    # ---- writing

    async def write_history(self) -> None:
        """Write the events that are not in the history yet; after a failure, they wait.

        Raises ``OSError``, ``StoreError`` and ``sqlite3.Error``. The caller must not call it again
        before it has returned.
        """
        for fold in self.folds:
            waiting = fold.state.past
            if not waiting:
                continue
            past = list(waiting)  # meanwhile events are only appended
            await asyncio.to_thread(self._parts.history.write, past, self._parts.clock.now())
            del waiting[: len(past)]

    async def _keep(self, held: Held) -> None:
        """Write a partition's snapshot whenever it is due, while this instance has it."""
        name = held.fold.name
        while self.partitions.get(name) is held:
            pause = SNAPSHOT_SOON
            is_due = time.monotonic() - held.written_at > SNAPSHOT_EVERY
            if is_due or self._parts.outbox.has_news(name):
                pause = await self._try_to_write(held)
            await asyncio.sleep(pause)

    async def _try_to_write(self, held: Held) -> float:
        """Write a snapshot; return the seconds until the next one.

        An error is logged: the next call writes it again.
        """
        began = time.monotonic()
        try:
            await self._write(held)
            held.trouble = ""
        except LostPartitionError:
            log.warning(
                "partition %s: another instance has written its snapshot, so it is let go",
                held.fold.name,
            )
        except STORE_ERRORS as error:
            held.trouble = in_words(error)
            self.failed("store", error)
        except Exception as error:  # noqa: BLE001 - unforeseen: the partition continues
            held.trouble = in_words(error)
            self.failed("fold", error)

        pause = PAUSE_FACTOR * (time.monotonic() - began)
        if held.trouble:
            pause += SNAPSHOT_EVERY
        return min(max(SNAPSHOT_SOON, pause), LONGEST_SNAPSHOT_PAUSE)

    async def _write(self, held: Held) -> None:
        """Write a snapshot. Raises the store's errors.

        On ``LostPartitionError``, the partition is also forgotten.
        """
        fold = held.fold
        async with held.lock:
            keys = fold.event_keys()
            fold.state.muted &= keys
            outbox = self._parts.outbox.part(fold.name, keys)
            snapshot = fold.snapshot(self._parts.clock.now(), outbox)
            position = fold.state.position
            body = await asyncio.to_thread(compressed, snapshot)
            try:
                await self._parts.snapshots.write(fold.name, body, position)
            except LostPartitionError:
                if self.partitions.get(fold.name) is held:
                    self.forget(fold.name)
                raise
            held.written_at = time.monotonic()
