"""``RenderProcess`` renders the user's templates in a process of its own, for all sinks.

So a template that needs too much time or memory delays no other sink: its process is killed, and
the message has the built-in text.
"""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from notbefore.config.template import RenderError
from notbefore.courier.child import start_child
from notbefore.courier.frames import FrameSocket, wait_for_frame
from notbefore.courier.renderer import RenderAnswer, RenderRequest

MODULE: Final = "notbefore.courier.renderer"
START_SECONDS: Final = 8.0  # for the start of the process
RENDER_SECONDS: Final = 10.0  # for one text: the process ends itself after two seconds of work
REAP_SECONDS: Final = 1.0  # to wait for the end of a killed process


class RenderProcess:
    """The process of one courier. It starts with the first template. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one text after the other
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: FrameSocket | None = None
        self._hung: set[str] = set()  # the templates that had to be killed

    @property
    def pid(self) -> int | None:
        """The id of the process; ``None`` if it does not run."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """Return the text of a template; raises ``RenderError``.

        A template that had to be killed is not tried again.
        """
        with self._lock:
            if source in self._hung:
                raise RenderError("it needed too much time or memory before")
            frames = self._connected()
            try:
                answer = self._ask(frames, source, values)
            except ConnectionError:
                self._hung.add(source)
                self._end()
                raise RenderError("it needs too much time or memory") from None
        if answer.text is None:
            raise RenderError(answer.error)
        return answer.text

    def _connected(self) -> FrameSocket:
        """Return the connection to the process, which is started if it does not run."""
        if self._process is not None and self._process.poll() is not None:
            self._end()  # the system has killed it between two texts
        if self._frames is not None:
            return self._frames
        ours, theirs = socket.socketpair()
        self._frames = FrameSocket(ours)
        try:
            with theirs:
                self._process = start_child(MODULE, theirs, os.environ)
            _read(self._frames, START_SECONDS)
        except OSError as error:
            self._end()
            raise RenderError(f"the process for templates does not start: {error}") from None
        return self._frames

    def _ask(self, frames: FrameSocket, source: str, values: Mapping[str, Any]) -> RenderAnswer:
        frames.send(RenderRequest(source, dict(values)))
        return _read(frames, RENDER_SECONDS)

    def _end(self) -> None:
        """Kill the process."""
        if self._frames is not None:
            self._frames.close()
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_SECONDS)
        self._frames = None
        self._process = None


def _read(frames: FrameSocket, seconds: float) -> RenderAnswer:
    """Wait for an answer. Raises ``ConnectionError`` if there is none."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        wait_for_frame(left, frames)
        frames.flush()
        for frame in frames.receive():
            return msgspec.msgpack.decode(frame, type=RenderAnswer)
    raise ConnectionError("no answer in time")
