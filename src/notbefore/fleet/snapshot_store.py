"""``Snapshots``: the store of the partitions' snapshots and their positions in the log.

It is a directory of files, or a container in Blob Storage.

``FileSnapshots`` is for a single instance; ``fleet.blob_snapshots`` is for several. ``Others``
reads the snapshots of the other instances, so that any instance can show the whole fleet.
"""

import asyncio
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from azure.core.exceptions import AzureError
from azure.eventhub.aio import CheckpointStore

from notbefore.fleet.snapshot import (
    FROM_START,
    NewerSnapshotError,
    Position,
    Snapshot,
    check_form,
    read_snapshot,
)
from notbefore.store.lock import PRIVATE_DIRECTORY, OwnerLock, private_opener

READ_OTHERS_EVERY: Final = 5.0  # seconds between two reads of other instances' snapshots
STORE_ERRORS: Final = (AzureError, OSError)
FAILURES: Final = (*STORE_ERRORS, ValueError)  # ValueError: the content cannot be read

log = logging.getLogger("notbefore.fleet.snapshot_store")


class LostPartitionError(Exception):
    """The partition is not this instance's.

    Another one has written its snapshot, or it could not be taken.
    """


class Stored(NamedTuple):
    """A snapshot in the store, without its content."""

    position: Position
    etag: str = ""  # changes with each write; empty if the store has none


