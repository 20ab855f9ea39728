"""The IMDS client against real sockets: requests, answers, and the reason of each failure."""

import gc
import socket
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import Mock

import pytest

from notbefore.agent.polling import SLOWEST_RETRY, PollThread
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.tracker import Poll, Tracker
from notbefore.config.load import load
from notbefore.errors import ConfigError, ImdsError
from notbefore.imds.answer import MAX_RECEIVED
from notbefore.imds.client import ImdsClient
from notbefore.imds.identity import fetch_vm, vm_of
from support.agent import PATIENCE, eventually, free_port, run
from support.azure import FUTURE
from support.raw_server import Talk, answer, raw, serving
from support.tracking import SteppedClock, runtime_of

OPEN: list[ImdsClient] = []


def connect(endpoint: str) -> ImdsClient:
    """Return a client. It is closed when the test ends."""
    client = ImdsClient(endpoint)
    OPEN.append(client)
    return client


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


PATH = "/metadata/scheduledevents?api-version=2020-07-01"


def failure(endpoint: str, timeout: float = 20.0) -> ImdsError:
    with pytest.raises(ImdsError) as caught:
        connect(endpoint).get(PATH, timeout=timeout)
    return caught.value


def test_client_sends_the_metadata_header_and_reads_the_answer() -> None:
    with serving(answer(body=b'{"a":1}')) as (endpoint, requests):
        reply = connect(endpoint).get(PATH)

    (request,) = requests
    assert reply.body == b'{"a":1}'
    assert request.startswith(f"GET {PATH} HTTP/1.1\r\n".encode())
    assert b"\r\nMetadata: true\r\n" in request
    assert b"Cookie" not in request
    assert b"Authorization" not in request


MODULES_IMPORTED_BY_A_REQUEST = """
import sys
from notbefore.imds.client import ImdsClient
before = set(sys.modules)
answer = ImdsClient(sys.argv[1]).get("/")
print(answer.body, set(sys.modules) - before)
"""


def test_first_request_imports_nothing() -> None:
    with serving(answer(body=b"{}")) as (endpoint, _):
        done = run(sys.executable, "-c", MODULES_IMPORTED_BY_A_REQUEST, endpoint)

    assert done.stdout == "b'{}' set()\n"


@pytest.mark.parametrize(
    ("header", "date"),
    [
        pytest.param(
            "Date: Mon, 11 Apr 2022 22:26:58 GMT", "Mon, 11 Apr 2022 22:26:58 GMT", id="date"
        ),
        pytest.param("X: y", "", id="no date"),
        pytest.param(f"Date: {'9' * 100}", "9" * 64, id="long"),
    ],
)
def test_answer_has_the_date_of_its_header(header: str, date: str) -> None:
    with serving(answer("200 OK", b"{}", header)) as (endpoint, _):
        assert connect(endpoint).get(PATH).date == date


def test_connection_is_kept_until_the_server_closes_it() -> None:
    ports: list[int] = []

    def answer_and_keep(connection: socket.socket, head: bytes) -> None:
        ports.append(connection.getpeername()[1])
        answer()(connection, head)

    answer_and_close = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    with serving(answer_and_close, answer_and_keep) as (endpoint, requests):
        client = connect(endpoint)

        client.get(PATH)
        second = client.get(PATH)
        client.get(PATH)

    assert second.body == b"{}"
    assert len(requests) == 3
    assert ports[0] == ports[1]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_trailer_changes_no_header() -> None:
    with_trailer = raw(CHUNKED + b"2\r\n{}\r\n0\r\nDate: now\r\n\r\n", close=False)

    with serving(with_trailer) as (endpoint, _):
        reply = connect(endpoint).get(PATH)

    assert reply.body == b"{}"
    assert reply.date == ""


@pytest.mark.parametrize(
    "more",
    [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nDate: 2\r\n\r\nbad", b"junk"],
    ids=["second answer", "junk"],
)
def test_bytes_after_an_answer_belong_to_no_answer(more: bytes) -> None:
    with_more = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}" + more, close=False)
    with serving(with_more, answer(body=b"good")) as (endpoint, _):
        client = connect(endpoint)

        first = client.get(PATH)
        second = client.get(PATH)

    assert first.body == b"{}"
    assert first.date == ""
    assert second.body == b"good"


