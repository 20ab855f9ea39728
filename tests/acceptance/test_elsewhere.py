"""Agent and courier run in a Python without POSIX, as on Windows."""

import os
import signal
from pathlib import Path

import pytest

from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually
from support.azure import body, item
from support.peers import Answer, HttpPeer
from support.without_posix import python_without_posix, run_without_posix

CHECK = """
from notbefore.commands.main import main
sys.exit(main(sys.argv[1:]))
"""
HOLD = """
from pathlib import Path
from notbefore.errors import StoreError
from notbefore.store.lock import OwnerLock
first, second = OwnerLock(Path(LOCKED)), OwnerLock(Path(LOCKED))
first.acquire()
assert first.descriptor is not None
try:
    second.acquire(0.1)
except StoreError as error:
    print(error)
first.release()
second.acquire(0.1)
print("held")
"""

# Windows reports a closed pipe as EINVAL
CLOSED_PIPE = """
import io
class ClosedPipe(io.StringIO):
    def fileno(self):
        return 1
    def write(self, text):
        raise OSError(22, "Invalid argument")
sys.stdout = ClosedPipe()
"""


def test_all_modules_are_imported_and_the_lock_works_without_posix(tmp_path: Path) -> None:
    """The simulated lock of Windows refuses a second owner even in the same process."""
    program = f"LOCKED = {str(tmp_path)!r}\n{HOLD}{CHECK}"

    done = run_without_posix(program, "check-config", "--state-dir", str(tmp_path))

    assert done.returncode == 0
    assert done.stderr == ""
    assert "held" in done.stdout
    assert "is valid." in done.stdout


def test_output_is_utf_8_without_posix(monkeypatch: pytest.MonkeyPatch) -> None:
    # like a code page of Windows, for files and pipes
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")

    done = run_without_posix(CHECK, "--help")

    assert "0 done · 1 it failed" in done.stdout


def test_closed_reader_causes_no_traceback_without_posix() -> None:
    done = run_without_posix(CLOSED_PIPE + CHECK, "--version")

    assert done.returncode == 1
    assert done.stderr == ""


def starts(agent: RunningAgent, reason: str) -> float:
    return agent.metric(f'notbefore_courier_starts_total{{reason="{reason}"}}') or 0


@pytest.mark.long
def test_courier_delivers_is_replaced_and_stops_without_posix(
    imds: Simulator, hook: HttpPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the courier runs in the same Python
    monkeypatch.setattr(RunningAgent, "python", python_without_posix(tmp_path))
    hook.default = Answer(how="hang")
    webhook = {"url": hook.url, "allow_private": True, "timeout": "60s"}
    config = {"sinks": {"hook": {"webhook": webhook}}}

    with RunningAgent(imds.endpoint, tmp_path / "state", config) as agent:
        imds.set_document(body(item("e")))
        eventually(lambda: len(hook.requests) == 1)

        hook.default = Answer()
        os.kill(agent.courier(), signal.SIGKILL)

        eventually(lambda: hook.kinds == ["announced"] * 2)
        assert len({request.headers["x-notbefore-delivery-id"] for request in hook.requests}) == 1
        eventually(lambda: starts(agent, "crashed") == 1)
        eventually(lambda: agent.count("delivered") == 1)

        imds.set_document(body(item("e", EventStatus="Started", NotBefore=""), incarnation=2))
        eventually(lambda: agent.count("delivered") == 2)
        assert hook.kinds[2:] == ["started"]

        events = [item(str(number)) for number in range(10)]
        imds.set_document(body(*events, incarnation=4))
        eventually(lambda: agent.count("delivered") == 13)
        courier = agent.courier()

        assert agent.stop(signal.SIGINT) == 0
        assert sorted(hook.kinds[3:]) == ["announced"] * 10 + ["finished"]
        assert not Path(f"/proc/{courier}").exists()

    assert "Traceback" not in agent.log
    assert "control.sock" not in agent.log


def test_approve_explains_that_it_can_ask_no_agent_without_posix(tmp_path: Path) -> None:
    why = "commands cannot ask an agent here: this system has no Unix sockets"

    done = run_without_posix(CHECK, "approve", "e", "--state-dir", str(tmp_path))

    assert done.returncode == 1
    assert done.stderr == f"notbefore: {why}\n"


def test_outbox_opens_the_state_of_a_stopped_agent_without_posix(tmp_path: Path) -> None:
    done = run_without_posix(CHECK, "outbox", "list", "--state-dir", str(tmp_path))

    assert "has `notbefore run` been started here?" in done.stderr
