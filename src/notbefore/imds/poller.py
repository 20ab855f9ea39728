"""``Poller``: one poll each interval, without drift, never overlapping. Slower while IMDS fails, at most 30 s apart."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from msgspec import Struct

from notbefore.core.duration import back_off
from notbefore.errors import ImdsError
from notbefore.imds.client import FIRST_TIMEOUT, TIMEOUT, ImdsClient

SLOWEST_RETRY: Final = 30.0  # seconds; a Preempt gives only so much notice
USUAL_RETRY: Final = 8.0  # seconds; the slowest without a Retry-After: 30 s of notice then have several polls


class Poll(Struct, frozen=True):
    """The result of one poll: a new ``body``, nothing new (``body`` and ``error`` are None), or an error."""

    lag: float  # seconds by which the poll began late, on the monotonic clock
    duration: float  # seconds until the answer or the error
    body: bytes | None = None
    error: ImdsError | None = None
    date: str = ""  # the ``Date`` header of the answer, as it came: IMDS's clock
    wall_lag: float = 0.0  # seconds by which the poll began late, on the wall clock: over a freeze one may stand still


class Poller:
    """Polls ``/metadata/scheduledevents`` and gives each ``Poll`` to a handler, in the thread that calls ``run``.

    ``interval`` is in seconds. A body that equals the previous one is nothing new, until ``forget``.
    """

    def __init__(self, client: ImdsClient, api_version: str, interval: float) -> None:
        self.interval = interval
        self.due = time.monotonic()  # of the next poll
        self._due_wall = time.time()  # the same on the wall clock, as it was after the poll before
        self._client = client
        self._path = f"/metadata/scheduledevents?api-version={api_version}"
        self.timeout = FIRST_TIMEOUT  # seconds for the next answer
        self._last: bytes | None = None

    def run(
        self,
        handle: Callable[[Poll], None],
        stop: threading.Event,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Poll until ``stop`` is set. Each poll is made and handled under a ``guard``, which may hold an exception."""
        failures = 0
        while not stop.wait(max(0.0, self.due - time.monotonic())):
            error, handled = None, False
            with guard():
                poll = self.poll()
                error = poll.error
                handle(poll)
                handled = True
            if not handled:
                self.forget()  # the body was not taken in: the next one is new, even if it is the same
            failures = failures + 1 if error else 0
            self.due = self._next(failures, error)
            self._due_wall = time.time() + self.due - time.monotonic()

    def poll(self) -> Poll:
        """Make one request."""
        begun = time.monotonic()
        lag, wall_lag = max(0.0, begun - self.due), max(0.0, time.time() - self._due_wall)
        try:
            answer = self._client.get(self._path, timeout=self.timeout)
        except ImdsError as error:
            return Poll(lag, time.monotonic() - begun, error=error, wall_lag=wall_lag)
        self.timeout = TIMEOUT
        duration = time.monotonic() - begun
        if answer.body == self._last:
            return Poll(lag, duration, date=answer.date, wall_lag=wall_lag)
        self._last = answer.body
        return Poll(lag, duration, body=answer.body, date=answer.date, wall_lag=wall_lag)

    def forget(self) -> None:
        """Report the next body as new, whatever it is."""
        self._last = None

    def _next(self, failures: int, error: ImdsError | None) -> float:
        """Return when the next poll is due: a whole number of intervals later, or after a back-off."""
        now = time.monotonic()
        if error is not None:
            delay = max(self.interval, back_off(failures, self.interval, USUAL_RETRY))
            if error.retry_after is not None:
                delay = max(self.interval, min(error.retry_after, SLOWEST_RETRY))
            return now + delay
        missed = max(0.0, now - self.due) // self.interval  # polls that became due during a slow answer are left out
        return self.due + (missed + 1) * self.interval
