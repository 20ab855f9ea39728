"""``ImdsClient``: one kept-alive HTTP connection to the instance metadata service.

The request is the same few lines each second, written as text. Each exchange has one deadline for
all of it, however slowly the answer arrives.
"""

# `socket` imports this codec at the first request, and again at none: if memory were short at that
# moment, all later requests would fail. Imported here, it fails at the start, with a clear error.
import encodings.idna  # noqa: F401 - `socket` uses it
import re
import socket
import time
from contextlib import closing, suppress
from typing import Final
from urllib.parse import urlsplit

from notbefore.errors import ConfigError, ImdsError, ImdsReason
from notbefore.imds.answer import AnswerReader, ImdsAnswer

# seconds: the first request enables the feature, which may take two minutes
FIRST_TIMEOUT: Final = 120.0
CONNECT_TIMEOUT: Final = 10.0  # seconds; only the answer may take longer
TIMEOUT: Final = 10.0  # seconds; answers slower than 1 s occur in normal operation
READ_BYTES: Final = 16 * 1024  # bytes read at a time; an answer with ten events has 4 KiB
HTTP_PORT: Final = 80
_VISIBLE: Final = re.compile(r"[!-~]+")  # ASCII without blanks: safe in a request as it is

NEWEST: Final = "2024-07-09"  # `auto` asks for it first
FALLBACK: Final = "2020-07-01"  # `auto` asks for it where the endpoint does not know `NEWEST`
PREVIEW: Final = "2017-03-01"  # its start requests also have the DocumentIncarnation


def events_path(api_version: str) -> str:
    """Return the path of the Scheduled Events."""
    return f"/metadata/scheduledevents?api-version={api_version}"


class ImdsClient:
    """Asks one endpoint (``http://host[:port][/prefix]``).

    Only ``abort`` may be called from other threads.

    Raises ``ConfigError`` for an endpoint that is not a plain ``http`` address.
    """

    def __init__(self, endpoint: str) -> None:
        check_endpoint(endpoint)
        url = urlsplit(endpoint)
        self._address = (url.hostname or "", url.port or HTTP_PORT)
        self._prefix = url.path.rstrip("/")
        self._headers = f"Host: {url.netloc}\r\nMetadata: true\r\nAccept: application/json\r\n"
        self._socket: socket.socket | None = None
        self._aborted = False

    def get(self, path: str, *, timeout: float = TIMEOUT) -> ImdsAnswer:
        """GET ``path`` within ``timeout`` seconds; raises ``ImdsError`` for any status but 200."""
        request = f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n"
        was_connected = self._socket is not None
        return self._request(request.encode("ascii"), timeout, may_repeat=was_connected)

    def post(self, path: str, body: bytes, *, timeout: float = TIMEOUT) -> ImdsAnswer:
        """POST JSON to ``path`` within ``timeout`` seconds, once.

        Raises ``ImdsError`` for any status but 200.
        """
        content = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}{content}\r\n"
        return self._request(request.encode("ascii") + body, timeout, may_repeat=False)

    def abort(self) -> None:
        """Abort the request under way, from another thread; later requests fail at once."""
        self._aborted = True
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _request(self, request: bytes, timeout: float, *, may_repeat: bool) -> ImdsAnswer:
        deadline = time.monotonic() + timeout
        try:
            return self._exchange_or_repeat(request, deadline, may_repeat=may_repeat)
        except ImdsError:
            self.close()  # the unread rest of this answer must not be read as the next one
            raise
        except (OSError, ValueError) as error:
            self.close()
            raise ImdsError(_reason(error), _words(error)) from error

    def _exchange_or_repeat(
        self,
        request: bytes,
        deadline: float,
        *,
        may_repeat: bool,
    ) -> ImdsAnswer:
        """Send a request; again over a new connection if IMDS has closed the kept one meanwhile.

        That is not a failure of the request.
        """
        try:
            return self._exchange(request, deadline)
        except ConnectionError:
            if not may_repeat or self._aborted:
                raise
        self.close()
        return self._exchange(request, deadline)

    def _exchange(self, request: bytes, deadline: float) -> ImdsAnswer:
        """Send a request and read its answer until ``deadline``, in monotonic seconds.

        Raises ``ImdsError`` for any status but 200, and ``OSError``; ``ConnectionError`` if the
        connection was closed without an answer.
        """
        connection = self._connected(deadline)
        connection.settimeout(_remaining(deadline))
        connection.sendall(request)
        with closing(AnswerReader()) as reader:
            while not reader.is_complete:
                connection.settimeout(_remaining(deadline))
                reader.feed(connection.recv(READ_BYTES))
            answer = reader.answer()
            if not reader.keeps_connection:
                self.close()
            return answer

    def _connected(self, deadline: float) -> socket.socket:
        if self._socket is None and not self._aborted:
            timeout = min(CONNECT_TIMEOUT, _remaining(deadline))
            self._socket = socket.create_connection(self._address, timeout)
        # `abort` may have found no connection to shut down
        if self._socket is None or self._aborted:
            raise ImdsError("reset", "the agent is stopping")
        return self._socket


def check_endpoint(endpoint: str) -> None:
    """Raise ``ConfigError`` unless ``endpoint`` is a plain ``http`` address."""
    try:
        url = urlsplit(endpoint)
        _ = url.port  # raises ValueError if it is not valid
    except ValueError as error:
        raise ConfigError(f"imds.endpoint: {error}") from None
    has_more = bool(url.query or url.fragment or url.username)
    is_visible = _VISIBLE.fullmatch(endpoint) is not None
    if url.scheme != "http" or not url.hostname or has_more or not is_visible:
        raise ConfigError("imds.endpoint: expected http://ADDRESS[:PORT]")


def _remaining(deadline: float) -> float:
    """Return the seconds until a deadline; raises ``TimeoutError`` if it has passed."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _words(error: Exception) -> str:
    """Return what went wrong; the name of the error if it has no text."""
    words = getattr(error, "strerror", None) or str(error)
    return words or type(error).__name__


def _reason(error: Exception) -> ImdsReason:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, ConnectionError):
        return "reset"
    if isinstance(error, OSError):
        return "unreachable"
    return "protocol"
