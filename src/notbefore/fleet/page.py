"""The page of an instance as HTML, by the Jinja2 templates beside, and the agent's."""

from functools import cache
from pathlib import Path
from typing import Final

from jinja2 import Environment
from msgspec import Struct

from notbefore.fleet.coming import FleetEvents, Line, ShownWave, under_way
from notbefore.fleet.report import Report
from notbefore.web.app import FLEET_FILTERS
from notbefore.web.page import render
from notbefore.web.page.model import MAX_PENDING, PageModel

TEMPLATES: Final = Path(__file__).with_name("templates")


class InstancePage(Struct, frozen=True):
    """An instance at one moment. ``month``: the last 30 days, as far as this instance has read them."""

    status: PageModel  # how the instance is: the hub, the history, the deliveries
    fleet: FleetEvents
    month: Report
    wanted: dict[str, str] = {}  # the filters
    mutes: tuple[str, ...] = ()  # in words

    @property
    def ahead(self) -> list[ShownWave]:
        """What can still be prepared for."""
        return [one for one in self.fleet.waves if one.to_come]

    @property
    def shown(self) -> list[ShownWave]:
        """The most urgent of it."""
        return self.ahead[:MAX_PENDING]

    @property
    def lines(self) -> tuple[Line, ...]:
        """What is under way."""
        return under_way(self.fleet.waves)

    @property
    def filters(self) -> tuple[str, ...]:
        """What may be asked for in the address."""
        return FLEET_FILTERS


def instance_page(page: InstancePage) -> bytes:
    """The page of an instance, in UTF-8."""
    status = page.status
    made = _environment().get_template("instance.html").render(page=page, model=status, now=status.now)
    return made.encode(errors="replace")  # the name of a file may hold what is no text


@cache
def _environment() -> Environment:
    return render.environment(TEMPLATES, render.TEMPLATES)
