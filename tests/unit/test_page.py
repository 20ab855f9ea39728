"""The page without a server: its sentences in each state, its escaping, and its bounds."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from notbefore.core.event_types import SPOT_REBALANCE
from notbefore.core.record import Vm
from notbefore.core.tracked import PendingApproval, PendingEvent, PendingView
from notbefore.metrics.totals import OutboxView
from notbefore.web.app import CheckResult
from notbefore.web.page.model import MAX_ENDED, PageModel, newest_ended
from notbefore.web.page.render import Scale, render, timer
from notbefore.wording.records import record_of
from support.azure import ID, ME, PEER, STARTED, Story, at, item

HEAD = {"html", "head", "meta", "title", "link", "script", "body"}
FLOW = {
    "header",
    "main",
    "section",
    "footer",
    "nav",
    "h1",
    "h2",
    "h3",
    "p",
    "ul",
    "li",
    "div",
    "dl",
    "dt",
    "dd",
}
WORDS = {"a", "b", "bdi", "button", "code", "i", "noscript", "span", "strong", "time"}
TABLES = {"table", "caption", "thead", "tbody", "tr", "th", "td", "svg", "line", "circle", "text"}
ELEMENTS = HEAD | FLOW | WORDS | TABLES


class Agent(Story):
    """Makes the model of the page as the agent does, without I/O."""

    vm = Vm(name=ME, location="norwayeast")

    def model(
        self,
        seconds: float,
        *,
        polled: bool = True,
        ready: CheckResult | None = None,
        **fields: Any,
    ) -> PageModel:
        now = at(seconds)
        pending = [PendingEvent.of(tracked, now) for tracked in self.tracked.by_urgency]
        events = PendingView(
            incarnation=self.tracked.incarnation,
            last_successful_poll=now if polled else None,
            vm=self.vm,
            unreadable=0,
            events=tuple(pending),
        )
        history = [record_of(change, self.vm).line() for change in self.changes]
        is_ready = ready or CheckResult(ok=True)
        return PageModel(now, is_ready, events, newest_ended(history), **fields)


class PageReader(HTMLParser):
    """Collects the elements, attributes and texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        for name, value in attrs:
            self.attributes.add((name, value or ""))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(model: PageModel) -> PageReader:
    reader = PageReader()
    reader.feed(render(model).decode())
    return reader


def text_of(model: PageModel) -> str:
    """Return the page's text on one line."""
    return re.sub(r"\s+", " ", " ".join(read(model).texts))


def pending_ids(model: PageModel) -> list[str]:
    return [event.event_id for event in model.pending]


# ---- one event


@pytest.mark.parametrize(
    "part",
    [
        "Freeze of this VM is next, not before 12:15:00 UTC.",
        "14:49 to NotBefore",
        ME,
        ID,
        "14m59s",
        "5s",
    ],
)
def test_scheduled_event_is_shown_with_its_countdown(part: str) -> None:
    agent = Agent().sees(0).sees(1, item())

    assert part in text_of(agent.model(10.5))


def test_page_says_how_to_refresh_it_without_javascript() -> None:
    text = text_of(Agent().model(0))

    assert "Without JavaScript this page does not refresh: load it again for what is new." in text


def test_page_says_that_approval_is_on_when_an_event_is_pending() -> None:
    agent = Agent().sees(0).sees(1, item())

    assert "Approval is on." in text_of(agent.model(10))


def test_event_is_shown_without_approval_when_no_rule_was_asked() -> None:
    model = Agent().sees(0).sees(1, item()).model(10)

    assert "Approval:" not in text_of(model)


def test_event_is_shown_with_what_the_approval_rules_do() -> None:
    model = Agent().sees(0).sees(1, item()).model(10)
    approval = PendingApproval("leave", "", None, "left alone: <no> rule matches")
    (event,) = model.listed.events
    listed = replace(model.listed, events=(replace(event, approval=approval),))

    text = text_of(replace(model, listed=listed))

    assert "Approval: left alone: <no> rule matches" in text


def test_overdue_event_is_shown_with_the_time_since_not_before() -> None:
    agent = Agent().sees(0).sees(1, item())

    text = text_of(agent.model(943))

    assert "Freeze of this VM was due at 12:15:00 UTC, and has not started." in text
    assert "0:43 past its NotBefore" in text


def test_started_event_is_shown_with_the_time_since_its_start() -> None:
    agent = Agent().sees(0).sees(1, item()).sees(900, item(**STARTED))

    text = text_of(agent.model(965))

    assert "Freeze of this VM is under way." in text
    assert "1:05 since its start" in text


