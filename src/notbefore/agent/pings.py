"""``Pings``: a dead man's switch.

While the agent works, it sends a request to a URL at each interval.

The form is that of healthchecks.io and others: a POST with the status as text. The path ends with
``/start`` when the agent begins, and with ``/fail`` if it is not ready. A thread of the agent sends
it, because pings would keep a courier running all the time. A failed ping is not repeated: the next
one says the same.
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
SUCCESS: Final = range(200, 300)
TEXT_HEADERS: Final = {"Content-Type": "text/plain; charset=utf-8"}

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
        self._failing = ""  # why the last ping did not arrive, in words

    def start(self) -> None:
        """Begin to ping."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Wait for a ping under way at most ``THREAD_PATIENCE`` seconds."""
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

        failure = self._send(status)
        if failure and failure != self._failing:
            log.warning("heartbeat: ping_url was not reached: %s", failure)
        elif self._failing and not failure:
            log.info("heartbeat: ping_url is reached again")
        self._failing = failure

    def _send(self, status: PingStatus) -> str:
        """Send a ping; return why it did not arrive, without the URL, which may be a secret."""
        vm = status.vm or "unknown VM"
        body = f"notbefore {__version__} on {vm}: {status.line}\n"
        try:
            url = urlsplit(self._heartbeat.ping_url.reveal())
            if status.signal != "success":
                url = url._replace(path=f"{url.path.rstrip('/')}/{status.signal}")
            answer = self._http.post(urlunsplit(url), TEXT_HEADERS, body.encode())
        except (ConfigError, SendError) as error:  # no secret in its file, or no answer
            return str(error)
        except ValueError:  # its text may show the URL
            return "the URL is not valid"
        finally:
            # a receiver may close a kept connection just when the next ping is sent: both often
            # happen after 60 s
            self._http.close()

        if answer.status not in SUCCESS:
            return f"{url.hostname} answers {answer.status}"
        if answer.is_page:
            return f"{url.hostname} answers with a web page: a captive portal, or a proxy"
        return ""
