"""``Http``: every request except those to IMDS.

It follows no redirects and bounds what it reads. Its errors tell whether to try again.

Proxies and CA bundles come from the environment (``HTTPS_PROXY``, ``NO_PROXY``,
``REQUESTS_CA_BUNDLE``), as in requests; a ``.netrc`` file, and a user and password in an address,
are not used.
"""

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import requests
import urllib3
from msgspec import Struct
from requests.utils import select_proxy

from notbefore.errors import SendError
from notbefore.net.addresses import check_proxied
from notbefore.net.connections import Adapter, Deadline

MAX_ANSWER: Final = 1024 * 1024  # bytes of a 2xx answer that are read: OTLP says what it rejected
MAX_REFUSAL: Final = 8 * 1024  # bytes of any other answer that are read
CHUNK: Final = 4096  # bytes
# a host name may have several addresses: each gets this part of the timeout
CONNECT_SHARE: Final = 4
MAX_EXCERPT: Final = 2_000  # characters of an answer in an error
# a wrong token or address: try again, somebody may correct it
BY_HAND: Final = frozenset({401, 403, 404})
PASSING: Final = BY_HAND | {408, 409, 421, 423, 425, 429}  # the 4xx after which to try again
_SUCCESSFUL: Final = range(200, 300)
_REDIRECT_OR_REFUSAL: Final = range(300, 500)
# how a web page begins, which a captive portal or a proxy answers in place of the receiver
_PAGE: Final = re.compile(
    rb"\s*(<!--.*?-->\s*|<\?xml.*?\?>\s*)*<(!doctype\s+html|html|head|body|title|meta|script)\b",
    re.IGNORECASE | re.DOTALL,
)
_PAGE_START: Final = 4096  # bytes in which it begins
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def error_of_status(status: int, cause: str, retry_after: float | None = None) -> SendError | None:
    """Return the error for an HTTP status, with the text ``cause``.

    ``None``: the receiver accepted the delivery.

    It is permanent if a later attempt cannot succeed, and for a redirect, which is never followed.
    """
    if status in _SUCCESSFUL:
        return None
    permanent = status in _REDIRECT_OR_REFUSAL and status not in PASSING
    by_hand = status in BY_HAND
    return SendError(cause, permanent=permanent, by_hand=by_hand, retry_after=retry_after)


