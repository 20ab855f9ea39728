"""``Consumer``: the thread of ``notbefore fleet`` that reads the hub, with one client of the SDK after another.

The SDK's aio client with ``receive_batch``, since its other ways are thirty times slower. Its retries are off: with
them, established consumers open a thousand connections a second while the hub is away, and say nothing. On the first
error the client is closed, and another one is made after a pause. What was read is the ``Keeper``'s to write down.
"""

import asyncio
import concurrent.futures
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from azure.core.exceptions import AzureError
from azure.eventhub import CloseReason, EventData
from azure.eventhub.aio import PartitionContext

from notbefore.config.model import FleetConfig
from notbefore.core.duration import back_off
from notbefore.fleet.checkpoints import LostPartitionError, Others
from notbefore.fleet.keeper import HubClock, Keeper, NotTakenError, Parts
from notbefore.fleet.mutes import NOTE, Mute, is_muted, read_mutes
from notbefore.fleet.partition import Partition
from notbefore.fleet.sdk import forget_tags, make_consumer, record_of
from notbefore.fleet.snapshot import Snapshot
from notbefore.fleet.waves import Notification

BATCH: Final = 300  # records taken in at once from one partition
BUFFERED: Final = 3_000  # records of all partitions that the SDK asks for at once; a record is some 5 KB there
STEP: Final = 0.02  # seconds after which others have their turn, however much is to be notified
WAIT: Final = 0.5  # seconds after which a partition without records is given the time
LOOK_EVERY: Final = 10.0  # seconds between two looks at the hub, the mutes, and who of the inventory is not heard from
MARGIN: Final = 2.0  # seconds by which another partition's clock may be behind
HISTORY_EVERY: Final = 1.0  # seconds between two looks at what is new for the history
ASK_SECONDS: Final = 3.0  # for what other instances have written down
CLOSE_SECONDS: Final = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0  # seconds between clients, and until what failed is done again
HEALTHY: Final = 60.0  # seconds after which a client's failure is the first one again
UNKNOWN_OFFSET: Final = re.compile("supplied (offset|sequence number) .* is invalid")  # Event Hubs' words

log = logging.getLogger("notbefore.fleet.consumer")


