"""``render(look)``: the page as HTML. Server-rendered whole each time; ``page.js`` takes over what differs.

Elements with ``data-key`` are told from their siblings by it, those with ``data-keep`` are the script's own.
"""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from notbefore.events.document import STARTED
from notbefore.events.duration import span
from notbefore.exposition.page.html import Html, joined, tag
from notbefore.exposition.page.look import Life, Look, Pending, life_of
from notbefore.exposition.page.timeline import Scale, axis, line

MAX_PENDING: Final = 100  # events; all of them are in /api/v1/events
MAX_ENDED: Final = 50
ENDED_OPEN: Final = 10  # those shown without unfolding
MAX_TEXT: Final = 400  # characters of a description
MAX_NAMES: Final = 5  # of affected VMs
WHOM: Final = {"self": "this VM", "peer": "another VM", "unknown": "perhaps this VM"}
LINKS: Final = ("metrics", "api/v1/events", "api/v1/history", "readyz", "healthz")


def render(look: Look) -> bytes:
    """The whole page."""
    name = look.vm.name if look.vm and look.vm.name else "this VM"
    count = f"{len(look.pending)} pending" if look.pending else "nothing pending"
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{count} - {name} - notbefore"),
        tag("link", rel="icon", href="page/icon.svg", type="image/svg+xml"),
        tag("link", rel="stylesheet", href="page/page.css"),
        tag("script", src="page/page.js", defer=True),
    )
    main = tag("main", _pending(look), _timeline(look), _agent(look))
    body = tag("body", _header(look, name), main, _footer(look), data_now=f"{look.now.timestamp():.3f}")
    page = joined(Html("<!DOCTYPE html>\n"), tag("html", tag("head", *head), body, lang="en"), Html("\n"))
    return page.encode(errors="replace")  # the name of a file may hold what is no text


# ---- above and below


def _header(look: Look, name: str) -> Html:
    vm = look.vm
    facts = (
        [fact for fact in (vm.scale_set, vm.location, vm.zone and f"zone {vm.zone}", vm.vm_size) if fact] if vm else []
    )
    return tag(
        "header",
        tag("h1", "Scheduled events of ", tag("bdi", name)),
        tag("p", tag("bdi", " · ".join(facts)), class_="facts") if facts else "",
        tag("p", summary(look), class_="summary", role="status"),
        tag("p", hidden=True, data_keep="", id="silence", role="alert"),
        tag(
            "noscript",
            tag(
                "p",
                "Without JavaScript this page stands still: ",
                tag("a", "load it again", href="?"),
                " for what is new.",
            ),
            data_keep="",
        ),
        _health(look),
        tag("ul", *(tag("li", reason) for reason in look.ready.reasons), class_="reasons")
        if look.ready.reasons
        else "",
    )


def summary(look: Look) -> str:
    """The state of things in a sentence."""
    if not look.pending:
        if look.last_good is None:
            return "What is scheduled is not known yet: IMDS has not answered."
        return "Nothing is scheduled." if look.ready.ok else "Nothing was scheduled when IMDS last answered."
    first = look.pending[0]
    what = f"{first.event_type} of {WHOM.get(first.scope, first.scope)}"
    if first.event_status == STARTED:
        when = " is under way"
    elif first.not_before is not None:
        when = f" is next, not before {clock(first.not_before)} UTC"
    else:
        when = " is next, at a time not given"
    others = len(look.pending) - 1
    return f"{what}{when}." + (f" {others} more {'is' if others == 1 else 'are'} pending." if others else "")


def _health(look: Look) -> Html:
    condition, outbox = look.condition, look.condition.outbox
    waiting = sum(count for (_, state), count in outbox.rows.items() if state == "pending")
    dead = sum(count for (_, state), count in outbox.rows.items() if state == "dead")
    oldest = (
        f", the oldest for {span(max(0.0, look.now.timestamp() - min(outbox.oldest.values())))}"
        if outbox.oldest
        else ""
    )
    sinks = f"{waiting} waiting{oldest}" if waiting else "none waiting" if condition.sinks else "no sink"
    return tag(
        "ul",
        _badge("IMDS", "ready" if look.ready.ok else "not ready", ok=look.ready.ok),
        _badge("State", "in memory alone" if condition.degraded else "written", ok=not condition.degraded),
        _badge("Deliveries", sinks + (f", {dead} dead" if dead else ""), ok=not dead),
        class_="health",
    )


