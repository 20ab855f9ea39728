"""``notbefore simulate`` as a process: what it says, what it serves, how it ends."""

import http.client
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from support.agent import PATIENCE, eventually, run

PATH = "/metadata/scheduledevents?api-version=2020-07-01"
Start = Callable[..., "Running"]


class Running:
    """The command, and where it listens."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "notbefore", "simulate", "--listen", "127.0.0.1:0", *words]
        # a shell's background jobs ignore SIGINT, and hand that down
        heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, heeded)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.host = self.line.partition("http://")[2].partition(": ")[0]

    def get(self, path: str = PATH) -> Any:
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE)
        connection.request("GET", path, headers={"Metadata": "true"})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return msgspec.json.decode(body) if response.status == 200 else response.status

    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.get()["Events"]
        return events


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[Running] = []

    def begin(*words: str) -> Running:
        running.append(Running(*words))
        return running[-1]

    yield begin
    for one in running:
        one.process.kill()
        one.process.communicate()


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "notbefore", "simulate", *words)


def test_it_says_how_to_point_an_agent_at_it(start: Start) -> None:
    running = start()
    assert running.line == f"IMDS at http://{running.host}: notbefore run --imds http://{running.host}\n"


def test_it_names_the_endpoint_of_each_of_several_vms(start: Start) -> None:
    running = start("--vm", "a_0", "b_1")
    assert running.process.stdout is not None
    lines = [running.process.stdout.readline() for _ in range(2)]
    assert lines == [f"  a_0: http://{running.host}/vm/a_0\n", f"  b_1: http://{running.host}/vm/b_1\n"]
    assert running.get("/vm/b_1/metadata/instance?api-version=2021-02-01")["compute"]["name"] == "b_1"


def test_it_plays_the_scenarios_that_are_named(start: Start) -> None:
    running = start("--scenario", "user-reboot", "--scenario", "live-migration")
    eventually(lambda: sorted(event["EventType"] for event in running.events()) == ["Freeze", "Reboot"])


def test_with_all_it_plays_one_scenario_after_the_other(start: Start) -> None:
    running = start("--all", "--speed", "1000", "--loop")  # what a busy machine does not see comes again
    seen: list[str] = []

    def look() -> bool:
        events = running.events()
        assert len(events) <= 1
        seen.extend(event["EventType"] for event in events if event["EventType"] not in seen)
        return {"Freeze", "Reboot", "Redeploy", "Terminate"} <= set(seen)

    eventually(look)


def test_it_serves_on_when_all_is_over(start: Start) -> None:
    running = start("--scenario", "hardware-failure", "--speed", "100")
    eventually(lambda: bool(running.events()))
    eventually(lambda: not running.events())
    assert running.process.poll() is None


def test_an_event_that_it_plays_can_be_canceled(start: Start) -> None:
    running = start("--scenario", "user-reboot", "--cancel", "--speed", "100")
    eventually(lambda: bool(running.events()))
    assert {event["EventStatus"] for event in running.events()} <= {"Scheduled"}
    eventually(lambda: not running.events())


def test_a_fault_is_met_once_and_then_the_document(start: Start) -> None:
    running = start("--fault", "gone", "--fault", "status:418x2")
    assert [running.get() for _ in range(3)] == [410, 418, 418]
    assert running.events() == []


def test_a_fault_can_last_for_a_time(start: Start) -> None:
    running = start("--fault", "error@4")
    assert running.get() == 500
    eventually(lambda: running.get() != 500)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_well_on_a_signal(start: Start, number: signal.Signals) -> None:
    running = start("--scenario", "user-reboot")
    running.process.send_signal(number)
    out, err = running.process.communicate(timeout=PATIENCE)
    assert (running.process.returncode, err) == (0, "")
    assert "Traceback" not in out


def test_it_lists_scenarios_and_faults() -> None:
    listed = simulate("--list")
    assert listed.returncode == 0
    assert "spot-preemption" in listed.stdout
    assert "disconnect" in listed.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--listen", "nowhere"),
        ("--listen", "127.0.0.1:99999"),
        ("--speed", "0"),
        ("--speed", "nan"),
        ("--speed", "fast"),
        ("--scenario", "earthquake"),
        ("--listen", "127.0.0.1:0", "--fault", "earthquake"),
        ("--listen", "127.0.0.1:0", "--fault", "slow:-1"),
        ("--listen", "127.0.0.1:0", "--fault", "status:7"),
        ("--listen", "127.0.0.1:0", "--fault", "error@0"),
    ],
)
def test_a_mistake_in_the_words_ends_with_code_2_and_says_what_was_expected(words: tuple[str, ...]) -> None:
    ended = simulate(*words)
    assert ended.returncode == 2
    assert words[-2] in ended.stderr or words[-1].partition(":")[0] in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_address_in_use_ends_with_code_3() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = simulate("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert ended.returncode == 3
    assert "cannot listen" in ended.stderr


def test_with_loop_it_begins_again_with_a_new_event(start: Start) -> None:
    running = start("--scenario", "hardware-failure", "--speed", "600", "--loop")
    seen: set[str] = set()

    def look() -> bool:
        seen.update(event["EventId"] for event in running.events())
        return len(seen) > 1

    eventually(look)
