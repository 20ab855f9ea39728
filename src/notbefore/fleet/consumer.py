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
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import certifi
from azure.core.exceptions import AzureError
from azure.eventhub import CloseReason, EventData
from azure.eventhub.aio import EventHubConsumerClient, PartitionContext
from azure.eventhub.amqp import AmqpMessageBodyType
from azure.eventhub.exceptions import EventHubError
from msgspec import Struct

from notbefore.config.fleet import FleetConfig
from notbefore.courier.sinks.event_hub import client_options, make_credential
from notbefore.fleet.checkpoints import Snapshots
from notbefore.fleet.comparison import Comparison
from notbefore.fleet.history import History, PastEvent
from notbefore.fleet.hub_errors import explained, store_explained
from notbefore.fleet.inventory import Inventory
from notbefore.fleet.keeper import STORE_ERRORS, Held, Keeper, Outbox
from notbefore.fleet.outbox import MAX_BODY
from notbefore.fleet.partition import Item, Partition, PartitionFigures
from notbefore.fleet.waves import Notification
from notbefore.metrics.fleet import Measured

BATCH: Final = 300  # records taken in at once from one partition
BUFFERED: Final = 3_000  # records of all partitions that the SDK asks for at once; a record is some 5 KB there
WAIT: Final = 0.5  # seconds after which a partition without records is given the time
PARTITIONS_EVERY: Final = 20.0  # seconds between two looks at how many partitions the hub has
LOOK_EVERY: Final = 10.0  # seconds between two looks at how far the hub is ahead
MARGIN: Final = 2.0  # seconds by which another partition's clock may be behind
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

    def __init__(
        self,
        config: FleetConfig,
        snapshots: Callable[[Any], Snapshots],
        outbox: Outbox,
        history: History,
        inventory: Inventory | None = None,
    ) -> None:
        self._config = config
        self._make_snapshots = snapshots
        self._outbox = outbox
        self._history = history
        self._inventory = inventory
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self.records: Counter[str] = Counter()
        self.poison: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.lag: dict[str, Lag] = {}
        self.counts: Counter[str] = Counter()  # contradictions, given_up, missing
        self.measured = Measured()
        self.connected = False
        self.trouble = ""  # why the hub could not be read at the last attempt
        self.alive = True
        self._pause = FIRST_PAUSE
        self._failed, self._reading = asyncio.Event(), asyncio.Event()
        self._keeper: Keeper | None = None
        self._client: Any = None
        self._taken: set[str] = set()  # the partitions that this client reads
        self._looked: dict[str, float] = {}

    @property
    def folds(self) -> list[Partition]:
        """The partitions of this instance now."""
        return [held.fold for held in list(self._keeper.partitions.values())] if self._keeper is not None else []

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
        snapshots = self._make_snapshots(credential)
        failed = partial(self._note_error, "store")
        keeper = self._keeper = Keeper(self._config, snapshots, self._outbox, self._history, failed)
        keeping = asyncio.create_task(keeper.run())  # also while the hub is away: what was accepted is marked
        try:
            while not self._stopping and not keeping.done():
                await self._read_until_failure(credential, snapshots, keeper, keeping)
            if keeping.done():
                keeping.result()  # nobody foresaw it: without it nothing is written down
        finally:
            keeping.cancel()
            self._outbox.close()
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
        client = self._client = make_consumer(self._config, credential, snapshots)
        try:
            address, takeover = client._address.hostname, self._config.takeover.seconds  # noqa: SLF001 - as the SDK's own processor does
            snapshots.of_hub(address, client.eventhub_name, self._config.consumer_group, takeover)
            names = await self._look_at_hub(client, keeper)
            positions = await self._positions(client, names, snapshots, keeper)
            receiving = asyncio.create_task(self._receive(client, positions, min(BATCH, BUFFERED // len(names) + 1)))
            beside = [self._let_go_of_others(keeper), self._watch_size(client, len(names))]
            if self._inventory is not None:
                patience = self._config.missing_after.seconds
                beside.append(Comparison(self._inventory, keeper, snapshots, names, patience).run())
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
        return begin | {name: offset for name, offset in (await snapshots.positions() or {}).items() if offset}

    async def _look_at_hub(self, client: Any, keeper: Keeper) -> list[str]:
        """The names of its partitions."""
        async with asyncio.timeout(self._config.hub.timeout.seconds):
            found = await client.get_eventhub_properties()
        names: list[str] = found["partition_ids"]
        await keeper.hub_is(len(names), found["created_at"].timestamp())
        return names

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
            await _with_store(self._keeper.take(context.partition_id))

    async def _on_close(self, context: PartitionContext, reason: CloseReason) -> None:
        self.lag.pop(context.partition_id, None)
        # where the hub is away, the partition stays ours until somebody else takes it
        if self._keeper is not None and reason is CloseReason.OWNERSHIP_LOST and not self._failed.is_set():
            await self._keeper.let_go(context.partition_id)

    async def _on_batch(self, context: PartitionContext, events: list[EventData]) -> None:
        self.connected = True
        self._reading.set()
        forget_tags(self._client, context)
        name, keeper = context.partition_id, self._keeper
        held = await _with_store(keeper.of(name)) if keeper is not None else None
        if keeper is None or held is None:
            if keeper is not None and keeper.lost_for(name) > self._config.takeover.seconds:
                self._failed.set()  # the SDK still has it: another client goes on from what is written
            return
        fold, items = held.fold, list(map(item_of, events))
        made: list[Notification] = []
        for item in items:
            made.extend(fold.add(item))
        if events:  # while records come, the time is theirs
            keeper.clock.hear(fold.enqueued, time.monotonic())
        quiet = 0.0 if events else keeper.now() - MARGIN
        made += fold.advance(max(fold.enqueued, quiet))
        if made:
            self._commit(held, made)
        self._count(fold)
        await self._look(name, fold, keeper.now())

    def _commit(self, held: Held, made: list[Notification]) -> None:
        """Have them sent. Where that fails, the records are read again, from what is written down."""
        if self._keeper is not None:
            try:
                self._keeper.commit(held, made)
            except Exception:
                self.errors["fold"] += 1
                log.exception(
                    "partition %s: what is to be sent was not taken: its records are read again", held.fold.name
                )
                self._keeper.forget(held.fold.name)
                self._failed.set()
                raise

    def _count(self, fold: Partition) -> None:
        """Add up what was counted of a partition since the last batch."""
        new, fold.figures = fold.figures, PartitionFigures()
        self.records.update(new.records)
        self.poison.update(new.poison)
        self.counts.update(contradictions=new.contradictions, given_up=new.given_up, missing=new.missing)
        self.counts["fell_silent"] += new.fell_silent
        self.errors.update(fold=len(new.failures))
        for text in new.failures[:1]:
            log.error("partition %s: an error that nobody foresaw. Please report it. %s", fold.name, text)
        if new.closed:  # it wakes a thread
            self._history.add(PastEvent.of(story, at) for story, at in new.closed)
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
                found = await self._client.get_partition_properties(name)
            events = max(0, int(found["last_enqueued_sequence_number"]) - max(fold.sequence, -1))
            self.lag[name] = Lag(events, max(0.0, now - fold.enqueued) if events and fold.enqueued else 0.0)

    def _note_error(self, where: str, error: BaseException) -> None:
        self.errors[where] += 1
        text = explained(error, self._config) if where == "hub" else store_explained(error)
        if where == "hub":
            self.trouble = text
        log.warning("%s: %s", where, text)


async def _with_store(doing: Coroutine[Any, Any, Held | None]) -> Held | None:
    """What a question to the store gives; raises ``StoreAwayError``."""
    try:
        return await doing
    except STORE_ERRORS as error:
        raise StoreAwayError from error


def forget_tags(client: Any, context: PartitionContext) -> None:
    """Have the SDK forget the delivery tags of a partition's records, which it keeps as long as the connection lasts.

    It adds each one to a set, to settle the record later; records of Event Hubs are never settled, so that grows for
    ever (azure-eventhub 5.15.1, ``_pyamqp/aio/_receiver_async.py``): some 100 bytes a record.
    """
    for processor in client._event_processors.values():  # noqa: SLF001 - there is no other way to them
        consumer = processor._consumers.get(context.partition_id)  # noqa: SLF001
        if consumer is not None and consumer._handler is not None and consumer._handler._link is not None:  # noqa: SLF001
            consumer._handler._link._received_delivery_tags.clear()  # noqa: SLF001


def item_of(event: EventData) -> Item:
    """One record, as the fold takes it."""
    body = event.body
    if event.body_type is AmqpMessageBodyType.DATA:
        data = body if isinstance(body, bytes) else b"".join(body)  # type: ignore[arg-type]
    else:  # of another product: no agent sends values
        data = repr(body)[:MAX_BODY].encode(errors="replace")
    enqueued = event.enqueued_time
    return Item(
        data,
        event.sequence_number or 0,
        str(event.offset),
        enqueued.timestamp() if enqueued is not None else 0.0,
        event.properties or None,
    )


def make_consumer(config: FleetConfig, credential: Any, snapshots: Snapshots) -> EventHubConsumerClient:
    """A client that does not retry."""
    hub = config.hub
    options = client_options(hub)
    if "connection_verify" not in options:
        # one for all connections: the SDK would load the root certificates for each one, 32 partitions and every look
        # at one of them, which takes 20 ms and 0.5 MB each time
        context = options["ssl_context"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(certifi.where())
    if snapshots.sdk_store is not None:
        options |= {
            "checkpoint_store": snapshots.sdk_store,
            "load_balancing_interval": config.rebalance.seconds,
            "partition_ownership_expiration_interval": config.takeover.seconds,
        }
    if hub.connection_string is not None:
        return EventHubConsumerClient.from_connection_string(
            hub.connection_string.reveal(), config.consumer_group, eventhub_name=hub.hub, **options
        )
    return EventHubConsumerClient(hub.namespace or "", hub.hub or "", config.consumer_group, credential, **options)
