"""``Polling`` asks IMDS for the events, and at times for the identity of this VM.

It polls once in each interval, without drift and never twice at a time. While IMDS fails, it polls
more slowly. An identity request that hangs delays the next poll by at most ``IDENTITY_TIMEOUT``. If
the endpoint does not answer, the polling searches for IMDS at other addresses.
"""

import logging
import threading
from math import inf
from typing import Final

from msgspec.structs import replace

from notbefore.agent.freeze import longest_between
from notbefore.agent.runtime import Published, Runtime
from notbefore.agent.thread_guard import THREAD_PATIENCE, ThreadGuard
from notbefore.agent.tracker import Poll, Tracker
from notbefore.core.document import ENDPOINT
from notbefore.core.duration import back_off
from notbefore.errors import ImdsError
from notbefore.imds import elsewhere
from notbefore.imds.answer import ImdsAnswer
from notbefore.imds.client import (
    FALLBACK,
    FIRST_TIMEOUT,
    NEWEST,
    TIMEOUT,
    ImdsClient,
    events_path,
)
from notbefore.imds.identity import fetch_vm
from notbefore.process.clock import Clock

SLOWEST_RETRY: Final = 30.0  # seconds, as much as the notice of a Preempt
# seconds; the slowest without a Retry-After: 30 s of notice then contain several polls
USUAL_RETRY: Final = 8.0
IDENTITY_REFRESH: Final = 3600.0  # seconds
IDENTITY_TIMEOUT: Final = 2.0  # seconds; no poll for events meanwhile
IDENTITY_RETRY: Final = 4.0  # seconds after a failure
FIRST_SILENCE: Final = 5.0  # seconds without a first answer after which the search begins
SILENCE: Final = 60.0  # the same after an answer; the search delays polls
SEARCH_PAUSE: Final = 30.0  # seconds
SLOWER: Final = 3.0  # the next answer may take so many times as long as the last one
NEWEST_RETRY: Final = 86_400.0  # seconds after the endpoint did not know the newest api-version

log = logging.getLogger("notbefore.agent.polling")


class Polling:
    """Runs one ``PollThread`` at a time. The main thread calls ``start`` and ``stop``."""

    def __init__(
        self,
        runtime: Published[Runtime],
        tracker: Tracker,
        clock: Clock,
        errors: ThreadGuard,
    ) -> None:
        self._runtime = runtime
        self._tracker = tracker
        self._clock = clock
        self._errors = errors
        self._thread: PollThread | None = None

    def start(self) -> None:
        """Begin to poll the endpoint of the present runtime, in a new thread."""
        self._thread = PollThread(self._runtime, self._tracker, self._clock, self._errors)
        self._thread.start()

    def stop(self) -> None:
        """Stop polling and abort a request that is under way."""
        if self._thread is not None:
            self._thread.stop()

    @property
    def trouble(self) -> str:
        """Why IMDS is not polled, in words; empty while it is."""
        if self._thread is None:
            return "the thread that asks IMDS has not started"
        return self._thread.trouble


