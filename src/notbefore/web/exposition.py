"""``MetricsText``: families of samples as ``/metrics``, rendered by ``prometheus_client``.

This module is imported at the first scrape: the library takes 9 MiB, which an agent that nobody scrapes does not pay.
Its own HTTP server and its registry of instruments are not used.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any, Final, NamedTuple

from prometheus_client import Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder

from notbefore.metrics.families import Family, is_named
from notbefore.metrics.totals import Histogram

MAX_FORMATS: Final = 4  # of which texts are kept; Prometheus asks for one, and the header may name any version
# All names here are legal without escaping, so both schemes give the same text; this one in a third fewer instructions
SLOW_SCHEME, FAST_SCHEME = "underscores", "allow-utf-8"


class MetricsText:
    """Renders what ``read`` returns, and the figures of this process (CPU, memory, files).

    A family that equals that of the last scrape keeps its text, which halves the instructions of a scrape. Families
    that ``excluded`` names are left out: by their name, or that of one of their samples. Safe for several threads.
    """

    def __init__(self, read: Callable[[], Iterable[Family]], excluded: Callable[[], Collection[str]] = tuple) -> None:
        self._read = read
        self._excluded = excluded
        self._process = ProcessCollector(registry=None)
        self._kept: dict[str, dict[str, tuple[Family | Metric, bytes]]] = {}  # by content type and name

    def render(self, accept: str, names: Collection[str] = ()) -> tuple[bytes, str]:
        """The body and its content type, as the ``Accept`` header asks: OpenMetrics, or the text format.

        ``names``: of the only families that are asked for, or of their samples; without any, all.
        """
        encode, content_type = _encoder(accept)
        if content_type not in self._kept and len(self._kept) >= MAX_FORMATS:
            self._kept = {}
        kept = self._kept.setdefault(content_type, {})
        end, excluded, texts = encode(_Collected(())), self._excluded(), []
        for name, family in self._families():
            if (excluded and is_named(name, excluded)) or (names and not is_named(name, names)):
                continue
            last = kept.get(name)
            if last is None or (last[0] is not family and last[0] != family):
                metric = _client_metric(family) if isinstance(family, Family) else family
                last = kept[name] = family, encode(_Collected((metric,))).removesuffix(end)
            texts.append(last[1])
        return b"".join((*texts, end)), content_type

    def _families(self) -> Iterator[tuple[str, Family | Metric]]:
        for family in self._read():
            yield family.metric.name, family
        for metric in self._process.collect():
            yield metric.name, metric


class _Collected(NamedTuple):
    """What ``prometheus_client`` calls a collector."""

    metrics: tuple[Metric, ...]

    def collect(self) -> tuple[Metric, ...]:
        return self.metrics


def _encoder(accept: str) -> tuple[Callable[[Any], bytes], str]:
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # a version that is no number
        encode, content_type = choose_encoder("")
    if content_type.endswith(f"={SLOW_SCHEME}"):
        fast: Any = encode
        return lambda collected: fast(collected, escaping=FAST_SCHEME), content_type
    return encode, content_type


def _client_metric(family: Family) -> Metric:
    """The family as one of ``prometheus_client``; its label values are by name."""
    metric, name = family.metric, family.metric.name
    made = Metric(name, metric.help, metric.kind)
    suffix = "_total" if metric.kind == "counter" else ""
    for values, value in family.samples.items():
        labels = dict(zip(metric.labels, values, strict=True))
        if isinstance(value, Histogram):
            counts = list(accumulate(value.counts))
            for bound, count in zip((*map(str, value.bounds), "+Inf"), counts, strict=True):
                made.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
            made.add_sample(f"{name}_count", labels, counts[-1])
            made.add_sample(f"{name}_sum", labels, value.sum)
        else:
            made.add_sample(name + suffix, labels, value)
        created = value.created if isinstance(value, Histogram) else family.created.get(values)
        if created is not None:
            made.add_sample(f"{name}_created", labels, created)
    return made
