"""``ImdsClient``: one kept-alive HTTP connection to the instance metadata service.

``http.client`` knows no proxy, redirect, cookie or netrc, so there is none to switch off. Each answer has one deadline
over all of it, and a bound on its size.
"""

import http.client
import socket
import threading
import time
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from notbefore.errors import ConfigError, ImdsError, ImdsReason

FIRST_TIMEOUT: Final = 120.0  # seconds: the first request enables the feature, which may take two minutes
TIMEOUT: Final = 10.0  # seconds: answers slower than 1 s occur in normal operation
MAX_BODY: Final = 1024 * 1024
API_VERSIONS: Final = ("2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01")

_BY_STATUS: Final[dict[int, ImdsReason]] = {
    400: "bad_request",
    404: "not_found",
    405: "not_found",
    410: "gone",
    429: "throttled",
}


class Answer(Struct, frozen=True):
    """A good answer: the body, or ``None`` for 304, "unchanged"."""

    body: bytes | None
    etag: str | None = None


class DeadlineSocket(socket.socket):
    """A socket whose reads and writes all end at one ``deadline`` (monotonic seconds), however slowly bytes drip in."""

    deadline: float = 0.0

    def _arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.settimeout(left)

    # http.client reads through recv_into and writes through sendall, and through nothing else
    def recv_into(self, *args: object, **kwargs: object) -> int:
        """As of ``socket``; raises ``TimeoutError`` at the deadline."""
        self._arm()
        return super().recv_into(*args, **kwargs)  # type: ignore[arg-type]  # handed through as they came

    def sendall(self, *args: object, **kwargs: object) -> None:
        """As of ``socket``; raises ``TimeoutError`` at the deadline."""
        self._arm()
        super().sendall(*args, **kwargs)  # type: ignore[arg-type]  # handed through as they came


class ImdsClient:
    """Asks one endpoint (``http://host[:port][/prefix]``). Not for several threads, but for ``abort``.

    Raises ``ConfigError`` for an endpoint that is no plain ``http`` address.
    """

    def __init__(self, endpoint: str) -> None:
        url = urlsplit(endpoint)
        if url.scheme != "http" or not url.hostname or url.query or url.username:
            raise ConfigError(f"imds.endpoint: expected http://ADDRESS[:PORT], got {endpoint!r}")
        self._host, self._port, self._prefix = url.hostname, url.port or 80, url.path.rstrip("/")
        self._connection: http.client.HTTPConnection | None = None
        self._socket: DeadlineSocket | None = None
        self._aborted = threading.Event()

    def get(self, path: str, *, timeout: float = TIMEOUT, etag: str | None = None) -> Answer:
        """GET ``path``; raises ``ImdsError`` with its reason for everything but 200 and 304."""
        headers = {"Metadata": "true", "Accept": "application/json"}
        if etag is not None:
            headers["If-None-Match"] = etag
        return self._request("GET", path, None, headers, timeout)

    def post(self, path: str, body: bytes, *, timeout: float = TIMEOUT) -> Answer:
        """POST JSON to ``path``; raises ``ImdsError`` for everything but 200."""
        headers = {"Metadata": "true", "Accept": "application/json", "Content-Type": "application/json"}
        return self._request("POST", path, body, headers, timeout)

    def abort(self) -> None:
        """End a request that is under way, from another thread; later ones fail at once."""
        self._aborted.set()
        connected = self._socket
        if connected is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._socket = None

    def _request(self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float) -> Answer:
        deadline = time.monotonic() + timeout
        reused = self._connection is not None
        try:
            try:
                return self._exchange(method, path, body, headers, deadline)
            except (http.client.RemoteDisconnected, ConnectionError):
                # a kept connection may have been closed by the far side meanwhile: that is no failure of the request
                if not reused or self._aborted.is_set():
                    raise
                self.close()
                return self._exchange(method, path, body, headers, deadline)
        except ImdsError:
            self.close()  # what is left unread in the connection must not be taken for the next answer
            raise
        except (http.client.HTTPException, OSError, ValueError) as error:
            self.close()
            raise ImdsError(_reason(error), str(error) or type(error).__name__) from error

    def _exchange(self, method: str, path: str, body: bytes | None, headers: dict[str, str], deadline: float) -> Answer:
        connection = self._connected(deadline)
        connection.request(method, self._prefix + path, body=body, headers=headers)
        response = connection.getresponse()
        content = response.read(MAX_BODY + 1)
        if len(content) > MAX_BODY:
            raise ImdsError("too_large", f"more than {MAX_BODY} bytes")
        if response.length:  # read(n) does not say so itself
            raise ImdsError("incomplete", f"{response.length} bytes are missing")
        if response.status == http.client.NOT_MODIFIED and "If-None-Match" in headers:
            return Answer(None, headers["If-None-Match"])
        if response.status != http.client.OK:
            raise _refusal(response, content)
        return Answer(content, response.headers.get("ETag"))

    def _connected(self, deadline: float) -> http.client.HTTPConnection:
        if self._aborted.is_set():
            raise ImdsError("reset", "the agent stops")
        if self._connection is not None and self._socket is not None and self._connection.sock is not None:
            self._socket.deadline = deadline
            return self._connection
        self.close()
        self._socket = self._connect(deadline)
        self._connection = http.client.HTTPConnection(self._host, self._port)
        self._connection.sock = self._socket
        self._connection.auto_open = 0  # a connection that http.client opened by itself would have no deadline
        return self._connection

    def _connect(self, deadline: float) -> DeadlineSocket:
        error: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            connected = DeadlineSocket(family, kind, protocol)
            connected.deadline = deadline
            try:
                connected.settimeout(max(0.001, deadline - time.monotonic()))
                connected.connect(address)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as failure:
                connected.close()
                error = failure
                continue
            return connected
        raise error or OSError(f"no address for {self._host}")


def _refusal(response: http.client.HTTPResponse, content: bytes) -> ImdsError:
    status = response.status
    if 300 <= status < 400:  # noqa: PLR2004 - the class of an HTTP status is its first digit
        return ImdsError("redirect", f"HTTP {status} to {response.headers.get('Location')!r}, not followed")
    reason = _BY_STATUS.get(status, "server_error" if status >= 500 else "status")  # noqa: PLR2004 - as above
    said = content[:200].decode("utf-8", "replace").strip()
    return ImdsError(reason, f"HTTP {status} {response.reason}: {said!r}", retry_after=_retry_after(response))


def _retry_after(response: http.client.HTTPResponse) -> float | None:
    value = response.headers.get("Retry-After", "")
    # in seconds; the date form is not used by IMDS, and the back-off serves where it comes all the same
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
