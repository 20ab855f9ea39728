"""``FreezeMeter`` measures how long this VM was frozen: a thread wakes ten times a second and notes how late.

It runs only while an event that hits this VM is listed. It is apart from the polling, because IMDS answers slowly, or
not at all, just when something happens, and a slow answer is no interruption.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from notbefore.core.change import Gap

TICK: Final = 0.1  # seconds; also how precise the interruption is


class FreezeMeter:
    """``start``, then ``take`` the longest gap since the last ``take``; ``stop`` when nothing is expected."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clocks = (wall, monotonic)
        self._mutex = threading.Lock()
        self._longest = Gap(0.0, 0.0)
        self._last = (0.0, 0.0)
        self._stop: threading.Event | None = None

    @property
    def running(self) -> bool:
        """Beats are being kept."""
        return self._stop is not None

    def start(self) -> None:
        """Begin to feel; without effect while running."""
        if self._stop is None:
            self._stop = threading.Event()
            self._longest, self._last = Gap(0.0, 0.0), self._read()
            threading.Thread(target=self._run, args=(self._stop,), name="pulse", daemon=True).start()

    def stop(self) -> None:
        """Feel no longer."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def take(self) -> Gap:
        """The longest gap since the last call, beyond the tick itself, up to this very moment."""
        with self._mutex:
            self._measure()
            longest, self._longest = self._longest, Gap(0.0, 0.0)
            return longest

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(TICK):
            with self._mutex:
                self._measure()

    def _read(self) -> tuple[float, float]:
        return self._clocks[0](), self._clocks[1]()

    def _measure(self) -> None:
        now = self._read()
        gap = Gap(max(0.0, now[0] - self._last[0] - TICK), max(0.0, now[1] - self._last[1] - TICK))
        self._longest, self._last = self._longest.widened(gap), now
