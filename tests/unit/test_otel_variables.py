"""OpenTelemetry's environment variables apply where the configuration sets nothing."""

from pathlib import Path

import pytest

from notbefore.config.load import load
from notbefore.config.model import Config, Otlp
from notbefore.config.otel import compression_of, is_disabled, prefers_deltas, resolved
from notbefore.config.sinks import OtlpConnection, SinkConfig
from notbefore.core.duration import Duration
from notbefore.courier.supervisor import make_orders

PREFIX = "OTEL_EXPORTER_OTLP_"
DEFAULT_TIMEOUT = "10s"
DEFAULT_INTERVAL = "60s"


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
def test_variable_sets_protocol_unless_the_file_does(
    configured: object, variables: dict[str, str], protocol: str
) -> None:
    environment = {PREFIX + name: value for name, value in variables.items()}

    settings = resolved(Otlp(protocol=configured), "metrics", environment)  # type: ignore[arg-type]

    assert settings.protocol == protocol


@pytest.mark.parametrize(
    ("configured", "text", "seconds"),
    [
        (DEFAULT_TIMEOUT, "2500", 2.5),
        (DEFAULT_TIMEOUT, "20", 20.0),  # in seconds, as in OpenTelemetry's SDK for Python
        ("7s", "2500", 7.0),
        (DEFAULT_TIMEOUT, "soon", 10.0),
        (DEFAULT_TIMEOUT, "0", 10.0),
        (DEFAULT_TIMEOUT, "nan", 10.0),
        (DEFAULT_TIMEOUT, "999999999", 10.0),
    ],
)
def test_variable_sets_timeout_unless_the_file_does(
    configured: str, text: str, seconds: float
) -> None:
    connection = OtlpConnection(timeout=Duration(configured))

    settings = resolved(connection, "logs", {"OTEL_EXPORTER_OTLP_TIMEOUT": text})

    assert settings.timeout.seconds == seconds


@pytest.mark.parametrize(
    ("configured", "text", "seconds"),
    [
        (DEFAULT_INTERVAL, "5000", 5.0),
        ("30s", "5000", 30.0),
        (DEFAULT_INTERVAL, "5", 60.0),
        (DEFAULT_INTERVAL, "x", 60.0),
    ],
)
def test_variable_sets_interval_unless_the_file_does(
    configured: str, text: str, seconds: float
) -> None:
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
def test_variable_sets_compression(variables: dict[str, str], compression: str) -> None:
    environment = {PREFIX + name: value for name, value in variables.items()}

    assert compression_of("logs", environment) == compression


@pytest.mark.parametrize(
    ("text", "deltas"),
    [("", False), ("cumulative", False), ("Delta", True), ("lowmemory", True), ("x", False)],
)
def test_variable_sets_temporality(text: str, deltas: bool) -> None:
    variable = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"

    assert prefers_deltas({variable: text}) == deltas


def test_invalid_variable_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
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


def test_configuration_is_valid_when_a_variable_sets_its_protocol(tmp_path: Path) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_text("otlp: {}\n", encoding="utf-8")

    config = load(path, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, {})

    assert config.otlp == Otlp()
