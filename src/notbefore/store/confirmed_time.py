"""``ConfirmedTime``: how late it is for certain. A wall clock may jump, and what expires by it is lost for good."""

import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from msgspec import Struct


class ConfirmedTime(Struct, frozen=True):
    """A moment that was right, and the clock that measures the time since then."""

    wall: float  # Unix seconds
    uptime: float  # seconds, at that moment, on a clock that nobody sets
    boot: str  # the boot of the machine to which ``uptime`` belongs

    def later(self, uptime: float, boot: str) -> "ConfirmedTime":
        """The same, at a later moment. Of the time between two boots nothing is known, so it is not counted."""
        passed = max(0.0, uptime - self.uptime) if boot == self.boot else 0.0
        return ConfirmedTime(self.wall + passed, uptime, boot)


def uptime() -> float:
    """Seconds on a clock that nobody sets, those in which the machine was suspended included, where it counts them."""
    if _BOOT_TIME is not None:
        return time.clock_gettime(_BOOT_TIME)
    if sys.platform == "win32":
        import ctypes  # noqa: PLC0415 - only there

        return float(ctypes.windll.kernel32.GetTickCount64()) / 1000
    return time.monotonic()


@cache
def boot_id() -> str:
    """What tells this boot of the machine from another: the kernel's word, else its time by the wall clock."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"booted-{round(time.time() - uptime())}"


_BOOT_TIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)
