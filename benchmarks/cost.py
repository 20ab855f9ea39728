"""What an agent costs the VM that it runs on, as a table: ``python benchmarks/cost.py [NAME=COMMAND ...]``.

    cost.py                                                  notbefore, as the unit starts it
    cost.py --write                                          the same; the table in docs/performance.md is made anew
    cost.py 'other=/opt/exporter --imds={imds} --port={port} --data={state}'   notbefore and another program

In COMMAND ``{imds}`` is replaced by the address of an IMDS that is served here, ``{port}`` by the port at which
``/metrics`` is asked for, ``{state}`` by an empty directory. The program is to poll IMDS once a second. COMMAND may
begin with variables of the environment, ``VARIABLE=VALUE``.

Instructions are counted by cachegrind, so a busy machine does not change them: two runs that differ in the number of
polls, and the difference of their counts divided by the difference of their polls. Start and stop cancel out. Wakings
are context switches of all threads (``/proc/PID/task/*/status``) of a run without cachegrind, memory is that run's
``smaps_rollup``. Proportional memory depends on what else maps the same files: the private part does not.
"""

import argparse
import http.client
import json
import os
import platform
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/performance.md"
BEGIN, END = "<!-- made by benchmarks/cost.py -->\n", "<!-- end -->\n"
OURS: Final = f"{sys.executable} -m notbefore run --imds {{imds}} --listen 127.0.0.1:{{port}} --state-dir {{state}}"
PATIENCE: Final = 300.0  # seconds for a poll or a scrape to come: a start under cachegrind takes up to a minute
SETTLED: Final = 10  # polls after which the first things are over: identity, the first commit
MIB: Final = 1024  # KiB
VM: Final = "cost_0"
ASKED_BY_PROMETHEUS: Final = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Accept-Encoding": "gzip",
}


