"""The standard variables of OpenTelemetry, for what the configuration leaves open."""

from pathlib import Path

import pytest

from notbefore.config.load import load
from notbefore.config.model import Config, Otlp
from notbefore.config.otel import compression_of, is_disabled, prefers_deltas, resolved
from notbefore.config.sinks import OtlpConnection, SinkConfig
from notbefore.core.duration import Duration
from notbefore.courier.supervisor import make_orders

PREFIX = "OTEL_EXPORTER_OTLP_"


@pytest.mark.parametrize(
    ("configured", "variables", "protocol"),
    [
        (None, {}, "http/protobuf"),
        (None, {"PROTOCOL": "grpc"}, "grpc"),
        (None, {"PROTOCOL": "grpc", "METRICS_PROTOCOL": "http/protobuf"}, "http/protobuf"),
        (None, {"LOGS_PROTOCOL": "grpc"}, "http/protobuf"),
        (None, {"PROTOCOL": "http/json"}, "http/protobuf"),
        ("http/protobuf", {"PROTOCOL": "grpc"}, "http/protobuf"),
    ],
)
def test_protocol_comes_from_file_then_variable(
    configured: object, variables: dict[str, str], protocol: str
) -> None:
    environment = {PREFIX + name: value for name, value in variables.items()}

    settings = resolved(Otlp(protocol=configured), "metrics", environment)  # type: ignore[arg-type]

    assert settings.protocol == protocol


@pytest.mark.parametrize(
    ("configured", "text", "seconds"),
    [
        ("10s", "2500", 2.5),
        ("10s", "20", 20.0),  # OpenTelemetry's SDK for Python has seconds
        ("7s", "2500", 7.0),
        ("10s", "soon", 10.0),
        ("10s", "0", 10.0),
        ("10s", "nan", 10.0),
        ("10s", "999999999", 10.0),
    ],
)
def test_timeout_comes_from_file_then_variable(configured: str, text: str, seconds: float) -> None:
    connection = OtlpConnection(timeout=Duration(configured))

    settings = resolved(connection, "logs", {"OTEL_EXPORTER_OTLP_TIMEOUT": text})

    assert settings.timeout.seconds == seconds


@pytest.mark.parametrize(
    ("configured", "text", "seconds"),
    [("60s", "5000", 5.0), ("30s", "5000", 30.0), ("60s", "5", 60.0), ("60s", "x", 60.0)],
)
def test_interval_comes_from_file_then_variable(configured: str, text: str, seconds: float) -> None:
    otlp = Otlp(interval=Duration(configured))

    settings = resolved(otlp, "metrics", {"OTEL_METRIC_EXPORT_INTERVAL": text})

    assert settings.interval.seconds == seconds


@pytest.mark.parametrize(
    ("variables", "compression"),
    [
        ({}, "gzip"),
        ({"COMPRESSION": "none"}, "none"),
        ({"COMPRESSION": "Deflate"}, "deflate"),
        ({"COMPRESSION": "none", "LOGS_COMPRESSION": "gzip"}, "gzip"),
        ({"COMPRESSION": "zip"}, "gzip"),
    ],
)
def test_compression_comes_from_variable(variables: dict[str, str], compression: str) -> None:
    environment = {PREFIX + name: value for name, value in variables.items()}

    assert compression_of("logs", environment) == compression


@pytest.mark.parametrize(
    ("text", "deltas"),
    [("", False), ("cumulative", False), ("Delta", True), ("lowmemory", True), ("x", False)],
)
def test_temporality_comes_from_variable(text: str, deltas: bool) -> None:
    variable = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"

    assert prefers_deltas({variable: text}) == deltas


def test_wrong_variable_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    compression_of("logs", {"OTEL_EXPORTER_OTLP_COMPRESSION": "zip"})

    assert "OTEL_EXPORTER_OTLP_COMPRESSION: expected none, gzip or deflate" in caplog.text


@pytest.mark.parametrize(("text", "disabled"), [("true", True), ("TRUE", True), ("1", False)])
def test_sdk_is_disabled_only_by_true(text: str, disabled: bool) -> None:
    assert is_disabled({"OTEL_SDK_DISABLED": text}) == disabled


def test_resource_of_section_otlp_reaches_sinks() -> None:
    sink = SinkConfig(otlp_logs=OtlpConnection(resource={"team": "blue"}))
    otlp = Otlp(resource={"team": "red", "deployment.environment.name": "production"})

    orders = make_orders(Config(sinks={"records": sink}, otlp=otlp))

    settings = orders.sinks["records"].settings
    assert isinstance(settings, OtlpConnection)
    assert settings.resource == {"team": "blue", "deployment.environment.name": "production"}


def test_configuration_with_protocol_of_variable_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_text("otlp: {}\n", encoding="utf-8")

    config = load(path, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, {})

    assert config.otlp == Otlp()
