"""OTLP in the configuration: the file, the standard variables, which of them wins, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notbefore.config import otel
from notbefore.config.load import dump, load
from notbefore.config.model import Config, Otlp
from notbefore.config.sinks import OtlpConnection
from notbefore.config.warnings import warnings
from notbefore.core.duration import Duration
from notbefore.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("from-file\n", encoding="utf-8")
    return tmp_path


def read(place: Path, text: str = "", **environment: str) -> Config:
    path = place / "notbefore.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path, environment, {})


def otlp(config: Config) -> Otlp:
    assert config.otlp is not None
    return config.otlp


def sink(config: Config, name: str = "rec") -> OtlpConnection:
    settings = config.sinks[name].settings
    assert isinstance(settings, OtlpConnection)
    return settings


def test_the_variables_alone_turn_it_on_unless_they_turn_it_off(place: Path) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    assert otlp(read(place, **endpoint)).endpoint == "http://collector:4318"
    assert read(place, **endpoint, OTEL_SDK_DISABLED="true").otlp is None
    assert read(place, **endpoint, OTEL_METRICS_EXPORTER="none").otlp is None
    assert read(place, **endpoint, OTEL_METRICS_EXPORTER=" otlp , prometheus").otlp is not None
    only = otlp(read(place, OTEL_EXPORTER_OTLP_METRICS_ENDPOINT="http://collector/in"))
    assert (only.endpoint, only.metrics_endpoint) == (None, "http://collector/in")


# files that are there
CA, CERT, KEY = (str(Path(__file__).with_name(name)) for name in ("test_stdout.py", "test_config.py", "test_record.py"))
ALL = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://all:4318",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "gRPC",
    "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b,tenant=t",
    "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "gzip",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "2.5",
    "OTEL_EXPORTER_OTLP_CERTIFICATE": CA,
    "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": CERT,
    "OTEL_EXPORTER_OTLP_CLIENT_KEY": KEY,
    "OTEL_METRIC_EXPORT_INTERVAL": "15000",
    "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=prod,team=a",
    "OTEL_SERVICE_NAME": "watcher",
}


def test_all_variables_are_taken_those_of_a_signal_before_those_of_all(place: Path) -> None:
    config = read(place, "sinks: {rec: {otlp_logs: {}}}", **ALL)
    found = otlp(config)
    assert (found.endpoint, found.protocol, found.compression) == ("http://all:4318", "http/protobuf", "gzip")
    assert (str(found.timeout), str(found.interval)) == ("2.5s", "15000ms")
    assert (found.ca_file, found.cert_file, found.key_file) == (CA, CERT, KEY)
    assert found.resource == {"deployment.environment.name": "prod", "team": "a", "service.name": "watcher"}
    assert {name: secret.reveal(ALL) for name, secret in found.headers.items()} == {"api-key": "a b", "tenant": "t"}
    logs = sink(config)
    assert (logs.endpoint, logs.protocol, logs.compression) == ("http://all:4318", "grpc", "none")
    assert logs.resource == found.resource


FILE = """
otlp:
  endpoint: http://file:4318
  headers: {api-key: {file: key}}
  interval: 30s
  resource: {team: b}
