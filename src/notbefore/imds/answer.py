"""``AnswerReader``: the bytes of one HTTP answer of IMDS -> ``ImdsAnswer``.

llhttp (``httptools``) parses them. It is only a parser, so there are no proxies, redirects, cookies
or netrc to switch off.
"""

import re
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from msgspec import Struct

from notbefore.core.document import MAX_BYTES
from notbefore.errors import ImdsError, ImdsReason

MAX_RECEIVED: Final = 2 * MAX_BYTES  # of an answer, with header and framing
MAX_DATE: Final = 64  # characters; RFC 9110 has 29
MAX_QUOTED: Final = 200  # bytes of a body that an error quotes
OK: Final = 200
REDIRECTS: Final = range(300, 400)
SERVER_ERRORS: Final = range(500, 600)

_SECONDS: Final = re.compile("[0-9]{1,6}")
_BY_STATUS: Final[dict[int, ImdsReason]] = {
    400: "bad_request",
    404: "not_found",
    405: "not_found",
    410: "gone",
    429: "throttled",
}


class ImdsAnswer(Struct, frozen=True):
    """A good answer."""

    body: bytes
    date: str = ""  # the ``Date`` header, unparsed


class AnswerReader:
    """Reads one answer. The parser calls the methods ``on_...``."""

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self._received = 0  # bytes
        self._status = 0  # 0 until the header is complete
        self._headers: dict[str, str] = {}  # by lower-case name; the first of each name
        self._body = bytearray()
        self.is_complete = False
        # whether another answer can follow on the connection
        self.keeps_connection = False

    def feed(self, data: bytes) -> None:
        """Read the next bytes. No bytes: the connection was closed.

        Raises ``ImdsError`` if they cannot belong to an answer, and ``ConnectionResetError`` if the
        connection was closed before an answer began.
        """
        if not data:
            self._end()
            return
        self._received += len(data)
        if self._received > MAX_RECEIVED:
            raise ImdsError("too_large", f"more than {MAX_RECEIVED} bytes")
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.keeps_connection = False  # the bytes after the answer are not another answer
            if self.is_complete:
                return
            reason: ImdsReason = "protocol"
            if self._status:
                reason = "incomplete"
            raise ImdsError(reason, str(error)) from None

    def answer(self) -> ImdsAnswer:
        """Return the complete answer; raises ``ImdsError`` for any status but 200."""
        if self._status != OK:
            raise self._error()
        return ImdsAnswer(bytes(self._body), self._headers.get("date", "")[:MAX_DATE])

    def close(self) -> None:
        """Free the parser.

        It refers to this reader, so only the garbage collector would free both, and the body.
        """
        del self._parser

    def _end(self) -> None:
        """Handle the end of the connection: it ends the body of an answer without a length."""
        if not self._received:
            raise ConnectionResetError("closed without an answer")
        has_length = "content-length" in self._headers or "transfer-encoding" in self._headers
        if not self._status or has_length:
            raise ImdsError("incomplete", "the connection was closed before the end of the answer")
        self.is_complete = True

    def _error(self) -> ImdsError:
        """Return the error that an answer with another status than 200 means."""
        status = self._status
        if status in REDIRECTS:
            location = self._headers.get("location", "")
            return ImdsError("redirect", f"HTTP {status} to {location!r}, not followed")

        reason = _BY_STATUS.get(status, "status")
        if status in SERVER_ERRORS:
            reason = "server_error"
        retry_after = None
        seconds = self._headers.get("retry-after", "")
        if _SECONDS.fullmatch(seconds):  # IMDS sends seconds, not a date
            retry_after = float(seconds)
        text = self._body[:MAX_QUOTED].decode("utf-8", "replace").strip()
        return ImdsError(reason, f"HTTP {status}: {text!r}", retry_after=retry_after)

    # ---- called by the parser

    def on_message_begin(self) -> None:
        """Refuse an answer without a request: it must not change the complete one."""
        if self.is_complete:
            raise ValueError

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a field of the header; ignore the trailer."""
        if not self._status:
            self._headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        """Store the status; the body follows, if there is one."""
        self._status = self._parser.get_status_code()
        self.keeps_connection = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """Store a piece of the body."""
        self._body += data

    def on_message_complete(self) -> None:
        """Note that the answer is complete."""
        self.is_complete = True
