"""Speed and size of deliveries, as figures: ``python benchmarks/deliveries.py``.

Change seen to accepted by a local webhook, with a courier that has to be started and with one that runs; the agent's
resident size before the first delivery and after a thousand; 20,000 deliveries through one webhook, and the courier's
resident size meanwhile.
"""

import compileall
import http.server
import itertools
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec
from _machine import describe, resident

import notbefore
from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig, Webhook
from notbefore.core.outbox import Bounds
from notbefore.core.record import Record
from notbefore.courier.orders import Orders
from notbefore.courier.supervisor import Supervisor
from notbefore.simulator.server import Simulator

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.owner import Owner, serve

PORT = 11_171
FUTURE = "Fri, 01 Mar 2058 12:00:00 GMT"
COLD, WARM = 15, 60  # rounds
INCARNATIONS = itertools.count(1)


class Receiver(http.server.ThreadingHTTPServer):
    """Accepts everything; says when, and the body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.taken: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        self.server.taken.put((time.time(), body))

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def main() -> None:
    print(describe())
    compileall.compile_dir(Path(notbefore.__file__).parent, quiet=1)  # as an installation does
    latency()
    size()
    throughput(20_000)


class Running:
    """The agent against a simulator; with a webhook, or with none."""

    def __init__(self, simulator: Simulator, directory: str, receiver: Receiver | None) -> None:
        sinks = {} if receiver is None else {"hook": {"webhook": {"url": receiver.url, "allow_private": True}}}
        config = Path(directory) / "notbefore.yaml"
        config.write_text(json.dumps({"sinks": sinks}), encoding="utf-8")
        command = [sys.executable, "-m", "notbefore", "run", str(config), "--imds", simulator.endpoint]
        command += ["--state-dir", directory, "--listen", f"127.0.0.1:{PORT}"]
        # an installed package has its bytecode
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"NOTBEFORE_IMDS__INTERVAL": "200ms", "NOTBEFORE_LOG__LEVEL": "error"}
        environment["PYTHONPYCACHEPREFIX"] = f"{directory}/bytecode"
        show(simulator, range(0))
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        self.pid = self._process.pid
        time.sleep(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def latency() -> None:
    receiver = Receiver()
    with (
        tempfile.TemporaryDirectory() as directory,
        Simulator(("WestNO_0",)) as simulator,
        Running(simulator, directory, receiver) as agent,
    ):
        rounds(simulator, receiver, agent.pid, cold=True)
        rounds(simulator, receiver, agent.pid, cold=False)


def size() -> None:
    """A thousand changes, ten events at a time; once with a sink, and once without, to tell what the changes cost."""
    for receiver in (None, Receiver()):
        with (
            tempfile.TemporaryDirectory() as directory,
            Simulator(("WestNO_0",)) as simulator,
            Running(simulator, directory, receiver) as agent,
        ):
            before = resident(agent.pid)
            for number in range(0, 500, 10):
                for listed in (range(number, number + 10), range(0)):
                    show(simulator, listed)
                    if receiver is None:
                        time.sleep(0.4)
                        continue
                    for _ in range(10):
                        receiver.taken.get(timeout=30)
            time.sleep(3)
            what = "no sink" if receiver is None else "a webhook, 1000 deliveries"
            print(
                f"agent's resident size, {what}: {before:.1f} MiB before, {resident(agent.pid):.1f} MiB after 1000"
                " changes (bar: the same)"
            )


def show(simulator: Simulator, numbers: range) -> None:
    """List these events."""
    event = {"EventStatus": "Scheduled", "EventType": "Freeze", "Resources": ["WestNO_0"], "NotBefore": FUTURE}
    events = [{**event, "EventId": f"E-{number}", "ResourceType": "VirtualMachine"} for number in numbers]
    simulator.set_document(msgspec.json.encode({"DocumentIncarnation": next(INCARNATIONS), "Events": events}))


def rounds(simulator: Simulator, receiver: Receiver, agent: int, *, cold: bool) -> None:
    seconds = []
    for number in range(COLD if cold else WARM):
        if cold:
            end_courier(agent)
        show(simulator, range((0 if cold else COLD) + number + 1))
        at, body = receiver.taken.get(timeout=30)
        seen = datetime.fromisoformat(json.loads(body)["time"]).timestamp()
        seconds.append(at - seen)
    what, bar = ("cold", "100 ms") if cold else ("warm", "30 ms")
    print(
        f"change seen -> accepted, {what} courier: p50 {statistics.median(seconds) * 1000:.0f} ms,"
        f" max {max(seconds) * 1000:.0f} ms, {len(seconds)} rounds (bar: p50 at most {bar})"
    )


def end_courier(agent: int) -> None:
    """A reload has it leave, in order."""
    with suppress(IndexError):
        courier = courier_of(agent)
        os.kill(agent, signal.SIGHUP)
        while courier_of(agent) == courier:
            time.sleep(0.02)


def courier_of(agent: int) -> int:
    """The process id; raises ``IndexError`` where there is none."""
    return int(Path(f"/proc/{agent}/task/{agent}/children").read_text(encoding="ascii").split()[0])


def throughput(count: int) -> None:
    receiver, owner = Receiver(), Owner(Bounds(10_000, 64 * 1024 * 1024))
    sinks = {"hook": SinkConfig(webhook=Webhook(url=Secret(receiver.url), allow_private=True))}
    couriers = Supervisor(Orders(sinks), owner, lambda: None)
    sizes, seconds = [], 0.0
    for first in range(0, count, 5_000):
        fill(owner, first, 5_000)
        couriers.wake()
        begun = time.perf_counter()
        serve([couriers], lambda: len(owner.results) >= first + 5_000, 300.0)  # noqa: B023 - of this round
        seconds += time.perf_counter() - begun
        sizes.append(resident(courier_of(os.getpid())))
    couriers.stop(lambda _seconds: False)
    shown = ", ".join(f"{size:.1f}" for size in sizes)
    print(
        f"{count} deliveries: {count / seconds:.0f} a second (bar: 1500); courier's resident size after each 5,000:"
        f" {shown} MiB (bar: 30); received {receiver.taken.qsize()}"
    )


def fill(owner: Owner, first: int, count: int) -> None:
    moment = datetime.now(UTC)
    line = Record(
        time=moment, event_name="azure.scheduled_event.announced", body="x" * 300, change_id="c", change="announced",
        reason="first_seen_scheduled", event_id="e", event_type="Freeze", event_status="Scheduled", scope="self",
        resources=("vm-0",), incarnation=1, first_seen=moment,
    ).line()  # fmt: skip
    owner.put(*(f"{number:032x}" for number in range(first, first + count)), sink="hook", record=line)


if __name__ == "__main__":
    main()
