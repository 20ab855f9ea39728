"""``HttpServer``: waitress, with limits for clients that connect and then send or read little or
nothing.

One thread polls all connections and makes TLS handshakes. Only a complete request occupies one of a
few workers.
"""

import errno
import logging
import math
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.server import TcpWSGIServer

from notbefore.config.model import Server, host_and_port, local_url
from notbefore.errors import ConfigError, ListenError
from notbefore.web.access import Access, AccessControl
from notbefore.web.channel import REQUEST_GRACE, Channel
from notbefore.web.tls_channel import TlsChannel

try:
    import resource
except ImportError:  # Windows  # pragma: no cover - the tests run on POSIX
    resource = None  # type: ignore[assignment]  # Windows has no such limit

WORKERS: Final = 4  # threads that answer requests; one of them may be checking a password
# without ``poll``, on Windows, ``select`` accepts 512 sockets
MAX_CONNECTIONS: Final = 1_200 if hasattr(select, "poll") else 300
MIN_CONNECTIONS: Final = 10  # even if fewer files may be open
OTHER_FILES: Final = 256  # open files that are not connections
FEW: Final = 0.9  # of the most connections; above that, those that wait longest are closed
MAX_HEADER: Final = 8 * 1024  # bytes per connection
MAX_BODY: Final = 1  # bytes: no request here has a body, whatever its Content-Length
# bytes of answers that clients have not read, all connections together; above that, those whose
# clients have not read for the longest time are closed
MAX_UNREAD: Final = 16 * 1024 * 1024
ACCEPTS: Final = 20  # connections accepted at once
# between two polls of all connections, which take a millisecond of 1,000, workers get time, and new
# ones are accepted
PAUSE_PER_CONNECTION: Final = 3e-6  # seconds per connection
SHORTEST_PAUSE: Final = 0.001  # seconds, because a poll counts milliseconds
# seconds between two checks of the connections, while there are any and nothing arrives
LOOK: Final = 2.0
FOREVER: Final = 3600.0  # seconds; without connections, only a new one or ``stop`` ends a poll

log = logging.getLogger("notbefore.http")


class HttpServer:
    """Serves a WSGI application at ``settings.listen``: ``host:port``, ``[v6]:port``, or ``:port``
    (every address).

    ``access``: who may read; by default as ``settings`` say. The constructor binds. It raises
    ``ListenError``, or ``ConfigError`` if the address needs protection.
    """

    def __init__(self, settings: Server, app: Any, access: Access | None = None) -> None:
        if access is None:
            access = Access(settings)
        self._access = access
        self._control = AccessControl(app, access)
        # waitress warns about the behavior of clients
        logging.getLogger("waitress").setLevel(logging.ERROR)
        bound = _bind(settings.listen)
        self.address: tuple[str, int] = bound.getsockname()[:2]
        try:
            for text in access.check_address(self.address[0]):
                log.warning(text)
        except ConfigError:
            bound.close()
            raise
        self._map: dict[int, Any] = {}
        sockinfo = (bound.family, bound.type, bound.proto, bound.getsockname())
        self._server = _Server(
            self._control,
            access,
            map=self._map,
            _sock=bound,
            adj=_adjustments(),
            sockinfo=sockinfo,
            bind_socket=False,
        )
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def url(self) -> str:
        """The URL for this machine."""
        return local_url(*self.address, tls=self._access.present().context is not None)

    def start(self) -> None:
        """Start the threads that serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop within a second, whatever the connections do.

        If a password is being checked, the stop waits for the result.
        """
        self._stopping = True
        with suppress(OSError):  # it may be closed already
            self._server.pull_trigger()
        if self._thread.is_alive():
            self._thread.join(0.5)
        self._server.task_dispatcher.shutdown(timeout=0.4)
        self._control.close()
        wasyncore.close_all(self._map, ignore_all=True)

    def _run(self) -> None:
        listener = {self._server.socket.fileno(): self._server}
        while not self._stopping:
            # without connections there is nothing to check; a new one wakes the poll, except near
            # the limit
            count = len(self._server.active_channels)
            if self._server.excess > 0:
                timeout = REQUEST_GRACE
            elif count:
                timeout = LOOK
            else:
                timeout = FOREVER
            wasyncore.loop(timeout=timeout, use_poll=True, map=self._map, count=1)
            if count:
                pause = max(PAUSE_PER_CONNECTION * count, SHORTEST_PAUSE)
                wasyncore.loop(timeout=pause, use_poll=True, map=listener, count=1)


