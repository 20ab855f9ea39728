"""What several benchmarks need: the machine, the size of a process, an IMDS, and a receiver of
webhooks.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple


def describe() -> str:
    """What figures depend on: the machine, how busy it is, and the interpreter."""
    return (
        f"machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, Python"
        f" {sys.version.split()[0]}"
    )


def resident(pid: int | str = "self", what: str = "VmRSS") -> float:
    """MiB that a process holds in memory (``VmHWM``: the most that it ever did).

    0 once it has ended.
    """
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))
    return 0.0


class _Server(ThreadingHTTPServer):
    """Serves on loopback, in threads, until ``close``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path: str, delivery_id: str, body: bytes) -> tuple[int, bytes] | None:
        """The status and the body; ``None``: the connection is cut."""
        raise NotImplementedError

    def close(self) -> None:
        """Serve no longer."""
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Clients that are killed are what some benchmarks are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one segment, as a server sends them that is worth measuring
    server: _Server

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        delivery_id = self.headers.get("X-Notbefore-Delivery-Id", "")
        found = self.server.answer(self.path, delivery_id, body) if len(body) == length else None
        if found is None:  # or the client was killed before it had sent all
            self.close_connection = True
            return
        self.send_response(found[0])
        self.send_header("Content-Type", "application/json; charset=utf-8")
        if found[0] == HTTPStatus.TOO_MANY_REQUESTS:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(found[1])))
        self.end_headers()
        self.wfile.write(found[1])

    do_POST = do_GET  # noqa: N815 - the name is the library's

    def log_message(self, *_: object) -> None:
        pass


class Imds(_Server):
    """The IMDS of one VM. It has no ETag, so that each poll is answered with the document."""

    def __init__(self, vm: str, document: Callable[[], bytes | None]) -> None:
        """``document``: what a poll is answered with; ``None``: 500."""
        self.vm = vm
        self.document = document
        self.polls = 0
        super().__init__()

    def answer(self, path: str, *_: object) -> tuple[int, bytes]:
        if not path.startswith("/metadata/scheduledevents"):
            return (
                200,
                json.dumps(
                    {"compute": {"name": self.vm, "vmId": "1", "location": "here"}}
                ).encode(),
            )
        self.polls += 1
        found = self.document()
        return (500, b"") if found is None else (200, found)


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
        super().__init__()

    def answer(self, _path: str, delivery_id: str, body: bytes) -> tuple[int, bytes] | None:
        mood = self.mood()
        if mood == "hang":
            time.sleep(1.5)
        if "take" in mood:
            self.taken.append(Taken(delivery_id, body, time.monotonic(), time.time()))
        return (ANSWERS[mood], b"") if mood in ANSWERS else None
