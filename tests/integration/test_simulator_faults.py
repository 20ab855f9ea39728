"""Every fault as a client meets it, over real sockets; and that the next answer is good again."""

import http.client
import socket
from collections.abc import Iterator

import pytest

from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, eventually

PATH = "/metadata/scheduledevents?api-version=2020-07-01"
Answer = tuple[http.client.HTTPResponse, bytes]


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with Simulator() as running:
        yield running


def get(simulator: Simulator, timeout: float = PATIENCE) -> Answer:
    connection = http.client.HTTPConnection(simulator.endpoint.removeprefix("http://"), timeout=timeout)
    try:
        connection.request("GET", PATH, headers={"Metadata": "true"})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def is_good(answer: Answer) -> bool:
    return answer[0].status == 200 and answer[1].startswith(b'{"DocumentIncarnation"')


@pytest.mark.parametrize("status", [302, 429, 599])  # 599 has no name
def test_a_status_is_answered_once_and_then_the_document(simulator: Simulator, status: int) -> None:
    simulator.fault("status", status)
    assert get(simulator)[0].status == status
    assert is_good(get(simulator))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("half", http.client.IncompleteRead), ("freeze", TimeoutError), ("disconnect", ConnectionResetError)],
)
def test_an_answer_that_is_none_is_followed_by_a_good_one(
    simulator: Simulator, kind: str, expected: type[Exception]
) -> None:
    simulator.fault(kind)
    with pytest.raises(expected):
        get(simulator, timeout=0.3 if kind == "freeze" else PATIENCE)
    assert is_good(get(simulator))


def test_a_held_client_does_not_keep_the_simulator_from_ending() -> None:
    with Simulator() as simulator:
        simulator.fault("freeze", 3600.0)
        host, port = simulator.endpoint.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
        connection.sendall(f"GET {PATH} HTTP/1.1\r\nHost: x\r\nMetadata: true\r\n\r\n".encode())
        eventually(lambda: simulator.requests)
    with connection:
        while connection.recv(65536):  # ends with the connection, or the test with a time-out
            pass


def test_a_mistake_of_the_simulators_own_is_not_kept_quiet(
    simulator: Simulator, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "body", None)
    connection = http.client.HTTPConnection(simulator.endpoint.removeprefix("http://"), timeout=PATIENCE)
    connection.request("GET", PATH, headers={"Metadata": "true"})
    with pytest.raises(http.client.RemoteDisconnected):
        connection.getresponse()
    connection.close()
    simulator.close()
    assert "TypeError" in capfd.readouterr().err
