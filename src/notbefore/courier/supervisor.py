"""``Supervisor`` starts a courier when something is due, gives it deliveries, and kills it if it
hangs.

Only the main thread calls it. Only ``stop`` waits for a courier. There is one courier, except after
a reload: a courier that still runs a command keeps it, and another one sends everything else.

A courier runs the package that is installed now. If that is another version and its
``check-config`` accepts the configuration, the agent ends in order, and its service manager starts
the new one.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from notbefore import __version__
from notbefore.config.model import Config
from notbefore.config.otel import resolved
from notbefore.config.secret import secrets_in
from notbefore.config.sinks import SinkConfig, templates_of
from notbefore.core.delivery import Delivery
from notbefore.core.duration import back_off
from notbefore.core.outbox import SendResult
from notbefore.courier.courier_process import CourierProcess, environment
from notbefore.courier.frames import FrameSocket
from notbefore.courier.orders import REPORT_INTERVAL, CourierReport, Hello, Orders, seal
from notbefore.courier.upgrade import UpgradeCheck, package_on_disk
from notbefore.errors import ConfigError
from notbefore.metrics.totals import CourierFigures, increased
from notbefore.process.clock import Clock
from notbefore.process.main_thread import wait_for
from notbefore.store import SCHEMA_VERSION
from notbefore.store.lock import OwnerLock
from notbefore.store.stored_outbox import StoredOutbox

OVERDUE: Final = 15  # seconds; a courier that has sent nothing for so long counts as hanging
# seconds before something is due: the courier needs time to start, the disk to write
START_AHEAD: Final = 1.0
CRASHES_IN_A_ROW: Final = 2  # without a result, after which sinks take turns
LINGER: Final = 10.0  # seconds without work after which a courier is ended
# for the attempts under way when it is to leave; the next courier sends the rest again
LEAVE_SECONDS: Final = 2.0
MOST_COURIERS: Final = 3  # at a time: each takes tens of MiB
STOP_SECONDS: Final = 10.0  # to send what is due before the agent ends
# seconds between the starts of couriers that end unexpectedly
FIRST_START_PAUSE: Final = 1.0
LONGEST_START_PAUSE: Final = 60.0

log = logging.getLogger("notbefore.courier.supervisor")


def make_orders(config: Config) -> Orders:
    """Return the part of the configuration that a courier needs."""
    sinks = {name: _resolved(sink, config) for name, sink in config.sinks.items()}
    secrets = secrets_in(config).values()
    return Orders(
        sinks=sinks,
        messages=config.messages,
        hidden=tuple(secret.variable for secret in secrets if secret.variable),
        log_format=config.log.format,
        log_level=config.log.level,
    )


def _template_counts(orders: Orders, counts: Mapping[str, int]) -> dict[str, int]:
    """Return the failures by sink: those so far, and 0 for each other sink with templates."""
    zeros = {name: 0 for name, sink in orders.sinks.items() if templates_of(sink, orders.messages)}
    return zeros | dict(counts)


def _sending_to(sinks: Sequence[str]) -> str:
    """Name the sinks that a courier was sending to. One of them may have ended it."""
    if not sinks:
        return ""
    return f" while sending to {', '.join(sinks)}"


def _resolved(sink: SinkConfig, config: Config) -> SinkConfig:
    """Return a sink with what the section ``otlp`` and the standard variables add to it."""
    if sink.otlp_logs is None:
        return sink
    settings = resolved(sink.otlp_logs, "logs", os.environ)
    if config.otlp is not None:
        settings = replace(settings, resource={**config.otlp.resource, **settings.resource})
    return replace(sink, otlp_logs=settings)


class MessageClock(Protocol):
    """The clock that the messages go by."""

    def now(self) -> datetime:
        """Return the present time."""


class Supervisor:
    """Starts, feeds and ends couriers. The main thread calls ``tick`` when the outbox has news.

    ``lock``: the lock on the state directory, which a courier inherits. ``check_arguments``: for
    ``notbefore check-config``, which examines the configuration that this process was started with.
    """

    def __init__(
        self,
        orders: Orders,
        outbox: StoredOutbox,
        lock: OwnerLock | None = None,
        clock: MessageClock | None = None,
        check_arguments: Sequence[str] = (),
    ) -> None:
        self.figures = CourierFigures(template_failures=_template_counts(orders, {}))
        self.trouble = ""  # why no courier works now, in words
        self.successor = ""  # the installed version, if it works and is to be started instead
        # the package on disk was replaced, and none of its couriers has worked yet
        self.replaced = False
        self._orders = orders
        self._outbox = outbox
        self._lock = lock
        self._clock = clock or Clock()
        self._courier: CourierProcess | None = None  # it gets deliveries
        self._leaving: list[CourierProcess] = []  # these get none, and end after their attempts
        self._reason = "due"  # why the next courier is started
        self._failures = 0
        self._not_before = 0.0  # monotonic seconds: no courier is started before
        self._package = package_on_disk()
        self._check_arguments = check_arguments
        self._check: UpgradeCheck | None = None  # while one runs
        self._checked_version = ""  # of the package that it examines

    # ---- for the main loop

    @property
    def watched(self) -> tuple[Sequence[FrameSocket], Sequence[FrameSocket]]:
        """The sockets to watch for reading, and for writing."""
        sockets = [courier.frames for courier in self._couriers()]
        return sockets, [socket for socket in sockets if socket.unsent]

    @property
    def patience(self) -> float:
        """Seconds until ``tick`` is needed at the latest."""
        if self._couriers() or self._check is not None:
            return REPORT_INTERVAL
        due = self._outbox.next_due()
        if self.replaced:
            due = 0.0  # the next courier says which version is installed
        return max(0.0, due - START_AHEAD, self._not_before - time.monotonic())

    def tick(self) -> None:
        """Exchange frames with the couriers, end those that hang or leave, and start one if
        something is due.
        """
        self._notice_another_package()
        for courier in self._couriers():
            self._attend(courier)
        if self._check is not None:
            self._attend_check(self._check)
        if self._may_start():
            self._start()

    def reconfigure(self, orders: Orders) -> None:
        """Use other orders from now on; a courier with the old ones leaves."""
        self._orders = orders
        counts = _template_counts(orders, self.figures.template_failures)
        self.figures = replace(self.figures, template_failures=counts)
        if self._courier is not None:
            self._let_go("reload")

    def stop(self, interrupted: Callable[[float], bool]) -> None:
        """Give the couriers time to send what is due, then end them.

        They end at once if ``interrupted(seconds)`` is true.
        """
        self._end_check()
        deadline = time.monotonic() + STOP_SECONDS
        while self._couriers() and time.monotonic() < deadline and not interrupted(0.0):
            if self._outbox.next_due() > 0.0:
                for courier in self._couriers():
                    courier.leave(deadline - time.monotonic())
            readable, writable = self.watched
            wait_for(REPORT_INTERVAL / 4, readable, writable)
            for courier in self._couriers():
                self._attend(courier)

        for courier in self._couriers():
            self._reap(courier)

    # ---- the couriers

    def _couriers(self) -> list[CourierProcess]:
        if self._courier is None:
            return list(self._leaving)
        return [*self._leaving, self._courier]

    def _may_start(self) -> bool:
        """Whether a courier is needed, and may be started now."""
        if self._courier is not None or self._check is not None or self.successor:
            return False
        if time.monotonic() < self._not_before or len(self._leaving) >= MOST_COURIERS:
            return False
        if self.replaced:
            # a courier of another version makes the agent end, which would kill running commands
            return not self._leaving
        return self._outbox.next_due() <= START_AHEAD

    def _start(self) -> None:
        try:
            frame = seal(self._orders, dict(os.environ))
            descriptor = None
            if self._lock is not None:
                descriptor = self._lock.descriptor
            self._courier = CourierProcess(frame, environment(self._orders), descriptor)
        except (OSError, ConfigError) as error:
            self._pause(f"the courier cannot be started ({error})")
            return
        starts = increased(self.figures.starts, self._reason)
        self.figures = replace(self.figures, running=True, starts=starts)
        log.debug("courier %d started: %s", self._courier.pid, self._reason)
        self._reason = "due"

    def _let_go(self, reason: str) -> None:
        """Let the courier leave; ``reason``: why the next one is started."""
        self._reason = reason
        if self._courier is not None:
            self._courier.leave(LEAVE_SECONDS)
            self._leaving.append(self._courier)
            self._courier = None

    def _attend(self, courier: CourierProcess) -> None:
        """Handle the frames of a courier, and its end."""
        reason = "crashed"
        try:
            self._talk(courier)
            if courier not in self._couriers() or courier.silent < OVERDUE:
                return
            log.error(
                "the courier has sent nothing for %d s: it is killed and replaced", courier.silent
            )
            reason = "hung"
        except ConnectionError:  # it has ended
            pass
        except msgspec.MsgspecError as error:
            text = "the courier sent a wrong message (%s): it is killed and replaced"
            log.error(text, error)  # noqa: TRY400 - the text is enough

        code = self._reap(courier)
        if not courier.works:
            self._pause(f"the courier does not start (exit code {code})")
            return
        if self._courier is None:
            self._reason = reason
        if reason == "crashed":
            log.warning(
                "the courier ended unexpectedly (exit code %d)%s: another is started",
                code,
                _sending_to(courier.held_sinks),
            )
            self._pause()

    def _talk(self, courier: CourierProcess) -> None:
        """Read the frames of a courier, and give it what is due."""
        results = list[SendResult]()
        for frame in courier.received():
            if courier.works:
                report = msgspec.msgpack.decode(frame, type=CourierReport)
                courier.limits = report.limits
                courier.hangs = report.hangs
                self._count_template_failures(courier, report.template_failures)
                results += report.results
            else:
                self._greet(courier, msgspec.msgpack.decode(frame, type=Hello))
                if not courier.works:
                    return

        if results:
            self._failures = 0
        courier.note(results)
        if courier.hangs and courier is self._courier:
            self._let_go("hung")
        deliveries = self._exchange(courier, results)
        if deliveries:
            courier.give(deliveries, self._clock.now().timestamp())
        if courier.leaves and results:
            self._outbox.redirect()  # its sinks may be removed by now
        courier.frames.flush()
        self._end_if_idle(courier)

    def _exchange(
        self, courier: CourierProcess, results: Sequence[SendResult]
    ) -> Sequence[Delivery]:
        """Record results, and return what is due for a courier.

        If couriers crash in a row without a result, one of the sinks ends them, and it is not known
        which. Then the sinks get their deliveries one at a time, in turn, so that this sink does
        not keep the others from sending.
        """
        if courier.leaves:
            return self._outbox.exchange(results, {})
        if self._failures < CRASHES_IN_A_ROW:
            return self._outbox.exchange(results, courier.limits)

        names = list(courier.limits)
        first = self.figures.starts.get("crashed", 0) % max(1, len(names))
        for name in [*names[first:], *names[:first]]:
            if not courier.held:
                deliveries = self._outbox.exchange((), {name: min(1, courier.limits[name])})
                if deliveries:
                    return deliveries
        return ()

    def _count_template_failures(
        self, courier: CourierProcess, failures: Mapping[str, int]
    ) -> None:
        """Count the failures since the last report of this courier."""
        counts = dict(self.figures.template_failures)
        for sink, count in failures.items():
            new = count - courier.template_failures.get(sink, 0)
            if new:
                counts[sink] = counts.get(sink, 0) + new
        courier.template_failures = failures
        if counts != self.figures.template_failures:
            self.figures = replace(self.figures, template_failures=counts)

    def _end_if_idle(self, courier: CourierProcess) -> None:
        """End a courier that had nothing to do for long.

        A courier that leaves is ended after its attempts, or its time. A delivery that may be
        attempted only once has all the time that it needs.
        """
        now = time.monotonic()
        if courier.held or not courier.works:
            courier.last_busy = now
        if courier.holds_once:
            return
        patience = LINGER
        if courier.leaves:
            patience = 0.0
        if now - courier.last_busy > patience or now >= courier.leave_at:
            self._reap(courier)

    def _reap(self, courier: CourierProcess) -> int:
        """End a courier; what it had is due again. Return its exit code."""
        code = courier.end()
        if courier is self._courier:
            self._courier = None
        else:
            self._leaving.remove(courier)
        self.figures = replace(self.figures, running=bool(self._couriers()))
        self._outbox.courier_ended(courier.held)
        return code

    def _pause(self, trouble: str = "") -> None:
        """Start the next courier at once after the first failure, later after growing pauses.

        ``trouble``: why none works now, in words.
        """
        if trouble:
            if self.replaced:
                package = f"the package of this agent ({__version__}) was replaced or removed"
                trouble = f"{package}: {trouble}"
            self.trouble = f"{trouble}: notifications wait"
            log.error("%s", self.trouble)
        pause = 0.0
        if self._failures:
            pause = back_off(self._failures, FIRST_START_PAUSE, LONGEST_START_PAUSE)
        self._failures += 1
        self._not_before = time.monotonic() + pause

    # ---- another version is installed

    def _notice_another_package(self) -> None:
        package = package_on_disk()
        if package == self._package:
            return
        self._package = package
        self.replaced = True
        self._not_before = 0.0
        self._end_check()
        # its late imports would be of another version; the next courier says which one
        self._let_go("upgrade")

    def _greet(self, courier: CourierProcess, hello: Hello) -> None:
        """Let a courier of this version work. If it is of another version, check that one."""
        # the package was perhaps replaced again while it started: the next courier says so
        is_outdated = courier.leaves
        if hello == Hello(__version__, SCHEMA_VERSION):
            courier.works = True
            self.replaced = self.replaced and is_outdated
            self.trouble = ""
            return

        self._reap(courier)
        if hello.schema < SCHEMA_VERSION:
            self._refuse(hello.version, f"it cannot read what {__version__} has written")
        elif not is_outdated:
            self._checked_version = hello.version
            try:
                self._check = UpgradeCheck(self._check_arguments)
            except OSError as error:
                self._refuse(hello.version, f"its command does not start ({error})")

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