class Imds(ThreadingHTTPServer):
    """Lists the same events at each poll, and counts the polls."""

    daemon_threads = True

    def __init__(self, events: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.polls = 0
        self.body = b""
        self.list(events)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def list(self, events: int) -> None:
        """List so many events from now on: freezes that start in six hours."""
        begins = format_datetime(datetime.now(UTC) + timedelta(hours=6), usegmt=True)
        listed = [
            {
                "EventId": f"C7061BAC-AFDC-4513-B24B-{number:012X}",
                "EventStatus": "Scheduled",
                "EventType": "Freeze",
                "ResourceType": "VirtualMachine",
                "Resources": [VM, "cost_1"],
                "NotBefore": begins,
                "Description": "Virtual machine is being paused because of a memory-preserving Live Migration.",
                "EventSource": "Platform",
                "DurationInSeconds": 5,
            }
            for number in range(events)
        ]
        self.body = json.dumps({"DocumentIncarnation": events + 1, "Events": listed}).encode()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait(self, polls: int) -> None:
        """Until it was asked so often."""
        deadline = time.monotonic() + PATIENCE + polls
        while self.polls < polls:
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.polls} polls came, {polls} were waited for")
            time.sleep(0.05)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one segment, as a server sends them that is worth measuring
    server: Imds

    def do_GET(self) -> None:
        if self.path.startswith("/metadata/scheduledevents"):
            self.server.polls += 1
            body = self.server.body
        else:
            body = json.dumps({"compute": {"name": VM, "vmId": "1", "location": "here"}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Program(NamedTuple):
    """A command line to be measured."""

    name: str
    command: str


class Run:
    """One process of a program, its IMDS and its scrapes."""

    def __init__(self, program: Program, events: int, under: Sequence[str] = ()) -> None:
        self.imds = Imds(events)
        self._directory = tempfile.TemporaryDirectory()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        state = Path(self._directory.name, "state")
        state.mkdir(mode=0o700)
        words = shlex.split(program.command.format(imds=self.imds.url, port=self.port, state=state))
        environment = {**os.environ, "NOTBEFORE_LOG__LEVEL": "warning", "PYTHONHASHSEED": "0"}
        while "=" in words[0]:  # as in a shell; cachegrind would count `env` instead
            name, _, environment[name] = words.pop(0).partition("=")
        with Path(self._directory.name, "output").open("wb") as output:
            self.process = subprocess.Popen([*under, *words], stdout=subprocess.DEVNULL, stderr=output, env=environment)

    def end(self) -> str:
        """Stop it as systemd does; returns what it wrote to standard error."""
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
        output = Path(self._directory.name, "output").read_text(errors="replace")
        self.imds.shutdown()
        self.imds.server_close()
        self._directory.cleanup()
        return output

    def scrape(self) -> bytes:
        """Ask for /metrics once, on a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", "/metrics", headers={"Accept": ASKED_BY_PROMETHEUS["Accept"]})
            return connection.getresponse().read()
        finally:
            connection.close()

    @contextmanager
    def scraped_after_each_poll(self) -> Iterator[None]:
        """One scrape after each poll, as Prometheus asks, over one connection that is kept; at the end, none is left.

        The first scrape imports a library, which takes seconds under cachegrind: those behind it are made up for.
        """
        stop = threading.Event()

        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
            scraped = 0
            while self.process.poll() is None and not (stop.is_set() and scraped >= self.imds.polls):
                if self.imds.polls <= scraped:
                    time.sleep(0.02)
                    continue
                try:
                    connection.request("GET", "/metrics", headers=ASKED_BY_PROMETHEUS)
                    connection.getresponse().read()
                    scraped += 1
                except (OSError, http.client.HTTPException):  # it does not listen yet, or no longer
                    connection.close()
            connection.close()

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def counted(program: Program, events: int, polls: int, *, scraped: bool) -> tuple[int, int]:
    """Instructions of a whole run, and its polls."""
    under = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
    run = Run(program, events, under)
    try:
        if scraped:
            with run.scraped_after_each_poll():
                run.imds.wait(polls)
        else:
            run.imds.wait(polls)
    finally:
        output = run.end()
    found = re.search(r"I\s+refs:\s+([\d,]+)", output)
    if found is None:
        raise SystemExit(f"{program.name}: cachegrind did not say what it counted:\n{output}")
    return int(found[1].replace(",", "")), run.imds.polls


def instructions(program: Program, events: int, polls: int, *, scraped: bool) -> float:
    """Instructions of one poll, with a scrape if ``scraped``."""
    with ThreadPoolExecutor() as pool:
        lengths = (SETTLED, SETTLED + polls)
        short, long = pool.map(lambda length: counted(program, events, length, scraped=scraped), lengths)
    return (long[0] - short[0]) / (long[1] - short[1])


class Watched(NamedTuple):
    """What a run without cachegrind shows."""

    wakings: float  # a second
    preempted: float  # a second: those of the wakings before which another process had taken the core
    memory: dict[str, float]  # MiB by the names of smaps_rollup
    memory_scraped: dict[str, float]  # the same after a scrape
    body: bytes  # of a scrape
    body_with_one: bytes  # of a scrape while one event is listed


def watched(program: Program, events: int, seconds: float) -> Watched:
    run = Run(program, events)
    try:
        run.imds.wait(SETTLED)
        before, begun = _switches(run.process.pid), time.monotonic()
        time.sleep(seconds)
        after, elapsed = _switches(run.process.pid), time.monotonic() - begun
        voluntary, preempted = (
            sum(found[kind] - before.get(task, (0, 0))[kind] for task, found in after.items()) / elapsed
            for kind in (0, 1)
        )
        memory = _memory(run.process.pid)  # before the first scrape
        body = run.scrape()
        scraped = _memory(run.process.pid)
        run.imds.list(1)
        run.imds.wait(run.imds.polls + 3)
        return Watched(voluntary + preempted, preempted, memory, scraped, body, run.scrape())
    finally:
        run.end()


def _switches(pid: int) -> dict[str, list[int]]:
    """Of each thread: how often it waited, and how often another process took the core."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            lines = (task / "status").read_text(encoding="ascii", errors="replace").splitlines()
            found[task.name] = [int(line.split()[1]) for line in lines if "ctxt_switches" in line]
    return found


def _memory(pid: int) -> dict[str, float]:
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]]
    return {line[0].rstrip(":"): int(line[1]) / MIB for line in lines}


