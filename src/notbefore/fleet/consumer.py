"""``Consumer``: the thread of ``notbefore fleet`` that reads the hub, with one client of the SDK
after another.

It uses the SDK's aio client with ``receive_batch``; the other methods are thirty times slower. The
SDK's retries are off: with them, consumers open a thousand connections a second while the hub is
unavailable, and report no error. When reading a partition fails, the client is closed, and after a
pause a new one is made. The ``Keeper`` stores the state.
"""

import asyncio
import concurrent.futures
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

from azure.core.exceptions import AzureError
from azure.eventhub import CloseReason, EventData
from azure.eventhub.aio import PartitionContext

from notbefore.config.model import FleetConfig
from notbefore.core.duration import back_off
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.fleet.hub_clock import HubClock
from notbefore.fleet.instance_state import InstanceState, Reading, state_of
from notbefore.fleet.keeper import Held, Keeper, Parts
from notbefore.fleet.mutes import NOTE, Mute, is_muted, read_mutes
from notbefore.fleet.notification import Notification
from notbefore.fleet.open_events import OpenEvent, open_events
from notbefore.fleet.partition import Partition
from notbefore.fleet.sdk import forget_tags, make_consumer, record_of
from notbefore.fleet.snapshot_store import LostPartitionError
from notbefore.net.streams import StreamsLoop, abort_streams

BATCH: Final = 300  # the most records of one partition in a batch
# the most records of all partitions that the SDK prefetches; it needs some 5 KB for each
BUFFERED: Final = 3_000
TURN_SECONDS: Final = 0.02  # after which other tasks get a turn, even within a batch
WAIT: Final = 0.5  # seconds without records after which a partition's fold advances by the clock
# seconds between two checks of the hub, of the mutes, and of the inventory
CHECK_EVERY: Final = 10.0
MARGIN: Final = 2.0  # seconds by which one partition's clock may be behind another's
HISTORY_EVERY: Final = 1.0  # seconds between two writes of new events to the history
STATE_SECONDS: Final = 1.0  # to wait for the consumer's thread to publish its state
FRESH_SECONDS: Final = 0.2  # after which a published state is made again
OTHERS_SECONDS: Final = 3.0  # to wait for the snapshots of other instances
CLOSE_SECONDS: Final = 5.0  # to wait when something is closed
FIRST_CLIENT_PAUSE: Final = 2.0  # seconds between two clients
LONGEST_CLIENT_PAUSE: Final = 30.0  # after several failures
# seconds that a client must last so that the next pause is the first one again
HEALTHY: Final = 60.0
LONGEST_TASK_PAUSE: Final = 30.0  # seconds before a task that fails is repeated
OTHER_READER: Final = (
    "another reader uses the consumer group {} of this hub: give each its own `consumer_group`, or"
    " all instances of one fleet the same `checkpoints`"
)
# an error of Event Hubs
UNKNOWN_OFFSET: Final = re.compile("supplied (offset|sequence number) .* is invalid")

Action = Callable[[], Awaitable[None]]
"""Something that the consumer does in its event loop."""

R = TypeVar("R")

log = logging.getLogger("notbefore.fleet.consumer")


