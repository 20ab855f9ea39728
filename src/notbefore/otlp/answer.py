"""What a receiver of OTLP answers: what it rejected, and why it refused."""

from collections.abc import Callable
from typing import Any, Final, Literal

from google.protobuf.message import DecodeError, Message
from msgspec import Struct
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

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


class ContentError(SendError):
    """The receiver refuses what was sent; it may accept a part of it."""

    content = True


class PartialSuccess(Struct, frozen=True):
    """How many data points or records a receiver rejected of a request that it accepted, and why; never which."""

    rejected: int = 0
    reason: str = ""


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
