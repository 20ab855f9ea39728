"""The timeline: a line for each event on one scale around its NotBefore, as inline SVG.

Half a minute of a Preempt and a week of failing hardware stand on the same scale, so it is linear near NotBefore and
logarithmic further away. Positions are percentages: nothing is distorted at any width, and no style is needed.
"""

import math
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from notbefore.core.duration import span
from notbefore.web.page.html import Html, tag
from notbefore.web.page.model import PastEvent

LINEAR: Final = 20.0  # seconds around NotBefore that are told apart best
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
THINNEST: Final = 1.0  # percent of an interruption
MARGIN: Final = 2.0  # percent left free at both ends
HEIGHT: Final = 20
MIDDLE: Final = HEIGHT / 2


class Scale(Struct, frozen=True):
    """From so many seconds before NotBefore to so many after."""

    before: int
    after: int

    @classmethod
    def over(cls, lives: Iterable[PastEvent], now: datetime) -> "Scale":
        """The one on which all of them can be drawn: its ends are ticks, so that it seldom changes."""
        offsets = [(time - life.anchor).total_seconds() for life in lives for time in _times(life, now)]
        return cls(_tick(-min(offsets, default=0.0)), _tick(max(offsets, default=0.0)))

    def x(self, seconds: float) -> float:
        """The place of an offset from NotBefore, in percent."""
        low, high = _bent(-self.before), _bent(self.after)
        share = (_bent(seconds) - low) / (high - low)
        return round(MARGIN + (100 - 2 * MARGIN) * min(max(share, 0.0), 1.0), 2)


def _tick(seconds: float) -> int:
    return next((tick for tick, _ in TICKS if tick >= seconds), TICKS[-1][0])


def _bent(seconds: float) -> float:
    return math.copysign(math.log1p(abs(seconds) / LINEAR), seconds)


def _times(life: PastEvent, now: datetime) -> list[datetime]:
    return [time for time in (life.first_seen, life.started, life.gone or now) if time is not None]


def axis(scale: Scale) -> Html:
    """The labels above the lines."""
    parts = [_label(scale.x(0), "NotBefore")]
    for sign, end in ((-1, scale.before), (1, scale.after)):
        last = scale.x(0) + sign * APART  # the word in the middle is twice as wide as the others
        for seconds, text in TICKS:
            x = scale.x(sign * seconds)
            if seconds <= end and abs(x - last) >= APART and (x - last) * sign > 0:
                parts.append(_label(x, ("-" if sign < 0 else "+") + text))
                last = x
    return tag("svg", *parts, class_="axis", width="100%", height=HEIGHT, aria_hidden="true")


def _label(x: float, text: str) -> Html:
    return tag("text", text, x=f"{x}%", y=14, text_anchor="middle")


def line(life: PastEvent, scale: Scale, now: datetime) -> Html:
    """One event: announced, NotBefore, started, the interruption as felt, gone."""

    def x(time: datetime) -> float:
        return scale.x((time - life.anchor).total_seconds())

    end = x(life.gone or now)
    parts = [tag("title", words(life, now)), _bar("ground", 0, 100)]
    parts.append(
        _bar("scheduled" if life.notice is not None else "scheduled unseen", x(life.first_seen), _start(life, end, x))
    )
    if life.started is not None:
        parts.append(_bar("started", x(life.started), end))
        if life.felt:
            # far from NotBefore seconds are too thin to be seen
            felt = max(x(life.started + timedelta(seconds=life.felt)), x(life.started) + THINNEST)
            parts.append(_bar("felt", x(life.started), round(felt, 2)))
    if life.not_before is not None:
        parts.append(_upright("not-before", scale.x(0)))
    if life.notice is not None:
        parts.append(tag("circle", class_="announced", cx=f"{x(life.first_seen)}%", cy=MIDDLE, r=4))
    parts.append(_end(life.outcome, end))
    return tag("svg", *parts, class_="life", role="img", width="100%", height=HEIGHT)


def _start(life: PastEvent, end: float, x: Callable[[datetime], float]) -> float:
    return x(life.started) if life.started is not None else end


def _bar(kind: str, start: float, end: float) -> Html:
    return tag("line", class_=kind, x1=f"{start}%", x2=f"{end}%", y1=MIDDLE, y2=MIDDLE)


def _upright(kind: str, x: float) -> Html:
    return tag("line", class_=kind, x1=f"{x}%", x2=f"{x}%", y1=1, y2=HEIGHT - 1)


def _end(outcome: str | None, x: float) -> Html:
    if outcome is None:
        return tag("circle", class_="now", cx=f"{x}%", cy=MIDDLE, r=3)
    if outcome == "finished":
        return _upright("gone", x)
    return tag("text", "✕" if outcome == "canceled" else "?", class_="gone", x=f"{x}%", y=15, text_anchor="middle")


def words(life: PastEvent, now: datetime) -> str:
    """The line in words."""
    parts = [f"{life.event_type}: seen first {_from_anchor(life, life.first_seen)}"]
    if life.started is not None:
        parts.append(f"started {_from_anchor(life, life.started)}")
    if life.felt is not None:
        parts.append(f"interruption as felt {span(life.felt)}")
    if life.gone is None:
        parts.append(f"now {_from_anchor(life, now)}")
    else:
        known = "gone, nobody saw how" if life.outcome == "unknown" else str(life.outcome)
        parts.append(f"{known} {_from_anchor(life, life.gone)}")
    return ", ".join(parts)


def _from_anchor(life: PastEvent, time: datetime) -> str:
    seconds = (time - life.anchor).total_seconds()
    what = "NotBefore" if life.not_before else "its start" if life.started else "the first sight"
    if abs(seconds) < 1:
        return f"at {what}"
    return f"{span(abs(seconds))} {'before' if seconds < 0 else 'after'} {what}"
