"""``Consumer``: reads the partitions of the hub that are this instance's, and folds each one's log.

The SDK's aio client with ``receive_batch``, since its other ways are thirty times slower. Its retries are off: with
them, established consumers open a thousand connections a second while the hub is away, and say nothing. On the first
error the client is closed, and another one made after a pause.

What it has read is the ``Keeper``'s to write down.
"""

import asyncio
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, Final

from azure.core.exceptions import AzureError
from azure.eventhub import CloseReason, EventData
from azure.eventhub.aio import PartitionContext
from azure.eventhub.exceptions import EventHubError
from msgspec import Struct

from notbefore.config.fleet import FleetConfig
from notbefore.courier.sinks.event_hub import make_credential
from notbefore.fleet.checkpoints import Snapshots
from notbefore.fleet.history import PastEvent
from notbefore.fleet.hub_errors import explained, store_explained
from notbefore.fleet.inventory import Inventory, not_heard
from notbefore.fleet.keeper import STORE_ERRORS, Held, Keeper, Parts, UnreadableSnapshotError
from notbefore.fleet.mutes import Mute
from notbefore.fleet.others import Others
from notbefore.fleet.partition import Partition, PartitionFigures, Snapshot
from notbefore.fleet.sdk import forget_tags, item_of, make_consumer, namespace_of
from notbefore.fleet.waves import Notification
from notbefore.metrics.fleet import Measured

BATCH: Final = 300  # records taken in at once from one partition
BUFFERED: Final = 3_000  # records of all partitions that the SDK asks for at once; a record is some 5 KB there
STEP: Final = 0.02  # seconds after which others have their turn, however much is to be notified
WAIT: Final = 0.5  # seconds after which a partition without records is given the time
PARTITIONS_EVERY: Final = 20.0  # seconds between two looks at how many partitions the hub has
LOOK_EVERY: Final = 10.0  # seconds between two looks at how far the hub is ahead
COMPARE_EVERY: Final = 15.0  # seconds between two looks at who of the inventory is not heard from
COMPARE_SOON: Final = 1.0  # seconds until the next look while the first partition is not this instance's
MARGIN: Final = 2.0  # seconds by which another partition's clock may be behind
ASK_SECONDS: Final = 3.0  # for what other instances have written down
CLOSE_SECONDS: Final = 5.0
UNKNOWN_OFFSET: Final = re.compile("supplied (offset|sequence number) .* is invalid")  # Event Hubs' words
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between clients
HEALTHY: Final = 60.0  # seconds after which a client's failure is the first one again

log = logging.getLogger("notbefore.fleet.consumer")


class StoreAwayError(Exception):
    """The store failed while a partition was taken; its cause says how."""


class Lag(Struct, frozen=True):
    """How far a partition is behind the hub."""

    events: int = 0
    seconds: float = 0.0


