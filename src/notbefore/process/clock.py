"""``Clock``: the clocks of this machine in one object, so that a test can step each of them."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from notbefore.core.clock import Instant

SAME_BOOT: Final = 120.0
"""Seconds by which two computed times of the same boot may differ, on a system without boot ids:
they are computed from the wall clock, which drifts and may be set."""


def _clock_since_boot() -> Callable[[], float]:
    """Return the clock that counts seconds since the boot, with suspended time if the system counts
    it.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if sys.platform == "win32":
        import ctypes  # noqa: PLC0415 - only on Windows

        return lambda: float(ctypes.windll.kernel32.GetTickCount64()) / 1000
    return time.monotonic


class Clock:
    """The real clocks. ``boot_id`` distinguishes this boot of the machine from others.

    ``time`` returns Unix seconds of the wall clock, and ``boot_time`` seconds since the boot, which
    cannot be set.
    """

    # not wrapped: a poll calls them eight times
    boot_time = staticmethod(_clock_since_boot())
    time = staticmethod(time.time)

    def __init__(self) -> None:
        # without the kernel's it is computed from the boot's time by the wall clock
        self.boot_id = f"booted-{round(self.time() - self.boot_time())}"
        with suppress(OSError):
            self.boot_id = (
                Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
            )

    def now(self) -> datetime:
        """The wall clock, in UTC."""
        return datetime.now(UTC)

    def read(self) -> Instant:
        """The present moment on each clock of this machine."""
        return Instant(self.now(), self.boot_id, self.boot_time())

    def recognize(self, earlier: Instant) -> None:
        """Use the computed boot id of ``earlier``, if it is of the same boot.

        Ids from the kernel stay as they are.
        """
        then, now = _computed(earlier.boot), _computed(self.boot_id)
        if then is None or now is None or self.boot_time() < earlier.uptime:
            return
        if abs(now - then) <= SAME_BOOT:
            self.boot_id = earlier.boot


def _computed(boot_id: str) -> float | None:
    """The Unix time in a computed boot id; ``None`` for an id from the kernel."""
    word, _, seconds = boot_id.partition("-")
    return float(seconds) if word == "booted" and seconds.isdigit() else None
