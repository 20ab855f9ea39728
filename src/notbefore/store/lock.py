"""``OwnerLock``: one owner a state directory, by an advisory lock that is gone with the processes that held it.

The directory and its files belong to the agent's user alone: nobody else can write there, or plant a link.
"""

import os
import stat
import sys
import time
from pathlib import Path
from typing import Final

from notbefore.errors import StoreError

NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)  # Windows has neither
PRIVATE: Final = 0o600
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
LOCK_PATIENCE: Final = 2.0  # seconds for the courier of an agent that was killed to end

Inode = tuple[int, int]  # device and number


def inode_of(path: str | Path | int) -> Inode | None:
    """What a path or a descriptor leads to now; ``None`` where there is nothing, or where that cannot be said."""
    try:
        found = os.stat(path)  # noqa: PTH116 - ten times cheaper than a Path, at each turn of the main loop
    except OSError:
        return None
    return found.st_dev, found.st_ino


def check_directory(directory: Path) -> None:
    """Raise ``StoreError`` for a directory in which another user could write, ``OSError`` if it cannot be looked at."""
    if not hasattr(os, "geteuid"):  # Windows: its access lists are another matter
        return
    found = directory.stat()
    if found.st_uid != os.geteuid():
        raise StoreError(
            f"{directory} belongs to user {found.st_uid}, and this is user {os.geteuid()}: change its owner (chown), or"
            " choose another directory with --state-dir"
        )
    if found.st_mode & OTHERS_WRITE:
        raise StoreError(f"{directory} can be written by other users: chmod go-w {directory}")


def prepare_file(path: Path) -> None:
    """Make a file with 0600, or give it that. SQLite gives its ``-journal`` the mode of the database.

    One that is there is not opened: to close it would release the locks that SQLite holds on it in this process.
    """
    if not path.exists():
        path.touch(PRIVATE)
    elif hasattr(os, "geteuid") and stat.S_IMODE(path.stat().st_mode) != PRIVATE:
        path.chmod(PRIVATE)


def private(path: str, flags: int) -> int:
    """Open a file with 0600, as the ``opener`` of ``open``; raises ``OSError``, also for a symbolic link."""
    descriptor = os.open(path, flags | NO_FOLLOW, PRIVATE)
    if flags & (os.O_WRONLY | os.O_RDWR) and hasattr(os, "fchmod"):
        os.fchmod(descriptor, PRIVATE)  # it may be there already, with another mode
    return descriptor


class OwnerLock:
    """The lock on the state directory: who holds it writes there, and sends. Its courier inherits it, and ends with it.

    ``descriptor``: of the lock, for the courier; ``None`` while it is not held.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.descriptor: int | None = None

    def hold(self) -> None:
        """Take the lock on the directory that is there now, and make it where it was deleted; as ``acquire``.

        Raises ``StoreError`` also where the directory is not this user's alone, or may not be made.
        """
        if self.descriptor is not None and inode_of(self.descriptor) == inode_of(_locked_path(self._directory)):
            return
        if not self._directory.is_dir():  # on a disk that hangs, `mkdir` would wait even then
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except PermissionError:
                raise StoreError(
                    f"no permission for {self._directory}: use another directory, `--state-dir DIR`"
                ) from None
        check_directory(self._directory)
        self.acquire()

    def acquire(self, patience: float = LOCK_PATIENCE) -> None:
        """Take the lock; what a killed agent left running ends within a moment, so it is waited for: ``patience``.

        Raises ``StoreError`` while another process holds it, ``OSError`` where there is no directory or no lock.
        """
        descriptor = _open(_locked_path(self._directory))
        deadline = time.monotonic() + patience
        try:
            while not _is_locked(descriptor):
                if time.monotonic() >= deadline:
                    raise StoreError(  # noqa: TRY301 - the descriptor is closed as after any error
                        f"another notbefore is running with {self._directory}: stop it, or give this one its own"
                        " --state-dir"
                    )
                time.sleep(0.01)
        except BaseException:
            os.close(descriptor)
            raise
        self.release()
        self.descriptor = descriptor

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _is_locked(descriptor: int) -> bool:
    """Lock it; ``False``: another process has it."""
    try:
        _lock(descriptor)
    except (BlockingIOError, PermissionError):  # the latter on Windows
        return False
    return True


if sys.platform == "win32":  # pragma: no cover - the tests run on POSIX
    import msvcrt

    _BEYOND = 1 << 30  # what is locked there nobody can read: it is no byte of the file

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, _BEYOND, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _locked_path(directory: Path) -> Path:
        return directory / "agent.lock"  # a directory cannot be opened there

    def _open(path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _locked_path(directory: Path) -> Path:
        return directory

    def _open(path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # it may be a link: systemd makes one for a dynamic user
