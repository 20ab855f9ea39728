"""``Worker``: the one thread of a sink. It makes the sink on first use, sends, and reports the results."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.delivery import Delivery, patient_until
from notbefore.courier.message import BatchSink, Message, Receipt, RestingSink, Sink, Usual
from notbefore.errors import NotBeforeError, SendError

# what only wrong code raises: the same message fails again tomorrow, so it is a dead letter at once
BUGS: Final = (AttributeError, NameError, NotImplementedError, TypeError)

REST_AFTER: Final = 5.0  # seconds without a delivery: those of a wave find the connection open

log = logging.getLogger("notbefore.courier")


class SendAttempt(Struct, frozen=True):
    """What came of one attempt: a receipt, or an error; neither where another VM notifies."""

    delivery: Delivery
    receipt: Receipt | None = None
    error: SendError | None = None


class Checks(Struct, frozen=True):
    """What a worker asks, in its thread."""

    secrets: Callable[[], list[str]] = list  # those that the sink would be made with now
    usual: Callable[[Message], Usual | None] = lambda _message: None  # what the history says of such events
    patient: bool = True  # what is critical is tried again where a refusal may pass
    others_notify: Callable[[Delivery], bool] = lambda _delivery: False  # a VM that comes before this one sends it


def _patient(attempt: SendAttempt, now: float) -> SendAttempt:
    """The attempt, as one to be made again where the refusal may pass, and the delivery is worth it."""
    error = attempt.error
    if error is None or not (error.permanent and error.may_pass) or now >= patient_until(attempt.delivery):
        return attempt
    return SendAttempt(attempt.delivery, None, SendError(str(error), retry_after=error.retry_after))


class Worker:
    """``report`` is called in the worker's thread with each attempt; ``make`` makes the sink there.

    ``batch``: how many deliveries are handed over at once, to a sink that takes several.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        report: Callable[[SendAttempt], None],
        batch: int = 1,
        checks: Checks = Checks(),  # noqa: B008 - frozen
    ) -> None:
        self.name = name
        self.quick = False  # the last attempt took next to no time: more may be given at once
        self._make = make
        self._report = report
        self._batch = batch
        self._checks = checks
        self._made_with: list[str] = []
        self._sink: Sink | None = None
        self._jobs: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._waiting: dict[str, Delivery] = {}
        self._since: float | None = None
        self._current: list[Delivery] = []
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def give(self, deliveries: Sequence[Delivery]) -> None:
        """Send them after what was given before. All deliveries of an event are given together: see ``_held_back``."""
        self._waiting.update({one.delivery_id: one for one in deliveries})
        for one in deliveries:
            self._jobs.put(one)

    def leave(self) -> None:
        """End the thread, once it has sent what it was given."""
        self._jobs.put(None)

    def abandon(self) -> list[Delivery]:
        """Give up the thread, which hangs; returns the deliveries that it was given and has not begun."""
        begun, left = {one.delivery_id for one in self._current}, list(self._waiting.values())
        self._waiting = {}
        self.leave()
        return [one for one in left if one.delivery_id not in begun]

    @property
    def busy(self) -> int:
        """How many deliveries it was given, and has not reported."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """The thread has not ended."""
        return self._thread.is_alive()

    def hangs(self, limit: float) -> list[Delivery]:
        """The deliveries on which it has worked for more than ``limit`` seconds."""
        since, current = self._since, self._current
        return current if since is not None and time.monotonic() - since > limit else []

    def _run(self) -> None:
        while (first := self._next()) is not None:
            # what was taken back by `abandon`, another worker has
            given = [one for one in (first, *self._more()) if self._waiting.get(one.delivery_id) is one]
            if not given:
                continue
            self._current, self._since = given, time.monotonic()
            try:
                mine = [one for one in given if not self._checks.others_notify(one)]
                self._since = time.monotonic()  # the others had time of their own
                attempts = [SendAttempt(one) for one in given if one not in mine]
                if mine:
                    attempts += self._attempts(mine)
            except Exception as error:  # a library of a sink may raise anything; the other sinks must go on
                log.exception("sink %s: this should not have happened", self.name)
                bug = isinstance(error, BUGS)
                text = f"{'a bug in the sink: ' if bug else ''}{type(error).__name__}: {error}"
                attempts = [SendAttempt(one, None, SendError(text, permanent=bug)) for one in given]
            if self._checks.patient:
                attempts = [_patient(attempt, time.time()) for attempt in attempts]
            self.quick = time.monotonic() - self._since < 0.25  # noqa: PLR2004 - a quarter of a second
            self._since, self._current = None, []
            for attempt in [*attempts, *self._held_back(attempts)]:
                expected = self._waiting.pop(attempt.delivery.delivery_id, None) is not None
                if expected or attempt.receipt is not None:  # abandoned, and failed late: it is tried again already
                    self._report(attempt)
        if self._sink is not None:
            self._sink.close()

    def _next(self) -> Delivery | None:
        """The next delivery; ``None``: there is none any more."""
        if isinstance(self._sink, RestingSink):
            with suppress(queue.Empty):
                return self._jobs.get(timeout=REST_AFTER)
            self._sink.rest()
        return self._jobs.get()

    def _held_back(self, attempts: list[SendAttempt]) -> list[SendAttempt]:
        """Return the deliveries queued behind a failed one of the same event, so that the order per event is kept.

        After a Retry-After, return everything that is queued.
        """
        done = {attempt.delivery.delivery_id for attempt in attempts}
        again = [(one.delivery.event_key, one.error) for one in attempts if one.error and not one.error.permanent]
        failed = {event_key for event_key, _ in again}
        pause = max((error.retry_after or 0.0 for _, error in again), default=0.0)
        text = "the receiver asked for a pause" if pause else "an earlier one of the same event is to be sent first"
        error = SendError(text, retry_after=pause or None)
        return [
            SendAttempt(one, None, error)
            for one in list(self._waiting.values())
            if (pause or one.event_key in failed) and one.delivery_id not in done
        ]

    def _more(self) -> Iterator[Delivery]:
        """The deliveries that can be sent together with the first one."""
        for _ in range(self._batch - 1):
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is None:
                self._jobs.put(None)  # the end comes after them
                return
            yield job

    def _attempts(self, given: list[Delivery]) -> list[SendAttempt]:
        found = self._once(given)
        if self._sink is None or not any(one.error for one in found) or self._checks.secrets() == self._made_with:
            return found
        # a secret has changed: what was refused with the old one is tried once more with the new one
        self._sink.close()
        self._sink, self._since = None, time.monotonic()
        refused = [one for one in found if one.error and one.error.permanent]
        again = self._once([one.delivery for one in refused]) if refused else []
        return [one for one in found if one not in refused] + again

    def _once(self, given: list[Delivery]) -> list[SendAttempt]:
        try:
            sink = self._sink or self._new()
        except NotBeforeError as error:  # such as a secret that cannot be read: that can be put right
            return [SendAttempt(one, None, SendError(str(error))) for one in given]
        opened: dict[str, Message] = {}
        found: list[SendAttempt] = []
        for one in given:
            try:
                message = Message.of(one)
                opened[one.delivery_id] = replace(message, usual=self._checks.usual(message))
            except msgspec.DecodeError as error:
                found.append(SendAttempt(one, None, SendError(f"the record cannot be read: {error}", permanent=True)))
        outcomes = dict(zip(opened, self._send(sink, list(opened.values())), strict=True))
        for one in given:
            outcome = outcomes.get(one.delivery_id)
            if outcome is not None:
                found.append(
                    SendAttempt(one, *((None, outcome) if isinstance(outcome, SendError) else (outcome, None)))
                )
        return found

    def _new(self) -> Sink:
        self._made_with = self._checks.secrets()  # read first: a change in between is noticed
        self._sink = self._make()
        return self._sink

    @staticmethod
    def _send(sink: Sink, messages: list[Message]) -> list[Receipt | SendError]:
        if isinstance(sink, BatchSink):
            return sink.send_many(messages) if messages else []
        found: list[Receipt | SendError] = []
        for message in messages:
            try:
                found.append(sink.send(message))
            except SendError as error:
                found.append(error)
        return found
