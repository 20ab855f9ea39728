"""``ImdsClient``: one kept-alive HTTP connection to the instance metadata service.

``http.client`` reads the answer: it has no proxy, redirect, cookie or netrc that would have to be switched off. The
request is the same few lines each second, written as text: to build them was a third of the cost of a poll.
Each exchange has one deadline for all of it, and a bound on its size.
"""

import http.client
import re
import socket
import threading
import time
from contextlib import closing, suppress
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from notbefore.errors import ConfigError, ImdsError, ImdsReason

USUAL: Final = "http://169.254.169.254"
FIRST_TIMEOUT: Final = 120.0  # seconds: the first request enables the feature, which may take two minutes
CONNECT_TIMEOUT: Final = 10.0  # seconds: only the answer may take long
TIMEOUT: Final = 10.0  # seconds: answers slower than 1 s occur in normal operation
TOLERANCE: Final = 0.2  # seconds by which a deadline may be missed
MINIMUM: Final = 0.001  # seconds; a timeout of 0 would make the socket non-blocking
MAX_BODY: Final = 1024 * 1024

MAX_ETAG: Final = 256
MAX_DATE: Final = 64  # characters; RFC 9110 has 29
_VISIBLE: Final = re.compile(r"[!-~]+")  # ASCII without blanks: what may stand in a request as it is

_BY_STATUS: Final[dict[int, ImdsReason]] = {
    400: "bad_request",
    404: "not_found",
    405: "not_found",
    410: "gone",
    429: "throttled",
}


class ImdsAnswer(Struct, frozen=True):
    """A good answer: the body, or ``None`` for 304 (not modified)."""

    body: bytes | None
    etag: str | None = None
    date: str = ""  # the ``Date`` header, as it came


