"""The installed command as a process, and what can be asked of it."""

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

Found = TypeVar("Found")

NOWHERE = "http://127.0.0.1:9"
PATIENCE = 120.0  # seconds: far beyond what anything here takes, on a noisy machine as well


def eventually(look: Callable[[], Found], patience: float = PATIENCE) -> Found:
    """What ``look`` returns, once it is true.

    A look may be a scrape: the longer it takes, the less often.
    """
    begun = time.monotonic()
    while not (found := look()):
        waited = time.monotonic() - begun
        assert waited < patience, f"it did not come to pass within {patience} s"
        time.sleep(min(0.02 + waited / 20, 0.25))
    return found


def becomes(look: Callable[[], object], wanted: object) -> None:
    """Wait until ``look`` returns this; else what it returns in the end is shown."""
    with suppress(AssertionError):
        eventually(lambda: look() == wanted)
        return
    assert look() == wanted


@cache
def _own_ports(size: int = 300) -> Iterator[int]:
    """Ports that no other process that runs tests takes, of whatever session: a lock says which are
    in use.

    They are below those that the kernel gives to outgoing connections, so nobody takes one between
    its choice and its use.
    """
    import fcntl  # noqa: PLC0415 - Windows has none, and its tests need no port

    for begin in range(15_000, 32_700 - size, size):
        with suppress(OSError), ExitStack() as opened:
            file = opened.enter_context(
                (Path(tempfile.gettempdir()) / f"notbefore-test-ports-{begin}").open("wb")
            )
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            atexit.register(opened.pop_all().close)  # kept until this process ends
            return itertools.cycle(range(begin, begin + size))
    raise AssertionError


def free_port() -> int:
    for port in _own_ports():
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def get(port: int, path: str, **headers: str) -> tuple[int, bytes]:
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
    """Run a command to its end; ``environment``: variables beside those of the test."""
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
    """Run a command of ours to its end. Where nothing else is said its IMDS is nowhere."""
    environment.setdefault(
        "NOTBEFORE_IMDS__ENDPOINT", os.environ.get("NOTBEFORE_IMDS__ENDPOINT", NOWHERE)
    )
    return run(sys.executable, "-m", "notbefore", *words, timeout=timeout, **environment)


def configured(state: Path, values: dict[str, Any]) -> str:
    """A configuration beside a state directory."""
    file = state.with_name(f"{state.name}.yaml")
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(file)


def courier_of(pid: int) -> int:
    """The id of the courier that a process has started last, once there is one."""
    children = Path(f"/proc/{pid}/task/{pid}/children")

    def couriers() -> list[int]:
        # one that has ended, and that the agent has not waited for yet, has no command line any
        # more
        found = []
        for child in children.read_text(encoding="ascii").split():
            with suppress(OSError):  # it has ended in the meantime
                if b"notbefore.courier" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    return eventually(couriers)[-1]


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def polled(imds: Simulator, times: int) -> None:
    """Wait until IMDS was asked so many times more: what was to come of the next answers
    has come.
    """
    asked = imds.requests
    eventually(lambda: imds.requests > asked + times)


class RunningAgent:
    """``notbefore run`` against an endpoint; its records are collected from its standard output."""

    python = sys.executable
    _waited_for = True

    @staticmethod
    def before(_state: Path) -> Sequence[str]:
        """A command that sets something up and then becomes the one that follows it; none."""
        return ()

    def __init__(
        self,
        imds: str,
        state: Path,
        *words: str | dict[str, Any],
        interval: str = "200ms",
        reading: bool = True,
    ) -> None:
        typed = [one if isinstance(one, str) else configured(state, one) for one in words]
        command = [
            *self.before(state),
            self.python,
            "-m",
            "notbefore",
            "run",
            *typed,
            "--imds",
            imds,
        ]
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
        self._readers = [
            threading.Thread(target=self._read_records),
            threading.Thread(target=self._read_log),
        ]
        self._readers[1].start()

    def read(self) -> None:
        """Read the records, where that was put off."""
        self._readers[0].start()

    def _read_records(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.records.append(json.loads(line))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line.decode()

    def __enter__(self) -> Self:
        """Once it is ready, but where that was not to be waited for."""
        try:
            return self.ready() if self._waited_for else self
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def at_once(self) -> Self:
        """For ``with``: do not wait until it is ready."""
        self._waited_for = False
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.stop()

    def ready(self) -> Self:
        eventually(lambda: self.process.poll() is not None or self.answers("/readyz"))
        assert self.process.poll() is None, self.log
        return self

    def listens(self) -> None:
        """Wait until it listens to commands: IMDS may answer before that."""
        eventually((self.state / "control.sock").is_socket)

    def answers(self, path: str) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return get(self.port, path)[0] == 200
        return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        for reader in self._readers:
            if reader.is_alive():
                reader.join(PATIENCE)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def json(self, path: str) -> Any:
        return json.loads(get(self.port, path)[1])

    def metric(self, name: str) -> float | None:
        """The value of the sample whose name and labels are exactly this; ``None`` without one."""
        lines = get(self.port, "/metrics")[1].decode().splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name]
        return float(values[0]) if values else None

    def count(self, result: str, sink: str = "hook") -> float:
        """How many deliveries to a sink ended so."""
        return self.metric(f'notbefore_deliveries_total{{result="{result}",sink="{sink}"}}') or 0.0

    def metric_sum(self, name: str) -> float:
        """The sum of the samples of this name, whatever their labels."""
        lines = get(self.port, "/metrics")[1].decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.partition(" ")[0].partition("{")[0] == name
        )

    def courier(self) -> int:
        """The id of the courier's process, once there is one."""
        return courier_of(self.process.pid)

    @property
    def kinds(self) -> list[str]:
        return [record["azure.scheduled_event.change"] for record in self.records]

    def reported(self, *kinds: str) -> list[dict[str, Any]]:
        """Wait until just these changes were reported."""
        eventually(lambda: len(self.records) >= len(kinds))
        assert self.kinds == list(kinds)
        return self.records
