"""Serves a ``StubView`` in place of an agent's view, and sends requests to the server."""

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from notbefore.agent.view import AgentView
from notbefore.config.model import Server
from notbefore.core.tracked import PendingView
from notbefore.web.app import CheckResult
from notbefore.web.page.model import PageModel
from notbefore.web.page.render import render
from notbefore.web.server import HttpServer
from support.agent import PATIENCE

NOTHING_PENDING = PendingView(
    incarnation=1, last_successful_poll=None, vm=None, unreadable=0, events=()
)
METRICS = b"# TYPE up gauge\nup 1\n"
REQUEST = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"


class StubView(AgentView):
    """A view whose content a test sets."""

    def __init__(self, body: bytes = METRICS) -> None:
        self.verdict = CheckResult(ok=True)
        self.asked: list[tuple[datetime | None, int]] = []  # arguments of ``history``
        self.body = body
        self.broken = False  # whether ``ready`` raises
        self.listed = NOTHING_PENDING

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return self.body, f"text/plain; accept={accept}"

    def health(self) -> CheckResult:
        return self.verdict

    def ready(self) -> CheckResult:
        if self.broken:
            raise RuntimeError("a secret that no client may see")
        return self.verdict

    def pending(self) -> PendingView:
        return self.listed

    def history(self, since: datetime | None, limit: int) -> bytes:
        self.asked.append((since, limit))
        return b'{"changes":[]}'

    def page(self) -> bytes:
        return render(PageModel(now=datetime.now(UTC), ready=self.verdict))


@contextmanager
def serving(
    path: str | None = None,
    listen: str = "127.0.0.1:0",
    view: StubView | None = None,
    **access: Any,
) -> Iterator[HttpServer]:
    """Serve ``view`` with the web configuration at ``path``; ``access``: further settings."""
    settings = Server(listen=listen, web_config_file=path, **access)
    server = HttpServer(settings, (view or StubView()).app)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def ask(
    server: HttpServer,
    path: str,
    tls: ssl.SSLContext | None = None,
    /,
    method: str = "GET",
    **headers: str,
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Return status, headers and body of an answer.

    In the names of ``headers``, ``_`` stands for ``-``.
    """
    port = server.address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    if tls is not None:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE, context=tls)
    sent_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, headers=sent_headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def connected(server: HttpServer, stack: ExitStack, count: int = 1) -> list[socket.socket]:
    """Open connections; ``stack`` closes them."""
    clients: list[socket.socket] = []
    for _ in range(count):
        client = socket.create_connection(server.address, timeout=PATIENCE)
        clients.append(stack.enter_context(client))
    return clients


def read_all(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    octets = bytearray()
    with suppress(ConnectionResetError):
        while True:
            piece = client.recv(1_000_000)
            if not piece:
                break
            octets += piece
    return bytes(octets)


@contextmanager
def dripping(clients: list[Any]) -> Iterator[None]:
    """Send an endless header from each client, a byte each quarter of a second."""
    stop = threading.Event()

    def drip() -> None:
        piece = b"GET /metrics HTTP/1.1\r\nX-Slow: "
        while not stop.wait(0.25):
            for client in clients:
                with suppress(OSError):
                    client.send(piece)
            piece = b"x"

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE)
