"""``Sender`` sends one signal to its receiver with OpenTelemetry's exporters.

Imported only if OTLP is configured.

If the configuration has no ``endpoint``, the exporters take address, headers and certificates from
``OTEL_*``.
"""

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any, Final, Literal

import requests
from google.protobuf.message import DecodeError
from msgspec import Struct
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

from notbefore.config.regular_file import open_file
from notbefore.config.sinks import OtlpConnection
from notbefore.core.text import one_line
from notbefore.errors import SendError
from notbefore.net.http import MAX_ANSWER, Http

Signal = Literal["metrics", "logs"]
# from receivers that do not send protobuf
PLAIN: Final = (
    b"",
    b"{}",
    b"ok",
    b"success",
    b'{"partialsuccess":{}}',
)
OF_THE_BODY: Final = ("content-type", "content-encoding")
# without any, the gRPC exporter takes those of the environment
NO_HEADERS: Final = {"x-sender": "notbefore"}


class PartialSuccess(Struct, frozen=True):
    """How many data points or records of an accepted request the receiver rejected, and why.

    It does not say which.
    """

    rejected: int = 0
    reason: str = ""


class _Said(logging.Filter):
    """Keeps the exporters' last log line of each thread: it becomes the text of an error, which is
    logged once.
    """

    last: Final = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        self.last.text = record.getMessage()
        return False


for _name in ("http._common", "http.metric_exporter", "http._log_exporter", "grpc.exporter"):
    logging.getLogger(f"opentelemetry.exporter.otlp.proto.{_name}").addFilter(_Said())


class Sender:
    """Exports one signal. It tries once; the caller decides when to try again.

    Not for several threads at once.
    """

    def __init__(self, connection: OtlpConnection, signal: Signal) -> None:
        self._connection = connection
        self._signal: Signal = signal
        self._session: _Session | None = None
        self._exporter: Any = None

    def send(self, data: Any) -> PartialSuccess:
        """Export ``MetricsData``, or a list of ``ReadableLogRecord``.

        Raises ``SendError`` if it was not accepted, and ``ConfigError`` if a header's secret cannot
        be read. Their texts may contain secrets. Over gRPC the exporter reports neither what was
        rejected nor whether to try again.
        """
        if self._exporter is None:
            self._exporter = (
                self._grpc_exporter()
                if self._connection.protocol == "grpc"
                else self._http_exporter()
            )
        _Said.last.text = "OpenTelemetry's exporter failed and does not say why"
        accepted = self._exporter.export(data).name == "SUCCESS"
        outcome = self._session.outcome if self._session is not None else None
        if isinstance(outcome, PartialSuccess):
            return outcome
        if accepted:
            return PartialSuccess()
        self.close()  # the next exporter reads the certificates again
        raise outcome or SendError(_Said.last.text)

    def close(self) -> None:
        """Close the connection."""
        if self._exporter is not None:
            self._exporter.shutdown()
        self._exporter = self._session = None

    def _http_exporter(self) -> Any:
        own = self._connection
        self._session = _Session(own, self._signal)
        return (OTLPMetricExporter if self._signal == "metrics" else OTLPLogExporter)(
            endpoint=f"{own.endpoint.rstrip('/')}/v1/{self._signal}" if own.endpoint else None,
            certificate_file=own.ca_file,
            client_key_file=own.key_file,
            client_certificate_file=own.cert_file,
            timeout=own.timeout.seconds,
            compression=Compression.Gzip,
            session=self._session,
        )

    def _grpc_exporter(self) -> Any:
        # else gRPC writes to standard error directly
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        import grpc  # noqa: PLC0415 - some 10 MB, an extra
        from opentelemetry.exporter.otlp.proto.grpc import (  # noqa: PLC0415 - as above
            _log_exporter,
            metric_exporter,
        )

        own = self._connection
        files = (own.ca_file, own.key_file or own.cert_file, own.cert_file)
        headers = {name.lower(): secret.reveal() for name, secret in own.headers.items()}
        make = (
            metric_exporter.OTLPMetricExporter
            if self._signal == "metrics"
            else _log_exporter.OTLPLogExporter
        )
        return make(
            endpoint=own.endpoint,
            insecure=own.endpoint.startswith("http:") if own.endpoint else None,
            credentials=(
                grpc.ssl_channel_credentials(*map(_read, files))
                if own.endpoint or any(files)
                else None
            ),
            headers=headers or (NO_HEADERS if own.endpoint else None),
            timeout=own.timeout.seconds,
            compression=grpc.Compression.Gzip,
            retryable_error_codes=(grpc.StatusCode.OK,),  # no retries: the caller decides
        )


class _Session(requests.Session):
    """The session of the HTTP exporter: like a sink, it has no redirects, and bounds on size and
    time.
    """

    def __init__(self, connection: OtlpConnection, signal: Signal) -> None:
        super().__init__()
        self.outcome: PartialSuccess | Exception | None = None
        self._connection = connection
        self._signal = signal
        self._http: Http | None = None

    def request(
        self,
        method: Any,  # noqa: ARG002 - OTLP uses only POST
        url: Any,
        *_: Any,
        data: Any = None,
        headers: Any = None,
        **__: Any,
    ) -> Any:
        try:
            self.outcome = self._exchange(str(url), data, headers)
        except Exception as error:
            self.outcome = error  # the exporter's own error says less
            raise
        response = requests.Response()
        response.status_code = 200
        return response

    def close(self) -> None:
        if self._http is not None:
            self._http.close()

    def _exchange(self, url: str, body: bytes, headers: Mapping[str, str]) -> PartialSuccess:
        own = self._connection
        if self._http is None:
            ca_file: Any = own.ca_file
            cert: Any = (own.cert_file, own.key_file) if own.cert_file else None
            if own.endpoint is None:  # as the exporter found them in the environment
                ca_file, cert = None if self.verify is True else self.verify, self.cert
            self._http = Http(own.timeout.seconds, ca_file=ca_file, cert=cert)
        if own.endpoint is not None:  # the headers in the environment are for another receiver
            headers = {
                name: value for name, value in headers.items() if name.lower() in OF_THE_BODY
            }
        # read again: a file may have changed
        headers = {**headers, **{name: secret.reveal() for name, secret in own.headers.items()}}
        answer = self._http.post(url, headers, body)
        if (
            self._signal == "metrics"
        ):  # at intervals: the receiver may close a kept connection at the next export
            self._http.close()
        answer.check_status()
        if len(answer.body) >= MAX_ANSWER:  # the number of rejected items may be in the rest
            raise SendError(f"the answer has more than {MAX_ANSWER} bytes")
        return partial_success(answer.body)


def partial_success(body: bytes) -> PartialSuccess:
    """Read the body of the answer to an accepted request.

    Raises ``SendError`` if it is not OTLP (a web page).
    """
    # the answer for metrics has the same fields, under other names
    answer = ExportLogsServiceResponse()
    try:
        if b"".join(body.split()).lower() not in PLAIN:
            answer.ParseFromString(body)
    except DecodeError:
        raise SendError(
            "the answer is not OTLP: does the address lead to an OTLP receiver?"
        ) from None
    partial = answer.partial_success
    return PartialSuccess(max(0, partial.rejected_log_records), one_line(partial.error_message))


def _read(path: str | None) -> bytes | None:
    try:
        if path is None:
            return None
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        raise SendError(f"{path} cannot be read: {error.strerror}") from None
