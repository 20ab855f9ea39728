"""Receivers of OTLP over HTTP and gRPC that decode requests, and a real collector.

The functions at the end turn requests and scrapes into series that can be compared.
"""

import gzip
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import grpc
import rotel
import trustme
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsPartialSuccess,
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from prometheus_client.parser import text_string_to_metric_families

from support.agent import eventually, free_port
from support.peers import Answer, HttpPeer, Request

REQUESTS: dict[str, Any] = {
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
Labels = frozenset[tuple[str, str]]
Series = dict[tuple[str, Labels], float]  # name and labels -> value


class Receiver(HttpPeer):
    """A receiver over HTTP. A request that cannot be decoded fails the test that reads it."""

    def __init__(
        self, authority: trustme.CA | None = None, *, client_ca: trustme.CA | None = None
    ) -> None:
        super().__init__(authority, client_ca=client_ca)
        self.default = Answer(200, (("Content-Type", "application/x-protobuf"),), b"")

    @property
    def metrics(self) -> list[ExportMetricsServiceRequest]:
        """The requests with metrics, decoded."""
        requests = list(self.requests)
        return [decoded(request) for request in requests if request.path == "/v1/metrics"]

    @property
    def logs(self) -> list[ExportLogsServiceRequest]:
        """The requests with logs, decoded."""
        requests = list(self.requests)
        return [decoded(request) for request in requests if request.path == "/v1/logs"]

    @property
    def records(self) -> list[LogRecord]:
        """The records of all requests with logs."""
        records: list[LogRecord] = []
        for request in self.logs:
            for logs in request.resource_logs:
                for scope in logs.scope_logs:
                    records += scope.log_records
        return records


def decoded(request: Request) -> Any:
    """Decode a request by its path."""
    assert request.headers["content-type"] == "application/x-protobuf"
    body = request.body
    if request.headers.get("content-encoding") == "gzip":
        body = gzip.decompress(body)
    return REQUESTS[request.path].FromString(body)


class GrpcReceiver:
    """A receiver over gRPC; with an authority, it demands TLS and client certificates."""

    def __init__(self, authority: trustme.CA | None = None) -> None:
        self.requests: list[tuple[str, bytes, dict[str, Any]]] = []  # path, body and metadata
        self.abort: grpc.StatusCode | None = None  # the error to answer with
        self._server = grpc.server(ThreadPoolExecutor(2))
        for kind in ("metrics.v1.Metrics", "logs.v1.Logs"):
            service = f"opentelemetry.proto.collector.{kind}Service"
            method: Any = grpc.unary_unary_rpc_method_handler(
                partial(self._answer, f"/{service}/Export")
            )
            handler = grpc.method_handlers_generic_handler(service, {"Export": method})
            self._server.add_generic_rpc_handlers((handler,))
        if authority is None:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
            self.url = f"http://127.0.0.1:{self.port}"
        else:
            credentials = _server_credentials(authority)
            self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
            self.url = f"https://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def _answer(self, path: str, body: bytes, context: grpc.ServicerContext) -> bytes:
        self.requests.append((path, body, dict(context.invocation_metadata())))
        if self.abort is not None:
            context.abort(self.abort, "ordered by the test")
        return b""


def _server_credentials(authority: trustme.CA) -> grpc.ServerCredentials:
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    pairs = [(certificate.private_key_pem.bytes(), chain)]
    return grpc.ssl_server_credentials(pairs, authority.cert_pem.bytes(), require_client_auth=True)


class Collector:
    """Runs rotel, a collector of OTLP from PyPI.

    It receives over HTTP and gRPC, and forwards over HTTP to ``receiver_url``.
    """

    def __init__(self, directory: Path, receiver_url: str) -> None:
        self.http = free_port()
        self.grpc = free_port()
        options = {
            "otlp-http-endpoint": f"127.0.0.1:{self.http}",
            "otlp-grpc-endpoint": f"127.0.0.1:{self.grpc}",
            "exporter": "otlp",
            "otlp-exporter-endpoint": receiver_url,
            "otlp-exporter-protocol": "http",
            "otlp-exporter-request-timeout": "60s",  # later it would send the request again
            "batch-timeout": "50ms",
            "pid-file": str(directory / "rotel.pid"),
            "log-file": str(directory / "rotel.log"),
        }
        program = Path(rotel.__file__).with_name("rotel-agent")
        command = [str(program), "start"]
        for name, value in options.items():
            command += [f"--{name}", value]
        self.log = directory / "rotel.txt"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={"PATH": os.environ["PATH"]}
            )

    def __enter__(self) -> Self:
        try:
            eventually(self._has_started_or_failed)
        except BaseException:
            self.__exit__()
            raise
        assert self._process.poll() is None, self.log.read_text(errors="replace")
        return self

    def _has_started_or_failed(self) -> bool:
        if self._process.poll() is not None:
            return True
        return _listens(self.http) and _listens(self.grpc)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def collected(directory: Path) -> Iterator[tuple[Collector, Receiver]]:
    """Run a collector and the receiver to which it forwards."""
    with Receiver() as receiver, Collector(directory, receiver.url) as collector:
        yield collector, receiver


