"""``RecordedDisk`` records the writes of a program to a directory.

``Image`` replays them, and yields the files that a power cut may leave at any moment.
"""

import random
import struct
from pathlib import Path
from typing import Final, NamedTuple

from support.needs import compile_library

SOURCE = Path(__file__).with_suffix(".c")
SECTOR: Final = 512  # bytes that a disk writes as a whole
WRITE: Final = "w"
TRUNCATE: Final = "t"
SYNC: Final = "s"
UNLINK: Final = "u"
RENAME: Final = "r"
_HEAD: Final = struct.Struct("<cdqII")  # see the comment in the source in C


class Step(NamedTuple):
    """One call that has returned; ``time``: monotonic seconds."""

    call: str
    time: float
    at: int  # the offset of a write, or the size after a truncation
    path: str
    data: bytes  # of a write; for a rename the new path


class RecordedDisk:
    """Records programs that have the environment ``variables`` and write below ``directory``."""

    def __init__(self, directory: Path, place: Path) -> None:
        self.directory = directory
        library = place / "recorded_disk.so"
        self._log = place / "recorded"
        compile_library(SOURCE, library)
        self.variables = {
            "LD_PRELOAD": str(library),
            "RECORDED_DISK": str(directory),
            "RECORDED_DISK_LOG": str(self._log),
        }

    def steps(self) -> list[Step]:
        """Return all recorded calls, in order."""
        log = self._log.read_bytes()
        steps: list[Step] = []
        start = 0
        while start < len(log):
            call, time, at, path_length, data_length = _HEAD.unpack_from(log, start)
            path_start = start + _HEAD.size
            data_start = path_start + path_length
            end = data_start + data_length
            path = log[path_start:data_start].decode()
            steps.append(Step(call.decode(), time, at, path, log[data_start:end]))
            start = end
        return steps


class Image:
    """The files after some steps: synced content, and the writes that were not synced yet.

    Names are always kept: a file that is created, deleted or renamed is so after a power cut too.
    With ``synced=False``, a sync has no effect: a control that has to fail.
    """

    def __init__(self, *, synced: bool = True) -> None:
        self._synced = synced
        self._safe: dict[str, bytes] = {}  # synced content, by path
        self._unsafe: dict[str, list[Step]] = {}  # the writes since the last sync, by path

    def take(self, step: Step) -> None:
        """Apply the next step."""
        if step.call in (WRITE, TRUNCATE):
            self._safe.setdefault(step.path, b"")
            self._unsafe.setdefault(step.path, []).append(step)
        elif step.call == SYNC and self._synced:
            for write in self._unsafe.pop(step.path, []):
                self._safe[step.path] = _applied(self._safe[step.path], write)
        elif step.call == UNLINK:
            self._safe.pop(step.path, None)
            self._unsafe.pop(step.path, None)
        elif step.call == RENAME:
            new_path = step.data.decode()
            self._safe[new_path] = self._safe.pop(step.path, b"")
            self._unsafe[new_path] = self._unsafe.pop(step.path, [])

    def cut(self, dice: random.Random) -> dict[str, bytes]:
        """Return files that a power cut may leave now, by path.

        For each file, the disk has written all, none or some of the writes that were not synced.
        Some of them are torn.
        """
        files = dict(self._safe)
        for path, writes in self._unsafe.items():
            choice = dice.choice(["all", "none", "any"])
            if choice == "none":
                continue
            for write in writes:
                if choice == "all":
                    files[path] = _applied(files[path], write)
                elif dice.random() < 0.5:
                    files[path] = _applied(files[path], _torn(write, dice))
        return files


def _applied(content: bytes, write: Step) -> bytes:
    """Return the content of a file after a write or a truncation."""
    before = content[: write.at].ljust(write.at, b"\0")
    if write.call == TRUNCATE:
        return before
    return before + write.data + content[write.at + len(write.data) :]


def _torn(write: Step, dice: random.Random) -> Step:
    """Return a write of which only the first sectors reached the disk, or the whole write."""
    sectors = len(write.data) // SECTOR
    if sectors < 2 or dice.random() < 0.5:
        return write
    return write._replace(data=write.data[: SECTOR * dice.randrange(1, sectors)])
