"""``Worker``: the one thread of a sink. It makes the sink on first use, sends, and says what came of each delivery."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from notbefore.core.outbox import GivenDelivery, SendResult
from notbefore.core.text import shortened
from notbefore.courier.message import Message, Receipt, Sink
from notbefore.errors import NotBeforeError, SendError

REST_AFTER: Final = 5.0  # seconds without a delivery: those of a wave find the connection open
QUICK: Final = 0.25  # seconds: a sink that takes less for a message may be given more at once
LOG_EVERY: Final = 60.0  # seconds between two lines about failures of one kind
MAX_ERROR: Final = 300  # characters of a cause that are kept

log = logging.getLogger("notbefore.courier")


class Worker:
    """``make`` makes the sink, and ``report`` takes each result, in the worker's thread.

    ``secrets``: those that the sink would be made with now. ``redact`` removes secrets from what is kept.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        report: Callable[[str, SendResult], None],
        redact: Callable[[str], str],
        secrets: Callable[[], list[str]] = list,
    ) -> None:
        self.name = name
        self.quick = False  # the last attempt took next to no time: more may be given at once
        self._make = make
        self._report = report
        self._redact = redact
        self._secrets = secrets
        self._made_with: list[str] = []
        self._sink: Sink | None = None
        self._jobs: queue.SimpleQueue[Sequence[GivenDelivery]] = queue.SimpleQueue()
        self._under_way: tuple[float, GivenDelivery] | None = None  # since when (monotonic seconds), and what
        self._paused_until = 0.0  # monotonic seconds: the receiver asked for the pause
        self._logged: dict[int, float] = {}  # level -> monotonic seconds of the last line about a failure
        threading.Thread(target=self._run, name=f"sink-{name}", daemon=True).start()

    def give(self, deliveries: Sequence[GivenDelivery]) -> None:
        """Send them after what was given before; each is of another event."""
        self._jobs.put(deliveries)

    def hangs(self, limit: float) -> SendResult | None:
        """What is to be said of the delivery on which it has worked for more than ``limit`` seconds."""
        since, current = self._under_way or (time.monotonic(), None)
        if current is None or time.monotonic() - since <= limit:
            return None
        return self._failed(current, SendError(f"no end after {limit:g} s: given up"))

    def _run(self) -> None:
        while True:
            for delivery in self._next():
                self._report(self.name, self._result_of(delivery))

    def _next(self) -> Sequence[GivenDelivery]:
        """What is to be sent next."""
        if self._sink is not None:
            with suppress(queue.Empty):
                return self._jobs.get(timeout=REST_AFTER)
            self._sink.rest()
        return self._jobs.get()

    def _result_of(self, delivery: GivenDelivery) -> SendResult:
        """Send it; after a Retry-After, give it back."""
        begun = time.monotonic()
        if begun < self._paused_until:
            return SendResult(delivery.delivery_id, "returned")
        self._under_way = begun, delivery
        try:
            return self._accepted(delivery, self._attempt(delivery))
        except SendError as error:
            if error.retry_after is not None:
                self._paused_until = time.monotonic() + error.retry_after
            return self._failed(delivery, error)
        except Exception as error:  # a library of a sink may raise anything; the other sinks must go on
            log.exception("sink %s: this should not have happened", self.name)
            return self._failed(delivery, SendError(f"{type(error).__name__}: {error}"))
        finally:
            self.quick = time.monotonic() - begun < QUICK
            self._under_way = None

    def _attempt(self, delivery: GivenDelivery) -> Receipt:
        """Send it; what is refused while a secret has changed is tried once more with the new one."""
        try:
            return self._send(delivery)
        except SendError as error:
            if self._sink is None or self._secrets() == self._made_with:
                raise
            self._sink.close()
            self._sink = None
            if not error.permanent:
                raise
        self._under_way = time.monotonic(), delivery
        return self._send(delivery)

    def _send(self, delivery: GivenDelivery) -> Receipt:
        try:
            message = Message.of(delivery)
        except msgspec.DecodeError as error:
            raise SendError(f"the record cannot be read: {error}", permanent=True) from None
        try:
            if self._sink is None:
                self._made_with = self._secrets()  # read first: a change in between is noticed
                self._sink = self._make()
            return self._sink.send(message)
        except SendError:
            raise
        except NotBeforeError as error:  # such as a secret that cannot be read: that can be put right
            raise SendError(str(error)) from None

    # ---- what is said of it

    def _accepted(self, delivery: GivenDelivery, receipt: Receipt) -> SendResult:
        if self._logged:
            self._logged = {}
            log.info("sink %s accepts messages again", self.name)
        log.debug("sink %s accepted %s (%s)", self.name, _what(delivery), delivery.delivery_id[:8])
        return SendResult(
            delivery_id=delivery.delivery_id,
            outcome="accepted",
            thread=receipt.thread,
            repeat=receipt.repeat,
        )

    def _failed(self, delivery: GivenDelivery, error: SendError) -> SendResult:
        cause = shortened(self._redact(str(error)), MAX_ERROR)
        again = not error.permanent or (error.may_pass and delivery.patience > 0)
        level, text = logging.WARNING, f"did not accept {_what(delivery)} ({cause}): it will be tried again"
        if not (again or delivery.repetition):
            level = logging.ERROR
            way_out = f"correct the cause, then, on an agent, `notbefore outbox retry {delivery.delivery_id[:8]}`"
            text = f"refused {_what(delivery)} for good ({cause}): {way_out}"
        if time.monotonic() - self._logged.get(level, -LOG_EVERY) >= LOG_EVERY:
            self._logged[level] = time.monotonic()
            log.log(level, "sink %s %s", self.name, text)
        if again:
            return SendResult(delivery.delivery_id, "failed", cause, error.retry_after)
        return SendResult(delivery.delivery_id, "refused", cause)


def _what(delivery: GivenDelivery) -> str:
    """The delivery, in a log line."""
    repeated = "the repetition of " if delivery.repetition else ""
    return f"{repeated}`{delivery.kind}` of event {delivery.event_key}"
