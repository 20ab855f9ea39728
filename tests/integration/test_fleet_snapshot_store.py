"""Checkpoints and snapshots in Blob Storage, against Azurite: owners of partitions, lost and
deleted snapshots.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import AzureError

from notbefore.config.model import Checkpoints
from notbefore.config.secret import Secret
from notbefore.fleet import blob_snapshots, snapshot_store
from notbefore.fleet.blob_snapshots import BlobSnapshots, OwnerIds, make_blob_snapshots
from notbefore.fleet.keeper import in_words
from notbefore.fleet.partition import Partition
from notbefore.fleet.snapshot import NewerSnapshotError, Position, compressed
from notbefore.fleet.snapshot_store import LostPartitionError, Others
from support.azurite import CONTAINER, Azurite
from support.fleet_log import grouped

GROUP = ("fleet.example", "changes", "$default")  # namespace, hub and consumer group
AT = Position("40", 7, 1_700_000_000.5)
CREATED = 1_600_000_000.0


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[Azurite]:
    with Azurite(tmp_path) as azurite:
        yield azurite


def with_snapshots(connection_string: str, use: Callable[[BlobSnapshots], Awaitable[None]]) -> None:
    """Open the container, call ``use`` with it, and close it."""

    async def run() -> None:
        checkpoints = Checkpoints(connection_string=Secret(connection_string), container=CONTAINER)
        snapshots = make_blob_snapshots(checkpoints, None)
        snapshots.belong_to(*GROUP)
        snapshots.hub_was_made(CREATED)
        try:
            await use(snapshots)
        finally:
            await snapshots.close()

    asyncio.run(run())


def ownership(partition: str = "0", owner: str = "first") -> dict[str, Any]:
    """Return a claim as the SDK makes it."""
    namespace, hub, group = GROUP
    return {
        "fully_qualified_namespace": namespace,
        "eventhub_name": hub,
        "consumer_group": group,
        "partition_id": partition,
        "owner_id": owner,
    }


@pytest.mark.parametrize("ahead", [0, 7200, -7200])
def test_ownership_has_the_time_of_this_machine_when_clocks_differ(
    blobs: Azurite, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    real_time = time.time

    def time_of_wrong_clock() -> float:
        return real_time() + ahead

    async def claim_and_list(snapshots: BlobSnapshots) -> None:
        await snapshots.claim_ownership([ownership()])
        monkeypatch.setattr(time, "time", time_of_wrong_clock)

        (listed,) = await snapshots.list_ownership(*GROUP)

        assert abs(listed["last_modified_time"] - time.time()) < 30

    with_snapshots(blobs.connection_string, claim_and_list)


def test_owners_keep_their_partitions_after_the_store_was_away(blobs: Azurite) -> None:
    async def stop_and_start_store(snapshots: BlobSnapshots) -> None:
        (claimed,) = await snapshots.claim_ownership([ownership()])
        await asyncio.sleep(1.1)  # the store's times are whole seconds
        blobs.stop()
        with pytest.raises(AzureError):
            await snapshots.list_ownership(*GROUP)
        blobs.start()

        (listed,) = await snapshots.list_ownership(*GROUP)

        assert claimed["last_modified_time"] + 1 < listed["last_modified_time"] <= time.time()

    with_snapshots(blobs.connection_string, stop_and_start_store)


def test_recreated_container_is_filled_before_partitions_are_claimed(
    blobs: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(snapshots: BlobSnapshots) -> None:
        await snapshots.write("0", b"first", AT)
        await snapshots.claim_ownership([ownership()])
        await asyncio.to_thread(blobs.delete_container)
        with pytest.raises(AzureError, match="container does not exist") as refused:
            await snapshots.write("0", b"second", AT)
        assert in_words(refused.value).endswith("ErrorCode:ContainerNotFound")

        await asyncio.to_thread(blobs.make_container)
        await snapshots.write("0", b"second", AT)
        with pytest.raises(AzureError, match="the checkpoints were deleted"):
            await snapshots.list_ownership(*GROUP)

        monkeypatch.setattr(blob_snapshots, "time", _TimeAfterHold)
        assert await snapshots.list_ownership(*GROUP) == []
        assert (await snapshots.listed()).keys() == {"0"}
        assert await snapshots.read("0") == b"second"

    with_snapshots(blobs.connection_string, use)


class _TimeAfterHold:
    """The module ``time`` once the instances have had time to write their snapshots again."""

    time = staticmethod(time.time)

    @staticmethod
    def monotonic() -> float:
        return time.monotonic() + blob_snapshots.HOLD_SECONDS


def test_former_owner_cannot_write_a_partition_that_was_taken(blobs: Azurite) -> None:
    async def use(former_owner: BlobSnapshots) -> None:
        await former_owner.write("0", b"former", AT)
        await asyncio.to_thread(with_snapshots, blobs.connection_string, take)

        with pytest.raises(LostPartitionError):
            await former_owner.write("0", b"former, later", AT)

        assert await former_owner.read("0") == b"former"

    async def take(new_owner: BlobSnapshots) -> None:
        assert await new_owner.take("0") == b"former"

    with_snapshots(blobs.connection_string, use)


def test_former_owner_cannot_write_after_the_snapshot_was_recreated(
    blobs: Azurite,
) -> None:
    async def use(former_owner: BlobSnapshots) -> None:
        await former_owner.write("0", b"former", AT)
        await asyncio.to_thread(blobs.delete_container)
        await asyncio.to_thread(blobs.make_container)
        await asyncio.to_thread(with_snapshots, blobs.connection_string, take_and_write)

        with pytest.raises(LostPartitionError):
            await former_owner.write("0", b"former, later", AT)

        assert await former_owner.read("0") == b"new"

    async def take_and_write(new_owner: BlobSnapshots) -> None:
        assert await new_owner.take("0") == b""
        await new_owner.write("0", b"new", AT)

    with_snapshots(blobs.connection_string, use)


def test_positions_that_are_unreadable_or_of_another_hub_are_left_out(blobs: Azurite) -> None:
    async def use(snapshots: BlobSnapshots) -> None:
        await snapshots.write("0", b"good", AT)
        await snapshots.write("1", b"old", AT._replace(enqueued=CREATED - 1))
        await upload(snapshots, "2", {})
        await upload(snapshots, "3", {"offset": "x", "sequencenumber": "?x", "enqueued": "y"})

        (checkpoint,) = await snapshots.list_checkpoints(*GROUP)

        assert checkpoint["partition_id"] == "0"
        assert checkpoint["offset"] == AT.offset
        assert await snapshots.take("2") == b""

    async def upload(snapshots: BlobSnapshots, partition: str, metadata: dict[str, str]) -> None:
        path = f"{'/'.join(GROUP)}/checkpoint/{partition}"
        blob = snapshots.container.get_blob_client(path)
        await blob.upload_blob(b"", metadata=metadata)

    with_snapshots(blobs.connection_string, use)


def test_partition_is_not_taken_when_it_was_written_meanwhile(
    blobs: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(snapshots: BlobSnapshots) -> None:
        await snapshots.write("0", b"first", AT)
        download = snapshots.container.download_blob

        async def download_stale(name: str) -> Any:  # as a store does that returns an old snapshot
            blob = await download(name)
            blob.properties.etag = '"0x0"'
            return blob

        monkeypatch.setattr(snapshots.container, "download_blob", download_stale)
        with pytest.raises(AzureError):
            await snapshots.take("0")

    with_snapshots(blobs.connection_string, use)


def test_unchanged_snapshot_is_not_read_again(
    blobs: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_store, "READ_OTHERS_EVERY", 0.0)
    partitions_read: list[str] = []

    def snapshot(partition: str, at: float) -> bytes:
        return compressed(Partition(partition, grouped()).snapshot(at))

    async def use(snapshots: BlobSnapshots) -> None:
        others = Others(snapshots, ())
        read = snapshots.read

        async def noting_read(partition: str) -> bytes:
            partitions_read.append(partition)
            return await read(partition)

        monkeypatch.setattr(snapshots, "read", noting_read)
        await snapshots.write("0", snapshot("0", 1.0), AT)
        await snapshots.write("1", snapshot("1", 1.0), AT)
        await others.look()
        await others.look()
        assert partitions_read == ["0", "1"]

        await snapshots.write("1", snapshot("1", 2.0), AT)
        await others.look()

        assert partitions_read == ["0", "1", "1"]
        assert others.found["0"].at == 1.0
        assert others.found["1"].at == 2.0

    with_snapshots(blobs.connection_string, use)


def test_note_is_not_overwritten_when_another_instance_changed_it(blobs: Azurite) -> None:
    async def use(slow: BlobSnapshots) -> None:
        await slow.change("mutes", lambda body: body + b"first")

        def append_late(body: bytes) -> bytes:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(with_snapshots, blobs.connection_string, append_meanwhile).result()
            return body + b", late"

        with pytest.raises(AzureError, match="someone else has just changed"):
            await slow.change("mutes", append_late)

        assert await slow.read("mutes") == b"first, another"

    async def append_meanwhile(quick: BlobSnapshots) -> None:
        await quick.change("mutes", lambda body: body + b", another")

    with_snapshots(blobs.connection_string, use)


def test_restarted_instance_takes_its_partitions_back_at_once(
    blobs: Azurite, tmp_path: Path
) -> None:
    async def claim(snapshots: BlobSnapshots) -> None:
        snapshots.owner_ids = OwnerIds(tmp_path / "owners")
        await snapshots.claim_ownership([ownership()])
        (listed,) = await snapshots.list_ownership(*GROUP)
        assert listed["owner_id"] == "first"

    async def claim_other(snapshots: BlobSnapshots) -> None:
        await snapshots.claim_ownership([ownership("1", "another")])

    async def restart(snapshots: BlobSnapshots) -> None:
        snapshots.owner_ids = OwnerIds(tmp_path / "owners")
        ownerships = await snapshots.list_ownership(*GROUP)
        listed = {ownership["partition_id"]: ownership for ownership in ownerships}
        assert listed["0"]["owner_id"] == ""
        assert listed["1"]["owner_id"] == "another"

        (claimed,) = await snapshots.claim_ownership([listed["0"] | {"owner_id": "restarted"}])

        assert claimed["owner_id"] == "restarted"

    for step in (claim, claim_other, restart):
        with_snapshots(blobs.connection_string, step)


def test_snapshot_of_a_newer_version_keeps_its_writer(blobs: Azurite) -> None:
    newer = compressed(b"\x93\x7f")

    async def write(newer_version: BlobSnapshots) -> None:
        await newer_version.write("0", newer, AT)

        await asyncio.to_thread(with_snapshots, blobs.connection_string, refuse)

        await newer_version.write("0", newer, AT)  # it still has the partition

    async def refuse(older_version: BlobSnapshots) -> None:
        with pytest.raises(NewerSnapshotError):
            await older_version.take("0")
        assert list(await older_version.claim_ownership([ownership()])) == []

    with_snapshots(blobs.connection_string, write)