class Consumer:
    """Reads the hub in one thread, with its own event loop, from ``run`` until ``stop``."""

    def __init__(self, config: FleetConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self.connected = False
        self.lag: dict[str, tuple[int, float]] = {}  # partition -> records and seconds behind
        self.mutes: list[Mute] = []
        self.client: Any = None
        self.keeper = Keeper(config, parts)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._client_over = asyncio.Event()  # set when the client has to be closed
        self._taken: set[str] = set()  # the partitions that this client reads
        self._published = self._make_state()
        self._published_at = time.monotonic()

    # ---- from any thread

    def state(self) -> InstanceState:
        """Return the state of this instance; the last one if its thread does not answer in time."""
        if self._loop is None:
            return self._make_state()  # the thread does not run yet
        self._ask(self._publish, STATE_SECONDS)
        return self._published

    def state_with_others(self) -> InstanceState:
        """Return the state with what other instances wrote some seconds ago."""
        self._ask(self.keeper.others.look, OTHERS_SECONDS)
        return self.state()

    def open_events(self, event_id: str) -> list[OpenEvent]:
        """Return the events with an EventId that are open in the partitions of this instance.

        Raises ``NotBeforeError`` if its thread does not answer in time.
        """
        events = self._ask(partial(self._open_events, event_id), STATE_SECONDS)
        if events is None:
            raise NotBeforeError("the instance does not know its events at the moment: try again")
        return events

    async def _open_events(self, event_id: str) -> list[OpenEvent]:
        return open_events(self.keeper.folds, event_id, self._parts.clock.now())

    def _ask(self, action: Callable[[], Coroutine[Any, Any, R]], patience: float) -> R | None:
        """Carry out an action in the event loop; return its result.

        ``patience``: the most seconds to wait for it. ``None`` if the loop does not run, ends
        meanwhile, or is slow.
        """
        loop = self._loop
        if loop is None or not loop.is_running():
            return None
        with suppress(RuntimeError, TimeoutError, concurrent.futures.CancelledError):
            return asyncio.run_coroutine_threadsafe(action(), loop).result(patience)
        return None

    def stop(self) -> None:
        """End ``run``."""
        if self._loop is None:
            self._end()
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._end)

    # ---- what other threads see

    async def _publish(self) -> None:
        if time.monotonic() - self._published_at > FRESH_SECONDS:
            self._published = self._make_state()
            self._published_at = time.monotonic()

    def _make_state(self) -> InstanceState:
        reading = Reading(self.connected, dict(self.lag), tuple(self.mutes))
        now = self._parts.clock.now()
        return state_of(self.keeper, reading, now, self._config.metrics_by)

    # ---- one client after another

    def run(self) -> None:
        """Read until ``stop``."""
        with asyncio.Runner(loop_factory=StreamsLoop) as runner:
            runner.run(self._run())

    def _end(self) -> None:
        self._stop.set()
        self._client_over.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        tasks = self._begin_tasks()
        failures = 0
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                # the SDK raises many errors; any of them ends this client
                await _attempt(self.keeper, "hub", self._read)
                if time.monotonic() - began > HEALTHY:
                    failures = 0
                failures += 1
                await self._pause(failures)
        finally:
            for task in tasks:
                task.cancel()
            await self._close()

    def _begin_tasks(self) -> list[asyncio.Task[None]]:
        """Begin the tasks that are repeated every few seconds."""
        regular = (
            (HISTORY_EVERY, "history", self.keeper.write_history),
            (CHECK_EVERY, "hub", self._watch),
            (CHECK_EVERY, "store", self._read_mutes),
            (CHECK_EVERY, "fold", self._compare),
            (CHECK_EVERY, "fold", self._follow),
            (CHECK_EVERY, "fold", self.keeper.find_split),
        )
        tasks: list[asyncio.Task[None]] = []
        for every, part, action in regular:
            tasks.append(asyncio.create_task(_regularly(self.keeper, every, part, action)))
        return tasks

    async def _pause(self, failures: int) -> None:
        """Wait before the next client.

        The pause is random, so that instances that failed together do not return together.
        """
        share = 0.5 + random.random() / 2  # noqa: S311 - no secret
        pause = share * back_off(failures, FIRST_CLIENT_PAUSE, LONGEST_CLIENT_PAUSE)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), pause)

    async def _close(self) -> None:
        """Write everything, and let go of the partitions.

        This is done at the end of the consumer, not of a client: while the hub is unavailable,
        there may be no client.
        """
        await _finish(self.keeper.write_history())
        await _finish(self.keeper.let_go(*self.keeper.partitions))
        await _finish(self._parts.snapshots.close())
        if self._parts.credential is not None:
            await _finish(self._parts.credential.close())

    async def _read(self) -> None:
        """Read with one client, until it fails or ``stop`` is called.

        Raises the hub's errors, and unforeseen ones.
        """
        self._taken = set()
        self._client_over = asyncio.Event()
        client = make_consumer(self._config, self._parts.credential, self._parts.snapshots)
        self.client = client
        try:
            positions = await self._look_at_hub(client)
            batch = min(BATCH, BUFFERED // len(positions) + 1)
            receiving = asyncio.create_task(
                client.receive_batch(
                    self._on_batch,
                    max_batch_size=batch,
                    max_wait_time=WAIT,
                    starting_position=positions,
                    on_error=self._on_error,
                    on_partition_close=self._on_close,
                    prefetch=batch,
                )
            )
            receiving.add_done_callback(self._on_end)
            await self._client_over.wait()
            if receiving.done():
                receiving.result()
        finally:
            self.connected = False
            self.lag = {}
            await _finish(client.close())  # this ends ``receiving``
            await abort_streams()

    async def _look_at_hub(self, client: Any) -> dict[str, Any]:
        """Return the positions from which to read partitions without a checkpoint.

        They are ``window`` before the last record of each partition.
        """
        async with asyncio.timeout(self._config.hub.timeout.seconds):
            hub = await client.get_eventhub_properties()
            partitions = await asyncio.gather(
                *map(client.get_partition_properties, hub["partition_ids"])
            )
        self._parts.snapshots.hub_was_made(hub["created_at"].timestamp())

        window = timedelta(seconds=self._config.window.seconds)
        ends: dict[str, int] = {}
        positions: dict[str, Any] = {}
        last_times: list[datetime] = []
        for partition in partitions:
            name = partition["id"]
            if partition["is_empty"]:
                ends[name] = -1
                positions[name] = "-1"
                continue
            last_time = partition["last_enqueued_time_utc"]
            last_times.append(last_time)
            ends[name] = int(partition["last_enqueued_sequence_number"])
            positions[name] = last_time - window

        self.keeper.ends = ends
        if last_times:
            self._parts.clock.advance_to(max(last_times).timestamp())
        # on failure, the previous mutes stay
        await _attempt(self.keeper, "store", self._read_mutes)
        return positions

    # ---- repeated every few seconds

    async def _read_mutes(self) -> None:
        self.mutes = read_mutes(await self._parts.snapshots.read(NOTE))

    async def _watch(self) -> None:
        """Measure the lag, and notice a hub that does not answer or has more partitions.

        If there are more partitions, this client ends, because the SDK asks for them only at its
        start. If the hub does not answer, it is not connected until a record comes; the SDK does
        not notice that.
        """
        client = self.client
        folds = self.keeper.folds
        if not self._taken:
            return
        try:
            async with asyncio.timeout(self._config.hub.timeout.seconds):
                names = await client.get_partition_ids()
                partitions = await asyncio.gather(
                    *(client.get_partition_properties(fold.name) for fold in folds)
                )
        except TimeoutError:
            self.connected = False
            raise

        self.connected = not self._client_over.is_set()
        before = len(self.keeper.ends)
        if len(names) != before:
            log.warning("the hub now has %d partitions, and had %d", len(names), before)
            self._client_over.set()
        self.lag = {
            fold.name: self._lag_of(fold, partition)
            for fold, partition in zip(folds, partitions, strict=True)
        }

    def _lag_of(self, fold: Partition, partition: Mapping[str, Any]) -> tuple[int, float]:
        """Return the records and the seconds by which a fold is behind its partition."""
        position = fold.state.position
        records = int(partition["last_enqueued_sequence_number"]) - position.sequence
        if records <= 0:
            return 0, 0.0
        if not position.enqueued:
            return records, 0.0
        return records, max(0.0, self._parts.clock.now() - position.enqueued)

    async def _read_inventory(self) -> None:
        if self._parts.inventory is not None:
            await asyncio.to_thread(self._parts.inventory.look)

    async def _compare(self) -> None:
        """Let the first partition expect the VMs of the inventory that are not heard from.

        Only the instance that has this partition does it.
        """
        inventory = self._parts.inventory
        if inventory is None or not self.connected:
            return
        await _attempt(self.keeper, "inventory", self._read_inventory)

        first = min(self.keeper.ends, key=_partition_order)
        held = self.keeper.partitions.get(first)
        if held is None or inventory.vms is None:
            return
        await self.keeper.others.look()
        heard: set[str] = set()
        for fold in self.keeper.folds:
            heard.update(fold.state.heard)
        for state in self.keeper.others.found.values():
            heard.update(state.heard)
        expected = {key: vm for key, vm in inventory.vms.items() if key not in heard}
        now = max(held.fold.state.position.enqueued, self._parts.clock.now() - MARGIN)
        held.fold.missing.expect(expected, now, self._config.missing_after.seconds)

    async def _follow(self) -> None:
        """Leave the events that have moved to other partitions, after partitions were added."""
        for fold in self.keeper.folds:
            if not fold.events.may_have_moved:
                continue
            await self.keeper.others.look()
            others = self.keeper.others_of(fold)
            for event_key in fold.events.follow(others, fold.state.position.enqueued):
                self._parts.outbox.end_reminders(fold.name, event_key)

    # ---- called by the SDK

    def _on_end(self, _receiving: asyncio.Task[None]) -> None:
        self._client_over.set()

    async def _on_close(self, context: PartitionContext, reason: CloseReason) -> None:
        self._taken.discard(context.partition_id)
        # if the hub is unavailable, the partition stays ours until another instance takes it
        is_lost = reason is CloseReason.OWNERSHIP_LOST and not self._client_over.is_set()
        if is_lost or self._stop.is_set():
            await self.keeper.let_go(context.partition_id)

    async def _on_batch(self, context: PartitionContext, events: list[EventData]) -> None:
        if self._client_over.is_set():
            return  # the next client reads these records again, from the stored position
        forget_tags(self.client, context)
        name = context.partition_id
        if events or name not in self._taken:
            self.connected = True
        if name not in self._taken:
            await self.keeper.take(name)
            self._taken.add(name)
        held = self.keeper.partitions.get(name)
        if held is None:  # another instance has it, which the SDK has not noticed yet
            raise LostPartitionError
        if events or self._is_up_to_date(held.fold):
            await self._fold(held, events)

    def _is_up_to_date(self, fold: Partition) -> bool:
        """Whether a fold may advance by the clock.

        If records are on their way, their times decide what is due.
        """
        has_read_all = fold.state.position.sequence >= self.keeper.ends.get(fold.name, -1)
        return self.connected and has_read_all

    async def _fold(self, held: Held, events: list[EventData]) -> None:
        """Fold a batch, and commit its notifications; other tasks get turns meanwhile."""
        fold = held.fold
        began = time.monotonic()
        for notifications in _chunks(fold, events, self._parts.clock):
            self._commit_all(fold, notifications)
            if time.monotonic() - began > TURN_SECONDS:
                await asyncio.sleep(0)
                if self.keeper.partitions.get(fold.name) is not held:
                    return  # another instance has taken it
                began = time.monotonic()
        await asyncio.sleep(0)

    def _commit_all(self, fold: Partition, notifications: list[Notification]) -> None:
        """Commit the notifications of a chunk in one step: a full outbox makes room once."""
        if not notifications:
            return
        with self._parts.outbox.opened():
            for notification in notifications:
                self._commit(fold, notification)

    def _commit(self, fold: Partition, notification: Notification) -> None:
        """Queue a notification and write its record, unless it is muted.

        A failure does not stop the others.
        """
        outbox = self._parts.outbox
        try:
            now = self._parts.clock.now()
            if is_muted(self.mutes, now, notification, fold.state.muted):
                outbox.mute(fold.name, notification)
                return
            line = outbox.commit(fold.name, notification)
        except Exception as error:  # noqa: BLE001 - an unforeseen one
            self.keeper.failed("fold", error)
            return
        self._parts.write_record(line + b"\n")

    async def _on_error(self, context: PartitionContext | None, error: Exception) -> None:
        """Handle an error of the hub or the store.

        After one of a partition, the SDK lets it go and balances again.
        """
        is_stolen = "link:stolen" in str(error)
        is_alone = self._config.checkpoints is None
        if isinstance(error, LostPartitionError) or (is_stolen and not is_alone):
            return  # the keeper has logged why it was not taken, or another instance has it
        if is_stolen:
            error = ConfigError(OTHER_READER.format(self._config.consumer_group))

        if isinstance(error, AzureError):
            self.keeper.failed("store", error)
        else:
            self.keeper.failed("hub", error)

        if context is None:
            return
        if UNKNOWN_OFFSET.search(str(error)):
            # the stored offsets are those of an earlier hub of this name
            self._parts.snapshots.hub_was_made(self._parts.clock.now())
            log.error(
                "the hub does not know a stored offset: partitions that are taken now are read from"
                " `window` on"
            )
        elif not isinstance(error, AzureError):
            self._client_over.set()


def _partition_order(name: str) -> tuple[int, str]:
    """Return a key by which the names of partitions, which are numbers, are in order."""
    return len(name), name


async def _finish(closing: Awaitable[Any]) -> None:
    """Wait until something is closed, for ``CLOSE_SECONDS`` at most; ignore errors."""
    with suppress(Exception):
        await asyncio.wait_for(closing, CLOSE_SECONDS)


def _chunks(
    fold: Partition,
    events: list[EventData],
    clock: HubClock,
) -> Iterator[list[Notification]]:
    """Fold a batch chunk by chunk; yield the notifications of each.

    The caller commits a chunk before it waits: the fold does not make its notifications again.
    """
    records = [record_of(event) for event in events]
    if records:
        # first: deliveries are due by the clock, which was late if the hub was quiet
        _, last_position = records[-1]
        clock.hear(last_position.enqueued)

    for body, position in records:
        if fold.has_read(position):
            continue
        while fold.is_due(position.enqueued):
            yield fold.advance_chunk(position.enqueued)
        yield fold.add(body, position)

    now = fold.state.position.enqueued  # while records come, the clock is their time
    if not records:
        now = max(now, clock.now() - MARGIN)
    while fold.is_due(now):
        yield fold.advance_chunk(now)


async def _regularly(keeper: Keeper, every: float, part: str, action: Action) -> None:
    """Repeat an action every ``every`` seconds, less often while it fails."""
    failures = 0
    while True:
        await asyncio.sleep(back_off(failures + 1, every, LONGEST_TASK_PAUSE))
        if await _attempt(keeper, part, action):
            failures = 0
        else:
            failures += 1


async def _attempt(keeper: Keeper, part: str, action: Action) -> bool:
    """Carry out an action; return whether it succeeded. An error is counted and logged."""
    try:
        await action()
    except Exception as error:  # noqa: BLE001 - of the hub, a disk or a store, or unforeseen
        keeper.failed(part, error)
        return False
    return True
