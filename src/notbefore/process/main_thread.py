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

SIGHUP: Final[int | None] = getattr(signal, "SIGHUP", None)  # not on Windows
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

# not `select`: it takes no descriptor above 1,023, and the listener may have more connections.
# Windows has no `poll`
_Selector: Final = getattr(selectors, "PollSelector", selectors.SelectSelector)

log = logging.getLogger("notbefore.process")


def _log_no_reload() -> None:
    log.warning("SIGHUP: the configuration is read only at the start: restart to use a new one")


def _do_nothing(_number: int, _frame: object) -> None:
    """Let Python write the number of the signal to the wake-up socket."""


class MainThread:
    """SIGTERM and SIGINT end ``wait`` while it is entered.

    SIGHUP calls ``on_hangup``, and ends it too.
    """

    def __init__(self, on_hangup: Callable[[], None] = _log_no_reload) -> None:
        self._on_hangup = on_hangup
        self._other_handlers: dict[int, Any] = {}  # of the process, while this one is not entered
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)

    def __enter__(self) -> Self:
        numbers: list[int] = [*STOP_SIGNALS]
        if SIGHUP is not None:
            numbers.append(SIGHUP)
        for number in numbers:
            self._other_handlers[number] = signal.signal(number, _do_nothing)
        self._other_wakeup_fd = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._other_wakeup_fd)
        for number, handler in self._other_handlers.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """End the present or next ``wait``. Called from any thread; never waits."""
        with suppress(OSError):
            self._writer.send(b"\0")  # no signal has the number 0

    def wait(
        self, seconds: float, descriptors: Iterable[Any] = (), unsent: Collection[Any] = ()
    ) -> bool:
        """Wait for a signal or for ``wake``, at most ``seconds``.

        A readable one of ``descriptors`` also ends the wait, and so does a writable one of
        ``unsent``, if it is also among ``descriptors``. Returns whether a signal asks the process
        to stop.
        """
        ready = wait_for(seconds, [self._reader, *descriptors], unsent)
        if self._reader not in ready:
            return False
        try:
            numbers = set(self._reader.recv(4096))  # several SIGHUPs count as one
        except BlockingIOError:
            return False

        for number in numbers.intersection(STOP_SIGNALS):  # before SIGHUP
            log.info("%s: stopping", signal.Signals(number).name)
            return True
        if SIGHUP in numbers:
            self._on_hangup()
        return False


def wait_for(seconds: float, readers: Iterable[Any], unsent: Collection[Any] = ()) -> list[Any]:
    """Return those of ``readers`` that are readable; wait for one, at most ``seconds``.

    Those that are also in ``unsent`` may be writable instead.
    """
    with _Selector() as selector:
        for reader in readers:
            events = selectors.EVENT_READ
            if reader in unsent:
                events |= selectors.EVENT_WRITE
            selector.register(reader, events)
        return [key.fileobj for key, _ in selector.select(seconds)]


def exit_at_once(code: int) -> NoReturn:
    """End the process while a disk hangs.

    A normal exit would close files, and SQLite would wait for the disk.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
