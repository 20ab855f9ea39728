"""The simulator's HTTP: the answers of IMDS, and its refusals."""

import hashlib
import os
import socket
import struct
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from msgspec import Struct

from notbefore.errors import SimulatorError
from notbefore.simulator.scenarios import PREVIEW
from notbefore.simulator.state import Fault, SimulatorState, instance

EVENT_VERSIONS: Final = (PREVIEW, "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01")
OTHER_VERSIONS: Final = ("2017-08-01", "2018-02-01", "2019-08-01", "2020-09-01", "2021-02-01", "2023-07-01")
MAX_BODY: Final = 8 * 1024 * 1024  # bytes; a document that is too large for the agent must fit
Body = TypeVar("Body")


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


class _RefusedError(Exception):
    """The answer is a status and a text instead of what was asked for."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


class Request(NamedTuple):
    """What is asked, by which VM."""

    vm: str
    query: dict[str, str]
    body: bytes

    def read(self, kind: type[Body]) -> Body:
        """Return the body, decoded; raises ``_RefusedError``."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"malformed body: {error}") from None


class Handler(BaseHTTPRequestHandler):
    """One connection. Paths below ``/vm/NAME`` are for that VM, others for the first."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_version = "IMDS/simulated"
    sys_version = ""
    timeout = 300  # seconds without a request, after which the connection is closed

    def do_GET(self) -> None:
        """Answer, whatever the method is: ``ROUTES`` says which there are."""
        try:
            request, answer = self._request()
            answer(self, request)
        except _RefusedError as refusal:
            self.reply({"error": str(refusal)}, refusal.status, **refusal.headers)
        except SimulatorError as error:
            self.reply({"error": str(error)}, HTTPStatus.BAD_REQUEST)

    # http.server looks for these names
    do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = do_GET  # noqa: N815 - http.server's

    def _request(self) -> tuple[Request, Callable[["Handler", Request], None]]:
        body = self._body()
        url = urlsplit(self.path)
        name, path = self.state.vms[0], url.path
        if path.startswith("/vm/"):
            name, _, rest = path.removeprefix("/vm/").partition("/")
            name, path = unquote(name), f"/{rest}"
        vm = next((known for known in self.state.vms if known.casefold() == name.casefold()), None)
        methods = ROUTES.get(path)
        if vm is None or methods is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "no such VM" if vm is None else "not found")
        if self.command not in methods:
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "method not allowed", Allow=", ".join(methods))
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        return Request(vm, query, body), methods[self.command]

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

    def admit(self, query: dict[str, str], versions: tuple[str, ...]) -> None:
        """Raise ``_RefusedError`` unless header and api-version are right."""
        # the preview version does not require the header
        preview = versions is EVENT_VERSIONS and query.get("api-version") == PREVIEW
        text = ""
        if "X-Forwarded-For" in self.headers:
            text = "X-Forwarded-For: requests through a proxy are not answered"
        elif self.headers.get("Metadata", "").casefold() != "true" and not preview:
            text = "Required metadata header not specified"
        elif query.get("api-version") not in versions:
            text = f"Bad request: api-version is one of {', '.join(versions)}"
        if text:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, text)

    def reply(self, value: object, status: int = HTTPStatus.OK, **headers: str) -> None:
        """Send a value as JSON."""
        self.send(status, msgspec.json.encode(value), **headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request with JSON, as IMDS does for everything."""
        status = HTTPStatus(code)
        self.reply({"error": explain or message or status.phrase}, status, Connection="close")

    def send(self, status: int, body: bytes, **headers: str) -> None:
        """Send a whole answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status == HTTPStatus.NOT_MODIFIED:
            body = b""  # it has none
        else:
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Log nothing: there is a request each second."""


# ---- what IMDS answers


