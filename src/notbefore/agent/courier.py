"""``CourierManager`` starts a courier when something is due, wakes it, and ends it when it hangs.

Only the agent's main thread calls it, but for ``wake``. Nothing here waits: the agent lives on whatever becomes of the
courier.
"""

import logging
import os
import select
import time
from collections.abc import Callable
from typing import Any, Final

from notbefore.agent.courier_process import CourierProcess, start
from notbefore.delivery.orders import BEAT, DONE, HUNG, LEAVE, STOP, STOP_SECONDS, WAKE, Orders, seal
from notbefore.errors import ConfigError
from notbefore.metrics.process import Figures

MISSED_BEATS: Final = 15  # ticks of at least a second without a sign of life: it hangs as a whole
LONGEST_PAUSE: Final = 60.0  # seconds between starts of couriers that die
LONG_LIFE: Final = 30.0  # seconds after which a courier that dies was a good one

log = logging.getLogger("notbefore.agent.courier")


def check(orders: Orders) -> None:
    """Raise ``ConfigError`` where a courier could not be told these orders."""
    seal(orders, dict(os.environ))


class CourierManager:
    """``look`` says when the next delivery is due, in Unix seconds; ``poke`` makes the agent call ``tick`` soon."""

    def __init__(
        self,
        orders: Orders,
        figures: Figures,
        look: Callable[[], float | None],
        poke: Callable[[], None],
    ) -> None:
        check(orders)
        self._orders = orders
        self._figures = figures
        self._look = look
        self._poke = poke
        self._child: CourierProcess | None = None
        self._woken = False
        self._reason = "due"  # why the next one is started
        self._failures = 0
        self._not_before = 0.0  # monotonic seconds: no start before
        self._next_due: float | None = None

    def wake(self) -> None:
        """There is something to deliver. From any thread; never waits."""
        self._woken = True
        self._poke()

    @property
    def descriptors(self) -> list[Any]:
        """What to watch for reading."""
        return [self._child.beats] if self._child is not None else []

    @property
    def patience(self) -> float:
        """Seconds until ``tick`` is needed at the latest."""
        if self._child is not None:
            return BEAT
        if self._next_due is None:
            return LONGEST_PAUSE
        return max(0.0, self._next_due - time.time(), self._not_before - time.monotonic())

    def tick(self) -> None:
        """Take the courier's signs of life, end it without any; start one when something is due."""
        woken, self._woken = self._woken, False
        if self._child is not None:
            self._watch(self._child)
        if self._child is not None:
            if woken:
                self._child.say(WAKE)
            return
        self._next_due = self._look()
        due = self._next_due is not None and self._next_due <= time.time()
        if due and time.monotonic() >= self._not_before:
            self._start()

    def reconfigure(self, orders: Orders) -> None:
        """From now on with other orders; a courier with the old ones leaves."""
        self._orders = orders
        if self._child is not None:
            self._reason = "reload"
            self._child.say(LEAVE)

    def restart(self) -> None:
        """The state is another file now: the courier works on the old one."""
        if self._child is not None:
            self._child.say(LEAVE)

    def stop(self, interrupted: Callable[[float], bool]) -> None:
        """Give it time to send what is due, then end it; at once when ``interrupted(seconds)`` says so."""
        if self._child is None:
            return
        self._child.say(STOP)
        deadline = time.monotonic() + STOP_SECONDS + BEAT
        while not self._child.gone() and time.monotonic() < deadline:
            if interrupted(0.0):
                break
            select.select([self._child.beats], [], [], BEAT)
        self._child.reap()
        self._child, self._figures.courier_running = None, False

    # ---- one courier

    def _start(self) -> None:
        try:
            self._child = start(self._orders)
        except (OSError, ConfigError) as error:
            log.error("the courier cannot be started (%s): deliveries wait", error)  # noqa: TRY400 - its text says all
            self._pause()
            return
        self._figures.courier_starts[self._reason] += 1
        self._figures.courier_running = True
        log.debug("courier %d started: %s", self._child.pid, self._reason)
        self._reason = "due"

    def _watch(self, child: CourierProcess) -> None:
        if child.missed >= MISSED_BEATS:
            log.error("the courier shows no sign of life: killed, and started anew")
            child.kill()
            self._ended(child, HUNG)
        elif child.gone():
            self._ended(child, None)

    def _ended(self, child: CourierProcess, known: int | None) -> None:
        code = child.reap()
        code = code if known is None else known
        self._child, self._figures.courier_running = None, False
        if time.monotonic() - child.started > LONG_LIFE:
            self._failures = 0
        if code == DONE:
            self._failures = 0
        elif code == HUNG:
            self._reason = "hung"
            self._failures = 0
        else:
            self._reason = "crashed"
            log.warning("the courier ended unexpectedly (%d)", code)
            self._pause()

    def _pause(self) -> None:
        """The first that dies is replaced at once; later ones after pauses that grow."""
        pause = 0.0 if self._failures == 0 else min(2.0 ** min(self._failures - 1, 10), LONGEST_PAUSE)
        self._failures += 1
        self._not_before = time.monotonic() + pause
