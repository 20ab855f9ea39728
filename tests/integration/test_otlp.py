"""OTLP to real receivers: the same samples as a scrape.

Records accepted, refused, rejected in part; TLS; gRPC.
"""

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.sdk.metrics.export import MetricsData

from notbefore import __version__
from notbefore.config.model import Otlp
from notbefore.config.secret import Secret
from notbefore.config.sinks import Messages, OtlpConnection
from notbefore.core.duration import Duration
from notbefore.core.message import Message
from notbefore.courier.sink import Receipt
from notbefore.courier.sinks.otlp_logs import Sink
from notbefore.errors import SendError
from notbefore.metrics.families import Family
from notbefore.metrics.samples import MetricsSnapshot, samples
from notbefore.metrics.totals import Figures, PollFigures, Totals
from notbefore.net.redact import Redactor
from notbefore.net.response import MAX_ANSWER
from notbefore.otlp.deltas import Deltas
from notbefore.otlp.exporter import Exporter
from notbefore.otlp.partial_success import PartialSuccess, partial_success
from notbefore.otlp.sender import Sender
from notbefore.otlp.signals import log_record, metrics_data, resource_of
from notbefore.web.exposition import render
from peers.otlp import (
    Collector,
    GrpcReceiver,
    Receiver,
    attributes,
    collected,
    metrics_of,
    partly_accepted,
    scraped,
    series,
    starts,
)
from support.agent import PATIENCE, eventually, free_port
from support.azure import PEER, STARTED, Story, at, item
from support.messages import message, outcomes
from support.peers import Answer

POLLS = "notbefore_polls"
SINCE = datetime(2026, 1, 1, tzinfo=UTC)
BEGUN = datetime(2026, 2, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Collector, Receiver]]:
    with collected(tmp_path_factory.mktemp("rotel")) as running:
        yield running


