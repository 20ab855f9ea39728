"""``HttpServer``: waitress, with limits for clients that connect and then send or read little or nothing.

One thread polls all connections, and makes TLS handshakes; only a complete request occupies one of a few workers.
"""

import errno
import logging
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.server import TcpWSGIServer

from notbefore.config.model import host_and_port
from notbefore.errors import ConfigError, ListenError
from notbefore.web.access import Access
from notbefore.web.auth import AccessControl
from notbefore.web.channel import Channel

if TYPE_CHECKING:  # imported where it is configured
    from notbefore.web.tls_channel import TlsChannel

try:
    import resource
except ImportError:  # Windows  # pragma: no cover - the tests run on POSIX
    resource = None  # type: ignore[assignment]  # Windows has no such limit

WORKERS: Final = 4  # threads that answer; one may compare a password, two may read the history
MAX_CONNECTIONS: Final = 1_200 if hasattr(select, "poll") else 300  # Windows' select takes 512 sockets
MIN_CONNECTIONS: Final = 10  # however few files may be open
MAX_HEADER: Final = 8 * 1024  # bytes; each connection may hold that many
MAX_BODY: Final = 1024  # bytes; no request here has a body
ACCEPTS: Final = 100  # connections accepted between two polls
CLEANUP: Final = 2.0  # seconds between two checks of the connections, while there are any
OTHER_FILES: Final = 256  # files that are open beside the connections
HANDSHAKE_TIME: Final = 0.02  # seconds of handshakes between two polls: a thousand at once keep no scrape waiting
MAX_UNREAD: Final = 16 * 1024 * 1024  # bytes of answers that wait to be read, of all connections together

log = logging.getLogger("notbefore.http")


class HttpServer:
    """Serves a WSGI application at ``listen`` (``host:port``, ``[v6]:port``, ``:port`` for every address).

    The constructor binds; it raises ``ListenError``, and ``ConfigError`` where the address needs protection.
    """

    def __init__(self, listen: str, app: Any, access: Access | None = None) -> None:
        self._access = access = access or Access()
        self._control = AccessControl(app, access)
        logging.getLogger("waitress").setLevel(logging.ERROR)  # it warns of what a client does
        bound = _bind(listen)
        self.address: tuple[str, int] = bound.getsockname()[:2]
        try:
            access.check_address(self.address[0])
        except ConfigError:
            bound.close()
            raise
        access.add_name(host_and_port(listen)[0])
        for text in access.warnings(self.address[0]):
            log.warning(text)
        settings = Adjustments(
            threads=WORKERS,
            connection_limit=_connection_limit(),
            cleanup_interval=CLEANUP,
            # no worker waits for a reader, and nothing goes to the disk: ``drop_unread`` bounds it
            outbuf_high_watermark=sys.maxsize,
            outbuf_overflow=sys.maxsize,
            max_request_header_size=MAX_HEADER,
            max_request_body_size=MAX_BODY,
            ident=None,
            log_socket_errors=False,
        )
        self._map: dict[int, Any] = {}
        sockinfo = (bound.family, bound.type, bound.proto, bound.getsockname())
        self._server = _Server(
            self._control, access, map=self._map, _sock=bound, adj=settings, sockinfo=sockinfo, bind_socket=False
        )
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def auth_failures(self) -> int | None:
        """Requests with a wrong user or password since the start; ``None`` where no password is needed."""
        return self._control.failures.count if self._access.has_passwords else None

    @property
    def url(self) -> str:
        """Where it is reached from this machine."""
        host, port = self.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
        scheme = "https" if self._access.context() else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def start(self) -> None:
        """Serve, in threads of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop within a second, whatever the connections do; where a password is being compared, after that."""
        self._stopping = True
        with suppress(OSError):  # it may be closed already
            self._server.pull_trigger()
        if self._thread.is_alive():
            self._thread.join(0.5)
        self._server.task_dispatcher.shutdown(timeout=0.4)
        self._control.passwords.close()
        wasyncore.close_all(self._map, ignore_all=True)

    def _run(self) -> None:
        while not self._stopping:
            # without connections there is nothing to clean up, and a new one wakes the poll
            timeout = CLEANUP if self._server.active_channels else 3600.0
            wasyncore.loop(timeout=timeout, use_poll=True, map=self._map, count=1)
            if self._server.cleanup_due:
                self._server.clean_up()
            self._server.go_on_with_handshakes()
            self._server.drop_unread()


