"""The HTTP server on real sockets: its answers, also while a thousand clients are silent."""

import http.client
import itertools
import json
import math
import os
import re
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import trustme
from msgspec.structs import replace

from notbefore.config.model import Server
from notbefore.core.event_types import SPOT_REBALANCE
from notbefore.core.tracked import PendingEvent, PendingView
from notbefore.errors import ListenError
from notbefore.web import channel as channels
from notbefore.web import server as servers
from notbefore.web.app import CheckResult
from notbefore.web.server import WORKERS, HttpServer
from support.agent import PATIENCE, becomes, eventually, free_port
from support.azure import PEER, STARTED, Story, at, item
from support.needs import needs
from support.served_view import (
    METRICS,
    NOTHING_PENDING,
    REQUEST,
    StubView,
    ask,
    connected,
    dripping,
    read_all,
    serving,
)


@pytest.fixture
def view() -> StubView:
    return StubView()


@pytest.fixture
def server(view: StubView) -> Iterator[HttpServer]:
    with serving(view=view) as served:
        yield served


def test_metrics_are_served_in_the_accepted_format(server: HttpServer) -> None:
    status, headers, body = ask(server, "/metrics", accept="application/openmetrics-text")

    assert status == 200
    assert body == METRICS
    assert headers["Content-Type"] == "text/plain; accept=application/openmetrics-text"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Server" not in headers


def test_head_is_answered_as_get_without_a_body(server: HttpServer) -> None:
    status, headers, body = ask(server, "/metrics", method="HEAD")

    assert status == 200
    assert headers["Content-Length"] == str(len(METRICS))
    assert body == b""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_changing_methods_are_not_allowed(server: HttpServer, method: str) -> None:
    status, headers, _ = ask(server, "/api/v1/events", method=method)

    assert status == 405
    assert headers["Allow"] == "GET, HEAD"


def test_health_of_a_well_agent_is_ok(server: HttpServer) -> None:
    status, _, body = ask(server, "/healthz")

    assert status == 200
    assert body == b'{"status":"ok","reasons":[]}'


def test_health_of_an_ill_agent_has_the_reasons(server: HttpServer, view: StubView) -> None:
    view.verdict = CheckResult(ok=False, reasons=("no beat",))

    status, _, body = ask(server, "/healthz")

    assert status == 503
    assert body == b'{"status":"unhealthy","reasons":["no beat"]}'


def listed(**fields: Any) -> PendingView:
    """Return a view of one event: a Reboot of this VM with these fields."""
    story = Story().sees(0, item("E", **{"EventType": "Reboot", **fields}))
    events = [PendingEvent.of(event, at(0)) for event in story.tracked.events.values()]
    return replace(NOTHING_PENDING, events=tuple(events))


UNREADABLE = replace(NOTHING_PENDING, unreadable=1)


@pytest.mark.parametrize(
    ("listed_now", "query", "status"),
    [
        pytest.param(listed(), "", 200, id="no-query"),
        pytest.param(listed(), "?pending=Redeploy&pending=reboot", 503, id="one-of-two"),
        pytest.param(
            listed(EventType=SPOT_REBALANCE),
            "?pending=spotrebalancerecommendation",
            503,
            id="recommendation",
        ),
        pytest.param(listed(Description=""), "?pending=Redeploy", 200, id="another-type"),
        pytest.param(listed(**STARTED), "?pending=Reboot,Redeploy", 503, id="started"),
        pytest.param(listed(Resources=[PEER]), "?pending=Reboot", 200, id="another-vm"),
        pytest.param(listed(Resources=[]), "?pending=Reboot", 503, id="no-resources"),
        pytest.param(UNREADABLE, "?pending=Reboot", 503, id="unreadable"),
        pytest.param(UNREADABLE, "", 200, id="unreadable-without-query"),
    ],
)
def test_readiness_depends_on_the_queried_events_of_this_vm(
    server: HttpServer, view: StubView, listed_now: PendingView, query: str, status: int
) -> None:
    view.listed = listed_now

    assert ask(server, f"/readyz{query}")[0] == status


@pytest.mark.parametrize(
    "query", ["pending=Rebot", "pending=", "pending=Reboot,,Freeze", "pendign=Reboot"]
)
def test_readiness_refuses_a_wrong_query(server: HttpServer, query: str) -> None:
    status, _, body = ask(server, f"/readyz?{query}")

    assert status == 400
    assert b"expected" in body


def test_readiness_names_the_event(server: HttpServer, view: StubView) -> None:
    view.listed = listed(**STARTED)

    _, _, body = ask(server, "/readyz?pending=Reboot")

    assert json.loads(body)["reasons"] == ["Reboot E of this VM is started"]


