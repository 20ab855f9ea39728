"""The files of an instance: readable by its user alone, not through links, without blocking."""

import asyncio
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from notbefore.fleet.snapshot import Position
from notbefore.fleet.snapshot_store import FileSnapshots

pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid"), reason="its access lists are another matter"
)


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def write_snapshot(directory: Path) -> None:
    asyncio.run(FileSnapshots(directory).write("0", b"{}", Position("10", 1, 0.0)))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_snapshot_is_readable_by_its_user_alone(tmp_path: Path) -> None:
    directory = tmp_path / "state"

    write_snapshot(directory)

    assert {mode_of(path) for path in directory.iterdir()} == {0o600}


def test_snapshot_of_an_earlier_version_becomes_private(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    write_snapshot(directory)
    (directory / "0").chmod(0o666)

    write_snapshot(directory)

    assert {mode_of(path) for path in directory.iterdir()} == {0o600}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that a planted link points to."""
    path = tmp_path / "victim"
    path.write_text("kept", encoding="utf-8")
    return path


def test_snapshot_is_not_read_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "0").symlink_to(victim)

    with pytest.raises(OSError, match="symbolic link"):
        asyncio.run(FileSnapshots(tmp_path).read("0"))

    assert victim.read_text(encoding="utf-8") == "kept"


def test_snapshot_is_not_written_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "0.new").symlink_to(victim)

    with pytest.raises(OSError, match="symbolic link"):
        write_snapshot(tmp_path)

    assert victim.read_text(encoding="utf-8") == "kept"


def test_hanging_disk_does_not_delay_other_snapshots(tmp_path: Path) -> None:
    hanging_file = tmp_path / "0"
    os.mkfifo(hanging_file)  # opening it waits for a writer

    async def read_both() -> tuple[bytes, bytes]:
        snapshots = FileSnapshots(tmp_path)
        hanging = asyncio.create_task(snapshots.read("0"))
        await asyncio.sleep(0)  # the task begins: its read is the first of the two
        other = await snapshots.read("1")
        hanging_file.write_bytes(b"late")
        return await hanging, other

    # without it, this test would hang when the code does
    unblock = threading.Timer(20, hanging_file.write_bytes, [b"never"])
    unblock.start()
    try:
        late, other = asyncio.run(read_both())
    finally:
        unblock.cancel()

    assert other == b""
    assert late == b"late"


def unchanged(body: bytes) -> bytes:
    return body


def with_another_x(body: bytes) -> bytes:
    return body + b"x"


def test_note_is_refused_when_the_instance_has_no_directory(tmp_path: Path) -> None:
    directory = tmp_path / "state"

    with pytest.raises(FileNotFoundError, match="start the instance first"):
        asyncio.run(FileSnapshots(directory).change("mutes", unchanged))

    assert not directory.exists()  # owned by root, it would be of no use to the instance


def test_note_keeps_all_concurrent_changes(tmp_path: Path) -> None:
    async def change_eight_times() -> bytes:
        changes = [FileSnapshots(tmp_path).change("mutes", with_another_x) for _ in range(8)]
        await asyncio.gather(*changes)
        return await FileSnapshots(tmp_path).read("mutes")

    assert asyncio.run(change_eight_times()) == b"x" * 8
