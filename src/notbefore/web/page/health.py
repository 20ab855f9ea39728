"""The section of the agent itself: IMDS, the state, the deliveries; and the same in three words each."""

from typing import Final

from notbefore.core.duration import span
from notbefore.web.page.html import Html, joined, tag
from notbefore.web.page.model import PageModel
from notbefore.web.page.pieces import moment, row, section, table

STUCK: Final = 300.0  # seconds that a delivery may wait before somebody should look; as of the alert


def health(look: PageModel) -> Html:
    """How the agent fares, for the top of the page."""
    condition, outbox = look.condition, look.condition.outbox
    waiting = sum(count for (_, state), count in outbox.rows.items() if state == "pending")
    dead = sum(count for (_, state), count in outbox.rows.items() if state == "dead")
    stuck = bool(outbox.oldest) and look.now.timestamp() - min(outbox.oldest.values()) > STUCK
    sinks = "none waiting" if condition.sinks else "no sink"
    well = (
        None if not (condition.sinks or waiting or dead) else not dead and not stuck
    )  # where nobody is notified, nothing is well or ill
    if waiting:
        sinks = f"{waiting} waiting"
        sinks += f", the oldest for {_age(look, min(outbox.oldest.values()))}" if outbox.oldest else ""
    return tag(
        "ul",
        _badge("IMDS", "ready" if look.ready.ok else "not ready", ok=look.ready.ok),
        _badge("State", "in memory alone" if condition.degraded else "written", ok=not condition.degraded),
        _badge("Deliveries", sinks + (f", {dead} dead" if dead else ""), ok=well),
        class_="health",
    )


def _badge(name: str, text: str, *, ok: bool | None) -> Html:
    letter, kind = {True: ("✓", "good"), False: ("!", "bad"), None: ("○", "idle")}[ok]
    sign = tag("span", letter, class_="sign", aria_hidden="true")
    return tag("li", sign, f" {name}: ", tag("strong", text), class_=kind)


def inside(look: PageModel) -> Html:
    """The section."""
    condition, last = look.condition, look.last_good
    answered = joined(moment(last), f", {_age(look, last.timestamp())} ago") if last else "never"
    imds = [("Ready", "yes" if look.ready.ok else "no"), ("Last good answer", answered)]
    imds += [("Trouble", condition.imds_error or "none"), ("Asked at", tag("code", condition.endpoint))]
    state = [("Written", "yes" if not condition.degraded else f"no, kept in memory alone: {condition.degraded}")]
    state += [("Damaged files set aside", str(condition.damaged_files)), ("File", tag("code", condition.state_file))]
    cards = tag("div", _card("IMDS", imds), _card("State", state), class_="cards")
    return section("agent", "Agent", cards, tag("h3", "Deliveries"), _sinks(look))


def _card(title: str, facts: list[tuple[str, str]]) -> Html:
    pairs = [joined(tag("dt", name), tag("dd", value)) for name, value in facts]
    return tag("div", tag("h3", title), tag("dl", *pairs))


def _sinks(look: PageModel) -> Html:
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
            _age(look, oldest) if oldest is not None else "-",
            tag("span", str(dead), class_="bad" if dead else None),
            str(outbox.counts.get((name, "delivered"), 0)),
            str(outbox.counts.get((name, "expired"), 0)),
        )
        rows.append(row(name, heads, cells))
    courier = "is at work" if condition.courier_running else "rests until one is due"
    waits = table("What waits for each sink, and what became of the rest", heads, rows, "sinks")
    return joined(waits, tag("p", f"The courier {courier}."))


def _age(look: PageModel, since: float) -> str:
    return span(max(0.0, look.now.timestamp() - since))
