"""An owner of an outbox for a courier: in memory, on a clock that a test may move; and a courier in this process."""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Self

import msgspec

from notbefore.core.delivery import Delivery
from notbefore.core.outbox import OF_AN_AGENT, Bounds, Outbox, SendResult
from notbefore.courier.main import Courier
from notbefore.courier.message import Sink
from notbefore.courier.orders import Channel, Given, Leave, Orders, Turn, Wake
from notbefore.courier.redact import Redactor
from notbefore.courier.supervisor import Supervisor
from notbefore.store.store import StoredOutbox
from support.box import delivery
from support.messages import message

RECORD = message().line


class Owner(StoredOutbox):
    """What it is asked and answers is kept. It is its own clock."""

    boot_id = ""
    time = staticmethod(time.time)

    def __init__(self, bounds: Bounds = OF_AN_AGENT) -> None:
        self.outbox = Outbox(lambda: 0.0, bounds, patience=0.0)
        super().__init__(self.outbox, threading.Condition(), self, lambda: None, lambda: None)
        self.ahead = 0.0  # seconds by which its clock is ahead
        self.results: list[SendResult] = []
        self.given: list[Delivery] = []
        self.rooms: list[Mapping[str, int]] = []
        self.endings = 0

    def boot_time(self) -> float:
        return time.monotonic() + self.ahead

    def add(self, *ids: str, sink: str = "chat", event: str = "", **fields: object) -> None:
        """Have these delivered; each is of an event of its own, where ``event`` does not say which."""
        wall = time.time()
        due: dict[str, object] = {"created": wall, "due": wall, "expires": wall + 1e6, "record": RECORD, **fields}
        made = [delivery(event or f"e-{one}", sink, delivery_id=one, **due) for one in ids]
        self.put(made)

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int]) -> Sequence[Delivery]:
        results = list(results)
        self.results += results
        self.rooms.append(room)
        given = super().exchange(results, room)
        self.given += given
        return given

    def courier_ended(self) -> None:
        self.endings += 1
        super().courier_ended()

    @property
    def rows(self) -> list[Delivery]:
        return self.outbox.rows.chosen()

    @property
    def left(self) -> dict[str, str]:
        """What is in the outbox: states by id."""
        return {row.delivery_id: row.state for row in self.rows}


def serve(couriers: Sequence[Supervisor], reached: Callable[[], object], seconds: float = 30.0) -> None:
    """Do what a main thread does for its courier, until this is so."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not come to pass"
        read = [one for courier in couriers for one in courier.watched[0]]
        unsent = [one for courier in couriers for one in courier.watched[1]]
        select.select(read, unsent, [], min(0.1, *(courier.patience for courier in couriers)))
        for courier in couriers:
            courier.tick()


class CourierHere:
    """A courier in a thread of this process, whose agent is the test: it says ``leave`` and answers in ``until``."""

    def __init__(self, owner: Owner, orders: Orders, make: Callable[[str], Sink]) -> None:
        self.owner = owner
        self.code: int | None = None
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.courier = Courier(Channel(theirs), orders, Redactor(["s3cret"]), lambda name, *_: make(name))
        self._theirs = theirs
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with suppress(ConnectionError):
            self.code = self.courier.run()
        self._theirs.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self._thread.join(20)

    def leave(self, seconds: float = 20.0) -> None:
        self.channel.send(Leave(seconds))

    def wake(self) -> None:
        self.channel.send(Wake())

    def until(self, reached: Callable[[], object], seconds: float = 20.0) -> None:
        """Answer it until this is so."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, "it did not come to pass"
            select.select([self.channel], [self.channel] if self.channel.unsent else [], [], 0.02)
            try:
                self.channel.flush()
                for frame in self.channel.receive():
                    turn = msgspec.msgpack.decode(frame, type=Turn)
                    self.channel.send(Given(self.owner.exchange(turn.results, turn.room), time.time()))
            except ConnectionError:
                self._thread.join(20)
                assert reached(), "it has ended"

    def to_end(self) -> int | None:
        """Let it do what is due, and leave; returns its exit code."""
        self.until(lambda: (due := self.owner.next_due()) is None or due > 0)
        self.leave()
        self.until(lambda: self.code is not None)
        self.owner.courier_ended()
        return self.code
