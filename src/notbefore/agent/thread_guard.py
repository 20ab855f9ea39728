"""``ThreadGuard``: an exception that nobody foresaw ends no thread. It is logged, counted, and tried again."""

import logging
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Final, NamedTuple

MAX_IN_A_ROW: Final = 10  # failures of the same work, with no success between, after which the process ends

log = logging.getLogger("notbefore.agent")


class ThreadGuard:
    """Guards the loops of the agent's threads. ``give_up`` is called when the process has to end; it may not wait."""

    def __init__(self, give_up: Callable[[], None] = lambda: None) -> None:
        self.given_up = False  # the process is to end with an exit code that has it restarted
        self.count = 0  # of what nobody foresaw, since the start of the process
        self._give_up = give_up
        self._in_a_row: dict[str, int] = {}
        self._logged: set[tuple[str, str]] = set()  # bounded by the places of the code that can raise

    def guarded(self, thread: str, work: str = "", *, vital: bool = True) -> "Round":
        """One round of ``work`` in ``thread``; an exception ends it. Vital work that always fails ends the process."""
        return Round(self, f"{thread} {work}".rstrip(), vital)

    def ended(self, name: str, error: BaseException | None, *, vital: bool) -> bool:
        """A round has ended; returns whether ``error`` is dealt with."""
        if error is None:
            if name in self._in_a_row:
                del self._in_a_row[name]
        elif isinstance(error, Exception):
            self._caught(name, error)
            if vital and self._in_a_row[name] >= MAX_IN_A_ROW:
                self._end(f"{name} failed {MAX_IN_A_ROW} times in a row")
        return isinstance(error, Exception)

    def thread_ended(self, arguments: threading.ExceptHookArgs) -> None:
        """A thread without a guard was ended by an exception: ``threading.excepthook``."""
        name = arguments.thread.name if arguments.thread is not None else "unknown"
        thread = name.partition(" ")[0].partition("-")[0]
        if isinstance(arguments.exc_value, Exception):
            self._caught(name, arguments.exc_value)
            if thread != "http":  # what comes from the network may not end the watching
                self._end(f"the thread {name} has ended")

    def _caught(self, name: str, error: Exception) -> None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = (name, f"{type(error).__name__} {frame.filename}:{frame.lineno}")
        # without a lock: two threads in the same moment may cost a count, or a second line
        self.count += 1
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
        if place not in self._logged:  # the same error is counted, and not logged again
            self._logged.add(place)
            log.error("unforeseen error in %s (%s): please report it", name, type(error).__name__, exc_info=error)

    def _end(self, why: str) -> None:
        if not self.given_up:
            self.given_up = True
            log.error("%s: the agent ends with exit code 1, so that its service manager restarts it", why)
            self._give_up()


class Round(NamedTuple):
    """What ``guarded`` returns. There is one for each poll: a generator's context would cost a tenth of a poll."""

    guard: ThreadGuard
    name: str
    vital: bool

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Leave the exception to the guard."""
        return self.guard.ended(self.name, error, vital=self.vital)
