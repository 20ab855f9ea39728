"""The listener under attack: ``python benchmarks/floods.py [--connections N] [--seconds S] [KIND
...]``.

A running agent, and a second process that opens 1,000 hostile connections of one kind after the
other: ``idle``, ``dripping`` (a byte of a header each second), ``half-handshake`` (TLS that is
never finished), ``slow-reader`` (requests whose answers are not read), ``wrong-password`` and
``page`` (both as fast as they are answered). Those that are closed come again. Meanwhile
``/metrics`` is scraped over new connections. Printed: p50 and p99 of the scrapes, the longest, the
agent's threads and open files, its memory before, during and after. Exits with 1 where a bar is
missed.
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
from functools import cache
from pathlib import Path
from typing import Final

import bcrypt
import requests
import trustme
from _machine import describe, resident

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually

BAR_SECONDS: Final = 1.0  # of the longest scrape
BAR_MIB: Final = 10.0  # by which the agent may have grown afterwards
PASSWORD: Final = "correct horse"  # noqa: S105 - of this benchmark
REQUEST: Final = "GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", choices=[*ATTACKS, []], help=", ".join(ATTACKS)
    )
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each kind lasts")
    options = parser.parse_args()
    print(describe())
    print(
        f"{options.connections} connections of each kind; bars: a scrape {BAR_SECONDS:g} s, memory"
        f" +{BAR_MIB:g} MiB"
    )
    heads = ("scrapes", "p50", "p99", "longest", "threads", "files", "before", "most", "after")
    print(f"{'kind':<15}" + "".join(f"{head:>10}" for head in heads))
    held = [flood(kind, options.connections, options.seconds) for kind in options.kinds or ATTACKS]
    print("all bars held" if all(held) else f"{held.count(False)} of them missed a bar")
    return int(not all(held))


# ---- the agent and the scraper


def flood(kind: str, connections: int, seconds: float) -> bool:
    """Attack a new agent and print a line; return whether the bars held."""
    with tempfile.TemporaryDirectory() as place, Simulator() as imds, requests.Session() as scraper:
        scraper.headers["Connection"] = "close"
        scraper.trust_env = False
        prepare(Path(place), kind, scraper)
        with RunningAgent(
            imds.endpoint, Path(place, "state"), f"{place}/notbefore.yml"
        ).without_waiting() as agent:
            return measured(agent, kind, scraper, connections, seconds)


def prepare(place: Path, kind: str, scraper: requests.Session) -> None:
    """Write the configuration; give the scraper the certificate and the password."""
    web = ""
    if kind == "half-handshake":
        authority = trustme.CA()
        authority.cert_pem.write_to_path(place / "ca.pem")
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(
            place / "server.pem"
        )
        web = "tls_server_config: {cert_file: server.pem, key_file: server.pem}\n"
        scraper.verify = f"{place}/ca.pem"
    if kind == "wrong-password":
        web = (
            "basic_auth_users: {prometheus:"
            f" {bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(10)).decode()}}}\n"
        )
        scraper.auth = ("prometheus", PASSWORD)
    (place / "web.yml").write_text(web, encoding="utf-8")
    (place / "notbefore.yml").write_text(
        "server: {web_config_file: web.yml}\n" if web else "", encoding="utf-8"
    )


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"prometheus:{password}".encode()).decode()


def measured(
    agent: RunningAgent, kind: str, scraper: requests.Session, connections: int, seconds: float
) -> bool:
    """Scrape it while it is attacked."""
    pid = agent.process.pid
    scheme = "https" if isinstance(scraper.verify, str) else "http"

    def get(path: str) -> float:
        """Seconds to the end of the answer, over a new connection; it has to be the whole one."""
        begun = time.monotonic()
        scraper.get(f"{scheme}://localhost:{agent.port}{path}", timeout=60).raise_for_status()
        return time.monotonic() - begun

    eventually(lambda: "serving http" in agent.log, 20)
    for path in ("/", "/metrics", "/api/v1/history"):  # what is loaded once belongs to no flood
        get(path)
    before = resident(pid)
    most = before
    times: list[float] = []
    threads = 0
    files = 0
    hostile = multiprocessing.get_context("spawn").Process(
        target=attack, args=(kind, connections, agent.port)
    )
    hostile.start()
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            times.append(get("/metrics"))
            most = max(most, resident(pid))
            files = max(files, len(os.listdir(f"/proc/{pid}/fd")))  # noqa: PTH208 - their number alone
            threads = max(threads, len(os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208 - as above
            time.sleep(0.1)
    finally:
        hostile.kill()
    with suppress(AssertionError):  # connections that were cut off are noticed within some seconds
        eventually(lambda: resident(pid) <= before + BAR_MIB, 15)
    after = resident(pid)
    times.sort()
    p50 = times[len(times) // 2]
    p99 = times[int(len(times) * 0.99)]
    in_ms = [f"{duration * 1e3:.0f} ms" for duration in (p50, p99, times[-1])]
    in_mib = [f"{size:.1f} MiB" for size in (before, most, after)]
    cells = [len(times), *in_ms, threads, files, *in_mib]
    print(f"{kind:<15}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    return times[-1] <= BAR_SECONDS and 0 < after <= before + BAR_MIB


# ---- the attack: asyncio, and nothing of the product


def attack(kind: str, connections: int, port: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(4096, 2 * connections),) * 2)

    async def again(number: int) -> None:
        await asyncio.sleep(number * 0.001)  # no more than the backlog holds
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
                try:
                    await ATTACKS[kind](reader, writer)
                finally:
                    writer.close()
            await asyncio.sleep(0.5)

    async def all_of_them() -> None:
        await asyncio.gather(*(again(number) for number in range(connections)))

    asyncio.run(all_of_them())


async def idle(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until it is cut off


async def dripping(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
    while True:
        await asyncio.sleep(1)
        writer.write(b"x")
        await writer.drain()


@cache
def client_hello() -> bytes:
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
        writer.write((REQUEST % (path, "")).encode())
    # a byte each three seconds, which is not often enough to matter and too often to be silent
    while True:
        await asyncio.sleep(3)
        if not await reader.read(1):
            return


async def asking(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, header: str
) -> None:
    writer.write((REQUEST % (path, header)).encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))


async def wrong_password(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await asking(reader, writer, "/metrics", f"Authorization: {basic(os.urandom(8).hex())}\r\n")


async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await asking(reader, writer, "/", "Accept-Encoding: gzip\r\n")


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
