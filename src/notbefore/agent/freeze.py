"""``FreezeMeter`` measures how long this VM was frozen: a thread wakes ten times a second and measures how late it is.

It runs only from shortly before an event that may affect this VM can start until it is over; else the poller measures
how late each poll is. It is apart from the polling, because IMDS answers slowly, or not at all, just when something
happens, and a slow answer is no interruption.
"""

import threading
from typing import Final, NamedTuple

from notbefore.core.change import Gap
from notbefore.process.clock import Clock

TICK: Final = 0.1  # seconds; also how precise the interruption is
NO_GAP: Final = Gap(0.0, 0.0)


class _Moment(NamedTuple):
    wall: float
    monotonic: float


class _Measured(NamedTuple):
    """What the thread has measured, ``since`` the last ``take``."""

    since: _Moment
    last: _Moment
    longest: Gap = NO_GAP

    def until(self, now: _Moment) -> "_Measured":
        """The same, up to ``now``."""
        wall, monotonic = now.wall - self.last.wall - TICK, now.monotonic - self.last.monotonic - TICK
        return _Measured(self.since, now, self.longest.widened(Gap(max(0.0, wall), max(0.0, monotonic))))


class FreezeMeter:
    """``switch`` it on, then ``take`` the longest gap since the last ``take``; both from one thread.

    Its own thread assigns ``_measured``, the one that takes assigns ``_since``: nobody waits for the other.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = _Moment(0.0, 0.0)
        self._measured = _Measured(self._since, self._since)
        self._stop: threading.Event | None = None

    @property
    def running(self) -> bool:
        """It measures."""
        return self._stop is not None

    def switch(self, *, on: bool) -> None:
        """Begin to measure, or stop; without effect where that is so already."""
        if on and self._stop is None:
            self._stop, self._since = threading.Event(), self._now()
            self._measured = _Measured(self._since, self._since)
            threading.Thread(target=self._run, args=(self._stop,), name="freeze", daemon=True).start()
        elif not on and self._stop is not None:
            self._stop.set()
            self._stop = None

    def take(self) -> Gap:
        """The longest gap since the last call, beyond the tick itself, up to this very moment."""
        measured, now = self._current(), self._now()
        self._since = now
        return measured.until(now).longest

    def _current(self) -> _Measured:
        """What was measured since the last ``take``."""
        measured, since = self._measured, self._since
        return measured if measured.since is since else _Measured(since, since)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(TICK):
            self._measured = self._current().until(self._now())

    def _now(self) -> _Moment:
        return _Moment(self._clock.time(), self._clock.monotonic())
