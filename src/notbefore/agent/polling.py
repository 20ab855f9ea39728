"""``Polling``: one endpoint being polled, and asked who this VM is; looks for IMDS where that is silent."""

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from notbefore.agent.tracker import Tracker
from notbefore.config.model import Config
from notbefore.errors import ImdsError
from notbefore.imds.client import ImdsClient, may_be_elsewhere
from notbefore.imds.identity import fetch_vm
from notbefore.imds.poller import Poll, Poller

if TYPE_CHECKING:  # in a VNet nobody needs it
    from notbefore.imds.discovery import SearchStep

IDENTITY_REFRESH: Final = 3600.0  # seconds
IDENTITY_RETRY: Final = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds; the last one again and again
IDENTITY_PATIENCE: Final = 2.0  # seconds that the first answer waits, so that its events are known as ours or not
FIRST_TRIES: Final = 3  # without any answer, after which IMDS is looked for,
FIRST_PATIENCE: Final = 15.0  # or seconds
SILENCE: Final = 60.0  # seconds without a good answer, after which IMDS is looked for
SEARCH_PAUSES: Final = (10.0, 30.0, 60.0, 300.0)  # seconds between two searches; the last one again and again
STOP_PATIENCE: Final = 0.5  # seconds for a thread to end

log = logging.getLogger("notbefore.agent.polling")


class Polling:
    """One endpoint being polled: the threads ``poll`` and ``who``. A reload of the configuration makes a new one."""

    def __init__(self, config: Config, watch: Tracker, before: "Polling | None" = None) -> None:
        self._watch = watch
        self._name = config.vm.name
        self._api_version = config.imds.api_version
        self._stop = threading.Event()
        self._known = threading.Event()  # who this VM is
        self._asked_who = False
        self._look = threading.Event()  # wakes the thread `who`
        self._configured = config.imds.endpoint
        self._may_search = config.imds.discover and may_be_elsewhere(self._configured)
        self.endpoint = self._configured  # where IMDS is asked now
        if before is not None and self._may_search and before.may_have_found(self._configured):
            self.endpoint = before.endpoint
        self._client, self._who_client = ImdsClient(self.endpoint), ImdsClient(self.endpoint)
        self._started = time.monotonic()
        self._searches = 0
        self._next_search = 0.0  # monotonic seconds
        self._searched: list[str] = []  # what was said of the last search
        self.poller = Poller(self._client, config.imds.api_version, config.imds.interval.seconds)
        self._threads = [
            threading.Thread(target=self._who, name="who", daemon=True),
            threading.Thread(target=self._poll, name="poll", daemon=True),
        ]

    def start(self) -> None:
        """Begin to ask."""
        self._watch.use_api_version(self._api_version)
        self._started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask no more; a request under way is cut off."""
        self._stop.set()
        self._look.set()
        self._known.set()
        for client in (self._client, self._who_client):
            client.abort()
        for thread, client in zip(self._threads, (self._who_client, self._client), strict=True):
            if thread.is_alive():  # it may never have been started
                thread.join(STOP_PATIENCE)
            client.close()

    @property
    def alive(self) -> bool:
        """Both threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def may_have_found(self, configured: str) -> bool:
        """It is asked where it was found, or would be, with ``configured`` as the place where to begin."""
        return self._may_search and self._configured == configured

    def _poll(self) -> None:
        self.poller.run(self._handle, self._stop)

    def _handle(self, poll: Poll) -> None:
        if poll.error is None and not self._asked_who:  # IMDS answers: now it can say that as well
            self._asked_who = True
            self._look.set()
            self._known.wait(0.0 if self._name else IDENTITY_PATIENCE)
            if self._stop.is_set():
                return
        self._watch.handle(poll)
        if poll.error is not None and self._silent:
            self._look.set()

    @property
    def _silent(self) -> bool:
        last = self._watch.last_good
        return self._may_search and last is not None and time.monotonic() - last > SILENCE

    def _never_answered(self, failures: int) -> bool:
        """It has had its chance to. While a VM boots, the network may come up after us."""
        tried = failures >= FIRST_TRIES or time.monotonic() - self._started > FIRST_PATIENCE
        return self._watch.last_good is None and tried

    def _who(self) -> None:
        self._watch.set_vm(None, self._name)
        failures = 0
        while not self._stop.is_set():
            try:
                self._watch.set_vm(fetch_vm(self._who_client), self._name)
                self._known.set()
                failures, wait = 0, IDENTITY_REFRESH
                if self._silent and self._found_elsewhere():
                    continue
            except ImdsError as error:
                if (self._silent or self._never_answered(failures + 1)) and self._found_elsewhere():
                    continue
                if failures == 0 and not self._stop.is_set():
                    log.warning("IMDS does not say who this VM is (%s); asking again", error)
                wait = IDENTITY_RETRY[min(failures, len(IDENTITY_RETRY) - 1)]
                failures += 1
            self._look.wait(wait)
            self._look.clear()

    def _found_elsewhere(self) -> bool:
        """Look for IMDS, but not all the time; returns whether it is asked elsewhere from now on."""
        if not self._may_search or time.monotonic() < self._next_search:
            return False
        try:
            steps = self._search()
        except Exception:
            log.exception("looking for IMDS failed; trying again")
            steps = []
        self._next_search = time.monotonic() + SEARCH_PAUSES[min(self._searches, len(SEARCH_PAUSES) - 1)]
        self._searches += 1
        if self._stop.is_set() or not steps:
            return False
        said = [str(step) for step in steps]
        for line in said if said != self._searched else ():  # the same is not said twice
            log.info("where is IMDS? %s", line)
        self._searched = said
        if not steps[-1].answers or steps[-1].found == self.endpoint:
            return False
        self.endpoint, self._searches = steps[-1].found, 0
        for client in (self._client, self._who_client):
            client.use(self.endpoint)
        self.poller.forget()  # an ETag of the one says nothing to the other
        log.info("IMDS is asked at %s from now on", self.endpoint)
        return True

    def _search(self) -> "list[SearchStep]":
        from notbefore.imds.discovery import Discovery  # noqa: PLC0415 - as above

        steps = []
        for step in Discovery(self._configured, self._api_version).search():
            steps.append(step)
            if self._stop.is_set():
                break
        return steps
