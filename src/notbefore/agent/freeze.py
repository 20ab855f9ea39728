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
"""The longest unmeasured time, in seconds, that does not make an interruption unknown. IMDS usually
answers within it."""

NO_GAP: Final = Gap(0.0, 0.0)


class FreezeMeter:
    """Measures while it is switched on; ``take`` returns the longest gap since the last ``take``.

    One thread calls both.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wall = 0.0  # of the last tick, in Unix seconds
        self._uptime = 0.0  # of the last tick, in seconds since the boot
        self._longest = NO_GAP
        self._stop: threading.Event | None = None

    @property
    def running(self) -> bool:
        """Whether it measures."""
        return self._stop is not None

    def switch(self, *, on: bool) -> None:
        """Begin or stop measuring; no effect if it is already in that state."""
        if on and self._stop is None:
            self._start()
        elif not on and self._stop is not None:
            self._stop.set()
            self._stop = None

    def _start(self) -> None:
        self.take()  # the time before does not count
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="freeze", daemon=True)
        thread.start()
        self._stop = stop

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
    """The time for which this VM may have stood still since the last good answer."""

    longest: Gap
    unmeasured: float  # the longest time that neither the meter nor a poll measured, in seconds

    def believed(self, seconds: float | None) -> float | None:
        """Return the believed ``seconds`` of ``longest``; ``None`` if a longer gap may have gone
        unmeasured.
        """
        if seconds is None:
            return None
        is_short = seconds < UNMEASURED
        if is_short and self.unmeasured > UNMEASURED:
            return None
        return seconds


class PollGaps:
    """Collects how long this VM may have stood still since the last good answer.

    An answer is as old as its request, so the time of the request belongs to the next answer too.
    The lateness of a poll does not include the time in which its request is under way.
    """

    def __init__(self, meter: FreezeMeter) -> None:
        self._meter = meter
        self._metered = False  # the meter ran during the last poll
        self._longest = NO_GAP
        self._unmeasured = 0.0  # seconds, as in ``MeasuredGap``

    def add(self, late: Gap, busy: float) -> None:
        """Add a poll, whatever its result.

        ``late``: how late it began. ``busy``: the seconds from the previous request until the
        polling waited again.
        """
        if not self._metered:
            self._unmeasured = max(self._unmeasured, busy)
        self._metered = self._meter.running
        if not self._metered:
            self._longest = longer(self._longest, late)

    def take(self, asked: Instant, now: Instant) -> MeasuredGap:
        """Return the gap up to a good answer, and begin again with its request."""
        request_seconds = longest_between(asked, now)
        if self._metered:
            self._longest = longer(self._longest, self._meter.take())
        else:
            self._unmeasured = max(self._unmeasured, request_seconds)
        measured = MeasuredGap(self._longest, self._unmeasured)

        # a freeze during a long request may belong to an event that only the next answer shows
        if not self._metered or request_seconds <= UNMEASURED:
            self._longest = NO_GAP
        self._unmeasured = 0.0
        return measured


def longer(first: Gap, second: Gap) -> Gap:
    """Return the longer delay on each clock."""
    return Gap(max(first.wall, second.wall), max(first.uptime, second.uptime))


def longest_between(begin: Instant, end: Instant) -> float:
    """Return the seconds between two moments of one boot, on the clock that shows more of them."""
    uptime = end.uptime - begin.uptime
    wall = (end.wall - begin.wall).total_seconds()
    return max(uptime, wall)
