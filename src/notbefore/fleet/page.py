"""The pages of a fleet as HTML: the report. By the Jinja2 templates beside this file, and those of the agent's page."""

from functools import cache
from pathlib import Path
from typing import Final

from jinja2 import Environment
from markupsafe import Markup

from notbefore import __version__
from notbefore.fleet import plots
from notbefore.fleet.report import Report
from notbefore.web.page import render

TEMPLATES: Final = Path(__file__).with_name("templates")


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
