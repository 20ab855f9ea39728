"""What the ``OTEL_*`` variables say, as the SDK for Python reads them: keys of the section ``otlp``; the file wins.

They are often set for a whole machine, for other programs: one that is not understood is warned of and ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from notbefore.config.checks import missing_otlp
from notbefore.config.model import Otlp
from notbefore.config.reading import Reader, Variable, fields_of
from notbefore.config.secret import env_pairs
from notbefore.config.sinks import OtlpConnection
from notbefore.config.yaml_file import Places
from notbefore.errors import Place

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
_OF_LOGS: Final = frozenset(fields_of(OtlpConnection)) & frozenset(fields_of(Otlp)) - {"metrics_endpoint"}


def variables(environment: Mapping[str, str], signal: str) -> tuple[dict[str, Any], Places, list[str]]:
    """Return the settings of a signal (``METRICS`` or ``LOGS``), their places, and what is wrong with the others."""
    values: dict[str, Any] = {}
    places, ignored = Places(), []
    for key, variable, value in _given(environment, signal):
        wrong = _mistaken({key: value}, environment, key)
        if wrong or not value:
            # a name in a header that is written wrongly may be a secret
            ignored.append(f"{variable}: {_EXPECTED.get(key, wrong)}: this variable is ignored")
        else:
            values[key], places[key] = value, Place(variable)
    if "cert_file" not in values and values.pop("key_file", None):
        ignored.append(f"{places['key_file']}: expected `cert_file` beside `key_file`: this variable is ignored")
    if wrong := _mistaken(values, environment):
        return {}, places, [*ignored, f"{PREFIX}*: {wrong}: these variables are ignored"]
    return values, places, ignored


def _mistaken(values: dict[str, Any], environment: Mapping[str, str], key: str = "") -> str:
    """Return what the section would not take; empty if it takes all. ``key``: only of this one."""
    reader = Reader(Places(), Path.cwd(), environment)
    reader.read(values, Otlp, "otlp")
    return next((one.text for one in reader.mistakes if one.key.startswith(f"otlp.{key}" if key else "otlp")), "")


def _given(environment: Mapping[str, str], signal: str) -> list[tuple[str, str, Any]]:
    """Return (key, variable, value); what is said for the signal alone comes after what is for all, and replaces it."""
    found: list[tuple[str, str, Any]] = []
    for prefix in (PREFIX, f"{PREFIX}{signal}_"):
        for suffix, key in _KEYS.items():
            variable, text = prefix + suffix, environment.get(prefix + suffix, "").strip()
            if key == "endpoint" and prefix != PREFIX:
                key = f"{signal.lower()}_endpoint"  # noqa: PLW2901 - it is taken as it stands
            values: dict[str, Any] = {
                "headers": {name: {"otel_header": f"{variable}/{name}"} for name in env_pairs(text)},
                "timeout": Variable(f"{text}s"),  # the SDK takes it for seconds
            }
            if text:
                found.append(
                    (
                        key,
                        variable,
                        values.get(key, Variable(text.lower() if key in ("compression", "protocol") else text)),
                    )
                )
    if signal == "METRICS" and (interval := environment.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()):
        found.append(("interval", "OTEL_METRIC_EXPORT_INTERVAL", Variable(f"{interval}ms")))
    attributes, service = (
        environment.get(name, "").strip() for name in ("OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME")
    )
    if attributes or service:
        resource = env_pairs(attributes) | ({"service.name": service} if service else {})
        found.append(("resource", "OTEL_RESOURCE_ATTRIBUTES", resource))
    return found


def asked(environment: Mapping[str, str]) -> bool:
    """Return whether the variables alone ask for metrics to be exported."""
    exporters = (environment.get("OTEL_METRICS_EXPORTER") or "otlp").split(",")
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    given = environment.get(PREFIX + "ENDPOINT") or environment.get(PREFIX + "METRICS_ENDPOINT")
    return bool(given) and not disabled and "otlp" in map(str.strip, exporters)


def missing_library(environment: Mapping[str, str]) -> str:
    """Return which library is missing where the variables alone ask for OTLP; empty if there is none."""
    protocol = str(variables(environment, "METRICS")[0].get("protocol", "http/protobuf"))
    return next(missing_otlp(protocol), "") if asked(environment) else ""


def fold(values: dict[str, Any], places: Places, environment: Mapping[str, str]) -> None:
    """Put what the variables say into the sections that send over OTLP."""
    own = values.get("otlp")
    if own is None and "otlp" not in values and asked(environment) and not missing_library(environment):
        found = _completed({}, "METRICS", environment, "otlp", places)
        if any(key in found for key in ENDPOINTS):  # else what they ask for was not understood
            values["otlp"] = found
    elif isinstance(own, dict):
        values["otlp"] = _completed(own, "METRICS", environment, "otlp", places)
    shared = {key: value for key, value in own.items() if key in _OF_LOGS} if isinstance(own, dict) else {}
    sinks: dict[str, Any] = values["sinks"] if isinstance(values.get("sinks"), dict) else {}
    for name, sink in sinks.items():
        given = sink.get("otlp_logs", ...) if isinstance(sink, dict) else ...
        if given is None or (isinstance(given, dict) and not any(key in given for key in ENDPOINTS)):
            path = f"sinks.{name}.otlp_logs"
            sinks[name] = {
                **sink,
                "otlp_logs": _completed({**shared, **(given or {})}, "LOGS", environment, path, places),
            }


def _completed(
    own: dict[str, Any], signal: str, environment: Mapping[str, str], path: str, places: Places
) -> dict[str, Any]:
    """Return the keys of a section with what the variables say of the others; endpoints all come from one place."""
    standard, origins, _ = variables(environment, signal)
    if any(key in own for key in ENDPOINTS):
        standard = {key: value for key, value in standard.items() if key not in ENDPOINTS}
    if isinstance(own.get("resource"), dict):
        own = {**own, "resource": {**standard.get("resource", {}), **own["resource"]}}
    merged = {**standard, **own}
    if _mistaken(merged, environment) and not _mistaken(own, environment):  # the file does not go with the variables
        return own
    places.update({f"{path}.{key}": origins[key] for key in standard.keys() - own.keys()})
    return merged
