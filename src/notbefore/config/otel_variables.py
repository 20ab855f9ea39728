"""What the standard ``OTEL_*`` variables say, as the section ``otlp`` of the configuration would; the file wins.

They mean what OpenTelemetry's specification says (*Environment Variable Specification*, *OTLP Exporter*): durations are
milliseconds, and a value that is not understood is warned of and ignored. They are often set for a whole machine, with
other programs in mind: none of them is a reason not to watch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from notbefore.config.checks import check_header
from notbefore.config.open_file import open_file
from notbefore.config.otlp import Otlp, OtlpConnection
from notbefore.config.secret import env_pairs
from notbefore.config.yaml_file import to_struct
from notbefore.errors import ConfigError

VariableSignal = Literal["METRICS", "LOGS"]
PREFIX: Final = "OTEL_EXPORTER_OTLP_"
ENDPOINTS: Final = ("endpoint", "metrics_endpoint", "logs_endpoint")
CERTIFICATES: Final = ("cert_file", "key_file")
SHARED: Final = frozenset(OtlpConnection.__struct_fields__) - {
    "metrics_endpoint"
}  # the keys of ``otlp`` that a sink also uses


class Variables:
    """What was found for a signal: ``values`` by the keys of the section ``otlp``, ``origins`` the variable of each.

    ``ignored`` says which were not understood, and what was expected; never a secret. ``meant``: they alone ask for
    metrics to be exported; ``asked``: and their address was understood.
    """

    def __init__(self, environment: Mapping[str, str], signal: VariableSignal, protocol: str | None = None) -> None:
        """``protocol``: the configuration's, where it says one."""
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.ignored: list[str] = []
        self._environment = environment
        self._protocol = protocol or "http/protobuf"
        prefixes = (PREFIX, f"{PREFIX}{signal}_")  # what is said for the signal comes before what is for all
        for prefix in prefixes:
            self._take("protocol", prefix + "PROTOCOL", str.lower)
        self._protocol = protocol or str(self.values.get("protocol", "http/protobuf"))
        insecure = environment.get(f"{PREFIX}{signal}_INSECURE") or environment.get(PREFIX + "INSECURE", "")
        self._scheme = "http" if insecure.strip().lower() == "true" else "https"  # of a gRPC address without one
        self._take("endpoint", PREFIX + "ENDPOINT", self._address)
        for name in ("METRICS", "LOGS") if signal == "METRICS" else ("LOGS",):
            self._take(f"{name.lower()}_endpoint", f"{PREFIX}{name}_ENDPOINT", self._address)
        for prefix in prefixes:
            for suffix, (key, read) in _CONNECTION.items():
                self._take(key, prefix + suffix, read)
            self._take("headers", prefix + "HEADERS", partial(_headers, prefix + "HEADERS"))
        self._take("resource", "OTEL_RESOURCE_ATTRIBUTES", _pairs)
        if service := environment.get("OTEL_SERVICE_NAME"):
            self.values["resource"] = {**self.values.get("resource", {}), "service.name": service}
            self.origins.setdefault("resource", "OTEL_SERVICE_NAME")
        if signal == "METRICS":
            self._take("interval", "OTEL_METRIC_EXPORT_INTERVAL", _milliseconds)
            self._take("", PREFIX + "METRICS_TEMPORALITY_PREFERENCE", _cumulative)
        exporters = (environment.get("OTEL_METRICS_EXPORTER") or "otlp").split(",")
        disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        given = environment.get(PREFIX + "ENDPOINT") or environment.get(PREFIX + "METRICS_ENDPOINT")
        self.meant = bool(given) and not disabled and "otlp" in map(str.strip, exporters)
        self.asked = self.meant and bool(self.values.keys() & {"endpoint", "metrics_endpoint"})

    def _take(self, key: str, variable: str, read: Callable[[str], Any]) -> None:
        """Note what the variable says, unless it is empty, or the section would not take it."""
        text = self._environment.get(variable, "").strip()
        if not text:
            return
        try:
            found = {key: read(text)} if key else read(text)
            to_struct(
                {**self.values, "protocol": self._protocol, **found}, Otlp, {"": variable}, strict=False, above="otlp"
            )
        except (ValueError, ConfigError) as error:
            self.ignored.append(f"{variable}: {str(error).removeprefix(variable + ': ')}")
        else:
            self.values |= found
            self.origins |= dict.fromkeys(found, variable)

    def _address(self, text: str) -> str:
        grpc = self._protocol == "grpc" and "://" not in text  # HOST:PORT
        return f"{self._scheme}://{text}" if grpc else text