@pytest.mark.parametrize(
    ("talk", "reason"),
    [
        (answer("302 Found", b"", "Location: http://127.0.0.1:9/"), "redirect"),
        (answer("400 Bad Request", b"no header"), "bad_request"),
        (answer("405 Method Not Allowed"), "not_found"),
        (answer("410 Gone"), "gone"),
        (answer("429 Too Many Requests"), "throttled"),
        (answer("418 I'm a teapot"), "status"),
        (answer("500 Internal Server Error"), "server_error"),
        (raw(b"HTTP/1.1 304 Not Modified\r\n\r\n"), "redirect"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"), "incomplete"),
        (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhalf"), "incomplete"),
        (raw(b"SSH-2.0-OpenSSH_9.2\r\n"), "protocol"),
        (raw(b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n"), "protocol"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"), "protocol"),
        (
            raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"),
            "protocol",
        ),
        (
            raw(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
            "status",
        ),
        (raw(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx"), "status"),
        (raw(b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello"), "status"),
        (raw(b"HTTP/1.1 200 OK\r\nDate: Mon"), "incomplete"),
        (raw(b""), "reset"),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * MAX_RECEIVED), "too_large"),
        (raw(CHUNKED + b"2;" + b"x" * MAX_RECEIVED + b"\r\n{}\r\n0\r\n\r\n"), "too_large"),
        (answer(body=b"x" * MAX_RECEIVED), "too_large"),
    ],
)
def test_failure_has_its_reason_and_the_next_request_succeeds(talk: Talk, reason: str) -> None:
    with serving(talk, answer(body=b"good")) as (endpoint, _):
        client = connect(endpoint)

        with pytest.raises(ImdsError) as caught:
            client.get(PATH)
        next_reply = client.get(PATH)

    assert caught.value.reason == reason
    assert next_reply.body == b"good"


def reset(connection: socket.socket, _: bytes) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_reset_connection_has_the_reason_reset() -> None:
    with serving(reset) as (endpoint, _):
        assert failure(endpoint).reason == "reset"


def test_closed_port_has_the_reason_refused() -> None:
    assert failure(f"http://127.0.0.1:{free_port()}").reason == "refused"


def test_unknown_host_has_the_reason_unreachable() -> None:
    assert failure("http://no-such-host.invalid").reason == "unreachable"


def drip(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _number in range(2_000):
        connection.sendall(b"x")
        time.sleep(0.05)


def say_nothing(connection: socket.socket, _: bytes) -> None:
    connection.recv(1)  # returns when the client has gone


@pytest.mark.alone
@pytest.mark.parametrize("talk", [drip, say_nothing])
def test_timeout_covers_the_whole_answer(talk: Talk) -> None:
    with serving(talk) as (endpoint, _):
        started = time.monotonic()

        error = failure(endpoint, 0.6)
        seconds = time.monotonic() - started

    assert error.reason == "timeout"
    assert seconds < 30  # with a timeout of each read, the answer would take 100 s


def test_abort_ends_the_request_under_way() -> None:
    with serving(say_nothing) as (endpoint, requests):
        client = connect(endpoint)

        def abort_later() -> None:
            eventually(lambda: requests)
            client.abort()

        threading.Thread(target=abort_later).start()

        with pytest.raises(ImdsError) as caught:
            client.get(PATH, timeout=60)

    assert caught.value.reason == "reset"  # not a timeout


def test_aborted_client_sends_no_request() -> None:
    with serving(answer()) as (endpoint, requests):
        client = connect(endpoint)
        client.abort()

        with pytest.raises(ImdsError, match="the agent is stopping"):
            client.get(PATH)

    assert requests == []


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), (FUTURE, None), ("-1", None)])
def test_retry_after_is_read_in_seconds(header: str, seconds: float | None) -> None:
    with serving(answer("429 Too Many Requests", b"", f"Retry-After: {header}")) as (endpoint, _):
        assert failure(endpoint).retry_after == seconds


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://169.254.169.254",
        "http://",
        "http://a b",
        "http://user@host",
        "http://h:99999",
        "http://h?x=1",
    ],
)
def test_endpoint_that_is_no_plain_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"imds\.endpoint"):
        connect(endpoint)


def test_vm_is_read_from_the_instance_metadata() -> None:
    body = (
        b'{"compute":{"name":"WestNO_0","vmId":"0f1e","location":"westeurope","zone":1,'
        b'"tagsList":[{"name":"a"}]}}'
    )

    with serving(answer(body=body)) as (endpoint, requests):
        vm = fetch_vm(connect(endpoint))

    assert vm.name == "WestNO_0"
    assert vm.vm_id == "0f1e"
    assert vm.location == "westeurope"
    assert vm.zone == ""
    assert b"/metadata/instance?api-version=" in requests[0]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"compute":{}}', b'{"compute":{"name":""}}', b"[" * 100_000],
    ids=["empty", "list", "object", "no name", "empty name", "deep"],
)
def test_instance_metadata_without_a_name_are_rejected(body: bytes) -> None:
    with serving(answer(body=body)) as (endpoint, _), pytest.raises(ImdsError) as caught:
        fetch_vm(connect(endpoint))

    assert caught.value.reason == "rejected"


