"""The page of an instance of ``notbefore fleet`` in a real browser."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ViewportSize, expect

from notbefore.fleet.history import History
from notbefore.wording.records import heartbeat_of
from support.agent import eventually
from support.browser import PageLog, chromium
from support.fleet_instance import RunningFleet, send, write_fleet_config
from support.fleet_records import report, vm
from support.hub import Hub
from support.past_events import past_event
from support.peers import HttpPeer

PHONE: ViewportSize = {"width": 360, "height": 740}
DESK: ViewportSize = {"width": 1280, "height": 800}
VMS = [vm(f"web_{number}") for number in range(12)]


def remember(state: Path) -> None:
    """One event of this month, and one of the month before."""
    yesterday = datetime.now(UTC) - timedelta(days=1)
    events = [
        past_event(
            "E-1", "Freeze", closed=yesterday, notice=(900.0, 300.0), interruption=(4.0, 7.0)
        ),
        past_event("E-2", "Reboot", closed=yesterday - timedelta(days=40)),
    ]
    History(state).write(events, yesterday.timestamp())


def tell(hub: Hub) -> None:
    """Two events, which affect six VMs each, and are seen by all twelve."""
    now = datetime.now(UTC)
    send(hub, [heartbeat_of(vm, (), "1", now, 3600.0) for vm in VMS])
    for number in (0, 1):
        hit = [vm.name for vm in VMS[number * 6 : number * 6 + 6]]
        due = now + timedelta(minutes=14)
        send(
            hub,
            [
                report(vm, "announced", f"W-{number}", resources=hit, not_before=due, notice=840.0)
                for vm in VMS
            ],
        )


# one test: an instance takes a while to get there, and several workers would each have their own
def test_fleet_page_shows_coming_waves_and_the_month_accessibly(
    hub: Hub, hook: HttpPeer, tmp_path: Path
) -> None:
    remember(tmp_path / "state")
    tell(hub)
    config = write_fleet_config(
        tmp_path,
        hub,
        hook.url,
        group_by=["subscription", "resource_group", "scale_set", "event_type"],
    )
    with RunningFleet(config, tmp_path / "state") as fleet, chromium() as browser:
        eventually(
            lambda: [wave["events"] for wave in fleet.json("/api/v1/fleet/events")["waves"]] == [2]
        )

        page = browser.new_context(viewport=DESK).new_page()
        heard = PageLog(page)
        url = f"http://127.0.0.1:{fleet.port}/"
        page.goto(url)
        row = page.locator("#pending tbody tr")
        expect(row).to_have_count(1)
        expect(row).to_contain_text("12 VMs: web_0, web_1, web_2, web_3, web_4 and 7 more")
        expect(page).to_have_title("1 coming - fleet - notbefore")
        expect(page.locator(".summary")).to_contain_text(
            "Reboot of 12 VMs in web is next, not before"
        )
        month = page.locator("#month")
        # what is older than 30 days is the report's
        expect(month.locator("tbody tr")).to_have_count(1)
        expect(month).to_contain_text("1 of 2")
        expect(page.locator(".sinks tbody tr")).to_have_count(1)
        expect(row.locator("[role=timer]")).not_to_have_text(
            row.locator("[role=timer]").inner_text()
        )

        assert heard.complaints == []
        assert all(request.startswith(url) for request in heard.requests)

        for viewport in (DESK, PHONE):
            page.set_viewport_size(viewport)
            assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
        page.goto(f"{url}?event_type=Freeze")
        # what is loaded again
        with page.expect_request(lambda one: one.url == f"{url}?event_type=Freeze"):
            expect(row).to_have_count(0)
