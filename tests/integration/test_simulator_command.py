"""``notbefore simulate`` as a process: what it says, what it serves, how it ends."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from notbefore.commands.main import main
from support.agent import PATIENCE, eventually, get

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
        status, body = get(int(self.host.rpartition(":")[2]), path, Metadata="true")
        return msgspec.json.decode(body) if status == 200 else status

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


def test_it_says_how_to_point_an_agent_at_it_and_at_each_of_several_vms(start: Start) -> None:
    running = start("--vm", "a_0", "b_1")
    assert running.line == f"IMDS at http://{running.host}: notbefore run --imds http://{running.host}\n"
    assert running.process.stdout is not None
    lines = [running.process.stdout.readline() for _ in range(2)]
    assert lines == [f"  a_0: http://{running.host}/vm/a_0\n", f"  b_1: http://{running.host}/vm/b_1\n"]
    assert running.get("/vm/b_1/metadata/instance?api-version=2021-02-01")["compute"]["name"] == "b_1"


def test_an_event_that_it_plays_can_be_canceled(start: Start) -> None:
    running = start("--scenario", "user-reboot", "--cancel", "--speed", "300")
    eventually(lambda: bool(running.events()))
    assert {event["EventStatus"] for event in running.events()} <= {"Scheduled"}
    eventually(lambda: not running.events())


def test_each_fault_is_of_one_answer(start: Start) -> None:
    running = start("--fault", "status:503", "--fault", "status")
    assert [running.get() for _ in range(2)] == [503, 500]
    assert running.events() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_well_on_a_signal(start: Start, number: signal.Signals) -> None:
    running = start("--scenario", "user-reboot")
    running.process.send_signal(number)
    out, err = running.process.communicate(timeout=PATIENCE)
    assert (running.process.returncode, err) == (0, "")
    assert "Traceback" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("--listen", "nowhere"),
        ("--speed", "nan"),
        ("--scenario", "earthquake"),
        ("--listen", "127.0.0.1:0", "--fault", "freeze:-1"),
        ("--listen", "127.0.0.1:0", "--fault", "status:0"),
        ("--listen", "127.0.0.1:0", "--fault", "earthquake"),
    ],
)
def test_a_mistake_in_the_words_ends_with_code_2_and_says_what_was_expected(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:  # as the shell's `exit`
        sys.exit(main(["simulate", *words]))
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert words[-2] in said or words[-1].partition(":")[0] in said


def test_an_address_in_use_ends_with_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["simulate", "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]) == 3
    assert "cannot listen" in capsys.readouterr().err
