"""``Polling``: the thread that asks one endpoint for the events, and at times for the identity of this VM.

One poll each interval, without drift, never overlapping; slower while IMDS fails. An identity
request that hangs delays the next poll, by ``IDENTITY_TIMEOUT`` at most. If the endpoint does not answer, IMDS is
searched for at other addresses.
"""

import logging
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.tracker import Poll, Tracker
from notbefore.config.model import Config
from notbefore.core.document import ENDPOINT
from notbefore.core.duration import back_off
from notbefore.errors import ImdsError
from notbefore.imds.client import FIRST_TIMEOUT, TIMEOUT, ImdsClient, events_path
from notbefore.imds.identity import fetch_vm
from notbefore.process.clock import Clock

SLOWEST_RETRY: Final = 30.0  # seconds, as much as the notice of a Preempt
USUAL_RETRY: Final = 8.0  # seconds; the slowest without a Retry-After: 30 s of notice then contain several polls
IDENTITY_REFRESH: Final = 3600.0  # seconds
IDENTITY_TIMEOUT: Final = 2.0  # seconds; no poll for events meanwhile
IDENTITY_RETRY: Final = 4.0  # seconds after a failure
FIRST_SILENCE: Final = 5.0  # seconds without a first answer after which IMDS is searched for
SILENCE: Final = 60.0  # the same after an answer; the search delays polls
SEARCH_PAUSE: Final = 30.0  # seconds
STOP_PATIENCE: Final = 0.5  # seconds for the thread to end

log = logging.getLogger("notbefore.agent.polling")


