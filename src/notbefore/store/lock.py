"""``OwnerLock``: one owner per state directory.

It is an advisory lock, which ends with the processes that hold it.

The directory and its files belong to the agent's user alone: no other user can write there or
create a link.
"""

import os
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from notbefore.errors import StoreError

if sys.platform == "win32":  # pragma: no cover - the tests run on POSIX
    import msvcrt

    _LOCKED_FILE: Final = "agent.lock"  # a directory cannot be opened there
    _OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT
    _LOCKED_BYTE: Final = 1 << 30  # beyond the end of the file: a locked byte cannot be read

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    _LOCKED_FILE: Final = ""  # the directory itself
    # links are followed: systemd makes one for a dynamic user
    _OPEN_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)  # Windows has neither
PRIVATE: Final = 0o600  # of files
PRIVATE_DIRECTORY: Final = 0o700
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
LOCK_PATIENCE: Final = 2.0  # seconds for the courier of a killed agent to end

Inode = tuple[int, int]
"""The device, and the number on it."""


def inode_of(path: Path | int) -> Inode | None:
    """Return the inode of a path or a descriptor.

    ``None`` if there is none, or if it cannot be read.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - also of a descriptor
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_directory(directory: Path) -> None:
    """Raise ``StoreError`` for a directory in which another user could write.

    Raises ``OSError`` if it cannot be read.
    """
    if not hasattr(os, "geteuid"):  # Windows has access lists instead, which are not checked
        return
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise StoreError(
            f"{directory} belongs to user {status.st_uid}, but this is user {os.geteuid()}: change"
            " its owner (chown), or choose another directory with --state-dir"
        )
    if status.st_mode & OTHERS_WRITE:
        raise StoreError(f"other users can write to {directory}: chmod go-w {directory}")


def prepare_file(path: Path) -> None:
    """Create a file with mode 0600, or set that mode.

    SQLite gives its ``-journal`` the mode of the database.

    An existing file is not opened: closing it would release the locks that SQLite holds on it in
    this process. Raises ``StoreError`` for a symbolic link.
    """
    if path.is_symlink():
        raise StoreError(
            f"{path} is a symbolic link, which is not followed: replace it by the file"
        )
    if not path.exists():
        path.touch(PRIVATE)
    elif hasattr(os, "geteuid") and stat.S_IMODE(path.stat().st_mode) != PRIVATE:
        path.chmod(PRIVATE)


def private_opener(path: str, flags: int) -> int:
    """Open a file with mode 0600, as the ``opener`` of ``open``.

    Raises ``OSError``, also for a symbolic link.
    """
    descriptor = os.open(path, flags | NO_FOLLOW, PRIVATE)
    if flags & (os.O_WRONLY | os.O_RDWR) and hasattr(os, "fchmod"):
        os.fchmod(descriptor, PRIVATE)  # it may exist already, with another mode
    return descriptor


class OwnerLock:
    """The lock on the state directory: only its holder writes there and sends.

    The courier inherits it. ``descriptor``: the file descriptor of the lock, for the courier;
    ``None`` while the lock is not held.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / _LOCKED_FILE
        self.descriptor: int | None = None

    def hold(self) -> None:
        """Lock the present directory, as ``acquire``; create it if it was deleted.

        Also raises ``StoreError`` if the directory is not this user's alone, or may not be created.
        """
        if self.descriptor is not None and inode_of(self.descriptor) == inode_of(self._path):
            return
        try:
            # on a hanging disk, `mkdir` would wait even if it exists
            if not self._directory.is_dir():
                self._directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        except PermissionError:
            raise StoreError(
                f"no permission for {self._directory}: use another directory, `--state-dir DIR`"
            ) from None
        check_directory(self._directory)
        self.acquire()

    def acquire(self, patience: float = LOCK_PATIENCE) -> None:
        """Take the lock.

        Waits ``patience`` seconds for the courier of a killed agent to end.

        Raises ``StoreError`` if another process still holds it, ``OSError`` without a directory or
        without locks.
        """
        descriptor = os.open(self._path, _OPEN_FLAGS)
        try:
            self._wait_for_lock(descriptor, patience)
        except BaseException:
            os.close(descriptor)
            raise
        self.release()
        self.descriptor = descriptor

    def _wait_for_lock(self, descriptor: int, patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            with suppress(BlockingIOError, PermissionError):  # Windows raises the latter
                _lock(descriptor)
                return
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"another notbefore is running with {self._directory}: stop it, or give"
                    " this one its own --state-dir"
                )
            time.sleep(0.01)

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
