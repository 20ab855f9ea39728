"""``Simulator``: an IMDS on loopback, with faults on request.

It is as strict as the real one about header and api-version. With several VMs,
``http://HOST:PORT/vm/NAME`` is the endpoint of each, and ``http://HOST:PORT`` that of the first.
All VMs see the same events. ``control.PATHS`` drive it while it runs.
"""

import socketserver
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

import msgspec
from msgspec import Struct

from notbefore.simulator import control
from notbefore.simulator.state import Fault, SimulatorState, instance

EVENTS: Final = "/metadata/scheduledevents"
INSTANCE: Final = "/metadata/instance"
PREVIEW: Final = "2017-03-01"  # only its start requests have the DocumentIncarnation
VERSIONS: Final = {  # the api-versions of each path
    EVENTS: (
        PREVIEW,
        "2017-08-01",
        "2017-11-01",
        "2019-01-01",
        "2019-04-01",
        "2019-08-01",
        "2020-07-01",
        "2024-07-09",
    ),
    INSTANCE: ("2017-08-01", "2018-02-01", "2019-08-01", "2020-09-01", "2021-02-01", "2023-07-01"),
}
MAX_START_REQUEST: Final = 1024 * 1024  # bytes of a start request


class Simulator(SimulatorState):
    """The state, and the server around it.

    ``with Simulator() as sim:`` serves at ``sim.endpoint``.
    """

    def __init__(
        self,
        vms: Sequence[str] = ("WestNO_0",),
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        speed: float = 1.0,
    ) -> None:
        super().__init__(vms, speed)
        self._server = _Server(listen, self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="simulator", daemon=True
        )

    @property
    def endpoint(self) -> str:
        """The ``imds.endpoint`` for an agent on the first VM."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def endpoint_of(self, vm: str) -> str:
        """Return the ``imds.endpoint`` for an agent on one of the VMs."""
        return f"{self.endpoint}/vm/{quote(vm, safe='')}"

    def close(self) -> None:
        """Free the port, release clients that a fault holds, and end kept connections."""
        self._server.closed = True
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self.clear()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _StartRequest(Struct):
    EventId: str


class _StartRequests(Struct):
    """The body of a start request."""

    StartRequests: list[_StartRequest]
    DocumentIncarnation: int | None = None  # of the document that listed the events


class _RefusedError(Exception):
    """The answer is an error: a status and a text."""

    def __init__(self, text: str, status: int = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One connection. Paths below ``/vm/NAME`` are for that VM, other paths for the first."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 300  # seconds without a request, after which the connection is closed
    server: "_Server"

    def do_GET(self) -> None:
        """Answer a request of any method."""
        if self.server.closed:
            self.close_connection = True
            return
        try:
            self._answer()
        except _RefusedError as refusal:
            self._reply({"error": str(refusal)}, refusal.status)

    do_POST = do_GET  # noqa: N815 - the name is http.server's

    def _answer(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", "0"))
        except ValueError:
            self.close_connection = True
            raise _RefusedError("Content-Length: expected a number") from None
        url = urlsplit(self.path)
        if url.path in control.PATHS and length > control.MAX_REQUEST:
            self.close_connection = True
            text = f"the body has more than {control.MAX_REQUEST} bytes"
            raise _RefusedError(text, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        body = self.rfile.read(max(0, min(length, MAX_START_REQUEST)))

        if url.path in control.PATHS:
            self._drive(url.path, body)
        else:
            self._answer_as_imds(url, body)

    def _answer_as_imds(self, url: SplitResult, body: bytes) -> None:
        state = self.server.state
        name = state.vms[0]
        path = url.path
        if path.startswith("/vm/"):
            quoted_name, _, rest = path.removeprefix("/vm/").partition("/")
            name = unquote(quoted_name)
            path = f"/{rest}"
        if name not in state.vms or path not in VERSIONS:
            raise _RefusedError("not found", HTTPStatus.NOT_FOUND)
        self._require_local_client()
        *_, version = parse_qs(url.query).get("api-version", [""])
        self._check_version(path, version)

        if path == INSTANCE:
            self._reply(instance(name))
        elif self.command == "POST":
            self._approve(body, version)
        else:
            self._send_document()

    def _require_local_client(self) -> None:
        """Raise ``_RefusedError`` for a proxy, and for a client without the header of IMDS.

        A web page in a browser cannot send this header to another origin.
        """
        if "X-Forwarded-For" in self.headers:
            raise _RefusedError("X-Forwarded-For: requests through a proxy are not answered")
        if self.headers.get("Metadata", "").casefold() != "true":
            raise _RefusedError("Required metadata header not specified")

    def _drive(self, path: str, body: bytes) -> None:
        """Answer a request that changes the events or the faults."""
        if not control.may_drive(self.client_address[0]):
            text = f"{path}: only clients on this machine may drive the simulator"
            raise _RefusedError(text, HTTPStatus.FORBIDDEN)
        self._require_local_client()
        if self.command != "POST":
            raise _RefusedError(f"{path}: expected POST", HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            answer = control.carry_out(self.server.state, path, body)
        except ValueError as error:
            raise _RefusedError(str(error)) from None
        self._reply(answer)

    def _check_version(self, path: str, version: str) -> None:
        """Raise ``_RefusedError`` unless the path is known in this api-version."""
        if version not in VERSIONS[path]:
            raise _RefusedError(f"api-version is one of {', '.join(VERSIONS[path])}")
        refusal = self.server.state.refusal_of(version)
        if path == EVENTS and refusal is not None:
            raise _RefusedError(f"api-version {version} is not known", refusal)

    def _send_document(self) -> None:
        """Send the document, or what the next fault says."""
        state = self.server.state
        fault = state.take_fault()
        if fault is None:
            self._send(HTTPStatus.OK, state.body())
        elif fault.status is not None:
            raise _RefusedError(fault.kind, fault.status)
        elif fault.kind == "empty":
            self._send(HTTPStatus.OK, b"")
        elif fault.kind == "slow":
            state.hold(fault.value)
            self._send(HTTPStatus.OK, state.body())
        elif fault.kind == "garbage":
            self._send(HTTPStatus.OK, b"<html>Service Unavailable</html>")
        else:
            self._freeze(fault)

    def _freeze(self, fault: Fault) -> None:
        """Send nothing for the time of the fault, and close the connection."""
        self.server.state.hold(fault.value)
        self.close_connection = True

    def _approve(self, body: bytes, version: str) -> None:
        try:
            requests = msgspec.json.decode(body, type=_StartRequests)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _RefusedError(f"malformed body: {error}") from None
        if version == PREVIEW and requests.DocumentIncarnation is None:
            raise _RefusedError("DocumentIncarnation: expected a number")
        event_ids = [request.EventId for request in requests.StartRequests]
        fault = self.server.state.take_fault(start_request=True)
        if fault is not None and fault.status is not None:
            raise _RefusedError(fault.kind, fault.status)
        if not self.server.state.approve(event_ids):
            raise _RefusedError("no such event")
        self.server.state.start_incarnations.append(requests.DocumentIncarnation)
        if fault is not None:
            self._freeze(fault)
        else:
            self._send(HTTPStatus.OK, b"")

    def _reply(self, value: object, status: int = HTTPStatus.OK) -> None:
        self._send(status, msgspec.json.encode(value))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Log nothing: there is a request each second."""


class _Server(ThreadingHTTPServer):
    """Serves each connection in a thread of its own."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, listen: tuple[str, int], state: SimulatorState) -> None:
        self.state = state
        self.closed = False
        super().__init__(listen, _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's DNS query for this machine's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing for clients that went away: many faults cause it."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
