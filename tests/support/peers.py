"""Receivers for sinks: real servers on loopback that a test lets accept, refuse, hang or drip."""

import http.server
import json
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

from support.agent import PATIENCE, free_port


class Request(NamedTuple):
    """A request to an ``HttpPeer``."""

    path: str
    headers: dict[str, str]
    body: bytes
    client: tuple[str, int] = ("", 0)  # address and port of the client
    status: int = 200  # of the answer that the test has set
    method: str = "POST"


class Answer(NamedTuple):
    """An answer of an ``HttpPeer``.

    ``how``: ``plain``; ``hang``: none, but the connection stays open; ``cut``: none, and the
    connection is closed; ``drip``: a byte each 0.3 seconds.
    """

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b"ok"
    how: str = "plain"


class HttpPeer:
    """An HTTP server. It sends each of ``answers`` once, and ``default`` afterwards.

    With an authority of ``trustme`` it speaks TLS; ``names``: the names of its certificate.
    """

    def __init__(
        self, authority: trustme.CA | None = None, *names: str, client_ca: trustme.CA | None = None
    ) -> None:
        self.requests: list[Request] = []
        self.answers: deque[Answer] = deque()
        self.default = Answer()
        self.read_whole = False  # whether a client has read an answer with its body to the end
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _handler_for(self))
        self.port: int = self._server.server_address[1]
        self.scheme = "http"
        if authority is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert(*(names or ("localhost", "127.0.0.1"))).configure_cert(context)
            if client_ca is not None:
                client_ca.configure_trust(context)
                context.verify_mode = ssl.CERT_REQUIRED
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.scheme = "https"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()

    def request(self, handler: http.server.BaseHTTPRequestHandler) -> Request:
        """Return the request that a handler has to answer: the last one of its client."""
        for request in reversed(self.requests):
            if request.client == handler.client_address:
                return request
        raise LookupError

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        """Send an answer. Subclasses replace it to answer as a real service does."""
        if answer.how == "hang":
            self._closing.wait(60.0)
        if answer.how in ("hang", "cut"):
            handler.close_connection = True
            return
        if answer.how == "drip":
            for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Slow: 1\r\n" * 50:
                if self._closing.wait(0.3):
                    return
                handler.wfile.write(bytes([byte]))
        handler.send_response(answer.status)
        for name, value in answer.headers:
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(answer.body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(answer.body)
            self.read_whole = True

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def kinds(self) -> list[str]:
        """The kind of each delivery to a webhook."""
        return [json.loads(request.body)["notbefore.delivery.kind"] for request in self.requests]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Log nothing: in some tests, clients close their connections on purpose."""


def _handler_for(peer: HttpPeer) -> type[http.server.BaseHTTPRequestHandler]:
    """Return a class of handlers that record each request, and let ``peer`` answer it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = peer.answers.popleft() if peer.answers else peer.default
            if answer == Answer():
                answer = _usual_answer(self.path)
            request = Request(
                self.path, headers, body, self.client_address, answer.status, self.command
            )
            peer.requests.append(request)
            peer.answer(self, answer)

        do_GET = do_HEAD = do_PATCH = do_POST  # noqa: N815 - names of the library

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    return Handler


def _usual_answer(path: str) -> Answer:
    """Return the answer of the service to which this path belongs."""
    if path.endswith("/api/v2/alerts"):  # of Alertmanager
        return Answer(body=b"")
    if path.endswith("/v2/enqueue"):  # of PagerDuty
        return Answer(202, body=b'{"status": "success"}')
    return Answer()


class MailPeer:
    """A mail server. It sends each of ``replies`` once to a DATA, and 250 afterwards.

    ``refuse``: the replies to some recipients. ``mails``: recipients and content of each mail.
    """

    def __init__(
        self, tls: str = "", password: str = "", authority: trustme.CA | None = None
    ) -> None:
        self.mails: list[tuple[list[str], bytes]] = []
        self.replies: deque[str] = deque()
        self.refuse: dict[str, str] = {}  # by recipient
        self._password = password
        options: dict[str, Any] = {}
        if authority is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
            if tls == "smtps":
                options["ssl_context"] = context
            else:
                options |= {"tls_context": context, "require_starttls": True}
        if password:
            options |= {
                "authenticator": self._check,
                "auth_required": True,
                "auth_require_tls": tls != "smtps",
            }
            if tls == "smtps":
                options["auth_exclude_mechanism"] = []
        self._controller = Controller(
            self, hostname="127.0.0.1", port=free_port(), ready_timeout=PATIENCE, **options
        )
        self._controller.start()
        self.port: int = self._controller.port

    def _check(
        self, _server: Any, _session: Any, _envelope: Any, _mechanism: str, data: Any
    ) -> AuthResult:
        is_right = isinstance(data, LoginPassword) and data.password.decode() == self._password
        return AuthResult(success=is_right, handled=False)

    async def handle_RCPT(  # noqa: N802 - its name in aiosmtpd
        self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any
    ) -> str:
        if address in self.refuse:
            return self.refuse[address]
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(  # noqa: N802 - its name in aiosmtpd
        self, _server: Any, _session: Any, envelope: Any
    ) -> str:
        reply = self.replies.popleft() if self.replies else "250 OK"
        if reply.startswith("2"):
            self.mails.append((list(envelope.rcpt_tos), envelope.content))
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._controller.stop()


@contextmanager
def black_hole(port: int) -> Iterator[str]:
    """Yield an address of this machine at which connections to a port time out.

    The listener's queue is full, so that the kernel drops further attempts.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.2", port))
        listener.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.2", port))
        yield "127.0.0.2"
