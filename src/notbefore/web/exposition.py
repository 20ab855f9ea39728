"""``MetricsText`` renders families of samples for ``/metrics`` with ``prometheus_client``.

This module is imported at the first scrape. The library's HTTP server and registry of instruments are not used. The
library's ``__init__`` imports them, with OpenSSL and ``email``: 9 MiB. OpenMetrics needs 0.3 MiB, so ``__init__`` is
skipped.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec, module_from_spec
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Final

if (_package := find_spec("prometheus_client")) is not None:
    sys.modules.setdefault("prometheus_client", module_from_spec(_package))

from prometheus_client.metrics_core import Metric as ClientMetric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.utils import floatToGoString

from notbefore.metrics.families import Family, Metric, Part
from notbefore.metrics.totals import Histogram

OPENMETRICS: Final = "application/openmetrics-text;version=1.0.0"  # Prometheus asks for it first
MAX_FORMATS: Final = 4  # whose texts are kept; Prometheus asks for one, but the header may name any version


class MetricsText:
    """Renders the metrics of ``read``, and those of this process (CPU, memory, files). Safe for several threads."""

    def __init__(self, read: Callable[[], Iterable[Part]]) -> None:
        self._read = read
        self._process = ProcessCollector(registry=None)
        self._format = lru_cache(maxsize=MAX_FORMATS)(_Format)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type, as the ``Accept`` header asks: OpenMetrics, or the text format."""
        text = self._format(accept)
        parts = [text.part(number, part) for number, part in enumerate(self._read())]
        return b"".join((*parts, *map(text.family, self._of_process()), text.end)), text.content_type

    def _of_process(self) -> Iterator[Family]:
        for metric in self._process.collect():
            own = Metric(metric.name, metric.type, metric.documentation)
            yield Family(own, {(): metric.samples[0].value})


def _encoder(accept: str) -> tuple[Callable[[Any], bytes], str]:
    """Return the renderer of the format that an ``Accept`` header asks for, and its content type."""
    if accept.replace(" ", "").startswith(OPENMETRICS):
        return openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST
    from prometheus_client.exposition import choose_encoder  # noqa: PLC0415 - the rest of the 9 MiB

    try:
        return choose_encoder(accept)
    except TypeError:  # the header names a version that is not a number
        return choose_encoder("")


def _collected(*metrics: ClientMetric) -> Any:
    """Return a collector for ``prometheus_client``."""
    return SimpleNamespace(collect=lambda: metrics)


class _Format:
    """The format for one ``Accept`` header, and its last texts.

    A part whose values are those of the last scrape keeps its text. A family with the same series keeps its names and
    labels, and gets new values: names and labels are nine tenths of the work of ``prometheus_client``.
    """

    def __init__(self, accept: str) -> None:
        self._encode, self.content_type = _encoder(accept)
        self.end = self._encode(_collected())
        self._parts: dict[int, tuple[object, bytes]] = {}  # by number: the source, and its text
        self._families: dict[str, tuple[object, str]] = {}  # by name: the series, and the text with %s for each value

    def part(self, number: int, part: Part) -> bytes:
        """The text of the families of a part."""
        last = self._parts.get(number)
        if last is None or last[0] != part.source:
            last = self._parts[number] = part.source, b"".join(map(self.family, part.families()))
        return last[1]

    def family(self, family: Family) -> bytes:
        """The text of one family."""
        values, last = family.samples.values(), self._families.get(family.metric.name)
        numbers = [number for value in values for number in _numbers(value)]
        bounds = [value.bounds for value in values if isinstance(value, Histogram)]
        series = (*family.samples, *family.created, *bounds)
        if last is None or last[0] != series:
            text = self._encode(_collected(client_metric(family))).removesuffix(self.end)
            described, typed, *lines = text.decode().replace("%", "%%").split("\n")[:-1]
            if len(lines) != len(numbers):  # it also has times of creation; such families are seldom rendered
                return text
            lines = [f"{line.rpartition(' ')[0]} %s" for line in lines]
            last = self._families[family.metric.name] = series, "\n".join((described, typed, *lines, ""))
        return (last[1] % tuple(map(floatToGoString, numbers))).encode()


def _numbers(value: Any) -> list[float]:
    """The numbers of a value's samples, in the order of ``client_metric``."""
    return [*accumulate(value.counts), sum(value.counts), value.sum] if isinstance(value, Histogram) else [value]


def client_metric(family: Family) -> ClientMetric:
    """Return the family as a metric of ``prometheus_client``."""
    metric, name = family.metric, family.metric.name
    made = ClientMetric(name, metric.help, metric.kind)
    for values, value in family.samples.items():
        labels = dict(zip(metric.labels, values, strict=True))
        series = [(f"{name}_total" if metric.kind == "counter" else name, labels)]
        created = family.created.get(values)
        if isinstance(value, Histogram):
            bounds = (*map(str, value.bounds), "+Inf")
            series = [(f"{name}_bucket", {**labels, "le": bound}) for bound in bounds]
            series += (f"{name}_count", labels), (f"{name}_sum", labels)
            created = value.created
        for sample, number in zip(series, _numbers(value), strict=True):
            made.add_sample(*sample, number)
        if created is not None:
            made.add_sample(f"{name}_created", labels, created)
    return made
