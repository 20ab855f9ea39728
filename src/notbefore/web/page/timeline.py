"""``Timeline``: where the template draws each event, on one scale around NotBefore. Positions are percent of the width.

Half a minute of a Preempt and a week of failing hardware stand on the same scale, so it is linear near NotBefore and
logarithmic further away.
"""

import math
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from notbefore.core.record import view
from notbefore.web.page.model import PageModel, TimelineEvent

LINEAR: Final = 20.0  # seconds around NotBefore within which the scale is linear
TICKS: Final = (  # seconds
    (60, "1m"),
    (300, "5m"),
    (900, "15m"),
    (3_600, "1h"),
    (21_600, "6h"),
    (86_400, "1d"),
    (604_800, "7d"),
    (2_592_000, "30d"),
)
APART: Final = 9.0  # percent between two labels
THINNEST: Final = 1.0  # percent of an interruption: far from NotBefore seconds are too thin to be seen
MARGIN: Final = 2.0  # percent left free at both ends


class Scale(Struct, frozen=True):
    """From ``before`` seconds before NotBefore to ``after`` seconds after it."""

    before: int
    after: int

    @classmethod
    def over(cls, events: Iterable[TimelineEvent], now: datetime) -> "Scale":
        """The one on which all of them can be drawn. Its ends are ticks, so that it seldom changes."""
        offsets = [(time - event.anchor).total_seconds() for event in events for time in _times(event, now)]
        return cls(_tick(-min(offsets, default=0.0)), _tick(max(offsets, default=0.0)))

    def x(self, seconds: float) -> float:
        """The position of an offset from NotBefore, in percent."""
        low, high = _compressed(-self.before), _compressed(self.after)
        share = (_compressed(seconds) - low) / (high - low)
        return round(MARGIN + (100 - 2 * MARGIN) * min(max(share, 0.0), 1.0), 2)


def _tick(seconds: float) -> int:
    return next((tick for tick, _ in TICKS if tick >= seconds), TICKS[-1][0])


def _compressed(seconds: float) -> float:
    return math.copysign(math.log1p(abs(seconds) / LINEAR), seconds)


def _times(event: TimelineEvent, now: datetime) -> list[datetime]:
    return [time for time in (event.first_seen, event.started, event.ended or now) if time is not None]


class TimelineRow(Struct, frozen=True):
    """An event and the positions of what happened to it; ``None`` where it did not happen."""

    event: TimelineEvent
    first_seen: float
    scheduled_until: float
    started: float | None
    interruption_until: float | None
    not_before: float | None
    end: float  # of an event that is still listed: now


class Timeline(Struct, frozen=True):
    """The pending and the ended events."""

    labels: tuple[tuple[float, str], ...]  # above the lines: where, and the word
    rows: tuple[TimelineRow, ...]

    @classmethod
    def of(cls, model: PageModel) -> "Timeline":
        """The timeline of a page."""
        events = [*(view(TimelineEvent, event) for event in model.shown), *model.ended]
        scale = Scale.over(events, model.now)
        rows = tuple(_row(event, scale, model.now) for event in events)
        return cls(tuple(_labels(scale)), rows)


def _labels(scale: Scale) -> list[tuple[float, str]]:
    labels = [(scale.x(0), "NotBefore")]
    for sign, end in ((-1, scale.before), (1, scale.after)):
        last = scale.x(0) + sign * APART  # the word in the middle is twice as wide as the others
        for seconds, text in TICKS:
            x = scale.x(sign * seconds)
            if seconds <= end and abs(x - last) >= APART and (x - last) * sign > 0:
                labels.append((x, ("-" if sign < 0 else "+") + text))
                last = x
    return labels


def _row(event: TimelineEvent, scale: Scale, now: datetime) -> TimelineRow:
    def x(time: datetime) -> float:
        return scale.x((time - event.anchor).total_seconds())

    end = x(event.ended or now)
    started = x(event.started) if event.started is not None else None
    interruption = None
    if event.started is not None and started is not None and event.interruption_seconds:
        interruption = round(
            max(x(event.started + timedelta(seconds=event.interruption_seconds)), started + THINNEST), 2
        )
    return TimelineRow(
        event=event,
        first_seen=x(event.first_seen),
        scheduled_until=end if started is None else started,
        started=started,
        interruption_until=interruption,
        not_before=scale.x(0) if event.not_before is not None else None,
        end=end,
    )
