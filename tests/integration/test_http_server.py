"""The HTTP server on real sockets: what it answers, and that a thousand silent clients do not keep a scrape waiting."""

import gzip
import http.client
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.core.listing import PendingEvent, PendingView
from notbefore.errors import ListenError
from notbefore.web import channel as channels
from notbefore.web import server as module
from notbefore.web.access import Access
from notbefore.web.app import make_app
from notbefore.web.server import HttpServer
from notbefore.web.view import AgentStatus, CheckResult
from support.agent import eventually, free_port
from support.needs import needs
from support.shown import NOTHING_PENDING

METRICS = b"# TYPE up gauge\nup 1\n"


class Shown:
    """A view of fixed things."""

    def __init__(self) -> None:
        self.verdict = CheckResult(ok=True)
        self.asked: list[tuple[datetime | None, int]] = []
        self.body = METRICS
        self.broken = False
        self.listed = NOTHING_PENDING
        self.gate = threading.Event()  # while it is not set, the history is not answered
        self.gate.set()

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return self.body, f"text/plain; accept={accept}"

    def health(self) -> CheckResult:
        return self.verdict

    def ready(self) -> CheckResult:
        if self.broken:
            raise RuntimeError("a secret that nobody is to see")
        return self.verdict

    def pending(self) -> PendingView:
        return self.listed

    def history(self, since: datetime | None, limit: int) -> bytes:
        self.asked.append((since, limit))
        self.gate.wait(20)
        return b'{"changes":[]}'

    def agent_status(self) -> AgentStatus:
        return AgentStatus()


@pytest.fixture
def view() -> Shown:
    return Shown()


@pytest.fixture
def server(view: Shown) -> Iterator[HttpServer]:
    served = HttpServer("127.0.0.1:0", make_app(view))
    served.start()
    yield served
    served.stop()


