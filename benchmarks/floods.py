"""The listener under attack: ``python benchmarks/floods.py [--connections N] [--seconds S] [KIND ...]``.

A running agent, and a second process that opens 1,000 hostile connections of one kind after the other: ``idle``,
``dripping`` (a byte of a header each second), ``half-handshake`` (TLS that is never finished), ``slow-reader``
(requests whose answers are not read), ``wrong-password`` and ``page`` (both as fast as they are answered). Those that
are closed come again. Meanwhile ``/metrics`` is scraped over new connections. Printed: p50 and p99 of the scrapes, the
longest, the agent's threads and open files, its memory before, during and after. Exits with 1 where a bar is missed.
"""

import argparse
import asyncio
import base64
import http.client
import os
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import bcrypt
import trustme
from _machine import describe

from notbefore.simulator.server import Simulator

PORT: Final = 11181
ADDRESS: Final = ("127.0.0.1", PORT)
KINDS: Final = ("idle", "dripping", "half-handshake", "slow-reader", "wrong-password", "page")
BAR_SECONDS: Final = 1.0  # of the longest scrape
BAR_MIB: Final = 60.0  # by which the agent may have grown afterwards: what a thousand handshakes needed stays
PASSWORD: Final = "correct horse"  # noqa: S105 - of this benchmark
REQUEST: Final = "GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", choices=[*KINDS, []], help=", ".join(KINDS))
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each kind lasts")
    parser.add_argument("--hostile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hostile:
        asyncio.run(attack(options.hostile, options.connections))
        return 0
    print(describe())
    print(f"{options.connections} connections of each kind; bars: a scrape {BAR_SECONDS:g} s, memory +{BAR_MIB:g} MiB")
    heads = ("scrapes", "p50", "p99", "longest", "threads", "files", "before", "most", "after")
    print(f"{'kind':<15}" + "".join(f"{head:>10}" for head in heads))
    missed = 0
    for kind in options.kinds or KINDS:
        found = flood(kind, options.connections, options.seconds)
        missed += found.longest > BAR_SECONDS or found.after - found.before > BAR_MIB
        cells = (found.scrapes, *(f"{one * 1e3:.0f} ms" for one in found[1:4]), found.threads, found.files)
        print(f"{kind:<15}" + "".join(f"{cell:>10}" for cell in (*cells, *(f"{one:.1f} MiB" for one in found[6:]))))
    print(f"{missed} of them missed a bar" if missed else "all bars held")
    return int(missed > 0)


class Found(NamedTuple):
    """Seconds, and MiB."""

    scrapes: int
    p50: float
    p99: float
    longest: float
    threads: int
    files: int
    before: float
    most: float
    after: float


# ---- the agent, and who scrapes it


def flood(kind: str, connections: int, seconds: float) -> Found:
    with tempfile.TemporaryDirectory() as place, Simulator() as imds:
        tls = prepare(Path(place), kind)
        words = ["--imds", imds.endpoint, "--state-dir", f"{place}/state", "--listen", f"127.0.0.1:{PORT}"]
        with subprocess.Popen(
            [sys.executable, "-m", "notbefore", "run", f"{place}/notbefore.yml", *words],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "NOTBEFORE_LOG__LEVEL": "error"},
        ) as agent:
            try:
                return measure(agent, Scraper(kind, tls), kind, connections, seconds)
            finally:
                agent.terminate()


def prepare(place: Path, kind: str) -> ssl.SSLContext | None:
    """Write the configuration; returns what a scraper needs for TLS."""
    web, tls = "", None
    if kind == "half-handshake":
        authority = trustme.CA()
        cert = authority.issue_cert("localhost", "127.0.0.1")
        cert.private_key_and_cert_chain_pem.write_to_path(place / "server.pem")
        web = "tls_server_config: {cert_file: server.pem, key_file: server.pem}\n"
        tls = ssl.create_default_context()
        authority.configure_trust(tls)
    if kind == "wrong-password":
        web = f"basic_auth_users: {{prometheus: {bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(10)).decode()}}}\n"
    (place / "web.yml").write_text(web, encoding="utf-8")
    (place / "notbefore.yml").write_text("server: {web_config_file: web.yml}\n" if web else "", encoding="utf-8")
    return tls


