"""``Courier``: takes what is due from the outbox, has it sent, and writes down what came of it.

It is a process of its own (``notbefore.delivery``): what its sinks import costs the agent nothing, and what hangs in
them can be killed. Its main thread alone touches the outbox; each sink has one thread. A sink that never answers is
given up after its deadline; its thread is replaced, and the process leaves at the next quiet moment, to be rid of it.
"""

import logging
import random
import select
import socket
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, Protocol

from msgspec import Struct

from notbefore.config.sinks import SinkConfig
from notbefore.core.delivery import Delivery, DeliveryResult
from notbefore.delivery.message import Receipt, Sink
from notbefore.delivery.orders import BEAT, DONE, HUNG, LEAVE, LEAVE_SECONDS, LOST_STATE, STOP, STOP_SECONDS, Orders
from notbefore.delivery.retry import LONGEST_ASKED, SendOutcome, plan
from notbefore.delivery.worker import SendAttempt, Worker
from notbefore.errors import ConfigError, SendError
from notbefore.store.outbox import CourierTurn

BATCH: Final = 16  # deliveries given to a sink at once, while it is quick
STATE_PATIENCE: Final = 60.0  # seconds in which the outbox may be out of reach
MAX_ABANDONED: Final = 4
MAX_ERROR: Final = 500  # characters of a cause that are kept

log = logging.getLogger("notbefore.courier")


class Outbox(Protocol):
    """What the courier asks of the outbox (``store.outbox.Outbox``); raises ``sqlite3.Error``."""

    def release_leases(self, now: float) -> None:
        """Make due again what a courier that has ended left on its way."""

    def exchange(self, turn: CourierTurn) -> list[Delivery]:
        """Record the results of a turn, and lease what is due."""
        ...

    def sinks_with_work(self) -> set[str]:
        """The sinks that have deliveries to send."""
        ...


class AgentPipe(Struct, frozen=True):
    """The courier's line to its agent; the default is none."""

    control: socket.socket | None = None  # on which the agent says STOP, LEAVE and WAKE; its end is the agent's
    beat: Callable[[], None] = lambda: None  # called each second


