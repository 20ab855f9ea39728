"""``RunningAgent`` runs the installed command as a process.

Other helpers wait for conditions, send requests and run commands.
"""

import atexit
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from notbefore.simulator.server import Simulator

T = TypeVar("T")

NOWHERE = "http://127.0.0.1:9"  # refuses connections
PATIENCE = 120.0  # seconds: far longer than any step of a test, even on a busy machine


def eventually(look: Callable[[], T], patience: float = PATIENCE) -> T:
    """Call ``look`` until it returns something true, and return that.

    The pauses grow, because a look may be a scrape.
    """
    started = time.monotonic()
    while not (value := look()):
        waited = time.monotonic() - started
        assert waited < patience, f"the condition was not met within {patience} s"
        time.sleep(min(0.02 + waited / 20, 0.25))
    return value


def becomes(look: Callable[[], object], wanted: object) -> None:
    """Wait until ``look`` returns ``wanted``; a failure shows the last value."""
    with suppress(AssertionError):
        eventually(lambda: look() == wanted)
        return
    assert look() == wanted


@cache
def _reserved_ports(size: int = 300) -> Iterator[int]:
    """Return an endless iterator over ports that are reserved for this process.

    A lock keeps other processes that run tests from these ports. The kernel gives higher ports to
    outgoing connections, so no connection takes a port between its choice and its use.
    """
    import fcntl  # noqa: PLC0415 - Windows has none, and its tests need no port

    for begin in range(15_000, 32_700 - size, size):
        path = Path(tempfile.gettempdir()) / f"notbefore-test-ports-{begin}"
        with suppress(OSError), ExitStack() as stack:
            lock = stack.enter_context(path.open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the lock lasts until this process ends
            atexit.register(stack.pop_all().close)
            return itertools.cycle(range(begin, begin + size))
    raise AssertionError("every range of ports is reserved")


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    for port in _reserved_ports():
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def get(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    """Return status and body of a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def run(
    *command: object, timeout: float = PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command until it exits; ``environment`` adds variables to those of the test."""
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )


def notbefore(
    *words: object, timeout: float = PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of notbefore until it exits, by default without an IMDS."""
    endpoint = os.environ.get("NOTBEFORE_IMDS__ENDPOINT", NOWHERE)
    environment.setdefault("NOTBEFORE_IMDS__ENDPOINT", endpoint)
    return run(sys.executable, "-m", "notbefore", *words, timeout=timeout, **environment)


def write_config(state: Path, values: dict[str, Any]) -> str:
    """Write a configuration next to a state directory, and return its path."""
    file = state.with_name(f"{state.name}.yaml")
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(file)


def courier_of(pid: int) -> int:
    """Wait until a process has a courier, and return the id of the newest one."""
    children = Path(f"/proc/{pid}/task/{pid}/children")

    def couriers() -> list[int]:
        ids: list[int] = []
        for child in children.read_text(encoding="ascii").split():
            with suppress(OSError):  # the child may have ended in the meantime
                command_line = Path(f"/proc/{child}/cmdline").read_bytes()  # empty for a zombie
                if b"notbefore.courier" in command_line:
                    ids.append(int(child))
        return ids

    return eventually(couriers)[-1]


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, also if its parent has not yet waited for it."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (ProcessLookupError, FileNotFoundError):
        return True
    state = stat.split()[2]
    return state == "Z"  # a zombie


def wait_for_polls(imds: Simulator, times: int) -> None:
    """Wait until the agent has processed the answers to so many more polls.

    The agent sends a request only after it has processed the previous answer.
    """
    before = imds.requests
    eventually(lambda: imds.requests > before + times)


class RunningAgent:
    """Runs ``notbefore run`` against an endpoint, and collects its records and its log.

    A word of the command that is a dictionary becomes a configuration file.
    """

    python = sys.executable
    _waits_until_ready = True

    @staticmethod
    def prefix(_state: Path) -> Sequence[str]:
        """Return words before the command, such as a program that prepares its environment."""
        return ()

    def __init__(
        self,
        imds: str,
        state: Path,
        *words: str | dict[str, Any],
        interval: str = "200ms",
        reading: bool = True,
    ) -> None:
        command = [*self.prefix(state), self.python, "-m", "notbefore", "run"]
        for word in words:
            if isinstance(word, str):
                command.append(word)
            else:
                command.append(write_config(state, word))
        command += ["--imds", imds]
        self._start(command, state, NOTBEFORE_IMDS__INTERVAL=interval)
        if reading:
            self.read()

    def _start(self, command: Sequence[str], state: Path, **environment: str) -> None:
        self.port = free_port()
        self.state = state
        self.records: list[dict[str, Any]] = []
        self.log = ""
        self.process = subprocess.Popen(
            [*command, "--state-dir", str(state), "--listen", f"127.0.0.1:{self.port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "", **environment},
        )
        self._record_reader = threading.Thread(target=self._read_records)
        self._log_reader = threading.Thread(target=self._read_log)
        self._log_reader.start()

    def read(self) -> None:
        """Begin to read the records, if that was postponed."""
        self._record_reader.start()

    def _read_records(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.records.append(json.loads(line))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line.decode()

    def __enter__(self) -> Self:
        """Wait until the agent is ready, unless ``without_waiting`` was called."""
        try:
            if self._waits_until_ready:
                self.wait_until_ready()
            return self
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def without_waiting(self) -> Self:
        """Let ``with`` begin before the agent is ready."""
        self._waits_until_ready = False
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.stop()

    def wait_until_ready(self) -> Self:
        """Wait until the agent is ready."""
        eventually(lambda: self.process.poll() is not None or self.answers("/readyz"))
        assert self.process.poll() is None, self.log
        return self

    def wait_until_listening(self) -> None:
        """Wait until the agent listens to commands, perhaps after the first answer of IMDS."""
        eventually((self.state / "control.sock").is_socket)

    def answers(self, path: str) -> bool:
        """Return whether the agent answers this path with 200."""
        with suppress(OSError, http.client.HTTPException):
            return get(self.port, path)[0] == 200
        return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait until the process has ended, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()  # otherwise the threads that read its output would never end
            raise
        for reader in (self._record_reader, self._log_reader):
            if reader.is_alive():
                reader.join(PATIENCE)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def json(self, path: str) -> Any:
        """Return the decoded answer to a GET."""
        return json.loads(get(self.port, path)[1])

    def metric(self, name: str) -> float | None:
        """Return the value of a sample, or ``None``; ``name`` includes the labels as served."""
        for sample, value in self._samples():
            if sample == name:
                return value
        return None

    def _samples(self) -> list[tuple[str, float]]:
        """Return each sample of a scrape: its name with labels, and its value."""
        samples: list[tuple[str, float]] = []
        for line in get(self.port, "/metrics")[1].decode().splitlines():
            if line.startswith("#"):
                continue
            sample, _, value = line.rpartition(" ")
            samples.append((sample, float(value)))
        return samples

    def count(self, result: str, sink: str = "hook") -> float:
        """Return how many deliveries to a sink had this result."""
        return self.metric(f'notbefore_deliveries_total{{result="{result}",sink="{sink}"}}') or 0.0

    def metric_sum(self, name: str) -> float:
        """Return the sum of the samples of this name with any labels."""
        return sum(value for sample, value in self._samples() if sample.partition("{")[0] == name)

    def courier(self) -> int:
        """Wait until the agent has a courier, and return the id of its process."""
        return courier_of(self.process.pid)

    @property
    def kinds(self) -> list[str]:
        """The kinds of the changes that the agent has reported."""
        return [record["azure.scheduled_event.change"] for record in self.records]

    def wait_for_changes(self, *kinds: str) -> list[dict[str, Any]]:
        """Wait until the agent has reported exactly these changes, and return the records."""
        eventually(lambda: len(self.records) >= len(kinds))
        assert self.kinds == list(kinds)
        return self.records
