"""Size and speed of the agent's page: ``python benchmarks/page.py [--pictures DIR]``.

A running agent with 10 pending and 50 past events, in a state made for it: bytes, time of an answer, what the agent
grows by when the page is looked at, and the time from a change in IMDS to its sight in a browser, with a poll of one
second. With ``--pictures`` it also takes those of ``docs/pictures``.
"""

import argparse
import gzip
import http.client
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from _machine import describe, resident
from playwright.sync_api import Browser, ViewportSize

from notbefore.commands.client import AgentClient
from notbefore.core.change import Gap
from notbefore.core.clock import Instant
from notbefore.core.document import Document, Event
from notbefore.core.lifecycle import diff
from notbefore.core.record import Record, Vm
from notbefore.core.tracked import Observation, Tracked
from notbefore.simulator.scenarios import SCENARIOS
from notbefore.simulator.server import Simulator
from notbefore.store.state import Store
from notbefore.store.state_file import StoredChange, StoredState

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.browser import chromium

ME, PEER = "WestNO_0", "WestNO_1"
PORT = 11171
URL = f"http://127.0.0.1:{PORT}"
PENDING = ("user-reboot", "live-migration", "platform-redeploy", "hardware-failure")
SEEN = "name => document.getElementById('pending').textContent.includes(name)"
SIZES: dict[str, ViewportSize] = {"page": {"width": 1280, "height": 800}, "page-phone": {"width": 360, "height": 740}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="take the pictures as well")
    options = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as state, Simulator((ME, PEER)) as simulator:
        remember(Path(state), 50)
        words = ["run", "--imds", simulator.endpoint, "--state-dir", state, "--listen", f"127.0.0.1:{PORT}"]
        agent = subprocess.Popen(
            [sys.executable, "-m", "notbefore", *words],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "NOTBEFORE_LOG__LEVEL": "warning"},
        )
        try:
            wait_for(simulator, 0)
            with chromium() as browser:
                if options.pictures is not None:
                    take(browser, simulator, options.pictures)
                answers(simulator, agent.pid)
                seen(browser, simulator)
        finally:
            agent.terminate()
            agent.wait(5)


def remember(state: Path, count: int) -> None:
    """Write the history of a VM to which so many events have happened."""
    chance = random.Random(4)
    store, tracked, vm = Store(state), Tracked(), Vm(name=ME)
    for number in range(count):
        scenario = chance.choice(list(SCENARIOS.values()))
        begin = datetime.now(UTC) - timedelta(days=6 * (count - number), seconds=chance.randrange(80_000))
        start = begin + timedelta(seconds=scenario.notice * chance.choice((1, 1, 1, 0.3)))
        event = Event(
            event_id=f"{number:08X}-AFDC-4513-B24B-AA5F13A16123",
            event_type=scenario.event_type,
            event_status="Scheduled",
            resources=(chance.choice((ME, ME, PEER)),),
            not_before=begin + timedelta(seconds=scenario.notice) if scenario.notice else None,
            event_source=scenario.event_source,
        )
        started = Event(event.event_id, event.event_type, "Started", resources=event.resources)
        steps = [(begin, (event,)), (start, (started,)), (start + timedelta(seconds=scenario.started), ())]
        if not scenario.notice:
            del steps[0]
        elif chance.random() < 0.2:
            steps[1:] = [(begin + timedelta(seconds=scenario.notice * 0.6), ())]  # canceled
        for moment, listed in steps:
            gap = Gap(chance.choice((0.3, 4.2, 7.1, 9.0, 35.0)), 0.0)
            step = diff(tracked, Document(number, listed), Observation(Instant(moment, date=moment), ME, gap=gap))
            tracked = step.tracked
            store.commit(
                StoredState(tracked=tracked), [StoredChange(one, Record.of(one, vm).line()) for one in step.changes]
            )
    store.close()


def wait_for(simulator: Simulator, pending: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            AgentClient(URL).ask("/readyz")
            if len(AgentClient(URL).ask("/api/v1/events")["events"]) == pending:
                return
        except Exception:  # noqa: BLE001, S110 - not there yet, for whatever reason
            pass
        time.sleep(0.05)
    raise SystemExit(f"the agent did not come to see {pending} events at {simulator.endpoint}")


def answers(simulator: Simulator, pid: int) -> None:
    for number in range(10):
        simulator.start(PENDING[number % 4], resources=[PEER if number % 4 > 1 else ME])
    wait_for(simulator, 10)
    before = resident(pid)
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
    times = []
    for _ in range(300):
        begun = time.perf_counter()
        connection.request("GET", "/", headers={"Accept-Encoding": "gzip"})
        packed = connection.getresponse().read()
        times.append((time.perf_counter() - begun) * 1e3)
        time.sleep(0.002)
    first = times[0]
    times.sort()
    size = len(gzip.decompress(packed))
    print(f"page with 10 pending and 50 past: {size} bytes, {len(packed)} compressed (bar 16,000)")
    print(f"an answer: p50 {times[150]:.2f} ms, p99 {times[297]:.2f} ms (bar 20); the first {first:.0f} ms")
    print(f"the agent after 300 of them: {resident(pid) - before:+.1f} MiB")


def seen(browser: Browser, simulator: Simulator) -> None:
    page = browser.new_page()
    page.goto(URL)
    times = []
    for number in range(12):
        time.sleep(random.random())  # anywhere between two polls
        begun = time.monotonic()
        simulator.start("live-migration", event_id=f"seen-{number}")
        page.wait_for_function(SEEN, arg=f"seen-{number}")  # each frame: a locator looks twice a second
        times.append(time.monotonic() - begun)
    print(f"a change on the page after: median {statistics.median(times):.2f} s, max {max(times):.2f} s (bar 2)")


def take(browser: Browser, simulator: Simulator, pictures: Path) -> None:
    simulator.start("user-reboot", resources=[ME])
    simulator.start("hardware-failure", resources=[PEER])
    wait_for(simulator, 2)
    for name, size in SIZES.items():
        scheme = "dark" if "phone" in name else "light"
        page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]  # one of its words
        page.goto(URL)
        time.sleep(2)
        page.screenshot(path=pictures / f"{name}.png")
        page.close()
    simulator.clear()
    wait_for(simulator, 0)


if __name__ == "__main__":
    main()
