"""``SinkThread`` makes a sink on first use, sends deliveries one after the other, and reports each
result.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from notbefore.config.sinks import Messages, SinkConfig, templates_of
from notbefore.core.delivery import Delivery
from notbefore.core.message import Message
from notbefore.core.outbox import SendResult
from notbefore.courier.results import Results
from notbefore.courier.sink import Receipt, Sink
from notbefore.courier.sinks import secrets_of
from notbefore.errors import NotBeforeError, PluginError, SendError
from notbefore.net.redact import Redactor

if TYPE_CHECKING:
    from notbefore.courier.templates import TemplateRenderer, Templates

GRACE: Final = 5.0  # seconds after a sink's timeout until an attempt counts as hanging
QUICK: Final = 0.25  # seconds; an attempt is quick if it takes less
SLOW: Final = 1.0  # seconds; an attempt is slow once it has taken more


class QueuedDelivery(NamedTuple):
    """A delivery to send."""

    delivery: Delivery
    ahead: float  # seconds by which this machine's clock is ahead of the agent's time


class Attempt(NamedTuple):
    """An attempt to send a delivery."""

    delivery: Delivery
    started: float  # monotonic seconds


class SinkThread:
    """One thread, with a sink of its own. The main thread calls the public methods.

    ``make_sink`` makes the sink, and ``report`` is called with each result, both in this thread.
    ``renderer`` renders the user's templates, if there are any.
    """

    def __init__(
        self,
        config: SinkConfig,
        make_sink: Callable[[], Sink],
        report: Callable[[SendResult], None],
        results: Results,
        redact: Redactor,
        *,
        messages: Messages,
        renderer: "TemplateRenderer | None",
    ) -> None:
        self.is_quick = False  # its last attempt was quick
        self.hangs = False  # its present attempt was reported as hanging
        self._config = config
        self._messages = messages
        self._renderer = renderer
        self._make_sink = make_sink
        self._report = report
        self._results = results
        self._redact = redact
        self._sink: Sink | None = None
        self._templates: Templates | None = None
        self._queue: deque[QueuedDelivery] = deque()  # guarded by ``_queue_grew``
        self._queue_grew = threading.Condition()
        self._queued_count = 0  # of all deliveries so far; only the main thread changes it
        self._ended_count = 0  # of all deliveries so far; only the thread itself changes it
        self._attempt: Attempt | None = None  # the present one
        threading.Thread(target=self._run, name=f"sink-{results.sink}", daemon=True).start()

    # ---- for the main thread

    @property
    def is_idle(self) -> bool:
        """Whether it has reported the results of all its deliveries."""
        return self._queued_count == self._ended_count

    @property
    def is_slow(self) -> bool:
        """Whether its present attempt takes so long that other events must not wait for it."""
        attempt = self._attempt
        return attempt is not None and time.monotonic() - attempt.started > SLOW

    def give(self, share: Collection[QueuedDelivery]) -> None:
        """Queue its share of a batch, all at once.

        So a receiver that asks for a pause gets nothing more of this batch.
        """
        self._queued_count += len(share)
        with self._queue_grew:
            self._queue.extend(share)
            self._queue_grew.notify()

    def take_back(self) -> list[SendResult]:
        """Return the deliveries that it has not begun to send."""
        returned: list[SendResult] = []
        for queued in self._drained():
            self._queued_count -= 1
            returned.append(SendResult(queued.delivery.delivery_id, "returned"))
        return returned

    def overdue(self) -> SendResult | None:
        """Return a failed result for an attempt that hangs, once. Its thread cannot be ended.

        What may be attempted only once is refused: it may have had its effect.
        """
        limit = self._config.settings.timeout.seconds + GRACE
        attempt = self._attempt
        if self.hangs or attempt is None:
            return None
        if time.monotonic() - attempt.started <= limit:
            return None
        self.hangs = True
        error = SendError(
            f"no result after {limit:g} s: given up", permanent=self._config.settings.ONCE
        )
        return self._results.failed(attempt.delivery, error)

    # ---- in its own thread

    def _run(self) -> None:
        while True:
            result = self._result_of(self._next())
            self._end(result)
            if result.retry_after or not self.is_quick:
                # the receiver wants a pause, or has become slow: the outbox chooses again
                self._return_queued()

    def _next(self) -> QueuedDelivery:
        """Wait for a delivery, and take it out of the queue."""
        with self._queue_grew:
            self._queue_grew.wait_for(lambda: self._queue)
            return self._queue.popleft()

    def _end(self, result: SendResult) -> None:
        self._ended_count += 1
        self._report(result)

    def _return_queued(self) -> None:
        for queued in self._drained():
            self._end(SendResult(queued.delivery.delivery_id, "returned"))

    def _drained(self) -> list[QueuedDelivery]:
        """Take all deliveries out of the queue."""
        with self._queue_grew:
            drained = list(self._queue)
            self._queue.clear()
        return drained

    def _result_of(self, queued: QueuedDelivery) -> SendResult:
        """Attempt a delivery."""
        delivery = queued.delivery
        started = time.monotonic()
        self._attempt = Attempt(delivery, started)
        try:
            receipt = self._send(queued)
        except PluginError as error:
            return self._results.failed(delivery, error, unforeseen=error)
        except SendError as error:
            return self._results.failed(delivery, error)
        except NotBeforeError as error:
            # such as a secret that cannot be read, which can be corrected
            return self._results.failed(delivery, SendError(str(error)))
        except Exception as error:  # noqa: BLE001 - a library may raise anything; continue
            cause = f"unforeseen error, please report it: {type(error).__name__}: {error}"
            return self._results.failed(delivery, SendError(cause), unforeseen=error)
        finally:
            self.is_quick = time.monotonic() - started < QUICK
            self._attempt = None
        return self._results.accepted(delivery, receipt)

    def _send(self, queued: QueuedDelivery) -> Receipt:
        now = datetime.now(UTC) - timedelta(seconds=queued.ahead)
        try:
            message = Message.of(queued.delivery, now)
        except msgspec.DecodeError as error:
            raise SendError(f"the record cannot be read: {error}", permanent=True) from None

        message = self._templated(message)
        if self._sink is None:
            for secret in secrets_of(self._config):
                self._redact.add(secret)
            self._sink = self._make_sink()
        try:
            return self._sink.send(message)
        except SendError:
            self._sink.close()
            self._sink = None  # the next one reads the secrets from their files again
            raise

    def _templated(self, message: Message) -> Message:
        """Return the message with the texts of the user's templates, if there are any."""
        if self._renderer is None or not templates_of(self._config, self._messages):
            return message
        if self._templates is None:
            from notbefore.courier.templates import Templates  # Jinja2, 2 MB

            self._templates = Templates(self._config, self._messages, self._renderer)
        rendering = self._templates.render(message)
        for failure in rendering.failures:
            self._results.template_failed(f"{failure.key}: {failure.text}")
        return rendering.message
