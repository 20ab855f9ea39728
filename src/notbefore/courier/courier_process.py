"""One courier as a process: started, talked to over a socket, ended.

It is started with ``posix_spawn`` where that is: ``subprocess`` would cost the agent half a megabyte.
"""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from notbefore.courier.channel import Channel
from notbefore.courier.orders import LOCK, TURN_INTERVAL, Leave, Orders

REAP_SECONDS: Final = 1.0  # for the end of a process that was killed
_OTLP_HEADERS: Final = re.compile("OTEL_EXPORTER_OTLP_(.*_)?HEADERS")  # whether they are used or not


def environment(orders: Orders) -> dict[str, str]:
    """The agent's variables less those that hold a secret: what the courier needs of them goes through the socket."""
    hidden = {secret.variable for sink in orders.sinks.values() for secret in sink.secrets.values()} | {*orders.hidden}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and not name.startswith("NOTBEFORE_") and not _OTLP_HEADERS.fullmatch(name)
    }


class CourierProcess:
    """A courier that was just started, and is sent its orders: ``frame``. Only ``end`` waits.

    ``lock``: the file descriptor of the agent's lock, which the courier holds as well. Raises ``OSError``.
    """

    def __init__(self, frame: bytes, variables: Mapping[str, str], lock: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = _popen(theirs, variables) if sys.platform == "win32" else _Spawned(theirs, variables, lock)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid: Final[int] = self._process.pid
        self.channel = Channel(ours)
        self.works = False  # it has said that it does
        self.started = self.last_busy = self._counted = time.monotonic()  # seconds
        self.silent = 0  # seconds in a row without a frame of it
        with suppress(ConnectionError):  # it has ended: `frames` says so
            self.channel.send(frame)

    def frames(self) -> Iterable[bytes]:
        """What it has sent since the last call; raises ``ConnectionError`` once it has ended."""
        for frame in self.channel.receive():
            self.silent = 0
            yield frame
        # a freeze of the whole machine is no reason: only seconds in which we ran are counted
        if time.monotonic() - self._counted >= TURN_INTERVAL:
            self._counted = time.monotonic()
            self.silent += 1

    def leave(self, seconds: float) -> None:
        """Ask it to take nothing more, and to end within these seconds."""
        with suppress(ConnectionError):  # it has ended: `frames` says so
            self.channel.send(Leave(seconds))

    def end(self, *, kill: bool = True) -> int:
        """Wait for its end, or ``kill`` it; returns the exit code, negative for a signal."""
        self.channel.close()
        if kill:
            self._process.kill()
        deadline = time.monotonic() + REAP_SECONDS
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                return int(code)
            time.sleep(0.002)
        self._process.kill()
        return -9  # a thread of it hangs in a disk: it is gone when that answers


def _command() -> list[str]:
    return [sys.executable, "-P", "-m", "notbefore.courier"]  # -P: no module is imported from the working directory


class _Spawned:
    """As much of ``subprocess.Popen`` as is needed."""

    def __init__(self, end: socket.socket, variables: Mapping[str, str], lock: int | None) -> None:
        actions = [(os.POSIX_SPAWN_DUP2, end.fileno(), 0)]
        if lock is not None:
            actions.append((os.POSIX_SPAWN_DUP2, lock, LOCK))
        self.pid = os.posix_spawn(sys.executable, _command(), dict(variables), file_actions=actions)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


def _popen(end: socket.socket, variables: Mapping[str, str]) -> Any:  # pragma: no cover - the tests run on POSIX
    """Windows takes no socket as a file: it is handed over as text, through a pipe."""
    import subprocess  # noqa: PLC0415 - it would cost half a megabyte elsewhere

    process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        _command(),
        env=dict(variables),
        stdin=subprocess.PIPE,
        # a console of its own: Ctrl-C is for the agent, which ends the courier; and no window
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
    if sys.platform == "win32" and process.stdin is not None:
        with process.stdin as pipe:
            pipe.write(end.share(process.pid))
    return process
