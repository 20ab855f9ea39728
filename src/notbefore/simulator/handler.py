"""The simulator's HTTP: the answers of IMDS, and its refusals."""

import hashlib
import os
import socket
import struct
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from msgspec import Struct

from notbefore.errors import SimulatorError
from notbefore.simulator.scenarios import PREVIEW
from notbefore.simulator.state import Fault, SimulatorState, instance

EVENT_VERSIONS: Final = (
    PREVIEW,
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
)
OTHER_VERSIONS: Final = ("2017-08-01", "2018-02-01", "2019-08-01", "2020-09-01", "2021-02-01", "2023-07-01")
MAX_BODY: Final = 8 * 1024 * 1024  # bytes; a document that is too large for the agent must fit
METHODS: Final = {
    "/metadata/scheduledevents": "GET, POST",
    "/metadata/instance": "GET",
    "/metadata/identity/oauth2/token": "GET",
    "/simulator/state": "GET",
    "/simulator/start": "POST",
    "/simulator/fault": "POST",
    "/simulator/document": "POST",
    "/simulator/clear": "POST",
}
_REFUSED: Final = {
    "gone": HTTPStatus.GONE,
    "throttled": HTTPStatus.TOO_MANY_REQUESTS,
    "error": HTTPStatus.INTERNAL_SERVER_ERROR,
}


class _StartRequest(Struct):
    EventId: str


class _StartRequests(Struct):
    StartRequests: list[_StartRequest]
    DocumentIncarnation: int | None = None


class _ScenarioRequest(Struct, forbid_unknown_fields=True):
    scenario: str
    resources: list[str] = []
    cancel: bool = False
    reschedule: bool = False
    hold: bool = False
    event_id: str = ""
    speed: float | None = None


class _FaultRequest(Struct, forbid_unknown_fields=True):
    kind: str
    value: float | None = None
    times: int | None = None
    seconds: float | None = None


