"""Samples -> OTLP, computed at the moment of the export. Imported where OTLP is configured.

Each export holds just the series of that moment: a series whose event is gone is gone. Counters and histograms are
cumulative, and say since when they count.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Histogram as OtlpHistogram
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from notbefore.metrics.families import Family
from notbefore.metrics.totals import Histogram, Labels
from notbefore.otlp.names import instrument

CUMULATIVE: Final = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE


def metrics_request(
    families: Iterable[Family], resource: Mapping[str, str], version: str, now: datetime
) -> ExportMetricsServiceRequest:
    """All families as one request; ``resource`` says whose they are."""
    scope = InstrumentationScope(name="notbefore", version=version)
    metrics = [_metric(family, _nanoseconds(now)) for family in families]
    return ExportMetricsServiceRequest(
        resource_metrics=[
            ResourceMetrics(
                resource=Resource(attributes=_attributes(resource)),
                scope_metrics=[ScopeMetrics(scope=scope, metrics=metrics)],
            )
        ]
    )


def _metric(family: Family, now: int) -> Metric:
    since = min(_nanoseconds(family.since), now) if family.since is not None else 0  # the clock may have been set back
    found = instrument(family.metric)
    metric = Metric(name=found.name, description=family.metric.help, unit=found.unit)
    points = [_number(family, labels, value, since, now) for labels, value in _numbers(family)]
    if found.kind == "histogram":
        histograms = [_histogram(family, labels, value, since, now) for labels, value in _histograms(family)]
        metric.histogram.CopyFrom(OtlpHistogram(data_points=histograms, aggregation_temporality=CUMULATIVE))
    elif found.kind == "sum":
        metric.sum.CopyFrom(Sum(data_points=points, aggregation_temporality=CUMULATIVE, is_monotonic=True))
    else:
        metric.gauge.CopyFrom(Gauge(data_points=points))
    return metric


def _numbers(family: Family) -> Iterable[tuple[Labels, float]]:
    return ((labels, value) for labels, value in family.samples.items() if not isinstance(value, Histogram))


def _histograms(family: Family) -> Iterable[tuple[Labels, Histogram]]:
    return ((labels, value) for labels, value in family.samples.items() if isinstance(value, Histogram))


def _number(family: Family, labels: Labels, value: float, since: int, now: int) -> NumberDataPoint:
    return NumberDataPoint(
        attributes=_attributes(dict(zip(family.metric.labels, labels, strict=True))),
        start_time_unix_nano=since if family.metric.kind == "counter" else 0,
        time_unix_nano=now,
        as_double=value,
    )


def _histogram(family: Family, labels: Labels, value: Histogram, since: int, now: int) -> HistogramDataPoint:
    counts = list(value.counts)  # once: it may be counted on meanwhile
    return HistogramDataPoint(
        attributes=_attributes(dict(zip(family.metric.labels, labels, strict=True))),
        start_time_unix_nano=since,
        time_unix_nano=now,
        count=sum(counts),
        sum=value.sum,
        bucket_counts=counts,
        explicit_bounds=value.bounds,
    )


def _attributes(values: Mapping[str, str]) -> list[KeyValue]:
    return [
        KeyValue(key=name, value=AnyValue(string_value=value.encode(errors="replace").decode()))
        for name, value in values.items()
    ]


def _nanoseconds(time: datetime) -> int:
    return round(time.timestamp() * 1_000_000) * 1_000
