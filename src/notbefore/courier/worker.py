"""``Worker``: the one thread of a sink. It makes the sink on first use, sends, and reports the attempts."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.core.outbox import GivenDelivery
from notbefore.courier.message import Message, Receipt, Sink
from notbefore.errors import NotBeforeError, SendError

# what only wrong code raises: the same message fails again tomorrow, so it is a dead letter at once
BUGS: Final = (AttributeError, NameError, NotImplementedError, TypeError)

REST_AFTER: Final = 5.0  # seconds without a delivery: those of a wave find the connection open
QUICK: Final = 0.25  # seconds: a sink that takes less for a message may be given more at once

log = logging.getLogger("notbefore.courier")


class Attempt(Struct, frozen=True):
    """What came of one delivery: a receipt, or an error. Neither: it is given back."""

    delivery: GivenDelivery
    receipt: Receipt | None = None
    error: SendError | None = None

    @property
    def again(self) -> bool:
        """It is to be made again, since the refusal may pass."""
        error = self.error
        return error is not None and (not error.permanent or (error.may_pass and self.delivery.patience > 0))


class Worker:
    """``report`` is called in the worker's thread with each attempt; ``make`` makes the sink there.

    ``secrets``: those that it would be made with now.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        report: Callable[[Attempt], None],
        secrets: Callable[[], list[str]] = list,
    ) -> None:
        self.name = name
        self.quick = False  # the last attempt took next to no time: more may be given at once
        self._make = make
        self._report = report
        self._secrets = secrets
        self._made_with: list[str] = []
        self._sink: Sink | None = None
        self._jobs: queue.SimpleQueue[Sequence[GivenDelivery]] = queue.SimpleQueue()
        self._under_way: tuple[float, GivenDelivery] | None = None  # since when (monotonic seconds), and what
        self._paused_until = 0.0  # monotonic seconds: the receiver asked for the pause
        threading.Thread(target=self._run, name=f"sink-{name}", daemon=True).start()

    def give(self, deliveries: Sequence[GivenDelivery]) -> None:
        """Send them after what was given before; each is of another event."""
        self._jobs.put(deliveries)

    def hangs(self, limit: float) -> GivenDelivery | None:
        """The delivery on which it has worked for more than ``limit`` seconds."""
        since, current = self._under_way or (time.monotonic(), None)
        return current if time.monotonic() - since > limit else None

    def _run(self) -> None:
        while True:
            for delivery in self._next():
                attempt = self._attempt(delivery)
                if attempt.error is not None and attempt.error.retry_after is not None:
                    self._paused_until = time.monotonic() + attempt.error.retry_after
                self._report(attempt)

    def _next(self) -> Sequence[GivenDelivery]:
        """What is to be sent next."""
        if self._sink is not None:
            with suppress(queue.Empty):
                return self._jobs.get(timeout=REST_AFTER)
            self._sink.rest()
        return self._jobs.get()

    def _attempt(self, delivery: GivenDelivery) -> Attempt:
        """Send it; after a Retry-After, give it back."""
        begun = time.monotonic()
        if begun < self._paused_until:
            return Attempt(delivery)
        self._under_way = begun, delivery
        try:
            return self._with_present_secrets(delivery)
        except Exception as error:  # a library of a sink may raise anything; the other sinks must go on
            log.exception("sink %s: this should not have happened", self.name)
            bug = isinstance(error, BUGS)
            text = f"{'a bug in the sink: ' if bug else ''}{type(error).__name__}: {error}"
            return Attempt(delivery, error=SendError(text, permanent=bug))
        finally:
            self.quick = time.monotonic() - begun < QUICK
            self._under_way = None

    def _with_present_secrets(self, delivery: GivenDelivery) -> Attempt:
        found = self._once(delivery)
        if self._sink is None or found.error is None or self._secrets() == self._made_with:
            return found
        # a secret has changed: what was refused with the old one is tried once more with the new one
        self._sink.close()
        self._sink, self._under_way = None, (time.monotonic(), delivery)
        return self._once(delivery) if found.error.permanent else found

    def _once(self, delivery: GivenDelivery) -> Attempt:
        try:
            message = Message.of(delivery)
        except msgspec.DecodeError as error:
            return Attempt(delivery, error=SendError(f"the record cannot be read: {error}", permanent=True))
        try:
            return Attempt(delivery, (self._sink or self._new()).send(message))
        except SendError as error:
            return Attempt(delivery, error=error)
        except NotBeforeError as error:  # such as a secret that cannot be read: that can be put right
            return Attempt(delivery, error=SendError(str(error)))

    def _new(self) -> Sink:
        self._made_with = self._secrets()  # read first: a change in between is noticed
        self._sink = self._make()
        return self._sink
