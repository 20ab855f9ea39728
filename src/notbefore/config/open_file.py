"""``open_file``: a file that the configuration names; it may be a pipe, as of ``check-config <(sops -d FILE)``."""

import errno
import os
import select
from pathlib import Path
from typing import BinaryIO, Final

PATIENCE: Final = 3.0  # seconds for what a pipe's writer says first


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raises ``OSError``, also for a pipe that nobody writes into: it would wait for ever."""
    if not path.is_fifo():
        return path.open("rb")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not select.select([file], [], [], PATIENCE)[0]:
        file.close()
        raise OSError(errno.EAGAIN, "this is a pipe, and nobody writes into it")
    os.set_blocking(file.fileno(), True)
    return file
