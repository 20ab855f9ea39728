"""``Clock``: the clocks of this machine. Nothing else in this room reads one, so that a test can step each of them."""

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
"""Seconds by which two times of the same boot may differ, where the system does not name its boots: they are computed
from the wall clock, which drifts and is set."""


_BOOT_TIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)


def uptime() -> float:
    """Seconds on a clock that nobody sets, those in which the machine was suspended included, where it counts them."""
    if _BOOT_TIME is not None:
        return time.clock_gettime(_BOOT_TIME)
    if sys.platform == "win32":
        import ctypes  # noqa: PLC0415 - only there

        return float(ctypes.windll.kernel32.GetTickCount64()) / 1000
    return time.monotonic()


class ClockReading(Struct, frozen=True):
    """One moment on each clock."""

    wall: datetime  # UTC; somebody may set it
    monotonic: float  # seconds; may stand still while the VM is frozen
    boot: float  # seconds since the boot, those of a suspension included, where the system counts them

    def since(self, earlier: "ClockReading") -> float:
        """Seconds from ``earlier`` to this moment: what the clock that moved most says.

        Over a freeze a clock may stand still and be put right afterwards, or not; none moves on by itself.
        """
        wall = (self.wall - earlier.wall).total_seconds()
        return max(wall, self.monotonic - earlier.monotonic, self.boot - earlier.boot)


class Clock:
    """The clocks as they are; ``boot_id`` tells this boot of the machine from another.

    ``monotonic`` gives seconds since some moment in the past, ``time`` Unix seconds of the wall clock, and
    ``boot_time`` seconds since the boot, those in which the machine was suspended included where they are counted.
    """

    # not wrapped: a poll asks eight times
    monotonic = staticmethod(time.monotonic)
    boot_time = staticmethod(uptime)
    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.boot_id = boot_id()

    def now(self) -> datetime:
        """The wall clock, in UTC."""
        return datetime.now(UTC)

    def read(self) -> ClockReading:
        """This moment on each clock."""
        return ClockReading(self.now(), self.monotonic(), self.boot_time())

    def instant(self, reading: ClockReading, date: str = "") -> Instant:
        """The moment of a reading, with the ``Date`` header of IMDS's answer, for what is kept and compared."""
        return Instant(reading.wall, self.boot_id, reading.boot, read_time(date) if date else None)

    def recognize(self, earlier: Instant) -> None:
        """Take over the name of the boot in which ``earlier`` was, if it is this one and its name is only computed."""
        then, now = _computed(earlier.boot), _computed(self.boot_id)
        if then is None or now is None or self.boot_time() < earlier.uptime:
            return
        if abs(now - then) <= SAME_BOOT:
            self.boot_id = earlier.boot


def _computed(boot_id: str) -> float | None:
    """The Unix time of a boot that the system does not name; ``None`` for a name."""
    word, _, seconds = boot_id.partition("-")
    return float(seconds) if word == "booted" and seconds.isdigit() else None


@cache
def boot_id() -> str:
    """What tells this boot of the machine from another: the kernel's word, else its time by the wall clock."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"booted-{round(time.time() - uptime())}"
