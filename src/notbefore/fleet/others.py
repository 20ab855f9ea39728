"""``Others``: what other instances have written down of their partitions: any instance shows the whole fleet."""

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Final

from azure.core.exceptions import AzureError

from notbefore.fleet.checkpoints import Snapshots
from notbefore.fleet.snapshot import Snapshot, read_snapshot

EVERY: Final = 5.0  # seconds between two looks at most
FAILURES: Final = (AzureError, OSError, TimeoutError, ValueError)

log = logging.getLogger("notbefore.fleet.others")


class Others:
    """Of the consumer's event loop. ``own``: the partitions that this instance has at any time."""

    def __init__(self, snapshots: Snapshots, own: Collection[str]) -> None:
        self._snapshots = snapshots
        self._own = own
        self._versions: dict[str, str] = {}  # of what was found
        self._looked = float("-inf")
        self._look: asyncio.Task[None] | None = None
        self._found: dict[str, Snapshot] = {}  # by partition; replaced, and never changed

    @property
    def found(self) -> dict[str, Snapshot]:
        """By partition; without those that this instance has taken since the last look. From any thread."""
        return {name: one for name, one in self._found.items() if name not in self._own}

    async def look(self) -> None:
        """See what is new; who comes meanwhile waits for the same look. Raises nothing: what is known stays."""
        if self._look is None or (self._look.done() and time.monotonic() - self._looked >= EVERY):
            self._look = asyncio.create_task(self._read_all())
        await self._look

    async def _read_all(self) -> None:
        """Read the snapshots that are others than at the last look."""
        try:
            versions = await self._snapshots.versions()
            found = {name: await self._read(name, versions[name]) for name in versions.keys() - set(self._own)}
            self._found = {name: one for name, one in found.items() if one is not None}
        except FAILURES as error:
            log.warning("what other instances have written down cannot be read: %s", error)
        self._looked = time.monotonic()

    async def _read(self, name: str, version: str) -> Snapshot | None:
        """A snapshot; what was known of it where it cannot be read: the others are shown all the same."""
        known = self._found.get(name)
        if known is not None and self._versions.get(name) == version:
            return known
        try:
            read = await asyncio.to_thread(read_snapshot, await self._snapshots.read(name))
        except FAILURES as error:
            log.warning("what another instance has written down of partition %s is not read: %s", name, error)
            return known
        self._versions[name] = version
        return read
