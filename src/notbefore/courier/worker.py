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
    """What came of one delivery: a receipt, or an error. Neither: it is given back, or ``yielded`` to another VM."""

    delivery: GivenDelivery
    receipt: Receipt | None = None
    error: SendError | None = None
    yielded: bool = False

    @property
    def again(self) -> bool:
        """It is to be made again, since the refusal may pass: what follows of the same event has to wait for it."""
        error = self.error
        return error is not None and (not error.permanent or (error.may_pass and self.delivery.patience > 0))


class Checks(Struct, frozen=True):
    """What a worker asks, in its thread."""

    secrets: Callable[[], list[str]] = list  # those that the sink would be made with now
    others_notify: Callable[[GivenDelivery], bool] = lambda _delivery: False  # a VM that comes before this one sends it


class Worker:
    """``report`` is called in the worker's thread with each attempt; ``make`` makes the sink there.

    ``batch``: how many deliveries are handed over at once, to a sink that takes several.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        report: Callable[[Attempt], None],
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
        self._jobs: queue.SimpleQueue[Sequence[GivenDelivery]] = queue.SimpleQueue()
        self._under_way: tuple[float, Sequence[GivenDelivery]] | None = None  # since when (monotonic seconds), and what
        self._paused_until = 0.0  # monotonic seconds: the receiver asked for the pause
        threading.Thread(target=self._run, name=f"sink-{name}", daemon=True).start()

    def give(self, deliveries: Sequence[GivenDelivery]) -> None:
        """Send them after what was given before; several of one event are given at once, in order."""
        self._jobs.put(deliveries)

    def hangs(self, limit: float) -> Sequence[GivenDelivery]:
        """The deliveries on which it has worked for more than ``limit`` seconds."""
        since, current = self._under_way or (time.monotonic(), ())
        return current if time.monotonic() - since > limit else ()

    def _run(self) -> None:
        while True:
            given = self._next()
            waiting: set[str] = set()  # events of which an earlier delivery is to be sent first
            for first in range(0, len(given), self._batch):
                for attempt in self._attempts(given[first : first + self._batch], waiting):
                    if attempt.error is not None and attempt.error.retry_after is not None:
                        self._paused_until = time.monotonic() + attempt.error.retry_after
                    if attempt.again:
                        waiting.add(attempt.delivery.event_key)
                    self._report(attempt)

    def _next(self) -> Sequence[GivenDelivery]:
        """What is to be sent next."""
        if self._sink is not None:
            with suppress(queue.Empty):
                return self._jobs.get(timeout=REST_AFTER)
            self._sink.rest()
        return self._jobs.get()

    def _attempts(self, given: Sequence[GivenDelivery], waiting: set[str]) -> list[Attempt]:
        """Give back what is behind a failed one of its event, or all after a Retry-After, and send the others."""
        paused = time.monotonic() < self._paused_until
        attempts = [Attempt(one) for one in given if paused or one.event_key in waiting]
        left = [one for one in given if not paused and one.event_key not in waiting]
        if not left:
            return attempts
        begun = time.monotonic()
        self._under_way = begun, left
        try:
            others = [one for one in left if self._checks.others_notify(one)]
            attempts += [Attempt(one, yielded=True) for one in others]
            left = [one for one in left if one not in others]
            begun = time.monotonic()  # the other VMs had time of their own
            self._under_way = begun, left
            attempts += self._with_present_secrets(left) if left else []
        except Exception as error:  # a library of a sink may raise anything; the other sinks must go on
            log.exception("sink %s: this should not have happened", self.name)
            bug = isinstance(error, BUGS)
            text = f"{'a bug in the sink: ' if bug else ''}{type(error).__name__}: {error}"
            attempts += [Attempt(one, None, SendError(text, permanent=bug)) for one in left]
        self.quick = time.monotonic() - begun < QUICK
        self._under_way = None
        return attempts

    def _with_present_secrets(self, given: Sequence[GivenDelivery]) -> list[Attempt]:
        found = self._once(given)
        if self._sink is None or not any(one.error for one in found) or self._checks.secrets() == self._made_with:
            return found
        # a secret has changed: what was refused with the old one is tried once more with the new one
        self._sink.close()
        self._sink, self._under_way = None, (time.monotonic(), given)
        refused = [one for one in found if one.error and one.error.permanent]
        again = self._once([one.delivery for one in refused]) if refused else []
        return [one for one in found if one not in refused] + again

    def _once(self, given: Sequence[GivenDelivery]) -> list[Attempt]:
        try:
            sink = self._sink or self._new()
        except NotBeforeError as error:  # such as a secret that cannot be read: that can be put right
            return [Attempt(one, None, SendError(str(error))) for one in given]
        opened: list[tuple[GivenDelivery, Message]] = []
        found: list[Attempt] = []
        for one in given:
            try:
                opened.append((one, Message.of(one)))
            except msgspec.DecodeError as error:
                found.append(Attempt(one, None, SendError(f"the record cannot be read: {error}", permanent=True)))
        outcomes = sink.send_many([message for _, message in opened])
        for (one, _), outcome in zip(opened, outcomes, strict=True):
            found.append(Attempt(one, *((None, outcome) if isinstance(outcome, SendError) else (outcome, None))))
        return found

    def _new(self) -> Sink:
        self._made_with = self._checks.secrets()  # read first: a change in between is noticed
        self._sink = self._make()
        return self._sink
