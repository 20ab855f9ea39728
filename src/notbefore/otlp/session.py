"""``Session``: the ``requests.Session`` that OpenTelemetry's HTTP exporter sends through, and what came of a request.

With a plain session the exporter takes a redirect for success, does not read what the receiver rejected, reads an
answer of any size, waits anew for each byte of it, and takes headers from the environment, whatever address it is
given. This one sends with the HTTP client of the sinks.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

import requests
from google.protobuf.message import DecodeError, Message
from msgspec import Struct
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from notbefore.config.sinks import OtlpConnection
from notbefore.core.text import one_line
from notbefore.errors import SendError

Signal = Literal["metrics", "logs"]
Redact = Callable[[str], str]  # a text without what is secret in it
RESPONSES: Final[dict[Signal, type[Message]]] = {
    "metrics": ExportMetricsServiceResponse,
    "logs": ExportLogsServiceResponse,
}
MAX_ANSWER: Final = 1024 * 1024  # bytes; what was rejected stands in it
MAX_CAUSE: Final = 200  # characters
PLAIN: Final = (b"", b"ok", b"success")  # what some receivers say that send no protobuf
CONTENT_STATUSES: Final = (400, 413, 422)  # what these refuse is what was sent, and not who sends it
KEPT_HEADERS: Final = ("content-type", "content-encoding")  # of those that the exporter gives


class ContentError(SendError):
    """The receiver refuses what was sent; it may accept a part of it."""


class PartialSuccess(Struct, frozen=True):
    """How many data points or records a receiver rejected of a request that it accepted, and why; never which."""

    rejected: int = 0
    reason: str = ""


class HttpAnswer(Protocol):
    """What the receiver answered."""

    @property
    def status(self) -> int:
        """The status, whatever it is."""

    @property
    def body(self) -> bytes:
        """The body, cut where it is too long."""

    def check(self) -> None:
        """Raise ``SendError``, with its ``retry_after``, unless the status is 2xx."""


class HttpClient(Protocol):
    """``courier.http.Http``: it follows no redirect, and bounds an answer in size and the whole exchange in time."""

    def post(self, url: str, body: bytes, headers: Mapping[str, str], timeout: float) -> HttpAnswer:
        """Send within ``timeout`` seconds; raises ``SendError`` where there is no answer."""

    def close(self) -> None:
        """Close the connections."""


class Session(requests.Session):
    """The connection to one receiver."""

    def __init__(self, connection: OtlpConnection, signal: Signal, http: HttpClient, redact: Redact) -> None:
        super().__init__()
        self.deadline = 0.0  # monotonic seconds: the end of the next exchange
        self.outcome: PartialSuccess | Exception | None = None  # of the last exchange
        self._connection = connection
        self._signal: Signal = signal
        self._http = http
        self._redact = redact

    def request(self, method: Any, url: Any, *_: Any, data: Any = None, headers: Any = None, **__: Any) -> Any:
        """Send what the exporter has encoded; returns the answer of one that was accepted.

        Raises what the exporter does not try again, and drops: it stays in ``outcome``.
        """
        try:
            answer = self._exchange(str(url), data, dict(headers))
            self.outcome = partial_success(self._signal, answer.body, self._redact)
        except Exception as error:
            self.outcome = error
            raise
        response = requests.Response()
        response.status_code, response.request = answer.status, requests.Request(method, url).prepare()
        return response

    def _exchange(self, url: str, body: bytes, headers: dict[str, str]) -> HttpAnswer:
        own = {name: secret.reveal() for name, secret in self._connection.headers.items()}  # a file may have changed
        own |= {name: value for name, value in headers.items() if name.lower() in KEPT_HEADERS}
        answer = self._http.post(url, body, own, max(0.001, self.deadline - time.monotonic()))
        text = cause_of(str(answer.status), answer.body, self._redact)
        if answer.status in CONTENT_STATUSES:
            raise ContentError(text, permanent=True)
        try:
            answer.check()
        except SendError as error:
            raise SendError(text, permanent=error.permanent, retry_after=error.retry_after) from None
        if len(answer.body) >= MAX_ANSWER:  # the count of what was rejected may be in the rest
            raise SendError(f"the answer has more than {MAX_ANSWER} bytes")
        return answer

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def partial_success(signal: Signal, body: bytes, redact: Redact = str) -> PartialSuccess:
    """Read the body of an accepted request's answer; raises ``SendError`` for one that is not OTLP: a page, say.

    JSON is known by its brace, which no protobuf begins with: not every receiver names its content type.
    """
    answer: Any = RESPONSES[signal]()
    text = body.strip()
    try:
        if text.startswith(b"{"):
            _read_json(text, answer)
        elif text.lower() not in PLAIN:
            answer.ParseFromString(body)
    except (DecodeError, ValueError):
        raise SendError(
            cause_of("the answer is not OTLP, but", body, redact) + ": does the address lead to an OTLP receiver?"
        ) from None
    partial = answer.partial_success
    rejected = partial.rejected_data_points if signal == "metrics" else partial.rejected_log_records
    return PartialSuccess(max(0, rejected), _one_line(partial.error_message, redact))


def cause_of(what: str, body: bytes, redact: Redact) -> str:
    """``what``, and the beginning of what the receiver said: without secrets, and on one line."""
    text = _one_line(body.decode(errors="replace"), redact)
    return f"{what}: {text}" if text else what


def _one_line(text: str, redact: Redact) -> str:
    # redacted before it is cut: a part of a secret would not be known
    return redact(one_line(text))[:MAX_CAUSE]


def _read_json(text: bytes, answer: Message) -> None:
    from google.protobuf import json_format  # noqa: PLC0415 - few receivers answer protobuf with it

    try:
        json_format.Parse(text.decode(), answer, ignore_unknown_fields=b"artial" in text)
    except json_format.ParseError as error:
        raise ValueError(str(error)) from None
