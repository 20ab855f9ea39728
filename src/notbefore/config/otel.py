"""What the ``OTEL_*`` variables say, as the SDK for Python reads them: keys of the section ``otlp``; the file wins.

They are often set for a whole machine, for other programs: one that is not understood is warned of and ignored.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from notbefore.config.checks import missing_otlp
from notbefore.config.model import Otlp
from notbefore.config.reading import Reader, fields_of
from notbefore.config.sinks import OtlpConnection
from notbefore.config.yaml_file import Places, Variable

PREFIX: Final = "OTEL_EXPORTER_OTLP_"
ENDPOINTS: Final = ("endpoint", "metrics_endpoint", "logs_endpoint")
_KEYS: Final = {
    "PROTOCOL": "protocol",
    "ENDPOINT": "endpoint",
    "HEADERS": "headers",
    "TIMEOUT": "timeout",
    "COMPRESSION": "compression",
    "CERTIFICATE": "ca_file",
    "CLIENT_CERTIFICATE": "cert_file",
    "CLIENT_KEY": "key_file",
}
_EXPECTED: Final = {
    "headers": "expected NAME=VALUE, with commas between several",
    "resource": "expected NAME=VALUE, with commas between several",
    "timeout": "expected a number of seconds, 0.1 to 300",
    "interval": "expected a number of milliseconds, 1000 to 3600000",
}
_OF_LOGS: Final = fields_of(OtlpConnection).keys() - {"metrics_endpoint"}


def completed(
    own: dict[str, Any], signal: str, environment: Mapping[str, str], base: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of a section with what the variables say of the others, and why some of them are ignored.

    ``signal``: ``METRICS`` or ``LOGS``. Endpoints all come from one place. ``base``: what files are relative to.
    """
    found, ignored = dict(own), []
    for key, variable, given in _given(environment, signal):
        value = {**given, **own[key]} if key == "resource" and isinstance(own.get(key), dict) else given
        if (key != "resource" and key in own) or (key in ENDPOINTS and not own.keys().isdisjoint(ENDPOINTS)):
            continue
        reader = Reader(Places(), base, environment)
        reader.read(found | {key: value}, Otlp if signal == "METRICS" else OtlpConnection, "otlp")
        if value and not reader.mistakes:
            found[key] = value
        else:  # a name in a header that is written wrongly may be a secret
            wrong = _EXPECTED.get(key) or reader.mistakes[0].text
            ignored.append(f"{variable}: {wrong}: this variable is ignored")
    return found, ignored


def _given(environment: Mapping[str, str], signal: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, variable, value); what is said for the signal alone comes after what is for all, and replaces it."""
    for prefix in (PREFIX, f"{PREFIX}{signal}_"):
        for suffix, key in _KEYS.items():
            if text := environment.get(prefix + suffix, "").strip():
                # an endpoint of one signal is taken as it stands
                name = f"{signal.lower()}_endpoint" if key == "endpoint" and prefix != PREFIX else key
                yield name, prefix + suffix, _value(key, text)
    if signal == "METRICS" and (interval := environment.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()):
        yield "interval", "OTEL_METRIC_EXPORT_INTERVAL", Variable(f"{interval}ms")
    service = environment.get("OTEL_SERVICE_NAME", "").strip()
    resource = _pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", "")) | ({"service.name": service} if service else {})
    if resource:
        yield "resource", "OTEL_RESOURCE_ATTRIBUTES", resource


def _value(key: str, text: str) -> Any:
    if key == "headers":
        return {name: {"inline": value} for name, value in _pairs(text).items()}
    if key == "timeout":
        return Variable(f"{text}s")  # the SDK takes it for seconds
    return Variable(text.lower() if key in ("compression", "protocol") else text)


def _pairs(text: str) -> dict[str, str]:
    """``key=value,key=value``; values may be ``%XX``."""
    pairs = (item.partition("=") for item in text.split(","))
    return {name.strip(): unquote(value.strip()) for name, equals, value in pairs if equals and name.strip()}


def asked(environment: Mapping[str, str]) -> bool:
    """Return whether the variables alone ask for metrics to be exported."""
    exporters = (environment.get("OTEL_METRICS_EXPORTER") or "otlp").split(",")
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    given = environment.get(PREFIX + "ENDPOINT") or environment.get(PREFIX + "METRICS_ENDPOINT")
    return bool(given) and not disabled and "otlp" in map(str.strip, exporters)


def ignored_variables(environment: Mapping[str, str], *, metrics: bool, logs: bool) -> list[str]:
    """Return why variables are ignored; ``metrics``, ``logs``: what the configuration exports."""
    found: list[str] = []
    if metrics or asked(environment):
        values, found = completed({}, "METRICS", environment, Path.cwd())
        missing = "" if metrics else next(missing_otlp(str(values.get("protocol", ""))), "")
        found += [f"OTEL_* variables ask for OTLP, and nothing is exported: {missing}"] if missing else []
    return list(dict.fromkeys([*found, *(completed({}, "LOGS", environment, Path.cwd())[1] if logs else ())]))


def fold(values: dict[str, Any], environment: Mapping[str, str], base: Path) -> None:
    """Put what the variables say into the sections that send over OTLP."""
    own = values.get("otlp")
    if isinstance(own, dict) or ("otlp" not in values and asked(environment)):
        found, _ = completed(own or {}, "METRICS", environment, base)
        # no agent fails to start because of variables that may be for other programs
        usable = not found.keys().isdisjoint(ENDPOINTS) and not any(missing_otlp(str(found.get("protocol", ""))))
        if own is not None or usable:
            values["otlp"] = found
    shared = {key: value for key, value in own.items() if key in _OF_LOGS} if isinstance(own, dict) else {}
    sinks = values["sinks"] if isinstance(values.get("sinks"), dict) else {}
    for name, sink in sinks.items():
        given = sink.get("otlp_logs", ...) if isinstance(sink, dict) else ...
        if given is None or (isinstance(given, dict) and given.keys().isdisjoint(ENDPOINTS)):
            logs, _ = completed({**shared, **(given or {})}, "LOGS", environment, base)
            sinks[name] = {**sink, "otlp_logs": logs}
