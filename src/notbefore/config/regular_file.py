"""``open_file`` opens the files that a user names: the configuration, secrets and certificates."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

# so that opening a FIFO does not wait for its other end; Windows has neither flag
_NO_WAIT: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)

_INHERITED: Final = ("/dev/fd/", "/dev/stdin")  # opened by the shell


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; raises ``OSError``, also if it is of another kind.

    A FIFO would wait for a writer, and a device may never end. A pipe that the shell has opened is
    allowed, because it has its writer: ``check-config <(make-config)``.
    """
    if str(path).startswith(_INHERITED):
        return Path(path).open("rb")
    return open(path, "rb", opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | _NO_WAIT)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor

    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def status_of(path: str | Path) -> os.stat_result | None:
    """Return the status of a file; ``None`` if there is none, or if this user may not look."""
    try:
        return Path(path).stat()
    except OSError:
        return None
