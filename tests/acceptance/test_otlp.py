"""The agent with OTLP: its metrics, changes and log at a receiver, whatever that receiver does; and
without it.
"""

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


def listed(receiver: Receiver) -> list[set[str]]:
    """The events that each export names."""
    return [
        {value for _, labels in series(request) for name, value in labels if name == "event_id"}
        for request in receiver.metrics
    ]


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

            assert agent.stop() == 0  # it waits 20 s; the export would wait for five minutes


def mapped(agent: RunningAgent) -> str:
    return Path(f"/proc/{agent.process.pid}/maps").read_text(encoding="utf-8")


def test_otlp_is_loaded_and_stopped_by_reloads(imds: Simulator, tmp_path: Path) -> None:
    with Receiver() as receiver:
        config = tmp_path / "notbefore.yaml"
        config.write_text("log: {level: info}\n", encoding="utf-8")
        with RunningAgent(imds.endpoint, tmp_path / "state", str(config)) as agent:
            assert "google/_upb" not in mapped(agent)
            assert (
                agent.metric('notbefore_otlp_exports_total{result="success",signal="metrics"}')
                is None
            )

            config.write_text(
                yaml.safe_dump({"otlp": {"endpoint": receiver.url, "interval": "1s"}}),
                encoding="utf-8",
            )
            agent.process.send_signal(signal.SIGHUP)

            eventually(lambda: receiver.metrics)
            assert "google/_upb" in mapped(agent)
            assert "grpc" not in mapped(agent)

            config.write_text("log: {level: info}\n", encoding="utf-8")
            agent.process.send_signal(signal.SIGHUP)

            eventually(
                lambda: agent.metric('notbefore_config_reloads_total{result="success"}') == 2
            )

            def quiet() -> bool:
                before = len(receiver.metrics)
                wait_for_polls(imds, 10)  # two intervals
                return len(receiver.metrics) == before

            # the reload does not wait for a last export that takes longer than a second
            eventually(quiet)


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
            (request, *_) = eventually(lambda: receiver.requests)
            assert request.headers["api-key"] == "k/1"

            imds.set_document(body(item(NotBefore=FUTURE), incarnation=2))
            eventually(lambda: receiver.records)
            eventually(lambda: {ID} in listed(receiver))  # long before the interval of a minute

    resource = attributes(receiver.metrics[-1].resource_metrics[0].resource.attributes)

    assert [resource[name] for name in ("service.name", "service.version", "team")] == [
        "watcher",
        "1",
        "a",
    ]
    assert resource["host.name"] == ME
    assert resource["cloud.platform"] == "azure.vm"
    # else the VMs of a fleet would be one series
    assert resource["service.instance.id"] == resource["host.id"]


def test_protocol_compression_interval_and_temporality_come_from_variables(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    with Receiver() as receiver:
        config = {"otlp": {"endpoint": receiver.url}}
        with RunningAgent(imds.endpoint, tmp_path / "state", config):
            eventually(lambda: len(receiver.requests) >= 3)  # of which the default has one

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

            assert "google/_upb" not in mapped(agent)

    assert not receiver.requests
