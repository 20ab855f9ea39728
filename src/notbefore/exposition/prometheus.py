"""Samples -> the text formats of Prometheus, computed at the moment of the scrape."""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from notbefore.events.samples import Family
from notbefore.events.totals import Histogram

PrometheusFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | UnknownMetricFamily
_PLAIN: Final[dict[str, type[CounterMetricFamily | GaugeMetricFamily | UnknownMetricFamily]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "unknown": UnknownMetricFamily,
}


class Exposition:
    """Renders the families that ``read`` gives at each scrape, and those of the process (CPU, memory, files)."""

    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SamplesCollector(read))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics if the ``Accept`` header asks for it, else text 0.0.4."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _SamplesCollector(Collector):
    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read

    def describe(self) -> Iterable[PrometheusFamily]:
        return ()  # without it the registry would collect once at registration, before there is anything

    def collect(self) -> Iterator[PrometheusFamily]:
        for family in self._read():
            yield convert(family)


def convert(family: Family) -> PrometheusFamily:
    """The same in prometheus_client's terms: the names as they are served."""
    metric = family.metric
    if metric.kind == "histogram":
        return _histogram(family)
    converted = _PLAIN[metric.kind](metric.name, metric.help, labels=metric.labels)
    for labels, value in family.samples.items():
        if not isinstance(value, Histogram):
            converted.add_metric(labels, value)
    return converted


def _histogram(family: Family) -> HistogramMetricFamily:
    converted = HistogramMetricFamily(family.metric.name, family.metric.help, labels=family.metric.labels)
    for labels, histogram in family.samples.items():
        if isinstance(histogram, Histogram):
            bounds = [*map(str, histogram.bounds), "+Inf"]
            converted.add_metric(labels, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum)
    return converted
