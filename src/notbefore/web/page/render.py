"""``render(look)``: the page as HTML. Server-rendered whole each time; ``page.js`` takes over what differs.

Elements with ``data-key`` are told from their siblings by it, those with ``data-keep`` are the script's own.
"""

from typing import Final

from notbefore.core.document import STARTED
from notbefore.web.page.health import health, inside
from notbefore.web.page.history import timeline
from notbefore.web.page.html import Html, joined, tag
from notbefore.web.page.model import PageModel
from notbefore.web.page.pending import pending
from notbefore.web.page.pieces import WHOM, clock, moment

LINKS: Final = ("metrics", "api/v1/events", "api/v1/history", "readyz", "healthz")


def render(look: PageModel) -> bytes:
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
    main = tag("main", pending(look), timeline(look), inside(look))
    body = tag("body", _header(look, name), main, _footer(look), data_now=f"{look.now.timestamp():.3f}")
    page = joined(Html("<!DOCTYPE html>\n"), tag("html", tag("head", *head), body, lang="en"), Html("\n"))
    return page.encode(errors="replace")  # the name of a file may hold what is no text


def _header(look: PageModel, name: str) -> Html:
    vm = look.vm
    known = (vm.scale_set, vm.location, vm.zone and f"zone {vm.zone}", vm.vm_size) if vm else ()
    facts = " · ".join(filter(None, known))
    still, again = "Without JavaScript this page stands still: ", tag("a", "load it again", href="?")
    reasons = [tag("li", reason) for reason in look.ready.reasons]
    return tag(
        "header",
        tag("h1", "Scheduled events of ", tag("bdi", name)),
        tag("p", tag("bdi", facts), class_="facts") if facts else "",
        tag("p", summary(look), class_="summary", role="status"),
        tag("p", hidden=True, data_keep="", id="silence", role="alert"),
        tag("noscript", tag("p", still, again, " for what is new."), data_keep=""),
        health(look),
        tag("ul", *reasons, class_="reasons") if reasons else "",
    )


def summary(look: PageModel) -> str:
    """The state of things in a sentence."""
    if not look.pending:
        if look.last_good is None:
            return "What is scheduled is not known yet: IMDS has not answered."
        if look.unreadable:
            return "Something is scheduled that cannot be read: the agent's log says why."
        return "Nothing is scheduled." if look.ready.ok else "Nothing was scheduled when IMDS last answered."
    first = look.pending[0]
    what = f"{first.event_type} of {WHOM.get(first.scope, first.scope)}"
    if first.event_status == STARTED:
        when = " is under way"
    elif first.not_before is not None:
        when = f" is next, not before {clock(first.not_before, look.now)} UTC"
    else:
        when = " is next, at a time not given"
    others = len(look.pending) - 1
    return f"{what}{when}." + (f" {others} more {'is' if others == 1 else 'are'} pending." if others else "")


def _footer(look: PageModel) -> Html:
    links = [joined(tag("a", f"/{link}", href=link), " ") for link in LINKS]
    return tag(
        "footer",
        tag("p", "As of ", moment(look.now), ". All times are UTC."),
        tag("p", tag("button", "Pause", type="button", id="pause", hidden=True, data_keep="")),
        tag("nav", *links, aria_label="What scripts read"),
        tag("p", f"notbefore {look.condition.version}"),
    )
