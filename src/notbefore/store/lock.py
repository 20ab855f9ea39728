"""One agent a state directory: an advisory lock on a file beside the state, gone with the process that held it."""

import sys
from pathlib import Path
from typing import IO

from notbefore.errors import StoreError


class DirectoryLock:
    """``acquire`` raises ``StoreError`` while another process holds it, ``OSError`` where no file can be made."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "agent.lock"
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the lock; taking it twice is one hold."""
        if self._file is not None:
            return
        file = self._path.open("a+", encoding="utf-8")
        try:
            _lock(file)
        except OSError as error:
            file.close()
            raise StoreError(
                f"another notbefore is running with {self._path.parent}: stop it, or give this one its own --state-dir"
            ) from error
        self._file = file

    def release(self) -> None:
        """Let go; without a hold nothing happens."""
        if self._file is not None:
            self._file.close()
            self._file = None


if sys.platform == "win32":  # pragma: no cover - the tests run on POSIX
    import msvcrt

    def _lock(file: IO[str]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
