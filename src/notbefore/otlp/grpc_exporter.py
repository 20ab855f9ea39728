"""OpenTelemetry's exporter over gRPC, so that the receiver's answer is read. Imported only for ``protocol: grpc``.

Its two classes, for metrics and for logs, drop the answer, and raise for a timeout in the environment that is no
number. Their common base takes the stub that calls the receiver: here the exporter itself, which calls once.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.grpc.exporter import OTLPExporterMixin
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.sdk.metrics.export import MetricExportResult

from notbefore.config.sinks import OtlpConnection
from notbefore.errors import SendError
from notbefore.otlp.answer import MAX_ANSWER, ContentError, Redact, Signal, cause_of

CONTENT_CODES: Final = ("INVALID_ARGUMENT", "FAILED_PRECONDITION")  # they refuse what was sent, and not who sends it
PERMANENT_CODES: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "NOT_FOUND", "ALREADY_EXISTS")
DETAILS: Final = "grpc-status-details-bin"  # where a receiver says how long to wait


class GrpcExporter(OTLPExporterMixin[Any, Any, Any, Any]):
    """One signal over one channel."""

    def __init__(self, connection: OtlpConnection, signal: Signal, address: str, redact: Redact) -> None:
        self._connection = connection
        self._redact = redact
        self._answer, self._deadline = b"", 0.0
        url = urlsplit(address)
        secure = url.scheme == "https"
        options: Any = (("grpc.max_receive_message_length", MAX_ANSWER), ("grpc.primary_user_agent", "notbefore"))
        super().__init__(
            stub=self._stub_on,
            result=MetricExportResult,
            endpoint=address if url.port or secure else f"http://{url.netloc}:4317",
            insecure=not secure,
            credentials=_credentials(connection) if secure else None,
            timeout=connection.timeout.seconds,
            compression=grpc.Compression.Gzip if connection.compression == "gzip" else grpc.Compression.NoCompression,
            channel_options=options,
            signal=signal,
        )

    def export(self, data: Any, seconds: float) -> bytes:
        """Return the answer; raises ``SendError``."""
        self._answer, self._deadline = b"", time.monotonic() + seconds
        self._export(data)
        return self._answer

    def close(self) -> None:
        """Close the channel."""
        self.shutdown()

    def _stub_on(self, channel: grpc.Channel) -> "GrpcExporter":
        stub: Any = MetricsServiceStub if self._exporting == "metrics" else LogsServiceStub
        self._call = stub(channel).Export
        return self

    def Export(self, request: Any, **_: Any) -> None:  # noqa: N802 - the name of the service's method
        """Call the receiver; what the base gives beside the request may come from the environment.

        A ``SendError`` passes through the base, which would try again after a gRPC error.
        """
        metadata = [(name.lower(), secret.reveal()) for name, secret in self._connection.headers.items()]
        try:
            response = self._call(request, metadata=metadata, timeout=self._deadline - time.monotonic())
        except grpc.RpcError as error:
            raise self._failure(error) from None
        self._answer = response.SerializeToString()

    def _failure(self, error: Any) -> SendError:
        code = error.code().name
        text = cause_of(code, (error.details() or "").encode(errors="replace"), self._redact)
        if code in CONTENT_CODES:
            return ContentError(text, permanent=True)
        return SendError(text, permanent=code in PERMANENT_CODES, retry_after=_retry_after(error))

    # ---- what the base asks of the exporter of a signal

    @property
    def _exporting(self) -> str:
        return self._signal

    def _translate_data(self, data: Any) -> Any:
        return encode_metrics(data) if self._exporting == "metrics" else encode_logs(data)

    def _count_data(self, _data: Any) -> int:
        return 0  # for metrics of the exporter itself, which nobody reads


def _retry_after(error: Any) -> float | None:
    """Seconds, as the receiver asks; ``None`` where it does not."""
    details = next((value for name, value in error.trailing_metadata() or () if name == DETAILS), b"")
    info = RetryInfo()
    with suppress(DecodeError):
        if any(detail.Unpack(info) for detail in Status.FromString(details).details):
            return max(0.0, float(info.retry_delay.ToTimedelta().total_seconds()))
    return None


def _credentials(connection: OtlpConnection) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        _read(connection.ca_file), _read(connection.key_file or connection.cert_file), _read(connection.cert_file)
    )


def _read(path: str | None) -> bytes | None:
    try:
        return Path(path).read_bytes() if path is not None else None
    except OSError as error:
        raise SendError(f"{path} cannot be read: {error.strerror}") from None
