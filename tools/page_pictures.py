"""Draws ``page.png`` and ``page-phone.png``, the agent's page: ``make page-pictures``.

Headless Chromium shows the page of a real agent, which polls a simulated IMDS. The history of the
agent is written before its start: the changes that the core finds in scenarios of the simulator.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace
from playwright.sync_api import Browser, ViewportSize, expect

from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.lifecycle import diff
from notbefore.core.record import Vm
from notbefore.core.tracked import Observation, Tracked
from notbefore.simulator.server import Simulator
from notbefore.simulator.state import SCENARIOS, Play
from notbefore.store.file import FILE_NAME, Content, StateFile, StoredChange
from notbefore.wording.records import record_of
from support.agent import RunningAgent
from support.azure import ME, PEER, document
from support.browser import chromium

DAY: Final = 86_400  # seconds
DESK: Final[ViewportSize] = {"width": 1280, "height": 800}
PHONE: Final[ViewportSize] = {"width": 360, "height": 740}


class PastEvent(NamedTuple):
    """An event of ``ME`` that has ended."""

    days_ago: float
    scenario: str
    interruption: float  # seconds that it stopped the VM


PAST: Final = (
    PastEvent(19.4, "canceled-maintenance", 0.0),
    PastEvent(16.7, "live-migration", 1.4),
    PastEvent(13.1, "hardware-failure", 35.0),
    PastEvent(6.8, "memory-preserving-update", 4.2),
)


def main(directory: Path) -> None:
    """Draw both pictures."""
    with tempfile.TemporaryDirectory(prefix="notbefore-pictures-") as temporary:
        state = Path(temporary)
        write_history(state)
        with (
            Simulator((ME, PEER)) as imds,
            RunningAgent(imds.endpoint, state) as agent,
            chromium() as browser,
        ):
            imds.start("user-reboot", resources=[ME])
            imds.start("hardware-failure", resources=[PEER])
            url = f"http://127.0.0.1:{agent.port}/"
            draw(browser, url, directory / "page.png", DESK, "light")
            draw(browser, url, directory / "page-phone.png", PHONE, "dark")


def write_history(state: Path) -> None:
    """Write the state file of an agent that has seen the past events."""
    vm = Vm(name=ME)
    file = StateFile(state / FILE_NAME)
    file.load()
    for past_event in PAST:
        changes = [
            StoredChange(change, record_of(change, vm).line()) for change in changes_of(past_event)
        ]
        file.write(Content(), changes)
    file.forget()


def changes_of(past_event: PastEvent) -> Iterator[Change]:
    """Yield the changes that an agent reports if it polls once a second."""
    scenario = SCENARIOS[past_event.scenario]
    begun = int(time.time() - past_event.days_ago * DAY)
    play = Play(
        scenario=scenario,
        event_id=f"{begun:08X}-0000-4000-8000-000000000000",
        resources=(ME,),
        begun=float(begun),
    )
    end = int(begun + scenario.notice + scenario.started + 2)
    tracked = Tracked()

    for second in range(begun - 1, end):
        items = []
        item = play.item(second)
        if second >= begun and item is not None:
            items.append(item)
        moment = datetime.fromtimestamp(second, UTC)
        observation = Observation(
            at=Instant(moment, boot="boot", uptime=float(second), date=moment), vm=ME, silence=1.0
        )
        if tracked.interrupting:
            observation = replace(observation, gap=past_event.interruption)
        step = diff(tracked, document(*items), observation)
        tracked = step.tracked
        yield from step.changes


def draw(
    browser: Browser,
    url: str,
    picture: Path,
    window: ViewportSize,
    colors: Literal["light", "dark"],
) -> None:
    """Draw the top of the page, as a window of this size shows it."""
    page = browser.new_page(viewport=window, color_scheme=colors)
    page.goto(url)
    expect(page.locator("#pending tbody tr")).to_have_count(2)
    page.screenshot(path=picture)
    page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
