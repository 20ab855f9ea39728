"""``Sender`` sends one signal to its receiver with OpenTelemetry's exporters.

Imported only if OTLP is configured.

If the configuration has no ``endpoint``, the exporters take address, headers and certificates from
``OTEL_*``.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import requests
from google.protobuf.message import DecodeError
from msgspec import Struct
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

from notbefore.config.otel import Signal, compression_of
from notbefore.config.regular_file import open_file
from notbefore.config.sinks import OtlpConnection
from notbefore.core.text import one_line
from notbefore.errors import ConfigError, SendError
from notbefore.net.connections import Adapter, Deadline
from notbefore.net.failures import REQUEST_ERRORS, forget_frames, host_and_port, innermost_cause
from notbefore.net.response import MAX_ANSWER, read_response

# from receivers that do not send protobuf
PLAIN: Final = (b"", b"{}", b"ok", b"success", b'{"partialsuccess":{}}')
# the headers of a request that do not come from the environment
OWN_HEADERS: Final = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "host",
        "user-agent",
    }
)
# without any, the gRPC exporter takes those of the environment
NO_HEADERS: Final = {"x-sender": "notbefore"}
NO_REASON: Final = "OpenTelemetry's exporter failed and does not say why"
COMPRESSIONS: Final = {
    "none": Compression.NoCompression,
    "gzip": Compression.Gzip,
    "deflate": Compression.Deflate,
}


class PartialSuccess(Struct, frozen=True):
    """How many data points or records of an accepted request the receiver rejected, and why.

    It does not say which.
    """

    rejected: int = 0
    reason: str = ""


class _LastLine(logging.Filter):
    """Keeps the last line that the gRPC exporter logs in each thread, and does not let it through.

    The exporter tells only there why it failed. The caller logs each cause once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines = threading.local()

    @property
    def text(self) -> str:
        """The last line of this thread since ``forget``."""
        return getattr(self._lines, "text", NO_REASON)

    def forget(self) -> None:
        """Forget the line of this thread."""
        self._lines.text = NO_REASON

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a line."""
        self._lines.text = record.getMessage()
        return False


_last_line: Final = _LastLine()
logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(_last_line)
# over HTTP, ``_Exchange`` knows more than the exporter logs
logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL)


class Sender:
    """Exports one signal. It tries once; the caller decides when to try again.

    Not for several threads at once.
    """

    def __init__(self, connection: OtlpConnection, signal: Signal) -> None:
        self._connection = connection
        self._signal: Signal = signal
        self._exchange: _Exchange | None = None  # over HTTP
        self._exporter: Any = None

    def send(self, data: Any) -> PartialSuccess:
        """Export ``MetricsData``, or a list of ``ReadableLogRecord``.

        Raises ``SendError`` if it was not accepted, and ``ConfigError`` if a header's secret cannot
        be read. Their texts may contain secrets. Over gRPC the exporter reports neither what was
        rejected nor whether to try again.
        """
        if self._exporter is None:
            self._exporter = self._make_exporter()
        try:
            if self._exchange is not None:
                return self._exchange.run(self._exporter, data)
            return _run_grpc(self._exporter, data)
        except (SendError, ConfigError):
            self.close()  # the next exporter reads the certificates again
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._exporter is not None:
            self._exporter.shutdown()
        self._exporter = None
        self._exchange = None

    def _make_exporter(self) -> Any:
        if self._connection.protocol == "grpc":
            return self._grpc_exporter()
        return self._http_exporter()

    def _http_exporter(self) -> Any:
        settings = self._connection
        endpoint = None
        if settings.endpoint is not None:
            endpoint = f"{settings.endpoint.rstrip('/')}/v1/{self._signal}"
        make: Any = OTLPLogExporter
        if self._signal == "metrics":
            make = OTLPMetricExporter
        # the receiver may close a kept connection until the next export of metrics
        self._exchange = _Exchange(settings, keep=self._signal == "logs")
        exporter = make(
            endpoint=endpoint,
            certificate_file=settings.ca_file,
            client_key_file=settings.key_file,
            client_certificate_file=settings.cert_file,
            timeout=settings.timeout.seconds,
            compression=COMPRESSIONS[compression_of(self._signal, os.environ)],
            session=self._exchange.session,
        )
        self._exchange.use_certificates()
        return exporter

    def _grpc_exporter(self) -> Any:
        # else gRPC writes to standard error directly
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        import grpc  # noqa: PLC0415 - some 10 MB, an extra
        from opentelemetry.exporter.otlp.proto.grpc import (  # noqa: PLC0415 - as above
            _log_exporter,
            metric_exporter,
        )

        settings = self._connection
        endpoint = settings.endpoint
        headers: dict[str, str] | None = {
            name.lower(): secret.reveal() for name, secret in settings.headers.items()
        }
        if not headers:
            headers = NO_HEADERS if endpoint else None
        files = (settings.ca_file, settings.key_file or settings.cert_file, settings.cert_file)
        credentials = None
        if endpoint or any(files):
            credentials = grpc.ssl_channel_credentials(*map(_read, files))
        compressions = {
            "none": grpc.Compression.NoCompression,
            "gzip": grpc.Compression.Gzip,
            "deflate": grpc.Compression.Deflate,
        }
        make: Any = _log_exporter.OTLPLogExporter
        if self._signal == "metrics":
            make = metric_exporter.OTLPMetricExporter
        return make(
            endpoint=endpoint,
            insecure=endpoint.startswith("http:") if endpoint else None,
            credentials=credentials,
            headers=headers,
            timeout=settings.timeout.seconds,
            compression=compressions[compression_of(self._signal, os.environ)],
            retryable_error_codes=(grpc.StatusCode.OK,),  # no retries: the caller decides
        )


def _run_grpc(exporter: Any, data: Any) -> PartialSuccess:
    _last_line.forget()
    if exporter.export(data).name != "SUCCESS":
        raise SendError(_last_line.text)
    return PartialSuccess()


class _Exchange:
    """The requests of an HTTP exporter, and what became of the last one.

    The exporter counts redirects and web pages as success, and does not read what was rejected. So
    a hook of its session reads and checks each answer. It raises no error that the exporter would
    try again after.
    """

    def __init__(self, settings: OtlpConnection, *, keep: bool) -> None:
        self._settings = settings
        self._keep = keep  # the connection, for the next export
        self._deadline = Deadline()
        self._outcome: PartialSuccess | SendError | ConfigError | None = None
        self.session = requests.Session()
        # requests looks for a login in .netrc, and in the address, only without ``auth``
        self.session.auth = self._set_headers
        self.session.hooks["response"].append(self._check)
        adapter = _Adapter(self._deadline)
        self.session.mount("http://", adapter)
        self.session.mount("https://", adapter)
        self._adapter = adapter

    def use_certificates(self) -> None:
        """Use the configured certificates, or else those that the exporter read from variables."""
        settings = self._settings
        if settings.endpoint is not None:  # the variables are for another receiver
            self.session.verify = settings.ca_file or True
            self.session.cert = None
            if settings.cert_file and settings.key_file:
                self.session.cert = (settings.cert_file, settings.key_file)
            elif settings.cert_file:
                self.session.cert = settings.cert_file
        self._adapter.verify = self.session.verify

    def run(self, exporter: Any, data: Any) -> PartialSuccess:
        """Export; raises ``SendError``, or ``ConfigError``, if it was not accepted."""
        self._outcome = None
        self._adapter.failure = ""
        with self._deadline.after(self._settings.timeout.seconds):
            exporter.export(data)
        if not self._keep:
            self.session.close()

        if isinstance(self._outcome, PartialSuccess):
            return self._outcome
        if self._deadline.passed:
            seconds = self._settings.timeout.seconds
            raise SendError(f"no complete answer within {seconds:g} s")
        if self._outcome is not None:
            raise self._outcome
        raise SendError(self._adapter.failure or NO_REASON)

    def _set_headers(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Set the configured headers. Their files are read again: they may have changed."""
        if self._settings.endpoint is not None:
            # the headers in the environment are for another receiver
            for name in list(request.headers):
                if name.lower() not in OWN_HEADERS:
                    del request.headers[name]
        try:
            for name, secret in self._settings.headers.items():
                request.headers[name] = secret.reveal()
        except ConfigError as error:
            self._outcome = error
            raise
        return request

    def _check(self, response: requests.Response, **_: Any) -> None:
        """Read an answer, which nobody has read so far. Raises ``SendError`` to refuse it."""
        try:
            with self._adapter.failures_of(response.url):
                answer = read_response(response)
            answer.check_status()
            self._outcome = partial_success(answer.body)
        except SendError as error:
            self._outcome = error
            response.close()
            raise


class _Adapter(Adapter):
    """Raises ``SendError``, with the cause, after which the exporter does not try again."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__(deadline, guarded=False)
        self.failure = ""  # the cause of the last error
        self.verify: Any = True  # that of the session

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> Any:
        """Send a request, and return the answer, whose body is not read yet."""
        options["stream"] = True
        if self.verify is not True:  # else ``REQUESTS_CA_BUNDLE`` would replace a named authority
            options["verify"] = self.verify
        with self.failures_of(request.url or ""):
            return super().send(request, *args, **options)

    @contextmanager
    def failures_of(self, url: str) -> Iterator[None]:
        """Make a ``SendError`` of what goes wrong inside the ``with``."""
        try:
            yield
        except REQUEST_ERRORS as error:
            self.failure = f"{host_and_port(url)}: {innermost_cause(error)}"
            forget_frames(error)
            raise SendError(self.failure) from None


def partial_success(body: bytes) -> PartialSuccess:
    """Read the body of the answer to an accepted request.

    Raises ``SendError`` if it is not OTLP (a web page).
    """
    if len(body) >= MAX_ANSWER:  # the number of rejected items may be in the rest
        raise SendError(f"the answer has more than {MAX_ANSWER} bytes")
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