def _series(body: bytes) -> int:
    return sum(1 for line in body.splitlines() if line and not line.startswith(b"#"))


def measure(program: Program, options: argparse.Namespace) -> dict[str, list[float]]:
    """The rows of the table: each with one figure a round."""
    rows: dict[str, list[float]] = {}

    def add(row: str, value: float) -> None:
        rows.setdefault(row, []).append(value)

    for _ in range(options.rounds):
        with ThreadPoolExecutor() as pool:
            idle, ten = (pool.submit(watched, program, events, options.seconds) for events in (0, 10))
            counts = {
                (scraped, events): pool.submit(instructions, program, events, options.polls, scraped=scraped)
                for scraped in (False, True)
                for events in (0, 10)
            }
            for (scraped, events), future in counts.items():
                what = "instructions of a poll and a scrape" if scraped else "instructions of a poll"
                add(f"{what}, {events or 'no'} events listed (thousands)", future.result() / 1000)
        for what, result in (("idle", idle.result()), ("10 events listed", ten.result())):
            add(f"wakings a second, {what}", result.wakings)
            add(f"wakings a second, {what}: only since another process took the core", result.preempted)
        for name in ("Rss", "Pss"):
            what = {"Rss": "resident", "Pss": "proportional"}[name]
            add(f"{what}, idle (MiB)", idle.result().memory[name])
            add(f"{what}, after a scrape (MiB)", idle.result().memory_scraped[name])
        for what, memory in (("idle", idle.result().memory), ("after a scrape", idle.result().memory_scraped)):
            add(f"private, {what} (MiB)", memory["Private_Clean"] + memory["Private_Dirty"])
        add("series, idle", _series(idle.result().body))
        add("series, one event listed", _series(idle.result().body_with_one))
        add("bytes of a scrape, idle", len(idle.result().body))
    return rows


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: the median of the rounds, and their range where they differ."""
    lines = [f"| | {' | '.join(results)} |", f"|---|{'---|' * len(results)}"]
    for row in next(iter(results.values())):
        cells = " | ".join(_cell(rows[row]) for rows in results.values())
        lines += [f"| {row} | {cells} |"]
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    def shown(value: float) -> str:
        return f"{value:,.0f}" if value >= 40 else f"{value:.1f}"

    low, high = shown(min(values)), shown(max(values))
    return shown(statistics.median(values)) + (f" ({low} to {high})" if low != high else "")


def about(options: argparse.Namespace) -> str:
    """Where, when and how it was measured."""
    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    return (
        f"Measured on {datetime.now(UTC):%Y-%m-%d}: {os.cpu_count()} cores ({cpu}), Linux {platform.release()},"
        f" Python {platform.python_version()}, {valgrind}, load {os.getloadavg()[0]:.1f}."
        f" Median of {options.rounds} rounds, and the range of them: {options.polls} polls between the two lengths of"
        f" a run, {options.seconds:.0f} s of wakings.\n"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="NAME=COMMAND", help="to be measured beside notbefore")
    parser.add_argument("--polls", type=int, default=60, help="between the two lengths of a run")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long wakings are counted")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: nothing is measured")
        return
    programs = [Program("notbefore", OURS), *(_program(text) for text in options.programs)]
    results: dict[str, dict[str, Any]] = {program.name: measure(program, options) for program in programs}
    text = f"{table(results)}\n{about(options)}"
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")


def _program(text: str) -> Program:
    name, separator, command = text.partition("=")
    if not separator:
        raise SystemExit(f"expected NAME=COMMAND, got {text!r}")
    return Program(name, command)


if __name__ == "__main__":
    main()
