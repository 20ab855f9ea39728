"""The simulator's HTTP: the answers of IMDS, and its refusals."""

import os
import socket
import struct
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from msgspec import Struct

from notbefore.simulator.state import Fault, SimulatorState, instance

EVENT_VERSIONS: Final = ("2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01")
OTHER_VERSIONS: Final = ("2017-08-01", "2018-02-01", "2019-08-01", "2020-09-01", "2021-02-01", "2023-07-01")
EVENTS: Final = "/metadata/scheduledevents"
INSTANCE: Final = "/metadata/instance"
MAX_BODY: Final = 1024 * 1024  # bytes of a start request


class _StartRequest(Struct):
    EventId: str


class _StartRequests(Struct):
    StartRequests: list[_StartRequest]


class _RefusedError(Exception):
    """The answer is a status and a text instead of what was asked for."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


class Handler(BaseHTTPRequestHandler):
    """One connection. Paths below ``/vm/NAME`` are for that VM, others for the first."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_version = "IMDS/simulated"
    sys_version = ""
    timeout = 300  # seconds without a request, after which the connection is closed

    def do_GET(self) -> None:
        """Answer a request, whatever its method is."""
        try:
            self._answer()
        except _RefusedError as refusal:
            self.reply({"error": str(refusal)}, refusal.status, **refusal.headers)

    # http.server looks for these names
    do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = do_GET  # noqa: N815 - http.server's

    def _answer(self) -> None:
        body, url = self._body(), urlsplit(self.path)
        version = parse_qs(url.query).get("api-version", [""])[-1]
        name, path = self.state.vms[0], url.path
        if path.startswith("/vm/"):
            name, _, rest = path.removeprefix("/vm/").partition("/")
            name, path = unquote(name), f"/{rest}"
        vm = next((known for known in self.state.vms if known.casefold() == name.casefold()), None)
        if vm is None or path not in (EVENTS, INSTANCE):
            raise _RefusedError(HTTPStatus.NOT_FOUND, "no such VM" if vm is None else "not found")
        allowed = ("GET", "POST") if path == EVENTS else ("GET",)
        if self.command not in allowed:
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "method not allowed", Allow=", ".join(allowed))
        if path == INSTANCE:
            self._admit(version, OTHER_VERSIONS)
            self.reply(instance(vm))
            return
        self._admit(version, EVENT_VERSIONS)
        if self.command == "GET":
            self._document(version)
        else:
            self._approve(body)

    def _body(self) -> bytes:
        """Return the request's body; one that is refused closes the connection."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            text = "Content-Length: expected a number of bytes"
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, text, Connection="close")
        if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
            text = f"at most {MAX_BODY} bytes are read"
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, Connection="close")
        return self.rfile.read(int(length))

    @property
    def state(self) -> SimulatorState:
        """The VMs, what plays, and what fails."""
        state: SimulatorState = self.server.state  # type: ignore[attr-defined]  # it is a server._Server
        return state

    def _admit(self, version: str, versions: tuple[str, ...]) -> None:
        """Raise ``_RefusedError`` unless header and api-version are right."""
        text = ""
        if "X-Forwarded-For" in self.headers:
            text = "X-Forwarded-For: requests through a proxy are not answered"
        elif self.headers.get("Metadata", "").casefold() != "true":
            text = "Required metadata header not specified"
        elif version not in versions:
            text = f"Bad request: api-version is one of {', '.join(versions)}"
        if text:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, text)

    def _document(self, version: str) -> None:
        fault = self.state.take_fault()
        if fault is not None and fault.kind != "slow":
            self._fail(fault, version)
            return
        if fault is not None:
            self.state.hold(fault.value)
        self.send(HTTPStatus.OK, self.state.body(version))

    def _fail(self, fault: Fault, version: str) -> None:
        """Answer as the fault says."""
        if fault.status is not None:
            asked = {429: {"Retry-After": "2"}, 302: {"Location": "http://127.0.0.1:9/metadata/scheduledevents"}}
            self.reply({"error": fault.kind}, fault.status, **asked.get(fault.status, {}))
            return
        if fault.kind == "garbage":
            self.send(HTTPStatus.OK, b"<html>Service Unavailable</html>")
            return
        self.close_connection = True
        if fault.kind == "freeze":
            self.state.hold(fault.value)
        elif fault.kind == "half":
            body = self.state.body(version)
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
        else:  # "disconnect": with SO_LINGER of 0 seconds, a close sends RST instead of FIN
            linger = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            socket.close(self.connection.detach())

    def _approve(self, body: bytes) -> None:
        try:
            wanted = msgspec.json.decode(body, type=_StartRequests)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"malformed body: {error}") from None
        fault = self.state.take_fault(start_request=True)
        if fault is not None and fault.status is not None:
            raise _RefusedError(fault.status, fault.kind)
        if not self.state.approve([one.EventId for one in wanted.StartRequests]):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "no such event")
        if fault is not None:
            self.state.hold(fault.value)
            self.close_connection = True
        else:
            self.send(HTTPStatus.OK, b"")

    def reply(self, value: object, status: int = HTTPStatus.OK, **headers: str) -> None:
        """Send a value as JSON."""
        self.send(status, msgspec.json.encode(value), **headers)

    def send(self, status: int, body: bytes, **headers: str) -> None:
        """Send a whole answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request with JSON, as IMDS does for everything."""
        status = HTTPStatus(code)
        self.reply({"error": explain or message or status.phrase}, status, Connection="close")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Log nothing: there is a request each second."""
