"""The receivers of the sinks: real servers on loopback that accept, refuse, hang, drip and lie as a
test says.
"""

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
    path: str
    headers: dict[str, str]
    body: bytes
    client: tuple[str, int] = ("", 0)  # the address of the connection
    status: int = 200  # of the answer, if it is given one
    method: str = "POST"


class Answer(NamedTuple):
    """One answer. ``how``: plain; hang, cut (none); drip (a byte now and then)."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b"ok"
    how: str = "plain"


class HttpPeer:
    """An HTTP server, over TLS with a ``trustme`` authority.

    It answers what ``answers`` says, and then ``default``.
    """

    def __init__(
        self, authority: trustme.CA | None = None, *names: str, client_ca: trustme.CA | None = None
    ) -> None:
        self.requests: list[Request] = []
        self.answers: deque[Answer] = deque()
        self.default = Answer()
        self.over = threading.Event()
        self.read_whole = False  # whether a client has read an answer with its body to the end
        peer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                headers = {k.lower(): v for k, v in self.headers.items()}
                answer = peer.answers.popleft() if peer.answers else peer.default
                if answer == Answer() and self.path.endswith("/api/v2/alerts"):
                    answer = Answer(body=b"")  # what Alertmanager answers
                if answer == Answer() and self.path.endswith("/v2/enqueue"):
                    answer = Answer(202, body=b'{"status": "success"}')  # what PagerDuty answers
                peer.requests.append(
                    Request(
                        self.path, headers, body, self.client_address, answer.status, self.command
                    )
                )
                peer.answer(self, answer)

            do_GET = do_HEAD = do_PATCH = do_POST  # noqa: N815 - names of the library

            def log_message(self, *_: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # clients that go away are what some tests are about

        self._server = Server(("127.0.0.1", 0), Handler)
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
        """What is to be answered there: the last one of ``requests`` may be another client's."""
        return next(
            request
            for request in reversed(self.requests)
            if request.client == handler.client_address
        )

    def answer(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        self.over.wait(60.0 if answer.how == "hang" else 0.0)
        if answer.how in ("hang", "cut"):
            handler.close_connection = True
            return
        if answer.how == "drip":
            for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Slow: 1\r\n" * 50:
                if self.over.wait(0.3):
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
        """Of a webhook: what each delivery was."""
        return [json.loads(request.body)["notbefore.delivery.kind"] for request in self.requests]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class MailPeer:
    """A mail server; ``replies`` are given to DATA in turn, then 250.

    ``refuse`` are recipients and their replies.
    """

    def __init__(
        self, tls: str = "", password: str = "", authority: trustme.CA | None = None
    ) -> None:
        self.mails: list[tuple[list[str], bytes]] = []
        self.replies: deque[str] = deque()
        self.refuse: dict[str, str] = {}
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
        right = isinstance(data, LoginPassword) and data.password.decode() == self._password
        return AuthResult(success=right, handled=False)

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
    """An address of this machine where no connection comes about: what is sent there is dropped."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.2", port))
        listener.listen(0)
        for _ in range(4):  # a queue that is full takes no more
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.2", port))
        yield "127.0.0.2"
