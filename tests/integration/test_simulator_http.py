"""The simulator over real sockets: strict requests, several VMs, approvals, faults and its end."""

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests

from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, eventually

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
INSTANCE = "/metadata/instance?api-version=2021-02-01"
METADATA = {"Metadata": "true"}


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with Simulator(["West%4eO_0", "West NO/ü"]) as running:
        yield running


@pytest.fixture
def session() -> Iterator[requests.Session]:
    """A client that keeps its connection."""
    with requests.Session() as opened:
        opened.trust_env = False
        opened.headers.update(METADATA)
        yield opened


def listed(simulator: Simulator, session: requests.Session) -> Any:
    return session.get(simulator.endpoint + EVENTS, timeout=PATIENCE).json()["Events"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        pytest.param(EVENTS, {}, 400, id="no Metadata header"),
        pytest.param(INSTANCE, {"Metadata": "false"}, 400, id="Metadata is false"),
        pytest.param(EVENTS, {**METADATA, "X-Forwarded-For": "10.0.0.1"}, 400, id="forwarded"),
        pytest.param(EVENTS, {**METADATA, "Content-Length": "abc"}, 400, id="wrong length"),
        pytest.param("/metadata/scheduledevents", METADATA, 400, id="no version"),
        pytest.param(
            "/metadata/instance?api-version=2016-01-01", METADATA, 400, id="unknown version"
        ),
        pytest.param(
            "/metadata/latest/scheduledevents?api-version=2020-07-01", METADATA, 404, id="path"
        ),
        pytest.param("/vm/", METADATA, 404, id="no VM"),
    ],
)
def test_simulator_refuses_requests_that_imds_refuses(
    simulator: Simulator, path: str, headers: dict[str, str], status: int
) -> None:
    answer = requests.get(simulator.endpoint + path, headers=headers, timeout=PATIENCE)

    assert answer.status_code == status


@pytest.mark.parametrize("vm", ["West%4eO_0", "West NO/ü"])
def test_endpoint_of_a_vm_returns_its_name(
    simulator: Simulator, session: requests.Session, vm: str
) -> None:
    answer = session.get(simulator.endpoint_of(vm) + INSTANCE, timeout=PATIENCE)

    assert answer.json()["compute"]["name"] == vm


def test_approved_event_starts_early_and_its_id_ignores_case(
    simulator: Simulator, session: requests.Session
) -> None:
    event_id = simulator.start("user-reboot", speed=2)  # then it starts in a second, for minutes
    body = msgspec.json.encode({"StartRequests": [{"EventId": event_id.lower()}]})

    answer = session.post(simulator.endpoint + EVENTS, body, timeout=PATIENCE)

    assert answer.status_code == 200
    eventually(lambda: bool(listed(simulator, session)[0]["EventStatus"] == "Started"))
    assert simulator.start_requests == [event_id]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"StartRequests": [{"EventId": 7}]}', id="number"),
        pytest.param(
            b'{"StartRequests": [{"EventId": "LISTED"}, {"EventId": "never-was"}]}', id="unknown id"
        ),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"\xff", id="not UTF-8"),
    ],
)
def test_malformed_start_request_approves_nothing(
    simulator: Simulator, session: requests.Session, body: bytes
) -> None:
    event_id = simulator.start("user-reboot").encode()
    request = body.replace(b"LISTED", event_id)

    answer = session.post(simulator.endpoint + EVENTS, request, timeout=PATIENCE)

    assert answer.status_code == 400
    assert simulator.start_requests == []


def test_closed_simulator_does_not_answer_a_connected_client(session: requests.Session) -> None:
    with Simulator() as simulator:
        assert listed(simulator, session) == []

    with pytest.raises(requests.ConnectionError):
        listed(simulator, session)


def test_closed_simulator_ends_the_thread_of_a_frozen_answer() -> None:
    before = set(threading.enumerate())

    with Simulator() as simulator:
        simulator.fault("freeze", 3600.0)
        with pytest.raises(requests.Timeout):
            requests.get(simulator.endpoint + EVENTS, headers=METADATA, timeout=0.3)

    eventually(lambda: set(threading.enumerate()) <= before)
