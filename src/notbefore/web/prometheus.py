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
from notbefore.web.recent import INTERVAL, Recent

PrometheusFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | UnknownMetricFamily
Samples = dict[Labels, float | Histogram]
TEXT: Final = ""  # values of the header Accept
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"
END: Final = b"# EOF\n"  # the last line in OpenMetrics
_PLAIN: Final[dict[str, type[CounterMetricFamily | GaugeMetricFamily | UnknownMetricFamily]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "unknown": UnknownMetricFamily,
}


class MetricsText:
    """Renders the families that ``read`` returns, and those of the process (CPU, memory, files).

    Scrapes within half a second share what ``read`` returned, unless ``source`` has changed meanwhile (see ``Recent``).
    Most families are the same as at the last scrape, so their text is kept: rendering is the longest part of a scrape.
    Safe for several threads.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Family]],
        interval: float = INTERVAL,
        source: Callable[[], object] = lambda: None,
    ) -> None:
        self._families = Recent(lambda: list(read()), interval, source)
        self._process = ProcessCollector(registry=None)
        self._formats = {accept: _Format(accept) for accept in (TEXT, OPENMETRICS)}

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics 1.0 if the ``Accept`` header asks for it, else text 0.0.4."""
        form = self._formats[OPENMETRICS if _wants_openmetrics(accept) else TEXT]
        return form.render(self._families.get(), self._process), form.content_type


def _wants_openmetrics(accept: str) -> bool:
    """Whether one of the accepted types is OpenMetrics, of version 1 or of none in particular."""
    for accepted in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in accepted.split(";"))
        versions = [value for name, _, value in (one.partition("=") for one in parameters) if name == "version"]
        if media_type == "application/openmetrics-text" and all(one.startswith("1.") for one in versions):
            return True
    return False


class _Format:
    """One of the two text formats, with the texts of its last scrape by the metric."""

    def __init__(self, accept: str) -> None:
        # not the client's own header: prometheus_client fails on some, and returns a type of its own for each version
        self._encode, self.content_type = choose_encoder(accept)
        self._texts: dict[Metric, tuple[Samples, bytes]] = {}
        self._last: tuple[list[Family], bytes] | None = None  # the families of the last scrape, and its body

    def render(self, families: list[Family], process: Collector) -> bytes:
        """The families and those of the process; the same list has the same body."""
        last = self._last
        if last is None or last[0] is not families:
            texts = [self._text(family) for family in families]
            texts.append(self._encode(_Collected(process.collect())))  # with the end mark
            self._last = last = families, b"".join(texts)
        return last[1]

    def _text(self, family: Family) -> bytes:
        """The family, without the end mark."""
        known = self._texts.get(family.metric)
        if known is not None and known[0] == family.samples:
            return known[1]
        text = self._encode(_Collected([convert(family)])).removesuffix(END)
        self._texts[family.metric] = family.samples, text
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
