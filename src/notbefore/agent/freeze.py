"""``FreezeMeter`` measures how long this VM was frozen: a thread wakes ten times a second and
measures how late it is.

It runs only from shortly before an event that may affect this VM can start until the event is over.
It is separate from the polling, because IMDS answers slowly or not at all while something happens,
and a slow answer is no interruption. At other times the lateness of each poll is measured:
``PollGaps``.
"""

import threading
from typing import Final

from msgspec import Struct

from notbefore.core.clock import Gap, Instant
from notbefore.process.clock import Clock

TICK: Final = 0.1  # seconds; also the precision of a measured interruption


UNMEASURED: Final = 0.5
"""Seconds in which nothing has to measure: IMDS usually answers within them."""

NO_GAP: Final = Gap(0.0, 0.0)


class FreezeMeter:
    """Call ``switch`` to start it, then ``take`` for the longest gap since the last ``take``.

    Both from one thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wall = self._uptime = 0.0  # the last tick
        self._longest = NO_GAP
        self._stop: threading.Event | None = None

    @property
    def running(self) -> bool:
        """Whether it measures."""
        return self._stop is not None

    def switch(self, *, on: bool) -> None:
        """Begin or stop measuring; no effect if it is already in that state."""
        if on and self._stop is None:
            self._stop = threading.Event()
            self.take()
            threading.Thread(
                target=self._run, args=(self._stop,), name="freeze", daemon=True
            ).start()
        elif not on and self._stop is not None:
            self._stop.set()
            self._stop = None

    def take(self) -> Gap:
        """Return the longest gap since the last call, up to this moment, without the tick
        itself.
        """
        with self._lock:
            self._tick()
            longest = self._longest
            self._longest = NO_GAP
            return longest

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(TICK):
            with self._lock:
                self._tick()

    def _tick(self) -> None:
        wall = self._clock.time()
        uptime = self._clock.boot_time()
        gap = Gap(wall - self._wall - TICK, uptime - self._uptime - TICK)
        self._longest = longer(self._longest, gap)
        self._wall = wall
        self._uptime = uptime


class MeasuredGap(Struct, frozen=True):
    """How long this VM may have stood still since the last good answer."""

    longest: Gap
    unmeasured: float  # the longest time in which nothing measured, in seconds

    def believed(self, seconds: float | None) -> float | None:
        """``seconds`` of the longest gap; ``None`` if it is none, and not all was measured."""
        if seconds is None or (seconds < UNMEASURED < self.unmeasured):
            return None
        return seconds


class PollGaps:
    """Collects how long this VM may have stood still since the last good answer.

    An answer is as old as its request, so the time of the request belongs to the next answer too.
    The lateness of a poll says nothing of the time in which its request is under way.
    """

    def __init__(self, meter: FreezeMeter) -> None:
        self._meter = meter
        self._metered = False  # the meter ran during the poll before
        self._late = NO_GAP
        self._unmeasured = 0.0

    def add(self, late: Gap, busy: float) -> None:
        """Add a poll, whatever its result.

        ``late``: how late it began. ``busy``: the seconds from the request of the poll before until
        the polling waited again.
        """
        if not self._metered:
            self._unmeasured = max(self._unmeasured, busy)
        self._metered = self._meter.running
        if not self._metered:
            self._late = longer(self._late, late)

    def take(self, asked: Instant, now: Instant) -> MeasuredGap:
        """Return the gap up to a good answer, and begin again with its request."""
        flight = longest_between(asked, now)
        if self._metered:
            self._late = longer(self._late, self._meter.take())
        else:
            self._unmeasured = max(self._unmeasured, flight)
        measured = MeasuredGap(self._late, self._unmeasured)

        # a freeze in this long a flight may be that of an event which the next answer shows
        if not self._metered or flight <= UNMEASURED:
            self._late = NO_GAP
        self._unmeasured = 0.0
        return measured


def longer(first: Gap, second: Gap) -> Gap:
    """The longer delay on each clock."""
    return Gap(max(first.wall, second.wall), max(first.uptime, second.uptime))


def longest_between(begin: Instant, end: Instant) -> float:
    """Seconds between two moments of one boot, on the clock of this VM that shows more of them."""
    return max(end.uptime - begin.uptime, (end.wall - begin.wall).total_seconds())
