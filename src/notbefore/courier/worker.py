"""``Worker`` divides the deliveries of one sink among threads.

An event must not wait for a slow attempt of another event. So a sink that starts programs has a
thread for each event. A sink that sends to a receiver has one thread, with one connection; it gets
another thread only while the attempts of all others are slow. ``SIDE_BY_SIDE`` of its settings is
the largest number of threads. The outbox gives one delivery of an event at a time, so those stay in
order.
"""

from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Final

from notbefore.config.sinks import Messages, SinkConfig
from notbefore.core.delivery import Delivery
from notbefore.core.outbox import SendResult
from notbefore.courier.results import Results
from notbefore.courier.sink import Sink
from notbefore.courier.sink_thread import QueuedDelivery, SinkThread
from notbefore.net.redact import Redactor

if TYPE_CHECKING:
    from notbefore.courier.templates import TemplateRenderer

BATCH: Final = 16  # deliveries that a quick sink has at a time at most


class Worker:
    """The main thread uses it.

    ``make_sink`` makes a sink, and ``report`` is called with each result, in the threads of the
    sink. ``renderer`` renders the user's templates, if there are any.
    """

    def __init__(
        self,
        name: str,
        config: SinkConfig,
        make_sink: Callable[[], Sink],
        report: Callable[[SendResult], None],
        redact: Redactor,
        *,
        messages: Messages,
        renderer: "TemplateRenderer | None" = None,
    ) -> None:
        self._config = config
        self._messages = messages
        self._renderer = renderer
        self._make_sink = make_sink
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

        slow = sum(thread.is_slow and not thread.hangs for thread in self._threads)
        if slow >= usable:
            return usable
        if slow == 0 and any(thread.is_quick for thread in self._threads):
            return BATCH
        return slow + 1

    @property
    def hangs(self) -> bool:
        """Whether an attempt hangs, so that its thread can no longer be used."""
        return any(thread.hangs for thread in self._threads)

    @property
    def template_failures(self) -> int:
        """How often a template of the user's has failed."""
        return self._results.template_failures

    def give(self, deliveries: Iterable[Delivery], ahead: float) -> None:
        """Send the deliveries of a batch.

        ``ahead``: seconds by which this machine's clock is ahead of the agent's time.
        """
        shares: dict[SinkThread, list[QueuedDelivery]] = {}
        for delivery in deliveries:
            thread = self._free_thread(shares)
            if thread is None:  # an attempt has become slow since ``limit`` was reported
                self._report(SendResult(delivery.delivery_id, "returned"))
            else:
                shares.setdefault(thread, []).append(QueuedDelivery(delivery, ahead))
        for thread, share in shares.items():
            thread.give(share)

    def watch(self) -> list[SendResult]:
        """Return failures of attempts that hang, and return what waits behind slow attempts."""
        results: list[SendResult] = []
        for thread in self._threads:
            overdue = thread.overdue()
            if overdue is not None:
                results.append(overdue)
            if thread.is_slow or thread.hangs:
                results += thread.take_back()
        return results

    def _free_thread(self, chosen: Container[SinkThread]) -> SinkThread | None:
        """Return a thread for the next delivery; ``None`` if all are busy and no more may start.

        ``chosen``: those that were chosen for others of this batch.
        """
        for thread in self._threads:
            if thread.is_idle and thread not in chosen:
                return thread
        settings = self._config.settings
        if not settings.ONCE:
            for thread in self._threads:
                if not thread.is_slow and not thread.hangs:
                    return thread
        if len(self._threads) == settings.SIDE_BY_SIDE:
            return None
        thread = SinkThread(
            self._config,
            self._make_sink,
            self._report,
            self._results,
            self._redact,
            messages=self._messages,
            renderer=self._renderer,
        )
        self._threads.append(thread)
        return thread