def ask(
    server: HttpServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def test_metrics_come_in_the_form_that_was_asked_for(server: HttpServer) -> None:
    status, headers, body = ask(server, "/metrics", accept="application/openmetrics-text")
    assert (status, body) == (200, METRICS)
    assert headers["Content-Type"] == "text/plain; accept=application/openmetrics-text"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Server" not in headers


def test_the_page_is_compressed_for_those_who_ask(server: HttpServer) -> None:
    for accepted, packed in (("gzip", True), ("br, gzip;q=0.5", True), ("br", False), ("gzip;q=0, br", False)):
        _, headers, body = ask(server, "/", accept_encoding=accepted)
        assert (headers["Content-Encoding"] == "gzip") == packed
        assert (gzip.decompress(body) if packed else body).startswith(b"<!DOCTYPE html>")


def test_head_is_get_without_a_body(server: HttpServer) -> None:
    status, headers, body = ask(server, "/metrics", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(METRICS)), b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(server: HttpServer, method: str) -> None:
    status, headers, _ = ask(server, "/api/v1/events", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_a_verdict_is_a_status_and_its_reasons(server: HttpServer, view: Shown) -> None:
    assert ask(server, "/healthz")[::2] == (200, b'{"status":"ok","reasons":[]}')
    view.verdict = CheckResult(ok=False, reasons=("no beat",))
    assert ask(server, "/healthz")[::2] == (503, b'{"status":"unhealthy","reasons":["no beat"]}')


def listed(**fields: Any) -> PendingView:
    values: dict[str, Any] = {
        "event_id": "E",
        "event_type": "Reboot",
        "event_status": "Scheduled",
        "event_source": "Platform",
        "scope": "self",
        "resources": (),
        "description": None,
        "not_before": None,
        "seconds_to_not_before": None,
        "expected_duration_seconds": None,
        "first_seen": datetime(2026, 3, 1, tzinfo=UTC),
        "notice_seconds": None,
        "started": None,
        "start_seen": False,
    }
    return replace(NOTHING_PENDING, events=(PendingEvent(**values | fields),))


@pytest.mark.parametrize(
    ("shown", "query", "status"),
    [
        (NOTHING_PENDING, "?pending=Reboot", 200),
        (listed(), "", 200),
        (listed(), "?pending=Reboot,Redeploy", 503),
        (listed(), "?pending=Redeploy&pending=reboot", 503),
        (listed(), "?pending=Redeploy", 200),
        (listed(event_status="Started"), "?pending=Reboot", 503),
        (listed(scope="peer"), "?pending=Reboot", 200),
        (listed(scope="unknown"), "?pending=Reboot", 503),
        (replace(NOTHING_PENDING, unreadable=1), "?pending=Reboot", 503),
        (replace(NOTHING_PENDING, unreadable=1), "", 200),
    ],
)
def test_readiness_can_depend_on_the_events_of_this_vm(
    server: HttpServer, view: Shown, shown: PendingView, query: str, status: int
) -> None:
    view.listed = shown
    assert ask(server, f"/readyz{query}")[0] == status


def test_readiness_says_which_event_is_pending(server: HttpServer, view: Shown) -> None:
    view.listed = listed(event_status="Started")
    assert json.loads(ask(server, "/readyz?pending=Reboot")[2]) == {
        "status": "not ready",
        "reasons": ["Reboot E of this VM is started"],
    }
    view.verdict = CheckResult(ok=False, reasons=("IMDS does not answer",))
    assert ask(server, "/readyz?pending=Freeze")[0] == 503, "whether one is pending is not known then"


@pytest.mark.parametrize("query", ["pending=Rebot", "pending=", "pending=Reboot,,Freeze", "pendign=Reboot"])
def test_a_type_that_nobody_knows_is_refused_with_those_that_there_are(server: HttpServer, query: str) -> None:
    status, _, body = ask(server, f"/readyz?{query}")
    assert (status, b"expected" in body) == (400, True)
    assert (b"pending" if "pendign" in query else b"Freeze, Reboot, Redeploy, Preempt, Terminate") in body


def test_a_page_that_breaks_says_nothing_and_takes_no_other_with_it(
    server: HttpServer, view: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    view.broken = True
    status, _, body = ask(server, "/readyz")
    assert status == 500
    assert b"secret" not in body
    assert "/readyz failed" in caplog.text
    assert ask(server, "/metrics")[0] == 200


def test_an_unknown_page_names_the_known_ones(server: HttpServer) -> None:
    status, _, body = ask(server, "/metric")
    assert status == 404
    assert "/metrics" in json.loads(body)["error"]


def test_the_page_allows_nothing_but_what_comes_with_it(server: HttpServer) -> None:
    _, headers, body = ask(server, "/", accept_encoding="gzip")
    (policy,) = headers.get_all("Content-Security-Policy", [])
    directives = {one.split()[0]: one.split()[1:] for one in policy.split(";")}
    assert directives.pop("default-src") == directives.pop("frame-ancestors") == ["'none'"]
    assert {source for sources in directives.values() for source in sources} == {"'self'", "'none'"}
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    page = gzip.decompress(body).decode()
    assert "/api/v1/history" in page
    files = re.findall(r'(?:src|href)="(page/[^"]+)"', page)
    assert len(files) == 3
    for file in files:
        status, headers, body = ask(server, f"/{file}")
        assert (status, bool(body), headers["X-Content-Type-Options"]) == (200, True, "nosniff")
    assert ask(server, "/page/../http.py")[0] == 404


@pytest.mark.parametrize(
    "path", ["//metrics", "/%6detrics", "/metrics/", "/./metrics", "/metrics#x", "/metrics%3f", "*"]
)
def test_a_path_has_one_form(server: HttpServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost/metrics", 200),
        ("http://127.0.0.1:1/metrics?x=/y", 200),
        ("http://localhost", 200),
        ("http://localhost?x=/metrics", 200),
        ("http://localhost//metrics", 404),
        ("http://evil.example.com/metrics", 421),
    ],
)
def test_an_absolute_target_says_host_and_path(server: HttpServer, target: str, status: int) -> None:
    got, headers, _ = ask(server, target)
    assert got == status
    page = "/metrics" not in target.partition("?")[0]
    assert status != 200 or ("html" in headers["Content-Type"]) == page


SMUGGLED = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        b"Content-Length: 5\r\nContent-Length: 0\r\n",
        b"Transfer-Encoding: chunked, chunked\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length : 5\r\n",
    ],
)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_body_of_unclear_length_closes_the_connection(server: HttpServer, headers: bytes, version: bytes) -> None:
    if headers.startswith(b"Transfer-Encoding: identity") and version == b"1.0":
        headers += b"Connection: keep-alive\r\n"
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(b"GET /metrics HTTP/%b\r\nHost: localhost\r\n%b\r\n0\r\n\r\n%b" % (version, headers, SMUGGLED))
        said = b""
        with suppress(ConnectionResetError):
            while piece := client.recv(65_536):
                said += piece
    assert said.split(None, 2)[1] in (b"400", b"501")
    assert said.count(b"HTTP/1.") == 1


def test_a_scrape_does_not_wait_for_the_page_or_the_history(server: HttpServer, view: Shown) -> None:
    """A disk that hangs holds two workers; who comes then for what is on it is sent away."""
    view.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask, server, path) for path in ("/", "/", "/api/v1/history", "/api/v1/history")]
        try:
            eventually(lambda: sum(one.done() for one in waiting) == 2)
            assert [one.result()[0] for one in waiting if one.done()] == [503, 503]
            assert ask(server, "/metrics")[0] == ask(server, "/healthz")[0] == 200
        finally:
            view.gate.set()
        assert sorted(one.result()[0] for one in waiting) == [200, 200, 503, 503]
    assert ask(server, "/api/v1/history")[0] == 200


