"""The cost of an agent for its VM, as a table: ``python benchmarks/cost.py [--write]``.

``--write`` replaces the table in docs/performance.md.

Printed: thousands of instructions, wakings a second, memory in MiB, and the size of a scrape.

- Instructions are counted by cachegrind, so a busy machine changes them little. Two runs differ in
  the number of polls. The difference of their counts is divided by that of their polls, so that
  start and stop cancel out.
- Wakings are context switches of all threads (``/proc/PID/task/*/status``), without cachegrind.
- Memory is that of ``smaps_rollup``, without cachegrind.
"""

import argparse
import http.client
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Final, NamedTuple

from _machine import Imds, describe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.agent import RunningAgent
from support.azure import body, item

PAGE: Final = Path(__file__).parents[1] / "docs/performance.md"
BEGIN: Final = "<!-- made by benchmarks/cost.py -->\n"
END: Final = "<!-- end -->\n"
# seconds until a poll or a scrape comes: a start under cachegrind takes up to a minute
PATIENCE: Final = 300.0
SETTLED: Final = 10  # polls after which the work of the start is done: identity, the first commit
MANY_EVENTS: Final = 10
VM: Final = "cost_0"
SERIES: Final = re.compile(rb"(?m)^[^#\n]")
INSTRUCTIONS: Final = re.compile(r"I\s+refs:\s+([\d,]+)")
WAKINGS: Final = re.compile(r"voluntary_ctxt_switches:\s+(\d+)")
HEADERS_OF_PROMETHEUS: Final = {
    "Accept": (
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    ),
}

