"""The simulator's HTTP: what IMDS answers, and what it refuses."""

import hashlib
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from msgspec import Struct

from notbefore.errors import SimulatorError
from notbefore.simulator.state import Fault, State, instance

EVENT_VERSIONS: Final = (
    "2017-03-01",
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
)
OTHER_VERSIONS: Final = ("2017-08-01", "2018-02-01", "2019-08-01", "2020-09-01", "2021-02-01", "2023-07-01")
MAX_BODY: Final = 1024 * 1024
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


class _StartOrder(Struct, forbid_unknown_fields=True):
    scenario: str
    resources: list[str] = []
    cancel: bool = False
    reschedule: bool = False
    hold: bool = False
    event_id: str = ""
    speed: float | None = None


class _FaultOrder(Struct, forbid_unknown_fields=True):
    kind: str
    value: float | None = None
    times: int = 1


class Handler(BaseHTTPRequestHandler):
    """One connection. Paths with a leading ``/vm/NAME`` are for that VM, others for the first."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_version = "IMDS/simulated"
    timeout = 300  # seconds; a kept connection of an agent that has gone

    def do_GET(self) -> None:
        """The document, ``/metadata/instance``, ``/metadata/identity/oauth2/token``, and ``/simulator/state``."""
        vm, path, query = self._target()
        if path == "/simulator/state":
            self._json(HTTPStatus.OK, self._state.state())
        elif vm is None:
            self._refuse(HTTPStatus.NOT_FOUND, "no such VM")
        elif path == "/metadata/scheduledevents":
            if self._admit(query, EVENT_VERSIONS):
                self._document(query)
        elif path == "/metadata/instance":
            if self._admit(query, OTHER_VERSIONS):
                self._json(HTTPStatus.OK, instance(vm))
        elif path == "/metadata/identity/oauth2/token":
            if self._admit(query, OTHER_VERSIONS, "resource"):
                self._token(query)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "not found")

    def do_POST(self) -> None:
        """Start requests; ``/simulator/start|fault|document|clear`` take orders."""
        vm, path, query = self._target()
        length = self.headers.get("Content-Length", "0")
        body = self.rfile.read(min(int(length), MAX_BODY) if length.isdigit() else 0)
        if path.startswith("/simulator/"):
            self._order(path.removeprefix("/simulator/"), body)
        elif vm is None or path != "/metadata/scheduledevents":
            self._refuse(HTTPStatus.NOT_FOUND if vm is None else HTTPStatus.METHOD_NOT_ALLOWED, "not here")
        elif self._admit(query, EVENT_VERSIONS):
            self._approve(body, query["api-version"])

    @property
    def _state(self) -> State:
        state: State = self.server.state  # type: ignore[attr-defined]  # it is a server._Server
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
        """As strict as IMDS: the header, the version, what else the path needs."""
        # 2017-03-01 did not ask for the header
        if self.headers.get("Metadata", "").casefold() != "true" and query.get("api-version") != "2017-03-01":
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
            time.sleep(fault.value)
        body = self._state.body(query["api-version"], empty=flapped)
        if fault is not None and fault.kind not in ("slow", "reset", "flap"):
            self._fail(fault, body)
            return
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        if self.headers.get("If-None-Match") == etag:
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
            time.sleep(fault.value)
            self.close_connection = True
        else:
            self._send_partly(body, fault)

    def _send_partly(self, body: bytes, fault: Fault) -> None:
        """``half``: the first half; ``drip``: a byte at a time. Then the connection is cut."""
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
                self.wfile.flush()
                time.sleep(fault.value)
        except OSError:
            pass  # the client had enough: that is what this is for

    def _approve(self, body: bytes, api_version: str) -> None:
        try:
            requests = msgspec.json.decode(body, type=_StartRequests)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"malformed body: {error}")
            return
        if api_version == "2017-03-01" and requests.DocumentIncarnation is None:
            self._refuse(HTTPStatus.BAD_REQUEST, "DocumentIncarnation is missing")
        elif not self._state.approve([request.EventId for request in requests.StartRequests]):
            self._refuse(HTTPStatus.BAD_REQUEST, "no such event")
        else:
            self._send(HTTPStatus.OK, b"", {})

    def _order(self, name: str, body: bytes) -> None:
        try:
            answer: dict[str, Any] = {}
            if name == "start":
                order = msgspec.json.decode(body, type=_StartOrder)
                answer = {"EventId": self._state.start(**msgspec.structs.asdict(order))}
            elif name == "fault":
                self._state.fault(**msgspec.structs.asdict(msgspec.json.decode(body, type=_FaultOrder)))
            elif name == "document":
                self._state.set_document(body)
            elif name == "clear":
                self._state.clear()
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "orders are start, fault, document, clear")
                return
        except (msgspec.DecodeError, UnicodeDecodeError, SimulatorError) as error:
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

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._json(status, {"error": text})

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Nothing: a request each second would drown what matters."""
