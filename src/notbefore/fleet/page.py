"""The page of an instance as HTML, by the Jinja2 templates beside, and the agent's."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from jinja2 import Environment

from notbefore.fleet.report import Row
from notbefore.fleet.shown_waves import FILTERS, FleetEvents, under_way
from notbefore.web.page import render
from notbefore.web.page.model import MAX_PENDING, PageModel

TEMPLATES: Final = Path(__file__).with_name("templates")


def instance_page(
    status: PageModel, fleet: FleetEvents, month: Iterable[Row], wanted: Mapping[str, str], mutes: Iterable[str]
) -> bytes:
    """The page of an instance, in UTF-8.

    ``status``: how the instance is; ``month``: the last 30 days, as far as it has read them; ``wanted``: the filters;
    ``mutes``: in words.
    """
    made = (
        _environment()
        .get_template("instance.html")
        .render(
            model=status,
            now=status.now,
            fleet=fleet,
            ahead=[one for one in fleet.waves if one.to_come],  # what can still be prepared for
            most=MAX_PENDING,
            lines=under_way(fleet.waves),
            month=month,
            wanted=wanted,
            filters=FILTERS,
            mutes=mutes,
        )
    )
    return made.encode(errors="replace")  # the name of a file may hold what is no text


@cache
def _environment() -> Environment:
    return render.environment(TEMPLATES, render.TEMPLATES)
