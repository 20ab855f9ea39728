"""The listener's code without a network: bytes in, answers out, and what must be true of them for all bytes."""

import re
import socket
import ssl
from typing import Final

from waitress.adjustments import Adjustments

from notbefore.web.access import Access
from notbefore.web.app import make_app
from notbefore.web.auth import AccessControl
from notbefore.web.channel import Channel
from notbefore.web.server import MAX_BODY, MAX_HEADER
from notbefore.web.view import CheckResult
from notbefore.web.web_config import WebConfig
from support.shown import Shown

MAX_INPUT: Final = 16 * 1024
SECRET: Final = b"the-metrics"  # what nobody reads without a password
ALLOWED: Final = {200, 400, 401, 404, 405, 413, 421, 431, 501}
PASSWORD_NEEDED: Final = ALLOWED - {404}  # 200 and 405 are of probes
_PIECES: Final = re.compile(rb"\x00\x00\x00")  # in the input: a pause between two packets


def _view() -> Shown:
    view = Shown(SECRET * 200)
    view.verdict = CheckResult(ok=True, reasons=(SECRET.decode(),))
    return view


class _Access(Access):
    """With a user whose password nobody knows, or open to all."""

    def __init__(self, *, closed: bool) -> None:
        super().__init__()
        users = {"prometheus": "$2b$04$" + "." * 53}
        self._fixed = WebConfig(basic_auth_users=users) if closed else None

    def config(self) -> WebConfig | None:
        return self._fixed

    def context(self) -> ssl.SSLContext | None:
        return None


class _Server:
    """What a channel needs of its server; a request is answered at once, in the thread that reads."""

    server_name = "fuzzed"
    effective_port = 80

    def __init__(self, *, closed: bool) -> None:
        access = _Access(closed=closed)
        self.adj = Adjustments(
            ident=None, max_request_header_size=MAX_HEADER, max_request_body_size=MAX_BODY, log_socket_errors=False
        )
        self.application = AccessControl(make_app(_view()), access)
        self.active_channels: dict[int, Channel] = {}
        self.waiting: list[Channel] = []
        self.methods: list[str] = []  # of the requests

    def add_task(self, channel: Channel) -> None:
        request = channel.requests[0]
        self.methods.append("GET" if request.error is not None else request.command)
        self.waiting.append(channel)

    def pull_trigger(self) -> None:
        """Nobody waits."""


SERVERS: Final = {closed: _Server(closed=closed) for closed in (False, True)}


def answers(data: bytes, *, closed: bool) -> tuple[bytes, list[str]]:
    """What a client gets that sends ``data``, and the methods of its requests. ``closed``: passwords are needed."""
    server, (ours, theirs) = SERVERS[closed], socket.socketpair()
    said = b""
    with theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        channel = Channel(server, ours, ("10.0.0.4", 4444), server.adj, map={})
        try:
            for piece in _PIECES.split(data[:MAX_INPUT]):
                if not (channel.connected and channel.readable()):
                    break
                try:
                    channel.received(piece)
                except ValueError:  # of a target such as `http://[`
                    channel.handle_error()
                while server.waiting:
                    server.waiting.pop(0).service()
                    while channel.connected and channel.total_outbufs_len:
                        channel.handle_write()
                        said += _read(theirs)
                if channel.close_when_flushed:
                    channel.handle_write()
            said += _read(theirs)
        finally:
            server.waiting.clear()
            channel.handle_close()
    methods, server.methods = server.methods, []
    return said, methods


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1_000_000)
    except BlockingIOError:
        return b""


def check(data: bytes) -> list[int]:
    """Send ``data`` to both; returns the statuses of the open one. Raises ``AssertionError`` if something is wrong."""
    found = _statuses(*answers(data, closed=False))
    assert set(found) <= ALLOWED, found
    said, methods = answers(data, closed=True)
    assert SECRET not in said, "read without a password"
    assert set(_statuses(said, methods)) <= PASSWORD_NEEDED, said[:500]
    return found


def _statuses(said: bytes, methods: list[str]) -> list[int]:
    """Read the answers, to the last byte: one for each request, unless the connection was closed before."""
    found = []
    for method in methods:
        said = said.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not said:
            break
        head, end, said = said.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        status = re.fullmatch(rb"HTTP/1\.[01] (\d{3}) [A-Za-z -]+", first)
        assert end, head[:500]
        assert status, first
        assert all(re.fullmatch(rb"[A-Za-z-]+: [\t -~]*", line) for line in lines), head[:500]
        (length,) = [int(line.partition(b": ")[2]) for line in lines if line.startswith(b"Content-Length: ")]
        length = 0 if method == "HEAD" else length
        assert len(said) >= length, head
        said = said[length:]
        found.append(int(status[1]))
    assert said in (b"", b"HTTP/1.1 100 Continue\r\n\r\n"), said[:500]
    return found
