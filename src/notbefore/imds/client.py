"""``ImdsClient``: one kept-alive HTTP connection to the instance metadata service.

llhttp (``httptools``) parses the answers: it is only a parser, so there are no proxies, redirects,
cookies or netrc to switch off. The request is the same few lines each second, written as text. Each
exchange has one deadline for all of it, and bounds on its size.
"""

import re
import socket
import time
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from msgspec import Struct

from notbefore.core.document import MAX_BYTES
from notbefore.errors import ConfigError, ImdsError, ImdsReason

# seconds: the first request enables the feature, which may take two minutes
FIRST_TIMEOUT: Final = 120.0
CONNECT_TIMEOUT: Final = 10.0  # seconds; only the answer may take longer
TIMEOUT: Final = 10.0  # seconds; answers slower than 1 s occur in normal operation
TOLERANCE: Final = 0.2  # seconds by which a deadline may be missed
MINIMUM: Final = 0.001  # seconds; a timeout of 0 would make the socket non-blocking
CHUNK: Final = 16 * 1024  # bytes read at a time; an answer with ten events has 4 KiB
MAX_ANSWER: Final = 2 * MAX_BYTES  # of an answer, with header and framing
MAX_DATE: Final = 64  # characters; RFC 9110 has 29
_VISIBLE: Final = re.compile(r"[!-~]+")  # ASCII without blanks: safe in a request as it is
_FIELDS: Final = frozenset(  # the header fields that are read
    (b"content-length", b"transfer-encoding", b"date", b"location", b"retry-after")
)

NEWEST: Final = "2024-07-09"  # `auto` asks for it first
FALLBACK: Final = "2020-07-01"  # `auto` asks for it where the endpoint does not know `NEWEST`
PREVIEW: Final = "2017-03-01"  # its start requests also have the DocumentIncarnation
OK: Final = 200
_BY_STATUS: Final[dict[int, ImdsReason]] = {
    400: "bad_request",
    404: "not_found",
    405: "not_found",
    410: "gone",
    429: "throttled",
}


def events_path(api_version: str) -> str:
    """The path of the Scheduled Events."""
    return f"/metadata/scheduledevents?api-version={api_version}"


class ImdsAnswer(Struct, frozen=True):
    """A good answer."""

    body: bytes
    date: str = ""  # the ``Date`` header, unparsed


