"""``ThreadGuard``: an unforeseen exception does not end a thread.

It is logged and counted, and the thread continues.
"""

import logging
import re
import threading
import traceback
from collections.abc import Callable
from typing import Final, TypeVar

# failures of the same work without a success between them, after which the process ends
MAX_IN_A_ROW: Final = 10
# seconds that the end of the process waits for a thread: it may be using a disk that hangs
THREAD_PATIENCE: Final = 0.5

T = TypeVar("T")

log = logging.getLogger("notbefore.agent")


class ThreadGuard:
    """Guards the loops of the agent's threads.

    It calls ``give_up``, which must not wait, if the process has to end.
    """

    def __init__(self, give_up: Callable[[], None] | None = None) -> None:
        # the process has to end with an exit code for which its service manager restarts it
        self.given_up = False
        self.count = 0  # unforeseen exceptions since the start of the process
        self._give_up = give_up
        self._in_a_row: dict[str, int] = {}
        # bounded by the number of places in the code that can raise
        self._logged: set[tuple[str, str]] = set()

    def attempt(self, name: str, work: Callable[[], T], *, vital: bool = True) -> T | None:
        """Return what ``work`` returns; ``None`` if it raised.

        Vital work that fails too often ends the process.
        """
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - any unforeseen exception
            self._count(name, error)
            if vital and self._in_a_row[name] >= MAX_IN_A_ROW:
                self._end(f"{name} failed {MAX_IN_A_ROW} times in a row")
            return None
        self._in_a_row.pop(name, None)
        return result

    def thread_ended(self, arguments: threading.ExceptHookArgs) -> None:
        """Handle an exception that ended a thread without a guard.

        Used as ``threading.excepthook``.
        """
        if not isinstance(arguments.exc_value, Exception):
            return
        name = "unknown"
        if arguments.thread is not None:
            name = arguments.thread.name
        self._count(name, arguments.exc_value)
        kind_of_thread = re.split("[ -]", name)[0]
        if kind_of_thread != "http":  # input from the network must not end the process
            self._end(f"the thread {name} has ended")

    def _count(self, name: str, error: Exception) -> None:
        """Count an exception, and log it unless it came from the same place before."""
        # without a lock: two threads at the same moment may lose a count, or log a line twice
        self.count += 1
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1

        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        place = (name, f"{kind} {frame.filename}:{frame.lineno}")
        if place in self._logged:
            return
        self._logged.add(place)
        text = "unforeseen error in %s (%s): please report it"
        log.error(text, name, kind, exc_info=error)

    def _end(self, reason: str) -> None:
        if self.given_up:
            return
        self.given_up = True
        text = "%s: the agent ends with exit code 1, so that its service manager restarts it"
        log.error(text, reason)
        if self._give_up is not None:
            self._give_up()
