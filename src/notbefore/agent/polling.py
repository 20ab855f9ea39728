"""``Polling``: the thread that asks one endpoint for the events, and now and then who this VM is.

Where the endpoint is silent, IMDS is searched for. All of that is one thread: a question about the VM that hangs delays
the next poll, by ``IDENTITY_TIMEOUT`` at most.
"""

import logging
import threading
from typing import Final

from notbefore.agent.state import AgentState
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.tracker import Tracker
from notbefore.config.model import Config
from notbefore.errors import ImdsError
from notbefore.imds.client import USUAL, ImdsClient
from notbefore.imds.identity import fetch_vm
from notbefore.imds.poller import Poll, Poller

IDENTITY_REFRESH: Final = 3600.0  # seconds
IDENTITY_TIMEOUT: Final = 2.0  # seconds; the events are not polled meanwhile
IDENTITY_RETRY: Final = 4.0  # seconds after a failure
FIRST_SILENCE: Final = 5.0  # seconds without a first good answer, after which IMDS is searched for
SILENCE: Final = 60.0  # seconds without another one; the search delays polls
SEARCH_PAUSE: Final = 30.0  # seconds
STOP_PATIENCE: Final = 0.5  # seconds for the thread to end

log = logging.getLogger("notbefore.agent.polling")


class Polling:
    """The thread ``poll`` of one endpoint. A reload of the configuration makes a new one."""

    def __init__(self, config: Config, tracker: Tracker, state: AgentState, errors: ThreadGuard | None = None) -> None:
        self._errors = errors or ThreadGuard()
        self._tracker = tracker
        self._state = state
        self._clock = state.clock
        self._configured, self._api_version = config.imds.endpoint, config.imds.api_version
        self._may_search = config.imds.discover and self._configured == USUAL
        self.endpoint = self._configured  # where IMDS is asked now
        self._client = ImdsClient(self.endpoint)
        self.poller = Poller(self._client, self._api_version, config.imds.interval.seconds)
        self._stop = threading.Event()
        self._answered = False  # IMDS has answered this object
        self._last_answer = 0.0  # monotonic seconds; at first when the thread began
        self._unnamed = self._searched = False  # the last question was not answered; a search has found nothing
        self._next_identity = self._next_search = 0.0  # monotonic seconds
        self._thread = threading.Thread(target=self._poll, name="poll", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._tracker.use(self._configured, self._api_version, self.poller.interval)
        self._last_answer = self._clock.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; a request under way is cut off."""
        self._stop.set()
        self._client.abort()
        if self._thread.is_alive():  # it may never have been started
            self._thread.join(STOP_PATIENCE)
        self._client.close()

    @property
    def alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive()

    @property
    def overdue(self) -> float:
        """Seconds since the next poll was due, negative before it; 0 once it is stopped."""
        return 0.0 if self._stop.is_set() else self._clock.monotonic() - self.poller.due

    def _poll(self) -> None:
        with self._errors.guarded("poll", "identity", vital=False):
            self._tracker.identify(None)
        self._ask_identity()
        self.poller.run(self._handle, self._stop, lambda: self._errors.guarded("poll"))

    def _handle(self, poll: Poll) -> None:
        if poll.error is not None and self._stop.is_set():  # cut off by `stop`; the state may be closed by now
            return
        now = self._clock.monotonic()
        if poll.error is None:
            self._last_answer = now
            if not self._answered and self._unnamed:  # now it can; the first comparison waits for the name
                self._next_identity = 0.0
            self._answered = True
        if now >= self._next_identity:
            self._ask_identity()
        self._tracker.handle(poll)
        silence = SILENCE if self._answered else FIRST_SILENCE
        if self._may_search and now - self._last_answer > silence and now >= self._next_search:
            with self._errors.guarded("poll", "search", vital=False):
                self._search()

    def _ask_identity(self) -> None:
        """Ask who this VM is; the events are polled without it."""
        known = False
        with self._errors.guarded("poll", "identity", vital=False):
            try:
                self._tracker.identify(fetch_vm(self._client, IDENTITY_TIMEOUT))
                known = True
            except ImdsError as error:
                if not self._unnamed and not self._stop.is_set():
                    log.warning("IMDS does not say who this VM is (%s); asking again", error)
        self._unnamed = not known
        self._next_identity = self._clock.monotonic() + (IDENTITY_REFRESH if known else IDENTITY_RETRY)

    def _search(self) -> None:
        """Look for IMDS at one place after the other, and ask the first that answers from now on."""
        from notbefore.imds.elsewhere import candidates, why_not  # noqa: PLC0415 - in a VNet nobody needs it

        self._next_search = self._clock.monotonic() + SEARCH_PAUSE
        level = logging.DEBUG if self._searched else logging.INFO
        for place, endpoint in candidates():
            self.poller.due = self._clock.monotonic()  # places that are silent are no thread that hangs
            if self._stop.is_set():
                return
            why = why_not(endpoint, self._api_version)
            log.log(level, "is IMDS at %s (%s)? %s", endpoint, place, why or "yes")
            if not why:
                self._searched = False
                if endpoint != self.endpoint:
                    self.endpoint = endpoint
                    self._client.use(endpoint)
                    self.poller.forget()
                    self._next_identity = 0.0
                return
        if not self._searched and not self._answered:
            log.warning(
                "This does not look like an Azure VM: IMDS is nowhere to be found. `notbefore demo` shows what the"
                " agent does. The agent goes on asking"
            )
        self._searched = True
