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
