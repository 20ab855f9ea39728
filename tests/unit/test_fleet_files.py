"""The files of an instance belong to its user alone, and a link that somebody planted is neither read nor written."""

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from notbefore.fleet.checkpoints import FileSnapshots, Position

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="its access lists are another matter")


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
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()}
    assert modes
    assert set(modes.values()) == {0o600}


def test_a_link_in_the_place_of_a_snapshot_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the first line of somebody else's file\n", encoding="utf-8")
    (tmp_path / "0").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic link"):
        asyncio.run(FileSnapshots(tmp_path).read("0"))


def test_a_link_in_the_place_of_a_file_that_is_being_made_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept", encoding="utf-8")
    (tmp_path / "0.new").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        write(tmp_path)
    assert (tmp_path / "victim").read_text(encoding="utf-8") == "kept"
