"""A disk that hangs, for the programs that a test starts (needs a C compiler)."""

import os
from pathlib import Path

from support.needs import compile_library

SOURCE = Path(__file__).with_suffix(".c")
WRITES = 1
EVERYTHING = 2


class HangingDisk:
    """``variables``: the environment of whoever is to find that all below ``directory`` hangs, once
    it does.
    """

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

    def hang(self, what: int) -> None:
        """From now on what writes there waits, or everything; 0: it works again."""
        with self._switch.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([what]), 0)
