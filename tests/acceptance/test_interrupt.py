"""Ctrl-C ends each command at any moment without a traceback."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, RunningAgent, courier_of, eventually, free_port
from support.azure import listed

# the command, which gets SIGINT at one of its imports and opened files, counted from the first one
# that its own first line causes
AT_MOMENT = """
import os, runpy, signal, sys
moment = int(sys.argv.pop(1))
seen = 0

def count(event, arguments):
    global seen
    begins = event == "import" and arguments[0] == "notbefore.commands"
    if begins or seen and event in ("import", "open"):
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(count)
runpy.run_module("notbefore", run_name="__main__", alter_sys=True)
"""
INTERRUPTED = (-signal.SIGINT, 130)  # at once, or after the command has cleaned up
COUNTED = {"run": 450, "check-config": 480, "history": 580, "events": 580, "demo": 260}
TRACES = ("Traceback", "KeyboardInterrupt", "Exception ignored", "Fatal")


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it wrote to standard error."""
    try:
        _, error = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, error


def has_written(process: subprocess.Popen[str]) -> bool:
    """Whether a command has written anything: then it runs."""
    assert process.stdout is not None
    assert process.stderr is not None
    readable, _, _ = select.select([process.stdout, process.stderr], [], [], 0)
    return bool(readable)


def assert_silent(error: str) -> None:
    assert [word for word in TRACES if word in error] == [], error


@pytest.fixture
def heeded() -> Iterator[None]:
    """SIGINT as in a terminal: background jobs of a shell ignore it, and hand that down."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def moments() -> list[tuple[str, int]]:
    """Six moments of each command, from the first to the last that was counted."""
    pairs: list[tuple[str, int]] = []
    for command, last in COUNTED.items():
        pairs += [(command, moment) for moment in range(1, last, last // 5)]
    return pairs


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(("command", "moment"), moments())
def test_interrupted_start_prints_no_traceback(command: str, moment: int, tmp_path: Path) -> None:
    state = ["--state-dir", str(tmp_path / "state")]
    words = {
        "run": ["--imds", "http://127.0.0.1:9", "--listen", f"127.0.0.1:{free_port()}", *state],
        "history": state,
        "events": ["--watch", "--url", "http://127.0.0.1:9"],
    }
    process = start("-c", AT_MOMENT, str(moment), command, *words.get(command, []))

    code, error = ended(process)

    assert_silent(error)
    assert code in (*INTERRUPTED, 0)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(
    ("command", "code"), [("run", 0), ("simulate", 0), ("demo", 0), ("events", 130)]
)
def test_running_command_ends_in_order(command: str, code: int, tmp_path: Path) -> None:
    with Simulator() as imds, RunningAgent(imds.endpoint, tmp_path / "watched") as agent:
        words = {
            "run": ["--imds", imds.endpoint, "--state-dir", str(tmp_path / "state")],
            "simulate": ["--listen", f"127.0.0.1:{free_port()}"],
            "events": ["--watch", "--json", "--url", f"http://127.0.0.1:{agent.port}"],
        }
        if command == "run":
            words["run"] += ["--listen", f"127.0.0.1:{free_port()}"]
        process = start("-m", "notbefore", command, *words.get(command, []))
        eventually(lambda: has_written(process))

        process.send_signal(signal.SIGINT)

        ended_code, error = ended(process)

    assert_silent(error)
    assert ended_code == code


@pytest.mark.usefixtures("heeded")
def test_ctrl_c_in_terminal_lets_agent_end_its_courier(imds: Simulator, tmp_path: Path) -> None:
    config = tmp_path / "notbefore.yml"
    config.write_text("sinks: {hook: {webhook: {url: 'http://127.0.0.1:9', allow_private: true}}}")
    imds.set_document(listed("e"))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "notbefore", "run", str(config), "--imds", imds.endpoint),
            *("--state-dir", str(tmp_path / "state"), "--listen", f"127.0.0.1:{free_port()}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    courier_of(process.pid)  # it has just begun, and imports its modules

    os.killpg(process.pid, signal.SIGINT)  # as a terminal does

    code, error = ended(process)
    assert_silent(error)
    assert code == 0
