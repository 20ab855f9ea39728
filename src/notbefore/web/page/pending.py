"""The section of what is pending, with its countdowns."""

from datetime import datetime
from typing import Final

from notbefore.core.document import STARTED
from notbefore.core.duration import span
from notbefore.core.listing import PendingEvent
from notbefore.web.page.html import Html, joined, tag
from notbefore.web.page.model import PageModel
from notbefore.web.page.pieces import WHOM, clock, moment, notice, row, section, table

MAX_TEXT: Final = 400  # characters of a description
MAX_NAMES: Final = 5  # of affected VMs
HEADS: Final = ("Event", "Countdown", "NotBefore", "Affects", "Expected interruption", "Notice", "Approval")


def pending(look: PageModel) -> Html:
    """The section."""
    if look.pending:
        what = table("Events that Azure lists now", HEADS, [_one(event, look.now) for event in look.shown])
    else:
        what = tag("p", "No event is listed." if look.last_good else "Not known yet.", class_="nothing")
    more = len(look.pending) - len(look.shown)
    rest = tag("p", f"And {more} more: see ", tag("a", "/api/v1/events", href="api/v1/events"), ".") if more else ""
    return section("pending", "Pending", what, rest)


def _one(event: PendingEvent, now: datetime) -> Html:
    started = event.event_status == STARTED
    kind = joined(
        tag("strong", tag("bdi", event.event_type)),
        " ",
        tag("span", tag("bdi", event.event_status), class_="chip started" if started else "chip"),
        " ",
        tag("span", WHOM.get(event.scope, event.scope), class_="whom"),
    )
    source = tag("bdi", f"by {event.event_source}. ") if event.event_source else ""
    about = tag("p", source, tag("bdi", _cut(event.description or "")), class_="about")
    cells = (
        joined(tag("p", kind), about, tag("p", tag("bdi", event.event_id), class_="id")),
        countdown(event, now),
        moment(event.not_before) if event.not_before else "not given",
        _names(event.resources),
        _expected(event.expected_duration_seconds),
        notice(event.notice_seconds),
        _approval(event, now),
    )
    return row(event.event_id, HEADS, cells, event.scope)


def countdown(event: PendingEvent, now: datetime) -> Html:
    """The time to NotBefore, or since the start, as of ``now``; the script counts on."""
    if event.event_status == STARTED:
        if event.started is None:
            return Html("started")
        return joined(_counter(event.started, now, "since"), " ", tag("span", "since its start", class_="unit"))
    if event.not_before is None:
        return Html("not known")
    if event.not_before <= now:
        return joined(_counter(event.not_before, now, "since"), " ", tag("span", "past its NotBefore", class_="unit"))
    return joined(_counter(event.not_before, now, "until"), " ", tag("span", "to NotBefore", class_="unit"))


def _counter(time: datetime, now: datetime, direction: str) -> Html:
    seconds = (time - now).total_seconds()
    count = f"{time.timestamp():.3f}"
    given = {"data_until": count} if direction == "until" else {"data_since": count}
    return tag("span", counted(seconds if direction == "until" else -seconds), role="timer", class_="count", **given)


def counted(seconds: float) -> str:
    """``9:05``, ``1:02:03``, ``6d 01:02:03``; negative once it has passed. ``page.js`` writes the same."""
    sign, whole = ("-" if seconds <= -1 else ""), int(abs(seconds))
    days, rest = divmod(whole, 86_400)
    hours, minutes, left = rest // 3600, rest // 60 % 60, rest % 60
    if days:
        return f"{sign}{days}d {hours:02d}:{minutes:02d}:{left:02d}"
    return f"{sign}{hours}:{minutes:02d}:{left:02d}" if hours else f"{sign}{minutes}:{left:02d}"


def _approval(event: PendingEvent, now: datetime) -> Html:
    approval = event.approval
    if approval is None:
        return Html("off")
    what = {"leave": "leave alone"}.get(approval.action, approval.action)
    if approval.at is not None:
        what += f" from {clock(approval.at, now)} on"
    mode = {"on": "", "dry_run": "dry run: ", "off": f"off{approval.off and f' ({approval.off})'}; by the rules: "}
    why = ": ".join(filter(None, (approval.rule, approval.reason)))
    return joined(
        tag("bdi", mode.get(approval.mode, f"{approval.mode}: ") + what),
        tag("p", tag("bdi", _cut(why)), class_="about") if why else "",
        tag("p", tag("bdi", approval.state), class_="about") if approval.state else "",
    )


def _names(names: tuple[str, ...]) -> Html:
    if not names:
        return Html("not given")
    shown = ", ".join([tag("bdi", name) for name in names[:MAX_NAMES]])
    more = len(names) - MAX_NAMES
    return tag("span", Html(shown), f" and {more} more" if more > 0 else "")


def _expected(seconds: int | None) -> str:
    return "not known" if seconds is None else "none" if seconds == 0 else span(seconds)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "… (cut; all of it is in /api/v1/events)"
