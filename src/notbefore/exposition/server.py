"""``HttpServer``: waitress, hardened against clients that connect and then say little or nothing.

One thread polls all connections; only a complete request takes one of a few worker threads. TLS belongs into a channel
class of its own, whose socket is a non-blocking ``SSLSocket``.
"""

import errno
import logging
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer

from notbefore.errors import ListenError

try:
    import resource
except ImportError:  # Windows  # pragma: no cover - the tests run on POSIX
    resource = None  # type: ignore[assignment]

WORKERS: Final = 4
MAX_PORT: Final = 65_535
MAX_CONNECTIONS: Final = 2_000 if hasattr(select, "poll") else 300  # Windows' select takes 512 sockets
MAX_HEADER: Final = 16 * 1024  # bytes
MAX_BODY: Final = 64 * 1024  # bytes; nothing here reads a body
REQUEST_PATIENCE: Final = 10.0  # seconds for a request to arrive, from its first byte or the connection's opening
IDLE_PATIENCE: Final = 120.0  # seconds between two requests of one connection; scrapes come each minute or more often
CLEANUP: Final = 2.0  # seconds between two looks at the connections, while there are any
ACCEPTS: Final = 128  # connections taken from the backlog at a time

log = logging.getLogger("notbefore.http")


class HttpServer:
    """Serves a WSGI application at ``listen`` (``host:port``, ``[v6]:port``, ``:port`` for every address).

    The constructor binds; it raises ``ListenError``.
    """

    def __init__(self, listen: str, app: Any) -> None:
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # it warns of each request that waits a moment
        _raise_file_limit()
        bound = _bind(listen)
        self.address: tuple[str, int] = bound.getsockname()[:2]
        settings = Adjustments(
            threads=WORKERS,
            connection_limit=MAX_CONNECTIONS + ACCEPTS,  # _Server makes room before this is reached
            cleanup_interval=CLEANUP,
            channel_timeout=IDLE_PATIENCE,
            max_request_header_size=MAX_HEADER,
            max_request_body_size=MAX_BODY,
            ident=None,
            asyncore_use_poll=True,
            log_socket_errors=False,
        )
        self._map: dict[int, Any] = {}
        sockinfo = (bound.family, bound.type, bound.proto, bound.getsockname())
        self._server = _Server(app, map=self._map, _sock=bound, adj=settings, sockinfo=sockinfo, bind_socket=False)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def url(self) -> str:
        """Where it is reached from this machine."""
        host, port = self.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - told apart, not bound
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        """Begin to serve, in threads of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop within a second, whatever the connections are at."""
        self._stopping = True
        self._server.pull_trigger()
        if self._thread.is_alive():
            self._thread.join(0.5)
        self._server.task_dispatcher.shutdown(timeout=0.4)
        wasyncore.close_all(self._map, ignore_all=True)

    def _run(self) -> None:
        while not self._stopping:
            # without connections there is nothing to clean up, and a new one wakes the poll
            timeout = CLEANUP if self._server.active_channels else 3600.0
            wasyncore.loop(timeout=timeout, use_poll=True, map=self._map, count=1)


class _Channel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """A connection that knows since when it keeps us waiting."""

    waiting_since: float
    served: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.waiting_since = time.monotonic()
        super().__init__(*args, **kwargs)

    def received(self, data: bytes) -> bool:
        if self.request is None:
            self.waiting_since = time.monotonic()
        result: bool = super().received(data)
        if self.requests:
            self.served = True
            self.waiting_since = time.monotonic()
        return result

    def handle_error(self) -> None:
        # a client that goes away in the middle of anything is no error of ours
        log.debug("connection from %s: closed on %r", self.addr, sys.exc_info()[1])
        self.handle_close()

    @property
    def busy(self) -> bool:
        """A request of it is being answered."""
        return bool(self.requests)

    def overdue(self, now: float) -> bool:
        """It has had its time: to send a request, to read its answer, or to come back with another request."""
        idle = self.served and self.request is None and not self.total_outbufs_len
        return not self.busy and now - self.waiting_since > (IDLE_PATIENCE if idle else REQUEST_PATIENCE)


class _Server(TcpWSGIServer):  # type: ignore[misc]  # waitress has no types
    channel_class = _Channel

    def handle_accept(self) -> None:
        """Take many from the backlog at once: a scrape may be behind a thousand others."""
        for _ in range(ACCEPTS):
            before = len(self._map)
            super().handle_accept()
            if len(self._map) == before:
                break
        self._make_room()

    def maintenance(self, _now: float) -> None:
        """Close who has had his time. waitress counts from the last byte: who drips would stay for ever."""
        now = time.monotonic()
        for channel in list(self.active_channels.values()):
            if channel.overdue(now):
                channel.handle_close()

    def _make_room(self) -> None:
        """At the limit the oldest connections without a request go, so that a newcomer is served."""
        excess = len(self.active_channels) - MAX_CONNECTIONS
        if excess <= 0:
            return
        waiting = sorted((c for c in self.active_channels.values() if not c.busy), key=lambda c: c.waiting_since)
        for channel in waiting[:excess]:
            channel.handle_close()


def _bind(listen: str) -> socket.socket:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise ListenError(f"server.listen: expected HOST:PORT such as 127.0.0.1:10169, got {listen!r}")
    bound: socket.socket | None = None
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        if bound is not None:
            bound.close()
        hint = ": is another notbefore running?" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise ListenError(f"cannot listen at {listen}: {error}{hint}") from error
    return bound


def _raise_file_limit() -> None:
    """Each connection is a file; the usual soft limit of 1,024 is less than ``MAX_CONNECTIONS``."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + ACCEPTS + 256
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
