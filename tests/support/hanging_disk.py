"""Disks that hang: for the programs that a test starts (needs a C compiler), or in the kernel (needs to mount)."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

from support.needs import compile_library

SOURCE = Path(__file__).with_suffix(".c")
WRITES, EVERYTHING = 1, 2


class HangingDisk:
    """``variables``: the environment of whoever is to find that all below ``directory`` hangs, once it does."""

    def __init__(self, directory: Path, place: Path) -> None:
        self.directory = directory
        library, self._switch = place / "hanging_disk.so", place / "hangs"
        compile_library(SOURCE, library)
        self._switch.write_bytes(b"\0")
        self.variables = {
            "LD_PRELOAD": str(library),
            "HANGING_DISK": str(directory),
            "HANGING_DISK_SWITCH": str(self._switch),
        }

    def hang(self, what: int) -> None:
        """From now on what writes there waits, or everything; 0: it works again."""
        with self._switch.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([what]), 0)


class FrozenDisk:
    """A file system of its own, which the kernel freezes: who writes there waits, and cannot be killed.

    Entering it raises ``OSError`` or ``CalledProcessError`` where that is not allowed.
    """

    def __init__(self, mount_point: Path, place: Path) -> None:
        self._mount_point, self._image = mount_point, place / "disk.img"
        self.directory = mount_point / "state"

    def __enter__(self) -> Self:
        self._mount_point.mkdir()
        with self._image.open("wb") as file:
            file.truncate(32 * 1024 * 1024)
        _run("mkfs.ext4", "-q", self._image)
        _run("mount", "-o", "loop", self._image, self._mount_point)
        self.directory.mkdir(mode=0o700)
        try:
            self.hang(WRITES)
        except (OSError, subprocess.CalledProcessError):
            self.__exit__()
            raise
        self.hang(0)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.CalledProcessError):  # it is thawed
            self.hang(0)
        _run("umount", "--lazy", self._mount_point)

    def hang(self, what: int) -> None:
        """As of ``HangingDisk``; what is in memory can be read."""
        _run("fsfreeze", "--freeze" if what else "--unfreeze", self._mount_point)


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
