"""Samples -> the text formats of Prometheus, computed at the moment of the scrape."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final

from prometheus_client import Metric as PrometheusMetric
from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from notbefore.metrics.families import Family, Metric
from notbefore.metrics.totals import Histogram, Labels

PrometheusFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | UnknownMetricFamily
Samples = dict[Labels, float | Histogram]
Encoder = Callable[[Collector], bytes]
END: Final = b"# EOF\n"  # of a body in OpenMetrics
_PLAIN: Final[dict[str, type[CounterMetricFamily | GaugeMetricFamily | UnknownMetricFamily]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "unknown": UnknownMetricFamily,
}


class MetricsText:
    """Renders the families that ``read`` gives at each scrape, and those of the process (CPU, memory, files).

    Most of them are as they were at the last scrape, and their text is kept: making it is what a scrape takes longest
    for. May be called from several threads.
    """

    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read
        self._process = ProcessCollector(registry=None)
        self._kept = _Kept("")

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics if the ``Accept`` header asks for it, else text 0.0.4."""
        encode, content_type = choose_encoder(accept)
        kept = self._kept
        if kept.content_type != content_type:  # only the last one asked for: a client may ask for any version
            self._kept = kept = _Kept(content_type)
        texts = [kept.text(encode, family) for family in self._read()]
        # the only one with an end: OpenMetrics marks it
        texts.append(encode(_Collected(self._process.collect())))
        return b"".join(texts), content_type


class _Kept:
    """The texts of the last scrape in one format, by the metric."""

    def __init__(self, content_type: str) -> None:
        self.content_type = content_type
        self._texts: dict[Metric, tuple[Samples, bytes]] = {}

    def text(self, encode: Encoder, family: Family) -> bytes:
        """The family in that format, without a mark of the end."""
        samples = _copy(family.samples)  # the agent counts on, and is not to change what was rendered
        known = self._texts.get(family.metric)
        if known is not None and known[0] == samples:
            return known[1]
        text = encode(_Collected([convert(Family(family.metric, samples))])).removesuffix(END)
        self._texts[family.metric] = samples, text
        return text


class _Collected(Collector):
    """What an encoder takes: something to collect from."""

    def __init__(self, families: Iterable[PrometheusMetric]) -> None:
        self._families = families

    def collect(self) -> Iterable[PrometheusMetric]:
        return self._families


def _copy(samples: Samples) -> Samples:
    return {
        labels: Histogram(value.bounds, list(value.counts), value.sum) if isinstance(value, Histogram) else value
        for labels, value in samples.items()
    }


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
