"""``Consumer``: reads the partitions of the hub that are this instance's, and folds each one's log.

The SDK's aio client with ``receive_batch``, since its other ways are thirty times slower. Its retries are off: with
them, established consumers open a thousand connections a second while the hub is away, and say nothing. On the first
error the client is closed, and another one made after a pause.

The order of writing: the notifications of a batch go into the outbox, then the snapshot is replaced, and with it the
checkpoint. The snapshot holds the deliveries that no receiver has accepted yet, so an instance that takes over the
partition sends them, wherever the disk of the other one is.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

from azure.core.exceptions import AzureError
from azure.eventhub import EventData
from azure.eventhub.aio import EventHubConsumerClient, PartitionContext
from msgspec import MsgspecError, Struct

from notbefore.config.fleet import FleetConfig
from notbefore.core.delivery import Delivery
from notbefore.delivery.sinks.event_hub import client_options, make_credential
from notbefore.fleet.checkpoints import BlobSnapshots, LostPartitionError, Snapshots
from notbefore.fleet.merge import Story
from notbefore.fleet.partition import Item, Partition, PartitionFigures, read_snapshot, read_vms
from notbefore.fleet.reading import Poison
from notbefore.fleet.silence import Heard
from notbefore.fleet.waves import Grouping, Notification
from notbefore.metrics.fleet import Measured

BATCH: Final = 300  # records taken in at once
WAIT: Final = 0.5  # seconds after which a partition without records is given the time
KEEP_EVERY: Final = 0.05  # seconds between two looks at what snapshots are to be written, and what was accepted
STORE_PAUSE: Final = 2.0  # seconds until a snapshot that could not be written is tried again
SNAPSHOT_EVERY: Final = 5.0  # seconds between two snapshots without notifications
VMS_EVERY: Final = 120.0  # seconds between two writings of the VMs that were heard from
LOOK_EVERY: Final = 10.0  # seconds between two looks at how far the hub is ahead
MARGIN: Final = 2.0  # seconds by which the hub's clock may be behind ours
CLOSE_SECONDS: Final = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between clients
HEALTHY: Final = 60.0  # seconds after which a client's failure is the first one again

log = logging.getLogger("notbefore.fleet.consumer")


class Outbox(Protocol):
    """Where notifications are put down."""

    def commit(self, made: Sequence[Notification]) -> list[Delivery]:
        """Write notifications with their deliveries; returns the deliveries."""
        ...

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Have deliveries of another instance, or of an earlier life, sent."""
        ...

    def pending(self) -> set[str] | None:
        """The ids of the deliveries that no receiver has accepted or refused yet; ``None``: as at the last call."""
        ...

    def close(self) -> None:
        """Let go of what ``pending`` has opened."""
        ...

    def set_aside(self, partition: str, item: Item, poison: Poison) -> None:
        """Keep a record that cannot be read, with its place."""
        ...


class Lag(Struct, frozen=True):
    """How far a partition is behind the hub."""

    events: int = 0
    seconds: float = 0.0


class _Owned:
    """One partition of this instance."""

    def __init__(self, fold: Partition) -> None:
        self.fold = fold
        self.unsettled: dict[str, Delivery] = {}
        self.written = fold.sequence  # the sequence number of the last snapshot
        self.written_at = 0.0  # monotonic seconds
        self.vms_written_at = 0.0
        self.not_before = 0.0  # monotonic seconds: the store failed, no snapshot before
        self.dirty = False  # notifications were made, or settled, since
        self.writing = asyncio.Lock()


