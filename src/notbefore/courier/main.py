"""``Courier``: leases what is due from the outbox, has it sent, and records the results.

It is a process of its own (``notbefore.courier``): what its sinks import costs the agent nothing, and what hangs in
them can be killed. Its main thread alone uses the outbox; each sink has one thread. A sink that never answers is
abandoned after its deadline: its thread is replaced, and the process ends when it is idle, to be rid of the old one.
"""

import logging
import random
import select
import socket
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from notbefore.core.delivery import Delivery, DeliveryResult
from notbefore.core.text import shortened
from notbefore.courier.failure_log import Failure, FailureLog
from notbefore.courier.message import Receipt, Sink
from notbefore.courier.orders import (
    DONE,
    HUNG,
    IN_AGENT,
    LEAVE,
    LEAVE_SECONDS,
    LOST_STATE,
    SIGN_INTERVAL,
    STOP,
    STOP_SECONDS,
    Orders,
)
from notbefore.courier.peers import Peers
from notbefore.courier.redact import known_secrets
from notbefore.courier.retry import LONGEST_ASKED, plan
from notbefore.courier.usual import usual_interruption
from notbefore.courier.worker import Checks, SendAttempt, Worker
from notbefore.errors import SendError
from notbefore.store.disk import DiskThread
from notbefore.store.outbox import CourierTurn

BATCH: Final = 16  # deliveries given to a sink at once, while it is quick
STATE_PATIENCE: Final = 60.0  # seconds in which the outbox may be out of reach
MAX_ABANDONED: Final = 4  # threads that hang, up to which a busy courier is not replaced
MAX_ERROR: Final = 300  # characters of a cause that are kept
HISTORY_PATIENCE: Final = 0.5  # seconds that a message waits for what the history says of such events
ORPHANS_EVERY: Final = 5.0  # seconds between two looks for deliveries to sinks that are not configured

log = logging.getLogger("notbefore.courier")


class Outbox(Protocol):
    """What the courier asks of the outbox (``store.outbox.Outbox``); raises ``sqlite3.Error``."""

    def release_leases(self, now: float, run_once: Collection[str] = ()) -> list[Delivery]:
        """Make due again what a courier that has ended left on its way; returns what is not, since it may run once."""
        ...

    def exchange(self, turn: CourierTurn) -> list[Delivery]:
        """Record the results of a turn, and lease what is due."""
        ...

    def sinks_with_work(self) -> set[str]:
        """The sinks that have deliveries to send."""
        ...


class AgentPipe(Struct, frozen=True):
    """The courier's connection to its agent; by default there is none."""

    control: socket.socket | None = None  # STOP, LEAVE and WAKE come from it; it is closed when the agent ends
    sign: Callable[[], None] = lambda: None  # of life: called each second
    use_agent: Callable[[], None] = lambda: None  # the outbox is in the agent from now on
    trouble: Callable[[], None] = lambda: None  # the outbox cannot be used: the agent is to look after it