def test_started_event_has_no_time_when_its_start_was_not_seen() -> None:
    agent = Agent().sees(0, item(**STARTED), silence=None)

    text = text_of(agent.model(65))

    assert "started before this agent looked" in text
    assert "since its start" not in text


def test_finished_event_is_shown_with_its_durations() -> None:
    agent = Agent().sees(0).sees(1, item()).sees(900, item(**STARTED)).sees(1500, gap=7.2)

    assert "14m59s 10m00s 7.2s finished" in text_of(agent.model(2000))


def test_finished_event_says_that_its_end_was_not_seen() -> None:
    agent = Agent().sees(0, item(**STARTED), silence=None).sees(5000, silence=4000.0)

    text = text_of(agent.model(5001))

    end = "finished it was Started, and is no longer listed; when it ended was not seen"
    assert end in text


def test_event_is_shown_twice_when_it_was_listed_again() -> None:
    agent = Agent().sees(0)
    agent.sees(1, item()).sees(10)
    agent.sees(20, item(**STARTED)).sees(30)

    outcomes = [event.outcome for event in agent.model(31).ended]

    assert outcomes == ["finished", "canceled"]


# ---- the order of events


def test_events_of_this_vm_come_before_those_of_others() -> None:
    of_this_vm = item("this VM", NotBefore="Sun, 01 Mar 2026 13:00:00 GMT")
    of_peer = item("peer", Resources=[PEER], **STARTED)

    model = Agent().sees(0).sees(1, of_peer, of_this_vm).model(2)

    assert pending_ids(model) == ["this VM", "peer"]


def test_worst_event_comes_first() -> None:
    freeze = item("freeze", **STARTED)
    reboot = item("reboot", EventType="Reboot", **STARTED)
    preempt = item("preempt", EventType="Preempt", NotBefore="Sun, 01 Mar 2026 12:00:17 GMT")
    far = item("far", EventType="Redeploy", NotBefore="Sun, 08 Mar 2026 12:00:00 GMT")

    model = Agent().sees(0).sees(1, freeze, far, preempt, reboot).model(2)

    assert pending_ids(model) == ["reboot", "preempt", "far", "freeze"]
    assert "Reboot of this VM is under way." in text_of(model)


@pytest.mark.parametrize(
    ("items", "seconds", "sentence"),
    [
        ([item()], 2, "Freeze of this VM is next, not before 12:15:00 UTC."),
        ([item()], 901, "Freeze of this VM was due at 12:15:00 UTC, and has not started."),
        ([item(NotBefore=None)], 2, "Freeze of this VM is next, at a time not given."),
        (
            [item(EventType=SPOT_REBALANCE)],
            2,
            f"{SPOT_REBALANCE} of this VM is listed.",
        ),
        ([item(Resources=[PEER])], 2, "Freeze of another VM is next"),
        ([item(Resources=[])], 2, "Freeze of perhaps this VM is next"),
        ([item("a"), item("b")], 2, "UTC. 1 more is pending."),
        ([item("a"), item("b"), item("c")], 2, "UTC. 2 more are pending."),
        (
            [item(NotBefore="Mon, 02 Mar 2026 09:00:00 GMT")],
            2,
            "is next, not before 2026-03-02 09:00:00 UTC.",
        ),
    ],
)
def test_summary_says_what_is_next(items: list[Any], seconds: int, sentence: str) -> None:
    model = Agent().sees(0).sees(1, *items).model(seconds)

    assert sentence in model.summary


def test_summary_says_that_listed_events_may_be_outdated() -> None:
    model = Agent().sees(0).sees(1, item()).model(2)

    silent = replace(model, listed=replace(model.listed, silence="IMDS gives no answer"))

    assert silent.summary.endswith("what is scheduled now is not known.")


# ---- the state of the agent


def test_summary_says_that_something_cannot_be_read() -> None:
    model = Agent().model(0)

    unreadable = replace(model, listed=replace(model.listed, unreadable=1))

    assert unreadable.summary.startswith("Something is scheduled that cannot be read")


@pytest.mark.parametrize(
    ("polled", "ready", "sentence"),
    [
        (True, True, "Nothing is scheduled."),
        (True, False, "Nothing was scheduled when IMDS last answered."),
        (False, False, "What is scheduled is not known yet: IMDS has not answered."),
    ],
)
def test_page_claims_that_nothing_is_scheduled_only_when_known(
    polled: bool, ready: bool, sentence: str
) -> None:
    model = Agent().model(0, polled=polled, ready=CheckResult(ready))

    assert sentence in text_of(model)


def test_page_shows_why_agent_is_not_ready() -> None:
    not_ready = CheckResult(ok=False, reasons=("the last good answer is old",))

    text = text_of(Agent().model(90, ready=not_ready))

    assert "IMDS: not ready" in text
    assert "the last good answer is old" in text


