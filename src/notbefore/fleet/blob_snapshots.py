"""``BlobSnapshots``: snapshots in Blob Storage, for any number of instances.

Each snapshot is the content of a blob. The blob's metadata is the checkpoint, in the form of the
SDK and other tools. One write replaces both. Imported only if it is configured: the SDK of Blob
Storage takes 32 MB.

The SDK's ``BlobCheckpointStore`` writes only the owners of partitions. It does not let others use
its client, so the snapshots have a client of their own.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

from azure.core.exceptions import (
    AzureError,
    ResourceExistsError,
    ResourceModifiedError,
    ResourceNotFoundError,
)
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore
from azure.storage.blob.aio import ContainerClient

from notbefore.config.model import Checkpoints
from notbefore.fleet.snapshot import Position
from notbefore.fleet.snapshot_store import LostPartitionError, Snapshots, Stored
from notbefore.store.lock import private_opener

# of the store's interface: that of ``BlobCheckpointStore``, which Azure Stack has too
API_VERSION: Final = "2019-07-07"
STORE_SECONDS: Final = 15.0  # for one read, write or listing
# metadata may not be empty; the checkpoint is not used: its sequence number is -1
NO_OFFSET: Final = "-1"
MAX_OWNER_IDS: Final = 20  # the newest ids of clients that are kept
HOLD_SECONDS: Final = 15.0  # without claims of partitions, after the checkpoints were deleted
# the blob is not as we last read or wrote it
_CHANGED: Final = (ResourceModifiedError, ResourceExistsError)


class OwnerIds:
    """The ids of the clients that have read with this state directory, in a file there.

    Only one process uses the directory, so the partitions of all of these clients but the current
    one have no reader.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._current = ""
        self._ids: list[str] = []
        with suppress(OSError, ValueError):  # without the file, ``takeover`` decides
            self._ids = path.read_text(encoding="ascii").split()[-MAX_OWNER_IDS:]

    def begin_client(self) -> None:
        """Note that the current client is closed, and another one begins."""
        self._current = ""

    def is_former(self, owner_id: str) -> bool:
        """Whether the id is that of a client that no longer reads."""
        return owner_id != self._current and owner_id in self._ids

    def note(self, owner_id: str) -> None:
        """Note the id of the current client, before it claims anything."""
        self._current = owner_id
        if owner_id in self._ids:
            return
        self._ids = [*self._ids, owner_id][-MAX_OWNER_IDS:]
        new = self._path.with_suffix(".new")
        with suppress(OSError):  # without the file, ``takeover`` decides
            with open(new, "w", encoding="ascii", opener=private_opener) as file:
                file.write("\n".join(self._ids))
            new.replace(self._path)


