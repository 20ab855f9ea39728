"""The standard variables of OpenTelemetry (``OTEL_*``), where the configuration has no value.

OpenTelemetry's exporters read addresses, headers and certificates themselves.
"""

import logging
from collections.abc import Mapping
from typing import Final, Literal, TypeVar

from msgspec.structs import replace

from notbefore.config.model import Otlp
from notbefore.config.sinks import OtlpConnection, OtlpProtocol
from notbefore.core.duration import Duration

Signal = Literal["metrics", "logs"]
Compression = Literal["none", "gzip", "deflate"]
DEFAULT_PROTOCOL: Final = "http/protobuf"
DEFAULT_COMPRESSION: Final = "gzip"
TIMEOUTS: Final = (0.1, 300.0)  # seconds: the bounds of the key ``timeout``
INTERVALS: Final = (1.0, 3600.0)  # seconds: the bounds of the key ``interval``

Connection = TypeVar("Connection", bound=OtlpConnection)

log = logging.getLogger("notbefore.otlp")


def resolved(connection: Connection, signal: Signal, environment: Mapping[str, str]) -> Connection:
    """Return the settings with the values of the variables where the configuration has none."""
    default = type(connection)()
    protocol = connection.protocol or _protocol(signal, environment)
    timeout = connection.timeout
    if timeout == default.timeout:
        timeout = _timeout(signal, environment) or timeout
    complete = replace(connection, protocol=protocol, timeout=timeout)
    if isinstance(complete, Otlp) and complete.interval == Otlp().interval:
        interval = _interval(environment)
        if interval is not None:
            return replace(complete, interval=interval)
    return complete


def is_disabled(environment: Mapping[str, str]) -> bool:
    """Whether ``OTEL_SDK_DISABLED`` forbids every export."""
    return environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def compression_of(signal: Signal, environment: Mapping[str, str]) -> Compression:
    """Return how exports are compressed."""
    name, text = _variable("COMPRESSION", signal, environment)
    for value in ("none", "gzip", "deflate"):
        if text.lower() == value:
            return value
    if text:
        _ignored(name, text, "none, gzip or deflate")
    return DEFAULT_COMPRESSION


def prefers_deltas(environment: Mapping[str, str]) -> bool:
    """Whether counters and histograms are exported as differences since the last export."""
    name = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
    text = environment.get(name, "").strip()
    if text.lower() in {"delta", "lowmemory"}:
        return True
    if text.lower() not in {"", "cumulative"}:
        _ignored(name, text, "cumulative, delta or lowmemory")
    return False


def _protocol(signal: Signal, environment: Mapping[str, str]) -> OtlpProtocol:
    name, text = _variable("PROTOCOL", signal, environment)
    if text == "grpc":
        return "grpc"
    if text not in {"", DEFAULT_PROTOCOL}:
        _ignored(name, text, "http/protobuf or grpc")
    return DEFAULT_PROTOCOL


def _timeout(signal: Signal, environment: Mapping[str, str]) -> Duration | None:
    """Return the time for one export.

    The specification uses milliseconds, and OpenTelemetry's SDK for Python uses seconds. No export
    takes less than 100 ms, so a smaller number means seconds.
    """
    name, text = _variable("TIMEOUT", signal, environment)
    shortest, _ = TIMEOUTS
    number = _number(text)
    if number is not None and number >= shortest * 1000:
        number /= 1000
    return _duration(name, text, number, TIMEOUTS)


def _interval(environment: Mapping[str, str]) -> Duration | None:
    name = "OTEL_METRIC_EXPORT_INTERVAL"
    text = environment.get(name, "").strip()
    number = _number(text)
    if number is not None:
        number /= 1000
    return _duration(name, text, number, INTERVALS)


def _duration(
    name: str, text: str, seconds: float | None, bounds: tuple[float, float]
) -> Duration | None:
    if not text:
        return None
    shortest, longest = bounds
    if seconds is None or not shortest <= seconds <= longest:
        _ignored(name, text, f"a time from {shortest:g} to {longest:g} s, in milliseconds")
        return None
    return Duration(f"{round(seconds * 1000)}ms")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _variable(suffix: str, signal: Signal, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable of the signal, else the common one, with its value."""
    common = f"OTEL_EXPORTER_OTLP_{suffix}"
    special = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{suffix}"
    for name in (special, common):
        text = environment.get(name, "").strip()
        if text:
            return name, text
    return common, ""


def _ignored(name: str, text: str, expected: str) -> None:
    log.warning("%s: expected %s, got %.40r: it is ignored", name, expected, text)
