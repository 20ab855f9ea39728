"""Where the snapshot of each partition is kept, with the position that it belongs to: files, or Blob Storage.

``FileSnapshots`` is for one instance alone; for several there is ``fleet.blob_snapshots``.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from notbefore.fleet.private import private


class LostPartitionError(Exception):
    """Another instance has written the snapshot: the partition is its by now."""


class SnapshotGoneError(Exception):
    """Somebody has deleted the snapshot, or the whole container: it is to be written anew."""


class Position(NamedTuple):
    """Up to where the log was read: the last record. ``partitions``: see ``Snapshot``."""

    offset: str
    sequence: int
    partitions: int = 0
    enqueued: float = 0.0  # Unix seconds of the hub's clock


class Written(NamedTuple):
    """What was written of a partition: the snapshot, and the marks of the deliveries accepted since."""

    body: bytes
    accepted: tuple[str, ...] = ()


class _Read(Struct):
    """What is asked of a snapshot that is in a file."""

    enqueued: float = 0.0


class Glance(NamedTuple):
    """What is known of a snapshot without reading it: its version, position and marks; see ``partition.Snapshot``."""

    version: str
    sequence: int
    partitions: int
    accepted: tuple[str, ...]
    enqueued: float  # see ``Position``


class Snapshots(Protocol):
    """Where snapshots are kept."""

    @property
    def sdk_store(self) -> Any:
        """The checkpoint store with which the SDK shares the partitions out; ``None`` for one instance alone."""
        ...

    def of_hub(self, namespace: str, hub: str, group: str, takeover: float) -> None:
        """Whose snapshots these are. ``takeover``: seconds after which the partitions of who is gone are others'."""
        ...

    async def take(self, partition: str) -> Written:
        """The last snapshot of a partition. From now on no other instance that had it can write; empty without one."""
        ...

    async def holds(self, partition: str) -> bool:
        """Whether nobody else has taken or written it since; raises ``SnapshotGoneError``, as the next two do."""
        ...

    async def write(self, partition: str, body: bytes, position: Position, accepted: Sequence[str]) -> None:
        """Replace the snapshot, the checkpoint and the marks; raises ``LostPartitionError`` where another has it."""
        ...

    async def mark(self, partition: str, accepted: Sequence[str]) -> None:
        """Replace the marks alone, of a snapshot that there is; raises ``LostPartitionError`` where another has it."""
        ...

    async def glance(self) -> dict[str, Glance]:
        """What there is, by partition, of other instances as well."""
        ...

    async def enqueued(self) -> dict[str, float]:
        """When the hub took in the last record that was read, by partition: Unix seconds of its clock."""
        ...

    async def read(self, partition: str) -> bytes:
        """The snapshot of a partition that another instance has."""
        ...

    async def read_vms(self, partition: str) -> bytes:
        """The VMs that were heard from, as they were written last; empty without."""
        ...

    async def write_vms(self, partition: str, body: bytes) -> None:
        """Replace them."""
        ...

    async def positions(self) -> Mapping[str, str] | None:
        """The offset at which to go on, by partition; ``None`` where the SDK asks the checkpoint store itself."""
        ...

    def begin_anew(self, partition: str) -> None:
        """The hub does not know the offset: the next reading starts at the window, whatever is written."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class FileSnapshots:
    """One file a partition, for one instance alone: nobody else can read them."""

    sdk_store = None

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._anew: set[str] = set()

    def of_hub(self, namespace: str, hub: str, group: str, takeover: float) -> None:
        """One directory is for one hub."""

    async def take(self, partition: str) -> Written:
        """See ``Snapshots``; raises ``OSError``."""
        _, _, body = self._read(partition).partition(b"\n")
        return Written(body, tuple(self._read(f"{partition}.accepted").decode().split()))

    async def holds(self, partition: str) -> bool:
        """Always: nobody else can write them."""
        return (self._directory / partition).exists()

    async def write(self, partition: str, body: bytes, position: Position, accepted: Sequence[str]) -> None:
        """See ``Snapshots``; raises ``OSError``."""
        await self._replace(partition, position.offset.encode() + b"\n" + body)
        self._anew.discard(partition)
        await self.mark(partition, accepted)  # between the two there are some more: they do no harm

    async def mark(self, partition: str, accepted: Sequence[str]) -> None:
        """See ``Snapshots``; raises ``OSError``."""
        await self._replace(f"{partition}.accepted", " ".join(accepted).encode())

    async def glance(self) -> dict[str, Glance]:
        """Nothing: the only instance knows what it has."""
        return {}

    async def enqueued(self) -> dict[str, float]:
        """See ``Snapshots``; raises ``OSError``, and ``msgspec.MsgspecError`` for what is no snapshot."""
        return {name: msgspec.json.decode(await self.read(name), type=_Read).enqueued for name in self._names()}

    async def read(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``OSError``."""
        return self._read(partition).partition(b"\n")[2]

    async def read_vms(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``OSError``."""
        return self._read(f"{partition}.vms")

    async def write_vms(self, partition: str, body: bytes) -> None:
        """See ``Snapshots``; raises ``OSError``."""
        await self._replace(f"{partition}.vms", body)

    def _read(self, name: str) -> bytes:
        with suppress(FileNotFoundError), open(self._directory / name, "rb", opener=private) as file:
            return file.read()
        return b""

    async def _replace(self, name: str, body: bytes) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._directory / f"{name}.new"
        with open(new, "wb", opener=private) as file:  # noqa: ASYNC230 - small, and on the local disk
            file.write(body)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        new.replace(self._directory / name)

    async def positions(self) -> Mapping[str, str] | None:
        """See ``Snapshots``."""
        names = [name for name in self._names() if name not in self._anew]
        return {name: self._read(name).partition(b"\n")[0].decode() for name in names}

    def _names(self) -> list[str]:
        found = self._directory.glob("*") if self._directory.is_dir() else ()
        return [path.name for path in found if path.name.isdigit()]

    def begin_anew(self, partition: str) -> None:
        """See ``Snapshots``."""
        self._anew.add(partition)

    async def close(self) -> None:
        """Nothing is open."""
