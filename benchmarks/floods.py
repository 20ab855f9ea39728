"""The listener under attack: ``python benchmarks/floods.py [KIND ...]``.

For each kind, an agent runs, and a second process opens 1,000 hostile connections. Those that the
agent closes are opened again. Meanwhile ``/metrics`` is scraped over new connections.

- ``idle``: sends nothing
- ``dripping``: a byte of a header each second
- ``half-handshake``: TLS that is never finished
- ``slow-reader``: requests whose answers are not read
- ``wrong-password``, ``page``: requests as fast as they are answered

Printed: the times of the scrapes in ms (median, 99th percentile, longest), the agent's threads and
open files, and its resident memory before, at most, and after, in MiB. Exits with 1 if the longest
scrape takes more than 1 s, or the memory grows by more than 10 MiB.
"""

import argparse
import asyncio
import base64
import multiprocessing
import os
import resource
import socket
import ssl
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import bcrypt
import requests
import trustme
from _machine import add_names, describe, resident

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually

LIMIT_SECONDS: Final = 1.0  # of the longest scrape
LIMIT_MIB: Final = 10.0  # by which the memory may have grown afterwards
COLUMNS: Final = (
    "scrapes",
    "median",
    "99 %",
    "longest",
    "threads",
    "files",
    "before",
    "most",
    "after",
)
PAGES: Final = ("/", "/metrics", "/api/v1/history")
USER: Final = "prometheus"
PASSWORD: Final = "correct horse"  # noqa: S105 - of this benchmark


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_names(parser, "kinds", "KIND", ATTACKS)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each kind lasts")
    options = parser.parse_args()

    print(describe())
    print(
        f"{options.connections} connections of each kind; limits: a scrape {LIMIT_SECONDS:g} s,"
        f" memory +{LIMIT_MIB:g} MiB"
    )
    print_row("kind", COLUMNS)
    failures = 0
    for kind in options.kinds or ATTACKS:
        figures = flood(kind, options.connections, options.seconds)
        print_row(kind, figures.cells())
        if not figures.are_within_limits:
            failures += 1
    if failures:
        print(f"{failures} exceeded a limit")
        return 1
    print("all within the limits")
    return 0


def print_row(kind: str, cells: tuple[object, ...]) -> None:
    row = "".join(f"{cell:>11}" for cell in cells)
    print(f"{kind:<15}{row}", flush=True)


# ---- the agent and the scraper


@dataclass
class Figures:
    """The figures of an agent under attack."""

    before: float  # MiB of resident memory
    most: float = 0.0
    after: float = 0.0
    threads: int = 0
    files: int = 0
    scrapes: list[float] = field(default_factory=list)  # seconds

    def note(self, pid: int) -> None:
        """Keep the largest values of the agent."""
        self.most = max(self.most, resident(pid))
        self.files = max(self.files, entries(f"/proc/{pid}/fd"))
        self.threads = max(self.threads, entries(f"/proc/{pid}/task"))

    def cells(self) -> tuple[object, ...]:
        """Return the values of ``COLUMNS``."""
        scrapes = sorted(self.scrapes)
        median = scrapes[len(scrapes) // 2]
        percentile = scrapes[int(len(scrapes) * 0.99)]
        times = [f"{seconds * 1e3:.0f} ms" for seconds in (median, percentile, scrapes[-1])]
        sizes = [f"{size:.1f} MiB" for size in (self.before, self.most, self.after)]
        return (len(scrapes), *times, self.threads, self.files, *sizes)

    @property
    def are_within_limits(self) -> bool:
        """Whether the agent still runs, has answered in time, and has not grown."""
        has_answered = max(self.scrapes) <= LIMIT_SECONDS
        return has_answered and 0 < self.after <= self.before + LIMIT_MIB


class Scraper:
    """Scrapes an agent over new connections."""

    def __init__(self, session: requests.Session, url: str) -> None:
        self._session = session
        self._url = url

    def seconds(self, path: str) -> float:
        """Get a page; return the seconds until the end of the answer."""
        started = time.monotonic()
        self._session.get(f"{self._url}{path}", timeout=60).raise_for_status()
        return time.monotonic() - started


def entries(directory: str) -> int:
    return sum(1 for _ in Path(directory).iterdir())


def flood(kind: str, connections: int, seconds: float) -> Figures:
    """Attack a new agent, and return its figures."""
    with (
        tempfile.TemporaryDirectory() as name,
        Simulator() as imds,
        requests.Session() as session,
    ):
        directory = Path(name)
        session.headers["Connection"] = "close"
        session.trust_env = False
        configure(directory, kind, session)
        agent = RunningAgent(imds.endpoint, directory / "state", f"{directory}/notbefore.yml")
        with agent.without_waiting():
            scheme = "https" if kind == "half-handshake" else "http"
            scraper = Scraper(session, f"{scheme}://localhost:{agent.port}")
            return attacked(agent, kind, scraper, connections, seconds)


def configure(directory: Path, kind: str, session: requests.Session) -> None:
    """Write the configuration; give the session the certificate and the password."""
    web = ""
    if kind == "half-handshake":
        authority = trustme.CA()
        authority.cert_pem.write_to_path(directory / "ca.pem")
        certificate = authority.issue_cert("localhost").private_key_and_cert_chain_pem
        certificate.write_to_path(directory / "server.pem")
        web = "tls_server_config: {cert_file: server.pem, key_file: server.pem}\n"
        session.verify = f"{directory}/ca.pem"
    elif kind == "wrong-password":
        digest = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(10)).decode()
        web = f"basic_auth_users: {{{USER}: {digest}}}\n"
        session.auth = (USER, PASSWORD)

    configuration = ""
    if web:
        (directory / "web.yml").write_text(web, encoding="utf-8")
        configuration = "server: {web_config_file: web.yml}\n"
    (directory / "notbefore.yml").write_text(configuration, encoding="utf-8")


