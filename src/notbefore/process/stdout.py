"""``StdoutWriter`` writes records to standard output in its own thread, so that nobody waits for a
slow reader.
"""

import logging
import os
import queue
import sys
import threading
from contextlib import suppress
from typing import Final

MAX_WAITING: Final = 10_000  # lines; further ones are left out here, but the history has them

log = logging.getLogger("notbefore.process.stdout")


class StdoutWriter:
    """Takes lines with ``write``, which never waits and never raises.

    Without Python's buffers: their lock would hold the end of the process while nobody reads.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stdout.fileno() if descriptor is None else descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write_lines, name="stdout", daemon=True)
        self._missing = False  # the last line was left out, or could not be written

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self, patience: float) -> None:
        """Write the waiting lines, for at most ``patience`` seconds."""
        with suppress(queue.Full):
            self._lines.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join(patience)

    def write(self, line: bytes) -> None:
        """Queue a line."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._warn("nobody reads it")

    def _write_lines(self) -> None:
        left = b""  # of a line that could be written only in part: it comes before the next line
        while (line := self._lines.get()) is not None:
            left += line
            # the agent goes on if the reader has closed the pipe
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError as error:
                self._warn(str(error))
                left = left[: -len(line)] if len(left) >= len(line) else left
            else:
                self._missing = False

    def _warn(self, why: str) -> None:
        if not self._missing:
            log.warning(
                "standard output: %s: records are missing there, and kept in the history", why
            )
        self._missing = True
