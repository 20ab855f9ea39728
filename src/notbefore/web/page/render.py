"""``render``: a ``PageModel`` as HTML, by the Jinja2 templates beside this file.

The page is made whole each time; ``page.js`` replaces what differs. It recognises rows by their ``data-key`` and leaves
elements with ``data-keep`` alone.
"""

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from notbefore.core.document import STARTED
from notbefore.core.duration import span
from notbefore.core.record import view
from notbefore.core.text import escaped
from notbefore.web.page.model import PageModel, TimelineEvent
from notbefore.web.page.timeline import Scale

TEMPLATES: Final = Path(__file__).with_name("templates")
MAX_TEXT: Final = 400  # characters of a description


def render(model: PageModel) -> bytes:
    """The whole page, in UTF-8."""
    lives = [*(view(TimelineEvent, event) for event in model.shown), *model.ended]
    page = _page().render(model=model, now=model.now, lives=lives, scale=Scale.over(lives, model.now), STARTED=STARTED)
    return page.encode(errors="replace")  # the name of a file may hold what is no text


@cache
def _page() -> Template:
    return environment(TEMPLATES).get_template("page.html")


def environment(*directories: Path) -> Environment:
    """The templates of these directories, with all that is shown made safe for HTML."""
    made = Environment(
        loader=FileSystemLoader(directories),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {"span": span, "countdown": countdown, "clock": clock, "utc": _utc, "cut": _cut}
    return made


def _visible(value: Any) -> Any:
    r"""Each value on its way into the page: an unseen character is shown as ``\u202e``. Jinja2 escapes the rest."""
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def countdown(seconds: float) -> str:
    """``9:05``, ``1:02:03``, ``6d 01:02:03``; also once it has passed. ``page.js`` writes the same."""
    days, rest = divmod(int(abs(seconds)), 86_400)
    hours, minutes, left = rest // 3600, rest // 60 % 60, rest % 60
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}:{left:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def clock(time: datetime, now: datetime) -> str:
    """A time in UTC, without the day where that is today."""
    utc = time.astimezone(UTC)
    return f"{utc:%H:%M:%S}" if utc.date() == now.astimezone(UTC).date() else f"{utc:%Y-%m-%d %H:%M:%S}"


def _utc(time: datetime, form: str) -> str:
    return time.astimezone(UTC).strftime(form)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "… (cut; all of it is in /api/v1/events)"
