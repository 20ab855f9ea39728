"""Where the snapshot of each partition is kept, with the position that it belongs to: files, or Blob Storage.

In Blob Storage the snapshot is the content of the blob whose metadata is the checkpoint, as the SDK and other tools
know it. So both are replaced in one write, and always belong together.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from azure.core.exceptions import ResourceExistsError, ResourceModifiedError, ResourceNotFoundError
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore

from notbefore.config.fleet import Checkpoints

STORE_SECONDS: Final = 15.0  # for one request to Blob Storage


class LostPartitionError(Exception):
    """Another instance has written the snapshot: the partition is its by now."""


class Snapshots(Protocol):
    """Where snapshots are kept."""

    async def read(self, partition: str) -> bytes:
        """The last snapshot of a partition; empty without one."""
        ...

    async def write(self, partition: str, body: bytes, position: tuple[str, int]) -> None:
        """Replace the snapshot and the checkpoint; ``position``: offset and sequence number of the last record.

        Raises ``LostPartitionError`` where another instance has replaced it meanwhile.
        """
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

    async def close(self) -> None:
        """Close the connections."""
        ...


class FileSnapshots:
    """One file a partition, for one instance alone: nobody else can read them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def read(self, partition: str) -> bytes:
        """See ``Snapshots``."""
        with suppress(FileNotFoundError):
            _, _, body = (self._directory / partition).read_bytes().partition(b"\n")
            return body
        return b""

    async def write(self, partition: str, body: bytes, position: tuple[str, int]) -> None:
        """See ``Snapshots``; raises ``OSError``."""
        await self._replace(partition, position[0].encode() + b"\n" + body)

    async def read_vms(self, partition: str) -> bytes:
        """See ``Snapshots``."""
        with suppress(FileNotFoundError):
            return (self._directory / f"{partition}.vms").read_bytes()
        return b""

    async def write_vms(self, partition: str, body: bytes) -> None:
        """See ``Snapshots``; raises ``OSError``."""
        await self._replace(f"{partition}.vms", body)

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
        return {path.name: path.read_bytes().partition(b"\n")[0].decode() for path in found if path.name.isdigit()}

    async def close(self) -> None:
        """Nothing is open."""


class BlobSnapshots(BlobCheckpointStore):
    """A container of Blob Storage; it is also the checkpoint store that the SDK balances the partitions with."""

    _prefix = ""

    def of_hub(self, namespace: str, hub: str, group: str) -> None:
        """Whose snapshots these are."""
        self._prefix = f"{namespace}/{hub}/{group}/checkpoint/".lower()
        self._etags: dict[str, str | None] = {}

    async def read(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``AzureError``."""
        client = self._get_blob_client(self._prefix + partition)
        try:
            async with asyncio.timeout(STORE_SECONDS):
                found = await client.download_blob()
                body: bytes = await found.readall()
        except ResourceNotFoundError:
            self._etags[partition] = None
            return b""
        self._etags[partition] = found.properties.etag
        return body

    async def write(self, partition: str, body: bytes, position: tuple[str, int]) -> None:
        """See ``Snapshots``; raises ``AzureError``."""
        client = self._get_blob_client(self._prefix + partition)
        etag = self._etags.get(partition)
        unchanged: Any = {"if_match": etag} if etag else {"if_none_match": "*"}
        metadata = {"offset": position[0], "sequencenumber": str(position[1])}
        try:
            async with asyncio.timeout(STORE_SECONDS):
                written = await client.upload_blob(body, overwrite=True, metadata=metadata, **unchanged)
        except (ResourceModifiedError, ResourceExistsError):
            raise LostPartitionError(partition) from None
        self._etags[partition] = written["etag"]

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

    async def close(self) -> None:
        """Close the connections."""
        await self._container_client.close()


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
