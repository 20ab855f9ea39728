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

# The command gets SIGINT at one of its imports and opened files, counted from the import of its own
# modules on.
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


def wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code, and the text on standard error."""
    try:
        _, error = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, error


def has_written(process: subprocess.Popen[str]) -> bool:
    """Return whether a command has written anything."""
    assert process.stdout is not None
    assert process.stderr is not None
    readable, _, _ = select.select([process.stdout, process.stderr], [], [], 0)
    return bool(readable)


def assert_no_traceback(error: str) -> None:
    assert [word for word in TRACES if word in error] == [], error


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """SIGINT as in a terminal: a background job of a shell ignores it, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def moments() -> list[tuple[str, int]]:
    """Return six moments of each command, from the first to the last one."""
    pairs: list[tuple[str, int]] = []
    for command, last in COUNTED.items():
        pairs += [(command, moment) for moment in range(1, last, last // 5)]
    return pairs


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize(("command", "moment"), moments())
def test_interrupted_start_prints_no_traceback(command: str, moment: int, tmp_path: Path) -> None:
    state = ["--state-dir", str(tmp_path / "state")]
    words = {
        "run": ["--imds", "http://127.0.0.1:9", "--listen", f"127.0.0.1:{free_port()}", *state],
        "history": state,
        "events": ["--watch", "--url", "http://127.0.0.1:9"],
    }
    process = start("-c", AT_MOMENT, str(moment), command, *words.get(command, []))

    code, error = wait_for_end(process)

    assert_no_traceback(error)
    assert code in (*INTERRUPTED, 0)


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize(
    ("command", "code"), [("run", 0), ("simulate", 0), ("demo", 0), ("events", 130)]
)
def test_running_command_ends_in_order(command: str, code: int, tmp_path: Path) -> None:
    with Simulator() as imds, RunningAgent(imds.endpoint, tmp_path / "watched") as agent:
        listen = ["--listen", f"127.0.0.1:{free_port()}"]
        words = {
            "run": ["--imds", imds.endpoint, "--state-dir", str(tmp_path / "state"), *listen],
            "simulate": listen,
            "events": ["--watch", "--json", "--url", f"http://127.0.0.1:{agent.port}"],
        }
        process = start("-m", "notbefore", command, *words.get(command, []))
        eventually(lambda: has_written(process))

        process.send_signal(signal.SIGINT)
        exit_code, error = wait_for_end(process)

    assert_no_traceback(error)
    assert exit_code == code


@pytest.mark.usefixtures("default_sigint")
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
    courier_of(process.pid)  # the courier has just started, and imports its modules

    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    code, error = wait_for_end(process)

    assert_no_traceback(error)
    assert code == 0
