"""``BlobSnapshots``: snapshots in Blob Storage, for any number of instances.

The snapshot is the content of the blob whose metadata is the checkpoint, as the SDK and other tools know it. So both
are replaced in one write, and always belong together. That a delivery was accepted is added to the metadata alone,
which is a small request.

Imported only where it is configured: the SDK of Blob Storage is 27 MB.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from uuid import uuid4

from azure.core.exceptions import (
    AzureError,
    HttpResponseError,
    ResourceExistsError,
    ResourceModifiedError,
    ResourceNotFoundError,
)
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore

from notbefore.config.fleet import Checkpoints
from notbefore.fleet.checkpoints import Glance, LostPartitionError, Position, SnapshotGoneError, Written

STORE_SECONDS: Final = 15.0  # for one request to Blob Storage
MARK_SECONDS: Final = 3.0  # for a small one, for which a sink waits
HOLD_SECONDS: Final = 15.0  # after the container was deleted, in which nobody claims partitions
NO_MARK: Final = "-"  # no value of metadata may be empty

log = logging.getLogger("notbefore.fleet.checkpoints")


class BlobSnapshots(BlobCheckpointStore):
    """A container of Blob Storage; it is also the checkpoint store that the SDK balances the partitions with.

    Who takes a partition over writes the metadata at once, so that whoever had it before cannot write any more: all
    writing asks for the ETag of one's own last writing (``If-Match``).
    """

    _prefix = ""
    _blobs: dict[str, "_Blob"]
    _anew: set[str]
    _hold_until = 0.0  # monotonic seconds: nobody claims partitions before
    _away = False  # at the last look at who has which partition
    _respite_until = 0.0  # monotonic seconds: until then the partitions of others are theirs

    @property
    def sdk_store(self) -> Any:
        """This."""
        return self

    def of_hub(self, namespace: str, hub: str, group: str, takeover: float) -> None:
        """See ``Snapshots``."""
        self._takeover = takeover
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
        if blob is None:  # not written yet
            async with asyncio.timeout(MARK_SECONDS):
                return not await self._get_blob_client(self._prefix + partition).exists()
        try:
            await self.mark(partition, _marks_in(blob.metadata))
        except LostPartitionError:
            return False
        return True

    async def write(self, partition: str, body: bytes, position: Position, accepted: Sequence[str]) -> None:
        """See ``Snapshots``; raises ``AzureError``."""
        metadata = {"offset": position.offset, "sequencenumber": str(position.sequence)}
        metadata |= {"partitions": str(position.partitions), "enqueued": repr(position.enqueued)}
        metadata |= self._marks(accepted)
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
        except (ResourceModifiedError, ResourceExistsError):
            raise LostPartitionError(partition) from None
        except ResourceNotFoundError as error:
            self._blobs.pop(partition, None)
            await self._make_container_if_gone(error)
            raise SnapshotGoneError(partition) from None
        self._blobs[partition] = _Blob(written["etag"], metadata)

    async def _make_container_if_gone(self, error: ResourceNotFoundError) -> None:
        """Make the container, if that is what is missing; raises ``AzureError`` where that is not allowed."""
        if _code(error) != "ContainerNotFound":
            return
        name, account = self._container_client.container_name, self._container_client.account_name
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self._container_client.create_container()
        except ResourceExistsError as exists:
            if _code(exists) != "ContainerAlreadyExists":  # it is being deleted: Azure takes 30 s or more
                raise
        except HttpResponseError as refused:
            if refused.status_code not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise
            raise AzureError(
                f"there is no container {name}, and this identity may not make it: run `az storage container create"
                f" --account-name {account} --name {name} --auth-mode login` ({_code(refused)})"
            ) from None
        else:
            log.warning("there was no container %s: it has been made", name)

    async def list_ownership(self, *names: Any, **options: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: who has which partition; raises ``AzureError``.

        Where nobody has any, though this instance does, the container was deleted: all instances are given the time
        to write their snapshots anew, before anybody claims a partition of another one. Where the store was away,
        nobody could say that he lives: they are given ``takeover`` again. The SDK compares the store's times with the
        clock of this machine: so they are moved by what that one is ahead.
        """
        ahead = 0.0

        def note(response: Any) -> None:
            nonlocal ahead
            ahead = time.time() - parsedate_to_datetime(response.http_response.headers["Date"]).timestamp()

        try:
            found = list(await super().list_ownership(*names, raw_response_hook=note, **options))
        except Exception:
            self._away = True
            raise
        if self._away:
            self._away, self._respite_until = False, time.monotonic() + self._takeover
        for one in found:
            respite = time.monotonic() < self._respite_until
            one["last_modified_time"] = time.time() if respite else one["last_modified_time"] + ahead
        if not found and self._blobs and self._hold_until + HOLD_SECONDS < time.monotonic():
            self._hold_until = time.monotonic() + HOLD_SECONDS
        if time.monotonic() < self._hold_until:
            raise AzureError("the checkpoints were deleted: the instances write them anew")
        return found

    async def list_checkpoints(self, *names: Any, **options: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: where to go on; raises ``AzureError``."""
        found = await super().list_checkpoints(*names, **options)
        return [one for one in found if one["partition_id"] not in self._anew]

    async def glance(self) -> dict[str, Glance]:
        """See ``Snapshots``; raises ``AzureError``."""
        found = {}
        try:
            async with asyncio.timeout(STORE_SECONDS):
                async for blob in self._container_client.list_blobs(self._prefix, ["metadata"]):
                    said = blob.metadata
                    found[blob.name.removeprefix(self._prefix)] = Glance(
                        blob.etag,
                        int(said["sequencenumber"]),
                        int(said.get("partitions", 0)),
                        tuple(_marks_in(said)),
                        float(said.get("enqueued", 0.0)),
                    )
        except ResourceNotFoundError as error:
            await self._make_container_if_gone(error)
        return found

    async def enqueued(self) -> dict[str, float]:
        """See ``Snapshots``; raises ``AzureError``."""
        return {name: glance.enqueued for name, glance in (await self.glance()).items()}

    async def read(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``AzureError``."""
        return await self._download(self._prefix + partition)

    async def read_vms(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``AzureError``."""
        try:
            return await self._download(self._vms(partition))
        except ResourceNotFoundError:
            return b""

    async def _download(self, name: str) -> bytes:
        async with asyncio.timeout(STORE_SECONDS):
            found = await self._get_blob_client(name).download_blob()
            body: bytes = await found.readall()
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


def _code(error: HttpResponseError) -> str:
    """Blob Storage's word for an error."""
    return str(getattr(getattr(error, "error_code", ""), "value", getattr(error, "error_code", "")))


def _marks_in(metadata: Mapping[str, str]) -> list[str]:
    return [mark for mark in metadata.get("accepted", NO_MARK).split() if mark != NO_MARK]


class _Blob(NamedTuple):
    """What was written last."""

    etag: str
    metadata: dict[str, str]


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
