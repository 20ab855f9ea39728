"""``FreezeMeter`` measures how long this VM was frozen: a thread wakes ten times a second and measures how late it is.

It runs only from shortly before an event that may affect this VM can start until it is over; else it is measured how
late each poll is. It is apart from the polling, because IMDS answers slowly, or not at all, just when something
happens, and a slow answer is no interruption.
"""

import threading
from typing import Final

from notbefore.core.clock import Gap
from notbefore.process.clock import Clock

TICK: Final = 0.1  # seconds; also how precise the interruption is


class FreezeMeter:
    """``switch`` it on, then ``take`` the longest gap since the last ``take``; both from one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wall = self._monotonic = 0.0  # the last tick
        self._longest = Gap(0.0, 0.0)
        self._stop: threading.Event | None = None

    @property
    def running(self) -> bool:
        """It measures."""
        return self._stop is not None

    def switch(self, *, on: bool) -> None:
        """Begin to measure, or stop; without effect where that is so already."""
        if on and self._stop is None:
            self._stop = threading.Event()
            self.take()
            threading.Thread(target=self._run, args=(self._stop,), name="freeze", daemon=True).start()
        elif not on and self._stop is not None:
            self._stop.set()
            self._stop = None

    def take(self) -> Gap:
        """The longest gap since the last call, beyond the tick itself, up to this very moment."""
        with self._lock:
            self._tick()
            longest, self._longest = self._longest, Gap(0.0, 0.0)
            return longest

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(TICK):
            with self._lock:
                self._tick()

    def _tick(self) -> None:
        wall, monotonic = self._clock.time(), self._clock.monotonic()
        longest = self._longest
        self._longest = Gap(
            max(longest.wall, wall - self._wall - TICK), max(longest.monotonic, monotonic - self._monotonic - TICK)
        )
        self._wall, self._monotonic = wall, monotonic
