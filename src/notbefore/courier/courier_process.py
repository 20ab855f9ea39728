"""One courier as a process: started, given its orders, listened to, ended.

Where there is ``posix_spawn`` it is started with it: ``subprocess`` would cost the agent half a megabyte. Elsewhere
(Windows) ``subprocess`` starts it, and two threads stand between its pipes and the agent's main thread, because
``select`` takes only sockets there.
"""

import os
import queue
import re
import select
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, Final

from msgspec.structs import replace

from notbefore.courier.orders import SIGN_INTERVAL, TROUBLE, Orders, seal
from notbefore.courier.package import COPY, FROM_COPY, FROM_DISK
from notbefore.store.agent_outbox import receive, send
from notbefore.store.lock import is_zombie

CHANNEL: Final = COPY + 1  # the file descriptor of a courier over which it asks for the outbox
REAP_SECONDS: Final = 1.0  # for the end of a process that was killed


def start_courier(orders: Orders, copy: int | None = None, *, in_agent: bool = False) -> "CourierProcess":
    """Start a courier with these orders; raises ``OSError`` or ``ConfigError``.

    ``copy``: the file descriptor of the package that it is started from, where that on disk is another one.
    ``in_agent``: the outbox is in this process.
    """
    light = hasattr(os, "posix_spawn")
    orders = replace(orders, channel=CHANNEL if light else None, in_agent=in_agent)
    line = seal(orders, dict(os.environ))
    variables = environment(orders)
    courier = _Spawned(variables, copy, in_agent) if light else _Piped(variables, in_agent)
    courier.send(line)
    return courier


class CourierProcess(ABC):
    """One courier, of which only ``reap`` waits."""

    pid: int
    signs: Any  # what to watch for reading: its signs of life, and its end
    requests: socket.socket | None = None  # what to watch for reading: it asks for the outbox that is in this process

    def __init__(self, in_agent: bool) -> None:  # noqa: FBT001 - of two classes in this module
        self.in_agent = in_agent  # it knows that the outbox is in this process
        self.started = self._counted = time.monotonic()  # seconds
        self.missed = 0  # seconds in a row without a sign of life
        self.in_trouble = False  # it could not use the outbox just now

    @property
    def descriptors(self) -> list[Any]:
        """What to watch for reading."""
        return [self.signs] if self.requests is None else [self.signs, self.requests]

    def serve(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer its requests, if there are any; one that is not whole after a second ends that."""
        while self.requests is not None and select.select([self.requests], [], [], 0)[0]:
            try:
                request = receive(self.requests)
                send(self.requests, answer(request))
            except OSError:  # it has ended, or is ended soon, since it shows no signs of life
                return

    def has_ended(self) -> bool:
        """It has closed its end of the pipe. Takes in its signs of life as well."""
        try:
            signs = self._read()
        except BlockingIOError:
            # a freeze of the whole machine is no reason: only seconds in which we ran are counted
            if time.monotonic() - self._counted >= SIGN_INTERVAL:
                self._counted = time.monotonic()
                self.missed += 1
            return self.missed > 0 and is_zombie(self.pid)
        self.missed = 0
        self.in_trouble = TROUBLE in signs
        return not signs

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Write to its standard input, if it still reads; what does not fit is left out."""

    @abstractmethod
    def reap(self) -> int:
        """End it, and wait for its end; returns the exit code, negative for a signal."""

    @abstractmethod
    def _read(self) -> bytes:
        """What it has written; nothing where it has ended. Raises ``BlockingIOError`` where nothing is there yet."""


class _Spawned(CourierProcess):
    """Started by ``posix_spawn``, with pipes that do not block."""

    def __init__(self, variables: dict[str, str], copy: int | None, in_agent: bool) -> None:  # noqa: FBT001 - as above
        super().__init__(in_agent)
        stdin_read, self._stdin = os.pipe()
        self.signs, stdout_write = os.pipe()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self.signs, False)
        self.requests, channel = socket.socketpair()
        self.requests.settimeout(SIGN_INTERVAL)
        actions = [
            (os.POSIX_SPAWN_DUP2, stdin_read, 0),
            (os.POSIX_SPAWN_DUP2, stdout_write, 1),
            (os.POSIX_SPAWN_DUP2, channel.fileno(), CHANNEL),
        ]
        if copy is not None:
            actions.append((os.POSIX_SPAWN_DUP2, copy, COPY))
        try:
            self.pid = os.posix_spawn(sys.executable, command(copy), variables, file_actions=actions)
        except OSError:
            self._close()
            raise
        finally:
            os.close(stdin_read)
            os.close(stdout_write)
            channel.close()

    def send(self, message: bytes) -> None:
        with suppress(OSError):
            os.write(self._stdin, message)

    def _read(self) -> bytes:
        return os.read(self.signs, 4096)

    def reap(self) -> int:
        self._close()
        with suppress(ProcessLookupError):  # it may have closed its pipe and live on; one that has ended is not hurt
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + REAP_SECONDS
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return -signal.SIGKILL  # a thread of it hangs in the disk: it is gone when that answers

    def _close(self) -> None:
        if self.requests is not None:
            self.requests.close()
        for descriptor in (self._stdin, self.signs):
            with suppress(OSError):
                os.close(descriptor)


class _Piped(CourierProcess):
    """Started by ``subprocess``: one thread turns its signs of life into what ``select`` takes, one writes."""

    def __init__(self, variables: dict[str, str], in_agent: bool) -> None:  # noqa: FBT001 - as above
        super().__init__(in_agent)
        import subprocess  # noqa: PLC0415 - only where there is nothing lighter

        self._process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command(),
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # a console of its own: Ctrl-C is for the agent, which ends the courier; and no window
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        self.pid = self._process.pid
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.signs, self._from_pipe = socket.socketpair()
        self.signs.settimeout(0)
        for work, name in ((self._forward_signs, "courier-signs"), (self._write_messages, "courier-orders")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def send(self, message: bytes) -> None:
        self._messages.put(message)

    def _read(self) -> bytes:
        signs: bytes = self.signs.recv(4096)
        return signs

    def reap(self) -> int:
        self._messages.put(None)
        with suppress(OSError):
            self._process.kill()
        code = self._process.wait()
        self.signs.close()
        return code

    def _forward_signs(self) -> None:
        pipe = self._process.stdout
        if pipe is None:
            return
        with closing(pipe), closing(self._from_pipe), suppress(OSError):
            while signs := os.read(pipe.fileno(), 4096):
                self._from_pipe.sendall(signs)

    def _write_messages(self) -> None:
        pipe = self._process.stdin
        if pipe is None:
            return
        with suppress(OSError), closing(pipe):  # closing what cannot be written any more fails as well
            while (message := self._messages.get()) is not None:
                pipe.write(message)


def command(copy: int | None = None) -> list[str]:
    """The courier's command line. -P: no module is imported from the working directory."""
    return [sys.executable, "-P", *(FROM_DISK if copy is None else FROM_COPY)]


def environment(orders: Orders) -> dict[str, str]:
    """The agent's variables less those that hold a secret: what the courier needs of them goes through the pipe."""
    hidden = {secret.variable for sink in orders.sinks.values() for secret in sink.secrets.values()} | {*orders.hidden}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and not name.startswith("NOTBEFORE_") and not _OTLP_HEADERS.fullmatch(name)
    }


_OTLP_HEADERS: Final = re.compile("OTEL_EXPORTER_OTLP_(.*_)?HEADERS")  # whether they are used or not
