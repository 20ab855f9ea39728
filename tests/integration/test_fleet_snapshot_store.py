"""Checkpoints and snapshots in Blob Storage, against Azurite: who has what, and what somebody has
deleted.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
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

WHOSE = ("fleet.example", "changes", "$default")
AT = Position("40", 7, 1_700_000_000.5)
CREATED = 1_600_000_000.0


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[Azurite]:
    with Azurite(tmp_path) as found:
        yield found


def with_snapshots(text: str, do: Callable[[BlobSnapshots], Awaitable[None]]) -> None:
    async def run() -> None:
        made = make_blob_snapshots(
            Checkpoints(connection_string=Secret(text), container=CONTAINER), None
        )
        made.belong_to(*WHOSE)
        made.hub_was_made(CREATED)
        try:
            await do(made)
        finally:
            await made.close()

    asyncio.run(run())


def owned() -> dict[str, Any]:
    names = ("fully_qualified_namespace", "eventhub_name", "consumer_group")
    return dict(zip(names, WHOSE, strict=True)) | {"partition_id": "0", "owner_id": "somebody"}


def test_who_has_a_partition_is_known_by_the_clock_of_the_store(
    blobs: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(snapshots: BlobSnapshots) -> None:
        await snapshots.claim_ownership([owned()])
        real = time.time
        for ahead in (0, 7200, -7200):
            monkeypatch.setattr(time, "time", lambda: real() + ahead)
            (found,) = await snapshots.list_ownership(*WHOSE)
            assert abs(found["last_modified_time"] - time.time()) < 30

    with_snapshots(blobs.connection_string, ask)


def test_after_the_store_was_away_everybody_still_has_what_he_had(blobs: Azurite) -> None:
    async def ask(snapshots: BlobSnapshots) -> None:
        (claimed,) = await snapshots.claim_ownership([owned()])
        await asyncio.sleep(1.1)  # the store's times are whole seconds
        blobs.stop()
        with pytest.raises(AzureError):
            await snapshots.list_ownership(*WHOSE)
        blobs.start()
        (found,) = await snapshots.list_ownership(*WHOSE)
        assert claimed["last_modified_time"] + 1 < found["last_modified_time"] <= time.time()

    with_snapshots(blobs.connection_string, ask)


def test_recreated_container_is_filled_before_any_partition_is_claimed(
    blobs: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(snapshots: BlobSnapshots) -> None:
        await snapshots.write("0", b"one", AT)
        await snapshots.claim_ownership([owned()])
        await asyncio.to_thread(blobs.delete_container)
        with pytest.raises(AzureError, match="container does not exist") as refused:
            await snapshots.write("0", b"two", AT)
        assert in_words(refused.value).endswith("ErrorCode:ContainerNotFound")
        await asyncio.to_thread(blobs.make_container)
        await snapshots.write("0", b"two", AT)
        with pytest.raises(AzureError, match="the checkpoints were deleted"):
            await snapshots.list_ownership(*WHOSE)
        later = SimpleNamespace(
            time=time.time, monotonic=lambda: time.monotonic() + blob_snapshots.HOLD_SECONDS
        )
        monkeypatch.setattr(blob_snapshots, "time", later)
        assert await snapshots.list_ownership(*WHOSE) == []
        assert (await snapshots.listed()).keys() == {"0"}
        assert await snapshots.read("0") == b"two"

    with_snapshots(blobs.connection_string, use)


@pytest.mark.parametrize("deleted", [False, True])
def test_who_has_taken_a_partition_or_written_it_anew_is_the_only_one_that_can_write_it(
    blobs: Azurite, *, deleted: bool
) -> None:
    async def use(one: BlobSnapshots) -> None:
        await one.write("0", b"one", AT)
        if deleted:
            await asyncio.to_thread(blobs.delete_container)
            await asyncio.to_thread(blobs.make_container)
        await asyncio.to_thread(with_snapshots, blobs.connection_string, takes)
        with pytest.raises(LostPartitionError):
            await one.write("0", b"one, later", AT)
        assert await one.read("0") == (b"another" if deleted else b"one")

    async def takes(another: BlobSnapshots) -> None:
        assert await another.take("0") == (b"" if deleted else b"one")
        if deleted:
            await another.write("0", b"another", AT)

    with_snapshots(blobs.connection_string, use)


def test_a_position_that_cannot_be_read_or_is_of_another_hub_blinds_nobody(blobs: Azurite) -> None:
    async def use(snapshots: BlobSnapshots) -> None:
        await snapshots.write("0", b"good", AT)
        await snapshots.write("1", b"old", AT._replace(enqueued=CREATED - 1))
        container = snapshots._container_client
        for name, metadata in (
            ("2", {}),
            ("3", {"offset": "x", "sequencenumber": "\u0661x", "enqueued": "y"}),
        ):
            await container.get_blob_client(f"{'/'.join(WHOSE)}/checkpoint/{name}").upload_blob(
                b"",
                metadata={
                    key: value.encode("ascii", "replace").decode()
                    for key, value in metadata.items()
                },
            )
        found = await snapshots.list_checkpoints(*WHOSE)
        assert [(one["partition_id"], one["offset"]) for one in found] == [("0", AT.offset)]
        assert await snapshots.take("2") == b""

    with_snapshots(blobs.connection_string, use)


def test_a_partition_that_somebody_wrote_while_it_was_taken_is_not_taken(
    blobs: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(snapshots: BlobSnapshots) -> None:
        await snapshots.write("0", b"one", AT)
        client = snapshots._get_blob_client(f"{'/'.join(WHOSE)}/checkpoint/0")
        download = client.download_blob

        async def stale() -> Any:  # as a store does that returns an old snapshot
            found = await download()
            found.properties.etag = '"0x0"'
            return found

        monkeypatch.setattr(client, "download_blob", stale)
        with pytest.raises(AzureError):
            await snapshots.take("0")

    with_snapshots(blobs.connection_string, use)


def test_a_snapshot_that_has_not_changed_is_not_read_again(
    blobs: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_store, "EVERY", 0.0)
    asked: list[str] = []

    async def use(snapshots: BlobSnapshots) -> None:
        others, real = Others(snapshots, ()), snapshots.read

        async def read(name: str) -> bytes:
            asked.append(name)
            return await real(name)

        monkeypatch.setattr(snapshots, "read", read)
        for name in ("0", "1"):
            await snapshots.write(name, compressed(Partition(name, grouped()).snapshot(1.0)), AT)
        for _ in range(2):
            await others.look()
        assert asked == ["0", "1"]
        await snapshots.write("1", compressed(Partition("1", grouped()).snapshot(2.0)), AT)
        await others.look()
        assert asked == ["0", "1", "1"]
        assert {name: one.at for name, one in others.found.items()} == {"0": 1.0, "1": 2.0}

    with_snapshots(blobs.connection_string, use)


def test_a_note_that_somebody_else_changes_meanwhile_is_not_overwritten(blobs: Azurite) -> None:
    async def use(one: BlobSnapshots) -> None:
        await one.change("mutes", lambda body: body + b"one")

        def late(body: bytes) -> bytes:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(with_snapshots, blobs.connection_string, adds).result()
            return body + b", late"

        with pytest.raises(AzureError, match="someone else has just changed"):
            await one.change("mutes", late)
        assert await one.read("mutes") == b"one, another"

    async def adds(another: BlobSnapshots) -> None:
        await another.change("mutes", lambda body: body + b", another")

    with_snapshots(blobs.connection_string, use)


def test_restarted_instance_takes_its_partitions_back_at_once(
    blobs: Azurite, tmp_path: Path
) -> None:
    others = owned() | {"partition_id": "1", "owner_id": "another"}

    async def claim(snapshots: BlobSnapshots) -> None:
        snapshots.owner_ids = OwnerIds(tmp_path / "owners")
        await snapshots.claim_ownership([owned()])
        (own,) = await snapshots.list_ownership(*WHOSE)
        assert own["owner_id"] == "somebody"

    async def claim_other(snapshots: BlobSnapshots) -> None:
        await snapshots.claim_ownership([others])

    async def restart(snapshots: BlobSnapshots) -> None:
        snapshots.owner_ids = OwnerIds(tmp_path / "owners")
        listed = {one["partition_id"]: one for one in await snapshots.list_ownership(*WHOSE)}
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

        await newer_version.write("0", newer, AT)  # nobody has taken it

    async def refuse(older_version: BlobSnapshots) -> None:
        with pytest.raises(NewerSnapshotError):
            await older_version.take("0")
        assert list(await older_version.claim_ownership([owned()])) == []

    with_snapshots(blobs.connection_string, write)
