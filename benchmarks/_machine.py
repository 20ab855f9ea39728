"""What several benchmarks need: the machine, the size of a process, an IMDS, and a receiver of webhooks."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple


def describe() -> str:
    """What figures depend on: the machine, how busy it is, and the interpreter."""
    return f"machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, Python {sys.version.split()[0]}"


def resident(pid: int | str = "self", what: str = "VmRSS") -> float:
    """MiB that a process holds in memory (``VmHWM``: the most that it ever did); 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(what)), 0.0)


class _Server(ThreadingHTTPServer):
    """Serves on loopback, in threads, until ``close``."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Serve no longer."""
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Clients that are killed are what some benchmarks are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one segment, as a server sends them that is worth measuring

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Imds(_Server):
    """The IMDS of one VM. It has no ETag, so that each poll is answered with the document."""

    def __init__(self, vm: str, document: Callable[[], bytes | None]) -> None:
        """``document``: what a poll is answered with; ``None``: 500."""
        self.vm, self.document = vm, document
        self.polls = 0
        super().__init__(_ImdsHandler)


class _ImdsHandler(_Handler):
    server: Imds

    def do_GET(self) -> None:
        if self.path.startswith("/metadata/scheduledevents"):
            self.server.polls += 1
            body = self.server.document()
        else:
            body = json.dumps({"compute": {"name": self.server.vm, "vmId": "1", "location": "here"}}).encode()
        with suppress(ConnectionError):  # the agent was killed while it asked
            self.reply(500 if body is None else 200, body or b"", Content_Type="application/json; charset=utf-8")


class Taken(NamedTuple):
    """A delivery that a receiver has taken, whatever it answered."""

    delivery_id: str
    body: bytes
    at: float  # monotonic seconds
    wall: float  # Unix seconds

    @property
    def record(self) -> dict[str, Any]:
        """The body."""
        found: dict[str, Any] = json.loads(self.body)
        return found


ANSWERS: Final = {"take": 200, "fail": 503, "throttle": 429, "take and say 500": 500}
"""A status by mood. Of others (`cut`, `take and cut`, `hang`) there is no answer."""


class Receiver(_Server):
    """A webhook. ``mood`` says what it does with the next delivery: see ``ANSWERS``."""

    def __init__(self, mood: Callable[[], str] = lambda: "take") -> None:
        self.mood = mood
        self.taken: list[Taken] = []  # in order
        super().__init__(_ReceiverHandler)


class _ReceiverHandler(_Handler):
    server: Receiver

    def do_POST(self) -> None:
        body, mood = self.rfile.read(int(self.headers["Content-Length"])), self.server.mood()
        if mood == "hang":
            time.sleep(1.5)
        if "take" in mood:
            found = self.headers["X-Notbefore-Delivery-Id"]
            self.server.taken.append(Taken(found, body, time.monotonic(), time.time()))
        if mood in ANSWERS:
            self.reply(ANSWERS[mood], b"", **({"Retry_After": "0"} if mood == "throttle" else {}))
        else:
            self.close_connection = True
