"""``MetricsText``: families of samples as ``/metrics``, rendered by ``prometheus_client``.

This module is imported at the first scrape: the library takes 9 MiB, which an agent that nobody scrapes does not pay.
Its own HTTP server and its registry of instruments are not used.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

from prometheus_client import Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder

from notbefore.metrics.families import Family, Part
from notbefore.metrics.totals import Histogram

MAX_FORMATS: Final = 4  # of which texts are kept; Prometheus asks for one, and the header may name any version
# All names here are legal without escaping, so both schemes give the same text; this one in a third fewer instructions
SLOW_SCHEME, FAST_SCHEME = "underscores", "allow-utf-8"


class MetricsText:
    """Renders what ``read`` returns, and the figures of this process (CPU, memory, files). Safe for several threads.

    What is computed from the same values as at the last scrape keeps its text.
    """

    def __init__(self, read: Callable[[], Iterable[Part]]) -> None:
        self._read = read
        self._process = ProcessCollector(registry=None)
        self._kept: dict[str, dict[int, tuple[object, bytes]]] = {}  # by format and number: the source, and its text

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type, as the ``Accept`` header asks: OpenMetrics, or the text format."""
        encode, content_type, end = _encoder(accept)
        if content_type not in self._kept and len(self._kept) >= MAX_FORMATS:
            self._kept = {}
        kept, texts = self._kept.setdefault(content_type, {}), []
        parts: list[Part | Metric] = [*self._read(), *self._process.collect()]
        for number, part in enumerate(parts):
            source = part.source if isinstance(part, Part) else part
            last = kept.get(number)
            if last is None or last[0] != source:
                made: Iterable[Metric] = map(client_metric, part.families()) if isinstance(part, Part) else (part,)
                last = kept[number] = source, encode(_Collected(list(made))).removesuffix(end)
            texts.append(last[1])
        return b"".join((*texts, end)), content_type


class _Collected(NamedTuple):
    """What ``prometheus_client`` calls a collector."""

    metrics: list[Metric]

    def collect(self) -> list[Metric]:
        return self.metrics


@lru_cache(maxsize=MAX_FORMATS)
def _encoder(accept: str) -> tuple[Callable[[Any], bytes], str, bytes]:
    """What renders, the content type, and what ends a text."""
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # a version that is no number
        encode, content_type = choose_encoder("")
    if content_type.endswith(f"={SLOW_SCHEME}"):
        slow: Any = encode
        encode = partial(slow, escaping=FAST_SCHEME)
    return encode, content_type, encode(_Collected([]))


def client_metric(family: Family) -> Metric:
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
