"""``CourierManager`` starts a courier when something is due, wakes it, and ends it when it hangs.

Only the main thread calls it, except for ``wake``. Nothing here waits for the courier, except for ``stop``.
"""

import logging
import os
import select
from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from notbefore.config.model import Config
from notbefore.courier.courier_process import CourierProcess, start_courier
from notbefore.courier.orders import (
    DONE,
    HUNG,
    IN_AGENT,
    LEAVE,
    LOST_STATE,
    OTHER_VERSION,
    SIGN_INTERVAL,
    STOP,
    STOP_SECONDS,
    WAKE,
    Orders,
    seal,
)
from notbefore.courier.package import RunningPackage
from notbefore.errors import ConfigError
from notbefore.metrics.process import CourierFigures
from notbefore.metrics.totals import increased
from notbefore.process.clock import Clock
from notbefore.store.state import Store

MISSED_SIGNS: Final = 15  # seconds without a sign of life after which the whole courier counts as hanging
LONGEST_PAUSE: Final = 60.0  # seconds between starts of couriers that end unexpectedly
LONG_LIFE: Final = 30.0  # seconds after which an unexpected end is not counted with those before it

log = logging.getLogger("notbefore.courier.supervisor")


def make_orders(config: Config, store: Store) -> Orders:
    """Make what a courier has to know of the configuration, and of where its outbox is."""
    return Orders(
        state_file=str(store.path.absolute()),
        spare_file=str(store.spare_path),
        sinks=config.sinks,
        messages=config.messages,
        peers=config.peers,
        hidden=config.hidden,
        log_format=config.log.format,
        log_level=config.log.level,
    )


def check(orders: Orders) -> None:
    """Raise ``ConfigError`` where a courier could not be given these orders."""
    seal(orders, dict(os.environ))


class CourierManager:
    """``next_due`` gives the Unix time of the next delivery; ``wake_main`` has the main thread call ``tick`` soon.

    ``store`` holds the outbox where no file can. Raises ``ConfigError`` for orders that cannot be given to a courier.
    """

    def __init__(
        self,
        orders: Orders,
        store: Store,
        clock: Clock,
        next_due: Callable[[], float | None],
        wake_main: Callable[[], None],
    ) -> None:
        check(orders)
        self.package = RunningPackage()
        self.figures = CourierFigures()
        self._orders = orders
        self._store = store
        self._clock = clock
        self._read_next_due = next_due
        self._wake_main = wake_main
        self._courier: CourierProcess | None = None
        self._woken = False
        self._wanted = False  # there will be something to deliver at once
        self._reason = "due"  # why the next one is started
        self._failures = 0
        self._lost_state = False  # the last one has ended since it could not use the outbox
        self._not_before = 0.0  # monotonic seconds: no start before
        self._next_due: float | None = None

    def wake(self) -> None:
        """There is something to deliver. From any thread; never waits."""
        self._woken = True
        self._wake_main()

    def prepare(self) -> None:
        """There will be something to deliver at once, and a courier takes its time to start. From any thread."""
        self._wanted = True
        self._wake_main()

    @property
    def descriptors(self) -> list[Any]:
        """What to watch for reading."""
        return self._courier.descriptors if self._courier is not None else []

    @property
    def patience(self) -> float:
        """Seconds after which ``tick`` is needed at the latest."""
        if self._courier is not None:
            return SIGN_INTERVAL
        if self._next_due is None:
            return LONGEST_PAUSE
        return max(0.0, self._next_due - self._clock.time(), self._not_before - self._clock.monotonic())

    def tick(self) -> None:
        """Take in the courier's signs of life, end it if there are none; start one when something is due."""
        woken, self._woken = self._woken, False
        wanted, self._wanted = self._wanted, False
        if self.package.look() and self._courier is not None:
            self._reason = "upgrade"
            self._courier.send(LEAVE)  # what it imports from now on would be of another version than itself
        if self._courier is not None:
            self._check(self._courier)
        if self._courier is not None:
            self._serve(self._courier)
            if woken:
                self._courier.send(WAKE)
        elif wanted:
            self._start()
        self._next_due = self._read_next_due()  # last: a disk that hangs is waited for
        if self._courier is None and self._next_due is not None and self._next_due <= self._clock.time():
            self._start()

    @property
    def in_trouble(self) -> bool:
        """The courier cannot use the outbox."""
        return self._lost_state or (self._courier is not None and self._courier.in_trouble)

    def reconfigure(self, orders: Orders) -> None:
        """Use other orders from now on; a courier with the old ones leaves."""
        self._orders = orders
        if self._courier is not None:
            self._reason = "reload"
            self._courier.send(LEAVE)

    def stop(self, interrupted: Callable[[float], bool]) -> None:
        """Give it time to send what is due, then end it; at once when ``interrupted(seconds)`` says so."""
        courier = self._courier
        if courier is None:
            return
        courier.send(STOP)
        deadline = self._clock.monotonic() + STOP_SECONDS + SIGN_INTERVAL
        while not courier.has_ended() and self._clock.monotonic() < deadline:
            if interrupted(0.0):
                break
            self._serve(courier)
            select.select(courier.descriptors, [], [], SIGN_INTERVAL)
        self._reap(courier)

    # ---- one courier

    def _serve(self, courier: CourierProcess) -> None:
        """Answer a courier that asks for the outbox in this process; it is notified when that begins."""
        in_memory = self._store.in_memory
        if in_memory and not courier.in_agent:
            courier.send(IN_AGENT + WAKE)
        courier.in_agent = in_memory
        courier.serve(self._store.serve)

    def _start(self) -> None:
        if self._clock.monotonic() < self._not_before:
            return
        try:
            if self.package.look():
                self._reason = "upgrade"
            self._courier = start_courier(self._orders, self.package.copy, in_agent=self._store.in_memory)
        except (OSError, ConfigError) as error:
            log.error("the courier cannot be started (%s): deliveries wait", error)  # noqa: TRY400 - its text says all
            self._pause()
            return
        self.figures = CourierFigures(running=True, starts=increased(self.figures.starts, self._reason))
        log.debug("courier %d started: %s", self._courier.pid, self._reason)
        self._reason = "due"

    def _check(self, courier: CourierProcess) -> None:
        if courier.missed >= MISSED_SIGNS:
            log.error("the courier has shown no sign of life for %d s: it is killed and replaced", courier.missed)
            self._reap(courier)
            self._ended(courier, HUNG)
        elif courier.has_ended():
            self._ended(courier, self._reap(courier))

    def _reap(self, courier: CourierProcess) -> int:
        code = courier.reap()
        self._courier, self.figures = None, replace(self.figures, running=False)
        return code

    def _ended(self, courier: CourierProcess, code: int) -> None:
        self._lost_state = code == LOST_STATE
        if code in (DONE, HUNG) or self._clock.monotonic() - courier.started > LONG_LIFE:
            self._failures = 0
        if code == HUNG:
            self._reason = "hung"
        elif code == OTHER_VERSION:
            self._reason = "upgrade"
            log.warning("the courier on disk is of another version than this agent: restart the agent")
            self._pause()
        elif code != DONE:
            self._reason = "crashed"
            log.warning("the courier ended unexpectedly (exit code %d): another is started", code)
            self._pause()

    def _pause(self) -> None:
        """The first one that ends unexpectedly is replaced at once, later ones after pauses that grow."""
        pause = 0.0 if self._failures == 0 else min(2.0 ** min(self._failures - 1, 10), LONGEST_PAUSE)
        self._failures += 1
        self._not_before = self._clock.monotonic() + pause