def test_readiness_fails_when_pending_events_are_unknown(
    server: HttpServer, view: StubView
) -> None:
    view.verdict = CheckResult(ok=False, reasons=("IMDS does not answer",))

    assert ask(server, "/readyz?pending=Freeze")[0] == 503


def test_failing_route_is_logged_and_its_answer_reveals_nothing(
    server: HttpServer, view: StubView, caplog: pytest.LogCaptureFixture
) -> None:
    view.broken = True

    status, _, body = ask(server, "/readyz")

    assert status == 500
    assert b"secret" not in body
    assert "a secret that no client may see" in caplog.text


def test_page_may_load_only_its_own_files(server: HttpServer) -> None:
    _, headers, _ = ask(server, "/")

    directives: dict[str, list[str]] = {}
    for directive in headers["Content-Security-Policy"].split(";"):
        name, *sources = directive.split()
        directives[name] = sources
    assert directives.pop("default-src") == ["'none'"]
    assert directives.pop("frame-ancestors") == ["'none'"]
    assert {*chain.from_iterable(directives.values())} == {"'self'", "'none'"}
    assert headers["Content-Type"] == "text/html; charset=utf-8"


def test_files_of_the_page_are_served(server: HttpServer) -> None:
    _, _, page = ask(server, "/")
    files = re.findall(r'(?:src|href)="(page/[^"]+)"', page.decode())

    assert len(files) == 3
    for file in files:
        status, headers, body = ask(server, f"/{file}")
        assert status == 200
        assert body != b""
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_page_is_rendered_at_most_twice_a_second(
    server: HttpServer, view: StubView, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr(view, "page", lambda: str(next(numbers)).encode())

    started = time.monotonic()
    pages = {ask(server, "/")[2] for _ in range(20)}
    seconds = time.monotonic() - started

    assert len(pages) <= 2 + seconds / 0.5
    eventually(lambda: ask(server, "/")[2] not in pages)


@pytest.mark.parametrize(
    "path", ["//metrics", "/%6detrics", "/metrics/", "/metrics%3f", "*", "/page/../app.py", "/x"]
)
def test_other_spellings_of_a_path_are_not_found(server: HttpServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 0\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length : 5\r\n",
    ],
)
def test_request_with_a_body_is_refused_and_closes_the_connection(
    server: HttpServer, headers: bytes
) -> None:
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(REQUEST % (b"metrics", headers) + b"0\r\n\r\n" + REQUEST % (b"healthz", b""))
        answer = read_all(client)

    assert answer.split(None, 2)[1] in (b"400", b"413", b"501")
    assert answer.count(b"HTTP/1.") == 1


NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("query", "since", "limit"),
    [
        ("", None, 100),
        ("?since=2026-03-01T12:00:00&limit=7", NOON, 7),
        ("?since=2026-03-01T13:00:00+01:00", NOON, 100),
        ("?since=0.5&limit=10000", datetime.fromtimestamp(0.5, UTC), 10_000),
    ],
)
def test_history_query_selects_since_and_limit(
    server: HttpServer, view: StubView, query: str, since: datetime | None, limit: int
) -> None:
    status, _, _ = ask(server, f"/api/v1/history{query}")

    assert status == 200
    assert view.asked == [(since, limit)]


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=10001",
        "limit=x",
        "since=yesterday",
        "since=1e400",
        "since=9" * 40,
        "a=1&" * 11,
    ],
)
def test_history_refuses_a_wrong_query(server: HttpServer, query: str) -> None:
    status, _, body = ask(server, f"/api/v1/history?{query}")

    assert status == 400
    assert "expected" in json.loads(body)["error"]


def test_request_with_large_headers_is_refused(server: HttpServer) -> None:
    assert ask(server, "/metrics", cookie="x" * 9_000)[0] == 431


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["idle", "dripping", "half-open"])
def test_thousand_silent_clients_do_not_delay_a_scrape(server: HttpServer, kind: str) -> None:
    threads_before = threading.active_count()
    durations: list[float] = []

    with ExitStack() as stack:
        clients = connected(server, stack, 1000)
        dripping_clients: list[socket.socket] = []
        if kind == "dripping":
            dripping_clients = clients
        if kind == "half-open":
            for client in clients:
                send_half_a_request(client)
        with dripping(dripping_clients):
            for _ in range(10):
                started = time.monotonic()
                status, _, _ = ask(server, "/metrics")
                durations.append(time.monotonic() - started)

                assert status == 200

            assert threading.active_count() - threads_before <= 16

    assert max(durations) < 1.0


