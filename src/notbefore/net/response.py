"""``HttpResponse``: the answer to a request, and what its status means for a delivery."""

import re
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec
import requests
from msgspec import Struct

from notbefore.errors import SendError

MAX_ANSWER: Final = 1024 * 1024  # bytes of a 2xx answer that are read: OTLP says what it rejected
MAX_REFUSAL: Final = 8 * 1024  # bytes of any other answer that are read
CHUNK: Final = 4096  # bytes that are read at a time
MAX_EXCERPT: Final = 2_000  # characters of an answer in an error
INFORMATIONAL: Final = range(100, 200)
SUCCESSFUL: Final = range(200, 300)
REDIRECT_OR_REFUSAL: Final = range(300, 500)
# a wrong token or address: try again, because someone may correct it
BY_HAND: Final = frozenset({401, 403, 404})
TEMPORARY: Final = BY_HAND | {408, 409, 421, 423, 425, 429}  # the 4xx after which to try again
# how a web page begins, which a captive portal or a proxy answers in place of the receiver
_WEB_PAGE: Final = re.compile(
    rb"\s*(<!--.*?-->\s*|<\?xml.*?\?>\s*)*<(!doctype\s+html|html|head|body|title|meta|script)\b",
    re.IGNORECASE | re.DOTALL,
)
_PAGE_START: Final = 4096  # bytes in which it begins
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_SECONDS: Final = re.compile("[0-9]{1,12}")  # as a ``Retry-After``


class HttpResponse(Struct, frozen=True):
    """An answer, with any status."""

    status: int
    body: bytes  # its beginning
    retry_after: float | None = None  # seconds

    @property
    def cause(self) -> str:
        """The status and the ASCII part of the body, for an error.

        It may contain secrets: redact, then shorten it.
        """
        text = self.body[: 4 * MAX_EXCERPT].decode("ascii", errors="ignore")
        visible = "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")
        excerpt = " ".join(visible.split())[:MAX_EXCERPT]
        if not excerpt:
            return str(self.status)
        return f"{self.status}: {excerpt}"

    @property
    def is_page(self) -> bool:
        """Whether the body is a web page."""
        start = self.body[:_PAGE_START].removeprefix(_BYTE_ORDER_MARK)
        return _WEB_PAGE.match(start) is not None

    def json(self) -> Any:
        """Return the decoded body; ``None`` if it is not JSON."""
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


def error_of_status(status: int, cause: str, retry_after: float | None = None) -> SendError | None:
    """Return the error for an HTTP status, with the text ``cause``; ``None`` for an acceptance.

    It is permanent if a later attempt cannot succeed. So it is for a redirect, which is never
    followed.
    """
    if status in SUCCESSFUL:
        return None
    permanent = status in REDIRECT_OR_REFUSAL and status not in TEMPORARY
    by_hand = status in BY_HAND
    return SendError(cause, permanent=permanent, by_hand=by_hand, retry_after=retry_after)


def read_response(response: requests.Response) -> HttpResponse:
    """Read the beginning of an answer that was requested as a stream."""
    most = MAX_REFUSAL
    if response.status_code in SUCCESSFUL:
        most = MAX_ANSWER
    return HttpResponse(
        status=response.status_code,
        body=_first_bytes(response, most),
        retry_after=_retry_after(response.headers),
    )


def _first_bytes(response: requests.Response, most: int) -> bytes:
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
    if _SECONDS.fullmatch(value):
        return float(value)
    with suppress(ValueError, TypeError, OverflowError):
        until = parsedate_to_datetime(value)
        answered = parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, (until - answered).total_seconds())
    return None
