"""OTLP to its far side: ``Sender`` over HTTP or gRPC, and log records as protobuf. Imported where OTLP is configured.

The protobuf classes are OpenTelemetry's own (``opentelemetry-proto``). The SDK's exporters are not used: they take a
redirect for success, do not read what was rejected, and read an answer without bound, with a new timeout for each byte.
"""

import gzip
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, Protocol
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError, Message
from msgspec import Struct
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs, SeverityNumber
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from notbefore.config.sinks import Connection
from notbefore.delivery.http import Http, HttpResponse
from notbefore.errors import ConfigError, SendError

Signal = Literal["metrics", "logs"]
REQUESTS: Final[dict[Signal, type[Message]]] = {
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}
RESPONSES: Final[dict[Signal, type[Message]]] = {
    "metrics": ExportMetricsServiceResponse,
    "logs": ExportLogsServiceResponse,
}
SERVICES: Final[dict[Signal, str]] = {"metrics": "Metrics", "logs": "Logs"}
CONTENT_STATUSES: Final = (400, 413, 422)  # what these refuse is what was sent, and not who sends it
MAX_CAUSE: Final = 200  # characters
MAX_ANSWER: Final = 1024 * 1024  # bytes; what was rejected stands in it
PLAIN: Final = (b"", b"ok", b"success")  # what some far sides say that speak no protobuf

log = logging.getLogger("notbefore.otlp")


class ContentError(SendError):
    """The far side refuses what was sent; a part of it may be welcome."""

    content = True


class Partial(Struct, frozen=True):
    """What an answer says of its request: how many items were rejected, and why. It does not say which."""

    rejected: int = 0
    reason: str = ""


class _Road(Protocol):
    def export(self, request: bytes, timeout: float) -> bytes: ...

    def close(self) -> None: ...


class Sender:
    """One signal's way to the far side. Not for several threads at once."""

    def __init__(self, connection: Connection, signal: Signal) -> None:
        self._signal: Signal = signal
        self._timeout = connection.timeout.seconds
        self._road: _Road = _Grpc(connection, signal) if connection.protocol == "grpc" else _Web(connection, signal)

    def send(self, request: Message, timeout: float | None = None) -> Partial:
        """Hand it over, within ``timeout`` seconds; raises ``SendError`` where it was not taken."""
        seconds = self._timeout if timeout is None else min(timeout, self._timeout)
        body = self._road.export(request.SerializeToString(), seconds)
        return partial_of(self._signal, body)

    def connect(self) -> None:
        """An empty request, which OTLP allows: is it taken?"""
        self.send(REQUESTS[self._signal]())

    def close(self) -> None:
        """Let go of the connection."""
        self._road.close()


def partial_of(signal: Signal, body: bytes) -> Partial:
    """What the body of a success says; raises ``SendError`` for one that is no answer of OTLP: a page, say.

    JSON is known by its brace, which no protobuf begins with: not every far side names it.
    """
    answer: Any = RESPONSES[signal]()
    text = body.strip()
    try:
        if text.startswith(b"{"):
            _read_json(text, answer)
        elif text.lower() not in PLAIN:
            answer.ParseFromString(body)
    except (DecodeError, ValueError):
        said = " ".join(text.decode(errors="replace").split())[:MAX_CAUSE]
        raise SendError(f"no answer of OTLP came, but: {said}: does the address lead to an OTLP receiver?") from None
    partial = answer.partial_success
    rejected = partial.rejected_data_points if signal == "metrics" else partial.rejected_log_records
    return Partial(max(0, rejected), " ".join(partial.error_message.split())[:MAX_CAUSE])


def _read_json(text: bytes, answer: Message) -> None:
    from google.protobuf import json_format  # noqa: PLC0415 - few far sides answer protobuf with it

    try:
        json_format.Parse(text.decode(), answer, ignore_unknown_fields=b"artial" in text)
    except json_format.ParseError as error:
        raise ValueError(str(error)) from None


class _Web:
    """OTLP/HTTP with protobuf."""

    def __init__(self, connection: Connection, signal: Signal) -> None:
        own, base = _addresses(connection, signal)
        self._url = own or f"{(base or 'http://localhost:4318').rstrip('/')}/v1/{signal}"
        self._connection = connection
        self._headers = {"Content-Type": "application/x-protobuf"}
        if connection.compression == "gzip":
            self._headers["Content-Encoding"] = "gzip"
        cert = (connection.cert_file, connection.key_file) if connection.cert_file else None
        self._http = Http(connection.timeout.seconds, ca_file=connection.ca_file, cert=cert, most=MAX_ANSWER)

    def export(self, request: bytes, timeout: float) -> bytes:
        headers = {name: value.reveal() for name, value in self._connection.headers.items()}  # a file may have changed
        body = gzip.compress(request, 6) if "Content-Encoding" in self._headers else request
        answer = self._http.post(self._url, body, headers | self._headers, timeout)
        if answer.status in CONTENT_STATUSES:
            raise ContentError(_cause(answer), permanent=True)
        try:
            answer.check()
        except SendError as error:
            raise SendError(_cause(answer), permanent=error.permanent, retry_after=error.retry_after) from None
        if len(answer.body) >= MAX_ANSWER:  # the count of what was rejected may be in the rest
            raise SendError(f"the answer has more than {MAX_ANSWER} bytes")
        return answer.body

    def close(self) -> None:
        self._http.close()


