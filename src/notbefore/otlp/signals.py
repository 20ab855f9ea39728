"""Families and log records -> the values that OpenTelemetry's SDK exports. Imported only where OTLP is configured.

They are made by hand, so that ``metrics.families`` stays the one definition of each metric: the SDK's own instruments
would be a second one. Names and labels are those of ``/metrics``, and so they are again once OTLP is translated for
Prometheus. Each export holds the series of its moment: a series whose event is gone is gone.
"""

import socket
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from notbefore.core.record import Vm, identity
from notbefore.metrics.families import Family
from notbefore.metrics.totals import Histogram, Labels

CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"  # the semantic conventions whose names are used
SCOPE: Final = InstrumentationScope("notbefore", schema_url=SCHEMA_URL)  # of records, which the courier sends as well
SEVERITIES: Final = {  # of the log data model's examples: what syslog calls critical is ERROR2
    "critical": SeverityNumber.ERROR2,
    "warning": SeverityNumber.WARN,
    "info": SeverityNumber.INFO,
}
INT64: Final = range(-(2**63), 2**63)  # what protobuf holds as an integer


def metrics_data(families: Iterable[Family], resource: Resource, version: str, now: datetime) -> MetricsData:
    """All families at ``now``; ``resource``: who reports them, ``version``: the agent's."""
    scope = InstrumentationScope("notbefore", version, SCHEMA_URL)
    metrics = [_metric(family, _nanoseconds(now)) for family in families]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, SCHEMA_URL)], SCHEMA_URL)])


def log_record(  # noqa: PLR0913, PLR0917 - the fields of a record
    resource: Resource, time: datetime, severity: str, body: str, attributes: Mapping[str, Any], event_name: str
) -> ReadableLogRecord:
    """A record without a trace; observed when it happened, since who reports it is who saw it.

    ``severity``: info, warning or critical.
    """
    record = LogRecord(
        timestamp=_nanoseconds(time),
        observed_timestamp=_nanoseconds(time),
        severity_number=SEVERITIES[severity],
        severity_text=severity,
        body=_value(body),
        attributes=_attributes(attributes),
        event_name=event_name,
    )
    return ReadableLogRecord(record, resource, SCOPE)


def _metric(family: Family, now: int) -> Metric:
    since = _nanoseconds(family.since) if family.since is not None else 0
    points: list[Any] = [_point(family, labels, since, now) for labels in family.samples]  # of one kind in a family
    data: HistogramData | Gauge | Sum
    metric = family.metric
    if metric.kind == "histogram":
        data = HistogramData(points, CUMULATIVE)
    elif metric.kind == "counter":
        data = Sum(points, CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge(points)
    return Metric(metric.name, metric.help, "s" if "seconds" in metric.name.split("_") else "", data)


def _point(family: Family, labels: Labels, since: int, now: int) -> NumberDataPoint | HistogramDataPoint:
    attributes = _attributes(dict(zip(family.metric.labels, labels, strict=True)))
    value = family.samples[labels]
    created = value.created if isinstance(value, Histogram) else family.created.get(labels)
    since = min(round(created * 1e9) if created is not None else since, now)  # the clock may have been set back
    if not isinstance(value, Histogram):
        return NumberDataPoint(attributes, since, now, value)
    counts = list(value.counts)  # once: it may be counted on meanwhile
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=since,
        time_unix_nano=now,
        count=sum(counts),
        sum=value.sum,
        bucket_counts=counts,
        explicit_bounds=value.bounds,
        min=None,  # type: ignore[arg-type]  # optional in OTLP, and not known
        max=None,  # type: ignore[arg-type]  # as above
    )


def agent_resource(vm: Vm | None, version: str, own: Mapping[str, str]) -> Resource:
    """The agent as what reports metrics; ``own``: attributes of the configuration."""
    # `instance` in Prometheus: without it the series of all VMs of a fleet would be one
    instance = (vm.vm_id or vm.name if vm is not None else "") or socket.gethostname()
    known = {name: value for name, value in identity(vm).items() if value} if vm is not None else {}
    return resource_of({"service.version": version, "service.instance.id": instance, **known}, own)


def resource_of(attributes: Mapping[str, Any], own: Mapping[str, str]) -> Resource:
    """Who reports: ``attributes``, then what the ``OTEL_*`` variables say, then the configuration's ``own``."""
    found = Resource(_attributes({"service.name": "notbefore", **attributes}), SCHEMA_URL)
    return found.merge(OTELResourceDetector().detect()).merge(Resource(_attributes(own)))


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value(value) for name, value in values.items()}


def _value(value: Any) -> Any:
    """The value as protobuf can hold it: the SDK leaves out an attribute that it cannot."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, int) and value not in INT64:
        return float(value)
    return [_value(item) for item in value] if isinstance(value, list) else value


def _nanoseconds(time: datetime) -> int:
    """Unix time."""
    return round(time.timestamp() * 1_000_000) * 1_000
