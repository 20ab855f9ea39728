"""``Sender``: one signal to its receiver, by OpenTelemetry's exporters. Imported only where OTLP is configured."""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricsData

from notbefore.config.sinks import OtlpConnection
from notbefore.errors import ConfigError, SendError
from notbefore.otlp.session import MAX_ANSWER, MAX_CAUSE, PartialSuccess, Redact, Session, Signal

EMPTY: Final[dict[Signal, Any]] = {"metrics": MetricsData([]), "logs": []}
NO_HEADERS: Final = {"x-sender": "notbefore"}  # without any, the gRPC exporter takes those of the environment


class _Said(logging.Filter):
    """Keeps what the exporters log, of each thread: it becomes the text of an error, redacted and said once."""

    def __init__(self) -> None:
        super().__init__()
        self._last = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        self._last.text = record.getMessage()
        return False

    def take(self) -> str:
        """What was said last in this thread."""
        return str(self._last.__dict__.pop("text", ""))


_SAID: Final = _Said()
for _name in ("http.metric_exporter", "http._log_exporter", "grpc.exporter"):
    logging.getLogger(f"opentelemetry.exporter.otlp.proto.{_name}").addFilter(_SAID)


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
        self._session: Session | None = None
        self._exporter: Any = None
        if connection.protocol != "grpc":
            cert = (connection.cert_file, connection.key_file) if connection.cert_file else None
            client = http(connection.timeout.seconds, ca_file=connection.ca_file, cert=cert, most=MAX_ANSWER)
            self._session = Session(connection, signal, client, redact)
            self._exporter = (OTLPMetricExporter if signal == "metrics" else OTLPLogExporter)(
                endpoint=self._address,
                timeout=connection.timeout.seconds,
                compression=Compression.Gzip if connection.compression == "gzip" else Compression.NoCompression,
                session=self._session,
            )

    def send(self, data: Any, timeout: float | None = None) -> PartialSuccess:
        """Export ``MetricsData``, or a list of ``ReadableLogRecord``, within ``timeout`` seconds at most.

        Raises ``SendError`` where it was not accepted, and ``ConfigError`` where a header's secret cannot be read.
        Over gRPC the exporter tells neither what was rejected nor whether to try again, and has its own timeout.
        """
        if self._session is None:
            self._send_by_grpc(data)
            return PartialSuccess()
        most = self._connection.timeout.seconds
        self._session.deadline = time.monotonic() + (most if timeout is None else min(timeout, most))
        self._exporter.export(data)
        outcome, self._session.outcome = self._session.outcome, None
        if isinstance(outcome, PartialSuccess):
            return outcome
        try:
            raise outcome or self._error()
        finally:
            del outcome  # it refers to this frame, and with it to what was sent

    def _send_by_grpc(self, data: Any) -> None:
        if self._exporter is None:  # made anew after a failure, with certificates and headers as they are then
            self._exporter = _grpc_exporter(self._connection, self._signal, self._address)
        if self._exporter.export(data).name != "SUCCESS":
            self.close()
            raise self._error()

    def _error(self) -> SendError:
        said = self._redact(_SAID.take())[:MAX_CAUSE]
        return SendError(said or "OpenTelemetry's exporter failed and does not say why")

    def connect(self) -> None:
        """Send an empty request, which OTLP allows; raises ``SendError`` where it is not accepted."""
        self.send(EMPTY[self._signal])

    def close(self) -> None:
        """Close the connection."""
        if self._exporter is not None:
            self._exporter.shutdown()
        if self._session is None:
            self._exporter = None


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