class Handler(BaseHTTPRequestHandler):
    """One connection. Paths below ``/vm/NAME`` are for that VM, others for the first."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_version = "IMDS/simulated"
    sys_version = ""
    timeout = 300  # seconds without a request, after which the connection is closed

    def do_GET(self) -> None:
        """The document, ``/metadata/instance``, ``/metadata/identity/oauth2/token``, and ``/simulator/state``."""
        vm, path, query = self._target()
        if self._body() is None or not self._exists(vm, path):
            return
        if path == "/simulator/state":
            self._json(HTTPStatus.OK, self._state.state())
        elif path == "/metadata/scheduledevents":
            if self._admit(query, EVENT_VERSIONS):
                self._document(query)
        elif path == "/metadata/instance":
            if self._admit(query, OTHER_VERSIONS):
                self._json(HTTPStatus.OK, instance(vm or ""))
        elif self._admit(query, OTHER_VERSIONS, "resource"):
            self._token(query)

    def do_POST(self) -> None:
        """Start requests, and ``/simulator/start|fault|document|clear``."""
        vm, path, query = self._target()
        body = self._body()
        if body is None or not self._exists(vm, path):
            return
        if path.startswith("/simulator/"):
            self._control(path.removeprefix("/simulator/"), body)
        elif self._admit(query, EVENT_VERSIONS):
            self._approve(body, query["api-version"])

    def do_PUT(self) -> None:
        """Refuse: neither IMDS nor the simulator has other methods than GET and POST."""
        vm, path, _query = self._target()
        if self._body() is not None:
            self._exists(vm, path)

    # http.server looks for these names
    do_DELETE = do_PUT  # noqa: N815
    do_HEAD = do_PUT  # noqa: N815
    do_PATCH = do_PUT  # noqa: N815
    do_OPTIONS = do_PUT  # noqa: N815

    def _exists(self, vm: str | None, path: str) -> bool:
        """Return whether there is this path with this method; answers 404 or 405 if not."""
        if vm is None or path not in METHODS:
            self._refuse(HTTPStatus.NOT_FOUND, "no such VM" if vm is None else "not found")
        elif self.command not in METHODS[path].split(", "):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "method not allowed", {"Allow": METHODS[path]})
        else:
            return True
        return False

    def _body(self) -> bytes | None:
        """Return the request's body; ``None`` if it was refused, which also closes the connection."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            status, text = HTTPStatus.LENGTH_REQUIRED, "Content-Length: expected a number of bytes"
        elif len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
            status, text = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY} bytes are read"
        else:
            return self.rfile.read(int(length))
        self.close_connection = True
        self._refuse(status, text, {"Connection": "close"})
        return None

    @property
    def _state(self) -> SimulatorState:
        state: SimulatorState = self.server.state  # type: ignore[attr-defined]  # it is a server._Server
        return state

    def _target(self) -> tuple[str | None, str, dict[str, str]]:
        url = urlsplit(self.path)
        vm: str | None = self._state.vms[0]
        path = url.path
        if path.startswith("/vm/"):
            name, _, rest = path.removeprefix("/vm/").partition("/")
            vm = next((known for known in self._state.vms if known.casefold() == unquote(name).casefold()), None)
            path = f"/{rest}"
        return vm, path, {name: values[-1] for name, values in parse_qs(url.query).items()}

    def _admit(self, query: dict[str, str], versions: tuple[str, ...], *needed: str) -> bool:
        """Return whether header, api-version and the parameters in ``needed`` are right; answers 400 if not."""
        if "X-Forwarded-For" in self.headers:
            self._refuse(HTTPStatus.BAD_REQUEST, "X-Forwarded-For: requests through a proxy are not answered")
            return False
        # the preview version does not require the header
        preview = versions is EVENT_VERSIONS and query.get("api-version") == PREVIEW
        if self.headers.get("Metadata", "").casefold() != "true" and not preview:
            self._refuse(HTTPStatus.BAD_REQUEST, "Required metadata header not specified")
            return False
        if query.get("api-version") not in versions:
            self._refuse(HTTPStatus.BAD_REQUEST, f"Bad request: api-version is one of {', '.join(versions)}")
            return False
        for name in needed:
            if name not in query:
                self._refuse(HTTPStatus.BAD_REQUEST, f"Required query variable '{name}' is missing")
                return False
        return True

    def _document(self, query: dict[str, str]) -> None:
        fault = self._state.take_fault()
        flapped = fault is not None and fault.kind == "flap" and fault.times % 2 == 1
        if fault is not None and fault.kind == "slow":
            self._state.hold(fault.value)
        body = self._state.body(query["api-version"], empty=flapped)
        if fault is not None and fault.kind not in ("slow", "reset", "flap"):
            self._fail(fault, body)
            return
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        if etag in (tag.strip() for tag in self.headers.get("If-None-Match", "").split(",")):
            self._send(HTTPStatus.NOT_MODIFIED, b"", {"ETag": etag})
        else:
            self._send(HTTPStatus.OK, body, {"ETag": etag})

    def _fail(self, fault: Fault, body: bytes) -> None:
        if fault.kind in _REFUSED or fault.kind == "status":
            headers = {"Retry-After": f"{fault.value:.0f}"} if fault.kind == "throttled" else {}
            status = _REFUSED.get(fault.kind) or HTTPStatus(int(fault.value))
            self._send(status, msgspec.json.encode({"error": fault.kind}), headers)
        elif fault.kind == "redirect":
            self._send(HTTPStatus.FOUND, b"", {"Location": "http://127.0.0.1:9/metadata/scheduledevents"})
        elif fault.kind == "garbage":
            self._send(HTTPStatus.OK, b"<html>Service Unavailable</html>", {})
        elif fault.kind == "freeze":
            self._state.hold(fault.value)
            self.close_connection = True
        elif fault.kind == "disconnect":
            self._disconnect()
        else:
            self._send_partly(body, fault)

    def _disconnect(self) -> None:
        """Reset the connection: with SO_LINGER of 0 seconds, a close sends RST instead of FIN."""
        self.close_connection = True
        linger = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        socket.close(self.connection.detach())

    def _send_partly(self, body: bytes, fault: Fault) -> None:
        """Send the first half (``half``), or one byte at a time (``drip``); then close the connection."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.close_connection = True
        if fault.kind == "half":
            self.wfile.write(body[: len(body) // 2])
            return
        try:
            for byte in body[:1000]:
                self.wfile.write(bytes([byte]))
                if not self._state.hold(fault.value):
                    return
        except OSError:
            pass  # the client has closed the connection: that is the purpose of this fault

    def _approve(self, body: bytes, api_version: str) -> None:
        try:
            requests = msgspec.json.decode(body, type=_StartRequests)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"malformed body: {error}")
            return
        if api_version == PREVIEW and requests.DocumentIncarnation is None:
            self._refuse(HTTPStatus.BAD_REQUEST, "DocumentIncarnation is missing")
            return
        fault = self._state.take_fault(start_request=True)
        if fault is not None and fault.kind == "start-status":
            self._refuse(HTTPStatus(int(fault.value)), fault.kind)
        elif not self._state.approve([request.EventId for request in requests.StartRequests]):
            self._refuse(HTTPStatus.BAD_REQUEST, "no such event")
        elif fault is not None:
            self._state.hold(fault.value)
            self.close_connection = True
        else:
            self._send(HTTPStatus.OK, b"", {})

    def _control(self, name: str, body: bytes) -> None:
        try:
            answer: dict[str, Any] = {}
            if name == "start":
                request = msgspec.json.decode(body, type=_ScenarioRequest)
                answer = {"EventId": self._state.start(**msgspec.structs.asdict(request))}
            elif name == "fault":
                self._state.fault(**msgspec.structs.asdict(msgspec.json.decode(body, type=_FaultRequest)))
            elif name == "document":
                self._state.set_document(body)
            else:
                self._state.clear()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, SimulatorError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        self._json(HTTPStatus.OK, answer)

    def _token(self, query: dict[str, str]) -> None:
        expires = 86_400
        self._json(
            HTTPStatus.OK,
            {
                "access_token": f"simulated-token-for-{query['resource']}",
                "client_id": query.get("client_id", "00000000-0000-0000-0000-000000000000"),
                "expires_in": str(expires),
                "expires_on": str(int(time.time()) + expires),
                "resource": query["resource"],
                "token_type": "Bearer",
            },
        )

    def _json(self, status: HTTPStatus, value: object) -> None:
        self._send(status, msgspec.json.encode(value), {})

    def _refuse(self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, msgspec.json.encode({"error": text}), headers or {})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request with JSON, as IMDS does for everything."""
        self.close_connection = True
        self._refuse(HTTPStatus(code), explain or message or HTTPStatus(code).phrase, {"Connection": "close"})

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Log nothing: there is a request each second."""