def test_page_shows_why_state_is_only_in_memory() -> None:
    text = text_of(Agent().model(90, degraded="disk full"))

    assert "no, kept in memory only: disk full" in text


@pytest.mark.parametrize(
    "part",
    [
        "Deliveries: 4 waiting, the oldest for 1m30s, 1 dead",
        "oncall slack 3 1m30s 1 7 0 403: invalid_token",
        "hook webhook 0 - 0 0 0 none",
        "old no longer configured 1",
    ],
)
def test_page_shows_deliveries_by_sink(part: str) -> None:
    outbox = OutboxView(
        rows={("oncall", "pending"): 3, ("oncall", "dead"): 1, ("old", "pending"): 1},
        oldest={("oncall", "critical"): at(0).timestamp()},
        counts={("oncall", "delivered"): 7},
        errors={"oncall": "403: invalid_token"},
    )

    text = text_of(Agent().model(90, kinds={"oncall": "slack", "hook": "webhook"}, outbox=outbox))

    assert part in text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, "○ Deliveries: no sink", id="no sink"),
        pytest.param({"kinds": {"oncall": "slack"}}, "✓ Deliveries: none waiting", id="a sink"),
        pytest.param(
            {"outbox": OutboxView(rows={("old", "dead"): 1})},
            "! Deliveries: no sink, 1 dead",
            id="removed sink",
        ),
    ],
)
def test_page_marks_deliveries_as_unused_good_or_bad(fields: dict[str, Any], expected: str) -> None:
    assert expected in text_of(Agent().model(1, **fields))


# ---- foreign texts

HOSTILE = st.text(min_size=1, max_size=60) | st.sampled_from(
    [
        "<script>x</script>",
        "\"' onload=x",
        "</title><img src=x>",
        "\u202egnp.exe",
        "&lt;b&gt;",
        "]]>",
        "\x00\x1b[2J",
    ]
)


@given(HOSTILE)
def test_page_escapes_texts_from_outside(text: str) -> None:
    fields = {
        "EventType": text,
        "EventStatus": text,
        "EventSource": text,
        "Description": text,
        "Resources": [text, ME],
    }
    agent = Agent()
    agent.vm = Vm(name=text, location=text)
    agent.sees(0)
    agent.sees(1, item(text, **fields), item("2", EventType=text))
    agent.sees(2, item(text, **fields))

    page = read(
        agent.model(
            3,
            ready=CheckResult(ok=False, reasons=(text,)),
            kinds={text: text},
            outbox=OutboxView(rows={(text, "pending"): 1}),
            degraded=text,
            approval_off=text,
            endpoint=text,
        )
    )

    names = {name for name, _ in page.attributes}
    sources = {value for name, value in page.attributes if name == "src"}
    assert page.elements <= ELEMENTS
    assert not [name for name in names if name.startswith("on")]
    assert "style" not in names
    assert sources == {"page/page.js"}
    assert not set("".join(page.texts)) & set("\u202e\u2066\x00\x1b\u200b")


# ---- bounds


def test_page_is_small_when_many_events_are_listed() -> None:
    fields = {"Description": "x" * 2000, "Resources": [f"vm-{number}" for number in range(300)]}
    agent = Agent().sees(0)
    agent.sees(1, *[item(f"id-{number}", **fields) for number in range(150)])

    model = agent.model(2)

    text = text_of(model)
    assert "And 50 more" in text
    assert "and 295 more" in text
    assert len(render(model)) < 300_000


def test_page_shows_a_bounded_number_of_ended_events() -> None:
    agent = Agent().sees(0)
    agent.sees(1, *[item(f"id-{number}") for number in range(150)])
    agent.changes = []  # only the ends are shown
    agent.sees(3)

    agent.sees(4, item("late"))

    courses = render(agent.model(5)).count(b'<svg class="course"')
    assert courses == MAX_ENDED + 1  # the pending event has a drawing too


# ---- times and the scale


@pytest.mark.parametrize(
    ("seconds", "clock"),
    [
        (0, "0:00"),
        (9.9, "0:09"),
        (61, "1:01"),
        (3723, "1:02:03"),
        (90_000, "1d 01:00:00"),
        (-0.5, "0:00"),
        (-65, "1:05"),
    ],
)
def test_countdown_is_written_as_a_clock(seconds: float, clock: str) -> None:
    assert timer(seconds) == clock


@given(st.floats(-4e6, 4e6), st.floats(-4e6, 4e6))
def test_scale_keeps_order_and_bounds(first: float, second: float) -> None:
    scale = Scale(900, 3600)

    left = scale.x(min(first, second))
    right = scale.x(max(first, second))

    assert left >= 0
    assert left <= right
    assert right <= 100