def test_name_of_the_vm_is_bounded() -> None:
    assert len(vm_of({"name": "n" * 10_000}).name) == 512


def test_tags_of_the_vm_are_read() -> None:
    listed = [
        {"name": "env", "value": "prod"},
        {"name": "on-call", "value": ""},
        {"name": 1, "value": "x"},
        "no",
        {},
    ]

    assert vm_of({"name": "n", "tagsList": listed}).tags == {"env": "prod", "on-call": ""}


def test_tags_that_are_no_list_are_ignored() -> None:
    assert vm_of({"name": "n", "tagsList": "no"}).tags == {}


def test_tags_of_the_vm_are_bounded() -> None:
    listed = [{"name": f"{number:02}" * 600, "value": "v" * 600} for number in range(99)]

    (name, value), *others = vm_of({"tagsList": listed}).tags.items()

    assert len(name) == 512
    assert len(value) == 512
    assert len(others) == 49


def polled(
    *talks: Talk, interval: str = "200ms", clock: SteppedClock | None = None
) -> tuple[list[Poll], float]:
    """Poll once for each answer; return the polls, and the seconds from the first to the next."""
    polls: list[Poll] = []
    last: list[float] = []  # by how many seconds the last of these polls was late
    is_over = threading.Event()
    tracker = Mock(Tracker)

    def take(poll: Poll) -> None:
        if last:  # further polls are not counted
            is_over.wait(PATIENCE)
        polls.append(poll)
        if len(polls) == len(talks):
            last.append(polling.overdue)

    tracker.handle = take
    with serving(answer(body=b'{"compute":{"name":"n"}}'), *talks) as (endpoint, _):
        config = load(None, {}, {"imds.endpoint": endpoint, "imds.interval": interval})
        runtime = runtime_of(config)
        polling = PollThread(runtime, tracker, clock or SteppedClock(), ThreadGuard())
        polling.start()
        eventually(lambda: last and polling.overdue != last[0])
        due = -polling.overdue
        is_over.set()
        polling.stop()
    return polls[: len(talks)], due


def test_poll_with_the_same_body_passes_no_body() -> None:
    polls, due = polled(answer(body=b"a"), answer(body=b"a"), answer(body=b"b"))

    assert [poll.body for poll in polls] == [b"a", None, b"b"]
    assert [poll.error for poll in polls] == [None, None, None]
    assert due == pytest.approx(3 * 0.2)


def test_polls_that_became_due_during_a_slow_answer_are_skipped() -> None:
    clock = SteppedClock()

    def answer_late(connection: socket.socket, head: bytes) -> None:
        clock.go(1.1)
        answer()(connection, head)

    _, due = polled(answer_late, interval="1s", clock=clock)

    assert due == pytest.approx(0.9)


def throttled(seconds: int) -> Talk:
    return answer("429 Too Many Requests", b"", f"Retry-After: {seconds}")


BUSY = answer("503 Service Unavailable")


@pytest.mark.parametrize(
    ("talks", "interval", "expected"),
    [
        pytest.param([BUSY], "1s", 1.0, id="first failure"),
        pytest.param([BUSY] * 3, "200ms", 0.8, id="third failure"),
        pytest.param([BUSY], "10s", 10.0, id="long interval"),
        pytest.param([throttled(20)], "1s", 20.0, id="Retry-After"),
        pytest.param([throttled(3600)], "1s", SLOWEST_RETRY, id="long Retry-After"),
        pytest.param([throttled(0)], "1s", 1.0, id="Retry-After of zero"),
    ],
)
def test_failed_polls_back_off_to_at_most_half_a_minute(
    talks: list[Talk], interval: str, expected: float
) -> None:
    _, due = polled(*talks, interval=interval)

    assert due == pytest.approx(expected)


def test_failures_leave_no_body_to_the_garbage_collector() -> None:
    with serving(answer("500 No", b"x" * 1_000_000)) as (endpoint, _):
        client = connect(endpoint)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(10):
                with suppress(ImdsError):
                    client.get(PATH)
            memory, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()

    assert memory < 1_000_000
