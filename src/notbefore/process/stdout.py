"""``StdoutWriter`` writes records to standard output in its own thread, so that nobody waits for a
slow reader.

A record is written after its step is on disk: what a killed agent has written to standard output,
the next one knows, and does not report again. For a sick disk a record waits ``DISK_PATIENCE``, as
deliveries do.
"""

import logging
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Final, Protocol

from msgspec import Struct

from notbefore.core.outbox import DISK_PATIENCE

MAX_WAITING: Final = 10_000  # lines; further ones are left out here, but the history has them

log = logging.getLogger("notbefore.process.stdout")


class Disk(Protocol):
    """The disk to which the steps of memory are written (``store.disk.DiskThread``)."""

    @property
    def step(self) -> int:
        """The number of the newest step of memory."""

    def wait_step(self, step: int, seconds: float) -> None:
        """Wait until a step is on disk, at most ``seconds``."""


class WaitingLine(Struct, frozen=True):
    """A line that waits for its step to be on disk."""

    line: bytes
    step: int
    until: float  # monotonic seconds; then it waits no longer


class StdoutWriter:
    """Takes lines with ``write``, which never waits and never raises.

    Without Python's buffers: their lock would hold the end of the process while nobody reads.

    ``disk``: each line waits for the newest step at the time of its ``write``; without one, for
    nothing.
    """

    def __init__(self, descriptor: int | None = None, disk: Disk | None = None) -> None:
        self._descriptor = sys.stdout.fileno() if descriptor is None else descriptor
        self._disk = disk
        self._lines: queue.Queue[WaitingLine | None] = queue.Queue(MAX_WAITING)
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
        step = self._disk.step if self._disk is not None else 0
        until = time.monotonic() + DISK_PATIENCE
        try:
            self._lines.put_nowait(WaitingLine(line, step, until))
        except queue.Full:
            self._warn("nobody reads it")

    def _write_lines(self) -> None:
        left = b""  # of a line that could be written only in part: it comes before the next line
        while (waiting := self._lines.get()) is not None:
            if self._disk is not None:
                patience = max(0.0, waiting.until - time.monotonic())
                self._disk.wait_step(waiting.step, patience)
            line = waiting.line
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