class Courier:
    """``make`` makes the sink of a name, in that sink's thread; ``redact`` removes secrets from what is kept."""

    def __init__(
        self,
        outbox: Outbox,
        orders: Orders,
        make: Callable[[str], Sink],
        redact: Callable[[str], str],
        pipe: AgentPipe = AgentPipe(),  # noqa: B008 - frozen
    ) -> None:
        self._outbox = outbox
        self._orders = orders
        self._make = make
        self._redact = redact
        self._control = pipe.control
        self._sign = pipe.sign
        self._trouble, self._use_agent = pipe.trouble, pipe.use_agent
        self._attempts: deque[SendAttempt] = deque()  # made by the workers, and not looked at yet
        self._reader, self._writer = socket.socketpair()  # sockets: a pipe cannot be waited for on every system
        for end in (self._reader, self._writer):
            end.settimeout(0)
        self._under_way: dict[str, Delivery] = {}  # given to a worker, and without a result here
        self._workers: dict[str, Worker] = {}
        sinks = {name: sink.settings for name, sink in orders.sinks.items()}
        self._batched = frozenset(name for name, settings in sinks.items() if settings.BATCH > 1)
        self._run_once = frozenset(name for name, settings in sinks.items() if not settings.repeatable)
        self._abandoned: list[Worker] = []
        self._unrecorded: list[DeliveryResult] = []
        self._paused_until: dict[str, float] = {}  # sink -> monotonic seconds: the receiver asked for the pause
        self._orphaned: set[str] = set()  # sinks that have deliveries and are not configured any more
        self._failures = FailureLog(time.monotonic)
        self._peers = Peers(orders.peers)
        self._history_disk = DiskThread(HISTORY_PATIENCE, "history")
        self._stop_at: float | None = None
        self._leave_asked = False
        self._leaving = False  # what is due is for the successor
        self._last_work = self._last_look = time.monotonic()
        self._trouble_since: float | None = None
        self._taken_over = False  # what the courier before has left

    def stop(self) -> None:
        """Send what is due, for a while, and end. May be called from a signal handler."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + STOP_SECONDS
        self._wake()

    def run(self) -> int:
        """Work until there has been nothing to do for a while, or until it is asked to stop; returns the exit code."""
        while True:
            self._sign()
            self._abandon_hanging()
            worked = self._turn()
            self._failures.tick()
            code = self._exit_code(worked=worked)
            if code is not None:
                self._failures.count()
                return code
            self._wait(SIGN_INTERVAL)

    def close(self) -> None:
        """End the threads that do not hang, and close the sockets."""
        for worker in self._workers.values():
            worker.leave()
        self._reader.close()
        self._writer.close()

    # ---- one turn

    def _turn(self) -> bool:
        """Record what came of the attempts, and lease what is due; returns whether anything was."""
        while self._attempts:
            self._unrecorded.append(self._result_of(self._attempts.popleft()))
        try:
            self._take_over()
            room = {name: self._room(name) for name in self._orders.sinks} | dict.fromkeys(self._orphaned, BATCH)
            leased = self._outbox.exchange(
                CourierTurn(self._unrecorded, room, time.time(), self._batched, self._orders.confirm)
            )
        except sqlite3.Error as error:
            self._outbox_failed(error)
            return False
        if leased or self._unrecorded:
            self._last_work = time.monotonic()
        self._unrecorded, self._trouble_since = [], None
        self._hand_over(leased)
        return bool(leased)

    def _take_over(self) -> None:
        """Once, before the first exchange; raises ``sqlite3.Error``."""
        if self._taken_over:
            return
        for delivery in self._outbox.release_leases(time.time(), self._run_once):
            log.error("sink %s: `%s` of event %s: %s", delivery.sink, delivery.kind, delivery.event_key, delivery.error)
        self._taken_over = True
        if self._stop_at is None:
            self._find_orphaned()

    def _room(self, name: str) -> int:
        """How many deliveries the sink can take now."""
        if self._leaving or time.monotonic() < self._paused_until.get(name, 0.0):
            return 0
        worker, batch = self._workers.get(name), self._orders.sinks[name].settings.BATCH
        busy = worker.busy if worker is not None else 0
        if name in self._run_once:  # what is leased is under way: where this process dies, it is known what had begun
            return 0 if self._leave_asked else 1 - busy
        if self._orders.confirm:
            return 1 - busy
        return (BATCH if worker is not None and worker.quick and batch == 1 else batch) - busy

    def _hand_over(self, leased: Sequence[Delivery]) -> None:
        for name in dict.fromkeys(delivery.sink for delivery in leased):
            given = [delivery for delivery in leased if delivery.sink == name]
            if name not in self._orders.sinks:
                self._attempts.extend(_without_sink(delivery) for delivery in given)
                self._wake()
                continue
            self._under_way.update({delivery.delivery_id: delivery for delivery in given})
            self._worker(name).give(given)

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            config = self._orders.sinks[name]
            state_file = Path(self._orders.state_file)
            checks = Checks(
                secrets=lambda: known_secrets({name: config}),
                usual=partial(usual_interruption, state_file, self._history_disk)
                if config.settings.WORDS
                else lambda _message: None,
                patient=self._orders.patient,
                others_notify=lambda delivery: (
                    bool(delivery.ahead) and self._peers.any_alive(delivery.ahead, time.time() - delivery.created)
                ),
            )
            self._workers[name] = Worker(name, lambda: self._make(name), self._report, config.settings.BATCH, checks)
        return self._workers[name]

    def _report(self, attempt: SendAttempt) -> None:
        self._attempts.append(attempt)
        self._wake()

    def _result_of(self, attempt: SendAttempt) -> DeliveryResult:
        delivery, error = attempt.delivery, attempt.error
        self._under_way.pop(delivery.delivery_id, None)
        now = datetime.now(UTC)
        if attempt.receipt is None and error is None:
            log.debug("sink %s: `%s` of %s is another VM's", delivery.sink, delivery.kind, delivery.event_key)
            return DeliveryResult(delivery.delivery_id, "yielded", now.timestamp())
        then = plan(error, delivery.attempts + 1, now, random.random())  # noqa: S311 - a pause, not a secret
        # for the sink, not for this delivery alone
        pause = error.retry_after if error is not None and not error.permanent else None
        if pause is not None:
            self._paused_until[delivery.sink] = time.monotonic() + min(pause, LONGEST_ASKED)
        elif error is None:
            self._paused_until.pop(delivery.sink, None)
        cause = shortened(self._redact(str(error)), MAX_ERROR) if error is not None else ""
        self._log_result(delivery, then.state, cause)
        receipt = attempt.receipt or Receipt()
        return DeliveryResult(
            delivery_id=delivery.delivery_id,
            result=then.state,
            time=now.timestamp(),
            due=then.at.timestamp() if then.at is not None else None,
            pause=pause is not None,
            error=cause,
            thread=receipt.thread,
            repeat=receipt.repeat,
            fallback=receipt.fallback,
        )

    def _log_result(self, delivery: Delivery, state: str, cause: str) -> None:
        what = f"`{delivery.kind}` of event {delivery.event_key}"
        level, text = logging.WARNING, f"did not accept {what} ({cause}): it will be tried again"
        if state == "delivered":
            self._failures.delivered(delivery.sink)
            log.debug("sink %s accepted %s (%s)", delivery.sink, what, delivery.delivery_id[:8])
            return
        if delivery.state == "repeating":
            text = f"did not accept the repetition of {what} ({cause}): it will be tried again"
        elif state == "dead":
            level = logging.ERROR
            way_out = f"correct the cause, then `notbefore outbox retry {delivery.delivery_id[:8]}`"
            text = f"refused {what} for good ({cause}): {way_out}"
        self._failures.failed(Failure(delivery.sink, level, f"sink {delivery.sink} {text}", cause))

    # ---- trouble

    def _deadline(self, name: str) -> float:
        return self._orders.sinks[name].settings.timeout.seconds + self._orders.deadline_grace

    def _abandon_hanging(self) -> None:
        for name, worker in list(self._workers.items()):
            hanging = worker.hangs(self._deadline(name))
            if not hanging:
                continue
            left = worker.abandon()
            self._abandoned.append(worker)
            del self._workers[name]
            error = SendError(f"no end after {self._deadline(name):g} s: given up")
            events = {one.event_key for one in hanging}
            later = [one for one in left if one.event_key in events]  # they wait for what hangs: the order is kept
            self._attempts.extend(SendAttempt(one, None, error) for one in [*hanging, *later])
            self._hand_over([one for one in left if one.event_key not in events])

    def _outbox_failed(self, error: sqlite3.Error) -> None:
        """Keep the results until they can be recorded: what was delivered is not sent again meanwhile."""
        if self._trouble_since is None:
            self._trouble_since = time.monotonic()
            log.warning("the outbox cannot be used (%s): trying again", error)
        self._trouble()

    def _find_orphaned(self) -> None:
        with suppress(sqlite3.Error):
            self._orphaned = self._outbox.sinks_with_work() - self._orders.sinks.keys()
        self._last_look = time.monotonic()

    # ---- waiting and ending

    def _exit_code(self, *, worked: bool) -> int | None:
        """The exit code, if it is time to end."""
        now = time.monotonic()
        unfinished = bool(self._attempts or self._unrecorded)
        busy = worked or unfinished or bool(self._under_way)
        running = any(delivery.sink in self._run_once for delivery in self._under_way.values())
        if self._leave_asked and not self._leaving and not running:
            self._leaving = True
            self.stop()
        if self._leaving:  # what takes longer than that is not waited for: the successor sends it again
            busy = unfinished or any(one.busy and not one.hangs(LEAVE_SECONDS) for one in self._workers.values())
        if self._trouble_since is not None and now - self._trouble_since > STATE_PATIENCE:
            return LOST_STATE
        if self._stop_at is not None and (now >= self._stop_at or not busy):
            return DONE
        self._abandoned = [worker for worker in self._abandoned if worker.alive]
        if self._abandoned and not running and (not busy or len(self._abandoned) >= MAX_ABANDONED):
            return HUNG
        busy = busy or self._trouble_since is not None
        return DONE if not busy and now - self._last_work >= self._orders.linger else None

    def _wait(self, seconds: float) -> None:
        if self._attempts:
            return
        watched = [self._reader] + ([self._control] if self._control is not None else [])
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._reader in ready:
            with suppress(BlockingIOError):
                self._reader.recv(4096)
        if self._control is not None and self._control in ready:
            said = self._control.recv(4096)
            if not said or STOP in said:  # the agent is gone, or wants us to stop
                self._control, self._leaving, self._leave_asked = None, False, False
                self.stop()
            elif LEAVE in said:
                self._leave_asked = True
            if IN_AGENT in said:
                self._use_agent()
        if time.monotonic() - self._last_look > ORPHANS_EVERY:
            self._find_orphaned()
        if self._stop_at is not None or self._leave_asked:  # these orders are old: the next courier may know the sinks
            self._orphaned = set()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake already; closed: a thread that was abandoned has come to an end
            self._writer.send(b".")


def _without_sink(delivery: Delivery) -> SendAttempt:
    """What becomes of a delivery whose sink is not configured any more; a repetition simply ends."""
    if delivery.state == "repeating":
        return SendAttempt(delivery, Receipt())
    return SendAttempt(delivery, None, SendError("no sink of this name is configured", permanent=True))