class Consumer:
    """Runs in one thread, with an event loop of its own: ``run`` until ``stop``."""

    def __init__(self, config: FleetConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self.alive = True
        self.connected = False
        self.lag: dict[str, tuple[int, float]] = {}  # partition -> records and seconds behind the hub
        self.mutes: list[Mute] = []
        self.client: Any = None
        self.keeper = Keeper(config, parts)
        self._others = Others(parts.snapshots, self.keeper.partitions)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._over = asyncio.Event()  # this client is to be closed
        self._taken: set[str] = set()  # the partitions that this client reads

    # ---- from any thread

    def others(self) -> dict[str, Snapshot]:
        """What other instances have written down of the other partitions, as of some seconds ago."""
        if self._loop is not None and self.alive:
            # it ends; the store is slow: what is known is shown
            with suppress(RuntimeError, TimeoutError, concurrent.futures.CancelledError):
                asyncio.run_coroutine_threadsafe(self._others.look(), self._loop).result(ASK_SECONDS)
        return self._others.found

    def stop(self) -> None:
        """Come to an end."""

        def end() -> None:
            self._stop.set()
            self._over.set()

        if self._loop is None:
            end()
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(end)

    # ---- one client after another

    def run(self) -> None:
        """Read until ``stop``."""
        try:
            asyncio.run(self._run())
        finally:
            self.alive = False

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        tasks = [
            asyncio.create_task(_regularly(self.keeper, every, part, do))
            for every, part, do in (
                (HISTORY_EVERY, "history", self.keeper.write_history),
                (LOOK_EVERY, "hub", self._watch),
                (LOOK_EVERY, "store", self._read_mutes),
                (LOOK_EVERY, "fold", self._compare),
            )
        ]
        failures = 0
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                # the SDK raises many errors; any of them ends this client
                await _tried(self.keeper, "hub", self._read)
                failures = 1 if time.monotonic() - began > HEALTHY else failures + 1
                pause = back_off(failures, FIRST_PAUSE, LONGEST_PAUSE) * (0.5 + random.random() / 2)  # noqa: S311 - no secret
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), pause)
        finally:
            for task in tasks:
                task.cancel()
            # the hub may have been away: then nobody has closed a client
            await _ended(self.keeper.write_history(), self.keeper.let_go(*self.keeper.partitions))
            await _ended(self._parts.snapshots.close())
            if self._parts.credential is not None:
                await _ended(self._parts.credential.close())

    async def _read(self) -> None:
        """With one client, until it fails or ``stop``. Raises what the hub does, and what nobody foresaw."""
        self._taken, self._over = set(), asyncio.Event()
        client = self.client = make_consumer(self._config, self._parts.credential, self._parts.snapshots)
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
            receiving.add_done_callback(lambda _: self._over.set())
            await self._over.wait()
            await self.keeper.write_all()
            if receiving.done():
                receiving.result()
        finally:
            self.connected, self.lag = False, {}
            await _ended(client.close())  # so that it ends receiving

    async def _look_at_hub(self, client: Any) -> dict[str, Any]:
        """Where to begin each partition that has no checkpoint: the window before now, or before its last record."""
        async with asyncio.timeout(self._config.hub.timeout.seconds):
            hub = await client.get_eventhub_properties()
            found = await asyncio.gather(*map(client.get_partition_properties, hub["partition_ids"]))
        self._parts.snapshots.hub_was_made(hub["created_at"].timestamp())
        ends = {one["id"]: -1 if one["is_empty"] else int(one["last_enqueued_sequence_number"]) for one in found}
        self.keeper.ends = ends
        await _tried(self.keeper, "store", self._read_mutes)  # else they stay as they were
        now, window = datetime.now(UTC), timedelta(seconds=self._config.window.seconds)
        return {
            one["id"]: "-1" if one["is_empty"] else min(now, one["last_enqueued_time_utc"]) - window for one in found
        }

    # ---- what is done each few seconds

    async def _read_mutes(self) -> None:
        self.mutes = read_mutes(await self._parts.snapshots.read(NOTE))

    async def _watch(self) -> None:
        """See how far the hub is ahead, and end this client once it has more partitions: the SDK asks at its start."""
        client, folds = self.client, self.keeper.folds
        if not self.connected:
            return
        async with asyncio.timeout(self._config.hub.timeout.seconds):
            names = await client.get_partition_ids()
            found = await asyncio.gather(*(client.get_partition_properties(fold.name) for fold in folds))
        if len(names) != len(self.keeper.ends):
            log.warning("the hub has %d partitions now, and had %d", len(names), len(self.keeper.ends))
            self._over.set()
        lag, now = {}, self._parts.clock.now()
        for fold, one in zip(folds, found, strict=True):
            records = max(0, int(one["last_enqueued_sequence_number"]) - fold.position.sequence)
            heard = fold.position.enqueued
            lag[fold.name] = records, max(0.0, now - heard) if records and heard else 0.0
        self.lag = lag

    async def _compare(self) -> None:
        """See which VMs of the inventory nobody hears from: the instance does that has the first partition."""
        inventory = self._parts.inventory
        if inventory is None or not self.connected:
            return
        first = min(self.keeper.ends, key=lambda name: (len(name), name))
        await _tried(self.keeper, "inventory", lambda: asyncio.to_thread(inventory.look))
        held = self.keeper.partitions.get(first)
        if held is not None and inventory.vms is not None:
            await self._others.look()
            heard = {key for one in self._others.found.values() for key in one.heard}
            heard |= {key for fold in self.keeper.folds for key in fold.silence.heard}
            now = max(held.fold.position.enqueued, self._parts.clock.now() - MARGIN)
            expected = {key: vm for key, vm in inventory.vms.items() if key not in heard}
            held.fold.missing.expect(expected, now, self._config.missing_after.seconds)

    # ---- what the SDK calls

    async def _on_close(self, context: PartitionContext, reason: CloseReason) -> None:
        self._taken.discard(context.partition_id)
        # where the hub is away, the partition stays ours until somebody else takes it
        if reason is CloseReason.OWNERSHIP_LOST and not self._over.is_set():
            await self.keeper.let_go(context.partition_id)

    async def _on_batch(self, context: PartitionContext, events: list[EventData]) -> None:
        if self._over.is_set():
            return  # another client reads it again, from what is written
        self.connected = True
        forget_tags(self.client, context)
        name = context.partition_id
        if name not in self._taken:
            await self.keeper.take(name)
            self._taken.add(name)
        held = self.keeper.partitions.get(name)
        if held is None:  # it was lost, and the SDK has not noticed yet
            raise LostPartitionError
        began = time.monotonic()
        for made in _made(held.fold, events, self._parts.clock):
            if made is not None:
                self._commit(held.fold, made)
            if time.monotonic() - began > STEP:
                await asyncio.sleep(0)
                if self.keeper.partitions.get(name) is not held:
                    return  # it has gone to another instance
                began = time.monotonic()
        await asyncio.sleep(0)

    def _commit(self, fold: Partition, made: Notification) -> None:
        """Have it sent, unless it is muted. One that fails keeps no other one waiting."""
        try:
            sent = not is_muted(self.mutes, self._parts.clock.now(), made, fold.state.muted)
            line = self._parts.outbox.commit(fold.name, made, sent=sent)
        except Exception as error:  # noqa: BLE001 - nobody foresaw it
            self.keeper.failed("fold", error)
            return
        self._parts.write_record(line + b"\n")

    async def _on_error(self, context: PartitionContext | None, error: Exception) -> None:
        """Of the hub or of the store. Where it is of one partition, the SDK has let go of it, and balances again."""
        if "link:stolen" in str(error) or isinstance(error, LostPartitionError):
            return  # another instance has it
        of_store = isinstance(error, AzureError | NotTakenError)
        self.keeper.failed("store" if of_store else "hub", error.__cause__ or error)
        if context is not None and UNKNOWN_OFFSET.search(str(error)):
            self._parts.snapshots.not_known(name := context.partition_id)
            log.error("partition %s: the hub does not know the offset: it is read from `window` on", name)
        elif context is not None and not of_store:
            self._over.set()


