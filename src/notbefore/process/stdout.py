"""``StdoutWriter`` writes records to standard output, in its own thread because a reader may be
slow.

A record is written after its step is on disk. So the agent after a killed one knows every record on
standard output, and does not report it again. For a sick disk a record waits ``DISK_PATIENCE``, as
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

    It does not use ``sys.stdout``, whose lock would keep the process from ending while the reader
    is slow. ``disk``: each line waits for the newest step at the time of its ``write``; without a
    disk, lines wait for nothing.
    """

    def __init__(self, descriptor: int | None = None, disk: Disk | None = None) -> None:
        if descriptor is None:
            descriptor = sys.stdout.fileno()
        self._descriptor = descriptor
        self._disk = disk
        self._lines: queue.Queue[WaitingLine | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write_lines, name="stdout", daemon=True)
        self._is_missing_lines = False  # the last line was left out, or could not be written

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
        step = 0
        if self._disk is not None:
            step = self._disk.step
        until = time.monotonic() + DISK_PATIENCE
        try:
            self._lines.put_nowait(WaitingLine(line, step, until))
        except queue.Full:
            self._warn("no one reads it")

    def _write_lines(self) -> None:
        rest = b""  # of a line that could be written only in part: it comes before the next line
        while True:
            waiting = self._lines.get()
            if waiting is None:  # from ``stop``
                return
            self._wait_for_step(waiting)
            rest = self._write_line(rest, waiting.line)

    def _wait_for_step(self, waiting: WaitingLine) -> None:
        if self._disk is not None:
            patience = max(0.0, waiting.until - time.monotonic())
            self._disk.wait_step(waiting.step, patience)

    def _write_line(self, rest: bytes, line: bytes) -> bytes:
        """Write the rest of an earlier line, and a line; return the rest of a line that was begun.

        A line of which nothing was written is left out: the reader may have closed the pipe.
        """
        unwritten = rest + line
        try:
            while unwritten:
                count = os.write(self._descriptor, unwritten)
                unwritten = unwritten[count:]
        except OSError as error:
            self._warn(str(error))
            if len(unwritten) >= len(line):  # nothing of this line was written
                return unwritten.removesuffix(line)
            return unwritten
        self._is_missing_lines = False
        return b""

    def _warn(self, why: str) -> None:
        if not self._is_missing_lines:
            log.warning(
                "standard output: %s: records are missing there, and kept in the history", why
            )
        self._is_missing_lines = True