class BlobSnapshots(Snapshots, BlobCheckpointStore):
    """A container of Blob Storage.

    It is also the checkpoint store by which the SDK balances the partitions.

    An instance that takes over a partition writes its blob again. The previous owner can then no
    longer write, because every write requires the ETag of the instance's own last write
    (``If-Match``). All methods may raise ``AzureError`` or ``TimeoutError``.

    ``container``: the client for the snapshots. The other arguments are those of
    ``BlobCheckpointStore``.
    """

    _hold_until = 0.0  # monotonic seconds: until then this instance claims no partition
    _failed_at = float("-inf")  # monotonic seconds: at the last failure of ``list_ownership``

    def __init__(self, *args: Any, container: ContainerClient, **options: Any) -> None:
        super().__init__(*args, **options)
        self.container = container
        self.owner_ids: OwnerIds | None = None
        self._etags: dict[str, str] = {}  # partition -> ETag of this instance's last write

    async def take(self, partition: str) -> bytes:
        """See ``Snapshots``.

        It fails if the store has returned an old snapshot; the SDK's next balancing repeats it.
        """
        self._etags.pop(partition, None)
        body, properties = await self._download(partition)
        self._check_form(partition, body)
        if properties is not None:
            self._etags[partition] = await self._upload(
                partition, body, properties.etag, properties.metadata
            )
        return body

    async def write(self, partition: str, body: bytes, position: Position) -> None:
        """See ``Snapshots``.

        A deleted snapshot is written again, unless another instance has already done so.
        """
        metadata = {
            "offset": position.offset or NO_OFFSET,
            "sequencenumber": str(position.sequence),
            "enqueued": repr(position.enqueued),
        }
        for etag in (self._etags.get(partition), None):  # without one, if it was deleted
            with suppress(*_CHANGED):
                self._etags[partition] = await self._upload(partition, body, etag, metadata)
                return
        raise LostPartitionError(partition)

    def belong_to(self, namespace: str, hub: str, group: str) -> None:
        """See ``Snapshots``."""
        super().belong_to(namespace, hub, group)
        if self.owner_ids is not None:
            self.owner_ids.begin_client()

    async def claim_ownership(
        self, ownership_list: Iterable[dict[str, Any]], **options: Any
    ) -> Iterable[dict[str, Any]]:
        """For the SDK: claim partitions, or release those without an owner."""
        ownerships = self._claimable(ownership_list)
        if self.owner_ids is not None:
            for owner_id in {ownership["owner_id"] for ownership in ownerships} - {""}:
                await asyncio.to_thread(self.owner_ids.note, owner_id)
        claimed: Iterable[dict[str, Any]] = await super().claim_ownership(ownerships, **options)
        return claimed

    async def list_ownership(self, *names: Any, **options: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: the owners of partitions.

        The times are by this machine's clock, because the SDK compares with it. After a failure of
        the store, all owners get the time ``takeover`` again. What this instance had before it was
        restarted has no owner. If there are no owners, although this instance has partitions, the
        checkpoints were deleted: it claims nothing for a while, so that all instances can write
        theirs again.
        """
        clock = _StoreClock()
        try:
            options["raw_response_hook"] = clock.read
            ownerships = list(await super().list_ownership(*names, **options))
        except Exception:
            self._failed_at = time.monotonic()
            raise

        seconds_since_failure = time.monotonic() - self._failed_at
        renewed = time.time() - seconds_since_failure
        for ownership in ownerships:
            modified = ownership["last_modified_time"] + clock.behind
            ownership["last_modified_time"] = max(modified, renewed)
            if self.owner_ids is not None and self.owner_ids.is_former(ownership["owner_id"]):
                ownership["owner_id"] = ""

        if not ownerships and self._etags:
            self._hold()
        if time.monotonic() < self._hold_until:
            raise AzureError("the checkpoints were deleted: the instances write them again")
        return ownerships

    def _hold(self) -> None:
        """Claim no partition for ``HOLD_SECONDS``; a hold that has just ended is not repeated."""
        now = time.monotonic()
        if self._hold_until + HOLD_SECONDS < now:
            self._hold_until = now + HOLD_SECONDS

    async def listed(self, without: Collection[str] = ()) -> dict[str, Stored]:
        """See ``Snapshots``."""
        stored: dict[str, Stored] = {}
        prefix = f"{self._prefix}checkpoint/"
        async with asyncio.timeout(STORE_SECONDS):
            async for blob in self.container.list_blobs(prefix, include=["metadata"]):
                name = blob.name.removeprefix(prefix)
                if name not in without:
                    stored[name] = Stored(_position_in(blob.metadata or {}), blob.etag)
        return stored

    async def read(self, name: str) -> bytes:
        """See ``Snapshots``."""
        body, _ = await self._download(name)
        return body

    async def change(self, note: str, change: Callable[[bytes], bytes]) -> None:
        """See ``Snapshots``."""
        body, properties = await self._download(note)
        etag = None
        if properties is not None:
            etag = properties.etag
        try:
            await self._upload(note, change(body), etag)
        except _CHANGED:
            raise AzureError(f"someone else has just changed the {note}: try again") from None

    def _path(self, name: str) -> str:
        """Return the name of a partition's or a note's blob."""
        if name.isdigit():  # a partition; a note is next to the checkpoints
            return f"{self._prefix}checkpoint/{name}"
        return f"{self._prefix}{name}"

    async def _download(self, name: str) -> tuple[bytes, Any]:
        """Return the content and the properties of the blob of a partition or a note.

        The content is empty, and the properties are ``None``, if there is no blob.
        """
        try:
            async with asyncio.timeout(STORE_SECONDS):
                download = await self.container.download_blob(self._path(name))
                return await download.readall(), download.properties
        except ResourceNotFoundError:
            return b"", None

    async def _upload(
        self, name: str, body: bytes, etag: str | None, metadata: dict[str, str] | None = None
    ) -> str:
        """Replace the blob if it has this ETag, or create it if ``etag`` is empty.

        Return its new ETag.
        """
        condition: dict[str, Any] = {"if_none_match": "*"}
        if etag:
            condition = {"if_match": etag}
        blob = self.container.get_blob_client(self._path(name))
        async with asyncio.timeout(STORE_SECONDS):
            written = await blob.upload_blob(body, overwrite=True, metadata=metadata, **condition)
        return str(written["etag"])

    async def close(self) -> None:
        """Close the connections."""
        await self.container.close()
        await BlobCheckpointStore.close(self)


class _StoreClock:
    """How far the store's clock is behind this machine's."""

    def __init__(self) -> None:
        self.behind = 0.0  # seconds

    def read(self, response: Any) -> None:
        """Compare with the time in a response."""
        date = parsedate_to_datetime(response.http_response.headers["Date"])
        self.behind = time.time() - date.timestamp()


def _position_in(metadata: Mapping[str, str]) -> Position:
    """Return the position in the metadata of a blob; an empty one if another reader wrote it."""
    try:
        return Position(
            offset=metadata["offset"],
            sequence=int(metadata["sequencenumber"]),
            enqueued=float(metadata["enqueued"]),
        )
    except (ValueError, KeyError):
        return Position()


def make_blob_snapshots(
    settings: Checkpoints, credential: Any, state: Path | None = None
) -> BlobSnapshots:
    """Return the container that the settings name.

    ``credential``: the identity for ``container_url``. ``state``: the state directory of an
    instance, which after a restart takes its partitions back at once.
    """
    snapshots = _make(settings, credential)
    if state is not None:
        snapshots.owner_ids = OwnerIds(state / "owners")
    return snapshots


def _make(settings: Checkpoints, credential: Any) -> BlobSnapshots:
    options: dict[str, Any] = {
        "api_version": API_VERSION,
        "retry_total": 1,
        "connection_timeout": 5,
        "read_timeout": STORE_SECONDS,
        # seconds; by default the only retry comes after 15
        "initial_backoff": 1,
        "random_jitter_range": 1,
    }
    if settings.connection_string is not None:
        text = settings.connection_string.reveal()
        name = settings.container or ""
        snapshots = BlobSnapshots.from_connection_string(
            text,
            name,
            container=ContainerClient.from_connection_string(text, name, **options),
            **options,
        )
        assert isinstance(snapshots, BlobSnapshots)  # noqa: S101 - it makes its own class
        return snapshots

    account, _, name = (settings.container_url or "").rstrip("/").rpartition("/")
    container = ContainerClient(account, name, credential=credential, **options)
    return BlobSnapshots(account, name, credential=credential, container=container, **options)
