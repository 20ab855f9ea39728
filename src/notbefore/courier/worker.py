"""``Worker``: the one thread of a sink.

It makes the sink on first use, sends deliveries, and reports each result.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from notbefore.config.sinks import SinkConfig
from notbefore.core.delivery import Delivery
from notbefore.core.message import Message
from notbefore.core.outbox import SendResult
from notbefore.core.text import shortened
from notbefore.courier.sink import Receipt, Sink
from notbefore.errors import NotBeforeError, SendError
from notbefore.net.redact import Redactor, known_secrets

GRACE: Final = 5.0  # seconds after a sink's timeout until an attempt counts as hanging
BATCH: Final = 16  # deliveries that a worker has at a time at most, while its sink is quick
QUICK: Final = 0.25  # seconds; a sink is quick if its last message took less
LOG_EVERY: Final = 60.0  # seconds between two log lines about failures of the same level
MAX_CAUSE: Final = 8_000  # characters of a cause that are redacted
MAX_ERROR: Final = 300  # characters of the redacted cause that are kept

log = logging.getLogger("notbefore.courier")


class Worker:
    """``make`` makes the sink, and ``report`` is called with each result, in the worker's thread.

    ``redact`` removes secrets from errors.
    """

    def __init__(
        self,
        name: str,
        config: SinkConfig,
        make: Callable[[], Sink],
        report: Callable[[SendResult], None],
        redact: Redactor,
    ) -> None:
        self._name = name
        self._config = config
        self._make = make
        self._report = report
        self._redact = redact
        self._sink: Sink | None = None
        self._jobs: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._under_way: tuple[float, Delivery] | None = None  # its start in monotonic seconds
        self._hangs = False  # its present attempt was reported as hanging
        self._ahead = 0.0  # see ``give``
        self._quick = False  # the last attempt took less than ``QUICK``
        self._logged: dict[int, float] = {}  # log level -> monotonic seconds of the last line
        threading.Thread(target=self._run, name=f"sink-{name}", daemon=True).start()

    # ---- for the main thread

    @property
    def limit(self) -> int:
        """The number of deliveries that it may have at a time."""
        several = self._quick and not self._config.settings.ONCE
        return 0 if self._hangs else BATCH if several else 1

    def give(self, delivery: Delivery, ahead: float) -> None:
        """Queue a delivery.

        ``ahead``: seconds by which this machine's clock is ahead of the agent's time.
        """
        self._ahead = ahead
        self._jobs.put(delivery)

    def overdue(self) -> SendResult | None:
        """Return a failed result for an attempt that hangs, once. Its thread cannot be ended.

        What may be attempted only once is refused: nobody knows how far it came.
        """
        limit = self._config.settings.timeout.seconds + GRACE
        if (
            self._hangs
            or (under_way := self._under_way) is None
            or time.monotonic() - under_way[0] <= limit
        ):
            return None
        self._hangs = True
        error = SendError(
            f"no result after {limit:g} s: given up", permanent=self._config.settings.ONCE
        )
        return self._failed(under_way[1], error)

    # ---- in its own thread

    def _run(self) -> None:
        while True:
            result = self._result_of(self._jobs.get())
            self._report(result)
            # return the others: the receiver wants a pause
            while result.retry_after and not self._jobs.empty():
                self._report(SendResult(self._jobs.get().delivery_id, "returned"))

    def _result_of(self, delivery: Delivery) -> SendResult:
        begun = time.monotonic()
        self._under_way = begun, delivery
        try:
            return self._accepted(delivery, self._send(delivery))
        except SendError as error:
            return self._failed(delivery, error)
        except (
            NotBeforeError
        ) as error:  # such as a secret that cannot be read, which can be corrected
            return self._failed(delivery, SendError(str(error)))
        except Exception as error:  # noqa: BLE001 - a library may raise anything; the worker must continue
            said = SendError(f"unforeseen error, please report it: {type(error).__name__}: {error}")
            return self._failed(delivery, said, unforeseen=error)
        finally:
            self._quick = time.monotonic() - begun < QUICK
            self._under_way = None

    def _send(self, delivery: Delivery) -> Receipt:
        try:
            message = Message.of(delivery, datetime.now(UTC) - timedelta(seconds=self._ahead))
        except msgspec.DecodeError as error:
            raise SendError(f"the record cannot be read: {error}", permanent=True) from None
        if self._sink is None:
            for secret in known_secrets(self._config):
                self._redact.add(secret)
            self._sink = self._make()
        try:
            return self._sink.send(message)
        except SendError:
            self._sink.close()
            self._sink = None  # the next one reads the secrets from their files again
            raise

    # ---- results, and log lines

    def _accepted(self, delivery: Delivery, receipt: Receipt) -> SendResult:
        if self._logged:
            self._logged = {}
            log.info("sink %s accepts messages again", self._name)
        log.debug("sink %s accepted %s (%s)", self._name, _what(delivery), delivery.delivery_id[:8])
        return SendResult(
            delivery.delivery_id, "accepted", thread=receipt.thread, repeat=receipt.repeat
        )

    def _failed(
        self, delivery: Delivery, error: SendError, unforeseen: Exception | None = None
    ) -> SendResult:
        cause = shortened(self._redact(str(error)[:MAX_CAUSE]), MAX_ERROR)
        again = not error.permanent
        level, text = (
            logging.WARNING,
            f"did not accept {_what(delivery)} ({cause}): it will be tried again",
        )
        if not (again or delivery.state == "repeating"):
            level = logging.ERROR
            way_out = (
                "correct the cause, then, on an agent, `notbefore outbox retry"
                f" {delivery.delivery_id[:8]}`"
            )
            text = f"refused {_what(delivery)} for good ({cause}): {way_out}"
        if time.monotonic() - self._logged.get(level, -LOG_EVERY) >= LOG_EVERY:
            self._logged[level] = time.monotonic()
            log.log(level, "sink %s %s", self._name, text, exc_info=unforeseen)
        return SendResult(
            delivery.delivery_id,
            "failed" if again else "refused",
            cause,
            error.retry_after,
            by_hand=error.by_hand,
        )


def _what(delivery: Delivery) -> str:
    """Return a description of the delivery for a log line."""
    repeated = "the repetition of " if delivery.state == "repeating" else ""
    return f"{repeated}`{delivery.kind}` of event {delivery.event_key}"
