"""What several benchmarks need: the machine, the size of a process, and an IMDS that says what it is told to."""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def describe() -> str:
    """What figures depend on: the machine, how busy it is, and the interpreter."""
    return f"machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, Python {sys.version.split()[0]}"


def resident(pid: int | str = "self") -> float:
    """MiB that a process holds in memory; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


class Imds(ThreadingHTTPServer):
    """The IMDS of one VM, on loopback. It has no ETag, so that each poll is answered with the document."""

    daemon_threads = True

    def __init__(self, vm: str, document: Callable[[], bytes | None]) -> None:
        """``document``: what a poll is answered with; ``None``: 500."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.vm, self.document = vm, document
        self.polls = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Serve no longer."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one segment, as a server sends them that is worth measuring
    server: Imds

    def do_GET(self) -> None:
        if self.path.startswith("/metadata/scheduledevents"):
            self.server.polls += 1
            body = self.server.document()
        else:
            body = json.dumps({"compute": {"name": self.server.vm, "vmId": "1", "location": "here"}}).encode()
        with suppress(ConnectionError):  # the agent was killed while it asked
            if body is None:
                self.send_error(500)
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
