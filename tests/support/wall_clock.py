"""A wall clock that jumps, for the programs that a test starts; needs a C compiler."""

import os
import struct
from pathlib import Path

from support.needs import compile_library

SOURCE = Path(__file__).with_suffix(".c")


class WallClock:
    """``variables``: the environment of whoever is to have this clock."""

    def __init__(self, directory: Path) -> None:
        library, self._offset = directory / "wall_clock.so", directory / "offset"
        compile_library(SOURCE, library)
        self._offset.write_bytes(struct.pack("d", 0.0))
        self.variables = {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET": str(self._offset)}

    def jump(self, seconds: float) -> None:
        """So many seconds ahead of the real time from now on; 0 is the real time."""
        with self._offset.open("r+b") as file:
            os.pwrite(file.fileno(), struct.pack("d", seconds), 0)
