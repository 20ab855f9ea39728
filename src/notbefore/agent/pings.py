"""``Pings``: a dead man's switch.

While the agent works, it sends a request to a URL at each interval.

The form is that of healthchecks.io and others: a POST with the status as text, to the path with
``/start`` appended when the agent begins, and with ``/fail`` if it is not ready. A thread of the
agent sends it, because pings would keep a courier running all the time. Nothing is stored or tried
again: the next ping says the same.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from notbefore import __version__
from notbefore.agent.thread_guard import THREAD_PATIENCE, ThreadGuard
from notbefore.agent.view import PingStatus
from notbefore.config.model import HeartbeatConfig
from notbefore.errors import ConfigError, SendError
from notbefore.net.http import Http

PING_TIMEOUT: Final = 10.0  # seconds
HEADERS: Final = {"Content-Type": "text/plain; charset=utf-8"}

log = logging.getLogger("notbefore.agent.pings")


class Pings:
    """The thread ``pings`` of one configuration; ``status`` is called at each ping."""

    def __init__(
        self, heartbeat: HeartbeatConfig, status: Callable[[], PingStatus], errors: ThreadGuard
    ) -> None:
        self._heartbeat = heartbeat
        self._status = status
        self._errors = errors
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pings", daemon=True)
        self._http = Http(PING_TIMEOUT)
        self._started = False  # ``start`` was sent
        self._failing = ""  # why the last ping did not arrive

    def start(self) -> None:
        """Begin to ping."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; do not wait for a ping under way beyond ``THREAD_PATIENCE``."""
        self._stop.set()
        self._thread.join(THREAD_PATIENCE)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._errors.attempt("pings", self.ping, vital=False)
            self._stop.wait(self._heartbeat.every.seconds)

    def ping(self) -> None:
        """Ping once. Log a failure once per reason, and the recovery."""
        status = self._status()
        if status.signal == "start" and self._started:
            return
        self._started = True
        body = f"notbefore {__version__} on {status.vm or 'unknown VM'}: {status.line}\n".encode()
        why = ""  # without the URL: it may be a secret
        try:
            parts = urlsplit(self._heartbeat.ping_url.reveal())
            if status.signal != "success":
                parts = parts._replace(path=f"{parts.path.rstrip('/')}/{status.signal}")
            answer = self._http.post(urlunsplit(parts), HEADERS, body)
            if answer.status // 100 != 2:  # noqa: PLR2004 - 2xx
                why = f"{parts.hostname} answers {answer.status}"
            elif answer.is_page:
                why = f"{parts.hostname} answers with a web page: a captive portal, or a proxy"
        except (
            ConfigError,
            SendError,
        ) as error:  # the secret cannot be read; the URL cannot be reached
            why = str(error)
        except ValueError:  # its text may show the URL
            why = "the URL is not valid"
        # the receiver may close a kept connection at the moment of the next ping: 60 s is a usual
        # time for both
        self._http.close()
        if why and why != self._failing:
            log.warning("heartbeat: ping_url was not reached: %s", why)
        elif self._failing and not why:
            log.info("heartbeat: ping_url is reached again")
        self._failing = why
