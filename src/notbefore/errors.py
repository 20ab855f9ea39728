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

    exit_code = 1  # a command that fails with this error exits with it: see ``notbefore --help``


class ConfigPlace(NamedTuple):
    """The place of a value in the configuration: a position in a file, a variable of the
    environment, or the command line.

    ``line`` and ``column`` count from 1; they are 0 outside a file.
    """

    origin: str  # the path of the file, the variable, or the option
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        if self.line == 0:
            return self.origin
        return f"{self.origin}:{self.line}:{self.column}"


class Mistake(NamedTuple):
    """One mistake in a configuration."""

    place: ConfigPlace
    key: str  # the path of the key, such as ``server.listen``; empty for the whole file
    text: str  # what was expected

    def __str__(self) -> str:
        parts = (str(self.place), self.key, self.text)
        return ": ".join(part for part in parts if part)


class ConfigError(NotBeforeError):
    """The configuration is wrong.

    The text names the file, the line, the path of the key, and what was expected. ``mistakes``
    lists the mistakes one by one if the whole configuration was examined; the text contains them
    all.
    """

    exit_code = 2
    mistakes: tuple[Mistake, ...] = ()

    @classmethod
    def of(cls, mistakes: Iterable[Mistake]) -> "ConfigError":
        """Return the error with all mistakes, in the order of their places in the file."""
        in_order = tuple(sorted(set(mistakes)))
        error = cls("; ".join(str(mistake) for mistake in in_order))
        error.mistakes = in_order
        return error


class DocumentError(NotBeforeError):
    """The bytes are not a Scheduled Events document."""

    def __init__(self, reason: DocumentReason, detail: str = "") -> None:
        super().__init__(_with_detail(reason, detail))
        self.reason: DocumentReason = reason


class ImdsError(NotBeforeError):
    """IMDS gave no usable answer. ``retry_after``: seconds that it asked to wait, if it did."""

    def __init__(
        self, reason: ImdsReason, detail: str = "", *, retry_after: float | None = None
    ) -> None:
        super().__init__(_with_detail(reason, detail))
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

    ``permanent``: the receiver will never accept it. ``by_hand``: the receiver will not accept it
    until a person corrects something, such as a token. ``retry_after``: seconds that the receiver
    asked to wait. ``thread``: what the sink has opened for the event nevertheless; it gets this
    back at the next attempt.
    """

    def __init__(
        self,
        text: str,
        *,
        permanent: bool = False,
        by_hand: bool = False,
        retry_after: float | None = None,
        thread: str | None = None,
    ) -> None:
        super().__init__(text)
        self.permanent = permanent
        self.by_hand = by_hand
        self.retry_after = retry_after
        self.thread = thread


class PluginError(SendError):
    """A sink of another package raised an exception that no sink may raise.

    That is a bug of the package. ``__cause__`` is the exception.
    """


def _with_detail(reason: str, detail: str) -> str:
    if not detail:
        return reason
    return f"{reason}: {detail}"
