"""The page of an instance of ``notbefore fleet`` in a real browser."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ViewportSize, expect

from notbefore.core.record import Heartbeat
from notbefore.fleet.history import History
from support.agent import eventually
from support.browser import Heard, chromium
from support.fleet_instance import RunningFleet, configured, send
from support.fleet_records import report, vm
from support.hub import Hub
from support.past import past
from support.peers import HttpPeer

PHONE: ViewportSize = {"width": 360, "height": 740}
DESK: ViewportSize = {"width": 1280, "height": 800}
VMS = [vm(f"web_{number}") for number in range(12)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """A wave of two events is coming, one VM is missing, and a month has passed."""
    directory = tmp_path_factory.mktemp("fleet")
    yesterday = datetime.now(UTC) - timedelta(days=1)
    events = [
        past("E-1", "Freeze", closed=yesterday, notice=(900.0, 300.0), interruption=(4.0, 7.0)),
        past("E-2", "Reboot", closed=yesterday - timedelta(days=40)),
    ]
    History(directory / "state").write(events, [], yesterday.timestamp())
    (directory / "names.txt").write_text("web_0\nweb_99\n")
    with Hub(directory) as hub, HttpPeer() as hook:
        now = datetime.now(UTC)
        due = now + timedelta(minutes=14)
        send(hub, [Heartbeat.of(one, (), "1", now, 3600.0) for one in VMS])
        for number in (0, 1):
            hit = [one.name for one in VMS[number * 6 : number * 6 + 6]]
            event = f"WAVE-{number}"
            send(hub, [report(one, "announced", event, resources=hit, not_before=due, notice=840.0) for one in VMS])
        settings = {
            "group_by": ["subscription", "resource_group", "scale_set", "event_type"],
            "inventory_file": "names.txt",
            "missing_after": "3s",
        }
        config = configured(directory, hub, hook.url, **settings)
        with RunningFleet(config, directory / "state") as running:
            running.ready()
            eventually(lambda: running.json("/api/v1/fleet/events")["waves"])
            eventually(lambda: running.json("/api/v1/fleet/events")["missing"] == ["web_99"])
            yield running


@pytest.mark.timeout(300)
@pytest.mark.long
def test_the_page_shows_what_is_coming_by_wave_who_is_missing_and_how_the_month_went(
    fleet: RunningFleet, browser: Browser
) -> None:
    page = browser.new_context(viewport=DESK).new_page()
    heard = Heard(page)
    page.goto(f"http://127.0.0.1:{fleet.port}/")
    row = page.locator("#pending tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("12 VMs: web_0")
    expect(row).to_contain_text("and 7 more")
    expect(page).to_have_title("1 coming - fleet - notbefore")
    expect(page.locator(".summary")).to_contain_text("Reboot of 12 VMs in web is next, not before")
    expect(page.locator(".summary")).to_contain_text("1 VM is missing.")
    first = row.locator("[role=timer]").inner_text()
    page.wait_for_function("first => document.querySelector('#pending [role=timer]').innerText !== first", arg=first)
    expect(page.locator("#silent")).to_contain_text("1 VM missing")
    expect(page.locator("#silent")).to_contain_text("web_99")
    month = page.locator("#month")
    expect(month.locator("tbody tr")).to_have_count(1)  # what is older than 30 days is the report's
    expect(month).to_contain_text("1 of 2")
    expect(page.locator(".sinks tbody tr")).to_have_count(1)
    assert heard.complaints == []
    assert all(url.startswith(f"http://127.0.0.1:{fleet.port}/") for url in heard.requests)


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_the_page_can_be_read_by_everyone_and_fits_its_screen(
    fleet: RunningFleet, browser: Browser, viewport: ViewportSize
) -> None:
    page = browser.new_context(viewport=viewport).new_page()
    page.goto(f"http://127.0.0.1:{fleet.port}/")
    expect(page.locator("#month tbody tr")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