def send_half_a_request(client: socket.socket) -> None:
    """Send a part of a request, and announce that no more follows."""
    with suppress(OSError):
        client.send(b"GET /metr")
        client.shutdown(socket.SHUT_WR)


FEW_FILES = """
import resource, sys
from notbefore.config.model import Server
from notbefore.web.server import WORKERS, HttpServer
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
def app(_, start):
    start("200 OK", [])
    return [b"served"]

server = HttpServer(Server(listen="127.0.0.1:0"), app)
server.start()
print(server.address[1], flush=True)
sys.stdin.read()
"""


def test_oldest_silent_connections_are_closed_when_few_may_be_open() -> None:
    command = [sys.executable, "-c", FEW_FILES]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
        ExitStack() as stack,
    ):
        assert child.stdout is not None
        address = ("127.0.0.1", int(child.stdout.readline()))
        first, *_ = (
            stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(100)
        )
        last = stack.enter_context(socket.create_connection(address, timeout=20))

        last.sendall(REQUEST % (b"", b"Connection: close\r\n"))

        assert read_all(last).endswith(b"served")
        assert first.recv(1) == b""

        child.communicate(timeout=PATIENCE)


def test_unfinished_request_is_closed_at_its_timeout(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "REQUEST_PATIENCE", 0.5)

    with socket.create_connection(server.address, timeout=20) as client, dripping([client]):
        assert read_all(client) == b""  # the server has closed it while bytes arrived


