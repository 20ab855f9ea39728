"""The installed agent notifies systemd, whose socket is simulated."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from notbefore.process.systemd import SystemdNotifier
from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, RunningAgent, eventually

WATCHDOG = 2.0  # seconds

# an agent whose polling thread hangs once there is a file `hang`; it notices after a second instead
# of twenty
HANGING = """
import os, sys, threading
import notbefore.agent.polling
from notbefore.commands.main import main
from notbefore.agent.tracker import Tracker

notbefore.agent.polling.TIMEOUT = 0.5
handle = Tracker.handle

def hang(self, poll):
    handle(self, poll)
    if os.path.exists("hang"):
        threading.Event().wait()

Tracker.handle = hang
sys.exit(main(sys.argv[1:]))
"""


class Manager:
    """Systemd's end of the socket."""

    def __init__(self, address: str, watchdog: float = WATCHDOG) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0"))
        self.socket.settimeout(0.1)
        self.environment = {
            "NOTIFY_SOCKET": address,
            "WATCHDOG_USEC": str(int(watchdog * 1_000_000)),
        }
        self.received: list[str] = []

    def listen(self) -> list[str]:
        """Return all assignments up to now."""
        with suppress(TimeoutError):
            while True:
                self.received += self.socket.recv(4096).decode().splitlines()
        return self.received

    def has(self, line: str, times: int = 1) -> bool:
        return self.listen().count(line) >= times


def test_systemd_is_notified_of_ready_alive_reloading_and_stopping(
    imds: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager(str(tmp_path / "notify"))
    for name, value in manager.environment.items():
        monkeypatch.setenv(name, value)
    with manager.socket, RunningAgent(imds.endpoint, tmp_path) as agent:
        eventually(lambda: manager.has("READY=1"))
        assert agent.json("/healthz")["status"] == "ok", "ready means that it serves"
        eventually(lambda: manager.has("WATCHDOG=1", 2))
        eventually(lambda: manager.has("STATUS=0 events listed"))

        agent.process.send_signal(signal.SIGHUP)
        eventually(lambda: manager.has("READY=1", 2))

        received = manager.received
        reloading = received.index("RELOADING=1")

        assert received[reloading + 1].startswith("MONOTONIC_USEC=")
        assert "READY=1" in received[reloading:]

        agent.stop()

        assert manager.listen()[-2:] == ["STOPPING=1", "STATUS=stopping"]


def test_watchdog_starves_when_the_polling_hangs(imds: Simulator, tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"), 0.4)
    words = ["run", "--imds", imds.endpoint, "--state-dir", str(tmp_path)]
    words += ["--listen", "127.0.0.1:0"]
    environment = {**os.environ, **manager.environment, "NOTBEFORE_IMDS__INTERVAL": "200ms"}
    agent = subprocess.Popen([sys.executable, "-c", HANGING, *words], env=environment, cwd=tmp_path)

    def names_old_answer() -> bool:
        return any(line.startswith("STATUS=") and "old" in line for line in manager.listen())

    def is_starving() -> bool:
        before = manager.listen().count("WATCHDOG=1")
        time.sleep(0.8)  # the silence itself: two intervals of the watchdog
        return manager.listen().count("WATCHDOG=1") == before

    try:
        eventually(lambda: manager.has("WATCHDOG=1"))
        eventually(lambda: manager.has("STATUS=0 events listed"))

        (tmp_path / "hang").touch()

        eventually(names_old_answer)
        eventually(is_starving)
        assert agent.poll() is None, "systemd ends the agent, not the agent itself"
    finally:
        agent.terminate()
        agent.wait(PATIENCE)
        manager.socket.close()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere/socket", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "vsock:2:1234"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
def test_notifier_sends_nothing_when_systemd_does_not_wait_for_it(
    environment: dict[str, str],
) -> None:
    notifier = SystemdNotifier(environment)

    notifier.ready()
    notifier.notify("well", alive=True)

    assert notifier.patience == float("inf")


def test_notifier_is_patient_for_the_time_of_the_watchdog() -> None:
    environment = {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}

    assert SystemdNotifier(environment).patience <= 1


def test_status_is_one_line() -> None:
    manager = Manager(f"@notbefore-test-{os.getpid()}")
    with manager.socket:
        SystemdNotifier(manager.environment).notify("a\nREADY=1", alive=True)

        assert manager.listen() == ["STATUS=a READY=1"]
