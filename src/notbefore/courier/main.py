"""``Courier``: asks its agent for deliveries, has them sent, and says what came of them. It owns nothing.

It is a process of its own (``notbefore.courier``): what its sinks import costs the agent nothing, and what hangs in
them can be killed. Its main thread talks to the agent; each sink has one thread. A sink that never answers is reported
after its deadline, and the courier leaves: the agent starts another one.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from notbefore.core.outbox import GivenDelivery, SendResult
from notbefore.courier.channel import Channel, wait
from notbefore.courier.message import Sink
from notbefore.courier.orders import DONE, HUNG, TURN_INTERVAL, FromAgent, Given, Leave, Orders, Turn
from notbefore.courier.redact import known_secrets
from notbefore.courier.worker import Worker

BATCH: Final = 16  # deliveries given to a sink at once, while it is quick
GATHER: Final = 0.005  # seconds in which results are gathered for one turn, while more is under way
LEAVE_SECONDS: Final = 2.0  # for what is under way, where another sink hangs


class Courier:
    """``make`` makes the sink of a name, in that sink's thread; ``redact`` removes secrets from what is kept."""

    def __init__(
        self, channel: Channel, orders: Orders, make: Callable[[str], Sink], redact: Callable[[str], str]
    ) -> None:
        self._channel = channel
        self._orders = orders
        self._make = make
        self._redact = redact
        self._reported: deque[tuple[str, SendResult]] = deque()  # by the workers, and not looked at yet
        self._signaled = False  # a byte is under way that says so
        self._reader, self._writer = socket.socketpair()  # sockets: a pipe cannot be waited for on every system
        for end in (self._reader, self._writer):
            end.settimeout(0)
        self._workers: dict[str, Worker] = {}
        self._under_way: dict[str, dict[str, GivenDelivery]] = {name: {} for name in orders.sinks}  # by sink and id
        self._run_once = {name for name, sink in orders.sinks.items() if sink.settings.ONCE}
        self._results: list[SendResult] = []  # that the agent is to be told
        self._gathering = 0.0  # monotonic seconds: since when
        self._asked = False  # and not answered yet
        self._woken = True
        self._last_turn = 0.0  # monotonic seconds
        self._hanging: set[str] = set()  # sinks
        self._leave_at: float | None = None  # monotonic seconds: nothing more is taken, and the end is near

    def run(self) -> int:
        """Work until the agent says leave, or a sink hangs; returns the exit code. ``ConnectionError``: no agent."""
        with self._reader, self._writer:
            while True:
                for frame in self._channel.receive():
                    self._take(msgspec.msgpack.decode(frame, type=FromAgent))
                self._gather_results()
                self._look_for_hanging()
                self._turn()
                if self._is_done():
                    return HUNG if self._hanging else DONE
                self._wait()

    # ---- what the agent says, and what it is told

    def _take(self, said: FromAgent) -> None:
        if isinstance(said, Given):
            self._asked = False
            self._hand_over(said.deliveries)
        elif isinstance(said, Leave):
            self._leave(said.seconds)
        else:
            self._woken = True

    def _turn(self) -> None:
        """Say what came of the deliveries, and ask for more; one turn is answered before the next."""
        now = time.monotonic()
        gathered = bool(self._results) and (now - self._gathering >= GATHER or not self._busy)
        if self._asked or not (gathered or self._woken or now - self._last_turn >= TURN_INTERVAL):
            return
        room = {} if self._leave_at is not None else {name: self._room(name) for name in self._orders.sinks}
        self._channel.send(Turn(self._results, room, self._busy))
        self._results, self._asked, self._woken, self._last_turn = [], True, False, now

    def _room(self, name: str) -> int:
        """How many deliveries the sink can take now."""
        if name in self._hanging:
            return 0
        worker = self._workers.get(name)
        several = worker is not None and worker.quick and name not in self._run_once
        return (BATCH if several else 1) - len(self._under_way[name])

    @property
    def _busy(self) -> bool:
        return any(self._under_way.values())

    def _hand_over(self, given: Sequence[GivenDelivery]) -> None:
        for name in dict.fromkeys(delivery.sink for delivery in given):
            deliveries = [delivery for delivery in given if delivery.sink == name]
            self._under_way[name].update({delivery.delivery_id: delivery for delivery in deliveries})
            self._worker(name).give(deliveries)

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            config = self._orders.sinks[name]
            self._workers[name] = Worker(
                name, lambda: self._make(name), self._report, self._redact, lambda: known_secrets({name: config})
            )
        return self._workers[name]

    def _report(self, name: str, result: SendResult) -> None:
        self._reported.append((name, result))
        if not self._signaled:
            self._signaled = True
            with suppress(OSError):  # it is over: this thread hung, and comes to an end late
                self._writer.send(b".")

    def _gather_results(self) -> None:
        while self._reported:
            name, result = self._reported.popleft()
            expected = self._under_way[name].pop(result.delivery_id, None) is not None
            if expected or result.outcome == "accepted":  # else it hung, and was reported as failed
                if not self._results:
                    self._gathering = time.monotonic()
                self._results.append(result)

    # ---- the end

    def _look_for_hanging(self) -> None:
        """Report what hangs, and leave: its thread cannot be ended otherwise. What waits behind it is not answered."""
        for name, worker in self._workers.items():
            if name in self._hanging:
                continue
            limit = self._orders.sinks[name].settings.timeout.seconds + self._orders.deadline_grace
            result = worker.hangs(limit)
            if result is not None and self._under_way[name].pop(result.delivery_id, None) is not None:
                self._results.append(result)
                self._hanging.add(name)
                self._woken = True
        if self._hanging and self._leave_at is None and not self._runs_once:
            self._leave(LEAVE_SECONDS)

    def _leave(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._leave_at = at if self._leave_at is None else min(at, self._leave_at)

    @property
    def _runs_once(self) -> bool:
        """Something that may not be cut short, since it would not run again, is under way."""
        return any(self._under_way[name] for name in self._run_once)

    def _is_done(self) -> bool:
        if self._leave_at is None or self._runs_once:
            return False
        if self._asked or self._results or self._reported:
            return False  # the agent answers at once, or has ended
        waited_for = any(given for name, given in self._under_way.items() if name not in self._hanging)
        return not waited_for or time.monotonic() >= self._leave_at

    def _wait(self) -> None:
        """For a frame, or for an attempt that was made."""
        if self._results and not self._asked:  # more of them come soon: who would be woken for each gets nothing done
            wait(GATHER, self._channel)
        else:
            wait(TURN_INTERVAL / 4 if self._leave_at is not None else TURN_INTERVAL, self._channel, self._reader)
        self._signaled = False  # first: what is added from here on wakes it again
        with suppress(BlockingIOError):
            self._reader.recv(4096)