class PollThread:
    """The thread ``poll``. It keeps the IMDS settings of the runtime at its creation."""

    def __init__(
        self,
        runtime: Published[Runtime],
        tracker: Tracker,
        clock: Clock,
        errors: ThreadGuard,
    ) -> None:
        settings = runtime.current
        imds = settings.config.imds
        self._runtime = runtime
        self._tracker = tracker
        self._clock = clock
        self._errors = errors
        self._endpoint = settings.endpoint
        self._api_version = settings.api_version
        self._chooses_version = imds.api_version == "auto"
        self._next_newest = clock.boot_time() + NEWEST_RETRY  # seconds since the boot
        self._interval = imds.interval.seconds
        self._may_search = imds.discover and imds.endpoint == ENDPOINT
        self._client = ImdsClient(settings.endpoint)

        # the next poll is due then, in seconds on two clocks
        self._due = clock.boot_time()
        self._due_wall = clock.time()
        # seconds since the last request in which the thread did not wait, and so measured no delay;
        # infinite at first, because the thread did not measure the time before its start
        self._busy = inf

        self._timeout = FIRST_TIMEOUT  # seconds for the next answer
        self._failures = 0  # in a row
        self._body: bytes | None = None  # the last one that the tracker has handled
        self._has_answered = False  # IMDS has answered this thread
        self._last_answer = 0.0  # seconds since the boot; before the first answer, the start
        self._identity_failed = False  # at the last request
        self._next_identity = 0.0  # seconds since the boot
        self._search_failed = False  # the last search found nothing
        self._next_search = 0.0  # seconds since the boot

        self._stop = threading.Event()
        # a stopped thread publishes no endpoint, and passes no answer on
        self._stop_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="poll", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        self._last_answer = self._clock.boot_time()
        self._thread.start()

    def stop(self) -> None:
        """Stop polling and abort a request that is under way."""
        # a poll that hangs while it is handled keeps the lock for ever
        has_lock = self._stop_lock.acquire(timeout=THREAD_PATIENCE)
        self._stop.set()
        if has_lock:
            self._stop_lock.release()
        self._client.abort()
        if self._thread.is_alive():  # it may never have been started
            self._thread.join(THREAD_PATIENCE)
        self._client.close()

    @property
    def overdue(self) -> float:
        """Seconds since the next poll was due, negative before it; 0 once the thread is stopped."""
        if self._stop.is_set():
            return 0.0
        return self._clock.boot_time() - self._due

    @property
    def trouble(self) -> str:
        """Why IMDS is not polled, in words; empty while it is."""
        if not self._thread.is_alive():
            return "the thread that asks IMDS has ended"
        overdue = self.overdue
        if overdue > self._timeout + TIMEOUT:
            return f"IMDS has not been asked for {overdue:.0f} s"
        return ""

    # ---- the thread

    def _run(self) -> None:
        self._errors.attempt("poll identity", self._use_configured_name, vital=False)
        self._ask_identity()
        self._due = self._clock.boot_time()
        self._due_wall = self._clock.time()
        while not self._stop.wait(self._seconds_until_due()):
            began = self._clock.read()
            error = self._errors.attempt("poll", self._poll)
            now = self._clock.read()
            self._busy = longest_between(began, now)
            self._due = self._next_due(error, now.uptime)
            self._due_wall = now.wall.timestamp() + self._due - now.uptime

    def _seconds_until_due(self) -> float:
        return max(0.0, self._due - self._clock.boot_time())

    def _poll(self) -> ImdsError | None:
        """Poll once and pass the answer to the tracker; return the error if there is no answer."""
        asked = self._clock.read()
        poll = Poll(
            lag=max(0.0, asked.uptime - self._due),
            duration=0.0,  # so far
            wall_lag=max(0.0, asked.wall.timestamp() - self._due_wall),
            asked=asked,
            busy=self._busy,
        )
        try:
            answer = self._ask()
        except ImdsError as error:
            if error.reason == "timeout":  # the answer may still come on a bad host
                self._timeout = FIRST_TIMEOUT
            duration = self._clock.boot_time() - asked.uptime
            if not self._stop.is_set():  # else ``stop`` has aborted the request
                self._handle_failure(replace(poll, duration=duration, error=error))
            return error

        duration = self._clock.boot_time() - asked.uptime
        self._timeout = min(FIRST_TIMEOUT, max(TIMEOUT, SLOWER * duration))
        self._handle_answer(replace(poll, duration=duration, date=answer.date), answer.body)
        return None

    def _handle_answer(self, poll: Poll, body: bytes) -> None:
        """Pass an answer to the tracker, with its body if that is new."""
        now = self._clock.boot_time()
        self._has_answered = True
        self._last_answer = now
        if now >= self._next_identity:
            self._ask_identity()

        if body != self._body:
            poll = replace(poll, body=body)
        self._body = None  # if handling it fails, an equal body counts as new
        self._pass_on(poll)
        self._body = body

    # ---- the api-version

    def _ask(self) -> ImdsAnswer:
        """Ask for the events, with `auto` in the newest api-version that the endpoint answers.

        Raises ``ImdsError``.
        """
        version = self._api_version
        now = self._clock.boot_time()
        if self._chooses_version and version == FALLBACK and now >= self._next_newest:
            version = NEWEST
            self._next_newest = now + NEWEST_RETRY

        try:
            answer = self._client.get(events_path(version), timeout=self._timeout)
        except ImdsError as error:
            is_unknown = error.reason in ("bad_request", "not_found")
            if not (self._chooses_version and version == NEWEST and is_unknown):
                raise
            version = FALLBACK
            answer = self._client.get(events_path(version), timeout=self._timeout)

        self._use_version(version)
        return answer

    def _use_version(self, version: str) -> None:
        """Ask for this api-version from now on, and let the other parts know it."""
        if version == self._api_version:
            return
        with self._stop_lock:
            if self._stop.is_set():  # a reload may already have published another endpoint
                return
            # first, so that the approver judges no event of the other version
            self._tracker.use(self._endpoint, version, self._interval)
            self._runtime.replace(answered_version=version)
        self._api_version = version
        self._body = None
        if version == FALLBACK:
            self._next_newest = self._clock.boot_time() + NEWEST_RETRY
            log.info("IMDS does not know api-version %s: the agent uses %s", NEWEST, FALLBACK)
        else:
            log.info("IMDS knows api-version %s: the agent uses it", version)

    def _pass_on(self, poll: Poll) -> None:
        """Let the tracker handle a poll, unless this thread is stopped.

        By then the tracker may belong to another thread, and the state may be closed.
        """
        with self._stop_lock:
            if not self._stop.is_set():
                self._tracker.handle(poll)

    def _handle_failure(self, poll: Poll) -> None:
        """Pass a failure to the tracker, and search for IMDS if it has been silent for long."""
        now = self._clock.boot_time()
        if now >= self._next_identity:
            self._ask_identity()
        self._pass_on(poll)

        patience = FIRST_SILENCE
        if self._has_answered:
            patience = SILENCE
        is_silent = now - self._last_answer > patience
        if self._may_search and is_silent and now >= self._next_search:
            self._errors.attempt("poll search", self._search, vital=False)

    def _next_due(self, error: ImdsError | None, now: float) -> float:
        """Return when the next poll is due: whole intervals later, or after a back-off."""
        if error is None:
            self._failures = 0
            # polls that became due during a slow answer are left out
            missed = max(0.0, now - self._due) // self._interval
            return self._due + (missed + 1) * self._interval

        self._failures += 1
        if error.retry_after is not None:
            delay = min(error.retry_after, SLOWEST_RETRY)
        else:
            delay = back_off(self._failures, self._interval, USUAL_RETRY)
        return now + max(self._interval, delay)

    # ---- the identity of this VM

    def _use_configured_name(self) -> None:
        """Let the tracker use the configured name, which may have changed."""
        self._tracker.identify(None)

    def _ask_identity(self) -> None:
        """Ask for this VM's identity; a failure does not stop the polling."""
        is_known = self._errors.attempt("poll identity", self._identify, vital=False)
        self._identity_failed = not is_known
        pause = IDENTITY_RETRY
        if is_known:
            pause = IDENTITY_REFRESH
        self._next_identity = self._clock.boot_time() + pause

    def _identify(self) -> bool:
        try:
            vm = fetch_vm(self._client, IDENTITY_TIMEOUT)
        except ImdsError as error:
            if not self._identity_failed and not self._stop.is_set():
                text = "IMDS does not give the identity of this VM (%s); the agent asks again"
                log.warning(text, error)
            return False
        with self._stop_lock:
            if not self._stop.is_set():  # else it may be the identity from another IMDS
                self._tracker.identify(vm)
        return True

    # ---- the search for IMDS

    def _search(self) -> None:
        """Look for IMDS at one address after the other; poll the first that answers from now on."""
        self._next_search = self._clock.boot_time() + SEARCH_PAUSE
        version = self._api_version
        if self._chooses_version:
            version = FALLBACK  # every endpoint knows it
        level = logging.INFO
        if self._search_failed:  # the same was logged by the previous search
            level = logging.DEBUG
        for place, endpoint in elsewhere.candidates():
            self._due = self._clock.boot_time()  # a slow search is not a thread that hangs
            if self._stop.is_set():
                return
            reason = elsewhere.why_not(endpoint, version)
            log.log(level, "is IMDS at %s (%s)? %s", endpoint, place, reason or "yes")
            if not reason:
                self._search_failed = False
                self._use_endpoint(endpoint)
                return

        if not self._search_failed and not self._has_answered:
            log.warning(
                "IMDS was not found at any address: this does not look like an Azure VM. The agent"
                " keeps asking. `notbefore demo` shows what it does"
            )
        self._search_failed = True

    def _use_endpoint(self, endpoint: str) -> None:
        """Poll another endpoint from now on, and let the other parts know it."""
        if endpoint == self._endpoint:
            return
        with self._stop_lock:
            if self._stop.is_set():  # a reload may already have published another endpoint
                return
            self._runtime.replace(endpoint=endpoint)
        self._endpoint = endpoint
        self._client.close()
        self._client = ImdsClient(endpoint)
        self._body = None
        self._next_identity = 0.0
