"""``Results`` makes the result of each attempt of one sink, and its log line."""

import logging
import threading
import time
from typing import Final, Literal

from notbefore.core.delivery import Delivery
from notbefore.core.outbox import SendResult
from notbefore.core.text import shortened
from notbefore.courier.sink import Receipt
from notbefore.errors import SendError
from notbefore.net.redact import Redactor

LOG_EVERY: Final = 60.0  # seconds between two log lines about failures of the same level
MAX_CAUSE: Final = 8_000  # characters of a cause that are redacted
SHORT_ID: Final = 8  # characters of a delivery's id that identify it for a person
MAX_ERROR: Final = 300  # characters of the redacted cause that are kept

log = logging.getLogger("notbefore.courier")


class Results:
    """Shared by all threads of one sink.

    ``sink`` is its name; ``redact`` removes secrets from errors.
    """

    def __init__(self, sink: str, redact: Redactor) -> None:
        self.sink = sink
        self._redact = redact
        self._lock = threading.Lock()  # of what is logged and counted
        self._logged: dict[int, float] = {}  # log level -> monotonic seconds of the last line
        self._template_logged = -LOG_EVERY  # monotonic seconds of the last line about a template
        self.template_failures = 0  # changed under the lock

    def accepted(self, delivery: Delivery, receipt: Receipt) -> SendResult:
        """Return the result of a delivery that the receiver accepted."""
        with self._lock:
            has_failed = bool(self._logged)
            self._logged.clear()
        if has_failed:
            log.info("sink %s accepts messages again", self.sink)
        log.debug(
            "sink %s accepted %s (%s)",
            self.sink,
            _description(delivery),
            delivery.delivery_id[:SHORT_ID],
        )
        return SendResult(
            delivery.delivery_id,
            outcome="accepted",
            thread=receipt.thread,
            repeat=receipt.repeat,
        )

    def failed(
        self, delivery: Delivery, error: SendError, unforeseen: Exception | None = None
    ) -> SendResult:
        """Return the result of a failed attempt. The traceback of ``unforeseen`` is logged."""
        # redact before shortening: a part of a secret would not be recognized
        redacted = self._redact(str(error)[:MAX_CAUSE])
        cause = shortened(redacted, MAX_ERROR)
        if error.permanent and delivery.state != "repeating":
            level = logging.ERROR
            command = f"outbox retry {delivery.delivery_id[:SHORT_ID]}"
            todo = f"`notbefore {command}`, or in a fleet `notbefore fleet {command}`"
            refusal = f"refused {_description(delivery)} for good ({cause})"
            text = f"{refusal}: correct the cause, then run {todo}"
        else:
            level = logging.WARNING
            text = f"did not accept {_description(delivery)} ({cause}): it will be tried again"
        if self._may_log(level):
            log.log(level, "sink %s %s", self.sink, text, exc_info=unforeseen)

        outcome: Literal["failed", "refused"] = "failed"
        if error.permanent:
            outcome = "refused"
        return SendResult(
            delivery.delivery_id,
            outcome=outcome,
            error=cause,
            retry_after=error.retry_after,
            thread=error.thread,
            by_hand=error.by_hand,
        )

    def template_failed(self, failure: str) -> None:
        """Count that a template failed, and log it once a minute at most."""
        now = time.monotonic()
        with self._lock:
            self.template_failures += 1
            if now - self._template_logged < LOG_EVERY:
                return
            self._template_logged = now
        cause = shortened(self._redact(failure[:MAX_CAUSE]), MAX_ERROR)
        log.error("sink %s: %s: the built-in text is sent instead", self.sink, cause)

    def _may_log(self, level: int) -> bool:
        """Whether the last line of this level is old enough; if so, note that a line follows."""
        now = time.monotonic()
        with self._lock:
            if now - self._logged.get(level, -LOG_EVERY) < LOG_EVERY:
                return False
            self._logged[level] = now
            return True


def _description(delivery: Delivery) -> str:
    """Return a description of the delivery for a log line."""
    description = f"`{delivery.kind}` of event {delivery.event_key}"
    if delivery.state == "repeating":
        return f"the repetition of {description}"
    return description
