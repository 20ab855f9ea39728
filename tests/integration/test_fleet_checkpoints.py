"""Checkpoints and snapshots in Blob Storage, against Azurite: who has what, and what somebody has deleted."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import AzureError
from azure.eventhub.extensions.checkpointstoreblobaio._vendor.storage.blob import generate_account_sas

from notbefore.config.fleet import Checkpoints
from notbefore.config.secret import Secret
from notbefore.fleet import blob_snapshots
from notbefore.fleet.blob_snapshots import BlobSnapshots, make_blob_snapshots
from notbefore.fleet.checkpoints import LostPartitionError, Position, SnapshotGoneError
from support.azurite import ACCOUNT, CONTAINER, KEY, Azurite

WHOSE = ("fleet.example", "changes", "$default")
AT = Position("40", 7, 4, 1_700_000_000.5)


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[Azurite]:
    with Azurite(tmp_path) as found:
        yield found


def with_snapshots(text: str, do: Callable[[BlobSnapshots], Awaitable[None]]) -> None:
    async def run() -> None:
        made = make_blob_snapshots(Checkpoints(connection_string=Secret(text), container=CONTAINER), None)
        made.of_hub(*WHOSE, takeover=60.0)
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
            monkeypatch.setattr(time, "time", lambda: real() + ahead)  # noqa: B023 - of this turn
            (found,) = await snapshots.list_ownership(*WHOSE)
            assert abs(found["last_modified_time"] - time.time()) < 30

    with_snapshots(blobs.connection_string, ask)


def test_after_the_store_was_away_everybody_still_has_what_he_had(blobs: Azurite) -> None:
    async def ask(snapshots: BlobSnapshots) -> None:
        await snapshots.claim_ownership([owned()])
        await asyncio.sleep(1.1)  # the store's times are whole seconds
        blobs.stop()
        with pytest.raises(AzureError):
            await snapshots.list_ownership(*WHOSE)
        blobs.start()
        (found,) = await snapshots.list_ownership(*WHOSE)
        assert time.time() - found["last_modified_time"] < 1

    with_snapshots(blobs.connection_string, ask)


def test_a_container_that_was_deleted_is_made_again_and_all_is_written_anew(
    blobs: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_snapshots, "HOLD_SECONDS", 2.0)

    async def use(snapshots: BlobSnapshots) -> None:
        await snapshots.write("0", b"one", AT, ["a"])
        await snapshots.claim_ownership([owned()])
        await asyncio.to_thread(blobs.delete_container)
        with pytest.raises(SnapshotGoneError):
            await snapshots.mark("0", ["a", "b"])
        assert await snapshots.holds("0")  # nobody has written it meanwhile
        await snapshots.write("0", b"two", AT, ["c"])
        with pytest.raises(AzureError, match="the checkpoints were deleted"):
            await snapshots.list_ownership(*WHOSE)
        await asyncio.sleep(2.1)
        assert await snapshots.list_ownership(*WHOSE) == []
        (glance,) = (await snapshots.glance()).values()
        assert (glance.sequence, glance.partitions, glance.accepted) == (7, 4, ("c",))
        assert await snapshots.enqueued() == {"0": AT.enqueued}
        assert await snapshots.read("0") == b"two"

    with_snapshots(blobs.connection_string, use)


def test_a_snapshot_that_another_instance_wrote_after_the_container_was_deleted_is_its_own(blobs: Azurite) -> None:
    async def use(one: BlobSnapshots) -> None:
        await one.write("0", b"one", AT, [])
        await asyncio.to_thread(blobs.delete_container)
        await asyncio.to_thread(with_snapshots, blobs.connection_string, takes)
        with pytest.raises(LostPartitionError):
            await one.write("0", b"one, later", AT, [])
        assert not await one.holds("0")

    async def takes(another: BlobSnapshots) -> None:
        assert await another.glance() == {}  # and the container is there again
        await another.write("0", b"another", AT, [])

    with_snapshots(blobs.connection_string, use)


def test_an_identity_that_may_not_make_the_container_is_told_who_does(tmp_path: Path) -> None:
    blobs = Azurite(tmp_path).start()
    try:
        end = datetime.now(UTC) + timedelta(hours=1)
        token = generate_account_sas(ACCOUNT, KEY, "o", "rwl", end)  # objects alone, no containers
        endpoint = f"http://127.0.0.1:{blobs.port}/{ACCOUNT}"

        async def ask(snapshots: BlobSnapshots) -> None:
            with pytest.raises(AzureError, match=r"az storage container create .*--name notbefore"):
                await snapshots.write("0", b"", AT, [])

        with_snapshots(f"BlobEndpoint={endpoint};SharedAccessSignature={token}", ask)
    finally:
        blobs.stop()
