"""``Supervisor`` starts a courier when something is due, gives it deliveries, and kills it if it
hangs.

Only the main thread calls it. Only ``stop`` waits for the courier. A courier runs the package that
is installed now. If that is another version and its ``check-config`` accepts the configuration, the
agent ends in order, and its service manager starts the new one.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

import notbefore
from notbefore import __version__
from notbefore.config.model import Config
from notbefore.config.otel import resolved
from notbefore.config.secret import secrets_in
from notbefore.config.sinks import SinkConfig
from notbefore.core.duration import back_off
from notbefore.core.outbox import SendResult
from notbefore.courier.courier_process import CourierProcess, environment
from notbefore.courier.orders import TURN_INTERVAL, Channel, Given, Hello, Orders, Turn, seal, wait
from notbefore.courier.upgrade import UpgradeCheck
from notbefore.errors import ConfigError
from notbefore.metrics.totals import CourierFigures, increased
from notbefore.process.clock import Clock
from notbefore.store import SCHEMA_VERSION
from notbefore.store.lock import OwnerLock
from notbefore.store.stored_outbox import StoredOutbox

OVERDUE: Final = 15  # seconds; a courier that has sent nothing for so long counts as hanging
# seconds before something is due: the courier needs time to start, the disk to write
START_AHEAD: Final = 1.0
LINGER: Final = 10.0  # seconds without work after which a courier leaves
# for the attempts under way when it is to leave; the next courier sends the rest again
LEAVE_SECONDS: Final = 2.0
STOP_SECONDS: Final = 10.0  # to send what is due before the agent ends
# seconds between the starts of couriers that end unexpectedly
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0

log = logging.getLogger("notbefore.courier.supervisor")


def make_orders(config: Config) -> Orders:
    """Return the part of the configuration that a courier needs."""
    sinks = {name: _resolved(sink, config) for name, sink in config.sinks.items()}
    return Orders(
        sinks=sinks,
        messages=config.messages,
        hidden=tuple(one.variable for one in secrets_in(config).values() if one.variable),
        log_format=config.log.format,
        log_level=config.log.level,
    )


def _resolved(sink: SinkConfig, config: Config) -> SinkConfig:
    """Return a sink with what the section ``otlp`` and the standard variables add to it."""
    if sink.otlp_logs is None:
        return sink
    settings = resolved(sink.otlp_logs, "logs", os.environ)
    if config.otlp is not None:
        settings = replace(settings, resource={**config.otlp.resource, **settings.resource})
    return replace(sink, otlp_logs=settings)


def _package_on_disk() -> tuple[int, ...]:
    """Return values that differ when another package is installed; none if there is no package.

    A new file may have the inode of the one that it replaces, but not also its time of change.
    """
    try:
        status = Path(notbefore.__file__).stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_ctime_ns


class MessageClock(Protocol):
    """The clock that the messages go by."""

    def now(self) -> datetime:
        """Return the present time."""


class Supervisor:
    """Starts, feeds and ends the courier. The main thread calls ``tick`` when the outbox has news.

    ``lock``: the lock on the state directory, which the courier inherits. ``check_arguments``: for
    ``notbefore check-config``, which examines what this process was started with.
    """

    def __init__(
        self,
        orders: Orders,
        outbox: StoredOutbox,
        lock: OwnerLock | None = None,
        clock: MessageClock | None = None,
        check_arguments: Sequence[str] = (),
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
        self._package = _package_on_disk()
        self._check_arguments = check_arguments
        self._check: UpgradeCheck | None = None  # while one runs
        self._checked_version = ""  # of the package that it examines

    # ---- for the main loop

    @property
    def watched(self) -> tuple[Sequence[Channel], Sequence[Channel]]:
        """The channels to watch for reading, and for writing."""
        channels = [self._courier.channel] if self._courier is not None else []
        return channels, [one for one in channels if one.unsent]

    @property
    def patience(self) -> float:
        """Seconds until ``tick`` is needed at the latest."""
        if self._courier is not None or self._check is not None:
            return TURN_INTERVAL
        due = 0.0 if self.replaced else self._outbox.next_due()
        return max(0.0, due - START_AHEAD, self._not_before - time.monotonic())

    def tick(self) -> None:
        """Give the courier what is due, or end it if it hangs or is to leave.

        Start one if something is due.
        """
        package = _package_on_disk()
        if package != self._package:
            # a late import would be of another version: its courier tells which one it is
            self._package = package
            self.replaced = True
            self._not_before = 0.0
            self._end_check()
            self._let_go("upgrade")
        if self._courier is not None:
            self._attend(self._courier)
        if self._check is not None:
            self._attend_check(self._check)
        if self._courier is not None or self._check is not None or self.successor:
            return
        if self.replaced or self._outbox.next_due() <= START_AHEAD:
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
        self._end_check()
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
                courier.hangs = turn.hangs
                results += turn.results
            elif not self._greet(courier, msgspec.msgpack.decode(frame, type=Hello)):
                return
        if results:
            self._failures = 0
        if courier.hangs and not self._is_running_once():
            self._let_go("hung")
        if given := self._outbox.exchange(results, {} if courier.leaves else courier.limits):
            courier.channel.send(Given(given, self._clock.now().timestamp()))
        courier.channel.flush()
        self._end_if_idle(courier)

    def _greet(self, courier: CourierProcess, hello: Hello) -> bool:
        """Return whether the courier is of this version. If it is of another one, check that."""
        if hello == Hello(__version__, SCHEMA_VERSION):
            courier.works = True
            # if it leaves, the package was perhaps replaced again while it started: the next one
            # tells
            self.replaced = self.replaced and courier.leaves
            self.trouble = ""
            return True

        was_replaced_again = courier.leaves  # then the next courier tells
        self._reap(courier)
        if hello.schema < SCHEMA_VERSION:
            self._refuse(hello.version, f"it cannot read what {__version__} has written")
        elif not was_replaced_again:
            self._checked_version = hello.version
            try:
                self._check = UpgradeCheck(self._check_arguments)
            except OSError as error:
                self._refuse(hello.version, f"its command does not start ({error})")
        return False

    # ---- another version is installed

    def _attend_check(self, check: UpgradeCheck) -> None:
        """End the agent for the installed version if its check has succeeded."""
        if not check.is_done:
            return
        version = self._checked_version
        problem = check.problem
        self._end_check()
        if problem:
            self._refuse(version, problem)
            return
        self.successor = version
        self.trouble = f"notbefore {version} is installed: {__version__} ends"
        log.warning(
            "notbefore %s is installed, and works: this one (%s) ends for it", version, __version__
        )

    def _refuse(self, version: str, problem: str) -> None:
        self._pause(
            f"notbefore {version} is installed, which cannot replace {__version__}: {problem}"
        )

    def _end_check(self) -> None:
        if self._check is not None:
            self._check.end()
            self._check = None

    def _end_if_idle(self, courier: CourierProcess) -> None:
        """End a courier that had nothing to do for long, or that leaves: after the attempts under
        way, or its time.

        What may run only once is always waited for.
        """
        now = time.monotonic()
        if self._outbox.under_way() or not courier.works:
            courier.last_busy = now
        if self._is_running_once():
            return
        patience = LINGER if not courier.leaves else 0.0
        if now - courier.last_busy > patience or now >= courier.leave_at:
            self._reap(courier)

    def _is_running_once(self) -> bool:
        """Whether the courier has a delivery that may be attempted only once."""
        return any(row.once for row in self._outbox.under_way())

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
        pause = back_off(self._failures, FIRST_PAUSE, LONGEST_PAUSE) if self._failures else 0.0
        self._failures += 1
        self._not_before = time.monotonic() + pause