Rows = dict[str, float]
"""What was measured -> its value."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--polls", type=int, default=60, help="between the two lengths of a run")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long wakings are counted")
    parser.add_argument(
        "--write", action="store_true", help="write the table to docs/performance.md"
    )
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: nothing is measured")
        return

    os.environ |= {"NOTBEFORE_LOG__LEVEL": "warning", "PYTHONHASHSEED": "0"}
    conditions = (
        f"{describe().removeprefix('machine: ')}, Linux {platform.release()},"
        f" {datetime.now(UTC):%Y-%m-%d}; {options.polls} polls between the two lengths of a run,"
        f" {options.seconds:.0f} s of wakings."
    )
    table = as_table(measure_all(options.polls, options.seconds))
    text = f"{table}\nMeasured on: {conditions}\n"
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(before + BEGIN + text + END + after, encoding="utf-8")


def as_table(rows: Rows) -> str:
    lines = ["| | notbefore |\n|---|---|\n"]
    for name, value in rows.items():
        is_whole = isinstance(value, int) or value >= 40
        decimals = 0 if is_whole else 1
        lines.append(f"| {name} | {value:,.{decimals}f} |\n")
    return "".join(lines)


def measure_all(polls: int, seconds: float) -> Rows:
    """Measure everything at the same time."""
    with ThreadPoolExecutor() as pool:
        instructions = []
        for scraped in (False, True):
            for events in (0, MANY_EVENTS):
                instructions.append(pool.submit(instruction_row, events, polls, scraped=scraped))
        idle = pool.submit(idle_rows, seconds)
        listing = pool.submit(listing_rows, seconds)
    rows: Rows = {}
    for future in (*instructions, idle, listing):
        rows |= future.result()
    return rows


# ---- runs


class Run:
    """An agent and its IMDS; ``scrape`` asks for the metrics."""

    def __init__(self, events: int, kind: type[RunningAgent] = RunningAgent) -> None:
        document = listing_document(events)
        self._imds = Imds(VM, lambda: document)
        self._directory = tempfile.TemporaryDirectory()
        state = Path(self._directory.name, "state")
        self._agent = kind(self._imds.url, state, interval="1s")
        self._connection = http.client.HTTPConnection(
            "127.0.0.1", self._agent.port, timeout=PATIENCE
        )

    @property
    def pid(self) -> int:
        return self._agent.process.pid

    @property
    def polls(self) -> int:
        """How often IMDS was asked."""
        return self._imds.polls

    def wait(self, polls: int) -> None:
        """Wait until IMDS was asked so often."""
        deadline = time.monotonic() + PATIENCE + polls
        while self.polls < polls:
            self._check(deadline, polls)
            time.sleep(0.02)

    def wait_and_scrape(self, polls: int) -> None:
        """Wait until IMDS was asked so often, and scrape once for each poll.

        The first scrape imports a library, which takes seconds under cachegrind. The scrapes that
        are late by then are made afterwards.
        """
        deadline = time.monotonic() + PATIENCE + polls
        scrapes = 0
        while self.polls < polls or scrapes < self.polls:
            self._check(deadline, polls)
            if scrapes < self.polls and self._try_to_scrape():
                scrapes += 1
            else:
                time.sleep(0.02)

    def _check(self, deadline: float, polls: int) -> None:
        if time.monotonic() > deadline:
            raise SystemExit(f"IMDS was asked {self.polls} times, expected {polls}")

    def _try_to_scrape(self) -> bool:
        """Scrape as Prometheus does; return whether the agent listens already."""
        try:
            self.scrape(HEADERS_OF_PROMETHEUS)
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return False
        return True

    def scrape(self, headers: dict[str, str]) -> bytes:
        """Return the metrics; the connection is kept."""
        self._connection.request("GET", "/metrics", headers=headers)
        return self._connection.getresponse().read()

    def end(self) -> str:
        """Stop the agent as systemd does; return what it wrote to standard error."""
        self._connection.close()
        self._agent.stop()
        self._imds.close()
        self._directory.cleanup()
        return self._agent.log


def listing_document(events: int) -> bytes:
    """Return a document with so many freezes, which start in six hours."""
    later = formatdate(time.time() + 6 * 3600, usegmt=True)
    items = []
    for number in range(events):
        event_id = f"C7061BAC-AFDC-4513-B24B-{number:012X}"
        items.append(item(event_id, Resources=[VM, "cost_1"], NotBefore=later))
    return body(*items, incarnation=events + 1)


# ---- instructions


class AgentUnderCachegrind(RunningAgent):
    """Writes the number of its instructions to standard error when it ends."""

    @staticmethod
    def prefix(_state: Path) -> Sequence[str]:
        return (
            "valgrind",
            "--tool=cachegrind",
            "--cache-sim=no",
            "--cachegrind-out-file=/dev/null",
        )


class Count(NamedTuple):
    """The instructions and the polls of a whole run."""

    instructions: int
    polls: int


def instruction_row(events: int, polls: int, *, scraped: bool) -> Rows:
    """Count the instructions of one poll; ``scraped``: with a scrape."""
    with ThreadPoolExecutor() as pool:
        short_run = pool.submit(count, events, SETTLED, scraped=scraped)
        long_run = pool.submit(count, events, SETTLED + polls, scraped=scraped)
    short = short_run.result()
    long = long_run.result()
    instructions = (long.instructions - short.instructions) / (long.polls - short.polls)

    name = "a poll and a scrape" if scraped else "a poll"
    listed = events or "no"
    return {f"instructions of {name}, {listed} events listed (thousands)": instructions / 1000}


def count(events: int, polls: int, *, scraped: bool) -> Count:
    """Run an agent for so many polls."""
    run = Run(events, AgentUnderCachegrind)
    try:
        if scraped:
            run.wait_and_scrape(polls)
        else:
            run.wait(polls)
    finally:
        output = run.end()
    match = INSTRUCTIONS.search(output)
    if match is None:
        raise SystemExit(f"cachegrind printed no count:\n{output}")
    return Count(int(match[1].replace(",", "")), run.polls)


# ---- wakings and memory


def idle_rows(seconds: float) -> Rows:
    """Measure an agent without events: its wakings, its memory, and its scrapes."""
    run = Run(0)
    try:
        run.wait(SETTLED)
        rows = {"wakings a second, idle": wakings_a_second(run.pid, seconds)}
        rows |= memory_rows(run.pid, "idle")
        run.scrape(HEADERS_OF_PROMETHEUS)
        rows |= memory_rows(run.pid, "after a scrape")
        text = run.scrape({})
        rows |= memory_rows(run.pid, "after a scrape as text")
        rows["series, idle"] = len(SERIES.findall(text))
        rows["bytes of a scrape, idle"] = len(text)
        return rows
    finally:
        run.end()


def listing_rows(seconds: float) -> Rows:
    """Measure the wakings of an agent with listed events."""
    run = Run(MANY_EVENTS)
    try:
        run.wait(SETTLED)
        wakings = wakings_a_second(run.pid, seconds)
        return {f"wakings a second, {MANY_EVENTS} events listed": wakings}
    finally:
        run.end()


def wakings_a_second(pid: int, seconds: float) -> float:
    before = wakings(pid)
    started = time.monotonic()
    time.sleep(seconds)
    return (wakings(pid) - before) / (time.monotonic() - started)


def wakings(pid: int) -> int:
    """Return how often the threads of a process have waked."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            status = (task / "status").read_text(encoding="ascii", errors="replace")
            total += sum(int(number) for number in WAKINGS.findall(status))
    return total


def memory_rows(pid: int, when: str) -> Rows:
    """Return the resident and the private memory of a process."""
    sizes: dict[str, float] = {}  # MiB
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    for line in lines[1:]:
        name, kib, _unit = line.split()
        sizes[name.rstrip(":")] = int(kib) / 1024
    return {
        f"resident, {when} (MiB)": sizes["Rss"],
        f"private, {when} (MiB)": sizes["Private_Clean"] + sizes["Private_Dirty"],
    }


if __name__ == "__main__":
    main()
