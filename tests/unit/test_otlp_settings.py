"""OTLP in the configuration: the file, the standard variables, which of them wins, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from notbefore.config.load import dump, load, warnings
from notbefore.config.model import Config
from notbefore.config.sinks import Connection, Otlp, OtlpLogs
from notbefore.errors import ConfigError
from notbefore.otlp.transport import Sender


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


def sink(config: Config, name: str = "rec") -> OtlpLogs:
    settings = config.sinks[name].settings
    assert isinstance(settings, OtlpLogs)
    return settings


def test_without_a_word_of_it_there_is_none(place: Path) -> None:
    assert read(place).otlp is None
    assert read(place, OTEL_SERVICE_NAME="x", OTEL_EXPORTER_OTLP_TIMEOUT="5000").otlp is None


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
    "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "grpc",
    "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b,tenant=t",
    "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "gzip",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
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
    assert (str(found.timeout), str(found.interval)) == ("2500ms", "15000ms")
    assert (found.ca_file, found.cert_file, found.key_file) == (CA, CERT, KEY)
    assert found.resource == {"deployment.environment.name": "prod", "team": "a", "service.name": "watcher"}
    assert {name: secret.reveal(ALL) for name, secret in found.headers.items()} == {"api-key": "a b", "tenant": "t"}
    logs = sink(config)
    assert (logs.endpoint, logs.protocol, logs.compression) == ("http://all:4318", "grpc", "none")
    assert logs.resource == found.resource


def test_over_grpc_an_address_needs_no_scheme(place: Path) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4317", "OTEL_EXPORTER_OTLP_LOGS_INSECURE": "True"}
    config = read(place, "{otlp: {protocol: grpc}, sinks: {rec: {otlp_logs: {}}}}", **variables)
    assert otlp(config).endpoint == "https://c:4317"
    assert sink(config).endpoint == "http://c:4317"
    variables |= {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_INSECURE": "true"}
    assert otlp(read(place, **variables)).endpoint == "http://c:4317"
    variables["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = "https://d"
    assert otlp(read(place, **variables)).metrics_endpoint == "https://d"


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
    assert found.headers["api-key"].reveal(ALL) == "from-file"
    assert found.headers["tenant"].reveal(ALL) == "t"
    assert found.resource["team"] == "b"


def test_a_header_of_the_file_wins_however_it_is_written(place: Path) -> None:
    config = read(place, FILE.replace("api-key", "API-Key"), **ALL)
    assert {name: secret.reveal(ALL) for name, secret in otlp(config).headers.items()} == {
        "API-Key": "from-file",
        "tenant": "t",
    }
    assert set(sink(config).headers) == {"API-Key", "tenant"}


def test_a_sink_goes_where_the_section_goes_or_its_own_way_without_its_headers(place: Path) -> None:
    config = read(place, FILE, OTEL_EXPORTER_OTLP_HEADERS="tenant=t")
    assert Connection.of(sink(config)).endpoint == "http://file:4318"
    assert set(sink(config).headers) == {"api-key", "tenant"}
    assert Connection.of(sink(config, "own")) == Connection(endpoint="http://own:4318")
    assert not sink(config).terms.expire_on_end


def test_the_agents_log_goes_where_the_variables_for_logs_say_and_what_is_for_metrics_does_not(place: Path) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_HEADERS": "tenant=t",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "https://m/in",
        "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "api-key=for-metrics",
        "OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE": __file__,
    }
    only = otlp(read(place, "otlp: {agent_log: info}", **variables)).logs
    assert only is not None
    assert (set(only.headers), only.cert_file, only.logs_endpoint) == ({"tenant"}, None, None)
    with pytest.raises(ConfigError, match="only the other one is given"):  # nobody named a far side for it
        Sender(only, "logs")
    variables |= {
        "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "https://l/in",
        "OTEL_EXPORTER_OTLP_LOGS_HEADERS": "api-key=for-logs",
        "OTEL_EXPORTER_OTLP_LOGS_TIMEOUT": "3000",
    }
    config = read(place, "otlp: {agent_log: info, resource: {team: b}}", **variables)
    logs = otlp(config).logs
    assert logs is not None
    assert {name: secret.reveal(variables) for name, secret in logs.headers.items()} == {"api-key": "for-logs"}
    assert (logs.logs_endpoint, str(logs.timeout), logs.resource) == ("https://l/in", "3000ms", {"team": "b"})
    assert otlp(config).headers["api-key"].reveal(variables) == "for-metrics"
    assert config.hidden == ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "OTEL_EXPORTER_OTLP_LOGS_HEADERS")
    assert otlp(read(place, "otlp: {}", **variables)).logs is None


def test_the_agents_log_may_have_a_way_of_its_own_in_the_file(place: Path) -> None:
    text = FILE.replace("interval: 30s", "agent_log: info\n  logs: %s")
    own = otlp(read(place, text % "{endpoint: 'http://l', headers: {k: {file: key}}}", **ALL)).logs
    assert own is not None
    assert (own.endpoint, own.headers["k"].reveal(), len(own.headers)) == ("http://l", "from-file", 1)
    config = read(place, text % "{headers: {k: plain}}")
    logs = otlp(config).logs
    assert logs is not None
    assert (logs.endpoint, set(logs.headers)) == ("http://file:4318", {"k"})
    (warning,) = warnings(config, place / "notbefore.yaml")
    assert "secrets: otlp.logs.headers.k." in warning
    assert read(place, dump(read(place, text % "{timeout: 1s}"))) == read(place, text % "{timeout: 1s}")


def test_headers_are_not_shown_and_where_they_are_found_is(place: Path) -> None:
    config = read(place, FILE.replace("{file: key}", "plain-secret"), OTEL_EXPORTER_OTLP_HEADERS="tenant=hidden")
    text = dump(config)
    assert "plain-secret" not in text
    assert "hidden" not in text
    assert "otel_header: OTEL_EXPORTER_OTLP_HEADERS/tenant" in text
    assert config.hidden == ("OTEL_EXPORTER_OTLP_HEADERS",)
    (warning,) = warnings(config, place / "notbefore.yaml")
    assert "otlp.headers.api-key" in warning
    assert "tenant" not in warning


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("otlp:\n", {}, "notbefore.yaml:1: otlp: expected settings; `otlp: {}` for the defaults"),
        ("otlp: {endpoint: 'collector:4318'}", {}, "notbefore.yaml:1: otlp: endpoint: expected http://HOST or https"),
        ("otlp: {endpoint: 'http://u:p@c'}", {}, "user and password do not belong in the address"),
        ("otlp: {endpoint: 'http://c:99999'}", {}, "otlp: endpoint: Port out of range"),
        ("otlp: {interval: 100ms}", {}, "interval: expected 1s to 1h"),
        ("otlp: {timeout: 10m}", {}, "timeout: expected 100ms to 5m"),
        ("otlp: {key_file: k}", {}, "expected `cert_file` beside `key_file`"),
        ("otlp: {headers: {'a b': c}}", {}, "headers: 'a b' is no name of a header"),
        ("otlp: {headers: {a: b, A: c}}", {}, "headers: 'a' and 'A' are one header: give it once"),
        ("otlp: {headers: {A-Bin: c}, protocol: grpc}", {}, "over gRPC no header that ends in -bin can be sent"),
        ("otlp: {headers: {a: {env: NONE}}}", {}, "otlp.headers.a: the environment variable NONE is not set"),
        ("otlp: {protocol: http/json}", {}, "otlp.protocol: Invalid enum value 'http/json', expected one of"),
        ("otlp: {agent_log: info, logs: {headers: {a: {env: NONE}}}}", {}, "otlp.logs.headers.a: the environment"),
        ("otlp: {agent_log: info, logs: {interval: 5s}}", {}, "otlp.logs.interval: Object contains unknown field"),
        ("otlp: {agent_log: info, logs: x}", {}, "otlp.logs: Expected `object | null`, got `str`"),
        ("otlp: {endpont: x}", {}, "otlp.endpont: Object contains unknown field"),
        ("sinks: {rec: {otlp_logs: {title: x}}}", {}, "title and body are not for a sink that is sent the record"),
        ("otlp: {}", {"PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL: otlp.protocol: Invalid enum value"),
        ("otlp: {}", {"ENDPOINT": "c:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT: otlp: endpoint: expected http://HOST"),
        ("otlp: {}", {"TIMEOUT": "0"}, "OTEL_EXPORTER_OTLP_TIMEOUT: otlp: timeout: expected 100ms to 5m"),
        ("otlp:\n  timeout: 0s", {}, "notbefore.yaml:2: otlp: timeout: expected 100ms to 5m"),
        ("otlp: {}", {"HEADERS": "a=b, Authorization: Bearer x"}, "OTEL_EXPORTER_OTLP_HEADERS: expected NAME=VALUE"),
        ("otlp: {}", {"HEADERS": "=x"}, "OTEL_EXPORTER_OTLP_HEADERS: expected NAME=VALUE"),
        ("otlp: {}", {"TIMEOUT": "soon"}, "OTEL_EXPORTER_OTLP_TIMEOUT: otlp.timeout: "),
        ("otlp: {}", {"METRICS_TEMPORALITY_PREFERENCE": "delta"}, "only cumulative counters are sent, not 'delta'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    place: Path, text: str, environment: dict[str, Any], expected: str
) -> None:
    variables = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in environment.items()}
    if environment:
        variables.setdefault("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")
    with pytest.raises(ConfigError) as raised:
        read(place, text, **variables)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("missing", "text", "extra"),
    [
        ("opentelemetry.proto", "otlp: {}", "azure-notbefore[otlp]"),
        ("grpc", "otlp: {protocol: grpc}", "azure-notbefore[otlp-grpc]"),
        ("grpc", "sinks: {rec: {otlp_logs: {protocol: grpc}}}", "azure-notbefore[otlp-grpc]"),
        ("opentelemetry.proto", "sinks: {rec: {otlp_logs: {}}}", "azure-notbefore[otlp]"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    place: Path, monkeypatch: pytest.MonkeyPatch, missing: str, text: str, extra: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ConfigError) as raised:
        read(place, text)
    assert f"pip install '{extra}'" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PROTOCOL", "http/json", "expected one of http/protobuf, grpc"),
        ("ENDPOINT", "collector:4317", "OTEL_EXPORTER_OTLP_ENDPOINT: otlp: endpoint: expected http://HOST"),
        ("TIMEOUT", "0", "OTEL_EXPORTER_OTLP_TIMEOUT: otlp: timeout: expected"),
        ("HEADERS", "secret", "OTEL_EXPORTER_OTLP_HEADERS: expected NAME=VALUE"),
        ("METRICS_TEMPORALITY_PREFERENCE", "delta", "only cumulative counters"),
    ],
)
def test_variables_that_were_meant_for_others_are_no_reason_not_to_watch(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", f"OTEL_EXPORTER_OTLP_{name}": value}
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    config = read(place, "", **variables)
    assert config.otlp is None
    (warning,) = warnings(config, None)
    assert said in warning
    assert "secret" not in warning
