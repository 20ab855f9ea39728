"""``Courier``: asks its agent for deliveries, has them sent, and says what came of them. It owns nothing.

It is a process of its own (``notbefore.courier``): what its sinks import costs the agent nothing, and what hangs in
them can be killed. Its main thread talks to the agent; each sink has one thread. A sink that never answers is reported
after its deadline, and the courier leaves: the agent starts another one.
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

GATHER: Final = 0.005  # seconds between two turns, while more is under way
LEAVE_SECONDS: Final = 2.0  # for what is under way, where another sink hangs


class Courier:
    """``make`` makes a sink, in that sink's thread; ``redact`` removes secrets from what is kept."""

    def __init__(
        self,
        channel: Channel,
        orders: Orders,
        redact: Redactor,
        make: Callable[[str, SinkConfig, Messages], Sink] = sinks.make,
    ) -> None:
        self._channel = channel
        self._reader, self._writer = socket.socketpair()  # sockets: a pipe cannot be waited for on every system
        for end in (self._reader, self._writer):
            end.settimeout(0)
        self._reported: deque[tuple[str, SendResult]] = deque()  # by the workers, and not looked at yet
        self._workers = {
            name: Worker(name, config, partial(make, name, config, orders.messages), self._report, redact)
            for name, config in orders.sinks.items()
        }
        self._results: list[SendResult] = []  # that the agent is to be told
        self._asked = False  # and not answered yet
        self._woken = True
        self._last_turn = 0.0  # monotonic seconds
        self._leave_at = math.inf  # monotonic seconds; before that: nothing more is taken

    def run(self) -> int:
        """Work until the agent says leave, or a sink hangs; returns the exit code. ``ConnectionError``: no agent."""
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

    # ---- what the agent says, and what it is told

    def _take(self, said: FromAgent) -> None:
        if isinstance(said, Given):
            self._asked = False
            for delivery in said.deliveries:
                self._workers[delivery.sink].give(delivery)
        elif isinstance(said, Leave):
            self._leave(said.seconds)
        else:
            self._woken = True

    def _turn(self) -> None:
        """Say what came of the deliveries, and ask for more; one turn is answered before the next."""
        since = time.monotonic() - self._last_turn
        told = bool(self._results) and (since >= GATHER or not self._busy)
        if self._asked or not (told or self._woken or since >= TURN_INTERVAL):
            return
        leaves = self._leave_at < math.inf
        room = {} if leaves else {name: worker.room for name, worker in self._workers.items()}
        self._channel.send(Turn(self._results, room, self._busy))
        self._results, self._asked, self._woken, self._last_turn = [], True, False, time.monotonic()

    @property
    def _busy(self) -> bool:
        return any(worker.given for worker in self._workers.values())

    def _report(self, name: str, result: SendResult) -> None:
        """Take a result, in a worker's thread."""
        self._reported.append((name, result))
        with suppress(OSError):  # bytes enough are under way; or it is over, and this thread comes late
            self._writer.send(b".")

    def _gather_results(self) -> None:
        while self._reported:
            name, result = self._reported.popleft()
            expected = self._workers[name].given.pop(result.delivery_id, None) is not None
            if expected or result.outcome == "accepted":  # else it hung, and was reported as failed
                self._results.append(result)

    # ---- the end

    def _report_hanging(self) -> None:
        """Report what hangs, and leave. What waits behind it is not answered: it is due again."""
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
        """Something that may not be cut short is under way."""
        return any(worker.given for worker in self._workers.values() if worker.once)

    def _is_done(self) -> bool:
        if self._leave_at == math.inf or self._runs_once or self._asked or self._results or self._reported:
            return False  # the agent answers at once, or has ended
        waited_for = any(worker.given for worker in self._workers.values() if not worker.hangs)
        return not waited_for or time.monotonic() >= self._leave_at

    def _wait(self) -> None:
        """For a frame, or for an attempt that was made."""
        if self._results and not self._asked:  # more of them come soon: who would be woken for each gets nothing done
            wait(GATHER, self._channel)
            return
        wait(TURN_INTERVAL / 4 if self._leave_at < math.inf else TURN_INTERVAL, self._channel, self._reader)
        with suppress(BlockingIOError):
            self._reader.recv(4096)
