"""Where the snapshot of each partition is kept, with the position that it belongs to: files, or Blob Storage.

``FileSnapshots`` is for one instance alone; for several there is ``fleet.blob_snapshots``. ``Others``: what those have
written down, so that any instance shows the whole fleet.
"""

import asyncio
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from azure.core.exceptions import AzureError
from azure.eventhub.aio import CheckpointStore

from notbefore.fleet.snapshot import Position, Snapshot, read_snapshot
from notbefore.store.lock import OwnerLock, private

EVERY: Final = 5.0  # seconds between two looks at most
STORE_ERRORS: Final = (AzureError, OSError)
FAILURES: Final = (*STORE_ERRORS, ValueError)  # or what it holds cannot be read

log = logging.getLogger("notbefore.fleet.checkpoints")


class LostPartitionError(Exception):
    """Another instance has written the snapshot: the partition is its by now."""


class Snapshots(CheckpointStore):
    """Where snapshots are kept; the SDK has its checkpoints from there, and shares the partitions out by it."""

    _whose = ""  # NAMESPACE/HUB/GROUP/
    _takeover = 0.0  # seconds after which the partitions of who is gone are others'
    _created = 0.0  # Unix seconds: see ``hub_was_made``
    _unknown = frozenset[str]()  # partitions: see ``not_known``

    def belong_to(self, namespace: str, hub: str, group: str, takeover: float) -> None:
        """They are those of this consumer group from now on; ``takeover`` is in seconds."""
        self._whose, self._takeover = f"{namespace}/{hub}/{group}/".lower(), takeover

    def hub_was_made(self, at: float) -> None:
        """In Unix seconds of its clock: where a position is older, it is of another hub of this name."""
        self._created = at

    def not_known(self, partition: str) -> None:
        """The hub does not know the position: the next time that it is asked for it is of another hub as well."""
        self._unknown |= {partition}

    async def list_checkpoints(self, *_names: str, **_: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: where to go on. A partition that has no position of this hub is read from the window on."""
        unknown, self._unknown = self._unknown, frozenset()
        return [
            {"partition_id": name, "offset": one.offset, "sequence_number": one.sequence}
            for name, (_, one) in (await self.listed()).items()
            if one.sequence >= 0 and one.enqueued >= self._created and name not in unknown
        ]

    async def update_checkpoint(self, checkpoint: Mapping[str, Any], **_: Any) -> None:
        """Nothing: ``write`` does it."""

    async def take(self, partition: str) -> bytes:
        """The last snapshot of a partition. From now on no other instance that had it can write; empty without one."""
        return await self.read(partition)

    @abstractmethod
    async def write(self, partition: str, body: bytes, position: Position) -> None:
        """Replace the snapshot and the checkpoint. Raises ``LostPartitionError`` where another instance has it."""

    @abstractmethod
    async def listed(self) -> dict[str, tuple[str, Position]]:
        """What there is, by partition: its version, which is another one for each snapshot, and the position of it."""

    @abstractmethod
    async def read(self, name: str) -> bytes:
        """The snapshot of a partition, whoever has it, or a note, which all instances share; empty without one."""

    @abstractmethod
    async def change(self, note: str, change: Callable[[bytes], bytes]) -> None:
        """Replace a note by what ``change`` makes of it, unless somebody else changes it meanwhile."""

    async def close(self) -> None:
        """Close the connections."""


class FileSnapshots(Snapshots):
    """One file a partition, for one instance alone: nobody else can read them. Everything raises ``OSError``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def list_ownership(self, *_names: str, **_: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: nobody else has a partition."""
        return []

    async def claim_ownership(self, ownership_list: Iterable[dict[str, Any]], **_: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: this instance has all that it claims."""
        return [one | {"last_modified_time": 0.0} for one in ownership_list]

    async def write(self, partition: str, body: bytes, position: Position) -> None:  # noqa: ARG002 - it is in the body
        """See ``Snapshots``."""
        await asyncio.to_thread(self._replace, partition, body)

    async def listed(self) -> dict[str, tuple[str, Position]]:
        """See ``Snapshots``; the positions stand in the snapshots."""

        def listed() -> dict[str, tuple[str, Position]]:
            found = {}
            for path in self._directory.glob("*") if self._directory.is_dir() else ():
                if path.name.isdigit():
                    version, position = str(path.stat().st_mtime_ns), Position()
                    with suppress(ValueError):  # whoever takes it puts it aside
                        position = read_snapshot(self._read(path.name)).position
                    found[path.name] = version, position
            return found

        return await asyncio.to_thread(listed)

    async def read(self, name: str) -> bytes:
        """See ``Snapshots``."""
        return await asyncio.to_thread(self._read, name)

    async def change(self, note: str, change: Callable[[bytes], bytes]) -> None:
        """See ``Snapshots``."""

        def change_it() -> None:
            # the instance makes the directory: made by root for a command, it would be of no use to a service
            if not self._directory.is_dir():
                raise FileNotFoundError(f"there is no {self._directory}: start the instance first")
            lock = OwnerLock(self._directory)
            lock.acquire()
            try:
                self._replace(note, change(self._read(note)))
            finally:
                lock.release()

        await asyncio.to_thread(change_it)

    def _read(self, name: str) -> bytes:
        with suppress(FileNotFoundError), open(self._directory / name, "rb", opener=private) as file:
            return file.read()
        return b""

    def _replace(self, name: str, body: bytes) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._directory / f"{name}.new"
        with open(new, "wb", opener=private) as file:
            if hasattr(os, "geteuid") and os.geteuid() == 0:  # a command of root's, for an instance of another user
                owner = self._directory.stat()
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._directory / name)


class Others:
    """Of the consumer's event loop. ``own``: the partitions that this instance has at any time."""

    def __init__(self, snapshots: Snapshots, own: Collection[str]) -> None:
        self._snapshots = snapshots
        self._own = own
        self._looked = float("-inf")
        self._look: asyncio.Task[None] | None = None
        self._found: dict[str, tuple[str, Snapshot]] = {}  # by partition, with its version; replaced, and never changed

    @property
    def found(self) -> dict[str, Snapshot]:
        """By partition; without those that this instance has taken since the last look. From any thread."""
        return {name: one for name, (_, one) in self._found.items() if name not in self._own}

    async def look(self) -> None:
        """See what is new; who comes meanwhile waits for the same look. Raises nothing: what is known stays."""
        if self._look is None or (self._look.done() and time.monotonic() - self._looked >= EVERY):
            self._look = asyncio.create_task(self._read_all())
        await self._look

    async def _read_all(self) -> None:
        """Read the snapshots that are others than at the last look."""
        try:
            listed = await self._snapshots.listed()
            found = {name: await self._read(name, listed[name][0]) for name in listed.keys() - set(self._own)}
            self._found = {name: one for name, one in found.items() if one is not None}
        except FAILURES as error:
            log.warning("what other instances have written down cannot be read: %s", error)
        self._looked = time.monotonic()

    async def _read(self, name: str, version: str) -> tuple[str, Snapshot] | None:
        """A snapshot; what was known of it where it cannot be read: the others are shown all the same."""
        known = self._found.get(name)
        if known is not None and known[0] == version:
            return known
        try:
            return version, await asyncio.to_thread(read_snapshot, await self._snapshots.read(name))
        except FAILURES as error:
            log.warning("what another instance has written down of partition %s is not read: %s", name, error)
            return known
