"""``Scale``: where the template draws what happened to each event. Positions are percent of the width.

Half a minute of a Preempt and a week of failing hardware stand on the same scale, so it is linear near NotBefore and
logarithmic further away.
"""

import math
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from msgspec import Struct

from notbefore.web.page.model import TimelineEvent

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
MARGIN: Final = 2.0  # percent left free at both ends


class Scale(Struct, frozen=True):
    """From ``before`` seconds before NotBefore to ``after`` seconds after it."""

    before: int
    after: int

    @classmethod
    def over(cls, events: Iterable[TimelineEvent], now: datetime) -> "Scale":
        """The one on which all of them can be drawn. Its ends are ticks, so that it seldom changes."""
        offsets = [
            (time - event.anchor).total_seconds()
            for event in events
            for time in (event.first_seen, event.started, event.ended or now)
            if time is not None
        ]
        return cls(_tick(-min(offsets, default=0.0)), _tick(max(offsets, default=0.0)))

    def x(self, seconds: float) -> float:
        """The position of an offset from NotBefore, in percent."""
        low, high = _compressed(-self.before), _compressed(self.after)
        share = (_compressed(seconds) - low) / (high - low)
        return round(MARGIN + (100 - 2 * MARGIN) * min(max(share, 0.0), 1.0), 2)

    def of(self, event: TimelineEvent, time: datetime, later: float = 0.0) -> float:
        """The position of a moment of an event, or of so many seconds ``later``."""
        return self.x((time - event.anchor).total_seconds() + later)

    @property
    def labels(self) -> list[tuple[float, str]]:
        """Above the lines: where, and the word."""
        labels = [(self.x(0), "NotBefore")]
        for sign, end in ((-1, self.before), (1, self.after)):
            last = self.x(0) + sign * APART  # the word in the middle is twice as wide as the others
            for seconds, text in TICKS:
                x = self.x(sign * seconds)
                if seconds <= end and abs(x - last) >= APART and (x - last) * sign > 0:
                    labels.append((x, ("-" if sign < 0 else "+") + text))
                    last = x
        return labels


def _tick(seconds: float) -> int:
    return next((tick for tick, _ in TICKS if tick >= seconds), TICKS[-1][0])


def _compressed(seconds: float) -> float:
    return math.copysign(math.log1p(abs(seconds) / LINEAR), seconds)
