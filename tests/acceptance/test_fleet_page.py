"""The page of an instance of ``notbefore fleet`` in a real browser."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect

from notbefore.fleet.history import History
from notbefore.wording.records import heartbeat_of
from support.agent import becomes
from support.browser import PageLog, chromium
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.past_events import past_event
from support.peers import HttpPeer

PHONE: ViewportSize = {"width": 360, "height": 740}
DESK: ViewportSize = {"width": 1280, "height": 800}
VMS = [vm(f"web_{number}") for number in range(12)]


def write_history(state: Path) -> None:
    """Write one event of this month, and one of the month before."""
    yesterday = datetime.now(UTC) - timedelta(days=1)
    events = [
        past_event(
            "E-1", "Freeze", closed=yesterday, notice=(900.0, 300.0), interruption=(4.0, 7.0)
        ),
        past_event("E-2", "Reboot", closed=yesterday - timedelta(days=40)),
    ]
    History(state).write(events, yesterday.timestamp())


def send_events(hub: Hub) -> None:
    """Let all twelve VMs report two events, which affect six VMs each."""
    now = datetime.now(UTC)
    send(hub, [heartbeat_of(vm, (), "1", now, 3600.0) for vm in VMS])
    due = now + timedelta(minutes=14)
    for number in (0, 1):
        affected = [vm.name for vm in VMS[number * 6 : number * 6 + 6]]
        fields: dict[str, Any] = {"resources": affected, "not_before": due, "notice": 840.0}
        send(hub, [report(vm, "announced", f"W-{number}", **fields) for vm in VMS])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """An instance that shows one wave of two events."""
    directory = tmp_path_factory.mktemp("fleet")
    group_by = ["subscription", "resource_group", "scale_set", "event_type"]
    write_history(directory / "state")
    with Hub(directory) as hub, HttpPeer() as hook:
        send_events(hub)
        config = write_fleet_config(directory, hub, hook.url, group_by=group_by)
        with RunningFleet(config, directory / "state") as fleet:

            def events_of_waves() -> list[int]:
                waves = fleet.json("/api/v1/fleet/events")["waves"]
                return [wave["events"] for wave in waves]

            becomes(events_of_waves, [2])
            yield fleet


@pytest.fixture(scope="module")
def browser(fleet: RunningFleet) -> Iterator[Browser]:
    """A browser. It starts after the instance: its event loop excludes that of ``send``."""
    assert fleet.port
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, fleet: RunningFleet) -> Iterator[Page]:
    """A page that complains of nothing, and asks only its own instance."""
    page = browser.new_context(viewport=DESK).new_page()
    heard = PageLog(page)
    yield page
    page.close()

    assert heard.complaints == []
    assert heard.requests
    assert all(url.startswith(url_of(fleet)) for url in heard.requests)


def url_of(fleet: RunningFleet) -> str:
    return f"http://127.0.0.1:{fleet.port}/"


def test_page_shows_the_coming_wave_and_counts_down(page: Page, fleet: RunningFleet) -> None:
    row = page.locator("#pending tbody tr")
    timer = row.locator("[role=timer]")

    page.goto(url_of(fleet))

    expect(row).to_have_count(1)
    expect(row).to_contain_text("12 VMs: web_0, web_1, web_2, web_3, web_4 and 7 more")
    expect(page).to_have_title("1 coming - fleet - notbefore")
    expect(page.locator(".summary")).to_contain_text("Reboot of 12 VMs in web is next, not before")
    expect(page.locator(".sinks tbody tr")).to_have_count(1)
    expect(timer).not_to_have_text(timer.inner_text())


def test_page_summarizes_the_last_30_days(page: Page, fleet: RunningFleet) -> None:
    month = page.locator("#month")

    page.goto(url_of(fleet))

    expect(month.locator("tbody tr")).to_have_count(1)
    expect(month).to_contain_text("1 of 2")


@pytest.mark.parametrize("viewport", [DESK, PHONE])
def test_page_is_accessible_on_desk_and_phone(
    page: Page, fleet: RunningFleet, viewport: ViewportSize
) -> None:
    page.set_viewport_size(viewport)
    page.goto(url_of(fleet))
    expect(page.locator("#pending tbody tr")).to_have_count(1)

    report_of_axe = Axe().run(page)

    assert report_of_axe.violations_count == 0, report_of_axe.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_page_keeps_its_filter_when_it_refreshes(page: Page, fleet: RunningFleet) -> None:
    filtered = f"{url_of(fleet)}?event_type=Freeze"

    page.goto(filtered)

    with page.expect_request(lambda request: request.url == filtered):
        expect(page.locator("#pending tbody tr")).to_have_count(0)
