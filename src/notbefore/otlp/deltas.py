"""``Deltas`` turns cumulative values into their differences since the last accepted export."""

from collections.abc import Iterable
from typing import Any, Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData

DELTA: Final = AggregationTemporality.DELTA

Series = tuple[str, tuple[tuple[str, Any], ...]]  # the name of a metric, and the attributes
Point = NumberDataPoint | HistogramDataPoint


class Deltas:
    """Use it in one thread. ``began``: when exports began, in Unix nanoseconds.

    A series that counts since an earlier time was exported by an earlier process: its deltas start
    at its first value here.
    """

    def __init__(self, began: int) -> None:
        self._began = began
        self._accepted: dict[Series, Point] = {}
        self._exported: dict[Series, Point] = {}

    def since_accepted(self, data: MetricsData) -> MetricsData:
        """Return the data as deltas."""
        self._exported = {}
        resources: list[ResourceMetrics] = []
        for resource in data.resource_metrics:
            scopes = self._scopes(resource)
            resources.append(ResourceMetrics(resource.resource, scopes, resource.schema_url))
        return MetricsData(resources)

    def accepted(self) -> None:
        """Note that the receiver accepted what ``since_accepted`` returned last."""
        self._accepted = self._exported

    def _scopes(self, resource: ResourceMetrics) -> list[ScopeMetrics]:
        scopes: list[ScopeMetrics] = []
        for scope in resource.scope_metrics:
            metrics = [self._metric(metric) for metric in scope.metrics]
            scopes.append(ScopeMetrics(scope.scope, metrics, scope.schema_url))
        return scopes

    def _metric(self, metric: Metric) -> Metric:
        data = metric.data
        deltas: Sum | HistogramData
        if isinstance(data, Sum):
            points = self._points(metric.name, data.data_points)
            deltas = Sum(points, DELTA, data.is_monotonic)
        elif isinstance(data, HistogramData):
            points = self._points(metric.name, data.data_points)
            deltas = HistogramData(points, DELTA)
        else:
            return metric  # a gauge has no temporality
        return Metric(metric.name, metric.description, metric.unit, deltas)

    def _points(self, name: str, points: Iterable[Any]) -> list[Any]:
        deltas: list[Any] = []
        for point in points:
            series = (name, tuple(sorted((point.attributes or {}).items())))
            self._exported[series] = point
            before = self._accepted.get(series)
            if before is None and point.start_time_unix_nano < self._began:
                before = point
            if before is None:
                deltas.append(point)
            else:
                deltas.append(_difference(point, before))
        return deltas


def _difference(point: Any, before: Any) -> Any:
    """Return the difference between two values of one series."""
    if isinstance(point, NumberDataPoint):
        if point.value < before.value:  # the series started again
            return point
        return NumberDataPoint(
            attributes=point.attributes,
            start_time_unix_nano=before.time_unix_nano,
            time_unix_nano=point.time_unix_nano,
            value=point.value - before.value,
        )

    if point.count < before.count:
        return point
    counts: list[int] = []
    for now, earlier in zip(point.bucket_counts, before.bucket_counts, strict=True):
        counts.append(now - earlier)
    return HistogramDataPoint(
        attributes=point.attributes,
        start_time_unix_nano=before.time_unix_nano,
        time_unix_nano=point.time_unix_nano,
        count=point.count - before.count,
        sum=point.sum - before.sum,
        bucket_counts=counts,
        explicit_bounds=point.explicit_bounds,
        min=None,  # type: ignore[arg-type]  # optional in OTLP, and not known
        max=None,  # type: ignore[arg-type]  # as above
    )
