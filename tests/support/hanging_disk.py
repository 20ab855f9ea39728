"""A disk that hangs, for programs that a test starts. It needs a C compiler."""

import os
from pathlib import Path

from support.needs import compile_library

SOURCE = Path(__file__).with_suffix(".c")
# the calls that wait
WRITES = 1
EVERYTHING = 2


class HangingDisk:
    """Lets programs with the environment ``variables`` hang when they use ``directory``."""

    def __init__(self, directory: Path, place: Path) -> None:
        self.directory = directory
        library = place / "hanging_disk.so"
        self._switch = place / "hangs"
        compile_library(SOURCE, library)
        self._switch.write_bytes(b"\0")
        self.variables = {
            "LD_PRELOAD": str(library),
            "HANGING_DISK": str(directory),
            "HANGING_DISK_SWITCH": str(self._switch),
        }

    def hang(self, calls: int) -> None:
        """Let these calls wait: ``WRITES`` or ``EVERYTHING``."""
        self._set(calls)

    def resume(self) -> None:
        """Let the waiting calls return, and all others."""
        self._set(0)

    def _set(self, value: int) -> None:
        with self._switch.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([value]), 0)
