"""``HttpServer``: waitress, hardened against clients that connect and then say little or nothing.

One thread polls all connections; only a complete request takes one of a few worker threads. Over TLS the same thread
shakes hands, a little at a time between two looks at the others, and with the newest first: who comes to ask does not
wait for a thousand who came before and are not in a hurry.
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
from waitress.server import TcpWSGIServer

from notbefore.errors import ConfigError, ListenError
from notbefore.web.access import Access
from notbefore.web.auth import guarded
from notbefore.web.channel import IDLE_PATIENCE, Channel, TlsChannel

try:
    import resource
except ImportError:  # Windows  # pragma: no cover - the tests run on POSIX
    resource = None  # type: ignore[assignment]  # Windows has no such limit

WORKERS: Final = 4
MAX_PORT: Final = 65_535
MAX_CONNECTIONS: Final = 1_200 if hasattr(select, "poll") else 300  # Windows' select takes 512 sockets
MAX_HEADER: Final = 8 * 1024  # bytes; each connection may have that many under way
MAX_BODY: Final = 1024  # bytes; nothing here reads a body
CLEANUP: Final = 2.0  # seconds between two looks at the connections, while there are any
OTHER_FILES: Final = 256  # what else may be open
ACCEPTS: Final = 128  # connections taken from the backlog at a time
UNREAD: Final = 16 * 1024 * 1024  # bytes of answers that wait to be read, of all connections together
FULL_PAUSE: Final = 1.0  # seconds without taking connections, where no file can be opened and none of ours be closed
SHAKES: Final = 0.02  # seconds of handshakes between two looks at all connections

log = logging.getLogger("notbefore.http")


class HttpServer:
    """Serves a WSGI application at ``listen`` (``host:port``, ``[v6]:port``, ``:port`` for every address).

    The constructor binds; it raises ``ListenError``, and ``ConfigError`` where ``access`` leaves the door open.
    """

    def __init__(self, listen: str, app: Any, access: Access | None = None) -> None:
        self._access = access = access or Access()
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # it warns of each request that waits a moment
        files = _raise_file_limit()
        bound = _bind(listen)
        self.address: tuple[str, int] = bound.getsockname()[:2]
        try:
            access.check_address(self.address[0])
        except ConfigError:
            bound.close()
            raise
        access.add_name(listen.rpartition(":")[0])
        for text in access.warnings(self.address[0]):
            log.warning(text)
        settings = Adjustments(
            threads=WORKERS,
            connection_limit=MAX_CONNECTIONS + ACCEPTS,  # _Server makes room before this is reached
            cleanup_interval=CLEANUP,
            channel_timeout=IDLE_PATIENCE,
            # no worker waits for a reader, and nothing goes to the disk: `relieve` sees to that
            outbuf_high_watermark=sys.maxsize,
            outbuf_overflow=sys.maxsize,
            max_request_header_size=MAX_HEADER,
            max_request_body_size=MAX_BODY,
            ident=None,
            asyncore_use_poll=True,
            log_socket_errors=False,
        )
        self._map: dict[int, Any] = {}
        sockinfo = (bound.family, bound.type, bound.proto, bound.getsockname())
        self._server = _Server(
            guarded(app, access),
            access=access,
            room=max(WORKERS, files - OTHER_FILES - ACCEPTS),
            map=self._map,
            _sock=bound,
            adj=settings,
            sockinfo=sockinfo,
            bind_socket=False,
        )
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def url(self) -> str:
        """Where it is reached from this machine."""
        host, port = self.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - told apart, not bound
        scheme = "https" if self._access.context() else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def start(self) -> None:
        """Begin to serve, in threads of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop within a second, whatever the connections are at."""
        self._stopping = True
        with suppress(OSError):  # it may be closed already
            self._server.pull_trigger()
        if self._thread.is_alive():
            self._thread.join(0.5)
        self._server.task_dispatcher.shutdown(timeout=0.4)
        wasyncore.close_all(self._map, ignore_all=True)

    def _run(self) -> None:
        while not self._stopping:
            # without connections there is nothing to clean up, and a new one wakes the poll
            timeout = CLEANUP if self._server.active_channels else 3600.0
            timeout = min(timeout, self._server.pause() or timeout)
            wasyncore.loop(timeout=timeout, use_poll=True, map=self._map, count=1)
            self._server.shake()
            self._server.relieve()


class _Server(TcpWSGIServer):  # type: ignore[misc]  # waitress has no types
    def __init__(self, *args: Any, access: Access, room: int, **kwargs: Any) -> None:
        self.to_shake: list[TlsChannel] = []  # those whose handshake could go on
        self._access = access
        self._room = room  # for connections, by the limit of open files
        self._said_full = False
        self._full_until = 0.0
        super().__init__(*args, **kwargs)

    def channel_class(self, *args: Any, **kwargs: Any) -> Channel:
        """What waitress makes of a new connection."""
        if self._access.context() is None:
            return Channel(*args, **kwargs)
        return TlsChannel(*args, context=self._access.context, **kwargs)

    def shake(self) -> None:
        """Go on with handshakes for a moment, the newest first; those not reached are found by the next poll."""
        deadline = time.monotonic() + SHAKES
        self.to_shake.sort(key=lambda channel: channel.waiting_since)
        while self.to_shake and time.monotonic() < deadline:
            self.to_shake.pop().shake()
        self.to_shake.clear()

    def relieve(self) -> None:
        """When more waits to be read than there is room for, those go who have not read for longest."""
        waiting = [channel for channel in self.active_channels.values() if channel.total_outbufs_len]
        unread = sum(channel.total_outbufs_len for channel in waiting)
        for channel in sorted(waiting, key=lambda one: one.moved):
            if unread <= UNREAD:
                break
            unread -= channel.total_outbufs_len
            channel.handle_close()

    def pause(self) -> float:
        """For how many seconds yet no connection is taken."""
        return max(0.0, self._full_until - time.monotonic())

    def readable(self) -> bool:
        """Whether the poll is to look for new connections."""
        return bool(super().readable()) and not self.pause()

    def handle_accept(self) -> None:
        """Take many from the backlog at once: a scrape may be behind a thousand others."""
        for _ in range(ACCEPTS):
            before = len(self._map)
            super().handle_accept()
            if len(self._map) <= before:
                break
        self._make_room()

    def handle_error(self) -> None:
        """Say it, and go on listening: waitress would close the listener for good."""
        log.error("taking a connection failed", exc_info=sys.exc_info())

    def maintenance(self, _now: float) -> None:
        """Close who has had his time. waitress counts from the last byte: who drips would stay for ever."""
        now = time.monotonic()
        for channel in list(self.active_channels.values()):
            if channel.overdue(now):
                channel.handle_close()

    def _make_room(self) -> None:
        """At the limit the oldest connections without a request go, so that a newcomer is served."""
        excess = len(self.active_channels) - min(MAX_CONNECTIONS, self._room)
        if excess > 0:
            self._close_oldest(excess)

    def accept(self) -> tuple[socket.socket, Any] | None:
        """Take one connection from the backlog."""
        try:
            taken: tuple[socket.socket, Any] | None = super().accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if not self._said_full:
                    log.error("no more files can be opened: the oldest connections are closed")  # noqa: TRY400 - that is all
                self._said_full = True
                if not self._close_oldest(1):  # who waits would wake the poll again at once, and for ever
                    self._full_until = time.monotonic() + FULL_PAUSE
            raise
        return taken

    def _close_oldest(self, excess: int) -> bool:
        """Whether there was one to close."""
        waiting = sorted((c for c in self.active_channels.values() if not c.busy), key=lambda c: c.waiting_since)
        for channel in waiting[:excess]:
            channel.handle_close()
        return bool(waiting)


def _bind(listen: str) -> socket.socket:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise ListenError(f"server.listen: expected HOST:PORT such as 127.0.0.1:10169, got {listen!r}")
    bound: socket.socket | None = None
    try:
        if not host and (everywhere := _bind_everywhere(int(port))) is not None:
            return everywhere
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


def _bind_everywhere(port: int) -> socket.socket | None:
    """IPv6 and IPv4 at once; ``None`` where the machine has no IPv6."""
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


def _raise_file_limit() -> int:
    """Each connection is a file; the usual soft limit of 1,024 is less than ``MAX_CONNECTIONS``. Returns what holds."""
    wanted = MAX_CONNECTIONS + ACCEPTS + OTHER_FILES
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        return raised
    return int(soft)
