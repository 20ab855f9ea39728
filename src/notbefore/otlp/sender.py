"""``Sender``: one signal to its receiver, by OpenTelemetry's exporters. Imported only where OTLP is configured."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import requests
from google.protobuf.message import DecodeError, Message
from msgspec import Struct
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.sdk.metrics.export import MetricsData

from notbefore.config.sinks import OtlpConnection
from notbefore.core.text import one_line
from notbefore.errors import ConfigError, SendError

Signal = Literal["metrics", "logs"]
Redact = Callable[[str], str]  # a text without what is secret in it
RESPONSES: Final[dict[Signal, type[Message]]] = {
    "metrics": ExportMetricsServiceResponse,
    "logs": ExportLogsServiceResponse,
}
EMPTY: Final[dict[Signal, Any]] = {"metrics": MetricsData([]), "logs": []}
MAX_ANSWER: Final = 1024 * 1024  # bytes; what was rejected stands in it
MAX_CAUSE: Final = 200  # characters
PLAIN: Final = (b"", b"ok", b"success")  # what some receivers say that send no protobuf
KEPT_HEADERS: Final = ("content-type", "content-encoding")  # of those that the exporter gives
NO_HEADERS: Final = {"x-sender": "notbefore"}  # without any, the gRPC exporter takes those of the environment


class PartialSuccess(Struct, frozen=True):
    """How many data points or records a receiver rejected of a request that it accepted, and why; never which."""

    rejected: int = 0
    reason: str = ""


class _Said(logging.Filter):
    """Keeps what the exporters log, of each thread: it becomes the text of an error, redacted and said once."""

    last: Final = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        self.last.text = record.getMessage()
        return False


for _name in ("http._common", "http.metric_exporter", "http._log_exporter", "grpc.exporter"):
    logging.getLogger(f"opentelemetry.exporter.otlp.proto.{_name}").addFilter(_Said())


class _Session(requests.Session):
    """What the HTTP exporter sends through; a plain one reads an answer of any size, and for as long as bytes drip.

    ``post`` sends, and raises what came of it: the exporter does not try that again.
    """

    def __init__(self, post: Callable[[str, bytes, Mapping[str, str]], None]) -> None:
        super().__init__()
        self._post = post

    def request(self, method: Any, url: Any, *_: Any, data: Any = None, headers: Any = None, **__: Any) -> Any:
        self._post(str(url), data, headers)
        response = requests.Response()
        response.status_code, response.request = 200, requests.Request(method, url).prepare()
        return response


class Sender:
    """Exports one signal. It tries once: when to try again is up to the caller. Not for several threads at once."""

    def __init__(
        self, connection: OtlpConnection, signal: Signal, http: Callable[..., Any], redact: Redact = str
    ) -> None:
        """``http`` is ``courier.http.Http``; ``redact`` takes secrets out of what the receiver says.

        Raises ``ConfigError`` where there is no address.
        """
        self._connection = connection
        self._signal: Signal = signal
        self._redact = redact
        self._address = address(connection, signal)
        self._http: Any = None
        self._exporter: Any = None
        self._deadline = 0.0  # monotonic seconds: the end of the next exchange
        self._outcome: PartialSuccess | Exception | None = None  # of the last exchange
        if connection.protocol != "grpc":
            cert = (connection.cert_file, connection.key_file) if connection.cert_file else None
            self._http = http(connection.timeout.seconds, ca_file=connection.ca_file, cert=cert, most=MAX_ANSWER)
            self._exporter = (OTLPMetricExporter if signal == "metrics" else OTLPLogExporter)(
                endpoint=self._address,
                timeout=connection.timeout.seconds,
                compression=Compression.Gzip if connection.compression == "gzip" else Compression.NoCompression,
                session=_Session(self._post),
            )

    def send(self, data: Any, timeout: float | None = None) -> PartialSuccess:
        """Export ``MetricsData``, or a list of ``ReadableLogRecord``, within ``timeout`` seconds at most.

        Raises ``SendError`` where it was not accepted, and ``ConfigError`` where a header's secret cannot be read.
        Over gRPC the exporter tells neither what was rejected nor whether to try again, and has its own timeout.
        """
        most = self._connection.timeout.seconds
        self._deadline = time.monotonic() + (most if timeout is None else min(timeout, most))
        self._outcome = None
        if self._exporter is None:  # gRPC: made anew after a failure, with certificates and headers as they are then
            self._exporter = _grpc_exporter(self._connection, self._signal, self._address)
        accepted = self._exporter.export(data).name == "SUCCESS"
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, PartialSuccess):
            return outcome
        if accepted:
            return PartialSuccess()
        if self._http is None:
            self.close()
        try:
            said = str(_Said.last.__dict__.pop("text", "OpenTelemetry's exporter failed and does not say why"))
            raise outcome or SendError(_one_line(said, self._redact))
        finally:
            del outcome  # it refers to this frame, and with it to what was sent

    def connect(self) -> None:
        """Send an empty request, which OTLP allows; raises ``SendError`` where it is not accepted."""
        self.send(EMPTY[self._signal])

    def close(self) -> None:
        """Close the connection."""
        if self._exporter is not None:
            self._exporter.shutdown()
        if self._http is not None:
            self._http.close()
        else:
            self._exporter = None

    def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send what the exporter has encoded, and keep what came of it; raises that unless it was accepted."""
        try:
            # read anew: a file may have changed
            own = {name: secret.reveal() for name, secret in self._connection.headers.items()}
            own |= {name: value for name, value in headers.items() if name.lower() in KEPT_HEADERS}
            answer = self._http.post(url, body, own, max(0.001, self._deadline - time.monotonic()))
            self._check(answer)
            self._outcome = partial_success(self._signal, answer.body, self._redact)
        except Exception as error:
            self._outcome = error
            raise

    def _check(self, answer: Any) -> None:
        """Raise ``SendError`` unless the answer, a ``courier.http.HttpResponse``, accepts the request."""
        cause = cause_of(str(answer.status), answer.body, self._redact)
        try:
            answer.check()
        except SendError as error:
            raise SendError(cause, permanent=error.permanent, retry_after=error.retry_after) from None
        if len(answer.body) >= MAX_ANSWER:  # the count of what was rejected may be in the rest
            raise SendError(f"the answer has more than {MAX_ANSWER} bytes")


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


