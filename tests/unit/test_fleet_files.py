"""The files of an instance belong to its user alone, no link that somebody planted is followed, and
no loop waits.
"""

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


def write(directory: Path) -> None:
    asyncio.run(FileSnapshots(directory).write("0", b"{}", Position("10", 1, 0.0)))


def test_a_snapshot_is_its_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    write(tmp_path / "state")
    (tmp_path / "state" / "0").chmod(0o666)  # of an earlier version
    write(tmp_path / "state")
    (mode,) = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()}
    assert mode == 0o600


@pytest.mark.parametrize("link", ["0", "0.new"])
def test_a_link_in_the_place_of_a_snapshot_is_neither_read_nor_written_through(
    tmp_path: Path, link: str
) -> None:
    (tmp_path / "victim").write_text("kept", encoding="utf-8")
    (tmp_path / link).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        asyncio.run(FileSnapshots(tmp_path).read("0")) if link == "0" else write(tmp_path)
    assert (tmp_path / "victim").read_text(encoding="utf-8") == "kept"


def test_a_disk_that_hangs_under_a_snapshot_keeps_no_other_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0")  # who opens it waits for a writer

    async def read() -> bytes:
        snapshots = FileSnapshots(tmp_path)
        hanging = asyncio.create_task(snapshots.read("0"))
        assert await snapshots.read("1") == b""
        (tmp_path / "0").write_bytes(b"late")
        return await hanging

    # else this test would hang, too
    unblock = threading.Timer(20, (tmp_path / "0").write_bytes, [b"never"])
    unblock.start()
    assert asyncio.run(read()) == b"late"
    unblock.cancel()


def test_a_note_is_changed_by_one_at_a_time_and_no_directory_is_made_for_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="start the instance first"):
        asyncio.run(FileSnapshots(tmp_path / "state").change("mutes", lambda body: body))
    assert not (tmp_path / "state").exists()  # of root's, it would be of no use to the instance

    async def change() -> bytes:
        await asyncio.gather(
            *(FileSnapshots(tmp_path).change("mutes", lambda body: body + b"x") for _ in range(8))
        )
        return await FileSnapshots(tmp_path).read("mutes")

    assert asyncio.run(change()) == b"x" * 8