async def _ended(*closing: Awaitable[Any]) -> None:
    """Wait for each of them, though not for long, whatever comes of it."""
    for one in closing:
        with suppress(Exception):
            await asyncio.wait_for(one, CLOSE_SECONDS)


def _made(fold: Partition, events: list[EventData], clock: HubClock) -> Iterator[Notification | None]:
    """What a fold makes of records, and of the time by now; ``None``: others may have their turn."""
    for event in events:
        yield from fold.add(*record_of(event))
        yield None
    now = fold.position.enqueued
    if events:  # while records come, the time is theirs
        clock.hear(now)
    yield from fold.advance(now if events else max(now, clock.now() - MARGIN))


async def _regularly(keeper: Keeper, every: float, part: str, do: Callable[[], Awaitable[None]]) -> None:
    """Do something each so many seconds; less often while it fails."""
    failures = 0
    while True:
        await asyncio.sleep(back_off(failures + 1, every, LONGEST_PAUSE))
        failures = 0 if await _tried(keeper, part, do) else failures + 1


async def _tried(keeper: Keeper, part: str, do: Callable[[], Awaitable[None]]) -> bool:
    """Do it; returns whether it succeeded."""
    try:
        await do()
    except Exception as error:  # noqa: BLE001 - of the hub, a disk or a store, or nobody foresaw it: tried again
        keeper.failed(part, error)
        return False
    return True
