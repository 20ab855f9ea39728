"""``Polling``: one endpoint that is polled, and asked who this VM is. Where it is silent, IMDS is searched for."""

import logging
import threading
from typing import TYPE_CHECKING, Final

from notbefore.agent.state import AgentState
from notbefore.agent.tracker import Tracker
from notbefore.agent.unforeseen import UnforeseenErrors
from notbefore.config.model import Config
from notbefore.core.duration import back_off
from notbefore.errors import ImdsError
from notbefore.imds.client import ImdsClient, may_be_elsewhere
from notbefore.imds.identity import fetch_vm
from notbefore.imds.poller import Poll, Poller

if TYPE_CHECKING:  # in a VNet nobody needs it
    from notbefore.imds.elsewhere import SearchStep

IDENTITY_REFRESH: Final = 3600.0  # seconds
IDENTITY_RETRY: Final = 1.0  # seconds after the first failure, doubled with each,
LONGEST_IDENTITY_RETRY: Final = 30.0  # to so many seconds
FIRST_TRIES: Final = 3  # without any answer, after which IMDS is looked for elsewhere,
FIRST_PATIENCE: Final = 15.0  # or seconds
SILENCE: Final = 60.0  # seconds without a good answer, after which IMDS is looked for elsewhere
FIRST_ASKING: Final = 2.0  # seconds that the first poll waits, so that the first answer finds the VM's name known
SEARCH_PAUSE: Final = 10.0  # seconds after the first search, doubled with each,
LONGEST_SEARCH_PAUSE: Final = 300.0  # to so many seconds
STOP_PATIENCE: Final = 0.5  # seconds for a thread to end

log = logging.getLogger("notbefore.agent.polling")


