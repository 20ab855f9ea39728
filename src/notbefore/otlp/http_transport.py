"""``HttpTransport`` exports one signal over HTTP, with OpenTelemetry's exporter.

The exporter counts redirects and web pages as success, and does not read what was rejected. So a
hook of its session reads and checks each answer.

Imported only if OTLP is configured.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

from notbefore.config.otel import Signal, compression_of
from notbefore.config.sinks import OtlpConnection
from notbefore.errors import ConfigError, SendError
from notbefore.net.connections import Adapter, Deadline
from notbefore.net.failures import REQUEST_ERRORS, forget_frames, host_and_port, innermost_cause
from notbefore.net.response import read_response
from notbefore.otlp import NO_REASON
from notbefore.otlp.partial_success import PartialSuccess, partial_success

# the headers of a request that do not come from the environment
STANDARD_HEADERS: Final = frozenset(
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
COMPRESSIONS: Final = {
    "none": Compression.NoCompression,
    "gzip": Compression.Gzip,
    "deflate": Compression.Deflate,
}

# this module reports more about a failure than these lines
logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL)


class HttpTransport:
    """An exporter with its session. It tries once: no error here is one that it would retry."""

    def __init__(self, settings: OtlpConnection, signal: Signal) -> None:
        self._settings = settings
        # the receiver may close a kept connection until the next export of metrics
        self._keeps_connection = signal == "logs"
        self._deadline = Deadline(settings.timeout.seconds)
        self._outcome: PartialSuccess | SendError | ConfigError | None = None  # of the last request
        self._adapter = _Adapter(self._deadline)
        self._session = requests.Session()
        # requests looks for a login in .netrc, and in the address, only without ``auth``
        self._session.auth = self._set_headers
        self._session.hooks["response"].append(self._check)
        self._session.mount("http://", self._adapter)
        self._session.mount("https://", self._adapter)
        self._exporter = self._make_exporter(signal)

    def export(self, data: Any) -> PartialSuccess:
        """Export; raises ``SendError``, or ``ConfigError``, if it was not accepted."""
        self._outcome = None
        self._adapter.failure = ""
        with self._deadline.exchange():
            self._exporter.export(data)
        if not self._keeps_connection:
            self._session.close()

        if isinstance(self._outcome, PartialSuccess):
            return self._outcome
        if self._deadline.passed:
            raise SendError(f"no complete answer within {round(self._deadline.seconds, 2):g} s")
        if self._outcome is not None:
            raise self._outcome
        raise SendError(self._adapter.failure or NO_REASON)

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()
        self._deadline.close()

    def _make_exporter(self, signal: Signal) -> Any:
        settings = self._settings
        exporter_type: Any = OTLPLogExporter
        if signal == "metrics":
            exporter_type = OTLPMetricExporter
        endpoint = None
        if settings.endpoint is not None:
            endpoint = f"{settings.endpoint.rstrip('/')}/v1/{signal}"

        exporter = exporter_type(
            endpoint=endpoint,
            certificate_file=settings.ca_file,
            client_key_file=settings.key_file,
            client_certificate_file=settings.cert_file,
            timeout=settings.timeout.seconds,
            compression=COMPRESSIONS[compression_of(signal, os.environ)],
            session=self._session,
        )
        # without an endpoint of its own, it takes certificates from variables. Those must not be
        # used for another receiver
        if settings.endpoint is not None:
            self._use_configured_certificates()
        self._adapter.verify = self._session.verify
        return exporter

    def _use_configured_certificates(self) -> None:
        settings = self._settings
        self._session.verify = settings.ca_file or True
        self._session.cert = settings.cert_file
        if settings.cert_file and settings.key_file:
            self._session.cert = (settings.cert_file, settings.key_file)

    def _set_headers(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Set the configured headers. Their files are read again: they may have changed."""
        if self._settings.endpoint is not None:
            # the headers in the environment are for another receiver
            for name in list(request.headers):
                if name.lower() not in STANDARD_HEADERS:
                    del request.headers[name]
        try:
            for name, secret in self._settings.headers.items():
                request.headers[name] = secret.reveal()
        except ConfigError as error:
            self._outcome = error
            raise
        return request

    def _check(self, response: requests.Response, **_: Any) -> None:
        """Read and check an answer. Raises ``SendError`` to refuse it."""
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
    """Raises ``SendError`` with the cause of a failure; the exporter does not retry after that."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__(deadline, guarded=False)
        self.failure = ""  # the cause of the last failure
        self.verify: Any = True  # as that of the session

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> Any:
        """Send a request, and return the answer, whose body is not read yet."""
        options["stream"] = True
        if self.verify is not True:  # else ``REQUESTS_CA_BUNDLE`` would replace a named authority
            options["verify"] = self.verify
        with self.failures_of(request.url or ""):
            return super().send(request, *args, **options)

    @contextmanager
    def failures_of(self, url: str) -> Iterator[None]:
        """Raise ``SendError`` for a failure inside the ``with``."""
        try:
            yield
        except REQUEST_ERRORS as error:
            self.failure = f"{host_and_port(url)}: {innermost_cause(error)}"
            forget_frames(error)
            raise SendError(self.failure) from None