def fold(values: dict[str, Any], places: dict[str, str], environment: Mapping[str, str]) -> None:
    """Complete the section ``otlp`` and the sinks ``otlp_logs`` of a configuration, in place."""
    if "otlp" in values:
        if values["otlp"] is None:
            place = places.get("otlp", "the configuration")
            raise ConfigError(f"{place}: otlp: expected settings; `otlp: {{}}` for the defaults")
    elif Variables(environment, "METRICS").asked:
        values["otlp"] = {}
    own = values.get("otlp")
    if isinstance(own, dict):
        found = Variables(environment, "METRICS", own.get("protocol"))
        section = values["otlp"] = _completed(own, found, "otlp", places)
        if own.get("agent_log", "none") != "none":  # what is meant for the metrics is not for it
            section["logs"] = _for_logs(own.get("logs") or {}, own, environment, "otlp.logs", places)
            if isinstance(section["logs"], dict) and "metrics_endpoint" in section:
                section["logs"].setdefault("metrics_endpoint", section["metrics_endpoint"])
    sinks = values.get("sinks")
    for name, sink in sinks.items() if isinstance(sinks, dict) else ():
        if isinstance(sink, dict) and "otlp_logs" in sink:
            path = f"sinks.{name}.otlp_logs"
            values["sinks"][name] = {**sink, "otlp_logs": _for_logs(sink["otlp_logs"], own, environment, path, places)}


def _for_logs(settings: Any, own: Any, environment: Mapping[str, str], path: str, places: dict[str, str]) -> Any:
    """Where log records go: their own settings, then those of the section ``otlp``, then the variables for logs."""
    if not isinstance(settings, dict) or any(key in settings for key in ENDPOINTS):
        return settings
    shared = {key: value for key, value in own.items() if key in SHARED} if isinstance(own, dict) else {}
    given = {**shared, **settings}
    return _completed(given, Variables(environment, "LOGS", given.get("protocol")), path, places)


def _completed(own: dict[str, Any], found: Variables, path: str, places: dict[str, str]) -> dict[str, Any]:
    """What is given in the file comes first; of headers and attributes each by itself."""
    standard = dict(found.values)
    for together in (ENDPOINTS, CERTIFICATES):  # they all come from one place
        if any(key in own for key in together):
            standard = {key: value for key, value in standard.items() if key not in together}
    merged = {**standard, **own}
    if isinstance(own.get("resource"), dict) and "resource" in standard:
        merged["resource"] = {**standard["resource"], **own["resource"]}
    if isinstance(own.get("headers"), dict) and "headers" in standard:
        given = {str(name).lower() for name in own["headers"]}
        rest = {name: value for name, value in standard["headers"].items() if name.lower() not in given}
        merged["headers"] = {**rest, **own["headers"]}
    for key in standard.keys() - own.keys():
        places[f"{path}.{key}"] = found.origins[key]
    return merged


# ---- the values of variables as the section writes them; each raises ValueError with what was expected


def _cumulative(text: str) -> dict[str, Any]:
    if text.lower() != "cumulative":
        raise ValueError(f"only cumulative counters are sent, not {text!r}: a Collector's cumulativetodelta does that")
    return {}


def _milliseconds(text: str) -> str:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"expected a number of milliseconds, got {text!r}")
    return f"{text}ms"


def _file(text: str) -> str:
    path = Path.cwd() / text
    try:
        open_file(path).close()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return str(path)


def _pairs(text: str) -> dict[str, str]:
    """All attributes or none: the specification requires that one wrong pair discards the whole value."""
    if any(item.strip() and not env_pairs(item) for item in text.split(",")):
        raise ValueError("expected NAME=VALUE, with commas between several and %XX for what is special")
    return env_pairs(text)


def _headers(variable: str, text: str) -> dict[str, Any]:
    """Where each is found. The name of what is written wrongly may be a secret: it is not shown."""
    for name, value in _pairs(text).items():
        if not value or not name.isprintable() or " " in name:
            raise ValueError("expected NAME=VALUE, with commas between several and %XX for what is special")
        check_header(name, value)
    return {name: {"otel_header": f"{variable}/{name}"} for name in env_pairs(text)}


_CONNECTION: Final[dict[str, tuple[str, Callable[[str], str]]]] = {
    "COMPRESSION": ("compression", str.lower),
    "TIMEOUT": ("timeout", _milliseconds),
    "CERTIFICATE": ("ca_file", _file),
    "CLIENT_CERTIFICATE": ("cert_file", _file),
    "CLIENT_KEY": ("key_file", _file),
}
