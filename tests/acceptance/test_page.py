"""A real browser shows the page of a running agent, which watches a simulated IMDS."""

import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from axe_playwright_python.sync_playwright import Axe
from msgspec.structs import replace
from playwright.sync_api import Browser, Page, ViewportSize, expect

from notbefore.core.record import Vm
from notbefore.core.tracked import PendingEvent, PendingView
from notbefore.metrics.totals import OutboxView
from notbefore.simulator.server import Simulator
from notbefore.web.app import CheckResult
from notbefore.web.page.model import PageModel, TimelineEvent
from notbefore.web.page.render import render, timer
from support.agent import RunningAgent, eventually
from support.azure import ME, PEER, Story, at, body, item
from support.browser import PageLog, chromium

PHONE: ViewportSize = {"width": 360, "height": 740}
DESK: ViewportSize = {"width": 1280, "height": 800}
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def imds() -> Iterator[Simulator]:
    with Simulator((ME, PEER)) as simulator:
        yield simulator


@pytest.fixture(scope="module")
def agent(imds: Simulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent with thirteen events in its history, one of which has started."""
    past_events = [item(f"past-{number}", NotBefore=due(900)) for number in range(12)]
    with RunningAgent(imds.endpoint, tmp_path_factory.mktemp("state")) as agent:
        imds.set_document(body(*past_events, incarnation=2))
        eventually(lambda: len(agent.records) == 12)
        imds.set_document(body(item("started", EventStatus="Started", NotBefore=""), incarnation=3))
        eventually(lambda: len(agent.records) == 25)
        imds.set_document(body(incarnation=4))
        eventually(lambda: len(agent.records) == 26)
        yield agent


@pytest.fixture
def visit(browser: Browser, agent: RunningAgent, imds: Simulator) -> Iterator[Open]:
    """Open the page. It complains of nothing, and asks only its own agent."""
    imds.set_document(body(incarnation=5))
    eventually(lambda: not agent.json("/api/v1/events")["events"])
    logs = []

    def open_page(**settings: object) -> Page:
        page = browser.new_context(**{"viewport": DESK, **settings}).new_page()  # type: ignore[arg-type]  # any setting
        logs.append(PageLog(page))
        page.goto(f"http://127.0.0.1:{agent.port}/")
        return page

    yield open_page
    for context in browser.contexts:
        context.close()
    for log in logs:
        assert log.complaints == []
        assert log.requests
        assert all(url.startswith(f"http://127.0.0.1:{agent.port}/") for url in log.requests)


def due(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


def pending(*names: str, **fields: object) -> bytes:
    events = [item(name, NotBefore=due(900), **fields) for name in names]
    return body(*events, incarnation=6)


def seconds(page: Page) -> int:
    """Return the seconds that the timer of the first event shows."""
    minutes, rest = page.locator("#pending [role=timer]").first.inner_text().split(":")
    return int(minutes) * 60 + int(rest)


def test_page_shows_a_change_and_counts_down_without_a_reload(
    visit: Open, imds: Simulator, record_property: Callable[[str, object], None]
) -> None:
    page = visit()
    expect(page.locator("#pending")).to_contain_text("No event is listed.")

    listed = time.monotonic()
    imds.set_document(pending("appears"))

    expect(page.locator("#pending tbody tr")).to_have_count(1)
    # a poll (each 0.2 s here) and a refresh (each 0.5 s)
    record_property("seconds_to_appear", time.monotonic() - listed)
    expect(page).to_have_title(f"1 pending - {ME} - notbefore")
    expect(page.locator("#pending .approval")).to_contain_text("Approval is off (default).")
    expect(page.get_by_role("link", name="Documents")).to_have_count(1)
    first = seconds(page)

    assert 800 < first < 900

    eventually(lambda: seconds(page) <= first - 2)

    imds.set_document(body(incarnation=7))
    expect(page.locator("#timeline tbody tr").first).to_contain_text("canceled")


def test_page_counts_on_and_warns_when_the_agent_is_silent(visit: Open, imds: Simulator) -> None:
    imds.set_document(pending("silent"))
    page = visit()
    expect(page.locator("#pending tbody tr")).to_have_count(1)

    # the browser itself would complain of a cut connection
    page.evaluate("() => { window.fetch = () => Promise.reject(new TypeError('no answer')) }")
    expect(page.get_by_role("alert")).to_contain_text("The agent does not answer")
    first = seconds(page)

    eventually(lambda: seconds(page) <= first - 2)


def test_page_says_that_not_before_has_passed(visit: Open, imds: Simulator) -> None:
    imds.set_document(pending("past"))
    page = visit()
    expect(page.locator("#pending tbody tr")).to_have_count(1)
    # without refreshes, which would bring NotBefore back
    page.evaluate("() => { window.fetch = () => Promise.reject(new TypeError('no answer')) }")
    # then the refresh that was under way has ended
    expect(page.get_by_role("alert")).to_contain_text("The agent does not answer")

    page.evaluate(
        "() => { document.querySelector('[data-until]').dataset.until = Date.now() / 1000 - 5 }"
    )

    expect(page.locator("#pending .unit")).to_have_text("past its NotBefore")
    assert "-" not in page.locator("#pending [role=timer]").inner_text()


def test_browser_formats_times_as_the_agent_does(visit: Open) -> None:
    page = visit()
    times = [0, 9.9, 61, 3723.5, 36_000, 90_000, 864_000, -0.5, -65, -3723]

    assert page.evaluate("times => times.map(timer)", times) == [timer(time) for time in times]


def test_time_has_a_tooltip_in_the_zone_of_the_browser(visit: Open) -> None:
    page = visit(timezone_id="Asia/Kolkata", locale="en-GB")
    expect(page.locator("#pending .nothing")).to_contain_text("Watching since")
    expect(page.locator("#pending .nothing")).to_contain_text("The last event: Freeze")
    shown = page.locator("#pending .nothing time").first
    utc = datetime.fromisoformat(str(shown.get_attribute("datetime")))
    shown.hover()
    local = (utc + timedelta(hours=5, minutes=30)).strftime("%H:%M:%S")
    expect(shown).to_have_attribute("title", re.compile(local))


def test_refresh_keeps_selection_focus_and_position(visit: Open, imds: Simulator) -> None:
    imds.set_document(pending("first", Description="to be selected"))
    page = visit(viewport=PHONE)
    expect(page.locator("#pending tbody tr")).to_have_count(1)
    page.get_by_text("to be selected").dblclick()
    selection = (
        "[getSelection().toString(), getSelection().getRangeAt(0).getBoundingClientRect().top]"
    )
    page.locator("nav a").first.focus()
    text_before, top_before = page.evaluate(f"scrollTo(0, 300), {selection}")

    imds.set_document(pending("first", "second", Description="to be selected"))
    expect(page.locator("#pending tbody tr")).to_have_count(2)

    text, top = page.evaluate(selection)
    assert text_before.strip() in ("to", "be", "selected")
    assert text == text_before
    # in pixels: the text does not move, although a line above may need more room
    assert abs(top - top_before) <= 1
    assert page.evaluate("document.activeElement.textContent") == "/metrics"


REFRESHES = """bodies => {
  paused = true;
  const parsed = (text) => new DOMParser().parseFromString(text, "text/html").body;
  const uncounted = (body) => {
    for (const timer of body.querySelectorAll("[role=timer]")) timer.textContent = "";
    return body.innerHTML;
  };
  const wrong = [];
  for (const [from, before] of bodies.entries()) {
    for (const [to, after] of bodies.entries()) {
      document.body.innerHTML = parsed(before).innerHTML;
      update(document.body, parsed(after));
      if (uncounted(document.body) !== uncounted(parsed(after))) wrong.push([from, to]);
    }
  }
  return wrong;
}"""


def test_refresh_turns_any_page_into_any_other(visit: Open) -> None:
    page = visit()

    bodies = [render(model).decode() for model in different_pages()]

    assert len(set(bodies)) == 6
    assert page.evaluate(REFRESHES, bodies) == []


def different_pages() -> list[PageModel]:
    """Return pages that differ by parts in the middle and at the end."""
    vm = Vm(name=ME, location="norwayeast")
    unready = CheckResult(ok=False, reasons=("it is old", "and it is unreadable"))
    outbox = OutboxView(rows={("oncall", "pending"): 1, ("old", "dead"): 1})
    tracked = Story().sees(0).sees(1, item("1"), item("2", EventStatus="Started")).tracked
    events = tuple(PendingEvent.of(event, at(2)) for event in tracked.events.values())
    first, second = events
    ended = tuple(TimelineEvent.of(event) for event in events)

    empty = PageModel(now=at(0), ready=CheckResult(ok=True))
    named = replace(empty, listed=PendingView(1, at(0), vm, 0, ()))
    return [
        empty,
        named,
        replace(named, ready=unready, kinds={"oncall": "slack"}, outbox=outbox),
        replace(named, listed=replace(named.listed, events=events)),
        replace(empty, listed=replace(empty.listed, events=(second,)), ended=ended),
        replace(named, ready=unready, listed=replace(named.listed, events=(second, first))),
    ]


def test_page_can_be_paused_with_the_keyboard(visit: Open, imds: Simulator) -> None:
    page = visit()
    page.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name=re.compile("Paused at .*: resume"))).to_be_focused()
    imds.set_document(pending("unseen"))
    other = visit()
    expect(other.locator("#pending tbody tr")).to_have_count(1)
    expect(page.locator("#pending tbody tr")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(page.locator("#pending tbody tr")).to_have_count(1)


@pytest.mark.parametrize("viewport", [PHONE, DESK])
def test_page_is_accessible_on_phone_and_desk(
    visit: Open, imds: Simulator, viewport: ViewportSize
) -> None:
    started = item("now", EventStatus="Started", EventType="Reboot", NotBefore="", Resources=[PEER])
    imds.set_document(body(item("soon", NotBefore=due(900)), started, incarnation=9))
    page = visit(viewport=viewport, color_scheme="light")
    expect(page.locator("#pending tbody tr")).to_have_count(2)

    report = Axe().run(page)
    page.emulate_media(color_scheme="dark")
    dark_report = Axe().run(page, options={"runOnly": ["color-contrast"]})

    assert report.violations_count == 0, report.generate_report()
    assert dark_report.violations_count == 0, dark_report.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]

    # on a phone the cells are blocks, but a screen reader must still find a table
    table = page.get_by_role("table", name="Events that Azure lists now")
    assert table.get_by_role("rowheader").count() == 2
    assert table.get_by_role("cell").count() == 10
    assert page.evaluate("document.getAnimations().length") == 0
