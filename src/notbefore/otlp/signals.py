"""Families and records as the values that OpenTelemetry's SDK exports.

They are made here, and not by the SDK's instruments, so that ``metrics.families`` is the only
definition of a metric. Names and labels are those of ``/metrics``, also after OTLP is translated
for Prometheus. Each export contains the series of its moment; it has no series for an event that is
gone.

Imported only if OTLP is configured.
"""

import socket
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

# OpenTelemetry for Python has no other modules for logs: the underscore says that they may change
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
from opentelemetry.sdk.version import __version__ as sdk_version

from notbefore import __version__
from notbefore.core.record import Vm, resource_attributes
from notbefore.metrics.families import Family
from notbefore.metrics.totals import Histogram, Labels

CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
# the semantic conventions whose names are used
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
# of records; that of metrics is made in ``metrics_data``
SCOPE: Final = InstrumentationScope("notbefore", __version__, SCHEMA_URL)
# the part of the resource that names who made the telemetry
SDK: Final = {
    "telemetry.sdk.language": "python",
    "telemetry.sdk.name": "opentelemetry",
    "telemetry.sdk.version": sdk_version,
}
# a unit in braces is an annotation: translated for Prometheus, it does not change the name
UNITS_OF_COUNTS: Final = {
    "azure_scheduled_event_approvals": "{approval}",
    "azure_scheduled_event_changes": "{change}",
    "azure_scheduled_event_resources": "{vm}",
    "azure_scheduled_events_pending": "{event}",
    "notbefore_config_reloads": "{reload}",
    "notbefore_courier_starts": "{start}",
    "notbefore_deliveries": "{delivery}",
    "notbefore_documents_rejected": "{document}",
    "notbefore_event_flaws": "{flaw}",
    "notbefore_http_auth_failures": "{request}",
    "notbefore_otlp_exports": "{export}",
    "notbefore_outbox_deliveries": "{delivery}",
    "notbefore_polls": "{poll}",
    "notbefore_store_damaged_files": "{file}",
    "notbefore_unforeseen_errors": "{error}",
}
SEVERITY_NUMBERS: Final = {  # from the examples of the log data model: syslog's critical is ERROR2
    "critical": SeverityNumber.ERROR2,
    "warning": SeverityNumber.WARN,
    "info": SeverityNumber.INFO,
}
INT64: Final = range(-(2**63), 2**63)  # the integers of protobuf


def metrics_data(
    families: Iterable[Family], resource: Resource, version: str, now: datetime
) -> MetricsData:
    """Return all families at ``now``.

    ``resource`` reports them; ``version``: the agent's version.
    """
    scope = InstrumentationScope("notbefore", version, SCHEMA_URL)
    metrics = [_metric(family, _nanoseconds(now)) for family in families]
    scope_metrics = ScopeMetrics(scope, metrics, SCHEMA_URL)
    return MetricsData([ResourceMetrics(resource, [scope_metrics], SCHEMA_URL)])


def log_record(  # noqa: PLR0917 - the fields of a record
    resource: Resource,
    time: datetime,
    severity: str,
    body: str,
    attributes: Mapping[str, Any],
    event_name: str,
) -> ReadableLogRecord:
    """Return a log record without a trace.

    It is observed at its own time, because the agent that reports it has seen it. ``severity``:
    info, warning or critical.
    """
    record = LogRecord(
        timestamp=_nanoseconds(time),
        observed_timestamp=_nanoseconds(time),
        severity_number=SEVERITY_NUMBERS[severity],
        severity_text=severity,
        body=_value(body),
        attributes=_attributes(attributes),
        event_name=event_name,
    )
    return ReadableLogRecord(record, resource, SCOPE)


def _metric(family: Family, now: int) -> Metric:
    since = 0
    if family.since is not None:
        since = _nanoseconds(family.since)
    # all points of a family are of one kind
    points: list[Any] = [_point(family, labels, since, now) for labels in family.samples]
    data: HistogramData | Gauge | Sum
    metric = family.metric
    if metric.kind == "histogram":
        data = HistogramData(points, CUMULATIVE)
    elif metric.kind == "counter":
        data = Sum(points, CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge(points)
    return Metric(metric.name, metric.help, unit_of(metric.name), data)


def unit_of(name: str) -> str:
    """Return the unit of a metric; empty for a number that measures nothing, such as a state."""
    if "seconds" in name.split("_"):
        return "s"
    return UNITS_OF_COUNTS.get(name, "")


def _point(
    family: Family, labels: Labels, since: int, now: int
) -> NumberDataPoint | HistogramDataPoint:
    attributes = _attributes(dict(zip(family.metric.labels, labels, strict=True)))
    value = family.samples[labels]
    created = family.created.get(labels)
    if isinstance(value, Histogram):
        created = value.created
    start = since
    if created is not None:
        start = round(created * 1e9)
    start = min(start, now)  # the clock may have been set back

    if not isinstance(value, Histogram):
        return NumberDataPoint(attributes, start, now, value)
    counts = list(value.counts)  # one copy for both uses: another thread may increase them
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=start,
        time_unix_nano=now,
        count=sum(counts),
        sum=value.sum,
        bucket_counts=counts,
        explicit_bounds=value.bounds,
        min=None,  # type: ignore[arg-type]  # optional in OTLP, and not known
        max=None,  # type: ignore[arg-type]  # as above
    )


def agent_resource(vm: Vm | None, version: str, configured: Mapping[str, str]) -> Resource:
    """Return the agent as the resource that reports metrics.

    ``configured``: attributes from the configuration.
    """
    vm_attributes: dict[str, str] = {}
    instance = ""
    if vm is not None:
        vm_attributes = {name: value for name, value in resource_attributes(vm).items() if value}
        instance = vm.vm_id or vm.name
    attributes = {
        "service.version": version,
        # `instance` in Prometheus: without it, all VMs of a fleet would share one series
        "service.instance.id": instance or socket.gethostname(),
        **vm_attributes,
    }
    return resource_of(attributes, configured)


def resource_of(attributes: Mapping[str, Any], configured: Mapping[str, str]) -> Resource:
    """Return a resource with these attributes.

    The ``OTEL_*`` variables replace them, and the attributes of the configuration replace both.
    """
    defaults = {**SDK, "service.name": "notbefore", **attributes}
    resource = Resource(_attributes(defaults), SCHEMA_URL)
    resource = resource.merge(OTELResourceDetector().detect())
    return resource.merge(Resource(_attributes(configured)))


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value(value) for name, value in values.items()}


def _value(value: Any) -> Any:
    """Return the value in a form that protobuf can hold; the SDK leaves out all others."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, int) and value not in INT64:
        return float(value)
    if isinstance(value, list):
        return [_value(item) for item in value]
    return value


def _nanoseconds(time: datetime) -> int:
    """Return Unix nanoseconds. The time is exact to the microsecond, a float is to no more."""
    return round(time.timestamp() * 1_000_000) * 1_000
