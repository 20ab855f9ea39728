"""``Courier``: asks its agent for deliveries, lets its sinks send them, and reports the results. It owns nothing.

It is a separate process (``notbefore.courier``): imports of its sinks cost the agent no memory, and it can be killed if
they hang. Its main thread talks to the agent; each sink has one thread. An attempt without an end is reported after its
deadline, and the courier leaves: the agent starts another one.
"""

import math
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from notbefore.config.sinks import Messages, SinkConfig
from notbefore.core.outbox import SendResult
from notbefore.courier import sinks
from notbefore.courier.message import Sink
from notbefore.courier.orders import DONE, HUNG, TURN_INTERVAL, Channel, FromAgent, Given, Leave, Orders, Turn, wait
from notbefore.courier.redact import Redactor
from notbefore.courier.worker import Worker

GATHER: Final = 0.005  # seconds between two turns while attempts are under way
LEAVE_SECONDS: Final = 2.0  # for the attempts of the other sinks, if one hangs


class Courier:
    """``make`` makes a sink, in that sink's thread; ``redact`` removes secrets from errors."""

    def __init__(
        self,
        channel: Channel,
        orders: Orders,
        redact: Redactor,
        make: Callable[[str, SinkConfig, Messages], Sink] = sinks.make,
    ) -> None:
        self._channel = channel
        self._reader, self._writer = socket.socketpair()  # not a pipe: not every system can wait for one
        for end in (self._reader, self._writer):
            end.settimeout(0)
        self._reported: deque[tuple[str, SendResult]] = deque()  # by the workers, not processed yet
        self._workers = {
            name: Worker(name, config, partial(make, name, config, orders.messages), self._report, redact)
            for name, config in orders.sinks.items()
        }
        self._results: list[SendResult] = []  # for the next turn
        self._asked = False  # the last turn is not answered yet
        self._woken = True
        self._last_turn = 0.0  # monotonic seconds
        self._leave_at = math.inf  # monotonic seconds; if set, no more deliveries are accepted

    def run(self) -> int:
        """Work until the agent says leave, or a sink hangs; return the exit code. ``ConnectionError``: no agent."""
        with self._reader, self._writer:
            while True:
                for frame in self._channel.receive():
                    self._take(msgspec.msgpack.decode(frame, type=FromAgent))
                self._gather_results()
                self._report_hanging()
                self._turn()
                if self._is_done():
                    return HUNG if any(worker.hangs for worker in self._workers.values()) else DONE
                self._wait()

    # ---- messages from and to the agent

    def _take(self, said: FromAgent) -> None:
        if isinstance(said, Given):
            self._asked = False
            for delivery in said.deliveries:
                self._workers[delivery.sink].give(delivery, time.time() - said.time)
        elif isinstance(said, Leave):
            self._leave(said.seconds)
        else:
            self._woken = True

    def _turn(self) -> None:
        """Report results and ask for more, if it is time to; each turn is answered before the next."""
        since = time.monotonic() - self._last_turn
        reports = bool(self._results) and (since >= GATHER or not self._busy)
        if self._asked or not (reports or self._woken or since >= TURN_INTERVAL):
            return
        leaves = self._leave_at < math.inf
        room = {} if leaves else {name: worker.room for name, worker in self._workers.items()}
        self._channel.send(Turn(self._results, room, self._busy))
        self._results, self._asked, self._woken, self._last_turn = [], True, False, time.monotonic()

    @property
    def _busy(self) -> bool:
        return any(worker.given for worker in self._workers.values())

    def _report(self, name: str, result: SendResult) -> None:
        """Store a result and wake the main thread; called in a worker's thread."""
        self._reported.append((name, result))
        with suppress(OSError):  # full, so the main thread wakes anyway; or closed at the end
            self._writer.send(b".")

    def _gather_results(self) -> None:
        while self._reported:
            name, result = self._reported.popleft()
            expected = self._workers[name].given.pop(result.delivery_id, None) is not None
            if expected or result.outcome == "accepted":  # else it hung and was reported as failed
                self._results.append(result)

    # ---- the end

    def _report_hanging(self) -> None:
        """Report attempts that hang, and leave. Deliveries that wait behind them get no result: they are due again."""
        for worker in self._workers.values():
            if (result := worker.overdue()) is not None:
                del worker.given[result.delivery_id]
                self._results.append(result)
                self._woken = True
        if any(worker.hangs for worker in self._workers.values()) and not self._runs_once:
            self._leave(LEAVE_SECONDS)

    def _leave(self, seconds: float) -> None:
        self._leave_at = min(self._leave_at, time.monotonic() + seconds)

    @property
    def _runs_once(self) -> bool:
        """Whether a delivery is under way that must not be interrupted."""
        return any(worker.given for worker in self._workers.values() if worker.once)

    def _is_done(self) -> bool:
        if self._leave_at == math.inf or self._runs_once or self._asked or self._results or self._reported:
            return False  # if asked: the agent answers at once, or has ended
        waited_for = any(worker.given for worker in self._workers.values() if not worker.hangs)
        return not waited_for or time.monotonic() >= self._leave_at

    def _wait(self) -> None:
        """Wait for a frame or for a result."""
        if self._results and not self._asked:  # more results come soon: report them together
            wait(GATHER, self._channel)
            return
        wait(TURN_INTERVAL / 4 if self._leave_at < math.inf else TURN_INTERVAL, self._channel, self._reader)
        with suppress(BlockingIOError):
            self._reader.recv(4096)