@pytest.mark.parametrize(
    ("query", "since", "limit"),
    [
        ("", None, 100),
        ("?limit=7", None, 7),
        ("?since=2026-03-01T12:00:00Z", datetime(2026, 3, 1, 12, tzinfo=UTC), 100),
        ("?since=2026-03-01T12:00:00", datetime(2026, 3, 1, 12, tzinfo=UTC), 100),
        ("?since=2026-03-01T13:00:00+01:00", datetime(2026, 3, 1, 12, tzinfo=UTC), 100),
        ("?since=0.5&limit=10000", datetime(1970, 1, 1, 0, 0, 0, 500_000, tzinfo=UTC), 10_000),
    ],
)
def test_the_history_is_asked_for_as_the_query_says(
    server: HttpServer, view: Shown, query: str, since: datetime | None, limit: int
) -> None:
    assert ask(server, f"/api/v1/history{query}")[0] == 200
    assert view.asked == [(since, limit)]


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=10001", "limit=x", "limit=-1", "since=yesterday", "since=1e400", "since=9" * 40, "a=1&" * 11],
)
def test_a_bad_query_says_what_was_expected(server: HttpServer, query: str) -> None:
    status, _, body = ask(server, f"/api/v1/history?{query}")
    assert status == 400
    assert "expected" in json.loads(body)["error"]


def test_a_request_larger_than_any_of_ours_is_refused(server: HttpServer) -> None:
    assert ask(server, "/metrics", cookie="x" * 9_000)[0] == 431
    assert ask(server, "/metrics", "POST", content_length="2000")[0] == 413


# ---- clients that say little or nothing


def connect(server: HttpServer, stack: ExitStack, count: int) -> list[socket.socket]:
    """Open connections, a few at a time as a backlog of 1,024 allows."""
    opened = []
    for number in range(count):
        client = stack.enter_context(socket.create_connection(server.address, timeout=20))
        client.setblocking(False)
        opened.append(client)
        if number % 200 == 199:
            eventually(lambda: len(server._server.active_channels) >= min(len(opened), module.MAX_CONNECTIONS))
    return opened


def drip(clients: list[socket.socket], stop: threading.Event) -> None:
    """A byte of a header to each, each second."""
    for client in clients:
        client.send(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
    while not stop.wait(1.0):
        for client in clients:
            with suppress(OSError):
                client.send(b"x")


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["idle", "dripping", "half-open", "mixed"])
def test_a_thousand_silent_clients_do_not_keep_a_scrape_waiting(server: HttpServer, kind: str) -> None:
    stop = threading.Event()
    before = threading.active_count()
    with ExitStack() as stack:
        clients = connect(server, stack, 1000)
        dripping = clients if kind == "dripping" else clients[::2] if kind == "mixed" else []
        dripper = threading.Thread(target=drip, args=(dripping, stop))
        dripper.start()
        if kind in ("half-open", "mixed"):
            for client in clients[1::4] if kind == "mixed" else clients:
                client.send(b"GET /metr")
                with suppress(OSError):
                    client.shutdown(socket.SHUT_WR)  # they will never say more, and never read
        times = []
        for _ in range(10):
            begun = time.monotonic()
            assert ask(server, "/metrics")[0] == 200
            times.append(time.monotonic() - begun)
            time.sleep(0.2)  # so that a drop falls between
        threads = threading.active_count() - before - 1
        stop.set()
        dripper.join(20)
    assert max(times) < 1.0
    assert threads <= 16


def test_a_request_that_does_not_end_is_ended(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "REQUEST_PATIENCE", 0.5)
    stop = threading.Event()
    with socket.create_connection(server.address, timeout=20) as client:
        dripper = threading.Thread(target=drip, args=([client], stop))
        dripper.start()
        try:
            assert not client.recv(1)  # closed by the server, while bytes still dripped in
        except ConnectionResetError:
            pass
        finally:
            stop.set()
            dripper.join(20)


@pytest.mark.alone
def test_those_who_ask_and_do_not_read_keep_nobody_waiting(server: HttpServer, view: Shown) -> None:
    view.body = os.urandom(4_000_000)  # as long as the longest of our answers
    opened = server._server.active_channels
    longest = 0.0
    with ExitStack() as stack:
        for number in range(60):
            client = stack.enter_context(socket.create_connection(server.address, timeout=20))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * channels.PIPELINED)
            if number % 10 == 9:
                begun = time.monotonic()
                assert ask(server, "/healthz")[0] == 200
                longest = max(longest, time.monotonic() - begun)
        held = module.MAX_UNREAD + module.WORKERS * len(view.body)  # what workers make between two looks
        eventually(lambda: sum(channel.total_outbufs_len for channel in opened.values()) <= held)
        assert longest < 1


