"""``GrpcTransport`` exports one signal over gRPC, with OpenTelemetry's exporter.

Imported only if OTLP over gRPC is configured: gRPC is an extra, and takes 10 MB.
"""

import os
from typing import Any, Final

import grpc
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

from notbefore.config.otel import Signal, compression_of
from notbefore.config.regular_file import open_file
from notbefore.config.sinks import OtlpConnection
from notbefore.errors import SendError
from notbefore.otlp.grpc_log import last_line
from notbefore.otlp.partial_success import PartialSuccess

# without any, the exporter takes those of the environment, which are for another receiver
NO_HEADERS: Final = {"x-sender": "notbefore"}
COMPRESSIONS: Final = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}


class GrpcTransport:
    """An exporter. It tries once, and reports neither what was rejected nor whether to retry."""

    def __init__(self, settings: OtlpConnection, signal: Signal) -> None:
        exporter_type: Any = OTLPLogExporter
        if signal == "metrics":
            exporter_type = OTLPMetricExporter
        insecure = None  # as the variables say
        if settings.endpoint is not None:
            insecure = settings.endpoint.startswith("http:")
        self._exporter = exporter_type(
            endpoint=settings.endpoint,
            insecure=insecure,
            credentials=_credentials(settings),
            headers=_headers(settings),
            timeout=settings.timeout.seconds,
            compression=COMPRESSIONS[compression_of(signal, os.environ)],
            retryable_error_codes=(grpc.StatusCode.OK,),  # no retries: the caller decides
        )

    def export(self, data: Any) -> PartialSuccess:
        """Export; raises ``SendError`` if it was not accepted."""
        last_line.forget()
        result = self._exporter.export(data)
        if result.name != "SUCCESS":
            raise SendError(last_line.text)
        return PartialSuccess()

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()


def _headers(settings: OtlpConnection) -> dict[str, str] | None:
    """Return the configured headers; ``None``: those of the variables."""
    if settings.headers:
        return {name.lower(): secret.reveal() for name, secret in settings.headers.items()}
    if settings.endpoint is not None:
        return NO_HEADERS
    return None


def _credentials(settings: OtlpConnection) -> Any:
    """Return the certificates to use; ``None``: those of the variables."""
    files = (settings.ca_file, settings.key_file, settings.cert_file)
    if settings.endpoint is None and not any(files):
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(settings.ca_file),
        private_key=_read(settings.key_file or settings.cert_file),
        certificate_chain=_read(settings.cert_file),
    )


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        raise SendError(f"{path} cannot be read: {error.strerror}") from None
