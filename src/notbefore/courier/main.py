"""``Courier`` lets its sinks send the deliveries that its agent gives, and reports the results. It
owns nothing.

It is a separate process (``notbefore.courier``): the imports of its sinks cost the agent no memory,
and it can be killed if they hang. Its main thread talks to the agent; each sink has threads of its
own. An attempt that does not end is reported after its deadline, and the agent replaces the
courier.
"""

import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from notbefore.config.sinks import Messages, SinkConfig, templates_of
from notbefore.core.outbox import SendResult
from notbefore.courier import sinks
from notbefore.courier.frames import FrameSocket, wait_for_frame
from notbefore.courier.orders import REPORT_INTERVAL, Batch, CourierReport, Orders
from notbefore.courier.sink import Sink
from notbefore.courier.worker import Worker
from notbefore.net.redact import Redactor

if TYPE_CHECKING:
    from notbefore.core.delivery import Delivery
    from notbefore.courier.templates import TemplateRenderer

GATHER_SECONDS: Final = 0.005  # between two reports with results


class Courier:
    """The main thread of a courier.

    ``make_sink`` is called in that sink's thread; ``redact`` removes secrets from errors.
    """

    def __init__(
        self,
        frames: FrameSocket,
        orders: Orders,
        redact: Redactor,
        make_sink: Callable[[str, SinkConfig, Messages], Sink] = sinks.make,
    ) -> None:
        self._frames = frames
        # not a pipe: not every system can wait for one
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        self._results: deque[SendResult] = deque()  # for the next report
        self._last_report = 0.0  # monotonic seconds
        self._workers: dict[str, Worker] = {}
        renderer = _renderer_of(orders)
        for name, config in orders.sinks.items():
            make = partial(make_sink, name, config, orders.messages)
            self._workers[name] = Worker(
                name,
                config,
                make,
                self._add_result,
                redact,
                messages=orders.messages,
                renderer=renderer,
            )

    def run(self) -> NoReturn:
        """Work until the agent ends this process.

        Raises ``ConnectionError`` once the agent has ended.
        """
        with self._reader, self._writer:
            while True:
                for frame in self._frames.receive():
                    self._distribute(msgspec.msgpack.decode(frame, type=Batch))
                for worker in self._workers.values():
                    self._results.extend(worker.watch())
                self._report()
                self._wait()

    def _distribute(self, batch: Batch) -> None:
        ahead = time.time() - batch.time
        by_sink: defaultdict[str, list[Delivery]] = defaultdict(list)
        for delivery in batch.deliveries:
            by_sink[delivery.sink].append(delivery)
        for sink, deliveries in by_sink.items():
            self._workers[sink].give(deliveries, ahead)

    def _report(self) -> None:
        """Report results and how many deliveries the sinks may have, unless the last report was
        just sent.
        """
        pause = REPORT_INTERVAL
        if self._results:
            pause = GATHER_SECONDS
        if time.monotonic() - self._last_report < pause:
            return
        results: list[SendResult] = []
        while self._results:
            results.append(self._results.popleft())
        limits = {name: worker.limit for name, worker in self._workers.items()}
        hangs = any(worker.hangs for worker in self._workers.values())
        failures = {name: worker.template_failures for name, worker in self._workers.items()}
        self._frames.send(CourierReport(results, limits, hangs, failures))
        self._last_report = time.monotonic()

    def _add_result(self, result: SendResult) -> None:
        """Keep a result for the next report, and wake the main thread. Called in sink threads."""
        self._results.append(result)
        with suppress(OSError):  # full: the main thread wakes anyway. Closed: the courier ends
            self._writer.send(b".")

    def _wait(self) -> None:
        """Wait for a frame or for a result."""
        if self._results:  # more results come soon: report them together
            wait_for_frame(GATHER_SECONDS, self._frames)
            return
        wait_for_frame(REPORT_INTERVAL, self._frames, self._reader)
        with suppress(BlockingIOError):
            self._reader.recv(4096)


def _renderer_of(orders: Orders) -> "TemplateRenderer | None":
    """Return what renders the user's templates, for all sinks; ``None`` if there are none."""
    if not any(templates_of(sink, orders.messages) for sink in orders.sinks.values()):
        return None
    from notbefore.courier.render_process import RenderProcess  # Jinja2, 2 MB

    return RenderProcess()