def _adjustments() -> Adjustments:
    """Return the settings of waitress."""
    return Adjustments(
        # not used, because it gets a socket; the default would be resolved, see ``_bind``
        listen="*:0",
        threads=WORKERS,
        connection_limit=_connection_limit(),
        cleanup_interval=0,  # ``maintenance`` is called before each poll
        # workers do not wait for readers, and nothing is buffered on disk: ``maintenance`` sets
        # the bound
        outbuf_high_watermark=sys.maxsize,
        outbuf_overflow=sys.maxsize,
        max_request_header_size=MAX_HEADER,
        max_request_body_size=MAX_BODY,
        ident=None,
        log_socket_errors=False,
    )


class _Server(TcpWSGIServer):  # type: ignore[misc]  # waitress has no types
    active_channels: dict[int, Channel]

    def __init__(self, app: AccessControl, access: Access, **kwargs: Any) -> None:
        self._access = access
        super().__init__(app, **kwargs)

    def channel_class(self, *args: Any, **kwargs: Any) -> Channel:
        """Return the channel of a new connection."""
        context = self._access.present().context
        if context is None:
            return Channel(*args, **kwargs)
        return TlsChannel(context, *args, **kwargs)

    def handle_accept(self) -> None:
        """Accept several connections at once, and read what their clients have sent.

        A scrape may wait behind the others.
        """
        for _ in range(ACCEPTS):
            before = len(self._map)
            with suppress(OSError):  # the client has gone again
                super().handle_accept()
            if len(self._map) == before:
                break
            new = next(reversed(self.active_channels.values()))
            wasyncore.loop(timeout=0, use_poll=True, map={new.socket.fileno(): new}, count=1)

    @property
    def excess(self) -> int:
        """The number of connections above ``FEW`` of the limit; negative below it."""
        return len(self.active_channels) - int(FEW * self.adj.connection_limit)

    def maintenance(self, _now: float) -> None:
        """Shut down overdue connections.

        Near the limit of connections, also shut down those that wait longest for their clients.
        Near the limit of unread answers, also shut down those whose clients have not read for the
        longest time.

        The next poll closes them. They are not closed here: a connection that is closed while a
        poll is prepared would still be polled, and its file descriptor may belong to another
        connection by then.
        """
        now = time.monotonic()
        channels = list(self.active_channels.values())
        for channel in channels:
            if channel.overdue(now):
                _shut_down(channel)
        self._free_connections(channels, now)
        self._free_memory(channels)

    def _free_connections(self, channels: list[Channel], now: float) -> None:
        excess = self.excess
        if excess <= 0:
            return
        waiting = [channel for channel in channels if channel.is_idle(now)]
        waiting.sort(key=_since)
        for channel in waiting[:excess]:
            _shut_down(channel)

    def _free_memory(self, channels: list[Channel]) -> None:
        unread = sum(channel.total_outbufs_len for channel in channels)
        if unread <= MAX_UNREAD:
            return
        stalled = [channel for channel in channels if channel.stalled_since < math.inf]
        stalled.sort(key=_stalled_since)
        for channel in stalled:
            unread -= channel.total_outbufs_len
            _shut_down(channel)
            if unread <= MAX_UNREAD:
                return

    def handle_error(self) -> None:
        """Log the error, and continue to listen: waitress would close the listener for good."""
        log.error("a connection could not be accepted", exc_info=sys.exc_info())


def _since(channel: Channel) -> float:
    return channel.since


def _stalled_since(channel: Channel) -> float:
    return channel.stalled_since


def _shut_down(channel: Channel) -> None:
    """Let the next poll close a connection.

    It closes when it is writable: on Windows, what was shut down here is never readable.
    """
    channel.will_close = True
    with suppress(OSError):  # the client has gone
        # ``shutdown`` of an ``SSLSocket`` would continue in plain text
        socket.socket.shutdown(channel.socket, socket.SHUT_RDWR)


def _bind(listen: str) -> socket.socket:
    """Return a listening socket: if two processes bind at the same moment, only listening decides
    who has the port.
    """
    host, port = host_and_port(listen)
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        name = host or "0.0.0.0"  # noqa: S104 - asked for
        family, *_, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except (OSError, UnicodeError) as error:
        hint = ""
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            hint = ": is another notbefore running?"
        raise ListenError(f"cannot listen at {listen}: {error}{hint}") from error


def _connection_limit() -> int:
    """Return the number of connections that are possible: each one is an open file."""
    if resource is None:
        return MAX_CONNECTIONS
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    room = min(MAX_CONNECTIONS, most_files - OTHER_FILES)
    return max(MIN_CONNECTIONS, room)
