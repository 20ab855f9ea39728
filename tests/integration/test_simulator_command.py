"""``notbefore simulate`` as a process: what it says, what it serves, how it ends."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from notbefore.commands.main import main
from support.agent import PATIENCE, eventually, get

PATH = "/metadata/scheduledevents?api-version=2020-07-01"


@contextmanager
def simulating(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address that it says."""
    command = [sys.executable, "-m", "notbefore", "simulate", "--listen", "127.0.0.1:0", *words]
    # a shell's background jobs ignore SIGINT, and hand that down
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        signal.signal(signal.SIGINT, heeded)
        assert process.stdout is not None
        address = process.stdout.readline().partition("notbefore run --imds ")[2].rstrip("\n")
        try:
            yield process, address
        finally:
            process.kill()


def ask(address: str, path: str = PATH) -> Any:
    status, body = get(int(address.rpartition(":")[2]), path, Metadata="true")
    return msgspec.json.decode(body) if status == 200 else status


def test_simulate_prints_an_endpoint_for_each_vm() -> None:
    with simulating("--vm", "a_0", "b_1") as (process, address):
        assert process.stdout is not None

        lines = [process.stdout.readline() for _ in range(2)]
        assert lines == [f"  a_0: {address}/vm/a_0\n", f"  b_1: {address}/vm/b_1\n"]
        assert (
            ask(address, "/vm/b_1/metadata/instance?api-version=2021-02-01")["compute"]["name"]
            == "b_1"
        )


def test_simulate_applies_each_fault_to_one_answer_and_cancels_the_event() -> None:
    words = (
        "--fault",
        "status:599",
        "--fault",
        "status",
        "--scenario",
        "user-reboot",
        "--cancel",
        "--speed",
        "75",
    )
    with simulating(*words) as (_, address):
        assert [ask(address) for _ in range(2)] == [599, 500]  # the first has no name
        # for six seconds
        assert [event["EventStatus"] for event in ask(address)["Events"]] == ["Scheduled"]
        eventually(lambda: not ask(address)["Events"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_simulate_ends_with_code_0_on_a_signal(number: signal.Signals) -> None:
    with simulating("--scenario", "user-reboot") as (process, _):
        process.send_signal(number)

        out, err = process.communicate(timeout=PATIENCE)

        assert process.returncode == 0
        assert err == ""
        assert "Traceback" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("--listen", "nowhere"),
        ("--speed", "nan"),
        ("--scenario", "earthquake"),
        ("--listen", "127.0.0.1:0", "--fault", "freeze:soon"),
        ("--listen", "127.0.0.1:0", "--fault", "status:0"),
    ],
)
def test_simulate_ends_with_code_2_when_an_argument_is_wrong(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:  # as the shell's `exit`
        sys.exit(main(["simulate", *words]))

    said = capsys.readouterr().err

    assert ended.value.code == 2
    assert words[-2] in said
    assert "expected" in said or "choose from" in said


def test_simulate_ends_with_code_3_when_its_address_is_in_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))

        taken.listen()

        assert main(["simulate", "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]) == 3

    assert "cannot listen" in capsys.readouterr().err
