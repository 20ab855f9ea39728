"""``Http`` against receivers that drip, hang, lie and fail."""

import gc
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trustme

from notbefore.errors import SendError
from notbefore.net.addresses import check_address
from notbefore.net.connections import Deadline
from notbefore.net.http import Http
from notbefore.net.response import MAX_REFUSAL
from support.agent import PATIENCE
from support.peers import Answer, HttpPeer
from support.raw_server import Talk, answer, raw, serving

TIMEOUT = 0.5  # seconds
LONGER = 4.0  # seconds, where something has to succeed first; a quarter is for a TLS handshake
LIMIT = 30.0  # seconds in which an exchange ends at its timeout on a busy machine
DRIP = 0.05  # seconds between two pieces, much less than the timeout of a socket
ENOUGH = 1_000  # pieces, which take longer than ``LIMIT``
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def http() -> Iterator[Http]:
    client = Http(PATIENCE)
    yield client
    client.close()


@pytest.fixture
def impatient() -> Iterator[Http]:
    client = Http(TIMEOUT)
    yield client
    client.close()


@pytest.fixture
def less_patient() -> Iterator[Http]:
    client = Http(LONGER)
    yield client
    client.close()


def dripping(start: bytes, piece: bytes) -> Talk:
    """Answer with ``start`` and then with one piece after the other."""

    def talk(connection: socket.socket, _: bytes) -> None:
        connection.sendall(start)
        for _piece in range(ENOUGH):
            time.sleep(DRIP)
            connection.sendall(piece)

    return talk


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x"),
        (b"HTTP/1.1 200 OK\r\n", b"X-Slow: 1\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"x"),
        (b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    ],
    ids=["header", "headers", "interim answers", "body with a length", "body", "chunks"],
)
def test_dripped_answer_ends_at_the_timeout(impatient: Http, start: bytes, piece: bytes) -> None:
    with serving(dripping(start, piece)) as (url, _):
        started = time.monotonic()
        with pytest.raises(SendError, match=r"no complete answer within 0\.5 s") as raised:
            impatient.post(url, JSON)
        seconds = time.monotonic() - started

    assert not raised.value.permanent
    assert seconds < LIMIT


# Python closes a socket whose connection ends as TLS begins only with the frames of the error
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_proxy_that_drips_ends_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    http = Http(6.0)  # a silence of a quarter of that also ends the attempt
    with serving(dripping(b"HTTP/1.1 200 Connection established\r\nX-Slow: ", b"x")) as (proxy, _):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("NO_PROXY", "")
        started = time.monotonic()
        with pytest.raises(SendError, match="no complete answer within 6 s"):
            http.post("https://hook.invalid/", JSON)
        seconds = time.monotonic() - started
    http.close()

    assert seconds < LIMIT


def test_receiver_that_reads_slowly_ends_at_the_timeout(impatient: Http) -> None:
    def take_nothing(connection: socket.socket, _: bytes) -> None:
        time.sleep(LIMIT)
        connection.close()

    with serving(take_nothing) as (url, _):
        started = time.monotonic()
        with pytest.raises(SendError):
            impatient.post(url, JSON, b"x" * 50_000_000)
        seconds = time.monotonic() - started

    assert seconds < LIMIT


def test_kept_connection_is_used_again_until_a_timeout(less_patient: Http) -> None:
    drip = dripping(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x")
    with serving(answer(), answer(), drip, answer()) as (url, heads):
        less_patient.post(url, JSON)
        less_patient.post(url, JSON)
        with pytest.raises(SendError, match="no complete answer"):
            less_patient.post(url, JSON)
        response = less_patient.post(url, JSON)

    assert response.status == 200
    assert len(heads) == 4


def deadline_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "deadline"]


def test_quick_exchanges_share_one_deadline_thread() -> None:
    client = Http(60.0)
    others = deadline_threads()
    with serving(*[answer()] * 5) as (url, _):
        for _ in range(5):
            client.post(url, JSON)
        (thread,) = (thread for thread in deadline_threads() if thread not in others)
        client.close()

    thread.join(LIMIT)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_same_thread", [True, False])
