"""A courier as a process: how it is started, told what to do, heard, and ended."""

import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from contextlib import closing, suppress
from typing import Any, Final, Protocol

from notbefore.delivery.orders import BEAT, Orders, seal


class CourierProcess(Protocol):
    """A courier that runs. Nothing here waits, but for ``reap``."""

    pid: int
    started: float  # monotonic seconds

    @property
    def beats(self) -> Any:
        """What to watch for reading: its signs of life, and its end."""

    @property
    def missed(self) -> int:
        """Ticks in a row without a sign of life."""

    def say(self, what: bytes) -> None:
        """Write to its standard input, if it still reads."""

    def gone(self) -> bool:
        """It has ended. Takes in its signs of life as well."""

    def kill(self) -> None:
        """End it."""

    def reap(self) -> int:
        """Wait for its end, which is near; returns the exit code, negative for a signal."""


class SpawnedChild:
    """By ``posix_spawn``: ``subprocess`` would cost the agent half a megabyte."""

    def __init__(self, orders: Orders) -> None:
        line = seal(orders, dict(os.environ))
        stdin_read, self._stdin = os.pipe()
        self.beats, stdout_write = os.pipe()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self.beats, False)
        self._beating = MissedBeats()
        self.started = time.monotonic()
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                command(),
                environment(orders),
                file_actions=[(os.POSIX_SPAWN_DUP2, stdin_read, 0), (os.POSIX_SPAWN_DUP2, stdout_write, 1)],
            )
        except OSError:
            self._close()
            raise
        finally:
            os.close(stdin_read)
            os.close(stdout_write)
        self.say(line)

    @property
    def missed(self) -> int:
        """See ``CourierProcess``."""
        return self._beating.missed

    def say(self, what: bytes) -> None:
        """See ``CourierProcess``; never waits: what does not fit is left out."""
        with suppress(OSError):
            os.write(self._stdin, what)

    def gone(self) -> bool:
        """Its end of the pipe is closed."""
        with suppress(BlockingIOError):
            beats = os.read(self.beats, 4096)
            self._beating.felt()
            return not beats
        self._beating.tick()
        return False

    def kill(self) -> None:
        """See ``CourierProcess``."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """See ``CourierProcess``."""
        self._close()
        self.kill()  # where it has closed its pipe and lives on; one that has ended is not hurt
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _close(self) -> None:
        for descriptor in (self._stdin, self.beats):
            with suppress(OSError):
                os.close(descriptor)


class PopenChild:
    """Where there is no ``posix_spawn``, and where pipes cannot be waited for (Windows); see ``CourierProcess``.

    Two threads stand between the pipes and the agent's main thread: one turns the signs of life into what ``select``
    takes, one writes, so that nobody waits for a courier to read.
    """

    def __init__(self, orders: Orders) -> None:
        import subprocess  # noqa: PLC0415 - only where there is nothing lighter

        line = seal(orders, dict(os.environ))
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command(),
            env=environment(orders),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # a console of its own: Ctrl-C is for the agent, which tells the courier; and no window
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        self.pid = self._process.pid
        self.started = time.monotonic()
        self._beating = MissedBeats()
        self._words: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.beats, self._from_pipe = socket.socketpair()
        self.beats.settimeout(0)
        for work, name in ((self._hand_on, "courier-beats"), (self._write, "courier-orders")):
            threading.Thread(target=work, name=name, daemon=True).start()
        self.say(line)

    @property
    def missed(self) -> int:
        """See ``CourierProcess``."""
        return self._beating.missed

    def say(self, what: bytes) -> None:
        """See ``CourierProcess``."""
        self._words.put(what)

    def gone(self) -> bool:
        """See ``CourierProcess``."""
        with suppress(BlockingIOError):
            beats = self.beats.recv(4096)
            self._beating.felt()
            return not beats
        self._beating.tick()
        return False

    def kill(self) -> None:
        """See ``CourierProcess``."""
        with suppress(OSError):
            self._process.kill()

    def reap(self) -> int:
        """See ``CourierProcess``."""
        self._words.put(None)
        self.kill()
        code = self._process.wait()
        self.beats.close()
        return code

    def _hand_on(self) -> None:
        pipe = self._process.stdout
        if pipe is None:
            return
        with closing(pipe), closing(self._from_pipe), suppress(OSError):
            while beats := os.read(pipe.fileno(), 4096):
                self._from_pipe.sendall(beats)

    def _write(self) -> None:
        pipe = self._process.stdin
        if pipe is None:
            return
        with suppress(OSError), closing(pipe):  # closing what cannot be written any more fails as well
            while (words := self._words.get()) is not None:
                pipe.write(words)


class MissedBeats:
    """Counts the ticks without a sign of life of a courier."""

    def __init__(self) -> None:
        self.missed = 0
        self._ticked = time.monotonic()

    def felt(self) -> None:
        """A sign of life."""
        self.missed = 0

    def tick(self) -> None:
        """None at this look."""
        # a freeze of the whole machine is no reason: only ticks of ours are counted, not seconds
        if time.monotonic() - self._ticked >= BEAT:
            self._ticked = time.monotonic()
            self.missed += 1


def command() -> list[str]:
    """The courier's command line; -P: what lies in the working directory is not run."""
    return [sys.executable, "-P", "-m", "notbefore.delivery"]


def start(orders: Orders) -> CourierProcess:
    """A courier with these orders; raises ``OSError`` where none can be started."""
    if hasattr(os, "posix_spawn"):
        return SpawnedChild(orders)
    return PopenChild(orders)


def environment(orders: Orders) -> dict[str, str]:
    """The agent's, without what holds a secret: what the courier needs of them goes through the pipe."""
    hidden = {secret.variable for sink in orders.sinks.values() for secret in sink.secrets.values()} | {*orders.hidden}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and not name.startswith("NOTBEFORE_") and not _OTLP_HEADERS.fullmatch(name)
    }


_OTLP_HEADERS: Final = re.compile("OTEL_EXPORTER_OTLP_(.*_)?HEADERS")  # whether they are used or not
