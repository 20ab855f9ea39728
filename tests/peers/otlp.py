"""Receivers of OTLP: one that decodes what it is sent, over HTTP and gRPC, and a real collector
before it.
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
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Receiver(HttpPeer):
    """Over HTTP. What came, decoded; what cannot be decoded fails the test that looks."""

    def __init__(
        self, authority: trustme.CA | None = None, *, client_ca: trustme.CA | None = None
    ) -> None:
        super().__init__(authority, client_ca=client_ca)
        self.default = Answer(200, (("Content-Type", "application/x-protobuf"),), b"")

    @property
    def metrics(self) -> list[ExportMetricsServiceRequest]:
        return [
            decoded(request) for request in list(self.requests) if request.path == "/v1/metrics"
        ]

    @property
    def logs(self) -> list[ExportLogsServiceRequest]:
        return [decoded(request) for request in list(self.requests) if request.path == "/v1/logs"]

    @property
    def records(self) -> list[LogRecord]:
        scopes = (
            scope
            for request in self.logs
            for logs in request.resource_logs
            for scope in logs.scope_logs
        )
        return [record for scope in scopes for record in scope.log_records]


def decoded(request: Request) -> Any:
    assert request.headers["content-type"] == "application/x-protobuf"
    body = (
        gzip.decompress(request.body)
        if request.headers.get("content-encoding") == "gzip"
        else request.body
    )
    return REQUESTS[request.path].FromString(body)


class GrpcReceiver:
    """Over gRPC, with TLS and client certificates where an authority is given.

    ``abort`` is a code to answer with.
    """

    def __init__(self, authority: trustme.CA | None = None) -> None:
        self.requests: list[tuple[str, bytes, dict[str, Any]]] = []
        self.abort: grpc.StatusCode | None = None
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
        else:
            cert = authority.issue_cert("localhost", "127.0.0.1")
            chain = b"".join(blob.bytes() for blob in cert.cert_chain_pems)
            keys = [(cert.private_key_pem.bytes(), chain)]
            credentials = grpc.ssl_server_credentials(
                keys, authority.cert_pem.bytes(), require_client_auth=True
            )
            self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.url = f"{'https' if authority else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def _answer(self, path: str, body: bytes, context: grpc.ServicerContext) -> bytes:
        self.requests.append((path, body, dict(context.invocation_metadata())))
        if self.abort is not None:
            context.abort(self.abort, "as the test wants it")
        return b""


class Collector:
    """rotel: a collector of OTLP, from PyPI.

    It receives over HTTP and gRPC, and sends on over HTTP.
    """

    def __init__(self, directory: Path, to: str) -> None:
        self.http = free_port()
        self.grpc = free_port()
        words = {
            "otlp-http-endpoint": f"127.0.0.1:{self.http}",
            "otlp-grpc-endpoint": f"127.0.0.1:{self.grpc}",
            "exporter": "otlp",
            "otlp-exporter-endpoint": to,
            "otlp-exporter-protocol": "http",
            "batch-timeout": "50ms",
            "pid-file": str(directory / "rotel.pid"),
            "log-file": str(directory / "rotel.log"),
        }
        program = Path(rotel.__file__).with_name("rotel-agent")
        command = [
            str(program),
            "start",
            *(word for key, value in words.items() for word in (f"--{key}", value)),
        ]
        self.log = directory / "rotel.txt"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={"PATH": os.environ["PATH"]}
            )

    def __enter__(self) -> Self:
        eventually(
            lambda: (
                self._process.poll() is not None or (_listens(self.http) and _listens(self.grpc))
            )
        )
        assert self._process.poll() is None, self.log.read_text(errors="replace")
        return self

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
    """A collector, and the receiver behind it."""
    with Receiver() as receiver, Collector(directory, receiver.url) as collector:
        yield collector, receiver


def rejecting(count: int, why: str) -> Answer:
    """An answer that takes a request but for so many of its records, or data points: the bytes are
    the same.
    """
    partial = ExportLogsPartialSuccess(rejected_log_records=count, error_message=why)
    body = ExportLogsServiceResponse(partial_success=partial).SerializeToString()
    return Answer(200, (("Content-Type", "application/x-protobuf"),), body)


# ---- what came, in other words


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


def metrics_of(request: ExportMetricsServiceRequest) -> list[Metric]:
    return [
        metric
        for metrics in request.resource_metrics
        for scope in metrics.scope_metrics
        for metric in scope.metrics
    ]


def prometheus_name(metric: Metric) -> str:
    """As OpenTelemetry's specification translates it (Prometheus and OpenMetrics Compatibility)."""
    name = metric.name
    # a unit in braces is an annotation, which does not change the name
    assert metric.unit in {"", "s"} or re.fullmatch(r"\{[a-z]+\}", metric.unit)
    if metric.unit == "s" and "seconds" not in name.split("_"):
        name += "_seconds"
    if metric.HasField("sum") and metric.sum.is_monotonic:
        name += "_total"
    return name


def series(request: ExportMetricsServiceRequest) -> Series:
    """Each sample that Prometheus would make of it, with the labels of ``/metrics``."""
    found: Series = {}
    for metric in metrics_of(request):
        name = prometheus_name(metric)
        for point in (*metric.gauge.data_points, *metric.sum.data_points):
            found[name, _labels(point)] = point.as_double
        for histogram in metric.histogram.data_points:
            assert (
                metric.histogram.aggregation_temporality
                == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
            )
            labels = _labels(histogram)
            found[f"{name}_count", labels] = histogram.count
            found[f"{name}_sum", labels] = histogram.sum
            bounds = [*histogram.explicit_bounds, float("inf")]
            for bound, count in zip(bounds, accumulate(histogram.bucket_counts), strict=True):
                found[f"{name}_bucket", labels | {("le", str(bound))}] = count
    return found


def _labels(point: Any) -> frozenset[tuple[str, str]]:
    return frozenset(attributes(point.attributes).items())


def starts(request: ExportMetricsServiceRequest) -> dict[str, set[int]]:
    """The start times of each counter and histogram, by name."""
    found: dict[str, set[int]] = {}
    for metric in metrics_of(request):
        points: list[Any] = [*metric.sum.data_points, *metric.histogram.data_points]
        if points:
            found[metric.name] = {point.start_time_unix_nano for point in points}
    return found


def scraped(text: str) -> Series:
    """Each sample of ``/metrics`` but those of the process itself, and the times from which on
    series count.
    """
    parse: Any = text_string_to_metric_families  # has no types
    found: Series = {}
    for family in parse(text):
        if family.name.startswith("process_") or family.name.endswith("_created"):
            continue
        for sample in family.samples:
            labels = {
                name: str(float(value)) if name == "le" else value
                for name, value in sample.labels.items()
            }
            found[sample.name, frozenset(labels.items())] = sample.value
    return found
