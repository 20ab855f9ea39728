"""``PartialSuccess``: what a receiver rejected of a request that it accepted.

Imported only if OTLP is configured.
"""

from typing import Final

from google.protobuf.message import DecodeError
from msgspec import Struct
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

from notbefore.core.text import one_line
from notbefore.errors import SendError
from notbefore.net.response import MAX_ANSWER

# answers of receivers that do not send protobuf, in lower case and without blanks
PLAIN_ANSWERS: Final = (b"", b"{}", b"ok", b"success", b'{"partialsuccess":{}}')


class PartialSuccess(Struct, frozen=True):
    """The number of rejected data points or records, and why. The receiver does not say which."""

    rejected: int = 0
    reason: str = ""


def partial_success(body: bytes) -> PartialSuccess:
    """Read the body of the answer to an accepted request.

    Raises ``SendError`` if it is not OTLP (a web page).
    """
    if len(body) >= MAX_ANSWER:  # the number of rejected items may be in the rest
        raise SendError(f"the answer has more than {MAX_ANSWER} bytes")
    if b"".join(body.split()).lower() in PLAIN_ANSWERS:
        return PartialSuccess()

    # the answer for metrics has the same fields, under other names
    answer = ExportLogsServiceResponse()
    try:
        answer.ParseFromString(body)
    except DecodeError:
        raise SendError(
            "the answer is not OTLP: does the address lead to an OTLP receiver?"
        ) from None
    partial = answer.partial_success
    rejected = max(0, partial.rejected_log_records)
    return PartialSuccess(rejected, one_line(partial.error_message))