def _badge(name: str, text: str, *, ok: bool) -> Html:
    sign = tag("span", "✓" if ok else "!", class_="sign", aria_hidden="true")
    return tag("li", sign, f" {name}: ", tag("strong", text), class_="good" if ok else "bad")


def _footer(look: Look) -> Html:
    links = [joined(tag("a", f"/{link}", href=link), " ") for link in LINKS]
    return tag(
        "footer",
        tag("p", "As of ", _time(look.now), ". All times are UTC."),
        tag("p", tag("button", "Pause", type="button", id="pause", hidden=True, data_keep="")),
        tag("nav", *links, aria_label="What scripts read"),
        tag("p", f"notbefore {look.condition.version}"),
    )


# ---- what is pending


def _pending(look: Look) -> Html:
    heads = ("Event", "Countdown", "NotBefore", "Affects", "Expected interruption", "Notice", "Approval")
    shown = look.pending[:MAX_PENDING]
    if shown:
        what = _table("Events that Azure lists now", heads, [_pending_row(event, look.now) for event in shown])
    else:
        what = tag("p", summary(look), class_="nothing")
    more = len(look.pending) - len(shown)
    rest = tag("p", f"And {more} more: see ", tag("a", "/api/v1/events", href="api/v1/events"), ".") if more else ""
    return _section("pending", "Pending", what, rest)


def _pending_row(event: Pending, now: datetime) -> Html:
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
        _time(event.not_before) if event.not_before else "not given",
        _names(event.resources),
        _expected(event.expected_duration_seconds),
        _notice(event.notice_seconds),
        _approval(event),
    )
    return _row(
        event.event_id,
        ("Event", "Countdown", "NotBefore", "Affects", "Expected interruption", "Notice", "Approval"),
        cells,
        event.scope,
    )


def countdown(event: Pending, now: datetime) -> Html:
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


def _approval(event: Pending) -> Html:
    approval = event.approval
    if approval is None:
        return Html("off")
    what = {"leave": "leave alone"}.get(approval.action, approval.action)
    if approval.at is not None:
        what += f" from {clock(approval.at)} on"
    mode = {"on": "", "dry_run": "dry run: ", "off": f"off{approval.off and f' ({approval.off})'}; by the rules: "}
    why = ": ".join(filter(None, (approval.rule and f"rule {approval.rule}", approval.reason)))
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


def _notice(seconds: float | None) -> str:
    return "not seen" if seconds is None else "none" if seconds == 0 else span(seconds)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "… (cut; all of it is in /api/v1/events)"


# ---- what was


def _timeline(look: Look) -> Html:
    lives = [*(life_of(event) for event in look.pending[:MAX_PENDING]), *look.ended[:MAX_ENDED]]
    if not lives:
        return _section("timeline", "Timeline", tag("p", "No event has been seen yet.", class_="nothing"))
    scale = Scale.over(lives, look.now)
    course = joined(tag("span", "Course", class_="unshown"), axis(scale))
    heads = ("Event", course, "Notice", "Started for", "Interruption", "Outcome")
    rows = [_life_row(life, scale, look.now) if life.gone is None else _ended_row(life, scale) for life in lives]
    first = len(look.pending[:MAX_PENDING]) + ENDED_OPEN
    parts = [_table("Events by the time around their NotBefore", heads, rows[:first], "lives")]
    if rows[first:]:
        older = _table("Earlier events by the time around their NotBefore", heads, rows[first:], "lives")
        parts.append(tag("details", tag("summary", f"{len(rows) - first} earlier"), older))
    return _section("timeline", "Timeline", _legend(), *parts)


@lru_cache(2 * MAX_ENDED)
def _ended_row(life: Life, scale: Scale) -> Html:
    """Of what is over nothing changes: it is put into words once."""
    return _life_row(life, scale, life.gone or life.first_seen)


def _life_row(life: Life, scale: Scale, now: datetime) -> Html:
    outcome = life.outcome or ("started" if life.started else "pending")
    event = joined(
        tag("strong", tag("bdi", life.event_type)),
        " ",
        tag("span", WHOM.get(life.scope, life.scope), class_="whom"),
        " ",
        tag("p", _time(life.first_seen), class_="when"),
    )
    cells = (
        event,
        line(life, scale, now),
        _notice(life.notice),
        span(life.started_for),
        span(life.felt),
        tag("span", outcome, class_="outcome now" if life.started and not life.gone else "outcome"),
    )
    key = f"{life.event_id} {life.first_seen.timestamp()}"
    return _row(key, ("Event", "", "Notice", "Started for", "Interruption", "Outcome"), cells, life.scope)


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