class Consumer:
    """Runs in one thread, with an event loop of its own: ``run`` until ``stop``."""

    def __init__(self, config: FleetConfig, snapshots: Callable[[Any], Snapshots], outbox: Outbox) -> None:
        self._config = config
        self._make_snapshots = snapshots
        self._outbox = outbox
        self._owned: dict[str, _Owned] = {}
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
        self.alive = True
        self._pause = FIRST_PAUSE
        self._failed: asyncio.Event | None = None
        self._snapshots: Snapshots | None = None
        self._client: Any = None
        self._looked: dict[str, float] = {}

    @property
    def folds(self) -> list[Partition]:
        """The partitions of this instance now."""
        return [owned.fold for owned in list(self._owned.values())]

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
        while not self._stopping:
            began = time.monotonic()
            try:
                await self._read()
            except Exception as error:  # noqa: BLE001 - the SDK raises many; any of them ends this client
                self._note_error("hub", error)
            self.connected = False
            self._outbox.close()
            if self._stopping:
                break
            self._pause = FIRST_PAUSE if time.monotonic() - began > HEALTHY else min(self._pause * 2, LONGEST_PAUSE)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._pause * (0.5 + random.random() / 2))  # noqa: S311 - a pause

    async def _read(self) -> None:
        """With one client, until it fails or the consumer is stopped."""
        hub, stop = self._config.hub, self._stop
        credential = make_credential(hub) if hub.connection_string is None else None
        snapshots = self._snapshots = self._make_snapshots(credential)
        self._failed = asyncio.Event()
        client = self._client = make_consumer(self._config, credential, snapshots)
        try:
            if isinstance(snapshots, BlobSnapshots):
                snapshots.of_hub(client._address.hostname, client.eventhub_name, self._config.consumer_group)  # noqa: SLF001 - as the SDK's own processor does
            receiving = asyncio.create_task(self._receive(client, await self._positions(client, snapshots)))
            settling = asyncio.create_task(self._keep_snapshots())
            waiting = [asyncio.create_task(one.wait()) for one in (self._failed, stop) if one is not None]
            await asyncio.wait([receiving, *waiting], return_when=asyncio.FIRST_COMPLETED)
            for owned in list(self._owned.values()):
                with suppress(Exception):
                    await self._write(owned)
            self._owned.clear()
            for task in (settling, receiving, *waiting):
                task.cancel()
            with suppress(Exception):
                await asyncio.wait_for(client.close(), CLOSE_SECONDS)
            with suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(receiving, CLOSE_SECONDS)
        finally:
            self._owned.clear()
            self.lag = {}
            for closing in (client, snapshots, credential):
                if closing is not None:
                    with suppress(Exception):
                        await asyncio.wait_for(closing.close(), CLOSE_SECONDS)

    async def _positions(self, client: Any, snapshots: Snapshots) -> Any:
        begin = datetime.now(UTC) - timedelta(seconds=self._config.window.seconds)
        known = await snapshots.positions()
        if known is None:
            return begin
        async with asyncio.timeout(self._config.hub.timeout.seconds):
            return {name: known.get(name) or begin for name in await client.get_partition_ids()}

    async def _receive(self, client: Any, positions: Any) -> None:
        await client.receive_batch(
            self._on_batch,
            max_batch_size=BATCH,
            max_wait_time=WAIT,
            starting_position=positions,
            on_error=self._on_error,
            on_partition_initialize=self._on_initialize,
            on_partition_close=self._on_close,
            prefetch=BATCH * 4,
        )

    # ---- what the SDK calls

    async def _on_initialize(self, context: PartitionContext) -> None:
        await self._begin(context.partition_id)

    async def _begin(self, name: str) -> _Owned:
        """Go on from the snapshot of a partition."""
        assert self._snapshots is not None  # noqa: S101 - it is made before the client
        config = self._config
        grouping = Grouping(config.group_by, config.group_wait.seconds, config.group_interval.seconds)
        fold = Partition(name, grouping, config.over_after.seconds, self._outbox.set_aside, self._adopt)
        body = await self._snapshots.read(name)
        owned = _Owned(fold)
        if body:
            try:
                found = read_snapshot(body)
            except (MsgspecError, ValueError) as error:
                log.error("partition %s: its snapshot cannot be read, events that are open are new: %s", name, error)  # noqa: TRY400 - its text says all
            else:
                fold.restore(found, await self._heard(name))
                owned = _Owned(fold)
                owned.unsettled = {one.delivery_id: one for one in found.unsettled}
                self._outbox.put(found.unsettled)
        self._owned[name] = owned
        log.info("partition %s: reading from sequence number %d on", name, fold.sequence + 1)
        return owned

    async def _heard(self, name: str) -> list[Heard]:
        """The VMs that were heard from; none where that cannot be read: they are, as they send their next heartbeat."""
        assert self._snapshots is not None  # noqa: S101 - as above
        body = await self._snapshots.read_vms(name)
        try:
            return read_vms(body) if body else []
        except (MsgspecError, ValueError) as error:
            log.error("partition %s: the VMs that were heard from cannot be read: %s", name, error)  # noqa: TRY400 - as above
            return []

    def _adopt(self, key: str) -> Story | None:
        for owned in self._owned.values():
            if (story := owned.fold.release(key)) is not None:
                return story
        return None

    async def _on_close(self, context: PartitionContext, _reason: Any) -> None:
        owned = self._owned.pop(context.partition_id, None)
        self.lag.pop(context.partition_id, None)
        if owned is not None:
            with suppress(Exception):  # what it lacks, the log has
                await self._write(owned)

    async def _on_batch(self, context: PartitionContext, events: list[EventData]) -> None:
        self.connected = True
        name = context.partition_id
        owned = self._owned.get(name) or await self._begin(name)
        made: list[Notification] = []
        for event in events:
            made += owned.fold.add(item_of(event))
        quiet = 0.0 if events else time.time() - MARGIN  # while records come, the time is theirs
        made += owned.fold.advance(max(owned.fold.enqueued, quiet))
        self._count(owned.fold)
        if made:
            owned.unsettled |= {one.delivery_id: one for one in self._outbox.commit(made)}
            owned.dirty = True
        await self._look(name, owned.fold)

    def _count(self, fold: Partition) -> None:
        """Add up what was counted of a partition since the last batch."""
        new, fold.figures = fold.figures, PartitionFigures()
        self.records.update(new.records)
        self.poison.update(new.poison)
        self.counts.update(contradictions=new.contradictions, given_up=new.given_up, missing=new.missing)
        self.counts["fell_silent"] += new.fell_silent
        for story in new.closed:
            labels = (story.event.event_type, story.place.region)
            for one in story.measured.values():
                self.measured.add(labels, one.notice, one.interruption)

    async def _on_error(self, context: PartitionContext | None, error: Exception) -> None:
        if context is None:  # of the checkpoint store, or of the list of partitions: the SDK tries again by itself
            self._note_error("store" if isinstance(error, AzureError) else "hub", error)
            return
        if "link:stolen" in str(error):  # another instance has it
            return
        self._note_error("hub", error)
        if self._failed is not None:
            self._failed.set()

    # ---- snapshots

    async def _keep_snapshots(self) -> None:
        """Write snapshots soon after what has changed; a store that hangs keeps no notification waiting."""
        while True:
            await asyncio.sleep(KEEP_EVERY)
            self._settle()
            await asyncio.gather(*(self._keep(owned) for owned in list(self._owned.values())))

    def _settle(self) -> None:
        """Take out of the snapshots what receivers have accepted: who takes over would send it again."""
        if waiting := [owned for owned in self._owned.values() if owned.unsettled]:
            pending = self._outbox.pending()
            for owned in waiting if pending is not None else ():
                settled = owned.unsettled.keys() - (pending or set())
                for one in settled:
                    del owned.unsettled[one]
                owned.dirty |= bool(settled)

    async def _keep(self, owned: _Owned) -> None:
        """Write the snapshot where it is time to; where that fails, later."""
        now = time.monotonic()
        unchanged = owned.fold.sequence == owned.written or now - owned.written_at < SNAPSHOT_EVERY
        if now < owned.not_before or (unchanged and not owned.dirty):
            return
        try:
            await self._write(owned)
        except LostPartitionError:
            log.warning("partition %s: another instance has it by now", owned.fold.name)
            if self._failed is not None:
                self._failed.set()
        except (AzureError, OSError, TimeoutError) as error:
            owned.dirty, owned.not_before = True, time.monotonic() + STORE_PAUSE
            self._note_error("store", error)

    async def _write(self, owned: _Owned) -> None:
        fold = owned.fold
        async with owned.writing:
            if self._snapshots is None or fold.sequence < 0 or (fold.sequence == owned.written and not owned.dirty):
                return
            sequence, body = fold.sequence, fold.snapshot(list(owned.unsettled.values()))
            owned.dirty = False  # what is made while this is written is for the next one
            await self._snapshots.write(fold.name, body, (fold.offset, sequence))
            owned.written, owned.written_at = sequence, time.monotonic()
            if time.monotonic() - owned.vms_written_at > VMS_EVERY:
                owned.vms_written_at = time.monotonic()
                await self._snapshots.write_vms(fold.name, fold.vms())

    async def _look(self, name: str, fold: Partition) -> None:
        """How far the hub is ahead: asked for once in a while."""
        if time.monotonic() - self._looked.get(name, 0.0) < LOOK_EVERY:
            return
        self._looked[name] = time.monotonic()
        async with asyncio.timeout(self._config.hub.timeout.seconds):
            found = await self._client.get_partition_properties(name)
        events = max(0, int(found["last_enqueued_sequence_number"]) - max(fold.sequence, -1))
        self.lag[name] = Lag(events, max(0.0, time.time() - fold.enqueued) if events and fold.enqueued else 0.0)

    def _note_error(self, where: str, error: BaseException) -> None:
        self.errors[where] += 1
        text = " ".join(str(error).split())[:300] or type(error).__name__
        log.warning("%s: %s: %s", where, type(error).__name__, text)


def item_of(event: EventData) -> Item:
    """One record, as the fold takes it."""
    body = event.body
    data = body if isinstance(body, bytes) else b"".join(body)  # type: ignore[arg-type]
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
    hub, options = config.hub, client_options(config.hub)
    if isinstance(snapshots, BlobSnapshots):
        options |= {
            "checkpoint_store": snapshots,
            "load_balancing_interval": config.rebalance.seconds,
            "partition_ownership_expiration_interval": config.takeover.seconds,
        }
    if hub.connection_string is not None:
        return EventHubConsumerClient.from_connection_string(
            hub.connection_string.reveal(), config.consumer_group, eventhub_name=hub.hub, **options
        )
    return EventHubConsumerClient(hub.namespace or "", hub.hub or "", config.consumer_group, credential, **options)
