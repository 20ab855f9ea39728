"""``Worker``: divides the deliveries of one sink among threads.

An event must not wait for a slow attempt of another event. So a sink that starts programs starts
one for each event at once. A sink that sends to a receiver has one thread, one connection, and a
second one only while an attempt of the first is slow; and so on. ``SIDE_BY_SIDE`` of its settings
is the bound. The outbox gives one delivery of an event at a time, so those stay in order.
"""

from collections.abc import Callable
from typing import Final

from notbefore.config.sinks import SinkConfig
from notbefore.core.delivery import Delivery
from notbefore.core.outbox import SendResult
from notbefore.courier.results import Results
from notbefore.courier.sink import Sink
from notbefore.courier.sink_thread import Job, SinkThread
from notbefore.net.redact import Redactor

BATCH: Final = 16  # deliveries that a quick sink has at a time at most


class Worker:
    """Used in the main thread.

    ``make`` makes a sink, and ``report`` is called with each result, in the threads of the sink.
    """

    def __init__(
        self,
        name: str,
        config: SinkConfig,
        make: Callable[[], Sink],
        report: Callable[[SendResult], None],
        redact: Redactor,
    ) -> None:
        self._config = config
        self._make = make
        self._report = report
        self._redact = redact
        self._results = Results(name, redact)
        self._threads: list[SinkThread] = []

    @property
    def limit(self) -> int:
        """The number of deliveries that it may have at a time."""
        settings = self._config.settings
        hanging = sum(thread.hangs for thread in self._threads)
        usable = settings.SIDE_BY_SIDE - hanging
        if settings.ONCE:
            return usable

        busy = sum(thread.is_slow and not thread.hangs for thread in self._threads)
        if busy >= usable:
            return usable
        if busy == 0 and any(thread.is_quick for thread in self._threads):
            return BATCH
        return busy + 1

    @property
    def hangs(self) -> bool:
        """Whether one of its threads cannot be used any more."""
        return any(thread.hangs for thread in self._threads)

    def give(self, delivery: Delivery, ahead: float) -> None:
        """Send a delivery.

        ``ahead``: seconds by which this machine's clock is ahead of the agent's time.
        """
        thread = self._free_thread()
        if thread is None:  # an attempt has become slow since ``limit`` was reported
            self._report(SendResult(delivery.delivery_id, "returned"))
        else:
            thread.give(Job(delivery, ahead))

    def watch(self) -> list[SendResult]:
        """Return the results of attempts that hang, and what waits behind slow ones."""
        results: list[SendResult] = []
        for thread in self._threads:
            overdue = thread.overdue()
            if overdue is not None:
                results.append(overdue)
            if thread.is_slow or thread.hangs:
                results += thread.take_back()
        return results

    def _free_thread(self) -> SinkThread | None:
        """Return a thread for the next delivery; ``None`` if there are no more."""
        for thread in self._threads:
            if thread.is_idle:
                return thread
        if not self._config.settings.ONCE:
            for thread in self._threads:
                if not thread.is_slow and not thread.hangs:
                    return thread
        if len(self._threads) == self._config.settings.SIDE_BY_SIDE:
            return None
        thread = SinkThread(self._config, self._make, self._report, self._results, self._redact)
        self._threads.append(thread)
        return thread
