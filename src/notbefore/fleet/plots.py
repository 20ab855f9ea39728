"""What the plots of a report show, as positions for the templates. Pure. Positions across are percent of the width."""

import math
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from notbefore.core.document import EVENT_TYPES, PROMISED
from notbefore.fleet.history import PastEvent
from notbefore.fleet.report import KEPT, Report

HEIGHT: Final = 120.0  # units of the plot over time
ROW: Final = 34.0  # units of one row of a distribution
BINS: Final = 72
OTHER: Final = "other"  # a type that Azure has not named yet
DAY: Final = timedelta(days=1)


class Axis(Struct, frozen=True):
    """Seconds on a scale that is linear up to ``linear`` and logarithmic beyond it, from 0 to the last of ``ticks``."""

    linear: float
    ticks: tuple[tuple[float, str], ...]

    def x(self, seconds: float) -> float:
        """The position of so many seconds, in percent; what is longer than the scale stands at its end."""
        share = math.log1p(max(0.0, seconds) / self.linear) / math.log1p(self.ticks[-1][0] / self.linear)
        return round(100.0 * min(share, 1.0), 2)


NOTICE: Final = Axis(
    20.0,
    ((0, "0"), (30, "30s"), (300, "5m"), (900, "15m"), (3_600, "1h"), (21_600, "6h"), (86_400, "1d"), (604_800, "7d")),
)
INTERRUPTION: Final = Axis(
    1.0, ((0, "0"), (1, "1s"), (5, "5s"), (30, "30s"), (120, "2m"), (600, "10m"), (3_600, "1h"), (21_600, "6h"))
)


class Bar(Struct, frozen=True):
    """A rectangle, with what it says. ``kind``: the type of the events, in lower case."""

    kind: str
    x: float
    width: float
    y: float
    height: float
    text: str


class Row(Struct, frozen=True):
    """The distribution of what the VMs measured of one type of event; ``mark``: where the promise is."""

    event_type: str
    vms: int
    bars: tuple[Bar, ...]
    mark: float | None = None
    short: int | None = None  # VMs that had less than the promise


class Course(Struct, frozen=True):
    """How many events there were over time; ``labels``: position and text."""

    bars: tuple[Bar, ...]
    labels: tuple[tuple[float, str], ...]
    greatest: int
    kinds: tuple[str, ...]  # of the events, as words


def course(report: Report) -> Course:
    """The events of each day, week or month, by their type."""
    days = (report.until - report.since) / DAY
    step = DAY if days <= 31 else 7 * DAY if days <= 400 else 30 * DAY  # noqa: PLR2004 - what fits side by side
    count = max(1, math.ceil((report.until - report.since) / step))
    found: list[Counter[str]] = [Counter() for _ in range(count)]
    for event in report.events:
        found[min(count - 1, int((event.closed - report.since) / step))][kind_of(event.event_type)] += 1
    greatest = max((sum(one.values()) for one in found), default=0)
    width = 100.0 / count
    kinds = [kind for kind in (*EVENT_TYPES, OTHER) if any(one[kind] for one in found)]
    bars = []
    for place, one in enumerate(found):
        begin = report.since + place * step
        top = HEIGHT
        for kind in kinds:
            if one[kind]:
                height = HEIGHT * one[kind] / greatest
                top -= height
                text = f"{one[kind]} {kind}, {_span(begin, min(begin + step, report.until))}"
                bars.append(
                    Bar(
                        kind.lower(),
                        round(place * width, 2),
                        round(width * 0.82, 2),
                        round(top, 2),
                        round(height, 2),
                        text,
                    )
                )
    every = max(1, math.ceil(count / 6))
    labels = [
        (round((place + 0.41) * width, 2), f"{report.since + place * step:%d %b}") for place in range(0, count, every)
    ]
    return Course(tuple(bars), tuple(labels), greatest, tuple(kinds))


def _span(begin: datetime, end: datetime) -> str:
    return f"{begin:%Y-%m-%d}" if end - begin <= DAY else f"{begin:%Y-%m-%d} to {end:%Y-%m-%d}"


def notices(report: Report) -> list[Row]:
    """The notice that affected VMs had, a row a type."""
    rows = []
    for event_type, events in _by_type(report):
        values = [one.notice for event in events for one in event.measured if one.notice is not None]
        promised = PROMISED.get(event_type)
        short = sum(one < KEPT * promised for one in values) if promised is not None else None
        mark = NOTICE.x(promised) if promised is not None else None
        if values:
            rows.append(Row(event_type, len(values), _bars(event_type, values, NOTICE), mark, short))
    return rows


def interruptions(report: Report) -> list[Row]:
    """The interruption that affected VMs measured, a row a type."""
    rows = []
    for event_type, events in _by_type(report):
        values = [one.interruption for event in events for one in event.measured if one.interruption is not None]
        if values:
            rows.append(Row(event_type, len(values), _bars(event_type, values, INTERRUPTION)))
    return rows


def kind_of(event_type: str) -> str:
    """The type, or ``other``: a plot has a bounded number of colours."""
    return event_type if event_type in EVENT_TYPES else OTHER


def _by_type(report: Report) -> Iterable[tuple[str, list[PastEvent]]]:
    found: dict[str, list[PastEvent]] = {}
    for event in report.events:
        found.setdefault(event.event_type, []).append(event)
    return sorted(found.items())


def _bars(event_type: str, values: list[float], axis: Axis) -> tuple[Bar, ...]:
    width = 100.0 / BINS
    found = Counter(min(BINS - 1, int(axis.x(value) / width)) for value in values)
    greatest = max(found.values())
    # one VM beside a thousand is still to be seen
    heights = {place: max(2.0, (ROW - 2) * count / greatest) for place, count in found.items()}
    return tuple(
        Bar(
            kind_of(event_type).lower(),
            round(place * width, 2),
            round(width * 0.9, 2),
            round(ROW - heights[place], 2),
            round(heights[place], 2),
            f"{found[place]} {'VM' if found[place] == 1 else 'VMs'}",
        )
        for place in sorted(found)
    )
