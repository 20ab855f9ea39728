"""What OTLP costs the agent, as figures: ``python benchmarks/otlp.py [--exports 720]``.

The installed agent without OTLP, with it over HTTP, and over gRPC: resident size. Then an hour with the receiver down,
in short time: so many failing exports as an agent makes in an hour at 5 s, refused, cut off and answered with 503 by
turns, with its own log going the same way and ever full; how much the process grows over the second half of them and
over all. And what an export costs.
"""

import argparse
import gc
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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
from notbefore.courier.redact import Redactor
from notbefore.metrics.families import Snapshot, samples
from notbefore.metrics.process import ExportFigures, Figures
from notbefore.metrics.totals import Totals
from notbefore.otlp.agent_log import MAX_LINES, LogLines
from notbefore.otlp.exporter import ExportRequest, ExportTarget, Reading, Sources, _SignalExport
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
    for words in ("metrics alone", "metrics and log", "the same over gRPC, receiver down"):
        given = "" if words == "metrics alone" else ", agent_log: info"
        where = f"endpoint: '{url}'" if "gRPC" not in words else "endpoint: 'http://127.0.0.1:9', protocol: grpc"
        bar = 15 if "gRPC" not in words else 30
        size = agent(f"otlp: {{{where}, interval: 1s{given}}}\n")
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


def made() -> ExportRequest:
    """Ten events pending, as OTLP."""
    from notbefore.otlp.signals import metrics_data  # noqa: PLC0415 - as the agent does

    items = ",".join(
        f'{{"EventId":"{number}","EventStatus":"Scheduled","EventType":"Freeze","Resources":["a"]}}'
        for number in range(10)
    )
    document = parse(f'{{"DocumentIncarnation":1,"Events":[{items}]}}'.encode(), "2020-07-01")
    now = datetime.now(UTC)
    step = diff(Tracked(), document, Look(Instant(now, date=now), "a", 1.0, rebooted=False))
    families = samples(Snapshot(step.tracked, Totals(since=now), Figures(since=now), now))
    return ExportRequest(metrics_data(families, {"service.name": "notbefore"}, "1", now))


def cost(url: str) -> None:
    export = _SignalExport(ExportTarget("metrics", to(url), 60.0), made, sources())
    export._send(None)  # noqa: SLF001 - the exports alone, without their thread
    begun, rounds = time.thread_time(), 100
    for _ in range(rounds):
        export._send(None)  # noqa: SLF001 - as above
    print(f"an export with 10 pending events: {(time.thread_time() - begun) / rounds * 1e3:.1f} ms CPU")


def to(url: str) -> OtlpConnection:
    return OtlpConnection(endpoint=url, timeout=Duration("1s"))


def sources() -> Sources:
    return Sources(lambda: Reading([], None, "1"), ExportFigures(), Redactor(), Http)


def down(url: str, exports: int) -> None:
    logging.getLogger("notbefore.otlp").setLevel(logging.CRITICAL)
    logger = logging.getLogger("benchmark")
    logger.propagate = False
    lines = LogLines("info", threading.Thread(), Redactor())
    logger.addHandler(lines)

    def waiting() -> ExportRequest:
        from notbefore.otlp.signals import log_record, resource_of  # noqa: PLC0415 - as the agent does

        resource = resource_of({"service.name": "notbefore"})
        return ExportRequest([log_record(line, resource) for line in lines.batch()])

    exports_to = []
    for where in (f"{url}/down", "http://127.0.0.1:9"):
        exports_to += [
            _SignalExport(ExportTarget("metrics", to(where), 60.0), made, sources()),
            _SignalExport(ExportTarget("logs", to(where), 60.0), waiting, sources()),
        ]

    def fail(times: int) -> float:
        for number in range(times):
            for line in range(MAX_LINES // 8):
                logger.error("line %d of %d: %s", line, number, "x" * 2_000)
            for export in exports_to[number % 2 * 2 :][:2]:
                export._send(None)  # noqa: SLF001 - as above
        gc.collect()
        return resident(os.getpid())

    before = fail(16)  # imported and connected once, and the log full
    half = fail(exports // 2)
    end = fail(exports - exports // 2)
    counts = f"{exports} exports of each signal failed, the log full all the time"
    print(f"receiver down, {counts}: {end - before:+.2f} MiB, {end - half:+.2f} in the second half (bar 1)")


if __name__ == "__main__":
    main()
