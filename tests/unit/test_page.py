"""The page without a server: what it says of which state, that it says all of it as text, and that
it stays bounded.
"""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.core.record import Vm
from notbefore.core.tracked import PendingEvent, PendingView
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
    """What the agent would answer, without I/O."""

    vm = Vm(name=ME, location="norwayeast")

    def model(self, seconds: float, *, polled: bool = True, **said: Any) -> PageModel:
        events = PendingView(
            incarnation=self.tracked.incarnation,
            last_successful_poll=at(seconds) if polled else None,
            vm=self.vm,
            unreadable=0,
            events=tuple(
                PendingEvent.of(tracked, at(seconds)) for tracked in self.tracked.by_urgency
            ),
        )
        history = [record_of(one, self.vm).line() for one in self.changes]
        ready = said.pop("ready", CheckResult(ok=True))
        return PageModel(at(seconds), ready, events, newest_ended(history), **said)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements, self.attributes, self.texts = set[str](), set[tuple[str, str]](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(model: PageModel) -> _Reader:
    reader = _Reader()
    reader.feed(render(model).decode())
    return reader


def said(model: PageModel) -> str:
    """The page's text on one line."""
    return re.sub(r"\s+", " ", " ".join(read(model).texts))


def test_an_event_is_shown_with_its_countdown_and_what_is_known_of_it() -> None:
    text = said(Agent().sees(0).sees(1, item()).model(10.5))
    assert "Without JavaScript this page does not refresh: load it again for what is new." in text
    for part in (
        "Freeze of this VM is next, not before 12:15:00 UTC.",
        "14:49 to NotBefore",
        ME,
        ID,
        "14m59s",
        "5s",
    ):
        assert part in text
    assert "Approval is on." in text


def test_the_sentences_about_one_event_are_those_of_its_moment() -> None:
    seen, unseen = Agent().sees(0).sees(1, item()), Agent().sees(0, item(**STARTED), silence=None)
    late, begun = said(seen.model(943)), said(seen.sees(900, item(**STARTED)).model(965))
    assert "Freeze of this VM was due at 12:15:00 UTC, and has not started." in late
    assert "0:43 past its NotBefore" in late
    assert "Freeze of this VM is under way." in begun
    assert "1:05 since its start" in begun
    assert "started before this agent looked" in said(unseen.model(65))
    assert "since its start" not in said(unseen.model(65))
    assert "14m59s 10m00s 7.2s finished" in said(seen.sees(1500, gap=7.2).model(2000))
    unseen.sees(5000, silence=4000.0)
    assert "finished it was Started, and is no longer listed; nobody saw when it ended" in said(
        unseen.model(5001)
    )


def test_this_vms_events_come_before_those_of_others() -> None:
    mine, theirs = (
        item("mine", NotBefore="Sun, 01 Mar 2026 13:00:00 GMT"),
        item("theirs", Resources=[PEER], **STARTED),
    )
    assert [event.event_id for event in Agent().sees(0).sees(1, theirs, mine).model(2).pending] == [
        "mine",
        "theirs",
    ]


def test_the_worst_comes_first_whatever_is_under_way() -> None:
    freeze, reboot = item("freeze", **STARTED), item("reboot", EventType="Reboot", **STARTED)
    preempt = item("preempt", EventType="Preempt", NotBefore="Sun, 01 Mar 2026 12:00:17 GMT")
    far = item("far", EventType="Redeploy", NotBefore="Sun, 08 Mar 2026 12:00:00 GMT")
    model = Agent().sees(0).sees(1, freeze, far, preempt, reboot).model(2)
    assert [event.event_id for event in model.pending] == ["reboot", "preempt", "far", "freeze"]
    assert "Reboot of this VM is under way." in said(model)


@pytest.mark.parametrize(
    ("polled", "ready", "sentence"),
    [
        (True, True, "Nothing is scheduled."),
        (True, False, "Nothing was scheduled when IMDS last answered."),
        (False, False, "What is scheduled is not known yet: IMDS has not answered."),
    ],
)
def test_nothing_pending_is_claimed_only_when_it_is_known(
    polled: bool, ready: bool, sentence: str
) -> None:
    assert sentence in said(Agent().model(0, polled=polled, ready=CheckResult(ready)))


def test_an_event_id_that_came_back_has_two_lives() -> None:
    agent = Agent().sees(0).sees(1, item()).sees(10).sees(20, item(**STARTED)).sees(30)
    assert [event.outcome for event in agent.model(31).ended] == ["finished", "canceled"]


def test_the_agents_own_state_is_said() -> None:
    outbox = OutboxView(
        rows={("oncall", "pending"): 3, ("oncall", "dead"): 1, ("old", "pending"): 1},
        oldest={("oncall", "critical"): at(0).timestamp()},
        counts={("oncall", "delivered"): 7},
        errors={"oncall": "403: invalid_token"},
    )
    text = said(
        Agent().model(
            90,
            ready=CheckResult(ok=False, reasons=("the last good answer is old",)),
            degraded="disk full",
            kinds={"oncall": "slack", "hook": "webhook"},
            outbox=outbox,
        )
    )
    for part in (
        "IMDS: not ready",
        "the last good answer is old",
        "no, kept in memory only: disk full",
        "Deliveries: 4 waiting, the oldest for 1m30s, 1 dead",
        "oncall slack 3 1m30s 1 7 0 403: invalid_token",
        "hook webhook 0 - 0 0 0 none",
        "old no longer configured 1",
    ):
        assert part in text


def test_where_nobody_is_notified_the_deliveries_are_neither_well_nor_ill() -> None:
    assert "○ Deliveries: no sink" in said(Agent().model(1))
    assert "✓ Deliveries: none waiting" in said(Agent().model(1, kinds={"oncall": "slack"}))
    left = OutboxView(rows={("old", "dead"): 1})
    assert "! Deliveries: no sink, 1 dead" in said(Agent().model(1, outbox=left))


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
def test_every_text_from_outside_stays_text(text: str) -> None:
    given = {
        "EventType": text,
        "EventStatus": text,
        "EventSource": text,
        "Description": text,
        "Resources": [text, ME],
    }
    agent = Agent()
    agent.vm = Vm(name=text, location=text)
    agent.sees(0).sees(1, item(text, **given), item("2", EventType=text)).sees(
        2, item(text, **given)
    )
    doubt = CheckResult(ok=False, reasons=(text,))
    agent_says: dict[str, Any] = dict.fromkeys(("degraded", "approval_off", "endpoint"), text)
    outbox = OutboxView(rows={(text, "pending"): 1})
    seen = read(agent.model(3, ready=doubt, kinds={text: text}, outbox=outbox, **agent_says))
    assert seen.elements <= ELEMENTS
    assert not {name for name, _ in seen.attributes if name.startswith("on") or name == "style"}
    assert {value for name, value in seen.attributes if name == "src"} == {"page/page.js"}
    assert not any(mark in "".join(seen.texts) for mark in "\u202e\u2066\x00\x1b\u200b")


def test_the_page_stays_small_whatever_is_listed() -> None:
    long = {"Description": "x" * 2000, "Resources": [f"vm-{number}" for number in range(300)]}
    agent = Agent().sees(0).sees(1, *(item(f"id-{number}", **long) for number in range(150)))
    model = agent.model(2)
    assert "And 50 more" in said(model)
    assert "and 295 more" in said(model)
    assert len(render(model)) < 300_000
    agent.changes = []
    agent.sees(3).sees(4, item("late"))
    assert render(agent.model(5)).count(b'<svg class="course"') == MAX_ENDED + 1


def test_a_countdown_is_written_as_a_clock() -> None:
    written = {
        0: "0:00",
        9.9: "0:09",
        61: "1:01",
        3723: "1:02:03",
        90_000: "1d 01:00:00",
        -0.5: "0:00",
        -65: "1:05",
    }
    assert {seconds: timer(seconds) for seconds in written} == written


@given(st.floats(-4e6, 4e6), st.floats(-4e6, 4e6))
def test_the_scale_keeps_the_order_and_its_bounds(one: float, other: float) -> None:
    scale = Scale(900, 3600)
    low, high = scale.x(min(one, other)), scale.x(max(one, other))
    assert 0 <= low <= high <= 100