class HttpResponse(Struct, frozen=True):
    """The answer, with any status."""

    status: int
    body: bytes
    retry_after: float | None = None  # seconds

    @property
    def cause(self) -> str:
        """The status and the ASCII part of the body, for an error.

        It may contain secrets: redact, then shorten it.
        """
        seen = bytes(
            octet
            for octet in self.body[: 4 * MAX_EXCERPT]
            if (bytes([octet]).isascii() and chr(octet).isprintable()) or octet in b"\n\t"
        )
        text = " ".join(seen.decode().split())[:MAX_EXCERPT]
        if not text:
            return str(self.status)
        return f"{self.status}: {text}"

    @property
    def is_page(self) -> bool:
        """Whether the body is a web page."""
        start = self.body[:_PAGE_START].removeprefix(_BYTE_ORDER_MARK)
        return _PAGE.match(start) is not None

    def said(self) -> Any:
        """Return the decoded JSON of the body; ``None`` if it is not JSON."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(self.body)
        return None

    def check_status(self) -> None:
        """Raise ``SendError`` unless the status is 2xx."""
        error = error_of_status(self.status, self.cause, self.retry_after)
        if error is not None:
            raise error

    def check(self) -> None:
        """Raise ``SendError`` unless the status is 2xx and the receiver itself answers.

        A captive portal or a proxy answers any request with a web page, and would do so again.
        """
        self.check_status()
        if self.is_page:
            raise SendError(
                "a web page answers in place of the receiver (a captive portal, a proxy, or a wrong"
                f" address): {self.cause}",
                permanent=True,
            )


class Http:
    """Connections that are kept for the next message. For one thread at a time.

    ``timeout``: seconds for a request and its answer. ``guarded``: connect only to public
    addresses.
    """

    def __init__(
        self,
        timeout: float,
        *,
        ca_file: str | None = None,
        cert: str | tuple[str, str] | None = None,
        guarded: bool = False,
    ) -> None:
        self._timeout = timeout
        self._verify: str | bool = ca_file or True
        self._cert = cert
        self._guarded = guarded
        self._deadline = Deadline()
        # it sends without a session: no cookies, no redirects, nothing of a .netrc
        self._adapter = Adapter(self._deadline, guarded=guarded)
        self._environment = requests.Session()  # only to read proxies and a CA bundle

    def post(self, url: str, headers: Mapping[str, str], body: bytes = b"") -> HttpResponse:
        """Send, and return the answer with any status; raises ``SendError`` if there is none."""
        try:
            with self._deadline.after(self._timeout):
                response = self._exchange(url, headers, body)
                self._deadline.check()
        except (
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
            ValueError,
        ) as error:
            failure = f"{place_of(url)}: {self._reason(error)}"
            forget_frames(error)
            raise SendError(failure) from None

        if response.status < min(_SUCCESSFUL):
            self.close()  # the answer itself may still come, and must not answer the next request
        return response

    def close(self) -> None:
        """Close the connections."""
        self._adapter.close()

    def _exchange(self, url: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        request = requests.Request("POST", url, {"User-Agent": "notbefore", **headers}, data=body)
        request.auth = _keep_headers
        settings: Any = self._environment.merge_environment_settings(
            url, proxies={}, stream=True, verify=self._verify, cert=self._cert
        )
        if self._guarded and select_proxy(url, settings["proxies"]) is not None:
            check_proxied(url)

        timeout = (self._timeout / CONNECT_SHARE, self._timeout)
        with self._adapter.send(request.prepare(), timeout=timeout, **settings) as response:
            return read_answer(response)

    def _reason(self, error: Exception) -> str:
        """Return what went wrong; without the address, of which only host and port are shown."""
        if self._deadline.passed:
            return f"no complete answer within {self._timeout:g} s"
        reason = innermost(error)
        if isinstance(error, requests.exceptions.ProxyError):
            return f"the proxy: {reason}"
        return reason


def read_answer(response: requests.Response) -> HttpResponse:
    """Read the beginning of an answer that was requested as a stream."""
    most = MAX_REFUSAL
    if response.status_code in _SUCCESSFUL:
        most = MAX_ANSWER
    return HttpResponse(
        status=response.status_code,
        body=_beginning(response, most),
        retry_after=_retry_after(response.headers),
    )


def forget_frames(error: BaseException) -> None:
    """Free what the frames of an error hold, such as megabytes of headers.

    urllib3 stores a caught error in a local variable: error, traceback and frame refer to each
    other, and only the garbage collector would find them, much later.
    """
    for cause in _chain(error):
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, those that it was raised from, and those that it contains; each once."""
    waiting = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        related = (current.__cause__, current.__context__, *_contained(current))
        waiting += [other for other in related if isinstance(other, BaseException)]
        yield current


def _contained(error: BaseException) -> tuple[Any, ...]:
    return (getattr(error, "reason", None), *error.args)


def _keep_headers(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Let no user and password of the address replace a header."""
    return request


def place_of(url: str) -> str:
    """Return host and port: the rest of an address may be secret."""
    with suppress(ValueError):
        return urlsplit(url).netloc.rpartition("@")[2]
    return "the address"


def _beginning(response: requests.Response, most: int) -> bytes:
    """Return the first bytes of the body."""
    content = bytearray()
    while len(content) < most:
        chunk = response.raw.read1(CHUNK, decode_content=True)
        if not chunk:
            break
        content += chunk
    return bytes(content[:most])


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a ``Retry-After``.

    A date is compared with the answer's own ``Date``: the clock of this machine may be wrong.
    """
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch("[0-9]{1,12}", value):
        return float(value)
    with suppress(ValueError, TypeError, OverflowError):
        until = parsedate_to_datetime(value)
        answered = parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, (until - answered).total_seconds())
    return None


def innermost(error: BaseException) -> str:
    """Return the innermost cause that is useful: ``Connection refused``."""
    causes = (getattr(error, "reason", None), error.__cause__, error.__context__, *error.args[:1])
    for inner in causes:
        if isinstance(inner, BaseException):
            return innermost(inner)
    if isinstance(error, (requests.RequestException, urllib3.exceptions.HTTPError)):
        return type(error).__name__
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