class DeadlineSocket(socket.socket):
    """A socket whose reads and writes all end at one ``deadline`` (monotonic seconds), however slowly bytes drip in."""

    deadline: float = 0.0

    def _arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        # setting a timeout is a system call; usually the answer comes at once, and the previous timeout is close enough
        if not 0 <= left - (self.gettimeout() or 0.0) <= TOLERANCE:
            self.settimeout(max(left - TOLERANCE / 2, MINIMUM))

    # http.client reads with recv_into only
    def recv_into(self, *args: object, **kwargs: object) -> int:
        """As of ``socket``; raises ``TimeoutError`` at the deadline."""
        self._arm()
        return super().recv_into(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they are

    def sendall(self, *args: object, **kwargs: object) -> None:
        """As of ``socket``; raises ``TimeoutError`` at the deadline."""
        self._arm()
        super().sendall(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they are


def may_be_elsewhere(endpoint: str) -> bool:
    """Return whether discovery may look elsewhere: nobody configured another address than the usual one."""
    return endpoint == USUAL


class _Target(Struct, frozen=True):
    """The parts of an endpoint."""

    host: str
    port: int
    prefix: str
    headers: str

    @classmethod
    def read(cls, endpoint: str) -> "_Target":
        """Parse an endpoint; raises ``ConfigError`` for one that is not a plain ``http`` address."""
        try:
            url = urlsplit(endpoint)
            host, port = url.hostname or "", url.port or 80
        except ValueError as error:
            raise ConfigError(f"imds.endpoint: {error}, in {endpoint!r}") from None
        plain = _VISIBLE.fullmatch(endpoint) and not (url.query or url.fragment or url.username)
        if url.scheme != "http" or not host or not plain:
            raise ConfigError(f"imds.endpoint: expected http://ADDRESS[:PORT], got {endpoint!r}")
        headers = f"Host: {url.netloc}\r\nMetadata: true\r\nAccept: application/json\r\n"
        return cls(host, port, url.path.rstrip("/"), headers)


class ImdsClient:
    """Asks one endpoint (``http://host[:port][/prefix]``). Only ``use`` and ``abort`` may be called from other threads.

    Raises ``ConfigError`` for an endpoint that is not a plain ``http`` address.
    """

    def __init__(self, endpoint: str) -> None:
        self._target = self._connected_to = _Target.read(endpoint)
        self._socket: DeadlineSocket | None = None
        self._aborted = threading.Event()

    def use(self, endpoint: str) -> None:
        """Ask another endpoint from the next request on; raises ``ConfigError``."""
        self._target = _Target.read(endpoint)

    def get(self, path: str, *, timeout: float = TIMEOUT, etag: str | None = None) -> ImdsAnswer:
        """GET ``path`` within ``timeout`` seconds; raises ``ImdsError`` for all but 200, and 304 with an ``etag``."""
        condition = f"If-None-Match: {etag}\r\n" if etag is not None else ""
        target = self._target
        request = f"GET {target.prefix}{path} HTTP/1.1\r\n{target.headers}{condition}\r\n"
        return self._request(target, request.encode("ascii"), timeout, etag)

    def post(self, path: str, body: bytes, *, timeout: float = TIMEOUT) -> ImdsAnswer:
        """POST JSON to ``path`` within ``timeout`` seconds; raises ``ImdsError`` for everything but 200."""
        what = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        target = self._target
        request = f"POST {target.prefix}{path} HTTP/1.1\r\n{target.headers}{what}\r\n"
        return self._request(target, request.encode("ascii") + body, timeout, None)

    def abort(self) -> None:
        """End the request that is under way, from another thread; later requests fail at once."""
        self._aborted.set()
        connected = self._socket
        if connected is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _request(self, target: "_Target", request: bytes, timeout: float, etag: str | None) -> ImdsAnswer:
        if target is not self._connected_to:
            self.close()
            self._connected_to = target
        deadline = time.monotonic() + timeout
        reused = self._socket is not None
        try:
            try:
                return self._exchange(request, deadline, etag)
            except (http.client.RemoteDisconnected, ConnectionError):
                # IMDS may have closed the kept connection meanwhile: that is not a failure of the request
                if not reused or self._aborted.is_set():
                    raise
                self.close()
                return self._exchange(request, deadline, etag)
        except ImdsError:
            self.close()  # the unread rest of this answer must not be read as the next one
            raise
        except (http.client.HTTPException, OSError, ValueError) as error:
            self.close()
            raise ImdsError(_reason(error), str(error) or type(error).__name__) from error

    def _exchange(self, request: bytes, deadline: float, etag: str | None) -> ImdsAnswer:
        connected = self._connected(deadline)
        connected.sendall(request)
        with closing(http.client.HTTPResponse(connected)) as response:
            response.begin()
            content = response.read(MAX_BODY + 1)
            if len(content) > MAX_BODY:
                raise ImdsError("too_large", f"more than {MAX_BODY} bytes")
            if response.length:  # read(n) raises nothing when the body ends early
                raise ImdsError("incomplete", f"{response.length} bytes are missing")
            if response.will_close:
                self.close()
            date = response.headers.get("Date", "")[:MAX_DATE]
            if response.status == http.client.NOT_MODIFIED and etag is not None:
                return ImdsAnswer(None, etag, date)
            if response.status != http.client.OK:
                raise _refusal(response, content)
            return ImdsAnswer(content, _etag(response), date)

    def _connected(self, deadline: float) -> DeadlineSocket:
        if self._aborted.is_set():
            raise ImdsError("reset", "the agent is stopping")
        if self._socket is None:
            self._socket = self._connect(deadline)
            if self._aborted.is_set():  # `abort` found no connection to shut down
                raise ImdsError("reset", "the agent is stopping")
        self._socket.deadline = deadline
        return self._socket

    def _connect(self, deadline: float) -> DeadlineSocket:
        error: OSError | None = None
        host, port = self._connected_to.host, self._connected_to.port
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            connected = DeadlineSocket(family, kind, protocol)
            connected.deadline = deadline
            try:
                connected.settimeout(max(MINIMUM, min(CONNECT_TIMEOUT, deadline - time.monotonic())))
                connected.connect(address)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as failure:
                connected.close()
                error = failure
                continue
            return connected
        raise error or OSError(f"no address for {host}")


def _etag(response: http.client.HTTPResponse) -> str | None:
    """Return the ETag if it can be sent back unchanged, else ``None``."""
    etag = response.headers.get("ETag")
    return etag if etag is not None and len(etag) <= MAX_ETAG and _VISIBLE.fullmatch(etag) else None


def _refusal(response: http.client.HTTPResponse, content: bytes) -> ImdsError:
    status = response.status
    if 300 <= status < 400:  # noqa: PLR2004 - the class of an HTTP status is its first digit
        return ImdsError("redirect", f"HTTP {status} to {response.headers.get('Location')!r}, not followed")
    reason = _BY_STATUS.get(status, "server_error" if status >= 500 else "status")  # noqa: PLR2004 - as above
    said = content[:200].decode("utf-8", "replace").strip()
    return ImdsError(reason, f"HTTP {status} {response.reason}: {said!r}", retry_after=_retry_after(response))


def _retry_after(response: http.client.HTTPResponse) -> float | None:
    value = response.headers.get("Retry-After", "")
    # seconds; IMDS does not use the date form, and without a value the back-off decides
    return float(value) if value.isascii() and value.isdigit() and len(value) <= 6 else None  # noqa: PLR2004 - 11 days


def _reason(error: Exception) -> ImdsReason:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, (ConnectionError, http.client.RemoteDisconnected)):
        return "reset"
    if isinstance(error, http.client.IncompleteRead):
        return "incomplete"
    return "unreachable" if isinstance(error, OSError) else "protocol"
