"""``PopenChild``: a courier where there is no ``posix_spawn``, and where pipes cannot be waited for (Windows).

Two threads stand between the pipes and the agent's main thread: one turns the signs of life into what ``select`` takes,
one writes, so that nobody waits for a courier to read.
"""

import os
import queue
import socket
import subprocess
import threading
import time
from contextlib import closing, suppress

from notbefore.agent.courier import MissedBeats, command, environment
from notbefore.delivery.orders import Orders, seal


class PopenChild:
    """See ``dispatcher.Child``."""

    def __init__(self, orders: Orders) -> None:
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
        """See ``Child``."""
        return self._beating.missed

    def say(self, what: bytes) -> None:
        """See ``Child``."""
        self._words.put(what)

    def gone(self) -> bool:
        """See ``Child``."""
        with suppress(BlockingIOError):
            beats = self.beats.recv(4096)
            self._beating.felt()
            return not beats
        self._beating.tick()
        return False

    def kill(self) -> None:
        """See ``Child``."""
        with suppress(OSError):
            self._process.kill()

    def reap(self) -> int:
        """See ``Child``."""
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
