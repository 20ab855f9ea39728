"""``Pings``: a dead man's switch. While the agent polls well, a URL hears of it at each interval.

As healthchecks.io and others take it: a POST with the state as text, ``/start`` behind the path when the agent begins,
and ``/fail`` where it does not poll well. A courier would be started for each ping, and would stay: it is a thread of
the agent. Nothing is kept or tried again: the next ping says it as well.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final, Literal
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct

from notbefore import __version__
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.config.model import HeartbeatConfig
from notbefore.courier.http import Http
from notbefore.errors import ConfigError, SendError

PING_TIMEOUT: Final = 10.0  # seconds
STOP_PATIENCE: Final = 0.5  # seconds for the thread to end
HEADERS: Final = {"Content-Type": "text/plain; charset=utf-8"}

log = logging.getLogger("notbefore.agent.pings")


class PingStatus(Struct, frozen=True):
    """What a ping says."""

    signal: Literal["start", "success", "fail"]  # success: IMDS was polled well, and the state is written
    line: str  # in words
    vm: str | None  # its name


class Pings:
    """``status`` and ``heartbeat`` are asked at each ping, in a thread that runs only where it is wanted."""

    def __init__(
        self,
        status: Callable[[], PingStatus],
        heartbeat: Callable[[], HeartbeatConfig | None],
        errors: ThreadGuard,
    ) -> None:
        self._status = status
        self._heartbeat = heartbeat
        self._errors = errors
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._http = Http(PING_TIMEOUT)
        self._started = False  # the start was said
        self._failing = ""  # why the last ping did not arrive

    def reconfigure(self) -> None:
        """Start, keep or stop the thread, as the configuration says."""
        self._changed.set()
        if self._thread is None and self._heartbeat() is not None:
            self._thread = threading.Thread(target=self._run, name="pings", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(STOP_PATIENCE)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._changed.clear()
            with self._errors.guarded("pings", vital=False):
                self.ping()
            heartbeat = self._heartbeat()
            self._changed.wait(heartbeat.every.seconds if heartbeat is not None else None)

    def ping(self) -> None:
        """Ping once, if it is configured; log once why it does not arrive, and that it does again."""
        heartbeat, status = self._heartbeat(), self._status()
        if heartbeat is None or (status.signal == "start" and self._started):
            return
        self._started = True
        why = self._sent(heartbeat, status)
        if why and why != self._failing:
            log.warning("heartbeat: ping_url was not reached: %s", why)
        elif self._failing and not why:
            log.info("heartbeat: ping_url is reached again")
        self._failing = why

    def _sent(self, heartbeat: HeartbeatConfig, status: PingStatus) -> str:
        """Send it; returns why it was not accepted, without the address; empty if it was."""
        body = f"notbefore {__version__} on {status.vm or 'unknown VM'}: {status.line}\n".encode()
        try:
            parts = urlsplit(heartbeat.ping_url.reveal())
            if status.signal != "success":
                parts = parts._replace(path=f"{parts.path.rstrip('/')}/{status.signal}")
            answer = self._http.request("POST", urlunsplit(parts), HEADERS, body)
        except (ConfigError, SendError) as error:  # a secret that cannot be read; nobody there
            return str(error)
        except ValueError:  # its text may show the address
            return "this is not an address"
        return "" if answer.status // 100 == 2 else f"{parts.hostname} answers {answer.status}"  # noqa: PLR2004 - 2xx
