"""The pages of a fleet as HTML: an instance's, and the report. By the Jinja2 templates beside, and the agent's."""

from functools import cache
from pathlib import Path
from typing import Final

from jinja2 import Environment
from markupsafe import Markup
from msgspec import Struct

from notbefore import __version__
from notbefore.fleet import plots
from notbefore.fleet.coming import FleetEvents, ShownWave
from notbefore.fleet.report import Report
from notbefore.web.page import render
from notbefore.web.page.model import MAX_PENDING, PageModel

TEMPLATES: Final = Path(__file__).with_name("templates")


class InstancePage(Struct, frozen=True):
    """An instance at one moment. ``month``: what ``month_section`` made, or words instead of it."""

    status: PageModel  # how the instance is: the hub, the state, the deliveries
    fleet: FleetEvents
    month: str

    @property
    def shown(self) -> tuple[ShownWave, ...]:
        """The most urgent waves."""
        return self.fleet.waves[:MAX_PENDING]


def instance_page(page: InstancePage) -> bytes:
    """The page of an instance, in UTF-8."""
    status = page.status
    made = _environment().get_template("instance.html").render(page=page, model=status, now=status.now)
    return made.encode(errors="replace")  # the name of a file may hold what is no text


def month_section(report: Report) -> str:
    """How the last 30 days went, as a part of the page of an instance."""
    return Markup(_environment().get_template("month.html").render(report=report))  # noqa: S704 - a template escapes


def report_page(report: Report) -> bytes:
    """A report as one file that needs nothing else, in UTF-8."""
    page = _environment().get_template("report.html").render(report=report, style=_style(), version=__version__)
    return page.encode(errors="replace")  # a name may hold what is no text


def _style() -> Markup:
    return Markup((Path(render.__file__).with_name("page.css")).read_text(encoding="utf-8"))  # noqa: S704 - our own file


@cache
def _environment() -> Environment:
    environment = render.environment(TEMPLATES, render.TEMPLATES)
    environment.globals |= {
        "course": plots.course,
        "notices": plots.notices,
        "interruptions": plots.interruptions,
        "NOTICE": plots.NOTICE,
        "INTERRUPTION": plots.INTERRUPTION,
        "HEIGHT": plots.HEIGHT,
        "ROW": plots.ROW,
    }
    return environment