def address(connection: OtlpConnection, signal: Signal) -> str:
    """Where the signal goes; raises ``ConfigError`` where an address is given for the other signal alone.

    The headers of that one are not meant for a receiver that nobody named.
    """
    own, other = connection.metrics_endpoint, connection.logs_endpoint
    if signal == "logs":
        own, other = other, own
    if own is None and connection.endpoint is None and other is not None:
        raise ConfigError(f"OTLP {signal}: expected `endpoint` or `{signal}_endpoint`: only the other one is given")
    if connection.protocol == "grpc":
        return own or connection.endpoint or "http://localhost:4317"
    return own or f"{(connection.endpoint or 'http://localhost:4318').rstrip('/')}/v1/{signal}"


def _grpc_exporter(connection: OtlpConnection, signal: Signal, address: str) -> Any:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else it writes to standard error past all logging
    import grpc  # noqa: PLC0415 - some 10 MB, an extra
    from opentelemetry.exporter.otlp.proto.grpc import _log_exporter, metric_exporter  # noqa: PLC0415 - as above

    url = urlsplit(address)
    secure = url.scheme == "https"
    make = metric_exporter.OTLPMetricExporter if signal == "metrics" else _log_exporter.OTLPLogExporter
    files = (connection.ca_file, connection.key_file or connection.cert_file, connection.cert_file)
    return make(
        endpoint=address if url.port or secure else f"http://{url.netloc}:4317",
        insecure=not secure,
        credentials=grpc.ssl_channel_credentials(*map(_read, files)) if secure else None,
        headers={name.lower(): secret.reveal() for name, secret in connection.headers.items()} or NO_HEADERS,
        timeout=connection.timeout.seconds,
        compression=grpc.Compression.Gzip if connection.compression == "gzip" else grpc.Compression.NoCompression,
        retryable_error_codes=(grpc.StatusCode.OK,),  # none: it is called again when its caller wants it
    )


def _read(path: str | None) -> bytes | None:
    try:
        return Path(path).read_bytes() if path is not None else None
    except OSError as error:
        raise SendError(f"{path} cannot be read: {error.strerror}") from None
