"""``render`` makes HTML from a ``PageModel`` with the Jinja2 templates beside this file.

The whole page is rendered each time; ``page.js`` replaces the parts that differ. It recognizes rows
by their ``data-key`` and leaves elements with ``data-keep`` alone. ``Scale`` gives the positions on
each event's timeline.
"""

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from msgspec import Struct

from notbefore.core.document import STARTED
from notbefore.core.duration import Duration, span
from notbefore.core.text import escaped
from notbefore.web.page.model import PageModel, TimelineEvent
from notbefore.wording.page import affected, time_of_day

TEMPLATES: Final = Path(__file__).with_name("templates")
LINEAR: Final = 20.0  # seconds around NotBefore within which the scale is linear
TICKS: Final = tuple(
    (int(Duration(text).seconds), text)
    for text in ("1m", "5m", "15m", "1h", "6h", "1d", "7d", "30d")
)
APART: Final = 9.0  # percent between two labels
MARGIN: Final = 2.0  # percent left free at both ends


def render(model: PageModel) -> bytes:
    """The whole page, in UTF-8."""
    listed = [TimelineEvent.of(event) for event in model.shown]
    lives = [*listed, *model.ended]
    scale = Scale.over(lives, model.now)
    page = template("page.html").render(
        model=model, now=model.now, lives=lives, scale=scale, STARTED=STARTED
    )
    return page.encode(errors="replace")  # a file name may contain bytes that are not text


@cache
def template(name: str, *directories: Path) -> Template:
    """A template from these directories or from those beside this file.

    All values are made safe for HTML.
    """
    environment = Environment(
        loader=FileSystemLoader([*directories, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "affected": affected,
        "span": span,
        "time_of_day": time_of_day,
        "timer": timer,
        "utc": _utc,
    }
    return environment.get_template(name)


def _visible(value: Any) -> Any:
    r"""Make invisible characters of a value visible, as ``\u202e``. Jinja2 escapes the rest."""
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def timer(seconds: float) -> str:
    """``9:05``, ``1:02:03``, ``6d 01:02:03``, without a sign. ``page.js`` has the same function."""
    days, rest = divmod(int(abs(seconds)), 86_400)
    hours, minutes, left = rest // 3600, rest // 60 % 60, rest % 60
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}:{left:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def _utc(time: datetime, form: str) -> str:
    return time.astimezone(UTC).strftime(form)


class Scale(Struct, frozen=True):
    """A scale from ``before`` seconds before NotBefore to ``after`` seconds after it.

    Positions are percents of width.

    The half minute of a Preempt and a week of failing hardware share one scale, so it is linear
    near NotBefore and logarithmic further away.
    """

    before: int
    after: int

    @classmethod
    def over(cls, events: Iterable[TimelineEvent], now: datetime) -> "Scale":
        """The scale that has room for all these events.

        Its ends are ticks, so that it seldom changes.
        """
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
        """The position, in percent, of a moment of an event, or of ``later`` seconds after it."""
        return self.x((time - event.anchor).total_seconds() + later)

    @property
    def labels(self) -> list[tuple[float, str]]:
        """The labels above the lines: position in percent, and text."""
        labels = [(self.x(0), "NotBefore")]
        for sign, end in ((-1, self.before), (1, self.after)):
            # the label in the middle is twice as wide as the others
            last = self.x(0) + sign * APART
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
