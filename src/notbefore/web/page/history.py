"""The section of the timeline: what is pending and what was, a line for each event."""

from datetime import datetime
from functools import lru_cache
from typing import Final

from notbefore.core.duration import span
from notbefore.web.page.html import Html, joined, tag
from notbefore.web.page.model import MAX_ENDED, PageModel, PastEvent, past_event_of
from notbefore.web.page.pieces import WHOM, moment, notice, row, section, table
from notbefore.web.page.timeline import Scale, axis, line

ENDED_OPEN: Final = 10  # those shown without unfolding
HEADS: Final = ("Event", "", "Notice", "Started for", "Interruption", "Outcome")  # the second is the axis


def timeline(look: PageModel) -> Html:
    """The section."""
    lives = [*(past_event_of(event) for event in look.shown), *look.ended]
    if not lives:
        return section("timeline", "Timeline", tag("p", "No event has been seen yet.", class_="nothing"))
    scale = Scale.over(lives, look.now)
    course = joined(tag("span", "Course", class_="unshown"), axis(scale))
    heads = (HEADS[0], course, *HEADS[2:])
    rows = [_one(life, scale, look.now) if life.gone is None else _over(life, scale) for life in lives]
    first = len(look.shown) + ENDED_OPEN
    parts = [table("Events by the time around their NotBefore", heads, rows[:first], "lives")]
    if rows[first:]:
        older = table("Earlier events by the time around their NotBefore", heads, rows[first:], "lives")
        parts.append(tag("details", tag("summary", f"{len(rows) - first} earlier"), older))
    return section("timeline", "Timeline", _legend(), *parts)


@lru_cache(2 * MAX_ENDED)
def _over(life: PastEvent, scale: Scale) -> Html:
    """Of what is over nothing changes: it is put into words once."""
    return _one(life, scale, life.gone or life.first_seen)


def _one(life: PastEvent, scale: Scale, now: datetime) -> Html:
    outcome = life.outcome or ("started" if life.started else "pending")
    event = joined(
        tag("strong", tag("bdi", life.event_type)),
        " ",
        tag("span", WHOM.get(life.scope, life.scope), class_="whom"),
        " ",
        tag("p", moment(life.first_seen), class_="when"),
    )
    cells = (
        event,
        line(life, scale, now),
        notice(life.notice),
        span(life.started_for),
        span(life.felt),
        tag("span", outcome, class_="outcome now" if life.started and not life.gone else "outcome"),
    )
    key = f"{life.event_id} {life.first_seen.timestamp()}"
    return row(key, HEADS, cells, life.scope)


def _legend() -> Html:
    signs = (
        ("announced", "announced"),
        ("not-before", "NotBefore"),
        ("scheduled", "scheduled"),
        ("started", "started"),
        ("felt", "interruption as felt, drawn from the start"),
        ("gone", "finished"),
    )
    drawn = [tag("span", tag("i", class_=f"sign {name}"), text, " ") for name, text in signs]
    written = [
        tag("span", tag("b", sign), f" {text} ")
        for sign, text in (("✕", "canceled"), ("?", "gone unseen"), ("○", "now"))
    ]
    return tag("p", *drawn, *written, class_="legend")