class _Connection:
    """One TCP connection and the parser of its answers. The parser calls the methods ``on_...``."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._timeout = connected.gettimeout() or 0.0  # seconds
        self._parser = HttpResponseParser(self)
        self._begin()

    def _begin(self) -> None:
        self.status = 0  # 0 until the header is complete
        self.keep_alive = False
        self._headers: dict[
            bytes, bytes
        ] = {}  # by the name in lower case; the first one of each name
        self._parts: list[bytes] = []
        self._complete = False

    def exchange(self, request: bytes, deadline: float) -> ImdsAnswer:
        """Send a request and read its answer until ``deadline`` (monotonic seconds), however slowly
        it arrives.

        Raises ``ImdsError`` for any status but 200, and ``OSError``; ``ConnectionError`` if the
        connection was closed without an answer.
        """
        self._begin()
        self._arm(deadline)
        self.socket.sendall(request)
        received = 0
        while not self._complete:
            self._arm(deadline)
            data = self.socket.recv(CHUNK)
            received += len(data)
            if not received:
                raise ConnectionResetError("closed without an answer")
            if received > MAX_ANSWER:
                raise ImdsError("too_large", f"more than {MAX_ANSWER} bytes")
            self._feed(data)
        return self._answer()

    def close(self) -> None:
        """Close the connection.

        The parser refers to it, and only the garbage collector frees both, much later: so an
        answer is forgotten now.
        """
        self.socket.close()
        self._begin()

    def _arm(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        # setting a timeout is a system call; usually the answer comes at once, and the previous
        # timeout is close enough
        if not 0 <= left - self._timeout <= TOLERANCE:
            self._timeout = max(left - TOLERANCE / 2, MINIMUM)
            self.socket.settimeout(self._timeout)

    def _feed(self, data: bytes) -> None:
        if not data:  # the connection was closed: the end of a body without a length
            if (
                not self.status
                or b"content-length" in self._headers
                or b"transfer-encoding" in self._headers
            ):
                raise ImdsError(
                    "incomplete", "the connection was closed before the end of the answer"
                )
            self._complete = True
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.keep_alive = False  # the bytes after the answer are not another answer
            if not self._complete:
                raise ImdsError("incomplete" if self.status else "protocol", str(error)) from None

    def _answer(self) -> ImdsAnswer:
        body, status = b"".join(self._parts), self.status
        if status == OK:
            return ImdsAnswer(body, self._headers.get(b"date", b"")[:MAX_DATE].decode("latin-1"))
        header = {name: value.decode("latin-1") for name, value in self._headers.items()}
        if 300 <= status < 400:  # noqa: PLR2004 - the class of an HTTP status is its first digit
            raise ImdsError(
                "redirect", f"HTTP {status} to {header.get(b'location', '')!r}, not followed"
            )
        reason = _BY_STATUS.get(status, "server_error" if status >= 500 else "status")  # noqa: PLR2004 - as above
        # IMDS sends seconds, not a date
        seconds = re.fullmatch("[0-9]{1,6}", header.get(b"retry-after", ""))
        said = body[:200].decode("utf-8", "replace").strip()
        raise ImdsError(
            reason, f"HTTP {status}: {said!r}", retry_after=float(seconds[0]) if seconds else None
        )

    # ---- called by the parser

    def on_message_begin(self) -> None:
        """Refuse an answer without a request: it must not change the complete one."""
        if self._complete:
            raise ValueError

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a field of the header; ignore the trailer."""
        name = name.lower()
        if not self.status and name in _FIELDS:
            self._headers.setdefault(name, value)

    def on_headers_complete(self) -> None:
        """Store the status; the body follows, if there is one."""
        self.status = self._parser.get_status_code()
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """Store a piece of the body."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """Note that the answer is complete."""
        self._complete = True


class ImdsClient:
    """Asks one endpoint (``http://host[:port][/prefix]``).

    Only ``abort`` may be called from other threads.

    Raises ``ConfigError`` for an endpoint that is not a plain ``http`` address.
    """

    def __init__(self, endpoint: str) -> None:
        self._connection: _Connection | None = None
        self._aborted = False
        check_endpoint(endpoint)
        url = urlsplit(endpoint)
        # the name as bytes: for a str, Python imports the IDNA codec, 0.6 MiB
        self._address: Any = ((url.hostname or "").encode(), url.port or 80)
        self._prefix = url.path.rstrip("/")
        self._headers = f"Host: {url.netloc}\r\nMetadata: true\r\nAccept: application/json\r\n"

    def get(self, path: str, *, timeout: float = TIMEOUT) -> ImdsAnswer:
        """GET ``path`` within ``timeout`` seconds; raises ``ImdsError`` for any status but 200."""
        request = f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n"
        return self._request(request.encode("ascii"), timeout, again=self._connection is not None)

    def post(self, path: str, body: bytes, *, timeout: float = TIMEOUT) -> ImdsAnswer:
        """POST JSON to ``path`` within ``timeout`` seconds, once.

        Raises ``ImdsError`` for any status but 200.
        """
        what = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}{what}\r\n"
        return self._request(request.encode("ascii") + body, timeout, again=False)

    def abort(self) -> None:
        """Abort the request under way, from another thread; later requests fail at once."""
        self._aborted = True
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _request(self, request: bytes, timeout: float, *, again: bool) -> ImdsAnswer:
        deadline = time.monotonic() + timeout
        try:
            connection = self._connected(deadline)
            try:
                answer = connection.exchange(request, deadline)
            except ConnectionError:
                # IMDS may have closed the kept connection meanwhile: this is not a failure of the
                # request
                if not again or self._aborted:
                    raise
                self.close()
                connection = self._connected(deadline)
                answer = connection.exchange(request, deadline)
        except ImdsError:
            self.close()  # the unread rest of this answer must not be read as the next one
            raise
        except (OSError, ValueError) as error:
            self.close()
            words = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ImdsError(_reason(error), words) from error
        if not connection.keep_alive:
            self.close()
        return answer

    def _connected(self, deadline: float) -> _Connection:
        if self._connection is None and not self._aborted:
            timeout = max(MINIMUM, min(CONNECT_TIMEOUT, deadline - time.monotonic()))
            self._connection = _Connection(socket.create_connection(self._address, timeout))
        if (
            self._connection is None or self._aborted
        ):  # `abort` may have found no connection to shut down
            raise ImdsError("reset", "the agent is stopping")
        return self._connection


def check_endpoint(endpoint: str) -> None:
    """Raise ``ConfigError`` unless ``endpoint`` is a plain ``http`` address."""
    try:
        url = urlsplit(endpoint)
        _ = url.port
    except ValueError as error:
        raise ConfigError(f"imds.endpoint: {error}") from None
    plain = _VISIBLE.fullmatch(endpoint) and not (url.query or url.fragment or url.username)
    if url.scheme != "http" or not url.hostname or not plain:
        raise ConfigError("imds.endpoint: expected http://ADDRESS[:PORT]")


def _reason(error: Exception) -> ImdsReason:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, ConnectionError):
        return "reset"
    return "unreachable" if isinstance(error, OSError) else "protocol"
