"""The exceptions that reach a user or another room; any other uncaught exception is a bug."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

DocumentReason = Literal[
    "empty",  # no bytes at all
    "too_large",  # more than ``core.document.MAX_BYTES``, not even parsed
    "not_json",  # not UTF-8 JSON
    "too_deep",  # nested too deeply to be parsed
    "wrong_shape",  # JSON, but not {"DocumentIncarnation": int, "Events": [...]}
    "too_many_events",  # more than ``core.document.MAX_EVENTS``
]

ImdsReason = Literal[
    "refused",  # nothing listens at the address
    "unreachable",  # no route, no such host, network down
    "reset",  # the connection was cut
    "timeout",  # the answer was not complete before the deadline
    "incomplete",  # the answer ended before its announced length
    "too_large",  # the body is larger than the limit; it was not read completely
    "protocol",  # the answer is not HTTP
    "redirect",  # 3xx: never followed
    "bad_request",  # 400: header or api-version not accepted
    "not_found",  # 404 or 405: this endpoint has no Scheduled Events
    "gone",  # 410: temporarily gone; Azure asks to retry within 70 s
    "throttled",  # 429
    "server_error",  # 5xx
    "status",  # any other status
    "rejected",  # 200, but the body is not a document (see DocumentError)
]


class NotBeforeError(Exception):
    """Base of all errors below; its text is for the user."""

    exit_code = 1  # of a command that ends with this error: see ``notbefore --help``


class Place(NamedTuple):
    """Where a value was given: a file with line and column (from 1; 0: unknown), a variable, or the
    command line.
    """

    origin: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.origin}:{self.line}:{self.column}" if self.line else self.origin


class Mistake(NamedTuple):
    """One mistake in a configuration: its place, the path of its key, and what was expected."""

    place: Place
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (str(self.place), self.key, self.text)))


class ConfigError(NotBeforeError):
    """The configuration is wrong.

    The text names the file, the line, the path of the key, and what was expected.

    ``mistakes``: all mistakes, if the whole configuration was examined; the text contains all of
    them.
    """

    exit_code = 2
    mistakes: tuple[Mistake, ...] = ()

    @classmethod
    def of(cls, mistakes: Iterable[Mistake]) -> "ConfigError":
        """Return the error with all mistakes, in the order of their places in the file."""
        found = sorted(dict.fromkeys(mistakes))
        error = cls("; ".join(map(str, found)))
        error.mistakes = tuple(found)
        return error


class DocumentError(NotBeforeError):
    """The bytes are not a Scheduled Events document; ``reason``: why."""

    def __init__(self, reason: DocumentReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: DocumentReason = reason


class ImdsError(NotBeforeError):
    """IMDS gave no usable answer; ``reason``: why; ``retry_after`` in seconds or None."""

    def __init__(
        self, reason: ImdsReason, detail: str = "", *, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: ImdsReason = reason
        self.retry_after = retry_after


class StoreError(NotBeforeError):
    """The state directory cannot be used; the text says what to do."""

    exit_code = 3


class ListenError(NotBeforeError):
    """The HTTP server cannot listen at the configured address; the text says why."""

    exit_code = 3


class SendError(NotBeforeError):
    """The receiver did not accept a message.

    ``permanent``: it will never accept it. ``by_hand``: it will not accept it before somebody
    corrects something, such as a token. ``retry_after``: seconds that the receiver asked to wait.
    """

    def __init__(
        self,
        text: str,
        *,
        permanent: bool = False,
        by_hand: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(text)
        self.permanent = permanent
        self.by_hand = by_hand
        self.retry_after = retry_after