class Polling:
    """The thread ``poll`` of one endpoint. A reload of the configuration makes a new one."""

    def __init__(self, config: Config, tracker: Tracker, clock: Clock, errors: ThreadGuard) -> None:
        self._tracker = tracker
        self._clock = clock
        self._errors = errors
        self.endpoint, self._api_version = config.imds.endpoint, config.imds.api_version
        self._may_search = config.imds.discover and self.endpoint == ENDPOINT
        self.interval = config.imds.interval.seconds
        self._client = ImdsClient(self.endpoint)
        self._path = events_path(self._api_version)
        self._timeout = FIRST_TIMEOUT  # seconds for the next answer
        self._due, self._due_wall = clock.boot_time(), clock.time()  # the next poll, in seconds on two clocks
        self._failures = 0  # in a row
        self._body: bytes | None = None  # the last one that the tracker has handled
        self._stopped = False
        self._ended = SimpleQueue[None]()  # an Event would create a lock for each wait, a tenth of a poll's cost
        self._answered = False  # IMDS has answered this object
        self._last_answer = 0.0  # seconds since the boot; before the first answer, the thread's start
        self._unnamed = self._searched = False  # the last identity request failed; a search found nothing
        self._next_identity = self._next_search = 0.0  # seconds since the boot
        self._thread = threading.Thread(target=self._run, name="poll", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        self._tracker.use(self.endpoint, self._api_version, self.interval)
        self._last_answer = self._clock.boot_time()
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; a request under way is aborted."""
        self._stopped = True
        self._ended.put(None)
        self._client.abort()
        if self._thread.is_alive():  # it may never have been started
            self._thread.join(STOP_PATIENCE)
        self._client.close()

    @property
    def overdue(self) -> float:
        """Seconds since the next poll was due, negative before it; 0 once it is stopped."""
        return 0.0 if self._stopped else self._clock.boot_time() - self._due

    @property
    def trouble(self) -> str:
        """Why IMDS is not polled, in words; empty while it is."""
        if not self._thread.is_alive():
            return "the thread that asks IMDS has ended"
        overdue = self.overdue
        return f"IMDS has not been asked for {overdue:.0f} s" if overdue > self._timeout + TIMEOUT else ""

    def _run(self) -> None:
        self._errors.attempt("poll identity", lambda: self._tracker.identify(None), vital=False)
        self._ask_identity()
        while not self._stops_within(max(0.0, self._due - self._clock.boot_time())):
            error, now = self._errors.attempt("poll", self._poll), self._clock.boot_time()
            self._due = self._next(error, now)
            self._due_wall = self._clock.time() + self._due - now

    def _stops_within(self, seconds: float) -> bool:
        with suppress(Empty):
            self._ended.get(timeout=seconds)
        return self._stopped

    def _poll(self) -> ImdsError | None:
        """Poll once and pass the answer to the tracker; return the error if there is no answer."""
        begun = self._clock.boot_time()
        lag, wall_lag = max(0.0, begun - self._due), max(0.0, self._clock.time() - self._due_wall)
        try:
            answer = self._client.get(self._path, timeout=self._timeout)
        except ImdsError as error:
            if not self._stopped:  # else ``stop`` aborted it, and the state may be closed
                self._not_answered(Poll(lag, self._clock.boot_time() - begun, error=error))
            return error
        now = self._clock.boot_time()
        self._answered, self._last_answer, self._timeout = True, now, TIMEOUT
        if now >= self._next_identity:
            self._ask_identity()
        body = answer.body if answer.body != self._body else None
        self._body = None  # if handling it fails, an equal body counts as new
        self._tracker.handle(Poll(lag, now - begun, body, date=answer.date, wall_lag=wall_lag))
        self._body = answer.body
        return None

    def _not_answered(self, poll: Poll) -> None:
        now = self._clock.boot_time()
        if now >= self._next_identity:
            self._ask_identity()
        self._tracker.handle(poll)
        silence = SILENCE if self._answered else FIRST_SILENCE
        if self._may_search and now - self._last_answer > silence and now >= self._next_search:
            self._errors.attempt("poll search", self._search, vital=False)

    def _next(self, error: ImdsError | None, now: float) -> float:
        """When the next poll is due: a whole number of intervals later, or after a back-off."""
        if error is None:
            self._failures = 0
            missed = max(0.0, now - self._due) // self.interval  # those due during a slow answer are left out
            return self._due + (missed + 1) * self.interval
        self._failures += 1
        delay = back_off(self._failures, self.interval, USUAL_RETRY)
        if error.retry_after is not None:
            delay = min(error.retry_after, SLOWEST_RETRY)
        return now + max(self.interval, delay)

    def _ask_identity(self) -> None:
        """Ask for this VM's identity; a failure does not stop the polling."""
        known = self._errors.attempt("poll identity", self._identify, vital=False)
        self._unnamed = not known
        self._next_identity = self._clock.boot_time() + (IDENTITY_REFRESH if known else IDENTITY_RETRY)

    def _identify(self) -> bool:
        try:
            self._tracker.identify(fetch_vm(self._client, IDENTITY_TIMEOUT))
        except ImdsError as error:
            if not self._unnamed and not self._stopped:
                log.warning("IMDS does not give the identity of this VM (%s); the agent asks again", error)
            return False
        return True

    def _search(self) -> None:
        """Look for IMDS at one address after the other; from now on poll the first that answers."""
        from notbefore.imds.elsewhere import candidates, why_not  # noqa: PLC0415 - in a VNet nobody needs it

        self._next_search = self._clock.boot_time() + SEARCH_PAUSE
        level = logging.DEBUG if self._searched else logging.INFO
        for place, endpoint in candidates():
            self._due = self._clock.boot_time()  # a slow search is not a thread that hangs
            if self._stopped:
                return
            why = why_not(endpoint, self._api_version)
            log.log(level, "is IMDS at %s (%s)? %s", endpoint, place, why or "yes")
            if not why:
                self._searched = False
                if endpoint != self.endpoint:
                    self.endpoint = endpoint
                    self._client.close()
                    self._client = ImdsClient(endpoint)
                    self._body = None
                    self._next_identity = 0.0
                return
        if not self._searched and not self._answered:
            log.warning(
                "IMDS was not found at any address: this does not look like an Azure VM. The agent goes on asking."
                " `notbefore demo` shows what it does"
            )
        self._searched = True
