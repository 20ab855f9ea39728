"""``render`` makes HTML from a ``PageModel`` with the Jinja2 templates next to this file.

The whole page is rendered each time. In the browser, ``page.js`` replaces the parts that differ. It
identifies rows by their ``data-key``, and does not touch elements with ``data-keep``. ``Scale``
gives the positions on the timeline.
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
# labels of the scale, and the ends that it may have; in seconds from NotBefore
TICKS: Final = {
    int(Duration(text).seconds): text for text in ("1m", "5m", "15m", "1h", "6h", "1d", "7d", "30d")
}
LABEL_DISTANCE: Final = 9.0  # percent of the width between two labels, at least
MARGIN: Final = 2.0  # percent of the width left free at both ends


def render(model: PageModel) -> bytes:
    """Return the whole page, in UTF-8."""
    pending = [TimelineEvent.of(event) for event in model.shown]
    on_timeline = [*pending, *model.ended]
    page = template("page.html").render(
        model=model,
        now=model.now,
        on_timeline=on_timeline,
        scale=Scale.over(on_timeline, model.now),
        STARTED=STARTED,
    )
    return page.encode(errors="replace")  # a file name may contain bytes that are not text


@cache
def template(name: str, *directories: Path) -> Template:
    """Return a template from these directories, or from the one next to this file.

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
    environment.filters["affected"] = affected
    environment.filters["span"] = span
    environment.filters["time_of_day"] = time_of_day
    environment.filters["timer"] = timer
    environment.filters["utc"] = _utc
    return environment.get_template(name)


def _visible(value: Any) -> Any:
    r"""Make invisible characters of a text visible, as ``\u202e``. Jinja2 escapes HTML."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return escaped(value)
    return value


def timer(seconds: float) -> str:
    """Return ``9:05``, ``1:02:03`` or ``6d 01:02:03``, without a sign.

    ``page.js`` has the same function.
    """
    days, seconds_of_day = divmod(int(abs(seconds)), 86_400)
    hours, seconds_of_hour = divmod(seconds_of_day, 3600)
    minutes, rest = divmod(seconds_of_hour, 60)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}:{rest:02d}"
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def _utc(time: datetime, time_format: str) -> str:
    return time.astimezone(UTC).strftime(time_format)


class Scale(Struct, frozen=True):
    """A scale from ``before`` seconds before NotBefore to ``after`` seconds after it.

    Positions are percents of the width. The half minute of a Preempt and a week of failing hardware
    share one scale. So it is linear near NotBefore, and logarithmic further away.
    """

    before: int
    after: int

    @classmethod
    def over(cls, events: Iterable[TimelineEvent], now: datetime) -> "Scale":
        """Return the scale that has room for all these events.

        Its ends are ticks, so that it seldom changes.
        """
        earliest = 0.0
        latest = 0.0
        for event in events:
            times = [event.first_seen, event.ended or now]
            if event.started is not None:
                times.append(event.started)
            offsets = [(time - event.anchor).total_seconds() for time in times]
            earliest = min(earliest, *offsets)
            latest = max(latest, *offsets)
        return cls(before=_tick(-earliest), after=_tick(latest))

    def x(self, seconds: float) -> float:
        """Return the position of an offset from NotBefore, in percent."""
        start = _compressed(-self.before)
        end = _compressed(self.after)
        share = (_compressed(seconds) - start) / (end - start)
        visible_share = min(max(share, 0.0), 1.0)
        return round(MARGIN + (100 - 2 * MARGIN) * visible_share, 2)

    def of(self, event: TimelineEvent, time: datetime, later: float = 0.0) -> float:
        """Return the position of a moment of an event, or of ``later`` seconds after it, in
        percent.
        """
        return self.x((time - event.anchor).total_seconds() + later)

    @property
    def labels(self) -> list[tuple[float, str]]:
        """The labels above the lines: position in percent, and text."""
        before = self._labels_of_side(-1, self.before)
        after = self._labels_of_side(1, self.after)
        return [(self.x(0), "NotBefore"), *before, *after]

    def _labels_of_side(self, sign: int, end: int) -> list[tuple[float, str]]:
        """Return the labels before NotBefore (``sign`` -1) or after it (1) that have room."""
        labels: list[tuple[float, str]] = []
        sign_text = "+"
        if sign < 0:
            sign_text = "-"
        # the label in the middle is twice as wide as the others
        last = self.x(0) + sign * LABEL_DISTANCE
        for seconds, text in TICKS.items():
            x = self.x(sign * seconds)
            has_room = (x - last) * sign >= LABEL_DISTANCE
            if seconds <= end and has_room:
                labels.append((x, f"{sign_text}{text}"))
                last = x
        return labels


def _tick(seconds: float) -> int:
    """Return the first tick that is not before an offset, or the last of all."""
    for tick in TICKS:
        if tick >= seconds:
            return tick
    return max(TICKS)


def _compressed(seconds: float) -> float:
    """Return an offset on the scale: linear near NotBefore, logarithmic beyond ``LINEAR``."""
    return math.copysign(math.log1p(abs(seconds) / LINEAR), seconds)