class Agent(Story):
    """Tracked and counted, and shown both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = Totals(since=SINCE)
        self.polling = PollFigures({"changed": 2}, last_success=1.5).plus("changed", 0.0, 0.02)
        self.figures = Figures("1.0", "3.11", vm={"name": "a"}, since=BEGUN)

    def both(self) -> tuple[Any, str]:
        """One moment as OTLP, and as text."""
        view = MetricsSnapshot(
            self.tracked, self.totals, self.figures, at(5), sinks=("it",), polling=self.polling
        )
        families = list(samples(view))
        data = metrics_data(families, resource_of({}, {}), "1.0", at(5))
        text, _ = render(families, "text/plain")
        return data, text.decode()


def busy() -> Agent:
    awkward = item("b", EventType='We"ird\\\n', Description="x\ny")
    return (
        Agent()
        .sees(0)
        .sees(1, item("a"), awkward)
        .sees(3, item("a", **STARTED), item("c", Resources=[PEER]))
        .sees(4, item("c", Resources=[PEER]))
    )


def exported(data: Any) -> Any:
    """The request that the data becomes."""
    with Receiver() as receiver:
        sender_to(to(receiver.url), "metrics").send(data)
        (request,) = receiver.metrics
    return request


def sender_to(connection: OtlpConnection, signal: Any) -> Sender:
    return Sender(connection, signal)


def to(url: str, **fields: Any) -> OtlpConnection:
    return OtlpConnection(endpoint=url, timeout=Duration("60s"), **fields)


# ---- metrics


@pytest.mark.parametrize("road", ["http", "grpc"])
def test_export_through_a_collector_has_the_samples_of_a_scrape(
    pair: tuple[Collector, Receiver], road: str
) -> None:
    collector, receiver = pair
    data, text = busy().both()
    before = len(receiver.metrics)
    protocol: Any = {"http": "http/protobuf", "grpc": "grpc"}[road]
    sender = sender_to(
        to(f"http://127.0.0.1:{getattr(collector, road)}", protocol=protocol), "metrics"
    )

    assert sender.send(data).rejected == 0

    sender.close()
    eventually(lambda: len(receiver.metrics) > before)

    (arrived,) = receiver.metrics[before:]
    assert len(scraped(text)) > 70
    assert series(arrived) == scraped(text)


def test_kept_counts_start_with_the_state_and_others_with_the_process() -> None:
    data, text = busy().both()
    request = exported(data)
    found = starts(request)
    kept = round(SINCE.timestamp() * 1e9)
    own = round(BEGUN.timestamp() * 1e9)

    assert found["notbefore_deliveries"] == {kept}
    assert found["notbefore_polls"] == found["notbefore_poll_duration_seconds"] == {own}

    # each of these since its first
    first, second, third = (round(at(seconds).timestamp() * 1e9) for seconds in (1, 3, 4))

    assert found["azure_scheduled_event_changes"] == {first, second, third}
    assert found["azure_scheduled_event_scheduled_duration_seconds"] == {second}
    assert found["azure_scheduled_event_started_duration_seconds"] == {third}
    assert found["azure_scheduled_event_initial_notice_seconds"] == {first}

    shown = re.findall(
        r"^azure_scheduled_event_(?:changes|initial_notice_seconds)_created{.*} (.*)$",
        text,
        re.MULTILINE,
    )

    assert {round(float(value) * 1e9) for value in shown} == {first, second, third}
    assert {start for each in found.values() for start in each} == {
        kept,
        own,
        first,
        second,
        third,
    }
    assert {
        point.start_time_unix_nano for m in metrics_of(request) for point in m.gauge.data_points
    } == {0}


def test_no_count_starts_in_the_future() -> None:
    agent = busy()
    families = samples(MetricsSnapshot(agent.tracked, agent.totals, agent.figures, at(5)))
    before = datetime(2025, 1, 1, tzinfo=UTC)  # the clock was set back

    request = exported(metrics_data(families, resource_of({}, {}), "1.0", before))

    assert {start for each in starts(request).values() for start in each} == {
        round(before.timestamp() * 1e9)
    }


def test_results_of_exports_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = busy()
    key = tmp_path / "key"
    key.write_text("hunter2", encoding="utf-8")
    counts = dict[tuple[str, str], int]()

    def read() -> tuple[list[Family], None]:
        return list(
            samples(MetricsSnapshot(agent.tracked, agent.totals, agent.figures, at(5)))
        ), None

    with Receiver() as receiver, caplog.at_level("INFO"):
        receiver.default = partly_accepted(2, "too old for hunter2")
        headers = {"Api-Key": Secret(str(key), "file")}
        config = Otlp(endpoint=receiver.url, interval=Duration("1s"), headers=headers)
        exporter = Exporter(config, read, counts, Redactor())

        eventually(lambda: counts["metrics", "rejected"] >= 2)

        key.unlink()
        eventually(lambda: counts["metrics", "failure"] >= 2)

        receiver.default = Answer(200)
        key.write_text("hunter3", encoding="utf-8")

        eventually(lambda: counts["metrics", "success"] >= 1)

        exporter.stop(5.0)
    logged = [record.getMessage() for record in caplog.records if record.name == "notbefore.otlp"]

    assert logged == [
        "OTLP metrics: the receiver rejected a part of an export: too old for ***",
        (
            "OTLP metrics: the export failed, and is tried again: the secret's file is missing in"
            f" {key.parent}"
        ),
        "OTLP metrics: exports are accepted again",
    ]


def exporting(
    connection: OtlpConnection,
    counts: dict[tuple[str, str], int],
    monkeypatch: pytest.MonkeyPatch,
    interval: str = "1s",
) -> Exporter:
    """Exports whose first one is due at once."""
    monkeypatch.setattr("notbefore.otlp.exporter.FIRST", 0.0)
    fields: Any = {
        name: getattr(connection, name) for name in ("endpoint", "protocol", *CERTIFICATES)
    }
    return Exporter(
        Otlp(interval=Duration(interval), **fields), lambda: ([], None), counts, Redactor()
    )


def test_exporter_exports_the_last_state_when_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as receiver:
        exporter = exporting(
            to(receiver.url), dict[tuple[str, str], int](), monkeypatch, interval="1h"
        )
        eventually(lambda: len(receiver.metrics) == 1)

        exporter.stop(PATIENCE)
        assert len(receiver.metrics) == 2


def test_certificates_are_read_again_after_a_failure(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict[tuple[str, str], int]()
    paths = certificates(authority, tmp_path)
    trustme.CA().cert_pem.write_to_path(paths["ca_file"])
    with GrpcReceiver(authority) as receiver:
        exporter = exporting(to(receiver.url, protocol="grpc", **paths), counts, monkeypatch)
        eventually(lambda: counts["metrics", "failure"] >= 1)

        authority.cert_pem.write_to_path(paths["ca_file"])
        eventually(lambda: counts["metrics", "success"] >= 1)

        exporter.stop(5.0)


# ---- records


def sent(url: str, *messages: Message, **fields: Any) -> list[Receipt | SendError]:
    settings = to(url, resource={"deployment.environment.name": "test"}, **fields)
    return outcomes(Sink("it", settings, Messages()), *messages)


@pytest.mark.parametrize("road", ["http", "grpc"])
def test_record_arrives_unchanged_through_a_collector(
    pair: tuple[Collector, Receiver], road: str
) -> None:
    collector, receiver = pair
    before = len(receiver.records)
    one = message({"Description": "x\ny", "Resources": ["WestNO_0", PEER]}, severity="critical")
    protocol = {"http": "http/protobuf", "grpc": "grpc"}[road]

    assert sent(f"http://127.0.0.1:{getattr(collector, road)}", one, protocol=protocol) == [
        Receipt()
    ]

    (record,) = eventually(lambda: receiver.records[before:])
    resource = attributes(receiver.logs[-1].resource_logs[0].resource.attributes)
    shown = attributes(record.attributes)

    assert shown.pop("notbefore.delivery.id") == one.delivery_id
    assert shown.pop("notbefore.delivery.kind") == "announced"

    exported = {
        "time": one.record.flat()["time"],
        "body": record.body.string_value,
        **shown,
        **resource,
    }

    assert exported.items() >= json.loads(one.record.line()).items()
    assert resource["service.name"] == "notbefore"
    assert resource["service.instance.id"] == resource["host.id"]
    assert resource["deployment.environment.name"] == "test"
    assert resource["host.name"] == "WestNO_0"
    assert "host.name" not in shown
    assert record.severity_text == "critical"
    assert record.severity_number == 18

    moment = round(one.record.time.timestamp() * 1e9)

    assert record.time_unix_nano == record.observed_time_unix_nano == moment
    assert record.trace_id == b""
    assert record.span_id == b""


def test_warning_of_the_receiver_is_logged_and_no_rejection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Receiver() as receiver:
        receiver.default = partly_accepted(0, "this API is old")

        assert sent(receiver.url, message()) == [Receipt()]

    assert "this API is old" in caplog.text


@pytest.mark.parametrize("body", [b"", b"{}", b"success\n", b'{"partialSuccess": {}}'])
def test_answer_without_partial_success_rejects_nothing(body: bytes) -> None:
    assert partial_success(body) == PartialSuccess()


@pytest.mark.parametrize(
    "body",
    [
        b"<html>\nSign  in</html>",
        b'{"error": "who?"}',
        b"{" * 100_000,
        b"{\xff",
        b"no",
        partly_accepted(1, "x" * 99).body[:-9],
    ],
)
def test_answer_that_is_not_otlp_is_a_temporary_failure(body: bytes) -> None:
    with Receiver() as receiver:
        receiver.default = Answer(200, (("Content-Type", "text/html"),), body)

        (error,) = sent(receiver.url, message())

        with pytest.raises(SendError, match="does the address lead to an OTLP receiver"):
            sender_to(to(receiver.url), "metrics").send(
                metrics_data([], resource_of({}, {}), "1", at(0))
            )

    assert isinstance(error, SendError)
    assert not error.permanent
    assert len(str(error)) < 1_000


def test_rejection_with_a_long_reason_is_read_up_to_the_bound_of_answers() -> None:
    with Receiver() as web:
        errors = []
        for length in (10, 100_000, MAX_ANSWER):
            web.default = partly_accepted(1, "x" * length)
            (error,) = sent(web.url, message())
            assert isinstance(error, SendError)
            errors.append(error)

    assert [error.permanent for error in errors] == [True, True, False]
    assert str(errors[0]) == "rejected: xxxxxxxxxx"
    assert "1048576" in str(errors[2])


# ---- the connection


CERTIFICATES = ("ca_file", "cert_file", "key_file")


def certificates(authority: trustme.CA, directory: Path) -> dict[str, str]:
    cert = authority.issue_cert("agent@example.org")
    paths = {name: str(directory / name) for name in CERTIFICATES}
    authority.cert_pem.write_to_path(paths["ca_file"])
    cert.private_key_pem.write_to_path(paths["key_file"])
    cert.cert_chain_pems[0].write_to_path(paths["cert_file"])
    return paths


def test_client_shows_its_certificate_and_trusts_the_configured_authority(
    authority: trustme.CA, tmp_path: Path
) -> None:
    with Receiver(authority, client_ca=authority) as receiver:
        assert sent(receiver.url, message(), **certificates(authority, tmp_path)) == [Receipt()]

        (refused,) = sent(receiver.url, message())

    assert isinstance(refused, SendError)
    assert "CERTIFICATE_VERIFY_FAILED" in str(refused)


def test_grpc_client_shows_its_certificate_and_sends_its_headers(
    authority: trustme.CA, tmp_path: Path
) -> None:
    with GrpcReceiver(authority) as receiver:
        headers = {"Api-Key": Secret("k-1")}

        fields: dict[str, Any] = {
            "protocol": "grpc",
            "headers": headers,
            **certificates(authority, tmp_path),
        }

        assert sent(receiver.url, message(), **fields) == [Receipt()]

        ((path, body, metadata),) = receiver.requests

    assert path == "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
    assert len(ExportLogsServiceRequest.FromString(body).resource_logs) == 1
    assert metadata["api-key"] == "k-1"


@pytest.mark.parametrize("code", ["UNAVAILABLE", "UNAUTHENTICATED"])
def test_grpc_failure_is_temporary_and_reported_once(
    code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with GrpcReceiver() as receiver:
        receiver.abort = grpc.StatusCode[code]

        (error,) = sent(receiver.url, message(), protocol="grpc")

        assert len(receiver.requests) == 1

    assert isinstance(error, SendError)
    assert not error.permanent
    assert code in str(error)
    assert str(error).endswith("ordered by the test")
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_unreadable_certificate_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")

    (error,) = sent("https://127.0.0.1:9", message(), protocol="grpc", ca_file=missing)

    assert f"{missing} cannot be read" in str(error)


# a kept one may be closed meanwhile
@pytest.mark.parametrize(("signal", "connections"), [("metrics", 2), ("logs", 1)])
def test_header_file_is_read_for_each_export(tmp_path: Path, signal: str, connections: int) -> None:
    file = tmp_path / "key"

    with Receiver() as receiver:
        headers = {"Api-Key": Secret(str(file), "file")}
        sender = sender_to(to(receiver.url, headers=headers), signal)
        for key in ("first", "second"):
            file.write_text(key, encoding="utf-8")
            sender.send(MetricsData([]) if signal == "metrics" else [])
        sender.close()

    assert len({request.client for request in receiver.requests}) == connections
    assert [request.headers["api-key"] for request in receiver.requests] == ["first", "second"]


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("signal", ["metrics", "logs"])
def test_sdk_ignores_otlp_variables_for_a_configured_endpoint(
    monkeypatch: pytest.MonkeyPatch, protocol: str, signal: str
) -> None:
    values = {
        "HEADERS": "api-key=for-another",
        "TIMEOUT": "60",
        "COMPRESSION": "deflate",
        "CERTIFICATE": "/none.pem",
        "CLIENT_CERTIFICATE": "/none.pem",
        "INSECURE": "true",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", value)

    with Receiver() as web, GrpcReceiver() as grpc_receiver:
        url = web.url if protocol == "http/protobuf" else grpc_receiver.url
        sender_to(to(url, protocol=protocol), signal).send(
            MetricsData([]) if signal == "metrics" else []
        )
        (headers,) = [request.headers for request in web.requests] or [
            sent for _, _, sent in grpc_receiver.requests
        ]

    assert "for-another" not in headers.values()


def test_unencodable_texts_and_large_numbers_are_replaced() -> None:
    attributes_of = {"odd": "\udcff", "large": 2**70}
    odd = log_record(
        resource_of({"odd": "\udcff"}, {}), at(0), "info", "odd \udcff", attributes_of, ""
    )

    with Receiver() as receiver:
        sender_to(to(receiver.url), "logs").send([odd])
        (request,) = receiver.logs
        (record,) = receiver.records

    assert record.body.string_value == "odd ?"
    assert attributes(record.attributes) == {"odd": "?", "large": 2.0**70}
    assert attributes(request.resource_logs[0].resource.attributes)["odd"] == "?"


# ---- what the standard variables change, and what every export says of its origin


def test_compression_variable_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")

    with Receiver() as receiver:
        sender_to(to(receiver.url), "metrics").send(MetricsData([]))
        (request,) = receiver.requests

    assert "content-encoding" not in request.headers


def test_login_of_netrc_is_not_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password s3cret\n", encoding="utf-8")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))

    with Receiver() as receiver:
        sender_to(to(receiver.url), "metrics").send(MetricsData([]))
        (request,) = receiver.requests

    assert "authorization" not in request.headers


@pytest.mark.parametrize("status", [301, 307])
def test_redirect_is_a_failure_and_not_followed(status: int) -> None:
    with Receiver() as receiver, Receiver() as other:
        receiver.default = Answer(status, (("Location", f"{other.url}/v1/metrics"),), b"")

        with pytest.raises(SendError, match=str(status)):
            sender_to(to(receiver.url), "metrics").send(MetricsData([]))

    assert len(receiver.requests) == 1
    assert not other.requests


def test_refused_connection_is_reported_at_once() -> None:
    started = time.monotonic()

    with pytest.raises(SendError, match="Connection refused"):
        sender_to(to(f"http://127.0.0.1:{free_port()}"), "metrics").send(MetricsData([]))

    assert time.monotonic() - started < 20  # of 60 s that it may take


def test_every_signal_names_its_sdk_and_version() -> None:
    data, _ = busy().both()
    with Receiver() as receiver:
        sender_to(to(receiver.url), "metrics").send(data)
        Sink("it", to(receiver.url), Messages()).send(message())
        metrics = receiver.metrics[0].resource_metrics[0]
        logs = receiver.logs[0].resource_logs[0]

    for resource in (metrics.resource, logs.resource):
        named = attributes(resource.attributes)
        assert named["telemetry.sdk.language"] == "python"
        assert named["telemetry.sdk.name"] == "opentelemetry"
        assert named["telemetry.sdk.version"]

    assert metrics.scope_metrics[0].scope.version == "1.0"
    assert logs.scope_logs[0].scope.version == __version__


def test_every_count_has_a_unit() -> None:
    data, _ = busy().both()
    with Receiver() as receiver:
        sender_to(to(receiver.url), "metrics").send(data)
        metrics = metrics_of(receiver.metrics[0])

    counts = {metric.name: metric.unit for metric in metrics if metric.HasField("sum")}

    assert counts["azure_scheduled_event_changes"] == "{change}"
    assert all(counts.values()), counts


def test_disabled_sdk_sends_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    with Receiver() as receiver:
        (error,) = sent(receiver.url, message())

    assert isinstance(error, SendError)
    assert error.permanent
    assert not receiver.requests


def points_of(data: Any, name: str) -> list[Any]:
    """Return the points of one metric; those of polls are of changed documents."""
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    (metric,) = [metric for metric in scope.metrics if metric.name == name]
    return [
        point
        for point in metric.data.data_points
        if point.attributes.get("result", "changed") == "changed"
    ]


def test_deltas_add_up_to_the_totals_also_after_a_failed_export() -> None:
    deltas = Deltas(began=0)
    agent = busy()
    data, _ = agent.both()
    (before,) = [point.value for point in points_of(data, POLLS)]

    first = deltas.since_accepted(data)
    deltas.accepted()
    agent.polling = agent.polling.plus("changed", 0.0, 0.02)
    deltas.since_accepted(agent.both()[0])  # the receiver does not accept it
    agent.polling = agent.polling.plus("changed", 0.0, 0.02)
    third = deltas.since_accepted(agent.both()[0])

    assert [point.value for point in points_of(first, POLLS)] == [before]
    assert [point.value for point in points_of(third, POLLS)] == [2]

    (histogram,) = points_of(third, "notbefore_poll_duration_seconds")
    assert histogram.count == 2
    assert sum(histogram.bucket_counts) == 2

    (start,) = {point.start_time_unix_nano for point in points_of(third, POLLS)}
    assert start == points_of(first, POLLS)[0].time_unix_nano


def test_deltas_of_a_new_process_leave_out_what_an_earlier_one_counted() -> None:
    deltas = Deltas(began=2**62)
    data, _ = busy().both()

    first = deltas.since_accepted(data)

    assert {point.value for point in points_of(first, "azure_scheduled_event_changes")} == {0}


def test_agent_exports_deltas_if_the_variable_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    monkeypatch.setattr("notbefore.otlp.exporter.FIRST", 0.0)
    view = MetricsSnapshot(
        Story().sees(0).tracked, Totals(), Figures("1.0", "3.11"), at(5), polling=PollFigures()
    )
    with Receiver() as receiver:
        config = Otlp(endpoint=receiver.url, timeout=Duration("60s"))

        exporter = Exporter(config, lambda: (list(samples(view)), None), {}, Redactor())

        eventually(lambda: receiver.metrics)

        exporter.stop(PATIENCE)
        metrics = metrics_of(receiver.metrics[0])

    temporalities = {
        metric.sum.aggregation_temporality for metric in metrics if metric.HasField("sum")
    }

    assert temporalities == {AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA}
