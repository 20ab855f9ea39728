"""Where the snapshot of each partition is kept, with the position that it belongs to: files, or Blob Storage.

In Blob Storage the snapshot is the content of the blob whose metadata is the checkpoint, as the SDK and other tools
know it. So both are replaced in one write, and always belong together. That a delivery was accepted is added to the
metadata alone, which is a small request.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from uuid import uuid4

from azure.core.exceptions import ResourceExistsError, ResourceModifiedError, ResourceNotFoundError
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore

from notbefore.config.fleet import Checkpoints

STORE_SECONDS: Final = 15.0  # for one request to Blob Storage
MARK_SECONDS: Final = 3.0  # for a small one, for which a sink waits
NO_MARK: Final = "-"  # no value of metadata may be empty


class LostPartitionError(Exception):
    """Another instance has written the snapshot: the partition is its by now."""


class Position(NamedTuple):
    """Up to where the log was read: offset and sequence number of the last record."""

    offset: str
    sequence: int


class Written(NamedTuple):
    """What was written of a partition: the snapshot, and the marks of the deliveries accepted since."""

    body: bytes
    accepted: tuple[str, ...] = ()


class Snapshots(Protocol):
    """Where snapshots are kept."""

    async def take(self, partition: str) -> Written:
        """The last snapshot of a partition. From now on no other instance that had it can write; empty without one."""
        ...

    async def holds(self, partition: str) -> bool:
        """Whether nobody else has taken or written it since."""
        ...

    async def write(self, partition: str, body: bytes, position: Position, accepted: Sequence[str]) -> None:
        """Replace the snapshot, the checkpoint and the marks; raises ``LostPartitionError`` where another has it."""
        ...

    async def mark(self, partition: str, accepted: Sequence[str]) -> None:
        """Replace the marks alone, of a snapshot that there is; raises ``LostPartitionError`` where another has it."""
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

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._anew: set[str] = set()

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

    async def read_vms(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``OSError``."""
        return self._read(f"{partition}.vms")

    async def write_vms(self, partition: str, body: bytes) -> None:
        """See ``Snapshots``; raises ``OSError``."""
        await self._replace(f"{partition}.vms", body)

    def _read(self, name: str) -> bytes:
        with suppress(FileNotFoundError):
            return (self._directory / name).read_bytes()
        return b""

    async def _replace(self, name: str, body: bytes) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._directory / f"{name}.new"
        with new.open("wb") as file:
            file.write(body)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        new.replace(self._directory / name)

    async def positions(self) -> Mapping[str, str] | None:
        """See ``Snapshots``."""
        found = self._directory.glob("*") if self._directory.is_dir() else ()
        names = [path.name for path in found if path.name.isdigit() and path.name not in self._anew]
        return {name: self._read(name).partition(b"\n")[0].decode() for name in names}

    def begin_anew(self, partition: str) -> None:
        """See ``Snapshots``."""
        self._anew.add(partition)

    async def close(self) -> None:
        """Nothing is open."""


