"""``Deltas``: cumulative values -> what came since the last accepted export."""

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

Series = tuple[str, tuple[tuple[str, Any], ...]]  # the name of the metric, and the attributes
Point = NumberDataPoint | HistogramDataPoint


class Deltas:
    """For one thread. ``began``: when exports began, in Unix nanoseconds.

    A series that counts since an earlier time was exported by an earlier process: its first value
    here is where its deltas start.
    """

    def __init__(self, began: int) -> None:
        self._began = began
        self._accepted: dict[Series, Point] = {}
        self._exported: dict[Series, Point] = {}

    def of(self, data: MetricsData) -> MetricsData:
        """Return the data as deltas."""
        self._exported = {}
        return MetricsData(
            [
                ResourceMetrics(resource.resource, self._scopes(resource), resource.schema_url)
                for resource in data.resource_metrics
            ]
        )

    def accepted(self) -> None:
        """Note that the receiver accepted what ``of`` returned last."""
        self._accepted = self._exported

    def _scopes(self, resource: ResourceMetrics) -> list[ScopeMetrics]:
        return [
            ScopeMetrics(
                scope.scope, [self._metric(one) for one in scope.metrics], scope.schema_url
            )
            for scope in resource.scope_metrics
        ]

    def _metric(self, metric: Metric) -> Metric:
        data = metric.data
        points: list[Any]
        if isinstance(data, Sum):
            points = self._points(metric.name, data.data_points)
            return Metric(
                metric.name, metric.description, metric.unit, Sum(points, DELTA, data.is_monotonic)
            )
        if isinstance(data, HistogramData):
            points = self._points(metric.name, data.data_points)
            return Metric(
                metric.name, metric.description, metric.unit, HistogramData(points, DELTA)
            )
        return metric  # a gauge has no temporality

    def _points(self, name: str, points: Iterable[Any]) -> list[Any]:
        deltas: list[Any] = []
        for point in points:
            series = (name, tuple(sorted((point.attributes or {}).items())))
            self._exported[series] = point
            before = self._accepted.get(series)
            if before is None and point.start_time_unix_nano < self._began:
                before = point
            deltas.append(point if before is None else _difference(point, before))
        return deltas


def _difference(point: Any, before: Any) -> Any:
    """Return what came between two values of one series."""
    if isinstance(point, NumberDataPoint):
        if point.value < before.value:  # it began again
            return point
        return NumberDataPoint(
            attributes=point.attributes,
            start_time_unix_nano=before.time_unix_nano,
            time_unix_nano=point.time_unix_nano,
            value=point.value - before.value,
        )

    if point.count < before.count:
        return point
    counts = [
        now - earlier
        for now, earlier in zip(point.bucket_counts, before.bucket_counts, strict=True)
    ]
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
