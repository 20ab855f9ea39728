"""The state directory and its files belong to the agent's user alone: nobody else can write there, or plant a link."""

import errno
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


def open_file(path: Path) -> int:
    """Open a file for reading and writing, made with 0600 whatever the umask.

    Raises ``StoreError`` for a symbolic link, ``OSError`` if it cannot be opened.
    """
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | NO_FOLLOW)  # on a disk that hangs, O_CREAT would wait for it
        except FileNotFoundError:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, PRIVATE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreError(f"{path} is a symbolic link: remove it") from None
        raise
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, PRIVATE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def private(path: str, flags: int) -> int:
    """Open a file with 0600, as the ``opener`` of ``open``; raises ``OSError``, also for a symbolic link."""
    descriptor = os.open(path, flags | NO_FOLLOW, PRIVATE)
    if flags & (os.O_WRONLY | os.O_RDWR) and hasattr(os, "fchmod"):
        os.fchmod(descriptor, PRIVATE)  # it may be there already, with another mode
    return descriptor


def prepare_database(path: Path) -> None:
    """Make the file with 0600, or give it that; raises ``StoreError`` for a link, or what is not a file of ours.

    SQLite gives its ``-journal`` the mode of the file. A file that is there is not opened: closing it would
    release the locks that SQLite holds on it in this process.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        os.close(open_file(path))
        return
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is not a regular file: move it away")
    if hasattr(os, "geteuid") and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != PRIVATE:
        path.chmod(PRIVATE)