def test_connection_with_urgent_data_is_closed_at_once(server: HttpServer) -> None:
    with socket.create_connection(server.address, timeout=20) as client:
        client.send(b"x", socket.MSG_OOB)  # else each poll would return for it

        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_silent_connection_is_closed_when_select_cannot_see_its_end(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on Windows, select finds nothing to read in a connection that was shut down on this side
    monkeypatch.delattr(select, "poll")
    monkeypatch.setattr(channels.Channel, "readable", lambda _: False)
    monkeypatch.setattr(channels, "REQUEST_PATIENCE", 0.1)

    with socket.create_connection(server.address, timeout=20) as client:
        assert client.recv(1) == b""

        becomes(lambda: len(server._server.active_channels), 0)


def test_pipelined_requests_get_at_least_the_first_answer(server: HttpServer) -> None:
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(REQUEST % (b"metrics", b"") * 4)
        answers = read_all(client)

    assert answers.count(b"HTTP/1.") in (1, 2)  # 2 if a worker was quick
    assert answers.endswith(METRICS)


@pytest.mark.alone
def test_clients_that_do_not_read_delay_no_other_client(server: HttpServer, view: StubView) -> None:
    view.body = os.urandom(20_000_000)  # more than the system's buffers hold
    durations: list[float] = []

    with ExitStack() as stack:
        clients = connected(server, stack, 12)
        for client in clients:
            client.sendall(REQUEST % (b"metrics", b""))
            started = time.monotonic()
            status, _, _ = ask(server, "/healthz")
            durations.append(time.monotonic() - started)

            assert status == 200

        # the first client was closed for those that came later
        assert len(read_all(clients[0])) < len(view.body)

    assert max(durations) < 1


@pytest.mark.alone
def test_full_memory_cuts_only_clients_that_do_not_read(
    server: HttpServer, view: StubView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "MAX_UNREAD", 60_000_000)
    large = os.urandom(40_000_000)
    view.body = large
    answer = bytearray()

    with ExitStack() as stack:
        reader, *silent = connected(server, stack, 4)
        reader.sendall(REQUEST % (b"metrics", b"Connection: close\r\n"))
        answer += reader.recv(1)

        view.body = large[:20_000_000]  # together, the answers are soon too large
        for client in silent:
            client.sendall(REQUEST % (b"metrics", b""))
            eventually(partial(_is_stalled, server, client))
            while _stalled_since(server, reader) < _stalled_since(server, client):
                answer += reader.recv(1_000_000)
        answer += read_all(reader)
        received = len(read_all(silent[0]))

    assert answer.endswith(large)
    assert received < len(view.body)


def _stalled_since(server: HttpServer, client: socket.socket) -> float:
    """Return since when the server waits for this client to read, or 0 if it closed it."""
    for channel in list(server._server.active_channels.values()):
        if channel.addr == client.getsockname():
            return channel.stalled_since
    return 0.0


def _is_stalled(server: HttpServer, client: socket.socket) -> bool:
    return _stalled_since(server, client) < math.inf


class Waiting(StubView):
    """``/metrics`` waits until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.scrapes = 0

    def metrics(self, accept: str) -> tuple[bytes, str]:
        self.scrapes += 1
        self.released.wait(PATIENCE)
        return super().metrics(accept)


def _waiting_requests(server: HttpServer) -> int:
    channels = list(server._server.active_channels.values())
    return sum(len(channel.requests) for channel in channels)


@pytest.mark.parametrize("tls", [False, True])
def test_closed_client_is_not_served(
    monkeypatch: pytest.MonkeyPatch, authority: trustme.CA, tmp_path: Path, *, tls: bool
) -> None:
    monkeypatch.setattr(channels, "ABANDONED_PATIENCE", 0.0)
    monkeypatch.setattr(channels, "REQUEST_PATIENCE", PATIENCE)  # for many TLS handshakes
    web_config = None
    context = None
    if tls:
        web_config = _web_config(authority, tmp_path)
        context = ssl.create_default_context()
        # with 1.3, the tickets that a client has not read make its close a reset
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        authority.configure_trust(context)
    view = Waiting()

    with serving(web_config, view=view) as server, ExitStack() as stack:
        for client in connected(server, stack, WORKERS):
            secured = stack.enter_context(_secured(client, context))
            secured.sendall(REQUEST % (b"metrics", b""))
        becomes(lambda: view.scrapes, WORKERS)

        for client in connected(server, stack, 20):
            secured = _secured(client, context)
            secured.sendall(REQUEST % (b"metrics", b""))
            secured.close()
        becomes(lambda: _waiting_requests(server), WORKERS + 20)

        view.released.set()
        status, _, _ = ask(server, "/healthz", context)

    assert status == 200
    assert view.scrapes == WORKERS


def _web_config(authority: trustme.CA, directory: Path) -> str:
    """Write a web configuration with a certificate; return its path."""
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    path = directory / "web.yml"
    path.write_text(
        "tls_server_config: {cert_file: cert.pem, key_file: key.pem}\n", encoding="utf-8"
    )
    return str(path)


def _secured(client: socket.socket, context: ssl.SSLContext | None) -> socket.socket:
    """Return the connection, after a handshake if there is a context."""
    if context is None:
        return client
    return context.wrap_socket(client, server_hostname="127.0.0.1")


def test_client_that_closes_only_its_own_direction_is_served(server: HttpServer) -> None:
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(REQUEST % (b"metrics", b"Connection: close\r\n"))
        client.shutdown(socket.SHUT_WR)

        answer = read_all(client)

    assert answer.endswith(METRICS)


def test_connection_is_kept_between_two_scrapes(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=20)

    for _ in range(2):
        connection.request("GET", "/metrics")
        assert connection.getresponse().read() == METRICS
        monkeypatch.setattr(channels, "REQUEST_PATIENCE", 0.1)
        port = connection.sock.getsockname()
        time.sleep(0.5)  # longer than a first request may take

    assert connection.sock.getsockname() == port

    connection.close()


@pytest.mark.alone
@pytest.mark.parametrize("connections", [0, 50])
def test_server_stops_within_a_second(connections: int) -> None:
    with ExitStack() as stack:
        with serving() as server:
            connected(server, stack, connections)
            stopping = time.monotonic()

        assert time.monotonic() - stopping < 1.0

    with pytest.raises(OSError, match="refused"):
        socket.create_connection(server.address, timeout=20)


@pytest.mark.parametrize("listen", ["no-such-host.invalid:1", "192.0.2.1:1"])
def test_address_that_cannot_be_bound_is_an_error(view: StubView, listen: str) -> None:
    with pytest.raises(ListenError):
        HttpServer(Server(listen=listen), view.app)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_address_in_use_is_named_with_the_likely_reason(view: StubView, host: str) -> None:
    listen = f"{host}:{free_port()}"
    reason = f"cannot listen at {listen}: .*is another notbefore running"

    with serving(listen=listen, insecure=True), pytest.raises(ListenError, match=reason):
        HttpServer(Server(listen=listen, insecure=True), view.app)


ADDRESSES = {"[::1]": ("::1",), "127.0.0.1": ("127.0.0.1",), "": ("127.0.0.1", "::1")}


@pytest.mark.parametrize("host", ADDRESSES)
def test_server_listens_at_ipv6_and_ipv4_when_no_host_is_set(host: str) -> None:
    needs("IPv6")
    port = free_port()
    with serving(listen=f"{host}:{port}", insecure=True) as server:
        assert server.url == f"http://{host or '[::1]'}:{port}"

        for address in ADDRESSES[host]:
            with socket.create_connection((address, port), timeout=20) as client:
                client.sendall(REQUEST % (b"metrics", b"Connection: close\r\n"))
                assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_server_listens_at_ipv4_when_there_is_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with serving(listen=":0", insecure=True) as server:
        assert server.address[0] == "0.0.0.0"  # noqa: S104 - the test asks for this address
