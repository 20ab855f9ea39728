"""``BlobSnapshots``: snapshots in Blob Storage, for any number of instances.

The snapshot is the content of the blob whose metadata is the checkpoint, as the SDK and other tools know it: both are
replaced in one write. Imported only where it is configured: the SDK of Blob Storage is 27 MB.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final

from azure.core.exceptions import AzureError, ResourceExistsError, ResourceModifiedError, ResourceNotFoundError
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore

from notbefore.config.model import Checkpoints
from notbefore.fleet.checkpoints import LostPartitionError, Snapshots
from notbefore.fleet.snapshot import Position

STORE_SECONDS: Final = 15.0  # for one request to Blob Storage
NO_OFFSET: Final = "-1"  # no value of metadata may be empty; such a checkpoint is not used: its sequence number is -1
HOLD_SECONDS: Final = 15.0  # after the checkpoints were deleted, in which nobody claims partitions
_CHANGED: Final = (ResourceModifiedError, ResourceExistsError)  # since we read it


class BlobSnapshots(Snapshots, BlobCheckpointStore):
    """A container of Blob Storage; it is also the checkpoint store that the SDK balances the partitions with.

    Who takes a partition over writes the metadata at once, so that whoever had it before cannot write any more: all
    writing asks for the ETag of one's own last writing (``If-Match``). Everything raises ``AzureError``, or
    ``TimeoutError``.
    """

    _hold_until = 0.0  # monotonic seconds: nobody claims partitions before
    _respite_until = 0.0  # monotonic seconds: until then the partitions of others are theirs

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._etags: dict[str, str] = {}  # of what was written last, by partition

    async def take(self, partition: str) -> bytes:
        """See ``Snapshots``. A store that returns an old snapshot is asked again at the SDK's next balancing."""
        self._etags.pop(partition, None)
        body, properties = await self._download(partition)
        if properties is not None:
            async with asyncio.timeout(STORE_SECONDS):
                written = await self._blob(partition).set_blob_metadata(properties.metadata, if_match=properties.etag)
            self._etags[partition] = str(written["etag"])
        return body

    async def write(self, partition: str, body: bytes, position: Position) -> None:
        """See ``Snapshots``. A snapshot that somebody has deleted is written anew, unless somebody else has done so."""
        metadata = {"offset": position.offset or NO_OFFSET, "sequencenumber": str(position.sequence)}
        metadata["enqueued"] = repr(position.enqueued)
        try:
            try:
                etag = await self._upload(partition, body, self._etags.get(partition), metadata)
            except _CHANGED:  # or somebody has deleted it
                etag = await self._upload(partition, body, None, metadata)
        except _CHANGED:
            raise LostPartitionError(partition) from None
        self._etags[partition] = etag

    async def list_ownership(self, *names: Any, **options: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: who has which partition, with times by the clock of this machine, as the SDK compares them.

        Where nobody has any, though this instance does, the checkpoints were deleted: all instances are given the time
        to write theirs anew. Where the store was away, nobody could say that he lives: they have ``takeover`` again.
        """
        ahead = 0.0

        def note(response: Any) -> None:
            nonlocal ahead
            ahead = time.time() - parsedate_to_datetime(response.http_response.headers["Date"]).timestamp()

        try:
            found = list(await super().list_ownership(*names, raw_response_hook=note, **options))
        except Exception:
            self._respite_until = time.monotonic() + self._takeover
            raise
        for one in found:
            respite = time.monotonic() < self._respite_until
            one["last_modified_time"] = time.time() if respite else one["last_modified_time"] + ahead
        if not found and self._etags and self._hold_until + HOLD_SECONDS < time.monotonic():
            self._hold_until = time.monotonic() + HOLD_SECONDS
        if time.monotonic() < self._hold_until:
            raise AzureError("the checkpoints were deleted: the instances write them anew")
        return found

    async def listed(self) -> dict[str, tuple[str, Position]]:
        """See ``Snapshots``."""
        found, prefix = {}, f"{self._whose}checkpoint/"
        async with asyncio.timeout(STORE_SECONDS):
            async for blob in self._container_client.list_blobs(prefix, include=["metadata"]):
                said, position = blob.metadata or {}, Position()
                with suppress(ValueError, KeyError):
                    position = Position(said["offset"], int(said["sequencenumber"]), float(said["enqueued"]))
                found[blob.name.removeprefix(prefix)] = str(blob.etag), position
        return found

    async def read(self, name: str) -> bytes:
        """See ``Snapshots``."""
        return (await self._download(name))[0]

    async def change(self, note: str, change: Callable[[bytes], bytes]) -> None:
        """See ``Snapshots``."""
        body, properties = await self._download(note)
        try:
            await self._upload(note, change(body), properties and properties.etag)
        except _CHANGED:
            raise AzureError(f"somebody else has just changed the {note}: try again") from None

    def _blob(self, name: str) -> Any:
        return self._get_blob_client(f"{self._whose}{'checkpoint/' if name.isdigit() else ''}{name}")

    async def _download(self, name: str) -> tuple[bytes, Any]:
        """The content of a partition's blob, or of a note's, and its properties; ``None`` where there is none."""
        try:
            async with asyncio.timeout(STORE_SECONDS):
                found = await self._blob(name).download_blob()
                return await found.readall(), found.properties
        except ResourceNotFoundError:
            return b"", None

    async def _upload(self, name: str, body: bytes, etag: str | None, metadata: Mapping[str, str] | None = None) -> str:
        """Replace the blob that has this ETag, or make it; returns its new one."""
        unchanged = {"if_match": etag} if etag else {"if_none_match": "*"}
        async with asyncio.timeout(STORE_SECONDS):
            written = await self._blob(name).upload_blob(body, overwrite=True, metadata=metadata, **unchanged)
        return str(written["etag"])

    async def close(self) -> None:
        """Close the connections."""
        await self._container_client.close()


def make_blob_snapshots(settings: Checkpoints, credential: Any) -> BlobSnapshots:
    """The container that the settings name; ``credential``: an identity, for a URL without a key."""
    options: dict[str, Any] = {"retry_total": 1, "connection_timeout": 5, "read_timeout": STORE_SECONDS}
    options |= {"initial_backoff": 1, "random_jitter_range": 1}  # seconds; by default the one retry comes after 15
    if settings.connection_string is not None:
        made = BlobSnapshots.from_connection_string(
            settings.connection_string.reveal(), settings.container or "", **options
        )
        assert isinstance(made, BlobSnapshots)  # noqa: S101 - `from_connection_string` makes its own class
        return made
    account, _, container = (settings.container_url or "").rstrip("/").rpartition("/")
    return BlobSnapshots(account, container, credential=credential, **options)