class Scraper:
    """Prometheus, over a new connection each time."""

    def __init__(self, kind: str, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._headers = {"Authorization": basic(PASSWORD)} if kind == "wrong-password" else {}

    def get(self, path: str) -> float:
        """Seconds to the end of the answer, which has to be the whole one."""
        begun = time.monotonic()
        if self._tls is not None:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                *ADDRESS, timeout=60, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(*ADDRESS, timeout=60)
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != 200 or not body:
            raise SystemExit(f"GET {path}: {response.status} {body[:200]!r}")
        return time.monotonic() - begun


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"prometheus:{password}".encode()).decode()


def measure(agent: "subprocess.Popen[bytes]", scraper: Scraper, kind: str, connections: int, seconds: float) -> Found:
    wait_for(scraper)
    for path in ("/", "/metrics", "/api/v1/history"):  # what is loaded once belongs to no flood
        scraper.get(path)
    before = most = status(agent.pid, "VmRSS") / 1024
    words = [sys.executable, __file__, "--hostile", kind, "--connections", str(connections)]
    times: list[float] = []
    threads = files = 0
    with subprocess.Popen(words) as hostile:
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                times.append(scraper.get("/metrics"))
                most = max(most, status(agent.pid, "VmRSS") / 1024)
                files = max(files, len(list(Path(f"/proc/{agent.pid}/fd").iterdir())))
                threads = max(threads, status(agent.pid, "Threads"))
                time.sleep(0.1)
        finally:
            hostile.kill()
    after = settled(agent.pid, before + BAR_MIB)
    if agent.poll() is not None:
        raise SystemExit(f"{kind}: the agent is gone, with exit code {agent.returncode}")
    times.sort()
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    return Found(len(times), p50, p99, times[-1], threads, files, before, most, after)


def wait_for(scraper: Scraper) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            scraper.get("/readyz")
        except (OSError, http.client.HTTPException, SystemExit):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def settled(pid: int, bar: float) -> float:
    """The memory afterwards in MiB; connections that were cut off are noticed within some seconds."""
    deadline = time.monotonic() + 15
    while (found := status(pid, "VmRSS") / 1024) > bar and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def status(pid: int, name: str) -> int:
    """Of proc(5): KiB, or a count."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


# ---- the attack: asyncio, and nothing of the product


async def attack(kind: str, connections: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(4096, 2 * connections),) * 2)
    one = ATTACKS[kind]
    await asyncio.gather(*(again(one, number) for number in range(connections)))


async def again(one: Callable[[int], Awaitable[None]], number: int) -> None:
    await asyncio.sleep(number * 0.001)  # no more than the backlog holds
    while True:
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            await one(number)
        await asyncio.sleep(0.5)


async def silent(first: bytes = b"", drip: bytes = b"", read: int = 0) -> None:
    reader, writer = await asyncio.open_connection(*ADDRESS)
    try:
        writer.write(first)
        while drip:
            await asyncio.sleep(1)
            writer.write(drip)
            await writer.drain()
        if read:
            await reader.readexactly(read)
        await reader.read()  # until it is cut off
    finally:
        writer.close()


async def idle(_number: int) -> None:
    await silent()


async def dripping(_number: int) -> None:
    await silent(b"GET /metrics HTTP/1.1\r\nX-Slow: ", drip=b"x")


@cache
def client_hello() -> bytes:
    sent = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


async def half_handshake(_number: int) -> None:
    await silent(client_hello(), read=100)


async def slow_reader(_number: int) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)  # noqa: FBT003 - that is how it is called
        await loop.sock_connect(client, ADDRESS)
        for path in ("/", "/metrics", "/", "/metrics"):
            await loop.sock_sendall(client, (REQUEST % (path, "")).encode())
        while True:  # a byte each three seconds, which is not often enough to matter and too often to be silent
            await asyncio.sleep(3)
            if not await loop.sock_recv(client, 1):
                return


async def asking(path: str, headers: Callable[[], str]) -> None:
    reader, writer = await asyncio.open_connection(*ADDRESS)
    try:
        while True:
            writer.write((REQUEST % (path, headers())).encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
    finally:
        writer.close()


async def wrong_password(_number: int) -> None:
    await asking("/metrics", lambda: f"Authorization: {basic(os.urandom(8).hex())}\r\n")


async def page(_number: int) -> None:
    await asking("/", lambda: "Accept-Encoding: gzip\r\n")


ATTACKS: Final = dict(zip(KINDS, (idle, dripping, half_handshake, slow_reader, wrong_password, page), strict=True))


if __name__ == "__main__":
    sys.exit(main())
