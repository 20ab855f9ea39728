"""``Owner``: an outbox in memory for a courier, on a clock that a test may move.

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


class Owner(StoredOutbox):
    """Keeps what couriers asked and got. It is its own clock."""

    boot_id = ""
    time = staticmethod(time.time)

    def __init__(self, bounds: Bounds = OF_AN_AGENT) -> None:
        self.outbox = Outbox(lambda: 0.0, bounds, patience=0.0)
        super().__init__(self.outbox, self, lambda: None)
        self.ahead = 0.0  # seconds by which its clock is ahead
        self.results: list[SendResult] = []
        self.leased: list[Delivery] = []
        self.endings = 0

    def boot_time(self) -> float:
        return time.monotonic() + self.ahead

    def add(self, *ids: str, sink: str = "chat", event: str = "", **fields: object) -> None:
        """Add deliveries with these ids; each is of ``event``, or else of an event of its own."""
        wall = time.time()
        due: dict[str, object] = {
            "created": wall,
            "due": wall,
            "expires": wall + 1e6,
            "record": RECORD,
            **fields,
        }
        added = [
            delivery(event or f"e-{delivery_id}", sink, delivery_id=delivery_id, **due)
            for delivery_id in ids
        ]
        self.put(added)

    def exchange(
        self, results: Iterable[SendResult], limits: Mapping[str, int]
    ) -> Sequence[Delivery]:
        results = list(results)
        self.results += results
        given = super().exchange(results, limits)
        self.leased += given
        return given

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
    couriers: Sequence[Supervisor], reached: Callable[[], object], seconds: float = PATIENCE
) -> None:
    """Do what a main thread does for its couriers, until ``reached`` returns true."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not come to pass"
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


class CourierThreads:
    """Has a supervisor whose couriers are threads of this process, which ``until`` drives."""

    pid = 0  # for the supervisor, each courier is this process

    def __init__(self, owner: Owner, orders: Orders, make: Callable[[str], Sink]) -> None:
        self.owner = owner
        self.supervisor = Supervisor(orders, owner)
        self._orders = orders
        self._make = make

    def __enter__(self) -> Self:
        self._started = patch("notbefore.courier.courier_process._start", self._start)
        self._started.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.stop(lambda _seconds: True)
        self._started.stop()

    def _start(self, end: socket.socket, *_: object) -> Self:
        threading.Thread(target=self._run, args=(FrameSocket(end.dup()),), daemon=True).start()
        return self

    def _run(self, frames: FrameSocket) -> None:
        with suppress(ConnectionError):
            while not list(frames.receive()):  # its orders
                wait_for_frame(1.0, frames)
            frames.send(Hello(__version__, SCHEMA_VERSION))
            Courier(
                frames, self._orders, Redactor(["s3cret"]), lambda name, *_: self._make(name)
            ).run()
        frames.close()

    def kill(self) -> None:
        """Do nothing: the supervisor has closed the socket, which ends the thread."""

    def wait(self, _seconds: float) -> int:
        return -9

    @property
    def replaced(self) -> bool:
        """Whether a courier was replaced because a sink hung."""
        return "hung" in self.supervisor.figures.starts

    def until(self, reached: Callable[[], object]) -> None:
        serve([self.supervisor], reached)

    def to_end(self) -> None:
        """Let the courier do everything that is due."""
        self.until(lambda: self.owner.next_due() > 0 and not self.owner.under_way())