sinks: {rec: {otlp_logs: {}}, own: {otlp_logs: {endpoint: "http://own:4318"}}}
"""


def test_the_file_wins(place: Path) -> None:
    config = read(place, FILE, **ALL, OTEL_EXPORTER_OTLP_METRICS_ENDPOINT="http://other/in")
    found = otlp(config)
    assert (found.endpoint, found.metrics_endpoint, str(found.interval)) == ("http://file:4318", None, "30s")
    assert {name: secret.reveal(ALL) for name, secret in found.headers.items()} == {"api-key": "from-file"}
    assert found.resource["team"] == "b"


def test_a_sink_goes_where_the_section_goes_or_its_own_way_without_its_headers(place: Path) -> None:
    config = read(place, FILE, OTEL_EXPORTER_OTLP_HEADERS="tenant=t")
    assert sink(config).endpoint == "http://file:4318"
    assert set(sink(config).headers) == {"api-key"}
    assert sink(config, "own") == OtlpConnection(endpoint="http://own:4318")
    assert not sink(config).terms.expire_on_end


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("otlp: {endpoint: 'http://c:99999'}", "otlp.endpoint: not a URL: a port is at most 65535"),
        ("otlp: {key_file: key}", "expected `cert_file` beside `key_file`"),
        ("otlp: {headers: {'a b': c}}", "headers: 'a b' is no name of a header"),
        ("otlp: {headers: {a: b, A: c}}", "headers: 'a' and 'A' are one header: give it once"),
        ("otlp: {headers: {A-Bin: c}, protocol: grpc}", "over gRPC no header that ends in -bin can be sent"),
        ("otlp: {headers: {a: {env: NONE}}}", "otlp.headers.a: the environment variable NONE is not set"),
        ("otlp: {protocol: http/json}", "otlp.protocol: there is no 'http/json' here: expected one of"),
        ("otlp:\n  timeout: 0s", "notbefore.yaml:2:3: otlp.timeout: expected 100ms to 5m"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(place: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(place, text)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("missing", "text", "extra"),
    [
        ("http", "otlp: {}", "azure-notbefore[otlp]"),
        ("grpc", "sinks: {rec: {otlp_logs: {protocol: grpc}}}", "azure-notbefore[otlp-grpc]"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    place: Path, monkeypatch: pytest.MonkeyPatch, missing: str, text: str, extra: str
) -> None:
    library = f"opentelemetry.exporter.otlp.proto.{missing}"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == library else object())
    with pytest.raises(ConfigError) as raised:
        read(place, text)
    assert f"pip install '{extra}'" in str(raised.value)


IGNORED = [
    ("PROTOCOL", "http/json", "protocol", "http/protobuf", "expected one of http/protobuf, grpc"),
    ("COMPRESSION", "zstd", "compression", "gzip", "expected one of gzip, none"),
    ("TIMEOUT", "60s", "timeout", Duration("10s"), "expected a number of seconds"),
    ("METRICS_TIMEOUT", "soon", "timeout", Duration("10s"), "expected a number of seconds"),
    ("CERTIFICATE", "/none.pem", "ca_file", None, "/none.pem cannot be read: No such file or directory"),
    ("CLIENT_KEY", __file__, "key_file", None, "expected `cert_file` beside `key_file`"),
    ("METRICS_ENDPOINT", "c:4317", "metrics_endpoint", None, "expected http://HOST or https://HOST"),
    ("HEADERS", "secret", "headers", {}, "expected NAME=VALUE"),
    ("HEADERS", "a=secret%0A", "headers", {}, "expected NAME=VALUE"),
]


@pytest.mark.parametrize("case", IGNORED)
def test_a_variable_that_is_not_understood_is_warned_of_and_ignored(
    place: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str, Any, str]
) -> None:
    name, value, key, kept, expected = case
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", f"OTEL_EXPORTER_OTLP_{name}": value}
    for variable, said in variables.items():
        monkeypatch.setenv(variable, said)
    config = read(place, **variables)
    assert getattr(otlp(config), key) == kept
    assert otlp(config).endpoint == "http://c:4318"
    (warning,) = warnings(config, None)
    assert warning.startswith(f"OTEL_EXPORTER_OTLP_{name}: ")
    assert expected in warning
    assert "secret" not in warning


def test_an_interval_and_attributes_that_are_not_understood_are_ignored(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
        "OTEL_METRIC_EXPORT_INTERVAL": "1m",
        "OTEL_RESOURCE_ATTRIBUTES": "broken",
        "OTEL_SERVICE_NAME": "watcher",
    }
    for variable, said in variables.items():
        monkeypatch.setenv(variable, said)
    config = read(place, **variables)
    assert (otlp(config).interval, otlp(config).resource) == (Duration("60s"), {"service.name": "watcher"})
    assert [warning.partition(":")[0] for warning in warnings(config, None)] == [
        "OTEL_METRIC_EXPORT_INTERVAL",
    ]


def test_an_address_that_is_not_understood_sends_nothing_anywhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")
    config = read(place, OTEL_EXPORTER_OTLP_ENDPOINT="collector:4317")
    assert config.otlp is None
    (warning,) = warnings(config, None)
    assert warning.startswith("OTEL_EXPORTER_OTLP_ENDPOINT: expected http://HOST")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert warnings(config, None) == []  # it is for somebody else


def test_a_library_that_variables_alone_ask_for_is_no_reason_not_to_watch(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = read(place, OTEL_EXPORTER_OTLP_ENDPOINT="http://c:4318")
    assert config.otlp is None
    (warning,) = warnings(config, None)
    assert "pip install 'azure-notbefore[otlp]'" in warning


SUFFIXES = (
    "ENDPOINT", "PROTOCOL", "HEADERS", "COMPRESSION", "TIMEOUT", "CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY",
    "INSECURE", "TEMPORALITY_PREFERENCE",
)  # fmt: skip
NAMES = (
    *(f"OTEL_EXPORTER_OTLP_{signal}{name}" for signal in ("", "METRICS_", "LOGS_") for name in SUFFIXES),
    "OTEL_METRIC_EXPORT_INTERVAL", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME", "OTEL_SDK_DISABLED",
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(["http://c:4318", "c:4317", "grpc", "gzip", "true", "1000", "a=b", "a-bin=b", "A=b,a=b", __file__]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8))
@settings(max_examples=300, deadline=None)
def test_no_variable_of_opentelemetry_keeps_the_agent_from_starting(variables: dict[str, str]) -> None:
    config = load(None, variables, {})
    assert config.otlp is None or "otlp" in dump(config)
    ignored = otel.ignored_variables(variables, metrics=True, logs=True)
    assert all(text.startswith("OTEL_") for text in ignored)
