"""``Moves``: what is open moves along, where the hub was given more partitions.

The hub then sends the records of a group to another partition, which another instance may have. What was notified of
its events is known where they came before. So while the hub's number of partitions is another one than what a
partition was written down with:

- an event that is not known in its partition is looked for in all others: in this instance's memory, and in what other
  instances have written down. Its wave goes on from there, with its deliveries and threads.
- a partition that is new waits until the others have been read to where they ended then: the order is kept.
- what was heard of later in another partition is given up, events and VMs alike.

While the store is away, nobody waits for it: an event may then be notified again, under the same delivery ids.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from azure.core.exceptions import AzureError
from azure.eventhub.exceptions import EventHubError
from msgspec import MsgspecError

from notbefore.config.fleet import FleetConfig
from notbefore.fleet.checkpoints import Glance, Snapshots
from notbefore.fleet.hub_errors import store_explained
from notbefore.fleet.keeper import Held, Keeper
from notbefore.fleet.partition import Item, Partition, Snapshot, read_snapshot, read_vms
from notbefore.fleet.reading import Report

EVERY: Final = 10.0  # seconds between two looks at what others have written down
PATIENCE: Final = 15.0  # seconds, beside `takeover`, for which a new partition waits for the others to be read
FRESH: Final = 2.0  # seconds for which such a look is good enough
WAIT_STEP: Final = 0.5  # seconds between two looks at how far the others have read
MARGIN: Final = 2.0  # seconds by which another partition's clock may be ahead
TROUBLE: Final = (AzureError, EventHubError, OSError, TimeoutError, MsgspecError, ValueError)

log = logging.getLogger("notbefore.fleet.moves")


class Moves:
    """Of the consumer's event loop, for the life of one client. ``names``: all partitions of the hub."""

    def __init__(
        self, config: FleetConfig, client: Any, keeper: Keeper, snapshots: Snapshots, names: list[str]
    ) -> None:
        self._config = config
        self._client = client
        self._keeper = keeper
        self._snapshots = snapshots
        self._names = names
        self._began = keeper.now() + MARGIN
        self._written: dict[str, Glance] = {}
        self._others: dict[str, tuple[Glance, Partition, Snapshot]] = {}
        self._looked = float("-inf")
        self._waited = False
        self._waiting = asyncio.Lock()

    # ---- whether anything moves

    async def begin(self) -> None:
        """See whether the hub was given more partitions. Raises nothing: the store may be away."""
        try:
            self._written = await self._snapshots.glance()
        except TROUBLE as error:
            self._note(error)

    @property
    def _moving(self) -> bool:
        return any(self._is_old(name) for name in self._names)

    def _is_old(self, name: str) -> bool:
        """Something that is open there may get its records elsewhere by now."""
        held, written = self._keeper.partitions.get(name), self._written.get(name)
        partitions = held.fold.partitions if held is not None else written.partitions if written is not None else 0
        return partitions not in (0, len(self._names))

    async def run(self) -> None:
        """While anything moves, give up what has moved away; until this is canceled."""
        while True:
            await asyncio.sleep(EVERY)
            if not self._moving:
                continue
            try:
                await self._look(heard=True)
            except TROUBLE as error:
                self._note(error)
            self._give_up_what_moved()
            late = self._keeper.now() < self._began + self._config.window.seconds
            for held in () if late else list(self._keeper.partitions.values()):
                if self._is_old(held.fold.name):
                    held.fold.settle(len(self._names), self._began)
                    held.changed = True

    async def _look(self, *, heard: bool = False) -> None:
        """Read what other instances have written down since the last look; ``heard``: also of the VMs."""
        self._written = await self._snapshots.glance()
        for name, glance in self._written.items():
            if name in self._keeper.partitions:
                continue
            known = self._others.get(name)
            if known is None or known[0] != glance or heard:
                snapshot = read_snapshot(await self._snapshots.read(name))
                fold = self._keeper.new_fold(name)
                fold.restore(snapshot, read_vms(await self._snapshots.read_vms(name) or b"[]") if heard else ())
                self._others[name] = glance, fold, snapshot
        for name, held in list(self._keeper.partitions.items()) if heard else ():
            self._others.pop(name, None)
            await self._snapshots.write_vms(name, held.fold.vms())
        self._looked = time.monotonic()

    # ---- what comes here

    async def prepare(self, held: Held, items: Iterable[Item]) -> None:
        """Before records are folded: take over what is open of their events elsewhere. Raises nothing."""
        if not self._moving:
            return
        unknown = held.fold.unknown(items)
        if not unknown:
            return
        try:
            if not self._is_old(held.fold.name):
                async with self._waiting:
                    await self._wait_for_others()
            if time.monotonic() - self._looked > FRESH:
                await self._look()
        except TROUBLE as error:
            self._looked = time.monotonic()
            self._note(error)
        for key, report in unknown.items():
            if key not in held.fold.stories:  # it came with another one's wave
                self._adopt(held, key, report)

    async def _wait_for_others(self) -> None:
        """Until the old partitions have been read to where they ended when this began."""
        if self._waited:
            return
        self._waited = True
        log.info("the hub has %d partitions now: what is open moves along", len(self._names))
        found = await asyncio.gather(*map(self._client.get_partition_properties, self._names))
        ends = {one["id"]: int(one["last_enqueued_sequence_number"]) for one in found}
        until = time.monotonic() + self._config.takeover.seconds + PATIENCE
        while behind := [name for name in self._names if self._is_old(name) and self._reached(name) < ends[name]]:
            if time.monotonic() > until:
                log.warning("partitions %s are behind: not waiting for them any longer", ", ".join(behind))
                return
            await asyncio.sleep(WAIT_STEP)
            self._written = await self._snapshots.glance()

    def _reached(self, name: str) -> int:
        held, written = self._keeper.partitions.get(name), self._written.get(name)
        return held.fold.sequence if held is not None else written.sequence if written is not None else -1

    def _adopt(self, held: Held, key: str, report: Report) -> None:
        for fold in self._elsewhere(held).values():
            if key in fold.closed:
                held.fold.closed[key] = fold.closed[key]
                return
        for other in list(self._keeper.partitions.values()):
            if other is not held and (wave := other.fold.give(report)) is not None:
                self._keeper.move(wave, other, held)
                return
        for name, (glance, fold, snapshot) in self._others.items():
            if name not in self._keeper.partitions and (wave := fold.give(report)) is not None:
                self._keeper.adopt(held, wave, snapshot, glance.accepted)
                return

    # ---- what has gone from here

    def _elsewhere(self, held: Held) -> Mapping[str, Partition]:
        own = {name: one.fold for name, one in self._keeper.partitions.items() if one is not held}
        return {name: fold for name, (_, fold, _) in self._others.items() if name != held.fold.name} | own

    def _give_up_what_moved(self) -> None:
        for held in list(self._keeper.partitions.values()):
            fold = held.fold
            for other in self._elsewhere(held).values():
                gone = [key for key, story in fold.stories.items() if _is_later(other, key, story.heard_at)]
                for key in gone:
                    self._keeper.leave(held, key)
                heard, theirs = fold.silence.heard, other.silence.heard
                fold.silence.leave([vm for vm in heard.keys() & theirs.keys() if theirs[vm].at > heard[vm].at])

    def _note(self, error: BaseException) -> None:
        log.warning("what other instances have written down cannot be read: %s", store_explained(error))


def _is_later(fold: Partition, key: str, heard_at: float) -> bool:
    """Whether an event was heard of in another partition after ``heard_at``, in Unix seconds."""
    story, closed = fold.stories.get(key), fold.closed.get(key)
    return (story is not None and story.heard_at > heard_at) or (closed is not None and closed.at > heard_at)