class Snapshots(CheckpointStore):
    """A store of snapshots.

    It is also the SDK's checkpoint store, by which the SDK balances the partitions.
    """

    _prefix = ""  # NAMESPACE/HUB/GROUP/
    _newer: frozenset[str] = frozenset()  # partitions that a newer version has written
    _created = 0.0  # when the hub was created: see ``hub_was_made``

    def belong_to(self, namespace: str, hub: str, group: str) -> None:
        """Use the snapshots of this consumer group from now on."""
        self._prefix = f"{namespace}/{hub}/{group}/".lower()

    def hub_was_made(self, at: float) -> None:
        """Note when the hub was created, in Unix seconds of its clock.

        Older positions are of an earlier hub of this name.
        """
        self._created = at

    async def list_checkpoints(self, *_names: str, **_: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: the positions from which to continue.

        Partitions without a position in this hub are read from ``window`` on.
        """
        checkpoints: list[dict[str, Any]] = []
        for name, stored in (await self.listed()).items():
            position = stored.position
            is_of_this_hub = position.sequence >= 0 and position.enqueued >= self._created
            if is_of_this_hub or position == FROM_START:
                checkpoints.append(
                    {
                        "partition_id": name,
                        "offset": position.offset,
                        "sequence_number": position.sequence,
                    }
                )
        return checkpoints

    async def update_checkpoint(self, checkpoint: Mapping[str, Any], **_: Any) -> None:
        """For the SDK: do nothing, because ``write`` also writes the checkpoint."""

    async def take(self, partition: str) -> bytes:
        """Return a partition's last snapshot; empty if there is none.

        Its previous owner can then no longer write. Raises ``NewerSnapshotError`` and changes
        nothing if a newer version has written it.
        """
        body = await self.read(partition)
        self._check_form(partition, body)
        return body

    def _check_form(self, partition: str, body: bytes) -> None:
        """Raise ``NewerSnapshotError`` if a newer version has written a partition's snapshot.

        This instance then no longer claims the partition.
        """
        try:
            check_form(body)
        except NewerSnapshotError:
            self._newer |= {partition}
            raise

    def _claimable(self, ownerships: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the ownerships that this version may write.

        It may not claim a partition that a newer version has written. An ownership without an owner
        is no claim, but releases the partition.
        """
        claimable: list[dict[str, Any]] = []
        for ownership in ownerships:
            is_release = not ownership["owner_id"]
            if is_release or ownership["partition_id"] not in self._newer:
                claimable.append(ownership)
        return claimable

    @abstractmethod
    async def write(self, partition: str, body: bytes, position: Position) -> None:
        """Replace the snapshot and the checkpoint.

        Raises ``LostPartitionError`` if another instance has it.
        """

    @abstractmethod
    async def listed(self, without: Collection[str] = ()) -> dict[str, Stored]:
        """Return the stored snapshots by partition, except those of ``without``."""

    @abstractmethod
    async def read(self, name: str) -> bytes:
        """Return the snapshot of any partition, or a note that all instances share.

        It is empty if there is none.
        """

    @abstractmethod
    async def change(self, note: str, change: Callable[[bytes], bytes]) -> None:
        """Replace a note by the result of ``change``, a function of its content.

        It fails if someone else changes the note meanwhile.
        """

    async def close(self) -> None:
        """Close the connections."""


class FileSnapshots(Snapshots):
    """One file per partition, for a single instance: others cannot read them.

    All methods may raise ``OSError``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def list_ownership(self, *_names: str, **_: Any) -> Iterable[dict[str, Any]]:
        """For the SDK: no other instance has a partition."""
        return []

    async def claim_ownership(
        self, ownership_list: Iterable[dict[str, Any]], **_: Any
    ) -> Iterable[dict[str, Any]]:
        """For the SDK: this instance gets every partition that it claims."""
        claimed: list[dict[str, Any]] = []
        for ownership in self._claimable(ownership_list):
            claimed.append(ownership | {"last_modified_time": 0.0})
        return claimed

    async def write(self, partition: str, body: bytes, position: Position) -> None:  # noqa: ARG002 - it is in the body
        """See ``Snapshots``."""
        await asyncio.to_thread(self._replace, partition, body)

    async def listed(self, without: Collection[str] = ()) -> dict[str, Stored]:
        """See ``Snapshots``; the positions are read from the snapshots."""
        return await asyncio.to_thread(self._listed, without)

    async def read(self, name: str) -> bytes:
        """See ``Snapshots``."""
        return await asyncio.to_thread(self._read, name)

    async def change(self, note: str, change: Callable[[bytes], bytes]) -> None:
        """See ``Snapshots``."""
        await asyncio.to_thread(self._change, note, change)

    def _listed(self, without: Collection[str]) -> dict[str, Stored]:
        stored: dict[str, Stored] = {}
        if not self._directory.is_dir():
            return stored
        for path in self._directory.iterdir():
            name = path.name
            if not name.isdigit() or name in without:
                continue
            stored[name] = Stored(Position())
            with suppress(ValueError):  # ``Keeper.take`` puts it aside
                stored[name] = Stored(read_snapshot(self._read(name)).position)
        return stored

    def _change(self, note: str, change: Callable[[bytes], bytes]) -> None:
        # only the instance creates the directory: if a command of root did, the service could not
        # use it
        if not self._directory.is_dir():
            raise FileNotFoundError(
                f"there is no {self._directory}: start the instance first, or name its --state-dir"
            )
        lock = OwnerLock(self._directory)
        lock.acquire()
        try:
            self._replace(note, change(self._read(note)))
        finally:
            lock.release()

    def _read(self, name: str) -> bytes:
        try:
            with open(self._directory / name, "rb", opener=private_opener) as file:
                return file.read()
        except FileNotFoundError:
            return b""

    def _replace(self, name: str, body: bytes) -> None:
        self._directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        new = self._directory / f"{name}.new"
        with open(new, "wb", opener=private_opener) as file:
            # a command of root may write for an instance of another user
            if hasattr(os, "geteuid") and os.geteuid() == 0:
                owner = self._directory.stat()
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._directory / name)


class Others:
    """The snapshots of other instances, read in the consumer's event loop.

    ``own_partitions``: those of this instance.
    """

    def __init__(self, snapshots: Snapshots, own_partitions: Collection[str]) -> None:
        self._snapshots = snapshots
        self._own_partitions = own_partitions
        self._lock = asyncio.Lock()  # they are read once at a time
        self._looked = float("-inf")
        self._etags: dict[str, str] = {}  # partition -> the ETag of what was read
        self._states: dict[str, Snapshot] = {}  # never changed

    @property
    def found(self) -> dict[str, Snapshot]:
        """The snapshots by partition, without partitions that this instance has taken since."""
        return {
            name: state for name, state in self._states.items() if name not in self._own_partitions
        }

    async def look(self) -> None:
        """Read the snapshots, unless that was done in the last ``READ_OTHERS_EVERY`` seconds.

        A failure is logged, and the previous ones stay.
        """
        async with self._lock:
            if time.monotonic() - self._looked < READ_OTHERS_EVERY:
                return
            try:
                await self._look()
            except FAILURES as error:
                log.warning("the snapshots of other instances cannot be read: %s", error)
            self._looked = time.monotonic()

    async def _look(self) -> None:
        listed = await self._snapshots.listed(set(self._own_partitions))
        for name in self._states.keys() - listed.keys():
            del self._states[name]
            del self._etags[name]
        for name, stored in listed.items():
            has_etag = bool(stored.etag)
            if has_etag and stored.etag == self._etags.get(name):
                continue  # it has not changed
            await self._read(name, stored.etag)

    async def _read(self, name: str, etag: str) -> None:
        """Read a snapshot; if it cannot be read, log it, and the previous one stays."""
        try:
            body = await self._snapshots.read(name)
            state = await asyncio.to_thread(read_snapshot, body)
        except FAILURES as error:
            log.warning(
                "another instance's snapshot of partition %s cannot be read: %s", name, error
            )
            return
        self._states[name] = state
        self._etags[name] = etag
