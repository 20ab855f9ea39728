"""``Clock``: the clocks of this machine in one object, so that a test can step each of them."""

import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final

from msgspec import Struct

from notbefore.core.clock import Instant
from notbefore.core.document import read_time

SAME_BOOT: Final = 120.0
"""Seconds by which two computed times of the same boot may differ, on a system without boot ids: they are computed
from the wall clock, which drifts and may be set."""


_BOOT_TIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)


def uptime() -> float:
    """Seconds on a clock that cannot be set; it includes suspended time if the system counts it."""
    if _BOOT_TIME is not None:
        return time.clock_gettime(_BOOT_TIME)
    if sys.platform == "win32":
        import ctypes  # noqa: PLC0415 - only on Windows

        return float(ctypes.windll.kernel32.GetTickCount64()) / 1000
    return time.monotonic()


class ClockReading(Struct, frozen=True):
    """One moment on each clock."""

    wall: datetime  # UTC; may be set
    monotonic: float  # seconds; may stop while the VM is frozen
    boot: float  # seconds since the boot, with suspended time if the system counts it

    def since(self, earlier: "ClockReading") -> float:
        """Seconds from ``earlier`` to this moment, by the clock that moved most.

        During a freeze a clock may stop, and it may be corrected afterwards or not; no clock runs ahead.
        """
        wall = (self.wall - earlier.wall).total_seconds()
        return max(wall, self.monotonic - earlier.monotonic, self.boot - earlier.boot)


class Clock:
    """The real clocks. ``boot_id`` distinguishes this boot of the machine from others.

    ``monotonic`` returns seconds since some moment in the past, ``time`` Unix seconds of the wall clock, and
    ``boot_time`` seconds since the boot, with suspended time if the system counts it.
    """

    # not wrapped: a poll calls them eight times
    monotonic = staticmethod(time.monotonic)
    boot_time = staticmethod(uptime)
    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.boot_id = boot_id()

    def now(self) -> datetime:
        """The wall clock, in UTC."""
        return datetime.now(UTC)

    def read(self) -> ClockReading:
        """The present moment on each clock."""
        return ClockReading(self.now(), self.monotonic(), self.boot_time())

    def instant(self, reading: ClockReading, date: str = "") -> Instant:
        """The moment of a reading, with the ``Date`` header of IMDS's answer, to be stored and compared."""
        return Instant(reading.wall, self.boot_id, reading.boot, read_time(date) if date else None)

    def recognize(self, earlier: Instant) -> None:
        """Use the computed boot id of ``earlier``, if it is of the same boot; ids from the kernel stay as they are."""
        then, now = _computed(earlier.boot), _computed(self.boot_id)
        if then is None or now is None or self.boot_time() < earlier.uptime:
            return
        if abs(now - then) <= SAME_BOOT:
            self.boot_id = earlier.boot


def _computed(boot_id: str) -> float | None:
    """The Unix time in a computed boot id; ``None`` for an id from the kernel."""
    word, _, seconds = boot_id.partition("-")
    return float(seconds) if word == "booted" and seconds.isdigit() else None


@cache
def boot_id() -> str:
    """The id of this boot of the machine: the kernel's, else computed from the boot's time by the wall clock."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"booted-{round(time.time() - uptime())}"
