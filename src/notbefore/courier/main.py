"""``Courier``: lets its sinks send the deliveries that its agent gives, and reports the results. It
owns nothing.

It is a separate process (``notbefore.courier``): imports of its sinks cost the agent no memory, and
it can be killed if they hang. Its main thread talks to the agent; each sink has threads of its own.
An attempt without an end is reported after its deadline, and the agent replaces the courier.
"""

import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn

import msgspec

from notbefore.config.sinks import Messages, SinkConfig
from notbefore.core.outbox import SendResult
from notbefore.courier import sinks
from notbefore.courier.orders import TURN_INTERVAL, Channel, Given, Orders, Turn, wait
from notbefore.courier.sink import Sink
from notbefore.courier.worker import Worker
from notbefore.net.redact import Redactor

GATHER: Final = 0.005  # seconds between two turns with results


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
        # not a pipe: not every system can wait for one
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.settimeout(0)
        self._results: deque[SendResult] = deque()  # for the next turn
        self._workers = {
            name: Worker(
                name, config, partial(make, name, config, orders.messages), self._report, redact
            )
            for name, config in orders.sinks.items()
        }
        self._last_turn = 0.0  # monotonic seconds

    def run(self) -> NoReturn:
        """Work until the agent ends it; raises ``ConnectionError`` once the agent has ended."""
        with self._reader, self._writer:
            while True:
                for frame in self._channel.receive():
                    given = msgspec.msgpack.decode(frame, type=Given)
                    for delivery in given.deliveries:
                        self._workers[delivery.sink].give(delivery, time.time() - given.time)
                for worker in self._workers.values():
                    self._results.extend(worker.watch())
                self._turn()
                self._wait()

    def _turn(self) -> None:
        """Report results, and how many deliveries the sinks may have, if it is time to."""
        if time.monotonic() - self._last_turn < (GATHER if self._results else TURN_INTERVAL):
            return
        results = [self._results.popleft() for _ in range(len(self._results))]
        limits = {name: worker.limit for name, worker in self._workers.items()}
        hangs = any(worker.hangs for worker in self._workers.values())
        self._channel.send(Turn(results, limits, hangs))
        self._last_turn = time.monotonic()

    def _report(self, result: SendResult) -> None:
        """Store a result and wake the main thread; called in a worker's thread."""
        self._results.append(result)
        with suppress(OSError):  # full, so the main thread wakes anyway; or closed at the end
            self._writer.send(b".")

    def _wait(self) -> None:
        """Wait for a frame or for a result."""
        if self._results:  # more results come soon: report them together
            wait(GATHER, self._channel)
            return
        wait(TURN_INTERVAL, self._channel, self._reader)
        with suppress(BlockingIOError):
            self._reader.recv(4096)