def _document(handler: Handler, request: Request) -> None:
    handler.admit(request.query, EVENT_VERSIONS)
    fault = handler.state.take_fault()
    flapped = fault is not None and fault.kind == "flap" and fault.times % 2 == 1
    if fault is not None and fault.kind == "slow":
        handler.state.hold(fault.value)
    body = handler.state.body(request.query["api-version"], empty=flapped)
    if fault is not None and fault.kind not in ("slow", "reset", "flap"):
        _fail(handler, fault, body)
        return
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    if etag in (tag.strip() for tag in handler.headers.get("If-None-Match", "").split(",")):
        handler.send(HTTPStatus.NOT_MODIFIED, b"", ETag=etag)
    else:
        handler.send(HTTPStatus.OK, body, ETag=etag)


def _fail(handler: Handler, fault: Fault, body: bytes) -> None:
    if fault.status is not None:
        headers = {"Retry-After": f"{fault.value:.0f}"} if fault.kind == "throttled" else {}
        handler.reply({"error": fault.kind}, fault.status, **headers)
    elif fault.kind == "redirect":
        handler.send(HTTPStatus.FOUND, b"", Location="http://127.0.0.1:9/metadata/scheduledevents")
    elif fault.kind == "garbage":
        handler.send(HTTPStatus.OK, b"<html>Service Unavailable</html>")
    else:
        handler.close_connection = True
        if fault.kind == "freeze":
            handler.state.hold(fault.value)
        elif fault.kind == "disconnect":
            _disconnect(handler)
        else:
            _send_partly(handler, body, fault)


def _disconnect(handler: Handler) -> None:
    """Reset the connection: with SO_LINGER of 0 seconds, a close sends RST instead of FIN."""
    linger = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    socket.close(handler.connection.detach())


def _send_partly(handler: Handler, body: bytes, fault: Fault) -> None:
    """Send the first half (``half``), or one byte at a time (``drip``)."""
    handler.send_response(HTTPStatus.OK)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if fault.kind == "half":
        handler.wfile.write(body[: len(body) // 2])
        return
    try:
        for byte in body[:1000]:
            handler.wfile.write(bytes([byte]))
            if not handler.state.hold(fault.value):
                return
    except OSError:
        pass  # the client has closed the connection: that is the purpose of this fault


def _approve(handler: Handler, request: Request) -> None:
    handler.admit(request.query, EVENT_VERSIONS)
    wanted = request.read(_StartRequests)
    if request.query["api-version"] == PREVIEW and wanted.DocumentIncarnation is None:
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "DocumentIncarnation is missing")
    fault = handler.state.take_fault(start_request=True)
    if fault is not None and fault.status is not None:
        raise _RefusedError(fault.status, fault.kind)
    if not handler.state.approve([one.EventId for one in wanted.StartRequests]):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "no such event")
    if fault is not None:
        handler.state.hold(fault.value)
        handler.close_connection = True
    else:
        handler.send(HTTPStatus.OK, b"")


def _instance(handler: Handler, request: Request) -> None:
    handler.admit(request.query, OTHER_VERSIONS)
    handler.reply(instance(request.vm))


# ---- what the simulator is told


def _start(handler: Handler, request: Request) -> None:
    wanted = msgspec.structs.asdict(request.read(_ScenarioRequest))
    handler.reply({"EventId": handler.state.start(**wanted)})


def _fault(handler: Handler, request: Request) -> None:
    handler.state.fault(**msgspec.structs.asdict(request.read(_FaultRequest)))
    handler.reply({})


def _set_document(handler: Handler, request: Request) -> None:
    handler.state.set_document(request.body)
    handler.reply({})


def _clear(handler: Handler, _request: Request) -> None:
    handler.state.clear()
    handler.reply({})


def _show_state(handler: Handler, _request: Request) -> None:
    handler.reply(handler.state.state())


ROUTES: Final[dict[str, dict[str, Callable[[Handler, Request], None]]]] = {
    "/metadata/scheduledevents": {"GET": _document, "POST": _approve},
    "/metadata/instance": {"GET": _instance},
    "/simulator/state": {"GET": _show_state},
    "/simulator/start": {"POST": _start},
    "/simulator/fault": {"POST": _fault},
    "/simulator/document": {"POST": _set_document},
    "/simulator/clear": {"POST": _clear},
}
