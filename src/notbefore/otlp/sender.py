"""``Sender`` sends one signal to its receiver with OpenTelemetry's exporters.

Imported only if OTLP is configured. If the configuration has no ``endpoint``, the exporters take
address, headers and certificates from ``OTEL_*``.
"""

import os
from typing import Any, Protocol

from notbefore.config.otel import Signal
from notbefore.config.sinks import OtlpConnection
from notbefore.errors import ConfigError, SendError
from notbefore.otlp.grpc_log import keep_last_line
from notbefore.otlp.http_transport import HttpTransport
from notbefore.otlp.partial_success import PartialSuccess


class Transport(Protocol):
    """An exporter of OpenTelemetry's, over HTTP or gRPC."""

    def export(self, data: Any) -> PartialSuccess:
        """Export ``MetricsData``, or a list of ``ReadableLogRecord``."""

    def close(self) -> None:
        """Close the connection."""


class Sender:
    """Exports one signal. It tries once; the caller decides when to try again.

    Use it in one thread at a time.
    """

    def __init__(self, connection: OtlpConnection, signal: Signal) -> None:
        self._connection = connection
        self._signal: Signal = signal
        self._transport: Transport | None = None

    def send(self, data: Any) -> PartialSuccess:
        """Export ``MetricsData``, or a list of ``ReadableLogRecord``.

        Raises ``SendError`` if it was not accepted, and ``ConfigError`` if a header's secret cannot
        be read. Their texts may contain secrets.
        """
        if self._transport is None:
            self._transport = self._make_transport()
        try:
            return self._transport.export(data)
        except (SendError, ConfigError):
            self.close()  # the next transport reads the certificates again
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def _make_transport(self) -> Transport:
        if self._connection.protocol != "grpc":
            return HttpTransport(self._connection, self._signal)
        # otherwise gRPC writes to standard error directly
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        keep_last_line()
        from notbefore.otlp.grpc_transport import (  # noqa: PLC0415 - some 10 MB, an extra
            GrpcTransport,
        )

        return GrpcTransport(self._connection, self._signal)
