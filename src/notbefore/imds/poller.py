"""The beat: one poll each interval, without drift, never overlapping; slower while IMDS fails, but never above 30 s."""

import threading
import time
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from notbefore.errors import ImdsError
from notbefore.imds.client import FIRST_TIMEOUT, TIMEOUT, ImdsClient

SLOWEST_RETRY: Final = 30.0  # seconds; a Preempt gives no more notice than that
USUAL_RETRY: Final = 8.0  # seconds; the slowest without a Retry-After, so that half a minute's notice holds some polls


class Poll(Struct, frozen=True):
    """What one beat brought: a new ``body``, nothing new (``body`` None, ``error`` None), or an error."""

    lag: float  # seconds by which the beat was late
    duration: float  # seconds until the answer or the error
    body: bytes | None = None
    error: ImdsError | None = None


class Poller:
    """Polls ``/metadata/scheduledevents`` and hands each ``Poll`` to a handler, in the thread that calls ``run``.

    A body that equals the last one counts as nothing new, until ``forget``.
    """

    def __init__(self, client: ImdsClient, api_version: str, interval: float) -> None:
        self.interval = interval
        self.due = time.monotonic()  # of the next beat
        self._client = client
        self._path = f"/metadata/scheduledevents?api-version={api_version}"
        self.timeout = FIRST_TIMEOUT  # seconds for the next answer
        self._last: bytes | None = None
        self._etag: str | None = None

    def run(self, handle: Callable[[Poll], None], stop: threading.Event) -> None:
        """Beat until ``stop`` is set."""
        failures = 0
        while not stop.wait(max(0.0, self.due - time.monotonic())):
            poll = self.poll()
            handle(poll)
            failures = failures + 1 if poll.error else 0
            self.due = self._next(failures, poll.error)

    def poll(self) -> Poll:
        """One request."""
        begun = time.monotonic()
        lag = max(0.0, begun - self.due)
        try:
            answer = self._client.get(self._path, timeout=self.timeout, etag=self._etag)
        except ImdsError as error:
            return Poll(lag, time.monotonic() - begun, error=error)
        self.timeout = TIMEOUT
        duration = time.monotonic() - begun
        if answer.body is None or answer.body == self._last:
            return Poll(lag, duration)
        self._last, self._etag = answer.body, answer.etag
        return Poll(lag, duration, body=answer.body)

    def forget(self) -> None:
        """Take the next body for new, whatever it holds."""
        self._last = self._etag = None

    def _next(self, failures: int, error: ImdsError | None) -> float:
        """When the next beat is due: on the grid of the interval, or after a back-off."""
        now = time.monotonic()
        if error is not None:
            delay = max(self.interval, min(self.interval * 2.0 ** min(failures - 1, 10), USUAL_RETRY))
            if error.retry_after is not None:
                delay = max(self.interval, min(error.retry_after, SLOWEST_RETRY))
            return now + delay
        missed = max(0.0, now - self.due) // self.interval  # a beat that fell into a slow answer is left out
        return self.due + (missed + 1) * self.interval