class Courier:
    """``make`` makes the sink of a name, in that sink's thread; ``redact`` takes secrets out of what is kept."""

    def __init__(
        self,
        outbox: Outbox,
        orders: Orders,
        make: Callable[[str], Sink],
        redact: Callable[[str], str],
        line: AgentPipe = AgentPipe(),  # noqa: B008 - frozen
    ) -> None:
        self._outbox = outbox
        self._orders = orders
        self._make = make
        self._redact = redact
        self._control = line.control
        self._beat = line.beat
        self._reports: deque[SendAttempt] = deque()
        self._reader, self._writer = socket.socketpair()  # sockets: a pipe cannot be waited for everywhere
        for end in (self._reader, self._writer):
            end.settimeout(0)
        self._under_way: dict[str, Delivery] = {}  # given to a worker, and not yet answered for here
        self._workers: dict[str, Worker] = {}
        self._batched = frozenset(name for name, sink in orders.sinks.items() if sink.settings.BATCH > 1)
        self._abandoned: list[Worker] = []
        self._unsaid: list[DeliveryResult] = []
        self._paused_until: dict[str, float] = {}  # sink -> monotonic seconds: it asked to be left alone till then
        self._homeless: set[str] = set()  # sinks that have deliveries, and are configured no more
        self._stop_at: float | None = None
        self._leaving = False  # for a successor: what is due is for that one
        self._last_work = self._last_look = time.monotonic()
        self._trouble_since: float | None = None

    def stop(self) -> None:
        """Send what is due, for a while, and leave. May be called from a signal handler."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + STOP_SECONDS
        self._poke()

    def run(self) -> int:
        """Work until there has been nothing to do for a while, or until told to stop; returns the exit code."""
        self._outbox.release_leases(time.time())
        if self._stop_at is None:
            self._look_for_homeless()
        while True:
            self._beat()
            self._give_up_what_hangs()
            worked = self._turn()
            code = self._leave(worked=worked)
            if code is not None:
                return code
            self._wait(BEAT)

    def close(self) -> None:
        """End the threads that do not hang, and let go of the pipe."""
        for worker in self._workers.values():
            worker.leave()
        self._reader.close()
        self._writer.close()

    # ---- one turn

    def _turn(self) -> bool:
        """Say what came of the attempts, take what is due; returns whether anything was."""
        self._unsaid += self._settled()
        now = time.time()
        room = {name: self._room(name) for name in self._orders.sinks} | dict.fromkeys(self._homeless, BATCH)
        said = bool(self._unsaid)
        try:
            leased = self._outbox.exchange(CourierTurn(self._unsaid, room, now, self._batched))
        except sqlite3.Error as error:
            self._in_trouble(error)
            return False
        self._unsaid, self._trouble_since = [], None
        self._hand_over(leased)
        if leased or said:
            self._last_work = time.monotonic()
        return bool(leased)

    def _room(self, name: str) -> int:
        if self._leaving or time.monotonic() < self._paused_until.get(name, 0.0):
            return 0
        worker, batch = self._workers.get(name), self._orders.sinks[name].settings.BATCH
        if worker is None:
            return batch
        return (BATCH if worker.quick and batch == 1 else batch) - worker.busy

    def _hand_over(self, leased: Sequence[Delivery]) -> None:
        for name in dict.fromkeys(delivery.sink for delivery in leased):
            given = [delivery for delivery in leased if delivery.sink == name]
            if name not in self._orders.sinks:
                self._reports.extend(_homeless(delivery) for delivery in given)
                self._poke()
                continue
            self._under_way.update({delivery.delivery_id: delivery for delivery in given})
            self._worker(name).give(given)

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            config = self._orders.sinks[name]
            self._workers[name] = Worker(
                name,
                lambda: self._make(name),
                self._report,
                config.settings.BATCH,
                lambda: known_secrets({name: config}),
            )
        return self._workers[name]

    def _report(self, attempt: SendAttempt) -> None:
        self._reports.append(attempt)
        self._poke()

    def _settled(self) -> list[DeliveryResult]:
        found: list[DeliveryResult] = []
        while self._reports:
            found.append(self._settle(self._reports.popleft()))
        return found

    def _settle(self, attempt: SendAttempt) -> DeliveryResult:
        delivery, receipt, error = attempt.delivery, attempt.receipt, attempt.error
        self._under_way.pop(delivery.delivery_id, None)
        now = datetime.now(UTC)
        outcome = SendOutcome(
            accepted=receipt is not None,
            permanent=error is not None and error.permanent,
            retry_after=error.retry_after if error is not None else None,
        )
        then = plan(outcome, delivery.attempts + 1, now, random.random())  # noqa: S311 - a pause, not a secret
        pause = then.state == "retry" and outcome.retry_after is not None  # it says so of itself, not of this delivery
        if pause and outcome.retry_after is not None:
            self._paused_until[delivery.sink] = time.monotonic() + min(outcome.retry_after, LONGEST_ASKED)
        elif outcome.accepted:
            self._paused_until.pop(delivery.sink, None)
        cause = self._redact(str(error))[:MAX_ERROR] if error is not None else ""
        self._tell(delivery, then.state, cause)
        return DeliveryResult(
            delivery_id=delivery.delivery_id,
            result=then.state,
            time=now.timestamp(),
            due=then.at.timestamp() if then.at is not None else None,
            pause=pause,
            error=cause,
            thread=receipt.thread if receipt is not None else None,
            repeat=receipt.repeat if receipt is not None else None,
            fallback=receipt.fallback if receipt is not None else False,
        )

    @staticmethod
    def _tell(delivery: Delivery, state: str, cause: str) -> None:
        what = (delivery.sink, delivery.kind, delivery.event_key, delivery.delivery_id[:8])
        if delivery.state == "repeating" and state != "delivered":
            log.warning(
                "sink %s did not take the repetition of `%s` of event %s (%s): it will be tried again", *what[:3], cause
            )
        elif state == "dead":
            log.error(
                "sink %s refused `%s` of event %s for good (%s): mend the cause, then `notbefore outbox retry %s`",
                *what[:3],
                cause,
                what[3],
            )
        elif state == "retry":
            log.warning("sink %s did not take `%s` of event %s (%s): it will be tried again", *what[:3], cause)
        else:
            log.debug("sink %s took `%s` of event %s (%s)", *what)

    # ---- trouble

    def _deadline(self, name: str) -> float:
        return self._orders.sinks[name].settings.timeout.seconds + self._orders.deadline_grace

    def _give_up_what_hangs(self) -> None:
        for name, worker in list(self._workers.items()):
            hanging = worker.hangs(self._deadline(name))
            if not hanging:
                continue
            left = worker.abandon()
            self._abandoned.append(worker)
            del self._workers[name]
            error = SendError(f"no end after {self._deadline(name):g} s: given up")
            events = {one.event_key for one in hanging}
            held_back = [one for one in left if one.event_key in events]  # they must not come before what hangs
            self._reports.extend(SendAttempt(one, None, error) for one in [*hanging, *held_back])
            self._hand_over([one for one in left if one.event_key not in events])

    def _in_trouble(self, error: sqlite3.Error) -> None:
        """What was accepted is remembered here until it can be written: it is not sent again meanwhile."""
        if self._trouble_since is None:
            self._trouble_since = time.monotonic()
            log.warning("the outbox cannot be used (%s): trying again", error)

    def _look_for_homeless(self) -> None:
        with suppress(sqlite3.Error):
            self._homeless = self._outbox.sinks_with_work() - self._orders.sinks.keys()
        self._last_look = time.monotonic()

    # ---- waiting and leaving

    def _leave(self, *, worked: bool) -> int | None:
        """The exit code, if it is time to go."""
        now = time.monotonic()
        busy = worked or bool(self._reports or self._unsaid or self._under_way)
        if self._leaving:  # what hangs may hang on: the successor sends it again
            waited_for = any(one.busy and not one.hangs(LEAVE_SECONDS) for one in self._workers.values())
            busy = waited_for or bool(self._reports or self._unsaid)
        if self._trouble_since is not None and now - self._trouble_since > STATE_PATIENCE:
            return LOST_STATE
        if self._stop_at is not None and (now >= self._stop_at or not busy):
            return DONE
        self._abandoned = [worker for worker in self._abandoned if worker.alive]
        if self._abandoned and (not busy or len(self._abandoned) >= MAX_ABANDONED):
            return HUNG
        return DONE if not busy and now - self._last_work >= self._orders.linger else None

    def _wait(self, seconds: float) -> None:
        if self._reports:
            return
        watched = [self._reader] + ([self._control] if self._control is not None else [])
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._reader in ready:
            with suppress(BlockingIOError):
                self._reader.recv(4096)
        if self._control is not None and self._control in ready:
            said = self._control.recv(4096)
            if not said or STOP in said:  # the agent is gone, or tells us to go
                self._control, self._leaving = None, False
                self.stop()
            elif LEAVE in said:
                self._leaving = True
                self.stop()
        if time.monotonic() - self._last_look > 5 * BEAT:
            self._look_for_homeless()
        if self._stop_at is not None:  # these orders are old: what they do not know, the next courier may
            self._homeless = set()

    def _poke(self) -> None:
        with suppress(OSError):  # full: it is poked already; closed: a thread that hung is done at last
            self._writer.send(b".")


def _homeless(delivery: Delivery) -> SendAttempt:
    """What becomes of a delivery whose sink is configured no more; a repetition ends: it was delivered long ago."""
    if delivery.state == "repeating":
        return SendAttempt(delivery, Receipt())
    return SendAttempt(delivery, None, SendError("no sink of this name is configured", permanent=True))


def known_secrets(sinks: dict[str, SinkConfig]) -> list[str]:
    """What must not be told; a secret that cannot be read now cannot be told either."""
    found: list[str] = []
    for sink in sinks.values():
        for secret in sink.secrets.values():
            with suppress(ConfigError):
                found.append(secret.reveal())
    return found
