"""``CourierProcess`` starts one courier, exchanges frames with it over a socket, and ends it."""

import math
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from notbefore.core.delivery import Delivery
from notbefore.core.outbox import SendResult
from notbefore.courier.child import start_child
from notbefore.courier.frames import FrameSocket
from notbefore.courier.orders import REPORT_INTERVAL, Batch, Orders

REAP_SECONDS: Final = 1.0  # to wait for the end of a killed process
KILLED: Final = -9  # the exit code of a killed process
MODULE: Final = "notbefore.courier"
# they contain secrets, even if notbefore does not use them
_OTLP_HEADERS: Final = re.compile("OTEL_EXPORTER_OTLP_(.*_)?HEADERS")


def environment(orders: Orders) -> dict[str, str]:
    """Return the agent's variables without those that may be secret.

    The courier gets the secrets through the socket.
    """
    variables: dict[str, str] = {}
    for name, value in os.environ.items():
        is_ours = name.startswith("NOTBEFORE_")
        is_secret = name in orders.hidden or _OTLP_HEADERS.fullmatch(name)
        if not is_ours and not is_secret:
            variables[name] = value
    return variables


class CourierProcess:
    """A courier. The constructor starts it, and sends it ``frame``, its orders. Only ``end`` waits.

    ``lock``: the file descriptor of the agent's lock, which the courier also holds. Raises
    ``OSError``.
    """

    def __init__(self, frame: bytes, variables: Mapping[str, str], lock: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = start_child(MODULE, theirs, variables, lock)
            except OSError:
                ours.close()
                raise
        now = time.monotonic()
        self.pid: Final = self._process.pid
        self.frames: Final = FrameSocket(ours)
        self.works = False  # it has said hello, and is of this version
        self.limits: Mapping[str, int] = {}  # of its last report
        self.template_failures: Mapping[str, int] = {}  # by sink, by its last report
        self.hangs = False  # one of its sinks hangs, by its last report
        self.leave_at = math.inf  # monotonic seconds
        self.last_busy = now  # monotonic seconds
        self.silent = 0  # seconds since its last frame, while this process ran
        self._last_counted = now  # monotonic seconds: when ``silent`` was last increased
        self._held: dict[str, Delivery] = {}  # its deliveries by id
        with suppress(ConnectionError):  # it has ended, and ``received`` raises too
            self.frames.send_frame(frame)

    def received(self) -> Iterator[bytes]:
        """Yield the frames since the last call; raises ``ConnectionError`` once it has ended."""
        for frame in self.frames.receive():
            self.silent = 0
            yield frame
        # at most one second per call counts: a courier cannot answer while the machine is frozen
        now = time.monotonic()
        if now - self._last_counted >= REPORT_INTERVAL:
            self._last_counted = now
            self.silent += 1

    @property
    def held(self) -> Sequence[str]:
        """The ids of the deliveries that it has."""
        return list(self._held)

    @property
    def held_sinks(self) -> Sequence[str]:
        """The sinks of these deliveries."""
        return sorted({delivery.sink for delivery in self._held.values()})

    @property
    def holds_once(self) -> bool:
        """Whether it has a delivery that may be attempted only once."""
        return any(delivery.once for delivery in self._held.values())

    def give(self, deliveries: Iterable[Delivery], now: float) -> None:
        """Give it deliveries; ``now``: Unix seconds by the clock that the messages go by."""
        batch = Batch(list(deliveries), now)
        for delivery in batch.deliveries:
            self._held[delivery.delivery_id] = delivery
        self.frames.send(batch)

    def note(self, results: Iterable[SendResult]) -> None:
        """Note that it has reported these results: it no longer has the deliveries."""
        for result in results:
            self._held.pop(result.delivery_id, None)

    @property
    def leaves(self) -> bool:
        """Whether it gets no more deliveries."""
        return self.leave_at < math.inf

    def leave(self, seconds: float) -> None:
        """Give it no more deliveries, and these seconds at most for the attempts under way."""
        self.leave_at = min(self.leave_at, time.monotonic() + seconds)

    def end(self) -> int:
        """Kill it, unless it has ended; return its exit code, negative for a signal."""
        self.frames.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(REAP_SECONDS)
        return KILLED  # one of its threads waits for a disk: the process ends when the disk answers
