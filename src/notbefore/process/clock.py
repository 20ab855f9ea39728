"""``Clock``: the clocks of this machine in one object, so that a test can step each of them."""

import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from notbefore.core.clock import Instant

# seconds by which two computed boot times of the same boot may differ: the wall clock drifts and
# may be set
SAME_BOOT: Final = 120.0

if sys.platform == "win32":
    import ctypes

    def _seconds_since_boot() -> float:
        return float(ctypes.windll.kernel32.GetTickCount64()) / 1000

elif hasattr(time, "CLOCK_BOOTTIME"):

    def _seconds_since_boot() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)  # with the time that it was suspended

else:

    def _seconds_since_boot() -> float:
        return time.monotonic()


class Clock:
    """The real clocks. ``boot_id`` distinguishes this boot of the machine from others."""

    def __init__(self) -> None:
        self.boot_id = _kernel_boot_id() or f"booted-{round(self.time() - self.boot_time())}"

    def time(self) -> float:
        """Return the time of the wall clock, in Unix seconds."""
        return time.time()

    def boot_time(self) -> float:
        """Return the seconds since the boot, on a clock that cannot be set."""
        return _seconds_since_boot()

    def now(self) -> datetime:
        """Return the time of the wall clock, in UTC."""
        return datetime.now(UTC)

    def read(self) -> Instant:
        """Return the present moment on each clock of this machine."""
        return Instant(self.now(), self.boot_id, self.boot_time())

    def recognize(self, earlier: Instant) -> None:
        """Use the computed boot id of ``earlier``, if it belongs to the same boot.

        Ids from the kernel stay as they are.
        """
        earlier_boot = _computed_boot(earlier.boot)
        this_boot = _computed_boot(self.boot_id)
        if earlier_boot is None or this_boot is None:
            return
        if self.boot_time() < earlier.uptime:
            return
        if abs(this_boot - earlier_boot) <= SAME_BOOT:
            self.boot_id = earlier.boot


def _kernel_boot_id() -> str:
    """Return the kernel's id of this boot; empty on a system without such ids."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return ""


def _computed_boot(boot_id: str) -> float | None:
    """Return the Unix time of the boot in a computed id; ``None`` for an id from the kernel."""
    word, _, seconds = boot_id.partition("-")
    if word != "booted" or not seconds.isdigit():
        return None
    return float(seconds)