class BlobSnapshots(BlobCheckpointStore):
    """A container of Blob Storage; it is also the checkpoint store that the SDK balances the partitions with.

    Who takes a partition over writes the metadata at once, so that whoever had it before cannot write any more: all
    writing asks for the ETag of one's own last writing (``If-Match``).
    """

    _prefix = ""
    _blobs: dict[str, "_Blob"]
    _anew: set[str]

    def of_hub(self, namespace: str, hub: str, group: str) -> None:
        """Whose snapshots these are."""
        prefix = f"{namespace}/{hub}/{group}/checkpoint/".lower()
        if prefix != self._prefix:
            self._prefix, self._blobs = prefix, {}
            self._anew, self._writer = set(), uuid4().hex

    async def take(self, partition: str) -> Written:
        """See ``Snapshots``; raises ``AzureError``."""
        client = self._get_blob_client(self._prefix + partition)
        while True:
            self._blobs.pop(partition, None)
            try:
                async with asyncio.timeout(STORE_SECONDS):
                    found = await client.download_blob()
                    body: bytes = await found.readall()
            except ResourceNotFoundError:
                return Written(b"")
            metadata = dict(found.properties.metadata)
            accepted = _marks_in(metadata)
            self._blobs[partition] = _Blob(found.properties.etag, metadata)
            try:
                await self.mark(partition, accepted)
            except LostPartitionError:  # between reading and writing; the next one sees it
                continue
            return Written(body, tuple(accepted))

    async def holds(self, partition: str) -> bool:
        """See ``Snapshots``; raises ``AzureError``."""
        blob = self._blobs.get(partition)
        if blob is None:
            return False
        try:
            await self.mark(partition, _marks_in(blob.metadata))
        except LostPartitionError:
            return False
        return True

    async def write(self, partition: str, body: bytes, position: Position, accepted: Sequence[str]) -> None:
        """See ``Snapshots``; raises ``AzureError``."""
        metadata = {"offset": position.offset, "sequencenumber": str(position.sequence)} | self._marks(accepted)
        client = self._get_blob_client(self._prefix + partition)

        async def upload(unchanged: dict[str, Any]) -> Mapping[str, Any]:
            async with asyncio.timeout(STORE_SECONDS):
                return await client.upload_blob(body, overwrite=True, metadata=metadata, **unchanged)

        await self._replace(partition, metadata, upload)
        self._anew.discard(partition)

    async def mark(self, partition: str, accepted: Sequence[str]) -> None:
        """See ``Snapshots``; raises ``AzureError``."""
        metadata = self._blobs[partition].metadata | self._marks(accepted)
        client = self._get_blob_client(self._prefix + partition)

        async def upload(unchanged: dict[str, Any]) -> Mapping[str, Any]:
            async with asyncio.timeout(MARK_SECONDS):
                return await client.set_blob_metadata(metadata, **unchanged)

        await self._replace(partition, metadata, upload)

    def _marks(self, accepted: Sequence[str]) -> dict[str, str]:
        return {"accepted": " ".join(accepted) or NO_MARK, "writer": self._writer}

    async def _replace(
        self,
        partition: str,
        metadata: dict[str, str],
        upload: Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]],
    ) -> None:
        blob = self._blobs.get(partition)
        try:
            try:
                written = await upload({"if_match": blob.etag} if blob else {"if_none_match": "*"})
            except (ResourceModifiedError, ResourceExistsError):
                # an earlier writing of ours may have come to its end without an answer
                async with asyncio.timeout(MARK_SECONDS):
                    found = await self._get_blob_client(self._prefix + partition).get_blob_properties()
                if found.metadata.get("writer") != self._writer:
                    raise
                written = await upload({"if_match": found.etag})
        except (ResourceModifiedError, ResourceExistsError, ResourceNotFoundError):
            raise LostPartitionError(partition) from None
        self._blobs[partition] = _Blob(written["etag"], metadata)

    async def list_checkpoints(self, *names: Any, **options: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: where to go on; raises ``AzureError``."""
        found = await super().list_checkpoints(*names, **options)
        return [one for one in found if one["partition_id"] not in self._anew]

    async def read_vms(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``AzureError``."""
        try:
            async with asyncio.timeout(STORE_SECONDS):
                found = await self._get_blob_client(self._vms(partition)).download_blob()
                body: bytes = await found.readall()
        except ResourceNotFoundError:
            return b""
        return body

    async def write_vms(self, partition: str, body: bytes) -> None:
        """See ``Snapshots``; raises ``AzureError``."""
        async with asyncio.timeout(STORE_SECONDS):
            await self._get_blob_client(self._vms(partition)).upload_blob(body, overwrite=True)

    def _vms(self, partition: str) -> str:
        return self._prefix.removesuffix("checkpoint/") + f"vms/{partition}"

    async def positions(self) -> Mapping[str, str] | None:
        """See ``Snapshots``."""
        return None

    def begin_anew(self, partition: str) -> None:
        """See ``Snapshots``."""
        self._anew.add(partition)

    async def close(self) -> None:
        """Close the connections."""
        await self._container_client.close()


def _marks_in(metadata: Mapping[str, str]) -> list[str]:
    return [mark for mark in metadata.get("accepted", NO_MARK).split() if mark != NO_MARK]


class _Blob(NamedTuple):
    """What was written last."""

    etag: str
    metadata: dict[str, str]


def make_blob_snapshots(settings: Checkpoints, credential: Any) -> BlobSnapshots:
    """The container that the settings name; ``credential``: an identity, for a URL without a key."""
    options: dict[str, Any] = {"retry_total": 1, "connection_timeout": 5, "read_timeout": STORE_SECONDS}
    if settings.connection_string is not None:
        made = BlobSnapshots.from_connection_string(
            settings.connection_string.reveal(), settings.container or "", **options
        )
        assert isinstance(made, BlobSnapshots)  # noqa: S101 - `from_connection_string` makes its own class
        return made
    account, _, container = (settings.container_url or "").rstrip("/").rpartition("/")
    return BlobSnapshots(account, container, credential=credential, **options)