def partly_accepted(count: int, reason: str) -> Answer:
    """Return an answer that rejects so many log records, or data points, of a request.

    For both, the answer has the same bytes.
    """
    partial = ExportLogsPartialSuccess(rejected_log_records=count, error_message=reason)
    body = ExportLogsServiceResponse(partial_success=partial).SerializeToString()
    return Answer(200, (("Content-Type", "application/x-protobuf"),), body)


# ---- requests and scrapes in forms that can be compared


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Return attributes as a dictionary."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


def metrics_of(request: ExportMetricsServiceRequest) -> list[Metric]:
    """Return the metrics of a request."""
    metrics: list[Metric] = []
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            metrics += scope.metrics
    return metrics


def prometheus_name(metric: Metric) -> str:
    """Return the name of a metric in Prometheus.

    OpenTelemetry's specification defines it ("Prometheus and OpenMetrics Compatibility").
    """
    name = metric.name
    # a unit in braces is an annotation, which does not change the name
    assert metric.unit in {"", "s"} or re.fullmatch(r"\{[a-z]+\}", metric.unit)
    if metric.unit == "s" and "seconds" not in name.split("_"):
        name += "_seconds"
    if metric.HasField("sum") and metric.sum.is_monotonic:
        name += "_total"
    return name


def series(request: ExportMetricsServiceRequest) -> Series:
    """Return the series that Prometheus would make of a request, labeled as in ``/metrics``."""
    values: Series = {}
    for metric in metrics_of(request):
        name = prometheus_name(metric)
        for point in (*metric.gauge.data_points, *metric.sum.data_points):
            values[name, _labels(point)] = point.as_double
        for histogram in metric.histogram.data_points:
            assert metric.histogram.aggregation_temporality == CUMULATIVE
            labels = _labels(histogram)
            values[f"{name}_count", labels] = histogram.count
            values[f"{name}_sum", labels] = histogram.sum
            bounds = [*histogram.explicit_bounds, float("inf")]
            for bound, count in zip(bounds, accumulate(histogram.bucket_counts), strict=True):
                values[f"{name}_bucket", labels | {("le", str(bound))}] = count
    return values


def _labels(point: Any) -> Labels:
    return frozenset(attributes(point.attributes).items())


def starts(request: ExportMetricsServiceRequest) -> dict[str, set[int]]:
    """Return the start times of each counter and histogram, by name."""
    times: dict[str, set[int]] = {}
    for metric in metrics_of(request):
        points: list[Any] = [*metric.sum.data_points, *metric.histogram.data_points]
        if points:
            times[metric.name] = {point.start_time_unix_nano for point in points}
    return times


def scraped(text: str) -> Series:
    """Return the series of a scrape, without those of the process and the start times of series."""
    parse: Any = text_string_to_metric_families  # has no types
    values: Series = {}
    for family in parse(text):
        if family.name.startswith("process_") or family.name.endswith("_created"):
            continue
        for sample in family.samples:
            labels = dict(sample.labels)
            if "le" in labels:
                labels["le"] = str(float(labels["le"]))  # as ``series`` writes it
            values[sample.name, frozenset(labels.items())] = sample.value
    return values
