"""``CourierProcess``: starts one courier, exchanges frames with it over a socket, and ends it."""

import math
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from notbefore.courier.orders import TURN_INTERVAL, Channel, Orders

if TYPE_CHECKING:
    import subprocess

REAP_SECONDS: Final = 1.0  # to wait for the end of a killed process
# secrets, even if notbefore does not use them
_OTLP_HEADERS: Final = re.compile("OTEL_EXPORTER_OTLP_(.*_)?HEADERS")


def environment(orders: Orders) -> dict[str, str]:
    """Return the agent's variables without those that may be secret: the courier gets secrets
    through the socket.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in orders.hidden
        and not name.startswith("NOTBEFORE_")
        and not _OTLP_HEADERS.fullmatch(name)
    }


class CourierProcess:
    """A courier that is started and gets ``frame``, its orders. Only ``end`` waits.

    ``lock``: the file descriptor of the agent's lock, which the courier holds as well. Raises
    ``OSError``.
    """

    def __init__(self, frame: bytes, variables: Mapping[str, str], lock: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _started(theirs, variables, lock)
            except OSError:
                ours.close()
                raise
        self.pid: Final = self._process.pid
        self.channel = Channel(ours)
        self.works = False  # its hello was good
        self.limits: Mapping[str, int] = {}  # those of its last turn
        self.hangs = False  # one of its sinks hangs, by its last turn
        self.leave_at = math.inf  # monotonic seconds
        self.last_busy = self._counted = time.monotonic()  # seconds
        self.silent = 0  # seconds since its last frame, while this process ran
        with suppress(ConnectionError):  # it has ended: ``frames`` raises as well
            self.channel.send(frame)

    def frames(self) -> Iterable[bytes]:
        """Yield the frames since the last call; raises ``ConnectionError`` once it has ended."""
        for frame in self.channel.receive():
            self.silent = 0
            yield frame
        # count at most one second per call: during a freeze of the machine, the courier is not to
        # blame
        if time.monotonic() - self._counted >= TURN_INTERVAL:
            self._counted = time.monotonic()
            self.silent += 1

    @property
    def leaves(self) -> bool:
        """Whether it gets no more deliveries."""
        return self.leave_at < math.inf

    def leave(self, seconds: float) -> None:
        """Give it no more deliveries, and these seconds at most for the attempts under way."""
        self.leave_at = min(self.leave_at, time.monotonic() + seconds)

    def end(self) -> int:
        """Kill it, unless it has ended; return its exit code, negative for a signal."""
        import subprocess  # noqa: PLC0415 - not needed before a courier runs

        self.channel.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(REAP_SECONDS)
        return -9  # a thread hangs in a disk: the process ends when the disk answers


def _started(
    end: socket.socket, variables: Mapping[str, str], lock: int | None
) -> "subprocess.Popen[bytes]":
    import subprocess  # noqa: PLC0415 - not needed if there is nothing to deliver

    # -P: no module is imported from the working directory
    command, own = [sys.executable, "-P", "-m", "notbefore.courier"], dict(variables)
    if sys.platform != "win32":
        # the courier holds it, but no program that it starts
        passed = [] if lock is None else [lock]
        return subprocess.Popen(command, env=own, stdin=end.fileno(), pass_fds=passed)  # noqa: S603 - our own module
    # on Windows a socket cannot be the standard input: its data goes through a pipe. The courier
    # has its own console, so that Ctrl-C reaches only the agent, which ends the courier
    flags = subprocess.CREATE_NO_WINDOW
    own["PYTHONIOENCODING"] = "utf-8"  # of its log, as that of the agent
    process = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, creationflags=flags)  # noqa: S603 - as above
    if process.stdin is not None:
        with process.stdin as pipe:
            pipe.write(end.share(process.pid))
    return process
