"""``MetricsText``: families of samples as the text formats of Prometheus, text 0.0.4 and OpenMetrics 1.0.

The text is, byte for byte, that of ``prometheus_client`` (a test compares them). That library is not used here: to
import it costs 1.3 MiB, and it makes the whole text anew for each scrape.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from notbefore.metrics.families import Block, Family, Metric
from notbefore.metrics.totals import Histogram, Labels
from notbefore.web.own_process import OwnProcess
from notbefore.web.recent import INTERVAL, Recent

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
END: Final = b"# EOF\n"  # the last line in OpenMetrics
LONGEST_INTEGER: Final = 6  # digits; Go writes an exponent from there on


class MetricsText:
    """Renders the families of the blocks that ``read`` returns, and those of the process (CPU, memory, files).

    Scrapes within half a second share what ``read`` returned, unless ``source`` has changed meanwhile (see ``Recent``).
    Most blocks are the same as at the last scrape, so their text is kept, and their samples are not computed. Families
    that ``excluded`` names are left out: by their name, or that of one of their samples. Safe for several threads.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Block]],
        interval: float = INTERVAL,
        source: Callable[[], object] = lambda: None,
        excluded: Callable[[], Collection[str]] = tuple,
    ) -> None:
        process = OwnProcess()
        self._blocks = Recent(lambda: [*read(), Block(object(), process.families)], interval, source)
        self._excluded = excluded
        self._formats = {form: _Format(openmetrics=form == OPENMETRICS) for form in (TEXT, OPENMETRICS)}

    def render(self, accept: str, names: Collection[str] = ()) -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics 1.0 if the ``Accept`` header asks for it, else text 0.0.4.

        ``names``: of the only families that are asked for, or of their samples; without any, all.
        """
        content_type = OPENMETRICS if _wants_openmetrics(accept) else TEXT
        form, blocks, excluded = self._formats[content_type], self._blocks.get(), self._excluded()
        if names:
            families = (family for block in blocks for family in block.families())
            body = form.text(family for family in families if family.metric.is_in(names)) + form.end
        else:
            body = form.render(blocks, excluded)
        return body, content_type


def _wants_openmetrics(accept: str) -> bool:
    """Whether one of the accepted types is OpenMetrics, of version 1 or of none in particular."""
    for accepted in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in accepted.split(";"))
        versions = [value for name, _, value in (one.partition("=") for one in parameters) if name == "version"]
        if media_type == "application/openmetrics-text" and all(one.startswith("1.") for one in versions):
            return True
    return False


class _Scrape(NamedTuple):
    """What one scrape was answered."""

    blocks: list[Block]
    excluded: Collection[str]
    texts: list[bytes]  # of the blocks
    body: bytes


def _kept(last: _Scrape, blocks: list[Block]) -> Iterator[bytes | None]:
    """For each block its text of the last scrape, if it is computed from the same values."""
    for place, block in enumerate(blocks):
        same = place < len(last.blocks) and last.blocks[place].source == block.source
        yield last.texts[place] if same else None


def _without(families: Iterable[Family], excluded: Collection[str]) -> Iterator[Family]:
    return (family for family in families if not (excluded and family.metric.is_in(excluded)))


class _Format:
    """One of the two text formats, with the texts of the blocks of its last scrape."""

    def __init__(self, *, openmetrics: bool) -> None:
        self._openmetrics = openmetrics
        self.end = END if openmetrics else b""
        self._last: _Scrape | None = None

    def render(self, blocks: list[Block], excluded: Collection[str]) -> bytes:
        """All families that are not excluded; the same list has the same body."""
        last = self._last
        if last is None or last.excluded != excluded:
            last = _Scrape([], excluded, [], b"")
        if last.blocks is not blocks:
            texts = [
                text if text is not None else self.text(_without(block.families(), excluded))
                for block, text in zip(blocks, _kept(last, blocks), strict=True)
            ]
            self._last = last = _Scrape(blocks, excluded, texts, b"".join((*texts, self.end)))
        return last.body

    def text(self, families: Iterable[Family]) -> bytes:
        """The families, without the end mark."""
        return "".join(line for family in families for line in self._lines(family)).encode()

    def _lines(self, family: Family) -> Iterator[str]:
        metric, openmetrics = family.metric, self._openmetrics
        yield _head(metric, openmetrics=openmetrics)
        created = []
        for labels, value in family.samples.items():
            yield _sample(metric, labels, value)
            since = value.created if isinstance(value, Histogram) else family.created.get(labels)
            if since is not None:
                line = f"{metric.name}_created{_labels(metric.labels, labels)} {_number(since)}\n"
                if openmetrics:
                    yield line
                else:
                    created.append(line)
        if created:  # that format has no such samples: they are a family of their own
            yield f"# HELP {metric.name}_created {_escaped(metric.help)}\n# TYPE {metric.name}_created gauge\n"
            yield from created


@lru_cache(maxsize=128)  # there are fewer families, in two formats
def _head(metric: Metric, *, openmetrics: bool) -> str:
    name, kind, text = metric.name, str(metric.kind), _escaped(metric.help)
    if openmetrics:
        text = text.replace('"', r"\"")
    elif kind == "counter":
        name = f"{name}_total"
    elif kind == "unknown":
        kind = "untyped"
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _sample(metric: Metric, labels: Labels, value: float | Histogram) -> str:
    name, known = metric.name, _labels(metric.labels, labels)
    if not isinstance(value, Histogram):
        return (
            f"{name}_total{known} {_number(value)}\n"
            if metric.kind == "counter"
            else f"{name}{known} {_number(value)}\n"
        )
    counts = list(accumulate(value.counts))
    places = _buckets(metric, labels, value.bounds)
    buckets = "".join([f"{place} {_number(float(count))}\n" for place, count in zip(places, counts, strict=True)])
    return f"{buckets}{name}_count{known} {_number(float(counts[-1]))}\n{name}_sum{known} {_number(value.sum)}\n"


@lru_cache(maxsize=32)
def _buckets(metric: Metric, labels: Labels, bounds: tuple[float, ...]) -> list[str]:
    """The buckets of a histogram by name and labels."""
    names = (*metric.labels, "le")
    return [f"{metric.name}_bucket{_labels(names, (*labels, bound))}" for bound in (*map(str, bounds), "+Inf")]


@lru_cache(maxsize=256)  # those of the families that are computed at each scrape
def _labels(names: Labels, values: Labels) -> str:
    """``{a="1",b="2"}``, by name; nothing without labels."""
    if not names:
        return ""
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join([f'{name}="{_quoted(value)}"' for name, value in pairs]) + "}"


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    """As Go writes it: with an exponent from ten million on, and its own words for what is no number."""
    text = repr(value)
    point = text.find(".")
    if point > LONGEST_INTEGER and value > 0:
        return f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0.") + f"e+{point - 1:02d}"
    return _WORDS.get(text, text)


_WORDS: Final = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
