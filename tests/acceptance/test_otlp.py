"""The agent with OTLP: its metrics, changes and log at a receiver, whatever that receiver does; and without it."""

import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from notbefore.simulator.server import Simulator
from peers.otlp import Receiver, attributes, collected, metrics_of, scraped, series, starts
from support.agent import RunningAgent, eventually, get
from support.azure import FUTURE, ID, ME, body, item
from support.peers import Say

NANO = 1_000_000_000


def configured(directory: Path, endpoint: str, records: dict[str, Any] | None = None, **settings: Any) -> str:
    path = directory / "notbefore.yaml"
    sinks = {"rec": {"otlp_logs": records or {"endpoint": endpoint}}}
    values = {"otlp": {"endpoint": endpoint, **settings}, "sinks": sinks}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def listed(receiver: Receiver) -> list[set[str]]:
    """The events that each export names."""
    return [
        {value for _, labels in series(request) for name, value in labels if name == "event_id"}
        for request in receiver.metrics
    ]


def changes(receiver: Receiver) -> list[str]:
    return [one.event_name.rpartition(".")[2] for one in receiver.records if one.event_name]


def test_what_the_agent_knows_reaches_the_receiver_through_a_collector_and_restarts(
    imds: Simulator, tmp_path: Path
) -> None:
    with collected(tmp_path) as (collector, receiver):
        state, config = tmp_path / "state", configured(tmp_path, f"http://127.0.0.1:{collector.http}")
        with RunningAgent(imds.endpoint, state, config) as agent:
            agent.ready()
            imds.set_document(body(item(NotBefore=FUTURE), incarnation=2))
            agent.reported("announced")
            eventually(lambda: {ID} in listed(receiver))  # long before the interval of a minute
            passing = ("otlp", "oldest_pending")  # the export itself; what may be delivered by now
            pushed = series(receiver.metrics[-1])
            names = {(name, labels) for name, labels in pushed if not any(one in name for one in passing)}
            shown = {(name, labels) for name, labels in scraped(get(agent.port, "/metrics")[1].decode())}
            assert names <= shown
            assert len(names) > 60
            imds.set_document(body(item(EventStatus="Started", NotBefore=""), incarnation=3))
            agent.reported("announced", "started")
            imds.set_document(body(incarnation=4))
            *_, last = agent.reported("announced", "started", "finished")
            eventually(lambda: listed(receiver)[-1] == set())
            eventually(lambda: changes(receiver) == ["announced", "started", "finished"])
            first = receiver.metrics[-1]
            begun = time.time() * NANO
        with RunningAgent(imds.endpoint, state, config) as agent:
            agent.ready()
            eventually(lambda: max(starts(receiver.metrics[-1])["notbefore_polls"]) > begun)
            second = receiver.metrics[-1]
        assert starts(second)["azure_scheduled_event_changes"] == starts(first)["azure_scheduled_event_changes"]
        labels = {"change": "finished", "event_type": "Freeze"}
        assert series(second)["azure_scheduled_event_changes_total", frozenset(labels.items())] == 1
        records = [one for one in receiver.records if one.event_name]
        moment = round(datetime.fromisoformat(last["time"]).timestamp() * 1_000) * 1_000_000
        assert (records[-1].time_unix_nano, records[-1].body.string_value) == (moment, last["body"])
        assert attributes(records[-1].attributes)["azure.scheduled_event.outcome"] == "finished"
        resource = attributes(second.resource_metrics[0].resource.attributes)
        assert (resource["service.name"], resource["host.name"], resource["cloud.platform"]) == (
            "notbefore", ME, "azure.vm",
        )  # fmt: skip
        assert resource["service.instance.id"] == resource["host.id"]  # else the VMs of a fleet would be one series


def test_a_receiver_that_hangs_holds_neither_the_beat_nor_the_end(imds: Simulator, tmp_path: Path) -> None:
    with Receiver() as receiver:
        receiver.default = Say(how="hang")
        config = configured(tmp_path, receiver.url, {"endpoint": "http://127.0.0.1:9"}, timeout="5m")
        with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
            agent.ready()
            eventually(lambda: receiver.requests)
            polls = imds.requests
            eventually(lambda: imds.requests > polls + 10)
            assert get(agent.port, "/readyz")[0] == 200
            assert agent.stop() == 0  # it waits 20 s; the export would wait for five minutes


def mapped(agent: RunningAgent) -> str:
    return Path(f"/proc/{agent.process.pid}/maps").read_text(encoding="utf-8")


def test_without_it_nothing_of_it_is_loaded_and_a_reload_brings_it_and_takes_it(
    imds: Simulator, tmp_path: Path
) -> None:
    with Receiver() as receiver:
        config = tmp_path / "notbefore.yaml"
        config.write_text("log: {level: info}\n", encoding="utf-8")
        with RunningAgent(imds.endpoint, tmp_path / "state", str(config)) as agent:
            agent.ready()
            assert "google/_upb" not in mapped(agent)
            assert agent.metric('notbefore_otlp_exports_total{result="success",signal="metrics"}') is None
            configured(tmp_path, receiver.url, interval="1s")
            agent.process.send_signal(signal.SIGHUP)
            eventually(lambda: receiver.metrics)
            assert "google/_upb" in mapped(agent)
            assert "grpc" not in mapped(agent)
            config.write_text("log: {level: info}\n", encoding="utf-8")
            agent.process.send_signal(signal.SIGHUP)
            eventually(lambda: agent.metric('notbefore_config_reloads_total{result="success"}') == 2)
            last = metrics_of(receiver.metrics[-1])
            polls = imds.requests
            eventually(lambda: imds.requests > polls + 10)  # two intervals
            assert metrics_of(receiver.metrics[-1]) == last


def test_the_standard_variables_say_what_the_file_does_not(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=k%2F1")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a,service.version=0")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "watcher")
        config = tmp_path / "notbefore.yaml"
        config.write_text("otlp: {resource: {service.version: '1'}}\nsinks: {rec: {otlp_logs: {}}}\n", encoding="utf-8")
        with RunningAgent(imds.endpoint, tmp_path / "state", str(config)) as agent:
            agent.ready()
            (request, *_) = eventually(lambda: receiver.requests)
            assert request.headers["api-key"] == "k/1"
            imds.set_document(body(item(NotBefore=FUTURE), incarnation=2))
            eventually(lambda: receiver.records)
    resource = attributes(receiver.metrics[0].resource_metrics[0].resource.attributes)
    assert [resource[name] for name in ("service.name", "service.version", "team")] == ["watcher", "1", "a"]
