"""``Owner`` is an outbox in memory for couriers, with a clock that a test may move.

``CourierThreads`` runs couriers as threads of this process.
"""

import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Self
from unittest.mock import patch

from notbefore import __version__
from notbefore.core.delivery import Delivery
from notbefore.core.outbox import OF_AN_AGENT, Bounds, Outbox, SendResult
from notbefore.courier.frames import FrameSocket, wait_for_frame
from notbefore.courier.main import Courier
from notbefore.courier.orders import Hello, Orders
from notbefore.courier.sink import Sink
from notbefore.courier.supervisor import Supervisor
from notbefore.net.redact import Redactor
from notbefore.store import SCHEMA_VERSION
from notbefore.store.stored_outbox import StoredOutbox
from support.agent import PATIENCE
from support.box import delivery
from support.messages import message

RECORD = message().line


def lowest_dice() -> float:
    return 0.0


class Owner(StoredOutbox):
    """Records the results that couriers report, and the deliveries that they lease.

    It is its own clock.
    """

    boot_id = ""
    time = staticmethod(time.time)

    def __init__(self, bounds: Bounds = OF_AN_AGENT) -> None:
        self.outbox = Outbox(lowest_dice, bounds, patience=0.0)
        super().__init__(self.outbox, self, self._ignore_news)
        self.ahead = 0.0  # seconds by which its clock is ahead
        self.results: list[SendResult] = []
        self.leased: list[Delivery] = []
        self.endings = 0  # how many couriers have ended

    def _ignore_news(self) -> None:
        """Do nothing when there are new deliveries: ``serve`` looks again and again."""

    def boot_time(self) -> float:
        return time.monotonic() + self.ahead

    def add(self, *ids: str, sink: str = "chat", event: str = "", **fields: object) -> None:
        """Add due deliveries with these ids, all of ``event`` or each of another event."""
        now = time.time()
        values: dict[str, object] = {
            "created": now,
            "due": now,
            "expires": now + 1e6,
            "record": RECORD,
            **fields,
        }
        deliveries: list[Delivery] = []
        for delivery_id in ids:
            event_key = event or f"e-{delivery_id}"
            deliveries.append(delivery(event_key, sink, delivery_id=delivery_id, **values))
        self.put(deliveries)

    def exchange(
        self, results: Iterable[SendResult], limits: Mapping[str, int]
    ) -> Sequence[Delivery]:
        results = list(results)
        self.results += results
        leased = super().exchange(results, limits)
        self.leased += leased
        return leased

    def courier_ended(self, ids: Collection[str] | None = None) -> None:
        self.endings += 1
        super().courier_ended(ids)

    @property
    def rows(self) -> list[Delivery]:
        return self.outbox.rows.chosen()

    @property
    def left(self) -> dict[str, str]:
        """The states of the deliveries in the outbox, by id."""
        return {row.delivery_id: row.state for row in self.rows}


def serve(
    couriers: Sequence[Supervisor], condition: Callable[[], object], seconds: float = PATIENCE
) -> None:
    """Serve couriers as the main thread of an agent does, until ``condition`` returns true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {seconds} s"
        readable: list[FrameSocket] = []
        writable: list[FrameSocket] = []
        patience = 0.1
        for courier in couriers:
            reads, writes = courier.watched
            readable += reads
            writable += writes
            patience = min(patience, courier.patience)
        select.select(readable, writable, [], patience)
        for courier in couriers:
            courier.tick()


def interrupt_at_once(_seconds: float) -> bool:
    return True


class CourierThreads:
    """Has a supervisor whose couriers are threads of this process.

    The supervisor gets this object in place of a process. It works while ``until`` runs.
    """

    pid = 0

    def __init__(self, owner: Owner, orders: Orders, make: Callable[[str], Sink]) -> None:
        self.owner = owner
        self.supervisor = Supervisor(orders, owner)
        self._orders = orders
        self._make = make

    def __enter__(self) -> Self:
        self._started = patch("notbefore.courier.courier_process.start_child", self._start)
        self._started.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.stop(interrupt_at_once)
        self._started.stop()

    def _start(self, _module: str, end: socket.socket, *_: object) -> Self:
        frames = FrameSocket(end.dup())
        threading.Thread(target=self._run, args=(frames,), daemon=True).start()
        return self

    def _run(self, frames: FrameSocket) -> None:
        """Do the work of a courier until the supervisor closes the socket."""
        with suppress(ConnectionError):
            while not list(frames.receive()):  # the first frame has the orders
                wait_for_frame(1.0, frames)
            frames.send(Hello(__version__, SCHEMA_VERSION))
            Courier(frames, self._orders, Redactor(["s3cret"]), self._make_sink).run()
        frames.close()

    def _make_sink(self, name: str, *_: object) -> Sink:
        return self._make(name)

    def kill(self) -> None:
        """Do nothing: the thread ends because the supervisor has closed the socket."""

    def wait(self, _seconds: float) -> int:
        return -9

    @property
    def replaced(self) -> bool:
        """Whether a courier was replaced because a sink hung."""
        return "hung" in self.supervisor.figures.starts

    def until(self, condition: Callable[[], object]) -> None:
        """Serve the courier until ``condition`` returns true."""
        serve([self.supervisor], condition)

    def to_end(self) -> None:
        """Serve the courier until no delivery is due or under way."""
        self.until(lambda: self.owner.next_due() > 0 and not self.owner.under_way())
