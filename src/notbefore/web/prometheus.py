"""``MetricsText``: families of samples as the text formats of Prometheus."""

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
END: Final = b"# EOF\n"  # the last line in OpenMetrics
_PLAIN: Final[dict[str, type[CounterMetricFamily | GaugeMetricFamily | UnknownMetricFamily]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "unknown": UnknownMetricFamily,
}


class MetricsText:
    """Renders the families that ``read`` returns, and those of the process (CPU, memory, files).

    Most families are the same as at the last scrape, so their text is kept: rendering is the longest part of a scrape.
    Safe for several threads.
    """

    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read
        self._process = ProcessCollector(registry=None)
        self._cache = _TextCache("")

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics if the ``Accept`` header asks for it, else text 0.0.4."""
        encode, content_type = choose_encoder(accept)
        cache = self._cache
        if cache.content_type != content_type:  # of one type only: a client may ask for any version
            self._cache = cache = _TextCache(content_type)
        texts = [cache.text(encode, family) for family in self._read()]
        # the last one keeps its end mark
        texts.append(encode(_Collected(self._process.collect())))
        return b"".join(texts), content_type


class _TextCache:
    """The texts of the last scrape in one format, by the metric."""

    def __init__(self, content_type: str) -> None:
        self.content_type = content_type
        self._texts: dict[Metric, tuple[Samples, bytes]] = {}

    def text(self, encode: Encoder, family: Family) -> bytes:
        """The family in this format, without the end mark."""
        samples = family.samples
        known = self._texts.get(family.metric)
        if known is not None and known[0] == samples:
            return known[1]
        text = encode(_Collected([convert(family)])).removesuffix(END)
        self._texts[family.metric] = samples, text
        return text


class _Collected(Collector):
    """The families in the form that an encoder expects."""

    def __init__(self, families: Iterable[PrometheusMetric]) -> None:
        self._families = families

    def collect(self) -> Iterable[PrometheusMetric]:
        return self._families


def convert(family: Family) -> PrometheusFamily:
    """The family as one of prometheus_client's."""
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
