"""``BlobSnapshots``: snapshots in Blob Storage, for any number of instances.

The snapshot is the content of the blob whose metadata is the checkpoint, as the SDK and other tools know it. So both
are replaced in one write, and always belong together.

Imported only where it is configured: the SDK of Blob Storage is 27 MB.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final
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
from notbefore.fleet.checkpoints import LostPartitionError, Position, SnapshotGoneError

STORE_SECONDS: Final = 15.0  # for one request to Blob Storage
NO_OFFSET: Final = "-1"  # no value of metadata may be empty; such a checkpoint is not used: it is of no time
TAKES: Final = 5  # attempts to take a partition over
TAKE_PAUSE: Final = 0.2  # seconds after the first of them; then twice as long each
HOLD_SECONDS: Final = 15.0  # after the container was deleted, in which nobody claims partitions

log = logging.getLogger("notbefore.fleet.checkpoints")


class BlobSnapshots(BlobCheckpointStore):
    """A container of Blob Storage; it is also the checkpoint store that the SDK balances the partitions with.

    Who takes a partition over writes the metadata at once, so that whoever had it before cannot write any more: all
    writing asks for the ETag of one's own last writing (``If-Match``).
    """

    _prefix = ""
    _etags: dict[str, str]  # of what was written last, by partition
    _anew: set[str]
    _hold_until = 0.0  # monotonic seconds: nobody claims partitions before
    _away = False  # at the last look at who has which partition
    _respite_until = 0.0  # monotonic seconds: until then the partitions of others are theirs

    @property
    def sdk_store(self) -> Any:
        """This."""
        return self

    def of_hub(self, prefix: str, takeover: float, created: float) -> None:
        """See ``Snapshots``."""
        self._takeover, self._created = takeover, created
        prefix = f"{prefix}/checkpoint/".lower()
        if prefix != self._prefix:
            self._prefix, self._etags = prefix, {}
            self._anew, self._writer = set(), uuid4().hex

    async def take(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``AzureError``, also where the store returns an old snapshot again and again."""
        client = self._get_blob_client(self._prefix + partition)
        for attempt in range(TAKES):
            self._etags.pop(partition, None)
            try:
                async with asyncio.timeout(STORE_SECONDS):
                    found = await client.download_blob()
                    body: bytes = await found.readall()
            except ResourceNotFoundError:
                return b""
            metadata = (found.properties.metadata or {}) | {"writer": self._writer}
            try:
                async with asyncio.timeout(STORE_SECONDS):
                    written = await client.set_blob_metadata(metadata, if_match=found.properties.etag)
            except ResourceModifiedError:  # somebody wrote between reading and writing
                await asyncio.sleep(TAKE_PAUSE * 2**attempt)
                continue
            self._etags[partition] = str(written["etag"])
            return body
        raise AzureError(f"the snapshot of partition {partition} was another one at each of {TAKES} attempts")

    async def write(self, partition: str, body: bytes, position: Position) -> None:
        """See ``Snapshots``; raises ``AzureError``."""
        client = self._get_blob_client(self._prefix + partition)
        metadata = {"offset": position.offset or NO_OFFSET, "sequencenumber": str(position.sequence)}
        metadata |= {"enqueued": repr(position.enqueued), "writer": self._writer}

        async def upload(**unchanged: Any) -> str:
            async with asyncio.timeout(STORE_SECONDS):
                written = await client.upload_blob(body, overwrite=True, metadata=metadata, **unchanged)
            return str(written["etag"])

        known = self._etags.get(partition)
        try:
            try:
                etag = await (upload(if_match=known) if known else upload(if_none_match="*"))
            except (ResourceModifiedError, ResourceExistsError):
                # an earlier writing of ours may have come to its end without an answer
                async with asyncio.timeout(STORE_SECONDS):
                    found = await client.get_blob_properties()
                if found.metadata.get("writer") != self._writer:
                    raise
                etag = await upload(if_match=found.etag)
        except (ResourceModifiedError, ResourceExistsError):
            raise LostPartitionError(partition) from None
        except ResourceNotFoundError as error:
            self._etags.pop(partition, None)
            await self._make_container_if_gone(error)
            raise SnapshotGoneError(partition) from None
        self._etags[partition] = etag
        self._anew.discard(partition)

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
        if not found and self._etags and self._hold_until + HOLD_SECONDS < time.monotonic():
            self._hold_until = time.monotonic() + HOLD_SECONDS
        if time.monotonic() < self._hold_until:
            raise AzureError("the checkpoints were deleted: the instances write them anew")
        return found

    async def list_checkpoints(self, *names: str, **_options: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: where to go on; raises ``AzureError``. A blob without a position of this hub is left out."""
        whose = dict(zip(("fully_qualified_namespace", "eventhub_name", "consumer_group"), names, strict=True))
        found = []
        async for blob in self._container_client.list_blobs(self._prefix, include=["metadata"]):
            name, said = blob.name.removeprefix(self._prefix), blob.metadata or {}
            with suppress(ValueError, KeyError):
                position = {"sequence_number": int(said["sequencenumber"]), "offset": said["offset"]}
                if name not in self._anew and float(said["enqueued"]) >= self._created:
                    found.append(whose | position | {"partition_id": name})
        return found

    async def versions(self) -> Mapping[str, str]:
        """See ``Snapshots``; raises ``AzureError``."""
        found = {}
        try:
            async with asyncio.timeout(STORE_SECONDS):
                async for blob in self._container_client.list_blobs(self._prefix):
                    found[blob.name.removeprefix(self._prefix)] = str(blob.etag)
        except ResourceNotFoundError as error:
            await self._make_container_if_gone(error)
        return found

    async def read(self, partition: str) -> bytes:
        """See ``Snapshots``; raises ``AzureError``."""
        return await self._download(self._prefix + partition)

    async def put_aside(self, partition: str, body: bytes) -> str:
        """See ``Snapshots``; raises ``AzureError``."""
        return await self._upload(f"unreadable/{partition}", body)

    async def read_note(self, name: str) -> bytes:
        """See ``Snapshots``; raises ``AzureError``."""
        return await self._download(self._beside(name))

    async def write_note(self, name: str, body: bytes) -> None:
        """See ``Snapshots``; raises ``AzureError``."""
        await self._upload(name, body)

    def _beside(self, name: str) -> str:
        return self._prefix.removesuffix("checkpoint/") + name

    async def _download(self, name: str) -> bytes:
        try:
            async with asyncio.timeout(STORE_SECONDS):
                found = await self._get_blob_client(name).download_blob()
                body: bytes = await found.readall()
        except ResourceNotFoundError:
            return b""
        return body

    async def _upload(self, name: str, body: bytes) -> str:
        async with asyncio.timeout(STORE_SECONDS):
            await self._get_blob_client(self._beside(name)).upload_blob(body, overwrite=True)
        return self._beside(name)

    def begin_anew(self, partition: str) -> None:
        """See ``Snapshots``."""
        self._anew.add(partition)

    async def close(self) -> None:
        """Close the connections."""
        await self._container_client.close()


def _code(error: HttpResponseError) -> str:
    """Blob Storage's word for an error."""
    return str(getattr(getattr(error, "error_code", ""), "value", getattr(error, "error_code", "")))


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