class Consumer:
    """Runs in one thread, with an event loop of its own: ``run`` until ``stop``."""

    def __init__(self, config: FleetConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self.records: Counter[str] = Counter()
        self.poison: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.lag: dict[str, Lag] = {}
        self.counts: Counter[str] = Counter()  # given_up, missing, fell_silent
        self.measured = Measured()
        self.connected = False
        self.trouble = ""  # why the hub could not be read at the last attempt
        self.alive = True
        self._pause = FIRST_PAUSE
        self._failed, self._reading = asyncio.Event(), asyncio.Event()
        self._keeper: Keeper | None = None
        self._others: Others | None = None
        self.client: Any = None
        self._taken: set[str] = set()  # the partitions that this client reads
        self._looked: dict[str, float] = {}

    @property
    def folds(self) -> list[Partition]:
        """The partitions of this instance now."""
        return [held.fold for held in list(self._keeper.partitions.values())] if self._keeper is not None else []

    def others(self) -> dict[str, Snapshot]:
        """What other instances have written down of the other partitions, as of some seconds ago. From any thread."""
        others, loop = self._others, self._loop
        if others is None or loop is None or not self.alive:
            return {}
        with suppress(RuntimeError, NotInTimeError):  # it ends; the store is slow: what is known is shown
            asyncio.run_coroutine_threadsafe(others.look(), loop).result(ASK_SECONDS)
        return others.found

    @property
    def store_trouble(self) -> str:
        """Why no snapshot can be written now; empty where they are."""
        return self._keeper.trouble if self._keeper is not None else ""

    @property
    def mutes(self) -> list[Mute]:
        """What is muted, as far as it was read."""
        return self._keeper.mutes if self._keeper is not None else []

    def stop(self) -> None:
        """Come to an end. From any thread."""
        self._stopping = True
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)

    def run(self) -> None:
        """Read until ``stop``."""
        try:
            asyncio.run(self._run())
        finally:
            self.alive = False

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        hub = self._config.hub
        credential = make_credential(hub) if hub.connection_string is None else None
        snapshots = self._parts.snapshots(credential)
        keeper = self._keeper = Keeper(self._config, snapshots, self._parts, self._note_error)
        self._others = Others(snapshots, lambda: keeper.partitions)
        keeping = asyncio.create_task(keeper.run())  # also while the hub is away: what was accepted is written
        try:
            while not self._stopping and not keeping.done():
                await self._read_until_failure(credential, snapshots, keeper, keeping)
            if keeping.done():
                keeping.result()  # nobody foresaw it: without it nothing is written down
        finally:
            keeping.cancel()
            for closing in (snapshots, credential):
                if closing is not None:
                    with suppress(Exception):
                        await asyncio.wait_for(closing.close(), CLOSE_SECONDS)

    async def _read_until_failure(
        self, credential: Any, snapshots: Snapshots, keeper: Keeper, keeping: asyncio.Task[None]
    ) -> None:
        """With one client; then wait, until it is time for the next one."""
        began = time.monotonic()
        try:
            await self._read(credential, snapshots, keeper, keeping)
        except Exception as error:  # noqa: BLE001 - the SDK raises many; any of them ends this client
            self._note_error("hub", error)
        self.connected = False
        if self._stopping or keeping.done() or self._stop is None:
            return
        self._pause = FIRST_PAUSE if time.monotonic() - began > HEALTHY else min(self._pause * 2, LONGEST_PAUSE)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), self._pause * (0.5 + random.random() / 2))  # noqa: S311 - a pause

    async def _read(self, credential: Any, snapshots: Snapshots, keeper: Keeper, keeping: asyncio.Task[None]) -> None:
        """With one client, until it fails or the consumer is stopped."""
        self._failed, self._reading, self._taken = asyncio.Event(), asyncio.Event(), set()
        client = self.client = make_consumer(self._config, credential, snapshots)
        try:
            names = await self._look_at_hub(client, snapshots, keeper)
            positions = await self._positions(client, names, snapshots, keeper)
            receiving = asyncio.create_task(self._receive(client, positions, min(BATCH, BUFFERED // len(names) + 1)))
            beside = [self._let_go_of_others(keeper), self._watch_size(client, len(names))]
            if self._parts.inventory is not None:
                beside.append(self._compare(self._parts.inventory, keeper, names))
            tasks = [asyncio.create_task(one) for one in beside]
            waiting = [asyncio.create_task(one.wait()) for one in (self._failed, self._stop) if one is not None]
            await asyncio.wait([receiving, keeping, *waiting], return_when=asyncio.FIRST_COMPLETED)
            await keeper.write_all()
            for task in (*tasks, receiving, *waiting):
                task.cancel()
            with suppress(Exception):
                await asyncio.wait_for(client.close(), CLOSE_SECONDS)
            with suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(receiving, CLOSE_SECONDS)
        finally:
            self.lag = {}
            with suppress(Exception):
                await asyncio.wait_for(client.close(), CLOSE_SECONDS)

    async def _watch_size(self, client: Any, known: int) -> None:
        """Make another client once the hub has been given more partitions: the SDK asks for them once, at its start."""
        while True:
            await asyncio.sleep(PARTITIONS_EVERY)
            with suppress(EventHubError, TimeoutError, OSError):  # it is noticed elsewhere
                found = len(await client.get_partition_ids())
                if found != known:
                    log.warning("the hub has %d partitions now, and had %d", found, known)
                    self._failed.set()
                    return

    async def _let_go_of_others(self, keeper: Keeper) -> None:
        """Of the partitions that the client before had, let go of those that have gone to other instances."""
        await self._reading.wait()
        await asyncio.sleep(self._config.takeover.seconds)
        for name in set(keeper.partitions) - self._taken:
            await keeper.let_go(name)

    async def _positions(self, client: Any, names: list[str], snapshots: Snapshots, keeper: Keeper) -> Any:
        """Where to begin what has no checkpoint: the window before now, or before the last record, if that is older."""
        async with asyncio.timeout(self._config.hub.timeout.seconds):
            found = await asyncio.gather(*map(client.get_partition_properties, names))
        keeper.ends = {one["id"]: -1 if one["is_empty"] else int(one["last_enqueued_sequence_number"]) for one in found}
        now, window = datetime.now(UTC), timedelta(seconds=self._config.window.seconds)
        begin = {
            one["id"]: "-1" if one["is_empty"] else min(now, one["last_enqueued_time_utc"]) - window for one in found
        }
        return begin if snapshots.sdk_store is not None else begin | await keeper.offsets(names)

    async def _look_at_hub(self, client: Any, snapshots: Snapshots, keeper: Keeper) -> list[str]:
        """The names of its partitions."""
        async with asyncio.timeout(self._config.hub.timeout.seconds):
            found = await client.get_eventhub_properties()
        names: list[str] = found["partition_ids"]
        created, group = found["created_at"].timestamp(), self._config.consumer_group
        whose = f"{namespace_of(client)}/{client.eventhub_name}/{group}"
        snapshots.of_hub(whose, self._config.takeover.seconds, created)
        keeper.hub_is(len(names), created)
        return names

    async def _compare(self, inventory: Inventory, keeper: Keeper, names: list[str]) -> None:
        """See which VMs of the inventory nobody hears from: the instance does that has the first partition."""
        first = min(names, key=lambda name: (len(name), name))
        while True:
            await asyncio.to_thread(inventory.look)
            held = keeper.partitions.get(first)
            if held is not None and inventory.vms is not None and self._others is not None:
                await self._others.look()
                heard = {key for one in self._others.found.values() for key in one.heard}
                heard |= {key for fold in self.folds for key in fold.silence.heard}
                now = max(held.fold.enqueued, keeper.now() - MARGIN)
                expected = await asyncio.to_thread(not_heard, inventory.vms, heard)
                held.fold.missing.expect(expected, now, self._config.missing_after.seconds)
            await asyncio.sleep(COMPARE_EVERY if held is not None else COMPARE_SOON)

    async def _receive(self, client: Any, positions: Any, batch: int) -> None:
        await client.receive_batch(
            self._on_batch,
            max_batch_size=batch,
            max_wait_time=WAIT,
            starting_position=positions,
            on_error=self._on_error,
            on_partition_initialize=self._on_initialize,
            on_partition_close=self._on_close,
            prefetch=batch,
        )

    # ---- what the SDK calls

    async def _on_initialize(self, context: PartitionContext) -> None:
        self._taken.add(context.partition_id)
        if self._keeper is not None:
            await self._with_store(self._keeper.take(context.partition_id))

    async def _on_close(self, context: PartitionContext, reason: CloseReason) -> None:
        self.lag.pop(context.partition_id, None)
        # where the hub is away, the partition stays ours until somebody else takes it
        if self._keeper is not None and reason is CloseReason.OWNERSHIP_LOST and not self._failed.is_set():
            await self._keeper.let_go(context.partition_id)

    async def _on_batch(self, context: PartitionContext, events: list[EventData]) -> None:
        if self._failed.is_set():
            return  # another client reads it again, from what is written
        self.connected = True
        self._reading.set()
        forget_tags(self.client, context)
        name, keeper = context.partition_id, self._keeper
        held = await self._with_store(keeper.of(name)) if keeper is not None else None
        if keeper is None or held is None:
            if keeper is not None and keeper.lost_for(name) > self._config.takeover.seconds:
                self._failed.set()  # the SDK still has it: another client goes on from what is written
            return
        fold = held.fold
        read = (chain(fold.add(item_of(event)), (None,)) for event in events)
        await self._take_in(keeper, held, chain.from_iterable(read))
        if events:  # while records come, the time is theirs
            keeper.clock.hear(fold.enqueued, time.monotonic())
        quiet = 0.0 if events else keeper.now() - MARGIN
        if keeper.partitions.get(name) is held:
            await self._take_in(keeper, held, fold.advance(max(fold.enqueued, quiet)))
        self._count(held)
        await self._look(name, fold, keeper.now())

    async def _take_in(self, keeper: Keeper, held: Held, made: Iterator[Notification | None]) -> None:
        """Have sent what a fold makes, and let others have their turn meanwhile; ``None``: a record is taken in."""
        part: list[Notification] = []
        began = time.monotonic()
        for one in made:
            if one is not None:
                part.append(one)
            if time.monotonic() - began > STEP:
                if part:
                    self._commit(keeper, held, part)
                    part = []
                await asyncio.sleep(0)
                if keeper.partitions.get(held.fold.name) is not held:
                    return  # it has gone to another instance
                began = time.monotonic()
        if part:
            self._commit(keeper, held, part)
        await asyncio.sleep(0)

    def _commit(self, keeper: Keeper, held: Held, made: list[Notification]) -> None:
        """Have them sent. Where that fails, the records are read again, from what is written down."""
        try:
            lines = keeper.commit(held, made)
        except Exception:
            self.errors["fold"] += 1
            log.exception("partition %s: what is to be sent was not taken: its records are read again", held.fold.name)
            keeper.forget(held.fold.name)
            self._failed.set()
            raise
        for line in lines:
            self._parts.write_record(line + b"\n")

    def _count(self, held: Held) -> None:
        """Add up what was counted of a partition since the last batch."""
        fold = held.fold
        new, fold.figures = fold.figures, PartitionFigures()
        self.records.update(new.records)
        self.poison.update(new.poison)
        self.counts.update(given_up=new.given_up, missing=new.missing)
        self.counts["fell_silent"] += new.fell_silent
        self.errors.update(fold=len(new.failures))
        for text in new.failures[:1]:
            log.error("partition %s: an error that nobody foresaw. Please report it. %s", fold.name, text)
        held.past.extend(PastEvent.of(story, at) for story, at in new.closed)
        for story, _ in new.closed:
            labels = (story.event.event_type, story.place.region)
            for one in story.measured.values():
                self.measured.add(labels, one.notice, one.interruption)

    async def _on_error(self, context: PartitionContext | None, error: Exception) -> None:
        """Of the hub or of the store. Without a context the SDK tries again by itself.

        Where the store fails while a partition is taken, the SDK takes that one again, and the others are read on.
        """
        if "link:stolen" in str(error):  # another instance has it
            return
        of_store = isinstance(error, AzureError | StoreAwayError)
        self._note_error("store" if of_store else "hub", error.__cause__ or error)
        if context is None or of_store:
            return
        if self._keeper is not None and UNKNOWN_OFFSET.search(str(error)):
            await self._keeper.begin_anew(context.partition_id)
        self._failed.set()

    async def _look(self, name: str, fold: Partition, now: float) -> None:
        """How far the hub is ahead: asked for once in a while; ``now``: Unix seconds of the hub's clock."""
        if time.monotonic() - self._looked.get(name, 0.0) < LOOK_EVERY:
            return
        self._looked[name] = time.monotonic()
        with suppress(EventHubError, TimeoutError, OSError):  # a lag that is not known ends no reading
            async with asyncio.timeout(self._config.hub.timeout.seconds):
                found = await self.client.get_partition_properties(name)
            events = max(0, int(found["last_enqueued_sequence_number"]) - max(fold.sequence, -1))
            self.lag[name] = Lag(events, max(0.0, now - fold.enqueued) if events and fold.enqueued else 0.0)

    def _note_error(self, where: str, error: BaseException) -> None:
        self.errors[where] += 1
        if where == "hub":
            self.trouble = text = explained(error, self._config)
        else:
            text = store_explained(error) if where == "store" else str(error)
        log.warning("%s: %s", where, text)

    async def _with_store(self, doing: Coroutine[Any, Any, Held | None]) -> Held | None:
        """What a question to the store gives; raises ``StoreAwayError``."""
        try:
            return await doing
        except UnreadableSnapshotError:  # another client begins at the window
            self._failed.set()
            return None
        except STORE_ERRORS as error:
            raise StoreAwayError from error
