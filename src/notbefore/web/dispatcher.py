"""``Dispatcher``: which worker answers which request, so that no kind of request keeps another waiting.

A scrape has a worker of its own, and so has the page. A password that has to be compared with its hash is checked by a
further thread before a worker takes the request.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from waitress.task import ThreadedTaskDispatcher

from notbefore.web.access import Access
from notbefore.web.auth import Login, Passwords
from notbefore.web.channel import Channel
from notbefore.web.fair_queue import KNOWN_ADDRESSES, FairQueue, WaitingLogin, network_of

WORKERS: Final = {"metrics": 1, "page": 1, "other": 2}
LANES: Final = {"/metrics": "metrics", "/": "page"}  # the rest: other
REFUSAL_PAUSE: Final = 2.0  # seconds before a refused login is answered, so that an immediate retry is slow
STOP_PATIENCE: Final = 3.0  # seconds; the dearest hash takes one, with its decoys two
LOG_INTERVAL: Final = 60.0  # seconds between two lines about failed logins
LOGGED_ADDRESSES: Final = 5  # in one line, those with the most failures

log = logging.getLogger("notbefore.http")


class Dispatcher:
    """What waitress calls a task dispatcher; its tasks are channels with a request."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._passwords = Passwords()
        self._lanes = {name: Lane(name, workers) for name, workers in WORKERS.items()}
        self.logins = LoginThread(access, self._passwords, self._hand_over)

    def add_task(self, channel: Channel) -> None:
        """Have the first request of a channel answered."""
        request, config = channel.requests[0], self._access.config()
        if request.error is None and config is not None and config.basic_auth_users:
            request.login = self._passwords.recall(config, request.headers.get("AUTHORIZATION", ""))
            if request.login is Login.UNCHECKED:
                self.logins.put(channel)
                return
            if request.login is Login.WRONG:
                self.logins.failures.add(network_of(channel.addr[0]))
        self._hand_over(channel)

    def _hand_over(self, channel: Channel) -> None:
        requests = channel.requests  # without any where it was closed meanwhile
        if requests:
            self._lanes[LANES.get(requests[0].path, "other")].add_task(channel)

    def shutdown(self, timeout: float) -> None:
        """Stop; ``timeout``: seconds for what is being answered."""
        self.logins.stop()
        deadline = time.monotonic() + timeout
        for lane in self._lanes.values():
            lane.set_thread_count(0)
        for lane in self._lanes.values():
            lane.shutdown(timeout=max(0.0, deadline - time.monotonic()))


class Lane(ThreadedTaskDispatcher):  # type: ignore[misc]  # waitress has no types
    """Workers with a queue of their own."""

    def __init__(self, name: str, workers: int) -> None:
        super().__init__()
        self._name = name
        self.set_thread_count(workers)

    def start_new_thread(self, target: Any, thread_no: int) -> None:
        """Start a worker."""
        threading.Thread(target=target, name=f"http-{self._name}-{thread_no}", args=(thread_no,), daemon=True).start()


class LoginThread:
    """Checks passwords, one at a time, in the order of a ``FairQueue``. Its thread starts with the first of them."""

    def __init__(self, access: Access, passwords: Passwords, hand_over: Callable[[Channel], None]) -> None:
        self.failures = LoginFailures()
        self._access = access
        self._passwords = passwords
        self._hand_over = hand_over  # takes a channel whose login is decided
        self._queue = FairQueue()
        self._refused: deque[tuple[float, Channel]] = deque()  # with the monotonic time of the answer
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def put(self, channel: Channel) -> None:
        """Have the password of a channel's request checked, and the channel handed over then."""
        login = WaitingLogin(network_of(channel.addr[0]), time.monotonic(), channel, channel.login_failed)
        channel.login_waits = True
        with self._changed:
            refused = self._queue.put(login)
            if refused is not None:
                self._refused.append((time.monotonic() + REFUSAL_PAUSE, refused.request))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="http-logins", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Check no more passwords."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            # a hash cannot be interrupted, and a thread that is in one when the interpreter ends aborts the process
            self._thread.join(STOP_PATIENCE)
        self.failures.write(float("inf"))

    def _run(self) -> None:
        while not self._stopping:
            with self._changed:
                now = time.monotonic()
                refused, login = self._take_refused(now), self._queue.take(now)
                if not refused and login is None:
                    next_refusal = self._refused[0][0] - now if self._refused else threading.TIMEOUT_MAX
                    self._changed.wait(min(self._queue.wait(now), self.failures.wait(now), next_refusal))
            for channel in refused:
                self._decide(channel, Login.REFUSED)
            if login is not None:
                self._check(login)
            self.failures.write(time.monotonic())

    def _take_refused(self, now: float) -> list[Channel]:
        found: list[Channel] = [one.request for one in self._queue.expired(now)]
        while self._refused and self._refused[0][0] <= now:
            found.append(self._refused.popleft()[1])
        return found

    def _check(self, login: WaitingLogin) -> None:
        channel: Channel = login.request
        requests, config = channel.requests, self._access.config()
        if not requests or not channel.connected or config is None:  # nobody waits for the answer any more
            self._decide(channel, Login.REFUSED)
            return
        try:
            found = self._passwords.check(config, requests[0].headers.get("AUTHORIZATION", ""))
        except Exception:  # this thread must go on: without it no new password would be let in
            log.exception("a password could not be compared")
            self._decide(channel, Login.REFUSED)
            return
        channel.login_failed = found is Login.WRONG
        with self._changed:
            self._queue.record(login.address, time.monotonic(), right=found is Login.RIGHT)
        if found is Login.WRONG:
            self.failures.add(login.address)
        self._decide(channel, found)

    def _decide(self, channel: Channel, login: Login) -> None:
        channel.login_waits = False
        for request in channel.requests[:1]:
            request.login = login
        self._hand_over(channel)


class LoginFailures:
    """Counts failed logins, and logs them once a minute with their addresses."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._unlogged: dict[str, int] = {}
        self._next = 0.0  # monotonic seconds

    def add(self, address: str) -> None:
        """Count one; the first after a quiet minute is logged at once."""
        with self._lock:
            self.count += 1
            known = address in self._unlogged or len(self._unlogged) < KNOWN_ADDRESSES
            name = address if known else "other addresses"
            self._unlogged[name] = self._unlogged.get(name, 0) + 1
        self.write(time.monotonic())

    def wait(self, now: float) -> float:
        """Seconds until there is something to log; infinite where there is nothing."""
        return max(0.0, self._next - now) if self._unlogged else float("inf")

    def write(self, now: float) -> None:
        """Log what has not been logged yet, if it is time."""
        with self._lock:
            if not self._unlogged or now < self._next:
                return
            found, self._unlogged = self._unlogged, {}
            self._next = now + LOG_INTERVAL
        most = sorted(found.items(), key=lambda one: one[1], reverse=True)
        text = ", ".join(f"{count} from {address}" for address, count in most[:LOGGED_ADDRESSES])
        more = len(most) - LOGGED_ADDRESSES
        log.warning("failed logins: %s%s", text, f", and others from {more} more addresses" if more > 0 else "")
