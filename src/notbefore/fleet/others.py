"""``Others``: what other instances have written down of their partitions: any instance shows the whole fleet."""

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Final

from azure.core.exceptions import AzureError

from notbefore.fleet.checkpoints import Snapshots
from notbefore.fleet.partition import Snapshot, read_snapshot

EVERY: Final = 5.0  # seconds between two looks at most
FAILURES: Final = (AzureError, OSError, TimeoutError)

log = logging.getLogger("notbefore.fleet.others")


class Others:
    """Of the consumer's event loop. ``own``: the partitions that this instance has at any time."""

    def __init__(self, snapshots: Snapshots, own: Collection[str]) -> None:
        self._snapshots = snapshots
        self._own = own
        self._versions: dict[str, str] = {}
        self._looked = float("-inf")
        self._lock = asyncio.Lock()
        self.found: dict[str, Snapshot] = {}  # by partition; replaced, and never changed

    async def look(self) -> None:
        """Read the snapshots that are others than at the last look. Raises nothing: what is known stays."""
        async with self._lock:
            if time.monotonic() - self._looked < EVERY:
                return
            try:
                await self._read()
            except FAILURES as error:
                log.warning("what other instances have written down cannot be read: %s", error)
            self._looked = time.monotonic()

    async def _read(self) -> None:
        own, found = set(self._own), dict(self.found)
        versions = dict(await self._snapshots.versions())
        for name, version in versions.items():
            if name not in own and self._versions.get(name) != version:
                try:
                    body = await self._snapshots.read(name)
                    if body:
                        found[name] = await asyncio.to_thread(read_snapshot, body)
                        self._versions[name] = version
                except (*FAILURES, ValueError) as error:  # the other partitions are shown all the same
                    log.warning("what another instance has written down of partition %s is not read: %s", name, error)
        self.found = {name: one for name, one in found.items() if name in versions and name not in own}
        self._versions = {name: version for name, version in self._versions.items() if name in self.found}
