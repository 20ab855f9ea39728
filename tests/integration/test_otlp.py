"""Metrics and records through OTLP to real receivers and through a collector."""

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
STATE_SINCE = datetime(2026, 1, 1, tzinfo=UTC)
PROCESS_SINCE = datetime(2026, 2, 1, tzinfo=UTC)
PROTOCOLS: dict[str, Any] = {"http": "http/protobuf", "grpc": "grpc"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Collector, Receiver]]:
    with collected(tmp_path_factory.mktemp("rotel")) as running:
        yield running


class Agent(Story):
    """The metrics of an agent at one moment, as OTLP and as text."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = Totals(since=STATE_SINCE)
        self.polling = PollFigures({"changed": 2}, last_success=1.5).plus("changed", 0.0, 0.02)
        self.figures = Figures("1.0", "3.11", vm={"name": "a"}, since=PROCESS_SINCE)

    @property
    def families(self) -> list[Family]:
        snapshot = MetricsSnapshot(
            self.tracked, self.totals, self.figures, at(5), sinks=("it",), polling=self.polling
        )
        return list(samples(snapshot))

    @property
    def data(self) -> Any:
        return metrics_data(self.families, resource_of({}, {}), "1.0", at(5))

    @property
    def text(self) -> str:
        text, _ = render(self.families, "text/plain")
        return text.decode()


def busy_agent() -> Agent:
    """Return an agent that has counted changes at the seconds 1, 3 and 4."""
    awkward = item("b", EventType='We"ird\\\n', Description="x\ny")
    peers = item("c", Resources=[PEER])
    agent = Agent()
    agent.sees(0)
    agent.sees(1, item("a"), awkward)
    agent.sees(3, item("a", **STARTED), peers)
    agent.sees(4, peers)
    return agent


def exported(data: Any) -> Any:
    """Export the data; return the request that arrives."""
    with Receiver() as receiver:
        Sender(to(receiver.url), "metrics").send(data)
        (request,) = receiver.metrics
    return request


def to(url: str, **fields: Any) -> OtlpConnection:
    return OtlpConnection(endpoint=url, timeout=Duration("60s"), **fields)


def metrics_to(url: str, **fields: Any) -> Otlp:
    return Otlp(endpoint=url, timeout=Duration("60s"), **fields)


def to_collector(collector: Collector, protocol: str, **fields: Any) -> OtlpConnection:
    port = {"http": collector.http, "grpc": collector.grpc}[protocol]
    return to(f"http://127.0.0.1:{port}", protocol=PROTOCOLS[protocol], **fields)


# ---- metrics


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_export_through_a_collector_has_the_samples_of_a_scrape(
    pair: tuple[Collector, Receiver], protocol: str
) -> None:
    collector, receiver = pair
    agent = busy_agent()
    before = len(receiver.metrics)
    sender = Sender(to_collector(collector, protocol), "metrics")

    result = sender.send(agent.data)
    sender.close()
    eventually(lambda: len(receiver.metrics) > before)

    (request,) = receiver.metrics[before:]
    assert result.rejected == 0
    assert len(scraped(agent.text)) > 70
    assert series(request) == scraped(agent.text)


def nanoseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1e9)


# the changes of a busy agent
FIRST_CHANGE, SECOND_CHANGE, THIRD_CHANGE = (nanoseconds(at(second)) for second in (1, 3, 4))


def test_stored_counts_start_with_the_state() -> None:
    begins = starts(exported(busy_agent().data))

    assert begins["notbefore_deliveries"] == {nanoseconds(STATE_SINCE)}


def test_counts_in_memory_start_with_the_process() -> None:
    begins = starts(exported(busy_agent().data))

    assert begins["notbefore_polls"] == {nanoseconds(PROCESS_SINCE)}
    assert begins["notbefore_poll_duration_seconds"] == {nanoseconds(PROCESS_SINCE)}


def test_counts_of_events_start_with_their_first_event() -> None:
    begins = starts(exported(busy_agent().data))

    prefix = "azure_scheduled_event"
    assert begins[f"{prefix}_changes"] == {FIRST_CHANGE, SECOND_CHANGE, THIRD_CHANGE}
    assert begins[f"{prefix}_scheduled_duration_seconds"] == {SECOND_CHANGE}
    assert begins[f"{prefix}_started_duration_seconds"] == {THIRD_CHANGE}
    assert begins[f"{prefix}_initial_notice_seconds"] == {FIRST_CHANGE}


def test_scrape_has_the_starts_of_counts_of_events() -> None:
    created = re.findall(
        r"^azure_scheduled_event_(?:changes|initial_notice_seconds)_created{.*} (.*)$",
        busy_agent().text,
        re.MULTILINE,
    )

    begins = {round(float(value) * 1e9) for value in created}
    assert begins == {FIRST_CHANGE, SECOND_CHANGE, THIRD_CHANGE}


def test_every_count_has_a_start() -> None:
    begins = starts(exported(busy_agent().data))

    assert set().union(*begins.values()) == {
        nanoseconds(STATE_SINCE),
        nanoseconds(PROCESS_SINCE),
        FIRST_CHANGE,
        SECOND_CHANGE,
        THIRD_CHANGE,
    }


def test_gauges_have_no_start() -> None:
    request = exported(busy_agent().data)

    begins: set[int] = set()
    for metric in metrics_of(request):
        begins |= {point.start_time_unix_nano for point in metric.gauge.data_points}
    assert begins == {0}


def test_no_count_starts_in_the_future() -> None:
    earlier = datetime(2025, 1, 1, tzinfo=UTC)  # the clock was set back
    data = metrics_data(busy_agent().families, resource_of({}, {}), "1.0", earlier)

    begins = starts(exported(data))

    assert set().union(*begins.values()) == {nanoseconds(earlier)}


def test_results_of_exports_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = busy_agent()
    key = tmp_path / "key"
    key.write_text("hunter2", encoding="utf-8")
    counts: dict[tuple[str, str], int] = {}

    with Receiver() as receiver, caplog.at_level("INFO"):
        receiver.default = partly_accepted(2, "too old for hunter2")
        headers = {"Api-Key": Secret(str(key), "file")}
        config = metrics_to(receiver.url, interval=Duration("1s"), headers=headers)
        exporter = Exporter(config, lambda: (agent.families, None), counts, Redactor())
        eventually(lambda: counts["metrics", "rejected"] >= 2)

        key.unlink()
        eventually(lambda: counts["metrics", "failure"] >= 2)

        receiver.default = Answer(200)
        key.write_text("hunter3", encoding="utf-8")
        eventually(lambda: counts["metrics", "success"] >= 1)
        exporter.stop(PATIENCE)

    missing = f"the secret's file is missing in {key.parent}"
    lines = [record.getMessage() for record in caplog.records if record.name == "notbefore.otlp"]
    assert lines == [
        "OTLP metrics: the receiver rejected a part of an export: too old for ***",
        f"OTLP metrics: the export failed, and is tried again: {missing}",
        "OTLP metrics: exports are accepted again",
    ]


@pytest.fixture
def _first_export_is_due_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notbefore.otlp.exporter.FIRST", 0.0)


@pytest.mark.usefixtures("_first_export_is_due_at_once")
def test_exporter_exports_the_last_state_when_it_stops() -> None:
    with Receiver() as receiver:
        config = metrics_to(receiver.url, interval=Duration("1h"))
        exporter = Exporter(config, lambda: ([], None), {}, Redactor())
        eventually(lambda: len(receiver.metrics) == 1)

        exporter.stop(PATIENCE)

        assert len(receiver.metrics) == 2


@pytest.mark.usefixtures("_first_export_is_due_at_once")
def test_certificates_are_read_again_after_a_failure(authority: trustme.CA, tmp_path: Path) -> None:
    counts: dict[tuple[str, str], int] = {}
    paths = certificates(authority, tmp_path)
    trustme.CA().cert_pem.write_to_path(paths["ca_file"])
    with GrpcReceiver(authority) as receiver:
        config = metrics_to(receiver.url, protocol="grpc", interval=Duration("1s"), **paths)
        exporter = Exporter(config, lambda: ([], None), counts, Redactor())
        eventually(lambda: counts["metrics", "failure"] >= 1)

        authority.cert_pem.write_to_path(paths["ca_file"])
        eventually(lambda: counts["metrics", "success"] >= 1)

        exporter.stop(PATIENCE)


# ---- records


def sent(url: str, *messages: Message, **fields: Any) -> list[Receipt | SendError]:
    """Send messages as records; return the receipt or the error of each."""
    return outcomes(Sink("it", to(url, **fields), Messages()), *messages)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_record_arrives_unchanged_through_a_collector(
    pair: tuple[Collector, Receiver], protocol: str
) -> None:
    collector, receiver = pair
    before = len(receiver.records)
    announced = message({"Description": "x\ny", "Resources": ["WestNO_0", PEER]})
    settings = to_collector(collector, protocol, resource={"deployment.environment.name": "test"})

    receipts = outcomes(Sink("it", settings, Messages()), announced)

    (record,) = eventually(lambda: receiver.records[before:])
    resource = attributes(receiver.logs[-1].resource_logs[0].resource.attributes)
    fields = attributes(record.attributes)
    assert receipts == [Receipt()]
    assert fields.pop("notbefore.delivery.id") == announced.delivery_id
    assert fields.pop("notbefore.delivery.kind") == "announced"

    arrived = {
        "time": announced.record.flat()["time"],
        "body": record.body.string_value,
        **fields,
        **resource,
    }
    assert arrived.items() >= json.loads(announced.record.line()).items()
    assert resource["deployment.environment.name"] == "test"


def test_resource_of_a_record_is_the_vm() -> None:
    with Receiver() as receiver:
        sent(receiver.url, message())
        (record,) = receiver.records
        (request,) = receiver.logs

    resource = attributes(request.resource_logs[0].resource.attributes)
    assert resource["service.name"] == "notbefore"
    assert resource["service.instance.id"] == resource["host.id"]
    assert resource["host.name"] == "WestNO_0"
    assert "host.name" not in attributes(record.attributes)


def test_record_has_the_severity_and_the_time_of_the_change() -> None:
    announced = message(severity="critical")

    with Receiver() as receiver:
        sent(receiver.url, announced)
        (record,) = receiver.records

    assert record.severity_text == "critical"
    assert record.severity_number == 18
    assert record.time_unix_nano == nanoseconds(announced.record.time)
    assert record.observed_time_unix_nano == nanoseconds(announced.record.time)
    assert record.trace_id == b""
    assert record.span_id == b""


def test_warning_of_the_receiver_is_logged_and_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Receiver() as receiver:
        receiver.default = partly_accepted(0, "this API is old")

        assert sent(receiver.url, message()) == [Receipt()]

    assert "this API is old" in caplog.text


@pytest.mark.parametrize("body", [b"", b"{}", b"success\n", b'{"partialSuccess": {}}'])
def test_answer_without_partial_success_rejects_nothing(body: bytes) -> None:
    assert partial_success(body) == PartialSuccess()


NOT_OTLP = pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"<html>\nSign  in</html>", id="page"),
        pytest.param(b'{"error": "who?"}', id="other JSON"),
        pytest.param(b"{" * 100_000, id="deep JSON"),
        pytest.param(b"{\xff", id="not UTF-8"),
        pytest.param(b"no", id="text"),
        pytest.param(partly_accepted(1, "x" * 99).body[:-9], id="incomplete protobuf"),
    ],
)


@NOT_OTLP
def test_record_that_gets_no_otlp_answer_fails_temporarily(body: bytes) -> None:
    with Receiver() as receiver:
        receiver.default = Answer(200, (("Content-Type", "text/html"),), body)

        (error,) = sent(receiver.url, message())

    assert isinstance(error, SendError)
    assert not error.permanent
    assert len(str(error)) < 1_000


@NOT_OTLP
def test_export_that_gets_no_otlp_answer_fails(body: bytes) -> None:
    with Receiver() as receiver:
        receiver.default = Answer(200, (("Content-Type", "text/html"),), body)

        with pytest.raises(SendError, match="does the address lead to an OTLP receiver"):
            Sender(to(receiver.url), "metrics").send(MetricsData([]))


def rejection(length: int) -> SendError:
    """Send a record that is rejected for a reason of this length; return the error."""
    with Receiver() as receiver:
        receiver.default = partly_accepted(1, "x" * length)
        (error,) = sent(receiver.url, message())
    assert isinstance(error, SendError)
    return error


def test_rejected_record_is_refused_for_good_with_the_reason() -> None:
    error = rejection(10)

    assert error.permanent
    assert str(error) == "rejected: xxxxxxxxxx"


def test_rejection_is_read_up_to_the_bound_of_answers() -> None:
    within = rejection(100_000)
    beyond = rejection(MAX_ANSWER)

    assert within.permanent
    assert not beyond.permanent
    assert "1048576" in str(beyond)


# ---- the connection


def certificates(authority: trustme.CA, directory: Path) -> dict[str, Any]:
    """Write an authority and a certificate; return the settings that name the files."""
    certificate = authority.issue_cert("agent@example.org")
    paths = {name: str(directory / name) for name in ("ca_file", "cert_file", "key_file")}
    authority.cert_pem.write_to_path(paths["ca_file"])
    certificate.private_key_pem.write_to_path(paths["key_file"])
    certificate.cert_chain_pems[0].write_to_path(paths["cert_file"])
    return paths


def test_client_presents_its_certificate(authority: trustme.CA, tmp_path: Path) -> None:
    with Receiver(authority, client_ca=authority) as receiver:
        receipts = sent(receiver.url, message(), **certificates(authority, tmp_path))

    assert receipts == [Receipt()]


def test_client_does_not_trust_an_unknown_authority(authority: trustme.CA) -> None:
    with Receiver(authority) as receiver:
        (error,) = sent(receiver.url, message())

    assert isinstance(error, SendError)
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)


def test_grpc_client_presents_its_certificate_and_sends_its_headers(
    authority: trustme.CA, tmp_path: Path
) -> None:
    headers = {"Api-Key": Secret("k-1")}
    paths = certificates(authority, tmp_path)

    with GrpcReceiver(authority) as receiver:
        receipts = sent(receiver.url, message(), protocol="grpc", headers=headers, **paths)
        ((path, body, metadata),) = receiver.requests

    assert receipts == [Receipt()]
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
    assert "opentelemetry" not in {record.name.partition(".")[0] for record in caplog.records}


def test_unreadable_certificate_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")

    (error,) = sent("https://127.0.0.1:9", message(), protocol="grpc", ca_file=missing)

    assert f"{missing} cannot be read" in str(error)


NOTHING: dict[str, Any] = {"metrics": MetricsData([]), "logs": []}  # what a signal may send


# metrics are sent so rarely that the receiver would close the connection between two exports
@pytest.mark.parametrize(("signal", "connections"), [("metrics", 2), ("logs", 1)])
def test_header_file_is_read_for_each_export(tmp_path: Path, signal: Any, connections: int) -> None:
    file = tmp_path / "key"
    headers = {"Api-Key": Secret(str(file), "file")}

    with Receiver() as receiver:
        sender = Sender(to(receiver.url, headers=headers), signal)
        for key in ("first", "second"):
            file.write_text(key, encoding="utf-8")
            sender.send(NOTHING[signal])
        sender.close()

    assert len({request.client for request in receiver.requests}) == connections
    assert [request.headers["api-key"] for request in receiver.requests] == ["first", "second"]


@pytest.fixture(params=["metrics", "logs"])
def signal_with_variables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A signal for which the environment has variables of another receiver."""
    signal: str = request.param
    variables = {
        "HEADERS": "api-key=for-another",
        "TIMEOUT": "60",
        "COMPRESSION": "deflate",
        "CERTIFICATE": "/none.pem",
        "CLIENT_CERTIFICATE": "/none.pem",
        "INSECURE": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", value)
    return signal


def test_http_ignores_variables_for_another_endpoint(signal_with_variables: Any) -> None:
    with Receiver() as receiver:
        Sender(to(receiver.url), signal_with_variables).send(NOTHING[signal_with_variables])

    (request,) = receiver.requests
    assert "for-another" not in request.headers.values()


def test_grpc_ignores_variables_for_another_endpoint(signal_with_variables: Any) -> None:
    with GrpcReceiver() as receiver:
        connection = to(receiver.url, protocol="grpc")
        Sender(connection, signal_with_variables).send(NOTHING[signal_with_variables])

    ((_, _, metadata),) = receiver.requests
    assert "for-another" not in metadata.values()


def test_unencodable_texts_and_large_numbers_are_replaced() -> None:
    resource = resource_of({"odd": "\udcff"}, {})
    fields = {"odd": "\udcff", "large": 2**70}
    odd_record = log_record(resource, at(0), "info", "odd \udcff", fields, "")

    with Receiver() as receiver:
        Sender(to(receiver.url), "logs").send([odd_record])
        (request,) = receiver.logs
        (record,) = receiver.records

    assert record.body.string_value == "odd ?"
    assert attributes(record.attributes) == {"odd": "?", "large": 2.0**70}
    assert attributes(request.resource_logs[0].resource.attributes)["odd"] == "?"


# ---- the environment, and the origin of an export


def test_compression_variable_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")

    with Receiver() as receiver:
        Sender(to(receiver.url), "metrics").send(MetricsData([]))
        (request,) = receiver.requests

    assert "content-encoding" not in request.headers


def test_login_of_netrc_is_not_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password s3cret\n", encoding="utf-8")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))

    with Receiver() as receiver:
        Sender(to(receiver.url), "metrics").send(MetricsData([]))
        (request,) = receiver.requests

    assert "authorization" not in request.headers


@pytest.mark.parametrize("status", [301, 307])
def test_redirect_is_a_failure_and_not_followed(status: int) -> None:
    with Receiver() as receiver, Receiver() as other:
        receiver.default = Answer(status, (("Location", f"{other.url}/v1/metrics"),), b"")

        with pytest.raises(SendError, match=str(status)):
            Sender(to(receiver.url), "metrics").send(MetricsData([]))

    assert len(receiver.requests) == 1
    assert not other.requests


def test_refused_connection_is_reported_at_once() -> None:
    started = time.monotonic()

    with pytest.raises(SendError, match="Connection refused"):
        Sender(to(f"http://127.0.0.1:{free_port()}"), "metrics").send(MetricsData([]))

    assert time.monotonic() - started < 20  # of 60 s that it may take


def check_sdk(resource: Any) -> None:
    """Check that a resource names the SDK and its version."""
    fields = attributes(resource.attributes)
    assert fields["telemetry.sdk.language"] == "python"
    assert fields["telemetry.sdk.name"] == "opentelemetry"
    assert fields["telemetry.sdk.version"]


def test_metrics_name_their_sdk_and_version() -> None:
    request = exported(busy_agent().data)

    (metrics,) = request.resource_metrics
    check_sdk(metrics.resource)
    assert metrics.scope_metrics[0].scope.version == "1.0"


def test_records_name_their_sdk_and_version() -> None:
    with Receiver() as receiver:
        sent(receiver.url, message())
        (request,) = receiver.logs

    (logs,) = request.resource_logs
    check_sdk(logs.resource)
    assert logs.scope_logs[0].scope.version == __version__


def test_every_count_has_a_unit() -> None:
    metrics = metrics_of(exported(busy_agent().data))

    units = {metric.name: metric.unit for metric in metrics if metric.HasField("sum")}
    assert units["azure_scheduled_event_changes"] == "{change}"
    assert all(units.values()), units


def test_disabled_sdk_sends_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    with Receiver() as receiver:
        (error,) = sent(receiver.url, message())

    assert isinstance(error, SendError)
    assert error.permanent
    assert not receiver.requests


def points_of(data: Any, name: str) -> list[Any]:
    """Return the points of a metric; of polls, only those that brought a changed document."""
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    (metric,) = [metric for metric in scope.metrics if metric.name == name]
    return [
        point
        for point in metric.data.data_points
        if point.attributes.get("result", "changed") == "changed"
    ]


def poll(agent: Agent) -> None:
    agent.polling = agent.polling.plus("changed", 0.0, 0.02)


def test_first_delta_is_the_total() -> None:
    agent = busy_agent()
    (total,) = points_of(agent.data, POLLS)

    (delta,) = points_of(Deltas(began=0).since_accepted(agent.data), POLLS)

    assert delta.value == total.value


def test_delta_begins_with_the_last_accepted_one() -> None:
    deltas = Deltas(began=0)
    agent = busy_agent()
    first = deltas.since_accepted(agent.data)
    deltas.accepted()

    poll(agent)
    deltas.since_accepted(agent.data)  # the receiver does not accept it
    poll(agent)
    third = deltas.since_accepted(agent.data)

    (first_polls,) = points_of(first, POLLS)
    (polls,) = points_of(third, POLLS)
    (durations,) = points_of(third, "notbefore_poll_duration_seconds")
    assert polls.value == 2
    assert polls.start_time_unix_nano == first_polls.time_unix_nano
    assert durations.count == 2
    assert sum(durations.bucket_counts) == 2


def test_deltas_leave_out_the_counts_of_an_earlier_process() -> None:
    deltas = Deltas(began=2**62)

    first = deltas.since_accepted(busy_agent().data)

    assert {point.value for point in points_of(first, "azure_scheduled_event_changes")} == {0}


@pytest.mark.usefixtures("_first_export_is_due_at_once")
def test_exporter_exports_deltas_if_the_variable_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    families = busy_agent().families

    with Receiver() as receiver:
        config = metrics_to(receiver.url)
        exporter = Exporter(config, lambda: (families, None), {}, Redactor())
        eventually(lambda: receiver.metrics)
        exporter.stop(PATIENCE)
        metrics = metrics_of(receiver.metrics[0])

    temporalities = {
        metric.sum.aggregation_temporality for metric in metrics if metric.HasField("sum")
    }
    assert temporalities == {AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA}
