"""OTLP in the configuration: what is refused, and what is missing."""

from pathlib import Path

import pytest

from notbefore.config.load import load
from notbefore.errors import ConfigError


def read(place: Path, text: str) -> None:
    path = place / "notbefore.yaml"
    path.write_text(text, encoding="utf-8")
    load(path, {}, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("otlp: {endpoint: 'http://c:99999'}", "otlp.endpoint: not a URL: a port is at most 65535"),
        ("otlp: {key_file: notbefore.yaml}", "expected `cert_file` beside `key_file`"),
        ("otlp: {headers: {'a b': c}}", "otlp.headers.a b: expected the name of a header"),
        ("otlp: {headers: {a: {env: NONE}}}", "otlp.headers.a: the environment variable NONE is not set"),
        ("otlp: {protocol: http/json}", "otlp.protocol: there is no 'http/json' here: expected one of"),
        ("otlp:\n  timeout: 0s", "notbefore.yaml:2:3: otlp.timeout: expected 100ms to 5m"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("missing", "text", "extra"),
    [
        ("http", "otlp: {}", "azure-notbefore[otlp]"),
        ("grpc", "sinks: {rec: {otlp_logs: {protocol: grpc}}}", "azure-notbefore[otlp-grpc]"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, text: str, extra: str
) -> None:
    library = f"opentelemetry.exporter.otlp.proto.{missing}"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == library else object())
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert f"pip install '{extra}'" in str(raised.value)
