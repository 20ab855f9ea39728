"""``render`` writes families of samples as ``/metrics``, with ``prometheus_client``.

Import this module at the first scrape: the library takes 8 MiB.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Sample,
)
from prometheus_client.core import Metric as ClientMetric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from notbefore.metrics.families import Family
from notbefore.metrics.totals import Histogram

TEXT_RANGES: Final = ("text/plain", "text/*", "*/*")  # formats of ``Accept`` that text satisfies

_PROCESS: Final = ProcessCollector(registry=None)  # CPU, memory and files of this process


class FamilyCollector(Collector):
    """Hands the families of one scrape, and the ``process_*`` metrics, to ``prometheus_client``."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[ClientMetric]:
        """Yield every metric of the scrape."""
        for family in self._families:
            yield client_metric(family)
        yield from _PROCESS.collect()


def render(families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """Return the body and its content type: OpenMetrics or text, as ``Accept`` asks."""
    try:
        encode, content_type = choose_encoder(preferred(accept))
    except TypeError:  # the header names a version that is not a number
        encode, content_type = choose_encoder("")
    return encode(FamilyCollector(families)), content_type


def preferred(accept: str) -> str:
    """Return the header ``Accept`` without the refused formats, the preferred format first.

    ``choose_encoder`` takes the first format that it knows, and ignores the weights (``q``).
    """
    weights: dict[str, float] = {}
    for media_range in accept.split(","):
        weights[media_range] = _weight(media_range)
    accepted = [media_range for media_range, weight in weights.items() if weight > 0]
    accepted.sort(key=weights.__getitem__, reverse=True)

    for count, media_range in enumerate(accepted, start=1):
        if media_range.partition(";")[0].strip() in TEXT_RANGES:
            return ",".join(accepted[:count])  # the client prefers text to the formats after it
    return ",".join(accepted)


def _weight(media_range: str) -> float:
    """Return how much a client prefers a format, from 0 (not accepted) to 1."""
    for parameter in media_range.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def client_metric(family: Family) -> ClientMetric:
    """Return the family as a metric of ``prometheus_client``."""
    if family.metric.kind == "histogram":
        return _histogram(family)
    if family.metric.kind == "counter":
        return _counter(family)
    return _gauge(family)


def _gauge(family: Family) -> GaugeMetricFamily:
    metric = family.metric
    gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, number in family.samples.items():
        gauge.add_metric(labels, number)
    return gauge


def _counter(family: Family) -> CounterMetricFamily:
    metric = family.metric
    counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, number in family.samples.items():
        counter.add_metric(labels, number, created=family.created.get(labels))
    return counter


def _histogram(family: Family) -> HistogramMetricFamily:
    metric = family.metric
    client = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, histogram in family.samples.items():
        client.add_metric(labels, _buckets(histogram), histogram.sum)
        if histogram.created is not None:
            # ``add_metric`` of a histogram takes no time of creation
            names = dict(zip(metric.labels, labels, strict=True))
            client.samples.append(Sample(f"{metric.name}_created", names, histogram.created))
    return client


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the upper bound of each bucket with the number of observations up to it."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((str(bound), total))
    return buckets
