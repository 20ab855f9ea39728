"""``Comparison``: the inventory beside the VMs that were heard from in all partitions, whoever has them.

One instance compares: the one that has the first partition, in whose fold the missing VMs are kept. What was heard from
in the partitions of others it reads where they have written it down, some minutes ago at most.
"""

import asyncio
import logging
from typing import Final

from azure.core.exceptions import AzureError
from msgspec import MsgspecError

from notbefore.fleet.checkpoints import Snapshots
from notbefore.fleet.inventory import Inventory
from notbefore.fleet.keeper import Keeper
from notbefore.fleet.partition import read_vms

EVERY: Final = 15.0  # seconds between two comparisons
SOON: Final = 1.0  # seconds until the next attempt while the first partition is not this instance's
MARGIN: Final = 2.0  # seconds by which the hub's clock may be behind ours

log = logging.getLogger("notbefore.fleet.inventory")


class Comparison:
    """Of the consumer's event loop. ``partitions``: the names of all partitions of the hub.

    ``patience``: seconds after which a VM that is not heard from is missing.
    """

    def __init__(
        self,
        inventory: Inventory,
        keeper: Keeper,
        snapshots: Snapshots,
        partitions: list[str],
        patience: float,
    ) -> None:
        self._inventory = inventory
        self._keeper = keeper
        self._snapshots = snapshots
        self._partitions = sorted(partitions, key=lambda name: (len(name), name))
        self._patience = patience

    async def run(self) -> None:
        """Compare, until this is canceled."""
        while True:
            await asyncio.to_thread(self._inventory.look)
            pause = EVERY
            try:
                pause = EVERY if await self.compare(self._partitions) else SOON
            except (AzureError, OSError, TimeoutError, MsgspecError) as error:
                log.warning("the inventory cannot be compared now: %s", error)
            await asyncio.sleep(pause)

    async def compare(self, names: list[str]) -> bool:
        """Say which VMs of the inventory are to be heard from; ``False`` where the first partition is not here.

        Raises what the store does.
        """
        vms = self._inventory.vms
        if vms is None:
            return True
        if names[0] not in self._keeper.partitions:
            return False
        heard = {name: await self._heard(name) for name in names}
        first = self._keeper.partitions.get(names[0])
        if first is not None:  # it may have gone to another instance meanwhile
            known = {end for names in heard.values() for key in names for end in ends_of(key)}
            expected = {key: vm for key, vm in vms.items() if key not in known}
            first.fold.missing.expect(expected, max(first.fold.enqueued, self._keeper.now() - MARGIN), self._patience)
        return True

    async def _heard(self, name: str) -> set[str]:
        held = self._keeper.partitions.get(name)
        if held is not None:
            return set(held.fold.silence.heard)
        body = await self._snapshots.read_vms(name)
        return {key for key, one in (read_vms(body) if body else {}).items() if not one.missing}


def ends_of(key: str) -> tuple[str, str, str]:
    """What an inventory may call a VM: with its subscription and group, with its group, or by its name alone."""
    _, _, shorter = key.partition("/")
    return key, shorter, shorter.rpartition("/")[2]
