"""The installed agent exports metrics and records over OTLP, whatever the receiver does."""

import signal
from pathlib import Path

import pytest
import yaml
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

from notbefore.simulator.server import Simulator
from peers.otlp import Receiver, attributes, metrics_of, series
from support.agent import RunningAgent, eventually, wait_for_polls
from support.azure import FUTURE, ID, ME, body, item
from support.peers import Answer


def exports_event(receiver: Receiver, event_id: str) -> bool:
    """Return whether a series of an export is of this event."""
    label = ("event_id", event_id)
    for request in receiver.metrics:
        if any(label in labels for _, labels in series(request)):
            return True
    return False


def loaded_libraries(agent: RunningAgent) -> str:
    return Path(f"/proc/{agent.process.pid}/maps").read_text(encoding="utf-8")


def test_hanging_receiver_delays_neither_polls_nor_the_stop(
    imds: Simulator, tmp_path: Path
) -> None:
    with Receiver() as receiver:
        receiver.default = Answer(how="hang")
        records = {"rec": {"otlp_logs": {"endpoint": "http://127.0.0.1:9"}}}
        config = {"otlp": {"endpoint": receiver.url, "timeout": "5m"}, "sinks": records}
        with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
            eventually(lambda: receiver.requests)

            wait_for_polls(imds, 10)
            agent.wait_until_ready()

            assert agent.stop() == 0, "the stop does not wait five minutes for the export"


def test_otlp_is_loaded_and_stopped_by_reloads(imds: Simulator, tmp_path: Path) -> None:
    with Receiver() as receiver:
        config = tmp_path / "notbefore.yaml"
        config.write_text("log: {level: info}\n", encoding="utf-8")
        with RunningAgent(imds.endpoint, tmp_path / "state", str(config)) as agent:
            assert "google/_upb" not in loaded_libraries(agent)
            exports = 'notbefore_otlp_exports_total{result="success",signal="metrics"}'
            assert agent.metric(exports) is None

            otlp = {"endpoint": receiver.url, "interval": "1s"}
            config.write_text(yaml.safe_dump({"otlp": otlp}), encoding="utf-8")
            agent.process.send_signal(signal.SIGHUP)

            eventually(lambda: receiver.metrics)
            assert "google/_upb" in loaded_libraries(agent)
            assert "grpc" not in loaded_libraries(agent)

            config.write_text("log: {level: info}\n", encoding="utf-8")
            agent.process.send_signal(signal.SIGHUP)

            reloads = 'notbefore_config_reloads_total{result="success"}'
            eventually(lambda: agent.metric(reloads) == 2)

            def is_quiet() -> bool:
                before = len(receiver.metrics)
                wait_for_polls(imds, 10)  # at least two intervals of the export
                return len(receiver.metrics) == before

            # the reload does not wait for an export that takes longer than a second
            eventually(is_quiet)


def test_standard_variables_complete_the_configuration(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=k%2F1")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a,service.version=0")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "watcher")
        config = tmp_path / "notbefore.yaml"
        config.write_text(
            "otlp: {resource: {service.version: '1'}}\nsinks: {rec: {otlp_logs: {}}}\n",
            encoding="utf-8",
        )
        with RunningAgent(imds.endpoint, tmp_path / "state", str(config)):
            eventually(lambda: receiver.metrics)
            imds.set_document(body(item(NotBefore=FUTURE), incarnation=2))
            eventually(lambda: receiver.records)
            eventually(lambda: exports_event(receiver, ID))

    resource = attributes(receiver.metrics[-1].resource_metrics[0].resource.attributes)
    assert receiver.requests[0].headers["api-key"] == "k/1"
    assert resource["service.name"] == "watcher"
    assert resource["service.version"] == "1"
    assert resource["team"] == "a"
    assert resource["host.name"] == ME
    assert resource["cloud.platform"] == "azure.vm"
    # without it, the VMs of a fleet would share their series
    assert resource["service.instance.id"] == resource["host.id"]


def test_standard_variables_set_compression_interval_and_temporality(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    with Receiver() as receiver:
        config = {"otlp": {"endpoint": receiver.url}}
        with RunningAgent(imds.endpoint, tmp_path / "state", config):
            # the third export comes after two minutes by default
            eventually(lambda: len(receiver.requests) >= 3, patience=60)

        request = receiver.requests[0]
        metrics = metrics_of(receiver.metrics[0])

    assert "content-encoding" not in request.headers

    temporalities = {
        metric.sum.aggregation_temporality for metric in metrics if metric.HasField("sum")
    }
    assert temporalities == {AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA}


def test_disabled_sdk_exports_nothing(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    with Receiver() as receiver:
        config = {
            "otlp": {"endpoint": receiver.url, "interval": "1s"},
            "sinks": {"records": {"otlp_logs": {"endpoint": receiver.url}}},
        }
        with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
            imds.set_document(body(item(NotBefore=FUTURE), incarnation=2))

            dead = 'notbefore_outbox_deliveries{sink="records",state="dead"}'

            eventually(lambda: agent.metric(dead) == 1)

            assert "google/_upb" not in loaded_libraries(agent)

    assert not receiver.requests
