"""Size and speed of the installed agent, as figures: ``python benchmarks/agent.py [--seconds 30]``.

It starts a simulator in this process and the real command beside it, and prints: resident size, CPU time a poll (and
what a turn of an empty loop costs on this machine), bytes written while idle, latency of a scrape with 10 pending
events, and the time from IMDS's answer to the change being visible in /metrics. Before that: how long a start takes to
its first poll, and `notbefore events`; both beside an interpreter that does nothing.
"""

import argparse
import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _machine import describe, resident

from notbefore.commands.client import AgentClient
from notbefore.imds.client import ImdsClient
from notbefore.imds.poller import Poller
from notbefore.simulator.server import Simulator
from notbefore.simulator.state import SimulatorState

PORT = 11170
URL = f"http://127.0.0.1:{PORT}"
STARTS = 7
EMPTY_LOOP = """
import threading, time
stop, end = threading.Event(), time.monotonic() + {seconds}
while time.monotonic() < end:
    stop.wait(1.0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the idle agent is watched")
    options = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as state, Simulator() as simulator:
        starts(simulator, Path(state))
        agent = run(simulator, Path(state))
        try:
            wait_ready()
            commands()
            idle(agent.pid, options.seconds)
            tight(simulator)
            visible(simulator)
            scrapes(simulator)
            print(f"resident after all that: {resident(agent.pid):.1f} MiB")
        finally:
            agent.terminate()
            agent.wait(5)


def run(simulator: Simulator, state: Path) -> "subprocess.Popen[bytes]":
    words = ("run", "--imds", simulator.endpoint, "--state-dir", str(state), "--listen", URL.removeprefix("http://"))
    environment = {**os.environ, "NOTBEFORE_LOG__LEVEL": "warning"}
    return subprocess.Popen([sys.executable, "-m", "notbefore", *words], stdout=subprocess.DEVNULL, env=environment)


def starts(simulator: Simulator, state: Path) -> None:
    """From the start of the process to its first request."""
    times = []
    for _ in range(STARTS):
        begun, before = time.monotonic(), simulator.requests
        agent = run(simulator, state)
        while simulator.requests == before:
            time.sleep(0.001)
        times.append((time.monotonic() - begun) * 1e3)
        agent.terminate()
        agent.wait(5)
    print(f"start to the first poll: median {statistics.median(times):.0f} ms, min {min(times):.0f} ms")


def commands() -> None:
    for what, words in (("notbefore events", ["-m", "notbefore", "events", "--url", URL]), ("nothing", ["-c", "pass"])):
        times = []
        for _ in range(STARTS):
            begun = time.monotonic()
            subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
            times.append((time.monotonic() - begun) * 1e3)
        print(f"an interpreter that runs {what}: median {statistics.median(times):.0f} ms, min {min(times):.0f} ms")


def wait_ready() -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            AgentClient(URL).ask("/readyz")
        except Exception:  # noqa: BLE001 - not ready yet, for whatever reason
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the agent did not become ready")


def cpu(pid: int) -> float:
    """Seconds of CPU, user and system, to the nanosecond where the scheduler tells (sum over the threads)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


def written(pid: int) -> int:
    """Bytes that the process caused to be written to storage."""
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def idle(pid: int, seconds: float) -> None:
    time.sleep(12)  # the first polls, the identity, the first commit, and that the outbox is read after it
    before, wrote = cpu(pid), written(pid)
    empty = subprocess.Popen([sys.executable, "-c", EMPTY_LOOP.format(seconds=seconds + 2)])
    time.sleep(1)
    empty_before, begun = cpu(empty.pid), time.monotonic()
    before = cpu(pid)
    time.sleep(seconds)
    elapsed = time.monotonic() - begun
    poll, nothing = (cpu(pid) - before) / elapsed * 1e3, (cpu(empty.pid) - empty_before) / elapsed * 1e3
    empty.wait()
    print(f"idle: resident {resident(pid):.1f} MiB (bar 32)")
    print(f"idle: {poll:.3f} ms CPU a poll, an empty loop {nothing:.3f}: {poll - nothing:.3f} ms more (bar 0.15)")
    print(f"idle: {written(pid) - wrote} bytes written in {elapsed:.0f} s (bar 0)")


def tight(simulator: Simulator) -> None:
    """A poll in a tight loop: what it costs when the caches are warm, which at one poll a second they are not."""
    poller = Poller(ImdsClient(simulator.endpoint), "2020-07-01", 1.0)
    poller.poll()
    begun = time.thread_time()
    for _ in range(1000):
        poller.poll()
    print(f"poll, warm: {time.thread_time() - begun:.3f} ms CPU")


def visible(simulator: Simulator) -> None:
    """From the change in IMDS to its sight in /metrics, less the wait for the poll."""
    times = []
    for number in range(10):
        simulator.clear()
        time.sleep(1.2)
        name = f"visible-{number}"
        answered = note_answer(simulator, name)
        simulator.start("live-migration", event_id=name)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if answered and name.encode() in scrape():
                times.append((time.monotonic() - answered[0]) * 1e3)
                break
            time.sleep(0.0005)
    middle = statistics.median(times)
    print(f"visible in /metrics after the answer: median {middle:.1f} ms, max {max(times):.1f} ms (bar 10)")


def note_answer(simulator: Simulator, name: str) -> list[float]:
    """Fill the list with the time at which the first answer that holds ``name`` is made."""
    answered: list[float] = []

    def body(api_version: str, *, empty: bool = False) -> bytes:
        content = SimulatorState.body(simulator, api_version, empty=empty)
        if name.encode() in content and not answered:
            answered.append(time.monotonic())
        return content

    simulator.body = body  # type: ignore[method-assign]  # the one place where the answer is made
    return answered


def scrape() -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
    connection.request("GET", "/metrics")
    body = connection.getresponse().read()
    connection.close()
    return body


def scrapes(simulator: Simulator) -> None:
    simulator.clear()
    for number in range(10):
        simulator.start("live-migration", event_id=f"pending-{number}")
    time.sleep(2)
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
    times = []
    for _ in range(1000):
        begun = time.perf_counter()
        connection.request("GET", "/metrics")
        size = len(connection.getresponse().read())
        times.append((time.perf_counter() - begun) * 1e3)
        time.sleep(0.002)
    times.sort()
    print(f"scrape of {size} bytes with 10 pending: p50 {times[500]:.2f} ms, p99 {times[990]:.2f} ms (bar 3)")


if __name__ == "__main__":
    main()
