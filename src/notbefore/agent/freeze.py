"""``FreezeMeter`` measures how long this VM was frozen: a thread wakes ten times a second and measures how late it is.

It runs only from shortly before an event that may affect this VM can start until it is over; else the poller measures
how late each poll is. It is apart from the polling, because IMDS answers slowly, or not at all, just when something
happens, and a slow answer is no interruption.
"""

import threading
from typing import Final

from notbefore.core.change import Gap
from notbefore.process.clock import Clock

TICK: Final = 0.1  # seconds; also how precise the interruption is


class FreezeMeter:
    """``switch`` it on, then ``take`` the longest gap since the last ``take``. Safe to call from several threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._longest = Gap(0.0, 0.0)
        self._last = (0.0, 0.0)
        self._stop: threading.Event | None = None

    @property
    def running(self) -> bool:
        """It measures."""
        return self._stop is not None

    def switch(self, *, on: bool) -> None:
        """Begin to measure, or stop; without effect where that is so already."""
        if on == self.running:  # the usual case, each second
            return
        with self._lock:
            if self._stop is not None and not on:
                self._stop.set()
                self._stop = None
            elif self._stop is None and on:
                self._stop = threading.Event()
                self._longest, self._last = Gap(0.0, 0.0), self._read()
                threading.Thread(target=self._run, args=(self._stop,), name="freeze", daemon=True).start()

    def take(self) -> Gap:
        """The longest gap since the last call, beyond the tick itself, up to this very moment."""
        with self._lock:
            self._measure()
            longest, self._longest = self._longest, Gap(0.0, 0.0)
            return longest

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(TICK):
            with self._lock:
                self._measure()

    def _read(self) -> tuple[float, float]:
        return self._clock.time(), self._clock.monotonic()

    def _measure(self) -> None:
        now = self._read()
        gap = Gap(max(0.0, now[0] - self._last[0] - TICK), max(0.0, now[1] - self._last[1] - TICK))
        self._longest, self._last = self._longest.widened(gap), now
