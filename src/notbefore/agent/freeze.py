"""``FreezeMeter`` measures how long this VM was frozen: a thread wakes ten times a second and
measures how late it is.

It runs only from shortly before an event that may affect this VM can start until the event is over.
At other times the lateness of each poll is measured. It is separate from the polling, because IMDS
answers slowly or not at all while something happens, and a slow answer is no interruption.
"""

import threading
from typing import Final

from notbefore.core.clock import Gap
from notbefore.process.clock import Clock

TICK: Final = 0.1  # seconds; also the precision of a measured interruption


class FreezeMeter:
    """Call ``switch`` to start it, then ``take`` for the longest gap since the last ``take``.

    Both from one thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wall = self._uptime = 0.0  # the last tick
        self._longest = Gap(0.0, 0.0)
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
            longest, self._longest = self._longest, Gap(0.0, 0.0)
            return longest

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(TICK):
            with self._lock:
                self._tick()

    def _tick(self) -> None:
        wall, uptime = self._clock.time(), self._clock.boot_time()
        gap, longest = Gap(wall - self._wall - TICK, uptime - self._uptime - TICK), self._longest
        self._longest = Gap(max(longest.wall, gap.wall), max(longest.uptime, gap.uptime))
        self._wall, self._uptime = wall, uptime