class Polling:
    """The threads ``poll`` and ``identity`` of one endpoint. A reload of the configuration makes a new one.

    ``previous``: the one before the reload; where it has found IMDS, it need not be looked for again.
    """

    def __init__(
        self,
        config: Config,
        tracker: Tracker,
        state: AgentState,
        previous: "Polling | None" = None,
        *,
        errors: UnforeseenErrors | None = None,
    ) -> None:
        self._errors = errors or UnforeseenErrors()
        self._tracker = tracker
        self._state = state
        self._clock = clock = state.clock
        self._api_version = config.imds.api_version
        self._stop = threading.Event()
        self._asked = threading.Event()  # who this VM is, once
        self._answered = False  # IMDS has answered this object
        self._ask_identity = threading.Event()  # wakes the thread `identity`
        self._configured = config.imds.endpoint
        self._may_search = config.imds.discover and may_be_elsewhere(self._configured)
        self.endpoint = self._configured  # where IMDS is asked now
        if previous is not None and self._may_search and previous.may_have_found(self._configured):
            self.endpoint = previous.endpoint
        self._poll_client, self._identity_client = ImdsClient(self.endpoint), ImdsClient(self.endpoint)
        self._started = clock.monotonic()
        self._searches = 0
        self._next_search = 0.0  # monotonic seconds
        self._last_search: list[str] = []  # what the last search came to, in words
        self.poller = Poller(self._poll_client, config.imds.api_version, config.imds.interval.seconds)
        self._threads = [
            threading.Thread(target=self._identify, name="identity", daemon=True),
            threading.Thread(target=self._poll, name="poll", daemon=True),
        ]

    def start(self) -> None:
        """Begin to ask."""
        self._tracker.use(self._configured, self._api_version, self.poller.interval)
        self._started = self._clock.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask no more; a request under way is cut off."""
        self._stop.set()
        self._ask_identity.set()
        self._asked.set()
        for client in (self._poll_client, self._identity_client):
            client.abort()
        for thread, client in zip(self._threads, (self._identity_client, self._poll_client), strict=True):
            if thread.is_alive():  # it may never have been started
                thread.join(STOP_PATIENCE)
            client.close()

    @property
    def alive(self) -> bool:
        """Both threads run."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def overdue(self) -> float:
        """Seconds since the next poll was due, negative before it; 0 once it is stopped."""
        return 0.0 if self._stop.is_set() else self._clock.monotonic() - self.poller.due

    def may_have_found(self, configured: str) -> bool:
        """The endpoint in use is one that was, or would be, looked for where ``configured`` is silent."""
        return self._may_search and self._configured == configured

    def _poll(self) -> None:
        if self._state.snapshot.vm_name is None:
            self._asked.wait(FIRST_ASKING)
        self.poller.run(self._handle, self._stop, lambda: self._errors.guarded("poll"))

    def _handle(self, poll: Poll) -> None:
        if poll.error is not None and self._stop.is_set():  # cut off by `stop`; the state may be closed by now
            return
        if poll.error is None and not self._answered:  # IMDS answers: now it can say who this VM is as well
            self._answered = True
            self._ask_identity.set()
        self._tracker.handle(poll)
        if poll.error is not None and self._is_silent():
            self._ask_identity.set()

    def _is_silent(self) -> bool:
        answered = self._state.snapshot.poll.answered
        return self._may_search and answered is not None and self._clock.monotonic() - answered.monotonic > SILENCE

    def _never_answered(self, failures: int) -> bool:
        """IMDS had time enough to answer and did not. While a VM boots, the network may come up after the agent."""
        tried = failures >= FIRST_TRIES or self._clock.monotonic() - self._started > FIRST_PATIENCE
        return self._state.snapshot.poll.answered is None and not self._answered and tried

    def _identify(self) -> None:
        with self._errors.guarded("identity", "at the start", vital=False):
            self._tracker.identify(None)
        failures = 0
        while not self._stop.is_set():
            known = elsewhere = False
            with self._errors.guarded("identity", vital=False):  # the events are polled without it
                known, elsewhere = self._ask_identity_once(failures)
            self._asked.set()
            if elsewhere:
                continue
            failures = 0 if known else failures + 1
            wait = IDENTITY_REFRESH if known else back_off(failures, IDENTITY_RETRY, LONGEST_IDENTITY_RETRY)
            self._ask_identity.wait(wait)
            self._ask_identity.clear()

    def _ask_identity_once(self, failures: int) -> tuple[bool, bool]:
        """``failures``: in a row so far. Return whether IMDS named this VM, and whether it was found elsewhere."""
        try:
            self._tracker.identify(fetch_vm(self._identity_client))
        except ImdsError as error:
            if (self._is_silent() or self._never_answered(failures + 1)) and self._found_elsewhere():
                return False, True
            if failures == 0 and not self._stop.is_set():
                log.warning("IMDS does not say who this VM is (%s); asking again", error)
            return False, False
        return True, self._is_silent() and self._found_elsewhere()

    def _found_elsewhere(self) -> bool:
        """Look for IMDS, but not all the time; returns whether it is asked at another address from now on."""
        if not self._may_search or self._clock.monotonic() < self._next_search:
            return False
        try:
            steps = self._search()
        except Exception:
            log.exception("the search for IMDS failed; searching again later")
            steps = []
        self._searches += 1
        self._next_search = self._clock.monotonic() + back_off(self._searches, SEARCH_PAUSE, LONGEST_SEARCH_PAUSE)
        if self._stop.is_set() or not steps:
            return False
        lines = [str(step) for step in steps]
        found = steps[-1].answers and steps[-1].found != self.endpoint
        if lines != self._last_search:  # the same is not logged twice
            self._log_search(lines, found=found)
        self._last_search = lines
        if not found:
            return False
        self.endpoint, self._searches = steps[-1].found, 0
        for client in (self._poll_client, self._identity_client):
            client.use(self.endpoint)
        self.poller.forget()  # an ETag of one endpoint means nothing to another
        log.info("IMDS is asked at %s from now on", self.endpoint)
        return True

    def _log_search(self, lines: list[str], *, found: bool) -> None:
        for line in lines:
            log.log(logging.INFO if found or self._answered else logging.DEBUG, "where is IMDS? %s", line)
        if not found and not self._answered:
            log.warning(
                "This does not look like an Azure VM: IMDS is nowhere to be found. `notbefore discover` shows where it"
                " was looked for, `notbefore demo` shows what the agent does. The agent goes on asking"
            )

    def _search(self) -> "list[SearchStep]":
        from notbefore.imds.elsewhere import Discovery  # noqa: PLC0415 - as above

        steps = []
        for step in Discovery(self._configured, self._api_version).search():
            steps.append(step)
            if self._stop.is_set():
                break
        return steps
