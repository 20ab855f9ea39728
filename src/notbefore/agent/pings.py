"""``Pings``: a dead man's switch. While the agent polls well, a URL hears of it at each interval.

As healthchecks.io and others take it: a POST with the state as text, ``/start`` behind the path when the agent begins,
and ``/fail`` where it does not poll well. A courier would be started for each ping, and would stay: it is a thread of
the agent. Nothing is kept or tried again: the next ping says it as well.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from notbefore import __version__
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.view import PingStatus
from notbefore.config.model import HeartbeatConfig
from notbefore.courier.http import Http
from notbefore.errors import ConfigError, SendError

PING_TIMEOUT: Final = 10.0  # seconds
STOP_PATIENCE: Final = 0.5  # seconds for the thread to end
HEADERS: Final = {"Content-Type": "text/plain; charset=utf-8"}

log = logging.getLogger("notbefore.agent.pings")


class Pings:
    """The thread ``pings`` of one configuration; ``status`` is asked at each ping."""

    def __init__(self, heartbeat: HeartbeatConfig, status: Callable[[], PingStatus], errors: ThreadGuard) -> None:
        self._heartbeat = heartbeat
        self._status = status
        self._errors = errors
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pings", daemon=True)
        self._http = Http(PING_TIMEOUT)
        self._started = False  # the start was said
        self._failing = ""  # why the last ping did not arrive

    def start(self) -> None:
        """Begin to ping."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a ping under way is not waited for."""
        self._stop.set()
        self._thread.join(STOP_PATIENCE)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._errors.attempt("pings", self.ping, vital=False)
            self._stop.wait(self._heartbeat.every.seconds)

    def ping(self) -> None:
        """Ping once; log once why it does not arrive, and that it does again."""
        status = self._status()
        if status.signal == "start" and self._started:
            return
        self._started = True
        body = f"notbefore {__version__} on {status.vm or 'unknown VM'}: {status.line}\n".encode()
        why = ""  # without the address
        try:
            parts = urlsplit(self._heartbeat.ping_url.reveal())
            if status.signal != "success":
                parts = parts._replace(path=f"{parts.path.rstrip('/')}/{status.signal}")
            answer = self._http.post(urlunsplit(parts), HEADERS, body)
            if answer.status // 100 != 2:  # noqa: PLR2004 - 2xx
                why = f"{parts.hostname} answers {answer.status}"
        except (ConfigError, SendError) as error:  # a secret that cannot be read; nobody there
            why = str(error)
        except ValueError:  # its text may show the address
            why = "this is not an address"
        if why and why != self._failing:
            log.warning("heartbeat: ping_url was not reached: %s", why)
        elif self._failing and not why:
            log.info("heartbeat: ping_url is reached again")
        self._failing = why
