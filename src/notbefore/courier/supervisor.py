"""``Supervisor`` starts a courier when something is due, gives it deliveries, and kills it if it
hangs.

Only the main thread calls it. Only ``stop`` waits for the courier. A courier runs the package that
is installed now. If that is another version and its courier works, the agent ends in order, and its
service manager starts the new one.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

import notbefore
from notbefore import __version__
from notbefore.config.model import Config
from notbefore.config.secret import secrets_in
from notbefore.core.duration import back_off
from notbefore.core.outbox import SendResult
from notbefore.courier.courier_process import CourierProcess, environment
from notbefore.courier.orders import TURN_INTERVAL, Channel, Given, Hello, Orders, Turn, seal, wait
from notbefore.errors import ConfigError
from notbefore.metrics.totals import CourierFigures, increased
from notbefore.process.clock import Clock
from notbefore.store import SCHEMA_VERSION
from notbefore.store.lock import OwnerLock, inode_of
from notbefore.store.store import StoredOutbox

OVERDUE: Final = 15  # seconds; a courier that has sent nothing for so long counts as hanging
# seconds before something is due: the courier needs time to start, the disk to write
START_AHEAD: Final = 1.0
LINGER: Final = 10.0  # seconds without work after which a courier leaves
# for the attempts under way when it is to leave; the next courier sends the rest again
LEAVE_SECONDS: Final = 2.0
STOP_SECONDS: Final = 10.0  # to send what is due before the agent ends
LONGEST_PAUSE: Final = 60.0  # seconds between starts of couriers that end unexpectedly

log = logging.getLogger("notbefore.courier.supervisor")


def make_orders(config: Config) -> Orders:
    """Return the part of the configuration that a courier needs."""
    return Orders(
        sinks=config.sinks,
        messages=config.messages,
        hidden=tuple(one.variable for one in secrets_in(config).values() if one.variable),
        log_format=config.log.format,
        log_level=config.log.level,
        command=tuple(sys.argv[1:]),
        variables={
            name: value for name, value in os.environ.items() if name.startswith("NOTBEFORE_")
        },
    )


class MessageClock(Protocol):
    """The clock that the messages go by."""

    def now(self) -> datetime:
        """Return the present time."""


class Supervisor:
    """Starts, feeds and ends the courier. The main thread calls ``tick`` when the outbox has news.

    ``lock``: the lock on the state directory, which the courier inherits.
    """

    def __init__(
        self,
        orders: Orders,
        outbox: StoredOutbox,
        lock: OwnerLock | None = None,
        clock: MessageClock | None = None,
    ) -> None:
        self.figures = CourierFigures()
        self.trouble = ""  # why no courier works now, in words
        self.successor = ""  # the installed version, if it works and is to be started instead
        # the package on disk was replaced, and none of its couriers has worked yet
        self.replaced = False
        self._orders = orders
        self._outbox = outbox
        self._lock = lock
        self._clock = clock or Clock()
        self._courier: CourierProcess | None = None
        self._reason = "due"  # why the next courier is started
        self._failures = 0
        self._not_before = 0.0  # monotonic seconds: no courier is started before
        self._package = inode_of(notbefore.__file__)

    # ---- for the main loop

    @property
    def watched(self) -> tuple[Sequence[Channel], Sequence[Channel]]:
        """The channels to watch for reading, and for writing."""
        channels = [self._courier.channel] if self._courier is not None else []
        return channels, [one for one in channels if one.unsent]

    @property
    def patience(self) -> float:
        """Seconds until ``tick`` is needed at the latest."""
        if self._courier is not None:
            return TURN_INTERVAL
        due = 0.0 if self.replaced else self._outbox.next_due()
        return max(0.0, due - START_AHEAD, self._not_before - time.monotonic())

    def tick(self) -> None:
        """Give the courier what is due, or end it if it hangs or is to leave.

        Start one if something is due.
        """
        if (found := inode_of(notbefore.__file__)) != self._package:
            # a late import would be of another version: its courier tells whether it works
            self._package, self.replaced, self._not_before = found, True, 0.0
            self._let_go("upgrade")
        if self._courier is not None:
            self._attend(self._courier)
        if (
            self._courier is None
            and not self.successor
            and (self.replaced or self._outbox.next_due() <= START_AHEAD)
        ):
            self._start()

    def reconfigure(self, orders: Orders) -> None:
        """Use other orders from now on; a courier with the old ones leaves."""
        self._orders = orders
        if self._courier is not None:
            self._let_go("reload")

    def stop(self, interrupted: Callable[[float], bool]) -> None:
        """Give the courier time to send what is due, then end it.

        At once if ``interrupted(seconds)`` is true.
        """
        deadline = time.monotonic() + STOP_SECONDS
        while (
            (courier := self._courier) is not None
            and time.monotonic() < deadline
            and not interrupted(0.0)
        ):
            if self._outbox.next_due() > 0.0:
                courier.leave(deadline - time.monotonic())
            wait(TURN_INTERVAL / 4, courier.channel)
            self._attend(courier)
        if self._courier is not None:
            self._reap(self._courier)

    # ---- one courier

    def _start(self) -> None:
        if time.monotonic() < self._not_before:
            return
        try:
            frame = seal(self._orders, dict(os.environ))
            descriptor = self._lock.descriptor if self._lock is not None else None
            self._courier = CourierProcess(frame, environment(self._orders), descriptor)
        except (OSError, ConfigError) as error:
            self._pause(f"the courier cannot be started ({error})")
            return
        self.figures = CourierFigures(
            running=True, starts=increased(self.figures.starts, self._reason)
        )
        log.debug("courier %d started: %s", self._courier.pid, self._reason)
        self._reason = "due"

    def _let_go(self, reason: str) -> None:
        """Let the courier leave; ``reason``: why the next one is started."""
        self._reason = reason
        if self._courier is not None:
            self._courier.leave(LEAVE_SECONDS)

    def _attend(self, courier: CourierProcess) -> None:
        """Handle the frames of the courier, and its end."""
        reason = "crashed"
        try:
            self._talk(courier)
            if self._courier is None or courier.silent < OVERDUE:
                return
            log.error(
                "the courier has sent nothing for %d s: it is killed and replaced", courier.silent
            )
            reason = "hung"
        except ConnectionError:  # it has ended
            pass
        except msgspec.MsgspecError as error:
            log.error("the courier sent a wrong message (%s): it is killed and replaced", error)  # noqa: TRY400 - the text is enough
        code = self._reap(courier)
        if not courier.works:
            self._pause(f"the courier does not start (exit code {code})")
            return
        self._reason = reason
        if reason == "crashed":
            log.warning("the courier ended unexpectedly (exit code %d): another is started", code)
            self._pause()

    def _talk(self, courier: CourierProcess) -> None:
        results = list[SendResult]()
        for frame in courier.frames():
            if courier.works:
                turn = msgspec.msgpack.decode(frame, type=Turn)
                courier.limits = turn.limits
                results += turn.results
            elif not self._greet(courier, msgspec.msgpack.decode(frame, type=Hello)):
                return
        if results:
            self._failures = 0
        if given := self._outbox.exchange(results, {} if courier.leaves else courier.limits):
            courier.channel.send(Given(given, self._clock.now().timestamp()))
        courier.channel.flush()
        self._end_if_idle(courier)

    def _greet(self, courier: CourierProcess, hello: Hello) -> bool:
        """Return whether the courier is of this version and works.

        If another version works, the agent is to end.
        """
        if hello == Hello(__version__, SCHEMA_VERSION):
            # if it leaves, the package was perhaps replaced again while it started: the next one
            # tells
            courier.works, self.replaced, self.trouble = True, self.replaced and courier.leaves, ""
            return True
        self._reap(courier)
        problem = hello.problem
        if hello.schema < SCHEMA_VERSION:
            problem = f"it cannot read what {__version__} has written"
        if problem:
            self._pause(
                f"notbefore {__version__} has a courier of {hello.version}, which cannot work:"
                f" {problem}"
            )
        elif (
            not courier.leaves
        ):  # else the package was replaced again while this courier started: the next one tells
            self.successor, self.trouble = (
                hello.version,
                f"notbefore {hello.version} is installed: {__version__} ends",
            )
            log.warning(
                "notbefore %s is installed, and works: this one (%s) ends for it",
                hello.version,
                __version__,
            )
        return False

    def _end_if_idle(self, courier: CourierProcess) -> None:
        """End a courier that had nothing to do for long, or that leaves: after the attempts under
        way, or its time.

        It leaves if a sink hangs. What may run only once is always waited for.
        """
        now, under_way = time.monotonic(), self._outbox.under_way()
        if under_way or not courier.works:
            courier.last_busy = now
        if any(row.once for row in under_way):
            return
        if 0 in courier.limits.values():
            self._let_go("hung")
        patience = LINGER if not courier.leaves else 0.0
        if now - courier.last_busy > patience or now >= courier.leave_at:
            self._reap(courier)

    def _reap(self, courier: CourierProcess) -> int:
        code = courier.end()
        self._courier, self.figures = None, replace(self.figures, running=False)
        self._outbox.courier_ended()
        return code

    def _pause(self, why: str = "") -> None:
        """Start the next courier at once after the first failure, later after growing pauses.

        ``why``: in words.
        """
        if why:
            replaced = (
                f"the package of this agent ({__version__}) was replaced or removed: "
                if self.replaced
                else ""
            )
            self.trouble = f"{replaced}{why}: notifications wait"
            log.error("%s", self.trouble)
        pause = back_off(self._failures, 1.0, LONGEST_PAUSE) if self._failures else 0.0
        self._failures += 1
        self._not_before = time.monotonic() + pause