def test_who_reads_gets_the_whole_of_a_long_answer_however_slowly(server: HttpServer, view: Shown) -> None:
    view.body = os.urandom(4_000_000)
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        said = b""
        while piece := client.recv(40_000):
            said += piece
            time.sleep(0.001)
    assert said.endswith(view.body)


def test_who_asks_many_times_without_reading_is_cut_off(server: HttpServer) -> None:
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        said = b""
        with suppress(ConnectionResetError):
            while piece := client.recv(65_536):
                said += piece
    assert said.count(b"200 OK") <= channels.PIPELINED
    assert ask(server, "/healthz")[0] == 200


def test_a_connection_is_kept_between_two_scrapes(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "REQUEST_PATIENCE", 0.1)
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    for _ in range(2):
        connection.request("GET", "/metrics")
        assert connection.getresponse().read() == METRICS
        port = connection.sock.getsockname()
        time.sleep(0.5)  # longer than a first request may take
    assert connection.sock.getsockname() == port
    connection.close()


def test_at_the_limit_the_oldest_silent_client_makes_room(server: HttpServer) -> None:
    with ExitStack() as stack:
        clients = connect(server, stack, 1000)
        clients += [
            stack.enter_context(socket.create_connection(server.address, timeout=20))
            for _ in range(module.MAX_CONNECTIONS - 1000)
        ]
        assert ask(server, "/metrics")[0] == 200
        with selectors.DefaultSelector() as selector:
            selector.register(clients[0], selectors.EVENT_READ)
            assert selector.select(20)
            assert not clients[0].recv(1)


FEW_FILES = """
import resource, sys
from notbefore.web.server import HttpServer
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
server = HttpServer("127.0.0.1:0", lambda _, start: (start("200 OK", []), [b"served"])[1])
server.start()
print(server.address[1], flush=True)
sys.stdin.read()
"""


def test_where_few_files_may_be_open_the_oldest_connections_go() -> None:
    command = [sys.executable, "-c", FEW_FILES]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child,
        ExitStack() as stack,
    ):
        try:
            assert child.stdout is not None
            address = ("127.0.0.1", int(child.stdout.readline()))
            clients = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(100)]
            connection = http.client.HTTPConnection(*address, timeout=20)
            connection.request("GET", "/")
            assert connection.getresponse().read() == b"served"
            connection.close()
            assert not clients[0].recv(1)
        finally:
            _, said = child.communicate(timeout=20)
    assert said == b""


@pytest.mark.alone
@pytest.mark.parametrize("connections", [0, 50])
def test_it_stops_within_a_second(view: Shown, connections: int) -> None:
    server = HttpServer("127.0.0.1:0", make_app(view))
    server.start()
    with ExitStack() as stack:
        connect(server, stack, connections)
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 1.0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(server.address, timeout=20)


@pytest.mark.parametrize("listen", ["no-such-host.invalid:1", "192.0.2.1:1"])
def test_an_address_that_cannot_be_listened_at_is_said(view: Shown, listen: str) -> None:
    with pytest.raises(ListenError):
        HttpServer(listen, make_app(view))


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_of_several_that_begin_at_once_one_has_the_port_and_the_others_say_so(view: Shown, host: str) -> None:
    began = 0
    for _ in range(20):
        listen, together = f"{host}:{free_port()}", threading.Barrier(4)

        def begin() -> HttpServer | None:
            together.wait()  # noqa: B023 - called in this turn
            try:
                return HttpServer(listen, make_app(view), Access(insecure=True))  # noqa: B023 - as above
            except ListenError:
                return None

        with ThreadPoolExecutor(4) as pool:
            servers = [one for one in pool.map(lambda _: begin(), range(4)) if one is not None]
        for one in servers:
            one.stop()
        assert len(servers) <= 1
        began += len(servers)
    assert began


ADDRESSES = {"[::1]": ("::1",), "127.0.0.1": ("127.0.0.1",), "": ("127.0.0.1", "::1")}


@pytest.mark.parametrize("host", ADDRESSES)
def test_without_a_host_it_listens_at_version_six_and_four(view: Shown, host: str) -> None:
    needs("IPv6")
    port = free_port()
    server = HttpServer(f"{host}:{port}", make_app(view), Access(insecure=True))
    server.start()
    for address in ADDRESSES[host]:
        with socket.create_connection((address, port), timeout=20) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert server.url == f"http://{host or '[::1]'}:{port}"
    server.stop()


def test_without_version_six_it_listens_at_four(view: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    server = HttpServer(":0", make_app(view), Access(insecure=True))
    assert server.address[0] == "0.0.0.0"  # noqa: S104 - that is what is asked for
    server.start()
    server.stop()
