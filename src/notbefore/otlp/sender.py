"""``Sender``: one signal to its receiver, through OpenTelemetry's exporters. Imported only where OTLP is configured."""

import logging
import os
from collections.abc import Callable
from typing import Any, Final, Protocol

from opentelemetry.sdk.metrics.export import MetricsData

from notbefore.config.sinks import OtlpConnection
from notbefore.errors import ConfigError
from notbefore.otlp.answer import MAX_ANSWER, PartialSuccess, Redact, Signal, partial_success

# what they log of a failure stands in the SendError as well: redacted, and said once
logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)

EMPTY: Final[dict[Signal, Any]] = {"metrics": MetricsData([]), "logs": []}


class _Exporter(Protocol):
    def export(self, data: Any, seconds: float) -> bytes: ...

    def close(self) -> None: ...


class Sender:
    """Exports one signal. It tries once: when to try again is up to the caller. Not for several threads at once."""

    def __init__(
        self, connection: OtlpConnection, signal: Signal, http: Callable[..., Any], redact: Redact = str
    ) -> None:
        """``http`` is ``delivery.http.Http``; ``redact`` takes secrets out of what the receiver says.

        Raises ``ConfigError`` where there is no address; ``SendError`` for a certificate that cannot be read.
        """
        self._signal: Signal = signal
        self._redact = redact
        self._timeout = connection.timeout.seconds
        self._exporter: _Exporter
        if connection.protocol == "grpc":
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else it writes to standard error past all logging
            from notbefore.otlp.grpc_exporter import GrpcExporter  # noqa: PLC0415 - some 10 MB

            self._exporter = GrpcExporter(connection, signal, address(connection, signal), redact)
        else:
            self._exporter = _HttpExporter(connection, signal, http, redact)

    def send(self, data: Any, timeout: float | None = None) -> PartialSuccess:
        """Export ``MetricsData``, or a list of ``ReadableLogRecord``, within ``timeout`` seconds at most.

        Raises ``SendError`` where it was not accepted, and ``ConfigError`` where a header's secret cannot be read.
        """
        seconds = self._timeout if timeout is None else min(timeout, self._timeout)
        return partial_success(self._signal, self._exporter.export(data, seconds), self._redact)

    def connect(self) -> None:
        """Send an empty request, which OTLP allows; raises ``SendError`` where it is not accepted."""
        self.send(EMPTY[self._signal])

    def close(self) -> None:
        """Close the connection."""
        self._exporter.close()


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


class _HttpExporter:
    """OpenTelemetry's exporter over HTTP with protobuf, through a session of ours."""

    def __init__(self, connection: OtlpConnection, signal: Signal, http: Callable[..., Any], redact: Redact) -> None:
        from opentelemetry.exporter.otlp.proto.http import Compression  # noqa: PLC0415 - these are not for gRPC
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter  # noqa: PLC0415 - as above
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415 - as above

        from notbefore.otlp.session import Session  # noqa: PLC0415 - as above

        seconds = connection.timeout.seconds
        cert = (connection.cert_file, connection.key_file) if connection.cert_file else None
        self._session = Session(
            connection, http(seconds, ca_file=connection.ca_file, cert=cert, most=MAX_ANSWER), redact
        )
        self._exporter: Any = (OTLPMetricExporter if signal == "metrics" else OTLPLogExporter)(
            endpoint=address(connection, signal),
            timeout=seconds,
            compression=Compression.Gzip if connection.compression == "gzip" else Compression.NoCompression,
            session=self._session,
        )

    def export(self, data: Any, seconds: float) -> bytes:
        self._session.begin(seconds)
        self._exporter.export(data)
        return self._session.result()

    def close(self) -> None:
        self._exporter.shutdown()
