"""What OTLP costs the agent, as figures: ``python benchmarks/otlp.py [--exports 720]``.

The installed agent without OTLP, with it over HTTP, and over gRPC: resident size. Then an hour with the receiver down,
in short time: so many failing exports as an agent makes in an hour at 5 s, refused, cut off and answered with 503 by
turns; how much the process grows over the second half of them and
over all. And what an export costs.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from _machine import describe, resident

from notbefore.commands.client import AgentClient
from notbefore.config.sinks import OtlpConnection
from notbefore.core.clock import Instant
from notbefore.core.document import parse
from notbefore.core.duration import Duration
from notbefore.core.lifecycle import diff
from notbefore.core.tracked import Observation as Look
from notbefore.core.tracked import Tracked
from notbefore.courier.http import Http
from notbefore.errors import SendError
from notbefore.metrics.families import Snapshot, samples
from notbefore.metrics.process import Figures
from notbefore.metrics.totals import Totals
from notbefore.otlp.sender import Sender
from notbefore.otlp.signals import metrics_data
from notbefore.simulator.server import Simulator

PORT = 11171


class Receiver(BaseHTTPRequestHandler):
    """Accepts what it is sent; under ``/down`` it answers with 503 or not at all, by turns."""

    protocol_version = "HTTP/1.1"
    turn = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        Receiver.turn += 1
        if self.path.startswith("/down") and Receiver.turn % 2:
            self.close_connection = True
            return
        self.send_response(503 if self.path.startswith("/down") else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exports", type=int, default=720, help="failing exports of each signal")
    options = parser.parse_args()
    print(describe())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    without = agent("")
    print(f"agent without OTLP: {without:.1f} MiB resident")
    for words in ("HTTP", "gRPC, receiver down"):
        where = f"endpoint: '{url}'" if words == "HTTP" else "endpoint: 'http://127.0.0.1:9', protocol: grpc"
        bar = 15 if words == "HTTP" else 30
        size = agent(f"otlp: {{{where}, interval: 1s}}\n")
        print(f"agent with OTLP, {words}: {size:.1f} MiB resident, {size - without:.1f} more (bar {bar})")
    cost(url)
    down(url, options.exports)
    server.shutdown()


def agent(text: str) -> float:
    """MiB of an agent with this configuration, some exports after its start."""
    with tempfile.TemporaryDirectory() as directory, Simulator() as simulator:
        config = Path(directory) / "notbefore.yaml"
        config.write_text(text + "log: {level: warning}\n", encoding="utf-8")
        words = ["--imds", simulator.endpoint, "--state-dir", directory, "--listen", f"127.0.0.1:{PORT}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "notbefore", "run", str(config), *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            time.sleep(3)
            for number in range(10):
                simulator.start("live-migration", event_id=f"pending-{number}")
            time.sleep(7)
            AgentClient(f"http://127.0.0.1:{PORT}").ask("/readyz")
            return resident(process.pid)
        finally:
            process.terminate()
            process.wait(15)


def made() -> Any:
    """Ten events pending, as OTLP."""
    items = ",".join(
        f'{{"EventId":"{number}","EventStatus":"Scheduled","EventType":"Freeze","Resources":["a"]}}'
        for number in range(10)
    )
    document = parse(f'{{"DocumentIncarnation":1,"Events":[{items}]}}'.encode(), "2020-07-01")
    now = datetime.now(UTC)
    step = diff(Tracked(), document, Look(Instant(now, date=now), "a", 1.0, rebooted=False))
    families = samples(Snapshot(step.tracked, Totals(since=now), Figures(since=now), now))
    return metrics_data(families, {"service.name": "notbefore"}, "1", now)


def sender_to(url: str) -> Sender:
    return Sender(OtlpConnection(endpoint=url, timeout=Duration("1s")), "metrics", Http)


def cost(url: str) -> None:
    sender = sender_to(url)
    sender.send(made())
    begun, rounds = time.thread_time(), 100
    for _ in range(rounds):
        sender.send(made())
    print(f"an export with 10 pending events: {(time.thread_time() - begun) / rounds * 1e3:.1f} ms CPU")


def down(url: str, exports: int) -> None:
    def fail(times: int) -> float:
        for number in range(times):
            sender = sender_to(f"{url}/down" if number % 2 else "http://127.0.0.1:9")  # made anew after a failure
            with suppress(SendError):
                sender.send(made())
            sender.close()
        gc.collect()
        return resident(os.getpid())

    before = fail(16)  # imported and connected once
    half = fail(exports // 2)
    end = fail(exports - exports // 2)
    print(f"receiver down, {exports} exports: {end - before:+.2f} MiB, {end - half:+.2f} in the second half (bar 1)")


if __name__ == "__main__":
    main()
