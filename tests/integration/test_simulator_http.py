"""The simulator over real sockets: as strict as IMDS, several VMs, approval, faults, and a clean end."""

import http.client
import threading
from collections.abc import Iterator
from typing import Any, Self

import msgspec
import pytest

from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, eventually

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
INSTANCE = "/metadata/instance?api-version=2021-02-01"
METADATA = {"Metadata": "true"}


class Client:
    """One kept-alive connection."""

    def __init__(self, simulator: Simulator, timeout: float = PATIENCE) -> None:
        self.connection = http.client.HTTPConnection(simulator.endpoint.removeprefix("http://"), timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] = METADATA
    ) -> tuple[http.client.HTTPResponse, bytes]:
        self.connection.request(method, path, body, headers)
        response = self.connection.getresponse()
        return response, response.read()

    def get(self, path: str = EVENTS, **headers: str) -> Any:
        return msgspec.json.decode(self.ask("GET", path, headers={**METADATA, **headers})[1])

    def status(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] = METADATA) -> int:
        return self.ask(method, path, body, headers)[0].status


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with Simulator(["West%4eO_0", "West NO/ü"]) as running:
        yield running


@pytest.fixture
def client(simulator: Simulator) -> Iterator[Client]:
    with Client(simulator) as opened:
        yield opened


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (EVENTS, {}, 400),
        (INSTANCE, {"Metadata": "false"}, 400),
        (EVENTS, {**METADATA, "X-Forwarded-For": "10.0.0.1"}, 400),
        ("/metadata/scheduledevents", METADATA, 400),
        ("/metadata/instance?api-version=2016-01-01", METADATA, 400),
        ("/metadata/latest/scheduledevents?api-version=2020-07-01", METADATA, 404),
        ("/vm/", METADATA, 404),
    ],
)
def test_it_is_as_strict_as_imds(client: Client, path: str, headers: dict[str, str], status: int) -> None:
    assert client.status("GET", path, headers=headers) == status


@pytest.mark.parametrize("vm", ["West%4eO_0", "West NO/ü"])
def test_each_vm_has_an_endpoint_that_knows_its_name(simulator: Simulator, client: Client, vm: str) -> None:
    path = simulator.endpoint_of(vm).removeprefix(simulator.endpoint) + INSTANCE
    assert client.get(path)["compute"]["name"] == vm


def test_an_approved_event_starts_long_before_not_before_whatever_the_case_of_its_id(
    simulator: Simulator, client: Client
) -> None:
    event_id = simulator.start("user-reboot", speed=20)
    body = msgspec.json.encode({"StartRequests": [{"EventId": event_id.lower()}]})
    assert client.status("POST", EVENTS, body) == 200
    eventually(lambda: bool(client.get()["Events"][0]["EventStatus"] == "Started"))
    assert simulator.start_requests == [event_id]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"StartRequests": [{"EventId": 7}]}',
        b'{"StartRequests": [{"EventId": "KNOWN"}, {"EventId": "never-was"}]}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_malformed_start_request_is_a_bad_request_and_approves_nothing(
    simulator: Simulator, client: Client, body: bytes
) -> None:
    known = simulator.start("user-reboot")
    assert client.status("POST", EVENTS, body.replace(b"KNOWN", known.encode())) == 400
    assert simulator.start_requests == []


@pytest.mark.parametrize("status", [302, 429, 599])  # 599 has no name
def test_a_status_is_answered_once_and_then_the_document(simulator: Simulator, client: Client, status: int) -> None:
    simulator.fault("status", status)
    assert client.status("GET", EVENTS) == status
    assert client.get()["Events"] == []


def test_a_held_client_does_not_keep_the_simulator_from_ending() -> None:
    with Simulator() as simulator:
        simulator.fault("freeze", 3600.0)
        client = Client(simulator)
        client.connection.request("GET", EVENTS, headers=METADATA)
        eventually(lambda: simulator.requests)
    with client, pytest.raises((OSError, http.client.HTTPException)):
        client.connection.getresponse()


def test_a_kept_connection_is_answered_no_more_when_it_closes_and_no_thread_stays() -> None:
    before = set(threading.enumerate())
    with Simulator() as simulator:
        client = Client(simulator)
        client.get()
    with client, pytest.raises((OSError, http.client.HTTPException)):
        client.get()
    eventually(lambda: set(threading.enumerate()) <= before)
