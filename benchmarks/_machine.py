"""Parts of several benchmarks: figures of the machine and of a process, an IMDS, and a receiver of
webhooks.
"""

import argparse
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple


def describe() -> str:
    """Describe what the figures depend on: the machine, its load and the interpreter."""
    load = os.getloadavg()[0]
    python = platform.python_version()
    return f"machine: {os.cpu_count()} cores, load {load:.2f}, Python {python}"


def resident(pid: int) -> float:
    """Return the MiB of memory that a process holds, or 0 if it has ended."""
    return _memory(pid, "VmRSS")


def peak(pid: int) -> float:
    """Return the most MiB of memory that a process ever held, or 0 if it has ended."""
    return _memory(pid, "VmHWM")


def _memory(pid: int, name: str) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                kib = int(line.split()[1])
                return kib / 1024
    return 0.0


def first_child(pid: int) -> int:
    """Return the first child of a process, or 0 if it has none or has ended."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        if children:
            return int(children[0])
    return 0


def add_names(
    parser: argparse.ArgumentParser, dest: str, metavar: str, names: Collection[str]
) -> None:
    """Add an argument for some of these names. ``options.<dest>`` is empty if there are none."""
    text = ", ".join(names)
    # argparse also looks for the empty list among the choices
    choices: list[Any] = [*names, []]
    parser.add_argument(dest, nargs="*", choices=choices, metavar=metavar, help=text)


def never_interrupted(_seconds: float) -> bool:
    """Let a supervisor that stops wait for its courier."""
    return False


class _Server(ThreadingHTTPServer):
    """Serves on loopback, in threads, until ``close``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path: str, delivery_id: str, body: bytes) -> tuple[int, bytes] | None:
        """Return status and body, or ``None`` to close the connection without an answer."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Print nothing: some benchmarks kill the clients."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # send head and body in one segment, as real servers do
    server: _Server

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        delivery_id = self.headers.get("X-Notbefore-Delivery-Id", "")
        answer = None
        is_complete = len(body) == length  # else the client was killed while it sent the body
        if is_complete:
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

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


class Imds(_Server):
    """The IMDS of one VM. It sends no ETag, so each answer has the whole document."""

    def __init__(self, vm: str, document: Callable[[], bytes | None]) -> None:
        """``document`` returns the document for a poll; ``None``: answer with status 500."""
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


class ReceivedDelivery(NamedTuple):
    """A delivery that a receiver has taken, whatever it answered."""

    delivery_id: str
    body: bytes
    at: float  # monotonic seconds
    wall: float  # Unix seconds

    @property
    def record(self) -> dict[str, Any]:
        """The decoded body."""
        record: dict[str, Any] = json.loads(self.body)
        return record


# what a receiver does with a delivery -> the status that it answers
ANSWERS: Final[dict[str, int | None]] = {
    "take": 200,
    "take and answer 500": 500,
    "take and cut": None,
    "fail": 503,
    "throttle": 429,
    "hang": None,
    "cut": None,
}
HANG: Final = 1.5  # seconds, longer than the timeout of the sink


def take_all() -> str:
    """Return what a receiver does that always accepts."""
    return "take"


class Receiver(_Server):
    """Receives webhooks. ``choose`` returns what to do with the next one: a key of ``ANSWERS``."""

    def __init__(self, choose: Callable[[], str] = take_all) -> None:
        self._choose = choose
        self.received: list[ReceivedDelivery] = []  # in order of arrival
        super().__init__()

    def answer(self, _path: str, delivery_id: str, body: bytes) -> tuple[int, bytes] | None:
        action = self._choose()
        if action == "hang":
            time.sleep(HANG)
        if action.startswith("take"):
            delivery = ReceivedDelivery(delivery_id, body, time.monotonic(), time.time())
            self.received.append(delivery)
        status = ANSWERS[action]
        if status is None:
            return None
        return status, b""
