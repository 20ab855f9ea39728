"""One courier as a process: started, talked to over a socket, ended."""

import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from notbefore.courier.orders import TURN_INTERVAL, Channel, Leave, Orders

if TYPE_CHECKING:
    import subprocess

REAP_SECONDS: Final = 1.0  # for the end of a process that was killed
_OTLP_HEADERS: Final = re.compile("OTEL_EXPORTER_OTLP_(.*_)?HEADERS")  # whether they are used or not


def environment(orders: Orders) -> dict[str, str]:
    """The agent's variables less those that hold a secret: what the courier needs of them goes through the socket."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in orders.hidden and not name.startswith("NOTBEFORE_") and not _OTLP_HEADERS.fullmatch(name)
    }


class CourierProcess:
    """A courier that was just started, and is sent its orders: ``frame``. Only ``end`` waits.

    ``lock``: the file descriptor of the agent's lock, which the courier holds as well. Raises ``OSError``.
    """

    def __init__(self, frame: bytes, variables: Mapping[str, str], lock: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = _started(theirs, variables, lock)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid: Final = self._process.pid
        self.channel = Channel(ours)
        self.works = False  # it has said that it does
        self.last_busy = self._counted = time.monotonic()  # seconds
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
                return code
            time.sleep(0.002)
        self._process.kill()
        return -9  # a thread of it hangs in a disk: it is gone when that answers


def _started(end: socket.socket, variables: Mapping[str, str], lock: int | None) -> "subprocess.Popen[bytes]":
    import subprocess  # noqa: PLC0415 - who has nothing to deliver does without

    # -P: no module is imported from the working directory
    command, own = [sys.executable, "-P", "-m", "notbefore.courier"], dict(variables)
    if sys.platform != "win32":
        passed = [] if lock is None else [lock]  # it is held with the agent; no program that is started holds it
        return subprocess.Popen(command, env=own, stdin=end.fileno(), pass_fds=passed)  # noqa: S603 - our own module
    # Windows takes no socket as a file: it is handed over as text, through a pipe. A console of its own: Ctrl-C is for
    # the agent, which ends the courier; and no window
    flags = subprocess.CREATE_NO_WINDOW
    process = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, creationflags=flags)  # noqa: S603 - as above
    if process.stdin is not None:
        with process.stdin as pipe:
            pipe.write(end.share(process.pid))
    return process
