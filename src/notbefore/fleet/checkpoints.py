"""Where the snapshot of each partition is kept, with the position that it belongs to: files, or Blob Storage.

``FileSnapshots`` is for one instance alone; for several there is ``fleet.blob_snapshots``.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from notbefore.fleet.private import private


class LostPartitionError(Exception):
    """Another instance has written the snapshot: the partition is its by now."""


class SnapshotGoneError(Exception):
    """Somebody has deleted the snapshot, or the whole container: it is to be written anew."""


class Position(NamedTuple):
    """Up to where the log was read: the last record."""

    offset: str  # empty before the first one
    sequence: int
    enqueued: float  # Unix seconds of the hub's clock; 0 before the first one


class Snapshots(Protocol):
    """Where snapshots are kept."""

    @property
    def sdk_store(self) -> Any:
        """The checkpoint store with which the SDK shares the partitions out; ``None`` for one instance alone."""
        ...

    def of_hub(self, prefix: str, takeover: float, created: float) -> None:
        """Whose snapshots these are: ``NAMESPACE/HUB/GROUP``.

        ``takeover``: seconds after which the partitions of who is gone are others'. ``created``: Unix seconds of the
        hub's clock: an earlier position is of another hub of this name.
        """
        ...

    async def take(self, partition: str) -> bytes:
        """The last snapshot of a partition. From now on no other instance that had it can write; empty without one."""
        ...

    async def write(self, partition: str, body: bytes, position: Position) -> None:
        """Replace the snapshot and the checkpoint.

        Raises ``LostPartitionError`` where another instance has it, ``SnapshotGoneError`` where it was deleted.
        """
        ...

    async def versions(self) -> Mapping[str, str]:
        """What there is, by partition: another version is another snapshot."""
        ...

    async def read(self, partition: str) -> bytes:
        """The snapshot of a partition, whoever has it."""
        ...

    async def put_aside(self, partition: str, body: bytes) -> str:
        """Keep what cannot be read, for people; returns where."""
        ...

    def begin_anew(self, partition: str) -> None:
        """Its offset is of no use: the next reading starts at the window, whatever is written."""
        ...

    async def read_note(self, name: str) -> bytes:
        """A small text that all instances share; empty without one."""
        ...

    async def write_note(self, name: str, body: bytes) -> None:
        """Replace it."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class FileSnapshots:
    """One file a partition, for one instance alone: nobody else can read them."""

    sdk_store = None

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of_hub(self, prefix: str, takeover: float, created: float) -> None:
        """One directory is for one hub."""

    async def take(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``OSError``."""
        return await self.read(partition)

    async def write(self, partition: str, body: bytes, position: Position) -> None:  # noqa: ARG002 - as above
        """See ``Snapshots``; raises ``OSError``. The position stands in the snapshot as well."""
        await asyncio.to_thread(self._replace, partition, body)

    async def versions(self) -> Mapping[str, str]:
        """See ``Snapshots``; raises ``OSError``."""
        found = self._directory.glob("*") if self._directory.is_dir() else ()
        return {path.name: str(path.stat().st_mtime_ns) for path in found if path.name.isdigit()}

    async def read(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``OSError``."""
        with suppress(FileNotFoundError), open(self._directory / partition, "rb", opener=private) as file:  # noqa: ASYNC230 - small, and on the local disk
            return file.read()
        return b""

    async def put_aside(self, partition: str, body: bytes) -> str:
        """See ``Snapshots``; raises ``OSError``."""
        path = self._directory / f"{partition}.unreadable"
        await asyncio.to_thread(self._replace, path.name, body)
        return str(path)

    def begin_anew(self, partition: str) -> None:
        """Nobody else asks for the position."""

    async def read_note(self, name: str) -> bytes:
        """See ``Snapshots``; raises ``OSError``."""
        return await self.read(name)

    async def write_note(self, name: str, body: bytes) -> None:
        """See ``Snapshots``; raises ``OSError``."""
        await asyncio.to_thread(self._replace, name, body)

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

    async def close(self) -> None:
        """Nothing is open."""
