"""What an agent costs the VM that it runs on, as a table: ``python benchmarks/cost.py [--write]``.

``--write`` replaces the table in docs/performance.md.

Instructions are counted by cachegrind, so a busy machine does not change them: two runs that differ
in the number of polls, and the difference of their counts divided by the difference of their polls.
Start and stop cancel out. Wakings are context switches of all threads (``/proc/PID/task/*/status``)
of a run without cachegrind, memory is that run's ``smaps_rollup``.
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
from typing import Final

from _machine import Imds, describe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.agent import RunningAgent
from support.azure import body, item

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/performance.md"
BEGIN = "<!-- made by benchmarks/cost.py -->\n"
END = "<!-- end -->\n"
# seconds for a poll or a scrape to come: a start under cachegrind takes up to a minute
PATIENCE: Final = 300.0
SETTLED: Final = 10  # polls after which the first things are over: identity, the first commit
MIB: Final = 1024  # KiB
SERIES: Final = re.compile(rb"(?m)^[^#\n]")
VM: Final = "cost_0"
ASKED_BY_PROMETHEUS: Final = {
    "Accept": (
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    ),
}


def listing(events: int) -> bytes:
    """A document with so many freezes, which start in six hours."""
    later = formatdate(time.time() + 6 * 3600, usegmt=True)
    ids = (f"C7061BAC-AFDC-4513-B24B-{number:012X}" for number in range(events))
    return body(
        *(item(delivery_id, Resources=[VM, "cost_1"], NotBefore=later) for delivery_id in ids),
        incarnation=events + 1,
    )


class Counted(RunningAgent):
    """Its instructions are counted; it says how many at its end."""

    @staticmethod
    def prefix(_state: Path) -> Sequence[str]:
        return (
            "valgrind",
            "--tool=cachegrind",
            "--cache-sim=no",
            "--cachegrind-out-file=/dev/null",
        )


class Run:
    """One agent, its IMDS and its scrapes."""

    def __init__(self, events: int, kind: type[RunningAgent] = RunningAgent) -> None:
        listed = listing(events)
        self.imds = Imds(VM, lambda: listed)
        self._directory = tempfile.TemporaryDirectory()
        self.agent = kind(self.imds.url, Path(self._directory.name, "state"), interval="1s")
        self._connection = http.client.HTTPConnection(
            "127.0.0.1", self.agent.port, timeout=PATIENCE
        )

    def wait(self, polls: int, *, scraping: bool = False) -> None:
        """Until IMDS was asked so often.

        ``scraping``: with a scrape for each poll, as Prometheus asks.

        The first scrape imports a library, which takes seconds under cachegrind: those behind it
        are made up for.
        """
        deadline = time.monotonic() + PATIENCE + polls
        scraped = 0
        while self.imds.polls < polls or (scraping and scraped < self.imds.polls):
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.imds.polls} polls came, {polls} were waited for")
            if scraping and scraped < self.imds.polls:
                with suppress(OSError, http.client.HTTPException):  # it does not listen yet
                    self.scrape(**ASKED_BY_PROMETHEUS)
                    scraped += 1
                    continue
                self._connection.close()
            time.sleep(0.02)

    def scrape(self, **headers: str) -> bytes:
        """Ask for /metrics once; the connection is kept."""
        self._connection.request("GET", "/metrics", headers=headers)
        return self._connection.getresponse().read()

    def end(self) -> str:
        """Stop it as systemd does; returns what it wrote to standard error."""
        self._connection.close()
        self.agent.stop()
        self.imds.close()
        self._directory.cleanup()
        return self.agent.log


def counted(events: int, polls: int, *, scraped: bool) -> tuple[int, int]:
    """Instructions of a whole run, and its polls."""
    run = Run(events, Counted)
    try:
        run.wait(polls, scraping=scraped)
    finally:
        output = run.end()
    found = re.search(r"I\s+refs:\s+([\d,]+)", output)
    if found is None:
        raise SystemExit(f"cachegrind did not say what it counted:\n{output}")
    return int(found[1].replace(",", "")), run.imds.polls


def instructions(events: int, polls: int, *, scraped: bool) -> float:
    """Thousands of instructions of one poll, with a scrape if ``scraped``."""
    with ThreadPoolExecutor() as pool:
        lengths = (SETTLED, SETTLED + polls)
        short, long = pool.map(lambda length: counted(events, length, scraped=scraped), lengths)
    return (long[0] - short[0]) / (long[1] - short[1]) / 1000


def watched(events: int, seconds: float) -> dict[str, float]:
    """What a run without cachegrind shows, by the rows of the table."""
    run = Run(events)
    what = f"{events} events listed" if events else "idle"
    try:
        run.wait(SETTLED)
        before = switches(run.agent.process.pid)
        begun = time.monotonic()
        time.sleep(seconds)
        wakings = (switches(run.agent.process.pid) - before) / (time.monotonic() - begun)
        found = {f"wakings a second, {what}": wakings}
        if events:
            return found
        found |= memory(run.agent.process.pid, "idle")
        for when, headers in (
            ("after a scrape", ASKED_BY_PROMETHEUS),
            ("after a scrape as text", {}),
        ):
            body = run.scrape(**headers)
            found |= memory(run.agent.process.pid, when)
        return found | {
            "series, idle": len(SERIES.findall(body)),
            "bytes of a scrape, idle": len(body),
        }
    finally:
        run.end()


def switches(pid: int) -> int:
    """How often its threads were waked."""
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            text = (task / "status").read_text(encoding="ascii", errors="replace")
            count += sum(map(int, re.findall(r"voluntary_ctxt_switches:\s+(\d+)", text)))
    return count


def memory(pid: int, when: str) -> dict[str, float]:
    """MiB of two kinds."""
    lines = [
        line.split()
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    ]
    sizes = {line[0].rstrip(":"): int(line[1]) / MIB for line in lines}
    return {
        f"resident, {when} (MiB)": sizes["Rss"],
        f"private, {when} (MiB)": sizes["Private_Clean"] + sizes["Private_Dirty"],
    }


def measured(polls: int, seconds: float) -> dict[str, float]:
    """The rows of the table."""
    with ThreadPoolExecutor() as pool:
        counts = {
            f"instructions of {what}, {events or 'no'} events listed (thousands)": pool.submit(
                instructions, events, polls, scraped=scraped
            )
            for what, scraped in (("a poll", False), ("a poll and a scrape", True))
            for events in (0, 10)
        }
        idle, ten = (pool.submit(watched, events, seconds) for events in (0, 10))
        return (
            {name: count.result() for name, count in counts.items()} | idle.result() | ten.result()
        )


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
    about = (
        f"{describe()}, Linux {platform.release()}, {datetime.now(UTC):%Y-%m-%d}; {options.polls}"
        " polls between the"
    )
    about += f" two lengths of a run, {options.seconds:.0f} s of wakings.\n"
    figures = measured(options.polls, options.seconds)
    rows = (
        f"| {row} | {f'{one:,.0f}' if one >= 40 else f'{one:.1f}'} |\n"
        for row, one in figures.items()
    )
    text = (
        f"| | notbefore |\n|---|---|\n{''.join(rows)}\nMeasured on:"
        f" {about.removeprefix('machine: ')}"
    )
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
