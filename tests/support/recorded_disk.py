"""What a program has written to a directory, and what of it is there after a cut of the power at
any moment.
"""

import random
import struct
from pathlib import Path
from typing import Final, NamedTuple

from support.needs import compile_library

SOURCE = Path(__file__).with_suffix(".c")
SECTOR: Final = 512  # bytes that a disk writes as a whole
_HEAD: Final = struct.Struct("<cdqII")


class Step(NamedTuple):
    """One call that has returned; ``time``: monotonic seconds."""

    what: str
    time: float
    at: int
    path: str
    data: bytes


class RecordedDisk:
    """``variables``: the environment of whoever is to be recorded while it writes below
    ``directory``.
    """

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
        """All that was done, in order."""
        log = self._log.read_bytes()
        found = list[Step]()
        at = 0
        while at < len(log):
            what, time, offset, path_length, length = _HEAD.unpack_from(log, at)
            path_at = at + _HEAD.size
            data_at = path_at + path_length
            path = log[path_at:data_at].decode()
            data = log[data_at : data_at + length]
            found.append(Step(what.decode(), time, offset, path, data))
            at = data_at + length
        return found


class Image:
    """The files as a cut of the power leaves them: what was synced, and any part of what was not.

    Names (a file that is made, deleted or renamed) are there at once: their loss is not tried.
    ``synced`` false: as on a disk that lies about it, for a control that has to fail.
    """

    def __init__(self, *, synced: bool = True) -> None:
        self._synced = synced
        self._safe: dict[str, bytes] = {}  # by path
        self._unsafe: dict[str, list[Step]] = {}  # since the last sync

    def take(self, step: Step) -> None:
        """One step more."""
        if step.what in "wt":
            self._safe.setdefault(step.path, b"")
            self._unsafe.setdefault(step.path, []).append(step)
        elif step.what == "s" and self._synced:
            for one in self._unsafe.pop(step.path, []):
                self._safe[step.path] = _applied(self._safe[step.path], one)
        elif step.what == "u":
            self._safe.pop(step.path, None)
            self._unsafe.pop(step.path, None)
        elif step.what == "r":
            to = step.data.decode()
            self._safe[to] = self._safe.pop(step.path, b"")
            self._unsafe[to] = self._unsafe.pop(step.path, [])

    def cut(self, dice: random.Random) -> dict[str, bytes]:
        """The files after a cut now: of what was not synced, each write is there, is not, or is
        there in part.
        """
        found = dict(self._safe)
        for path, steps in self._unsafe.items():
            how = dice.choice(["all", "none", "any"])
            for step in steps if how != "none" else ():
                if how == "all" or dice.random() < 0.5:
                    found[path] = _applied(found[path], _torn(step, dice) if how == "any" else step)
        return found


def _applied(content: bytes, step: Step) -> bytes:
    if step.what == "t":
        return content[: step.at].ljust(step.at, b"\0")
    return (
        content[: step.at].ljust(step.at, b"\0") + step.data + content[step.at + len(step.data) :]
    )


def _torn(step: Step, dice: random.Random) -> Step:
    sectors = len(step.data) // SECTOR
    if sectors < 2 or dice.random() < 0.5:
        return step
    return step._replace(data=step.data[: SECTOR * dice.randrange(1, sectors)])
