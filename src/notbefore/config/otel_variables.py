"""What the standard ``OTEL_*`` variables say, as the section ``otlp`` of the configuration would; the file wins.

Durations in them are milliseconds, as OpenTelemetry's specification has it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from notbefore.config.secret import env_pairs
from notbefore.config.sinks import Connection
from notbefore.errors import ConfigError

PREFIX: Final = "OTEL_EXPORTER_OTLP_"
ENDPOINTS: Final = ("endpoint", "metrics_endpoint", "logs_endpoint")
FILES: Final = {"CERTIFICATE": "ca_file", "CLIENT_CERTIFICATE": "cert_file", "CLIENT_KEY": "key_file"}
TEMPORALITY: Final = PREFIX + "METRICS_TEMPORALITY_PREFERENCE"
SHARED: Final = frozenset(Connection.__struct_fields__) - {"metrics_endpoint"}  # what a sink takes over of ``otlp``


def fold(values: dict[str, Any], places: dict[str, str], environment: Mapping[str, str]) -> None:
    """Complete the section ``otlp`` and the sinks ``otlp_logs`` of a configuration, in place."""
    if "otlp" in values:
        if values["otlp"] is None:
            place = places.get("otlp", "the configuration")
            raise ConfigError(f"{place}: otlp: expected settings; `otlp: {{}}` for the defaults")
    elif asked(environment):
        values["otlp"] = {}
    own = values.get("otlp")
    if isinstance(own, dict):
        section = values["otlp"] = _completed(own, metrics(environment), "otlp", places)
        if own.get("agent_log", "none") != "none":  # what is meant for the metrics is not for it
            section["logs"] = _for_logs(own.get("logs") or {}, own, environment, "otlp.logs", places)
            if isinstance(section["logs"], dict) and "metrics_endpoint" in section:
                section["logs"].setdefault("metrics_endpoint", section["metrics_endpoint"])
    sinks = values.get("sinks")
    sinks = sinks if isinstance(sinks, dict) else {}
    for name, sink in sinks.items():
        if not isinstance(sink, dict) or "otlp_logs" not in sink:
            continue
        path = f"sinks.{name}.otlp_logs"
        sinks[name] = {**sink, "otlp_logs": _for_logs(sink["otlp_logs"], own, environment, path, places)}


def _for_logs(settings: Any, own: Any, environment: Mapping[str, str], path: str, places: dict[str, str]) -> Any:
    """The way of log records: its own, or that of the section ``otlp`` and of the variables for logs."""
    if not isinstance(settings, dict) or any(key in settings for key in ENDPOINTS):
        return settings
    taken = {key: value for key, value in own.items() if key in SHARED} if isinstance(own, dict) else {}
    return _completed({**taken, **settings}, Variables(environment, "LOGS"), path, places)


def asked(environment: Mapping[str, str]) -> bool:
    """The variables alone say that metrics are to be exported, and where."""
    exporters = environment.get("OTEL_METRICS_EXPORTER") or "otlp"
    given = environment.get(PREFIX + "ENDPOINT") or environment.get(PREFIX + "METRICS_ENDPOINT")
    off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return bool(given) and not off and "otlp" in [name.strip() for name in exporters.split(",")]


class Variables:
    """The variables that were found: ``values`` by the keys of the section, ``origins`` names the variable of each."""

    def __init__(self, environment: Mapping[str, str], signal: Literal["METRICS", "LOGS"]) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self._environment = environment
        self.take("endpoint", PREFIX + "ENDPOINT")
        self.take(f"{signal.lower()}_endpoint", f"{PREFIX}{signal}_ENDPOINT")
        for prefix in (PREFIX, f"{PREFIX}{signal}_"):  # one for the signal comes before one for all
            self._take_connection(prefix)
        self._take_resource()
        insecure = environment.get(f"{PREFIX}{signal}_INSECURE") or environment.get(PREFIX + "INSECURE", "")
        self.scheme = "http" if insecure.strip().lower() == "true" else "https"  # of a gRPC address without one

    def take(self, key: str, variable: str, read: Callable[[str], Any] = str) -> None:
        """Note what the variable says; one that is empty says nothing."""
        text = self._environment.get(variable, "").strip()
        if text:
            self.values[key], self.origins[key] = read(text), variable

    def _take_connection(self, prefix: str) -> None:
        self.take("protocol", prefix + "PROTOCOL")
        self.take("compression", prefix + "COMPRESSION")
        self.take("timeout", prefix + "TIMEOUT", _milliseconds)
        for variable, key in FILES.items():
            self.take(key, prefix + variable, _absolute)
        variable = prefix + "HEADERS"
        self.take("headers", variable, lambda text: _headers(variable, text))

    def _take_resource(self) -> None:
        self.take("resource", "OTEL_RESOURCE_ATTRIBUTES", env_pairs)
        name = self._environment.get("OTEL_SERVICE_NAME")
        if name:
            self.values["resource"] = {**self.values.get("resource", {}), "service.name": name}
            self.origins.setdefault("resource", "OTEL_SERVICE_NAME")


def metrics(environment: Mapping[str, str]) -> Variables:
    """For the section ``otlp``."""
    preference = environment.get(TEMPORALITY) or "cumulative"
    if preference.strip().lower() != "cumulative":
        raise ConfigError(
            f"{TEMPORALITY}: only cumulative counters are sent, not {preference!r}: unset it, and let a Collector's"
            " cumulativetodelta processor do that"
        )
    found = Variables(environment, "METRICS")
    found.take("interval", "OTEL_METRIC_EXPORT_INTERVAL", _milliseconds)
    found.take("logs_endpoint", PREFIX + "LOGS_ENDPOINT")
    return found


def _headers(variable: str, text: str) -> dict[str, Any]:
    for item in filter(str.strip, text.split(",")):
        name, equals, _ = item.partition("=")
        if not (name.strip() and equals):  # its text may be a secret
            raise ConfigError(
                f"{variable}: expected NAME=VALUE, with commas between several and %XX for what is special"
            )
    return {name: {"otel_header": f"{variable}/{name}"} for name in env_pairs(text)}


def _milliseconds(text: str) -> str:
    return f"{text}ms"


def _absolute(text: str) -> str:
    return str(Path.cwd() / text)


def _completed(own: dict[str, Any], found: Variables, path: str, places: dict[str, str]) -> dict[str, Any]:
    """What is given in the file comes first; of headers and attributes each by itself."""
    standard = found.values
    if any(key in own for key in ENDPOINTS):
        standard = {key: value for key, value in standard.items() if key not in ENDPOINTS}
    merged = {**standard, **own}
    for key in standard.keys() & ENDPOINTS if merged.get("protocol") == "grpc" else ():
        if key not in own and "://" not in merged[key]:
            merged[key] = f"{found.scheme}://{merged[key]}"
    if isinstance(own.get("resource"), dict) and "resource" in standard:
        merged["resource"] = {**standard["resource"], **own["resource"]}
    if isinstance(own.get("headers"), dict) and "headers" in standard:
        given = {str(name).lower() for name in own["headers"]}
        rest = {name: value for name, value in standard["headers"].items() if name.lower() not in given}
        merged["headers"] = {**rest, **own["headers"]}
    for key in standard:
        if key not in own:
            places[f"{path}.{key}"] = found.origins[key]
    return merged