def attacked(
    agent: RunningAgent, kind: str, scraper: Scraper, connections: int, seconds: float
) -> Figures:
    """Scrape an agent while another process attacks it."""
    pid = agent.process.pid
    eventually(lambda: "serving http" in agent.log, 20)
    for path in PAGES:  # the memory before has all libraries that a page loads
        scraper.seconds(path)
    figures = Figures(before=resident(pid))

    # a new process, so that it has none of this one's files and threads
    attacker = multiprocessing.get_context("spawn").Process(
        target=attack, args=(kind, connections, agent.port)
    )
    attacker.start()
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            figures.scrapes.append(scraper.seconds("/metrics"))
            figures.note(pid)
            time.sleep(0.1)
    finally:
        attacker.kill()

    # the agent notices within some seconds that the connections are gone
    with suppress(AssertionError):
        eventually(lambda: resident(pid) <= figures.before + LIMIT_MIB, 15)
    figures.after = resident(pid)
    return figures


# ---- the attack, with nothing of the product


def attack(kind: str, connections: int, port: int) -> None:
    """Open hostile connections until this process is killed."""
    files = max(4096, 2 * connections)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    asyncio.run(keep_all_open(kind, connections, port))


async def keep_all_open(kind: str, connections: int, port: int) -> None:
    await asyncio.gather(*(keep_open(kind, number, port) for number in range(connections)))


async def keep_open(kind: str, number: int, port: int) -> None:
    """Open a connection, and open it again whenever it is closed."""
    await asyncio.sleep(number * 0.001)  # the backlog has no room for all at once
    while True:
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
            try:
                await ATTACKS[kind](reader, writer)
            finally:
                writer.close()
        await asyncio.sleep(0.5)


async def idle(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the agent closes the connection


async def dripping(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
    while True:
        await asyncio.sleep(1)
        writer.write(b"x")
        await writer.drain()


@cache
def client_hello() -> bytes:
    """Return the first message of a TLS handshake."""
    sent = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


async def half_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(client_hello())
    await reader.read()


async def slow_reader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for path in ("/", "/metrics", "/", "/metrics"):
        writer.write(request_for(path))
    # a byte every three seconds: too few to make room for the answers, enough to be alive
    while True:
        await asyncio.sleep(3)
        if not await reader.read(1):
            return


async def wrong_password(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        password = os.urandom(8).hex()
        credentials = base64.b64encode(f"{USER}:{password}".encode()).decode()
        await ask(reader, writer, request_for("/metrics", f"Authorization: Basic {credentials}"))


async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await ask(reader, writer, request_for("/", "Accept-Encoding: gzip"))


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    """Send a request, and read the whole answer."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = head.partition("content-length: ")[2].partition("\r\n")[0]
    await reader.readexactly(int(length))


def request_for(path: str, *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode()


ATTACKS: Final = {
    "idle": idle,
    "dripping": dripping,
    "half-handshake": half_handshake,
    "slow-reader": slow_reader,
    "wrong-password": wrong_password,
    "page": page,
}


if __name__ == "__main__":
    sys.exit(main())
