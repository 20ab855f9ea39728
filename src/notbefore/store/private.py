"""The state directory and its files belong to the agent's user alone: nobody else can write there, or plant a link."""

import os
import stat
from pathlib import Path
from typing import Final

from notbefore.errors import StoreError

NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)  # Windows has neither
PRIVATE: Final = 0o600
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


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