class _Server(TcpWSGIServer):  # type: ignore[misc]  # waitress has no types
    def __init__(self, app: AccessControl, access: Access, **kwargs: Any) -> None:
        self.handshakes: list[TlsChannel] = []  # those that can go on
        self.cleanup_due = False
        self._access = access
        super().__init__(app, **kwargs)

    def channel_class(self, *args: Any, **kwargs: Any) -> Channel:
        """The channel of a new connection."""
        if self._access.context() is None:
            return Channel(*args, **kwargs)
        from notbefore.web.tls_channel import TlsChannel  # noqa: PLC0415 - only where it is configured

        return TlsChannel(*args, context=self._access.context, **kwargs)

    def handle_accept(self) -> None:
        """Accept many at once: a scrape may wait behind a thousand others, and each poll asks all connections."""
        for _ in range(ACCEPTS):
            before = len(self._map)
            super().handle_accept()
            if len(self._map) == before:
                break

    def maintenance(self, _now: float) -> None:
        """Have the connections looked at behind this poll: what is closed while it is prepared is polled all the same.

        The number of its file would be another connection's by then, which would be closed in its place.
        """
        self.cleanup_due = True

    def clean_up(self) -> None:
        """Close the overdue; near the limit the oldest without a request, so that there is room for a tenth more."""
        now, self.cleanup_due = time.monotonic(), False
        for channel in list(self.active_channels.values()):
            if channel.overdue(now):
                channel.handle_close()
        excess = len(self._map) - int(0.9 * self.adj.connection_limit)
        if excess > 0:
            waiting = sorted((c for c in self.active_channels.values() if not c.requests), key=lambda c: c.since)
            for channel in waiting[:excess]:
                channel.handle_close()

    def go_on_with_handshakes(self) -> None:
        """For a moment, the newest first; the next poll finds the others again."""
        deadline = time.monotonic() + HANDSHAKE_TIME
        self.handshakes.sort(key=lambda channel: channel.since)
        while self.handshakes and time.monotonic() < deadline:
            self.handshakes.pop().handshake()
        self.handshakes.clear()

    def drop_unread(self) -> None:
        """Where too many bytes wait to be read, close those that have been asked for first."""
        waiting = [channel for channel in self.active_channels.values() if channel.total_outbufs_len]
        unread = sum(channel.total_outbufs_len for channel in waiting)
        for channel in sorted(waiting, key=lambda one: one.since):
            if unread <= MAX_UNREAD:
                break
            unread -= channel.total_outbufs_len
            channel.handle_close()

    def handle_error(self) -> None:
        """Log it, and go on listening: waitress would close the listener for good."""
        log.error("a connection could not be accepted", exc_info=sys.exc_info())


def _bind(listen: str) -> socket.socket:
    """A socket that listens: of two that bind at the same moment, only that says which one has the port."""
    host, port = host_and_port(listen)
    bound: socket.socket | None = None
    try:
        bound = None if host else _bind_everywhere(port)
        if bound is None:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            bound = socket.socket(family, kind, protocol)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        bound.listen()
    except (OSError, UnicodeError) as error:
        if bound is not None:
            bound.close()
        hint = ": is another notbefore running?" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise ListenError(f"cannot listen at {listen}: {error}{hint}") from error
    return bound


def _bind_everywhere(port: int) -> socket.socket | None:
    """A socket for IPv6 and IPv4; ``None`` where the machine has no IPv6."""
    if not socket.has_dualstack_ipv6():
        return None
    bound = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("::", port))
    except OSError as error:
        bound.close()
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None
    return bound


def _connection_limit() -> int:
    """How many connections there may be: each is a file, and the usual soft limit is 1,024."""
    if resource is None:
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_CONNECTIONS
    with suppress(ValueError, OSError):
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(MIN_CONNECTIONS, soft - OTHER_FILES)
