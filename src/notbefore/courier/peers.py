"""``Peers``: whether the agents of other VMs are alive, so that only one of them notifies (``announce_by: leader``)."""

import http.client
import math
import ssl
import time
from collections.abc import Iterable
from contextlib import closing
from typing import Final
from urllib.parse import quote, urlsplit

from notbefore.config.sinks import PeersConfig

MAX_ASKED: Final = 10  # VMs: the first ones in Resources
TIMEOUT: Final = 1.0  # seconds for one answer
TOTAL: Final = 3.0  # seconds for all of them
KEPT: Final = 2.0  # seconds for which an answer holds: many messages at once ask about the same VM


class Peers:
    """Asks each agent at its configured address; without a configuration no agent is known to be alive."""

    def __init__(self, config: PeersConfig | None) -> None:
        self._config = config
        self._answers: dict[str, tuple[float, float]] = {}  # by VM: when it came (monotonic), and what `_ask` returned
        self._tls = ssl.create_default_context(cafile=config.ca_file) if config is not None else None

    def any_alive(self, names: Iterable[str], since: float = 0.0) -> bool:
        """One of these VMs has an agent that works, and has for ``since`` seconds, and so notifies itself.

        One that was started after a change may have missed it.
        """
        deadline = time.monotonic() + TOTAL
        asked = list(names)[:MAX_ASKED]
        return any(time.monotonic() < deadline and self._alive(name, since) for name in asked)

    def _alive(self, name: str, since: float) -> bool:
        came, watching = self._answers.get(name, (-math.inf, -math.inf))
        if time.monotonic() - came > KEPT:
            watching = self._ask(name)
            self._answers[name] = time.monotonic(), watching
        return watching >= since

    def _ask(self, name: str) -> float:
        """For how many seconds the agent of this VM has worked; minus infinity where none is known to work."""
        if self._config is None:
            return -math.inf
        url = urlsplit(self._config.url.replace("{vm}", quote(name, safe="")))
        host = url.hostname or ""
        connection: http.client.HTTPConnection  # which has no proxy, redirect or password of its own
        if url.scheme == "https":
            connection = http.client.HTTPSConnection(host, url.port, timeout=TIMEOUT, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, url.port, timeout=TIMEOUT)
        try:
            with closing(connection):
                connection.request("GET", url.path or "/")
                response = connection.getresponse()
                status, watching = response.status, float(response.headers.get("X-Notbefore-Watching", "inf"))
        except (OSError, http.client.HTTPException, ValueError):
            return -math.inf
        if status == http.HTTPStatus.UNAUTHORIZED:  # all that is known: it listens
            return math.inf
        return watching if 200 <= status < 300 else -math.inf  # noqa: PLR2004 - the class of a status
