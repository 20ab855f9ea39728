"""``Reader``: reads this instance's partitions with one client of the SDK at a time, and folds each one's log.

The SDK's aio client with ``receive_batch``, since its other ways are thirty times slower. Its retries are off: with
them, established consumers open a thousand connections a second while the hub is away, and say nothing. On the first
error the client is closed; the ``Consumer`` has another one made after a pause.

What it has read is the ``Keeper``'s to write down.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from azure.core.exceptions import AzureError
from azure.eventhub import CloseReason, EventData
from azure.eventhub.aio import PartitionContext
from msgspec import Struct

from notbefore.config.fleet import FleetConfig
from notbefore.core.duration import back_off
from notbefore.fleet.inventory import not_heard
from notbefore.fleet.keeper import STORE_ERRORS, Held, Keeper, Parts, UnreadableSnapshotError
from notbefore.fleet.mutes import NOTE, Mute, is_muted, read_mutes
from notbefore.fleet.others import Others
from notbefore.fleet.partition import Partition
from notbefore.fleet.sdk import forget_tags, item_of, make_consumer
from notbefore.fleet.waves import Notification

BATCH: Final = 300  # records taken in at once from one partition
BUFFERED: Final = 3_000  # records of all partitions that the SDK asks for at once; a record is some 5 KB there
STEP: Final = 0.02  # seconds after which others have their turn, however much is to be notified
WAIT: Final = 0.5  # seconds after which a partition without records is given the time
MUTES_EVERY: Final = 10.0  # seconds between two looks at what is muted
LOOK_EVERY: Final = 10.0  # seconds between two looks at how far the hub is ahead, and how many partitions it has
COMPARE_EVERY: Final = 10.0  # seconds between two looks at who of the inventory is not heard from
MARGIN: Final = 2.0  # seconds by which another partition's clock may be behind
MAX_LOGGED: Final = 3  # errors of one batch; a record that fails is counted, and its place logged, as well
CLOSE_SECONDS: Final = 5.0
LONGEST_PAUSE: Final = 30.0  # seconds until what failed is done again
UNKNOWN_OFFSET: Final = re.compile("supplied (offset|sequence number) .* is invalid")  # Event Hubs' words

log = logging.getLogger("notbefore.fleet.reader")

Failed = Callable[[str, BaseException], None]
"""Called with an error, and the part that it is of: the hub, the store, the history, or the program (`fold`)."""


class NotTakenError(Exception):
    """A partition could not be taken, or another instance has it: the SDK lets go of it, and balances again."""


class Lag(Struct, frozen=True):
    """How far a partition is behind the hub."""

    events: int
    seconds: float

    @classmethod
    def of(cls, fold: Partition, end: int, now: float) -> "Lag":
        """``end``: the last sequence number of the hub; ``now``: its time in Unix seconds."""
        records = max(0, end - fold.sequence)
        return cls(records, max(0.0, now - fold.enqueued) if records and fold.enqueued else 0.0)


class Reader:
    """Of the consumer's event loop alone."""

    def __init__(self, config: FleetConfig, parts: Parts, keeper: Keeper, others: Others, failed: Failed) -> None:
        self._config = config
        self._parts = parts
        self._keeper = keeper
        self._others = others
        self._failed = failed
        self.lag: dict[str, Lag] = {}
        self.mutes: list[Mute] = []
        self.connected = False
        self.client: Any = None
        self._over = asyncio.Event()  # this client is to be closed
        self._taken: set[str] = set()  # the partitions that this client reads
        self._said: set[tuple[str, str]] = set()  # of which partition, and why, an unread record was logged

    def end(self) -> None:
        """Have ``read`` return."""
        self._over.set()

    async def read(self) -> None:
        """With one client, until it fails or ``end``. Raises what the hub does, and what nobody foresaw."""
        self._taken, self._over = set(), asyncio.Event()
        client = self.client = make_consumer(self._config, self._parts.credential, self._parts.snapshots)
        tasks: list[asyncio.Task[None]] = []
        try:
            positions = await self._look_at_hub(client)
            batch = min(BATCH, BUFFERED // len(positions) + 1)
            receiving = client.receive_batch(
                self._on_batch,
                max_batch_size=batch,
                max_wait_time=WAIT,
                starting_position=positions,
                on_error=self._on_error,
                on_partition_close=self._on_close,
                prefetch=batch,
            )
            doing = [receiving, regularly(LOOK_EVERY, "hub", partial(self._watch, client), self._failed)]
            doing.append(regularly(MUTES_EVERY, "store", self._read_mutes, self._failed))
            if self._parts.inventory is not None:
                doing.append(regularly(COMPARE_EVERY, "fold", self._compare, self._failed))
            tasks = [asyncio.create_task(one) for one in doing]
            tasks[0].add_done_callback(lambda _: self._over.set())
            await self._over.wait()
            await self._keeper.write_all()
            if tasks[0].done():
                tasks[0].result()
        finally:
            self.connected, self.lag = False, {}
            for task in tasks:
                task.cancel()
            await ended(client.close(), *([asyncio.wait(tasks)] if tasks else []))

    async def _look_at_hub(self, client: Any) -> dict[str, Any]:
        """Where to begin each partition that has no checkpoint: the window before now, or before its last record."""
        async with asyncio.timeout(self._config.hub.timeout.seconds):
            hub = await client.get_eventhub_properties()
            found = await asyncio.gather(*map(client.get_partition_properties, hub["partition_ids"]))
        self._parts.snapshots.created = hub["created_at"].timestamp()
        ends = {one["id"]: -1 if one["is_empty"] else int(one["last_enqueued_sequence_number"]) for one in found}
        self._keeper.ends = ends
        try:
            await self._read_mutes()
        except (*STORE_ERRORS, ValueError) as error:  # they stay as they were
            self._failed("store", error)
        now, window = datetime.now(UTC), timedelta(seconds=self._config.window.seconds)
        return {
            one["id"]: "-1" if one["is_empty"] else min(now, one["last_enqueued_time_utc"]) - window for one in found
        }

    async def _read_mutes(self) -> None:
        """See what is muted. Raises what the store does, and ``ValueError``."""
        self.mutes = read_mutes(await self._parts.snapshots.read(NOTE))

    async def _watch(self, client: Any) -> None:
        """See how far the hub is ahead, and end this client once it has more partitions: the SDK asks at its start."""
        folds = self._keeper.folds
        async with asyncio.timeout(self._config.hub.timeout.seconds):
            names = await client.get_partition_ids()
            found = await asyncio.gather(*(client.get_partition_properties(fold.name) for fold in folds))
        if len(names) != len(self._keeper.ends):
            log.warning("the hub has %d partitions now, and had %d", len(names), len(self._keeper.ends))
            self._over.set()
        ends = (int(one["last_enqueued_sequence_number"]) for one in found)
        now = self._parts.clock.now()
        self.lag = {fold.name: Lag.of(fold, end, now) for fold, end in zip(folds, ends, strict=True)}

    async def _compare(self) -> None:
        """See which VMs of the inventory nobody hears from: the instance does that has the first partition."""
        inventory, first = self._parts.inventory, min(self._keeper.ends, key=lambda name: (len(name), name))
        assert inventory is not None  # noqa: S101 - else nobody calls it
        await asyncio.to_thread(inventory.look)
        held = self._keeper.partitions.get(first)
        if held is not None and inventory.vms is not None:
            await self._others.look()
            heard = {key for one in self._others.found.values() for key in one.heard}
            heard |= {key for fold in self._keeper.folds for key in fold.silence.heard}
            now = max(held.fold.enqueued, self._parts.clock.now() - MARGIN)
            expected = await asyncio.to_thread(not_heard, inventory.vms, heard)
            held.fold.missing.expect(expected, now, self._config.missing_after.seconds)

    # ---- what the SDK calls

    async def _on_close(self, context: PartitionContext, reason: CloseReason) -> None:
        self._taken.discard(context.partition_id)
        # where the hub is away, the partition stays ours until somebody else takes it
        if reason is CloseReason.OWNERSHIP_LOST and not self._over.is_set():
            await self._keeper.let_go(context.partition_id)

    async def _on_batch(self, context: PartitionContext, events: list[EventData]) -> None:
        if self._over.is_set():
            return  # another client reads it again, from what is written
        self.connected = True
        forget_tags(self.client, context)
        held = await self._held(context.partition_id)
        began = time.monotonic()
        for made in self._made(held.fold, events):
            if made is not None:
                self._commit(held, made)
            if time.monotonic() - began > STEP:
                await asyncio.sleep(0)
                if self._keeper.partitions.get(held.fold.name) is not held:
                    return  # it has gone to another instance
                began = time.monotonic()
        await asyncio.sleep(0)
        self._report_unread()

    async def _held(self, name: str) -> Held:
        """A partition of which records came. Raises ``NotTakenError``."""
        if name not in self._taken:
            try:
                await self._keeper.take(name)
            except (*STORE_ERRORS, UnreadableSnapshotError) as error:
                raise NotTakenError from error
            self._taken.add(name)
        held = self._keeper.partitions.get(name)
        if held is None:  # it was lost, and the SDK has not noticed yet
            raise NotTakenError
        return held

    def _made(self, fold: Partition, events: list[EventData]) -> Iterator[Notification | None]:
        """What a fold makes of records, and of the time by now; ``None``: others may have their turn."""
        for event in events:
            yield from fold.add(item_of(event))
            yield None
        if events:  # while records come, the time is theirs
            self._parts.clock.hear(fold.enqueued)
        now = fold.enqueued if events else max(fold.enqueued, self._parts.clock.now() - MARGIN)
        yield from fold.advance(now)

    def _commit(self, held: Held, made: Notification) -> None:
        """Have it sent, unless it is muted. Where that fails, the records are read again, from what is written down."""
        name, parts = held.fold.name, self._parts
        try:
            sent = not is_muted(self.mutes, parts.clock.now(), made, held.fold.muted)
            line = parts.outbox.commit(name, made, sent=sent)
        except Exception as error:
            log.error("partition %s: what is to be sent was not taken: its records are read again", name)  # noqa: TRY400 - `failed` logs it
            self._failed("fold", error)
            self._keeper.forget(name)
            self._over.set()
            raise
        held.news.set()
        parts.write_record(line + b"\n")

    def _report_unread(self) -> None:
        """Log what could not be used: of each partition the first record of each kind, of errors the first ones."""
        figures = self._keeper.figures
        for one in figures.unread:
            kind = one.partition, one.poison.reason
            log.log(
                logging.DEBUG if kind in self._said else logging.WARNING,
                "partition %s, sequence number %d: a record is not used (%s: %s); more of them are only counted",
                one.partition, one.sequence, one.poison.reason, one.poison.detail[:200],
            )  # fmt: skip
            self._said.add(kind)
        for error in figures.failures[:MAX_LOGGED]:
            self._failed("fold", error)
        figures.unread.clear()
        figures.failures.clear()

    async def _on_error(self, context: PartitionContext | None, error: Exception) -> None:
        """Of the hub or of the store. Where it is of one partition, the SDK has let go of it, and balances again."""
        if "link:stolen" in str(error) or (isinstance(error, NotTakenError) and error.__cause__ is None):
            return  # another instance has it
        of_store = isinstance(error, AzureError | NotTakenError)
        self._failed("store" if of_store else "hub", error.__cause__ or error)
        if context is not None and UNKNOWN_OFFSET.search(str(error)):
            with suppress(*STORE_ERRORS):  # it is found out again
                await self._keeper.begin_anew(context.partition_id)
        elif context is not None and not of_store:
            self._over.set()


async def ended(*closing: Awaitable[Any]) -> None:
    """Wait for each of them, though not for long, whatever comes of it."""
    for one in closing:
        with suppress(Exception):
            await asyncio.wait_for(one, CLOSE_SECONDS)


async def regularly(every: float, part: str, do: Callable[[], Awaitable[None]], failed: Failed) -> None:
    """Do something each so many seconds; less often while it fails."""
    failures = 0
    while True:
        await asyncio.sleep(back_off(failures + 1, every, LONGEST_PAUSE))
        try:
            await do()
            failures = 0
        except Exception as error:  # noqa: BLE001 - of the hub, a disk or a store, or nobody foresaw it: tried again
            failures += 1
            failed(part, error)
