"""Parts of several benchmarks: a description of the machine, the size of a process, an IMDS, and a
receiver of webhooks.
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
    """Describe what the figures depend on: the machine, its load and the interpreter."""
    return (
        f"machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, Python"
        f" {sys.version.split()[0]}"
    )


def resident(pid: int | str = "self", what: str = "VmRSS") -> float:
    """Return the MiB of memory that a process holds, or 0 once it has ended.

    ``VmHWM``: the most that it ever held.
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
        """Return status and body; ``None``: cut the connection."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Clients that are killed are what some benchmarks are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # send head and body in one segment, as real servers do
    server: _Server

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        delivery_id = self.headers.get("X-Notbefore-Delivery-Id", "")
        answer = None
        if len(body) == length:  # else the client was killed before it had sent all
            answer = self.server.answer(self.path, delivery_id, body)
        if answer is None:
            self.close_connection = True
            return
        status, content = answer
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET  # noqa: N815 - the name is the library's

    def log_message(self, *_: object) -> None:
        pass


class Imds(_Server):
    """The IMDS of one VM. It has no ETag, so that each poll is answered with the document."""

    def __init__(self, vm: str, document: Callable[[], bytes | None]) -> None:
        """Answer polls with what ``document`` returns; ``None``: with status 500."""
        self.vm = vm
        self.document = document
        self.polls = 0
        super().__init__()

    def answer(self, path: str, *_: object) -> tuple[int, bytes]:
        if not path.startswith("/metadata/scheduledevents"):
            metadata = {"compute": {"name": self.vm, "vmId": "1", "location": "here"}}
            return 200, json.dumps(metadata).encode()
        self.polls += 1
        document = self.document()
        if document is None:
            return 500, b""
        return 200, document


class Taken(NamedTuple):
    """A delivery that a receiver has taken, with any answer."""

    delivery_id: str
    body: bytes
    at: float  # monotonic seconds
    wall: float  # Unix seconds

    @property
    def record(self) -> dict[str, Any]:
        """The decoded body."""
        record: dict[str, Any] = json.loads(self.body)
        return record


# The status of each mood. Other moods (`cut`, `take and cut`, `hang`) give no answer.
ANSWERS: Final = {"take": 200, "fail": 503, "throttle": 429, "take and say 500": 500}


def take_all() -> str:
    """Return the mood of a receiver that always accepts."""
    return "take"


class Receiver(_Server):
    """Receives webhooks; ``mood`` returns what to do with the next delivery: see ``ANSWERS``."""

    def __init__(self, mood: Callable[[], str] = take_all) -> None:
        self.mood = mood
        self.taken: list[Taken] = []  # in order
        super().__init__()

    def answer(self, _path: str, delivery_id: str, body: bytes) -> tuple[int, bytes] | None:
        mood = self.mood()
        if mood == "hang":
            time.sleep(1.5)
        if "take" in mood:
            self.taken.append(Taken(delivery_id, body, time.monotonic(), time.time()))
        if mood in ANSWERS:
            return ANSWERS[mood], b""
        return None