def test_slow_answer_after_a_quick_one_ends_at_its_own_timeout(
    less_patient: Http, *, is_same_thread: bool
) -> None:
    others = deadline_threads()
    drip = dripping(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x")
    with serving(answer(), drip) as (url, _):
        less_patient.post(url, JSON)
        if not is_same_thread:
            for thread in set(deadline_threads()).difference(others):
                thread.join(LIMIT)
        started = time.monotonic()
        with pytest.raises(SendError, match="no complete answer within 4 s"):
            less_patient.post(url, JSON)
        seconds = time.monotonic() - started

    assert LONGER <= seconds < LIMIT


def test_late_exchange_has_timed_out_before_the_deadline_thread_wakes() -> None:
    deadline = Deadline(DRIP)

    with deadline._closed, deadline.exchange():  # the thread waits for this lock
        time.sleep(2 * DRIP)

        assert not deadline.passed

    assert deadline.passed


def test_proxy_of_the_environment_is_read_again_after_a_close(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(answer(), answer()) as (url, heads), HttpPeer() as proxy:
        http.post(url, JSON)
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "")
        http.post(url, JSON)

        http.close()
        http.post(url, JSON)

        assert len(heads) == 2
        assert len(proxy.requests) == 1


@pytest.mark.parametrize("status", ["101 Switching Protocols", "102 Processing", "103 Early Hints"])
def test_interim_answer_is_a_failed_attempt(http: Http, status: str) -> None:
    interim = f"HTTP/1.1 {status}\r\n\r\n".encode()

    def answer_late(connection: socket.socket, _: bytes) -> None:
        connection.sendall(interim)
        time.sleep(DRIP)
        connection.sendall(b"HTTP/1.1 204 Late\r\n\r\n")

    with serving(answer_late, answer("202 Accepted")) as (url, heads):
        response = http.post(url, JSON)
        with pytest.raises(SendError) as raised:
            response.check()
        next_response = http.post(url, JSON)  # which the late answer does not answer

    assert not raised.value.permanent
    assert next_response.status == 202
    assert len(heads) == 2


def test_continue_before_the_answer_is_skipped(http: Http) -> None:
    octets = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    with serving(raw(octets)) as (url, _):
        response = http.post(url, JSON)

    assert response.status == 200
    assert response.body == b"ok"


def test_refusal_is_read_for_a_few_kib(http: Http) -> None:
    with HttpPeer() as peer:
        peer.default = Answer(500, body=b"x" * 30_000_000)

        response = http.post(peer.url, JSON)

        assert len(response.body) == MAX_REFUSAL
        assert not peer.read_whole


def many_headers(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 500 No\r\n")
    for number in range(101):
        connection.sendall(f"X-{number}: ".encode() + b"x" * 60_000 + b"\r\n")


def endless_headers(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 500 No\r\n")
    for number in count():
        connection.sendall(f"X-{number}: ".encode() + b"x" * 60_000 + b"\r\n")


@pytest.mark.parametrize(
    "talk",
    [answer("500 No", b"x" * 1_000_000), many_headers, endless_headers],
    ids=["large body", "many headers", "endless headers"],
)
def test_failures_leave_nothing_to_the_garbage_collector(talk: Talk) -> None:
    client = Http(60.0)

    def fail() -> None:
        with pytest.raises(SendError):
            client.post(url, JSON).check()
        client.close()

    with serving(talk) as (url, _):
        fail()  # once, so that everything is imported
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(5):
                fail()
            memory, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()

    assert memory < 1_000_000


@pytest.mark.parametrize("years", ["1999", "2099"])
def test_retry_after_date_is_compared_with_the_answers_own_date(http: Http, years: str) -> None:
    headers = (
        f"Date: Mon, 02 Mar {years} 12:00:00 GMT",
        f"Retry-After: Mon, 02 Mar {years} 12:00:40 GMT",
    )
    with serving(answer("503 Busy", b"", *headers)) as (url, _):
        response = http.post(url, JSON)

    assert response.retry_after == 40.0


@pytest.mark.parametrize(
    "header",
    [
        "Retry-After: Mon, 02 Mar 2099 12:00:40 GMT",  # without a Date
        "Retry-After: soon",
        "Retry-After: -5",
        "Retry-After: nan",
        "X-None: 1",
    ],
)
def test_retry_after_that_says_no_pause_is_ignored(http: Http, header: str) -> None:
    with serving(answer("503 Busy", b"", header)) as (url, _):
        assert http.post(url, JSON).retry_after is None


def test_guard_sends_nothing_to_a_private_address_over_tls(
    authority: trustme.CA, tmp_path: Path
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        client = Http(PATIENCE, ca_file=str(tmp_path / "ca.pem"), guarded=True)

        with pytest.raises(SendError, match="is not a public address") as raised:
            client.post(f"https://localhost:{port}/", JSON)
        client.close()

        assert raised.value.permanent
        with pytest.raises(TimeoutError):  # no connection has arrived
            listener.accept()


def test_guard_ends_a_connection_when_its_name_changed_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    public = ("203.0.114.7", 80)
    answers = iter([[(socket.AF_INET, socket.SOCK_STREAM, 6, "", public)]])
    resolve = socket.getaddrinfo

    def rebinding(_host: str, *args: Any, **options: Any) -> Any:
        return next(answers, None) or resolve("127.0.0.1", *args, **options)

    with HttpPeer() as peer:
        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        client = Http(PATIENCE, guarded=True)
        with pytest.raises(SendError, match=r"127\.0\.0\.1 is not a public address"):
            client.post(f"http://rebound.example.org:{peer.port}/", JSON)
        client.close()

        assert peer.requests == []


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "20.50.1.1",
        "168.63.129.15",
        "192.0.1.1",
        "223.255.255.1",
        "2603:1030::1",
        "2a00::1",
        "64:ff9b::1432:101",
        "::ffff:20.50.1.1",
    ],
)
def test_public_address_is_allowed(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",  # noqa: S104 - it is no address to listen at here
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "168.63.129.16",
        "169.254.169.254",
        "172.16.0.1",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.0.1",
        "198.18.0.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.1.2.3",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:0:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "64:ff9b:2::7f00:1",
        "100::1",
        "2001::7f00:1",
        "2001:db8::1",
        "2002:7f00:1::",
        "3fff::1",
        "4000::1",
        "5f00::1",
        "fc00::1",
        "fd00::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
def test_address_that_is_not_public_is_refused(address: str) -> None:
    with pytest.raises(SendError, match="is not a public address"):
        check_address(address)


def test_dripped_answer_over_tls_ends_at_the_timeout(authority: trustme.CA, tmp_path: Path) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    client = Http(LONGER, ca_file=str(tmp_path / "ca.pem"))
    with HttpPeer(authority) as peer:
        client.post(peer.url, JSON)
        peer.default = Answer(how="drip")

        started = time.monotonic()
        with pytest.raises(SendError, match="no complete answer within 4 s"):
            client.post(peer.url, JSON)
        seconds = time.monotonic() - started
        client.close()

    assert seconds < LIMIT
