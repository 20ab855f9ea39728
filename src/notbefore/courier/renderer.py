"""The process that renders the user's templates: ``python -m notbefore.courier.renderer``.

A template is a program. One that needs too much time or memory ends this process, and nothing
else. ``RenderProcess`` in the courier starts it, and kills it when it takes too long. When the
courier has ended, the closed socket ends it, or the limit of its work.
"""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from notbefore.config.template import MAX_SECONDS, RenderError, Template, link_values, record_values
from notbefore.courier.child import take_socket
from notbefore.courier.frames import FrameSocket, wait_for_frame

MAX_MEMORY: Final = 128 * 1024 * 1024  # bytes of data
MAX_WORK: Final = MAX_SECONDS + 1  # seconds of work on one text, if its own bound does not hold
NO_VALUES: Final[Mapping[str, Any]] = {"links": {}, "record": {}}
LONG_WAIT: Final = 60.0  # seconds


class RenderRequest(Struct, frozen=True):
    """A template, and the variables that it sees."""

    source: str
    values: dict[str, Any]


class RenderAnswer(Struct, frozen=True):
    """The text that a template makes, or why it makes none."""

    text: str | None = None
    error: str = ""


class Renderer:
    """Renders templates in this process, and keeps them. For one thread."""

    def __init__(self) -> None:
        self._templates: dict[str, Template] = {}  # by source

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """Return the text of a template; raises ``RenderError``."""
        template = self._templates.get(source)
        if template is None:
            template = Template(source)
            self._templates[source] = template
        links = link_values(values["links"])
        record = record_values(values["record"])
        return template.render({**values, "links": links, "record": record})


def main() -> None:
    """Answer the requests of the courier. Raises ``ConnectionError`` once it has ended."""
    frames = take_socket()
    _limit_memory()
    renderer = Renderer()
    renderer.render("{{ range(1) | join }}", NO_VALUES)  # the first one takes longest
    frames.send(RenderAnswer())  # it is ready
    while True:
        wait_for_frame(LONG_WAIT, frames)
        for frame in frames.receive():
            _answer(renderer, frames, frame)


def _limit_memory() -> None:
    """Limit the memory of this process, where the system can; systemd's unit has a limit too."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - there is none on Windows

    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))


def _limit_work(seconds: float) -> None:
    """Let the system end this process after so many seconds of work; 0: no longer."""
    if sys.platform != "win32":  # there only the courier ends it
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends a process


def _answer(renderer: Renderer, frames: FrameSocket, frame: bytes) -> None:
    request = msgspec.msgpack.decode(frame, type=RenderRequest)
    _limit_work(MAX_WORK)
    try:
        answer = RenderAnswer(renderer.render(request.source, request.values))
    except RenderError as error:
        answer = RenderAnswer(error=str(error))
    _limit_work(0.0)
    frames.send(answer)
    while frames.unsent:
        wait_for_frame(LONG_WAIT, frames)
        frames.flush()


if __name__ == "__main__":
    with suppress(ConnectionError):
        main()
    os._exit(0)
