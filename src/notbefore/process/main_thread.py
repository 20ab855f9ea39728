"""``MainThread``: the main thread of an always-on process waits here for signals, other threads,
and its courier.
"""

import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Final, NoReturn, Self

log = logging.getLogger("notbefore.process")


def _not_reloaded() -> None:
    log.warning("SIGHUP: the configuration is read only at the start: restart to use a new one")


class MainThread:
    """While it is entered, SIGTERM and SIGINT end ``wait``.

    SIGHUP calls ``on_hangup``, and ends it too.
    """

    def __init__(self, on_hangup: Callable[[], None] = _not_reloaded) -> None:
        self._on_hangup = on_hangup
        taken = _STOPS if _SIGHUP is None else (*_STOPS, _SIGHUP)
        # the number of the signal comes through the socket
        self._handlers: dict[int, Any] = dict.fromkeys(taken, lambda *_: None)
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.settimeout(0)

    def __enter__(self) -> Self:
        self._exchange_handlers()
        self._wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_fd)
        self._exchange_handlers()
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """End the present or next ``wait``. Called from any thread; never waits."""
        with suppress(OSError):
            self._writer.send(b"\0")  # no signal has the number 0

    def wait(
        self, seconds: float, descriptors: Iterable[Any] = (), unsent: Collection[Any] = ()
    ) -> bool:
        """Wait for a signal, for ``wake``, or until one of ``descriptors`` is readable, at most
        ``seconds``.

        A writable one of ``unsent`` ends it as well. Returns whether a signal asks the process to
        stop.
        """
        if self._reader not in wait_for(seconds, [self._reader, *descriptors], unsent):
            return False
        with suppress(BlockingIOError):
            # many SIGHUPs are one, and none is before a signal to stop
            numbers = {*self._reader.recv(4096)}
            for number in numbers.intersection(_STOPS):
                log.info("%s: stopping", signal.Signals(number).name)
                return True
            if _SIGHUP in numbers:
                self._on_hangup()
        return False

    def _exchange_handlers(self) -> None:
        self._handlers = {
            number: signal.signal(number, handler) for number, handler in self._handlers.items()
        }


def wait_for(seconds: float, readers: Iterable[Any], unsent: Collection[Any] = ()) -> list[Any]:
    """Wait until one of ``readers`` is readable, or writable if it is ``unsent``, at most
    ``seconds``; return those.
    """
    with _Selector() as selector:
        for one in readers:
            selector.register(
                one, selectors.EVENT_READ | (selectors.EVENT_WRITE if one in unsent else 0)
            )
        return [key.fileobj for key, _ in selector.select(seconds)]


def exit_at_once(code: int) -> NoReturn:
    """End the process while a disk hangs: a normal exit would close files, and SQLite would wait
    for the disk.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


_SIGHUP: Final[int | None] = getattr(signal, "SIGHUP", None)  # not on Windows
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
# not `select`: it takes no descriptor above 1,023, and the listener may have more connections.
# Windows has no `poll`
_Selector: Final = getattr(selectors, "PollSelector", selectors.SelectSelector)