# ---- the agent itself


def _agent(look: Look) -> Html:
    condition = look.condition
    age = (look.now - look.last_good).total_seconds() if look.last_good else None
    answered = (
        joined(_time(look.last_good), f", {max(0.0, age):.1f} s ago")
        if look.last_good and age is not None
        else Html("never")
    )
    imds = [("Ready", "yes" if look.ready.ok else "no"), ("Last good answer", answered)]
    imds += [("Trouble", condition.trouble or "none"), ("Asked at", tag("code", condition.endpoint))]
    state = [("Written", "yes" if not condition.degraded else f"no, kept in memory alone: {condition.degraded}")]
    state += [("Damaged files set aside", str(condition.damaged_files)), ("File", tag("code", condition.state_file))]
    cards = tag("div", _card("IMDS", imds), _card("State", state), class_="cards")
    return _section("agent", "Agent", cards, tag("h3", "Deliveries"), _sinks(look))


def _card(title: str, facts: list[tuple[str, str]]) -> Html:
    return tag(
        "div", tag("h3", title), tag("dl", *(joined(tag("dt", name), tag("dd", value)) for name, value in facts))
    )


def _sinks(look: Look) -> Html:
    condition, outbox = look.condition, look.condition.outbox
    names = [*condition.sinks, *sorted({sink for sink, _ in (*outbox.rows, *outbox.counts)} - condition.sinks.keys())]
    if not names:
        return tag("p", "No sink is configured: nobody is notified.", class_="nothing")
    heads = ("Sink", "Pending", "Oldest", "Dead", "Delivered", "Expired")
    rows = []
    for name in names:
        oldest = outbox.oldest.get(name)
        dead = outbox.rows.get((name, "dead"), 0)
        kind = condition.sinks.get(name)
        cells = (
            joined(tag("strong", name), f" {kind}" if kind else " no longer configured"),
            str(outbox.rows.get((name, "pending"), 0)),
            span(max(0.0, look.now.timestamp() - oldest)) if oldest is not None else "-",
            tag("span", str(dead), class_="bad" if dead else None),
            str(outbox.counts.get((name, "delivered"), 0)),
            str(outbox.counts.get((name, "expired"), 0)),
        )
        rows.append(_row(name, heads, cells))
    courier = tag(
        "p", "The courier is at work." if condition.courier_running else "The courier rests until one is due."
    )
    return joined(_table("What waits for each sink, and what became of the rest", heads, rows, "sinks"), courier)


# ---- pieces


def _section(identity: str, title: str, *content: str) -> Html:
    heading = tag("h2", title, id=f"{identity}-title")
    return tag("section", heading, *content, id=identity, aria_labelledby=f"{identity}-title")


def _table(caption: str, heads: tuple[str, ...], rows: list[Html], kind: str | None = None) -> Html:
    # the roles are said, since on a phone the cells are laid out as blocks, which takes a table's meaning away
    head = tag("tr", *(tag("th", text, scope="col", role="columnheader") for text in heads), role="row")
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", head, role="rowgroup"),
        tag("tbody", *rows, role="rowgroup"),
        role="table",
        class_=kind,
    )


def _row(key: str, heads: tuple[str, ...], cells: tuple[str, ...], kind: str | None = None) -> Html:
    first, *others = cells
    parts = [tag("th", first, scope="row", role="rowheader")]
    parts += [tag("td", cell, role="cell", data_head=head) for head, cell in zip(heads[1:], others, strict=True)]
    return tag("tr", *parts, role="row", data_key=key, class_=kind)


def _time(time: datetime | None) -> Html:
    if time is None:
        return Html("-")
    utc = time.astimezone(UTC)
    return tag("time", f"{utc:%Y-%m-%d %H:%M:%S}", datetime=f"{utc:%Y-%m-%dT%H:%M:%SZ}")


def clock(time: datetime) -> str:
    """The time of day, in UTC."""
    return f"{time.astimezone(UTC):%H:%M:%S}"