def _addresses(connection: Connection, signal: Signal) -> tuple[str | None, str | None]:
    """The signal's own address, and the one for all; raises ``ConfigError`` where only the other signal has one.

    Its headers are not meant for a far side that nobody named.
    """
    own = connection.metrics_endpoint if signal == "metrics" else connection.logs_endpoint
    other = connection.logs_endpoint if signal == "metrics" else connection.metrics_endpoint
    if own is None and connection.endpoint is None and other is not None:
        raise ConfigError(f"OTLP {signal}: expected `endpoint` or `{signal}_endpoint`: only the other one is given")
    return own, connection.endpoint


def _cause(answer: HttpResponse) -> str:
    """The status and what is said of it; the bytes of protobuf around a ``google.rpc.Status``'s message left out."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in answer.cause).split())


class _Grpc:
    """OTLP/gRPC: its own library, some 14 MB, imported here alone."""

    def __init__(self, connection: Connection, signal: Signal) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it writes to standard error past all logging
        import grpc  # noqa: PLC0415 - heavy, and only for those who ask for it

        self._grpc = grpc
        self._connection = connection
        own, base = _addresses(connection, signal)
        url = urlsplit(own or base or "http://localhost:4317")
        target = url.netloc if url.port else f"{url.netloc}:{443 if url.scheme == 'https' else 4317}"
        compression = grpc.Compression.Gzip if connection.compression == "gzip" else grpc.Compression.NoCompression
        options = [("grpc.max_receive_message_length", MAX_ANSWER), ("grpc.primary_user_agent", "notbefore")]
        self._channel = (
            grpc.secure_channel(target, self._credentials(), options, compression)
            if url.scheme == "https"
            else grpc.insecure_channel(target, options, compression)
        )
        service = f"opentelemetry.proto.collector.{signal}.v1.{SERVICES[signal]}Service"
        self._call: Callable[..., bytes] = self._channel.unary_unary(f"/{service}/Export")

    def _credentials(self) -> Any:
        connection = self._connection
        return self._grpc.ssl_channel_credentials(
            _read(connection.ca_file), _read(connection.key_file or connection.cert_file), _read(connection.cert_file)
        )

    def export(self, request: bytes, timeout: float) -> bytes:
        metadata = tuple((name.lower(), value.reveal()) for name, value in self._connection.headers.items())
        try:
            return self._call(request, timeout=timeout, metadata=metadata)
        except self._grpc.RpcError as error:
            raise self._failure(error) from None

    def _failure(self, error: Any) -> SendError:
        code = error.code()
        cause = f"{code.name}: {' '.join((error.details() or '').split())[:MAX_CAUSE]}"
        if code.name in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"):
            return ContentError(cause, permanent=True)
        return SendError(cause, permanent=code.name not in PASSING)

    def close(self) -> None:
        self._channel.close()


# what OTLP's specification says is to be tried again; an UNKNOWN is often a proxy's, a full quota has its time
PASSING: Final = (
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNAVAILABLE",
    "DATA_LOSS",
    "RESOURCE_EXHAUSTED",
    "UNKNOWN",
    "INTERNAL",
)


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib's does the same
            return file.read()
    except OSError as error:
        raise SendError(f"{path} cannot be read: {error.strerror}") from None


# ---- log records

SEVERITIES: Final = {  # of the specification's examples: what syslog calls critical is ERROR2
    "critical": SeverityNumber.SEVERITY_NUMBER_ERROR2,
    "error": SeverityNumber.SEVERITY_NUMBER_ERROR,
    "warning": SeverityNumber.SEVERITY_NUMBER_WARN,
    "info": SeverityNumber.SEVERITY_NUMBER_INFO,
    "debug": SeverityNumber.SEVERITY_NUMBER_DEBUG,
}


def log_record(
    time: datetime, severity: str, body: str, attributes: Mapping[str, Any], event_name: str = ""
) -> LogRecord:
    """A record without a trace; seen when it happened, since who reports it is who saw it."""
    nanoseconds = round(time.timestamp() * 1_000_000) * 1_000
    return LogRecord(
        time_unix_nano=nanoseconds,
        observed_time_unix_nano=nanoseconds,
        severity_number=SEVERITIES[severity],
        severity_text=severity,
        body=_any(body),
        attributes=key_values(attributes),
        event_name=event_name,
    )


def logs_request(groups: Sequence[tuple[Mapping[str, Any], Sequence[LogRecord]]]) -> ExportLogsServiceRequest:
    """Records by the attributes of their resource."""
    scope = InstrumentationScope(name="notbefore")
    return ExportLogsServiceRequest(
        resource_logs=[
            ResourceLogs(
                resource=Resource(attributes=key_values(resource)),
                scope_logs=[ScopeLogs(scope=scope, log_records=records)],
            )
            for resource, records in groups
        ]
    )


def key_values(attributes: Mapping[str, Any]) -> list[KeyValue]:
    """Attributes; a text that protobuf could not hold is made one that it can."""
    return [KeyValue(key=name, value=_any(value)) for name, value in attributes.items()]


def _any(value: Any) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value) if -(2**63) <= value < 2**63 else AnyValue(double_value=float(value))
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[_any(item) for item in value]))
    return AnyValue(string_value=str(value).encode(errors="replace").decode())
