"""``ThreadGuard``: an unforeseen exception does not end a thread.

It is logged and counted, and the work goes on.
"""

import logging
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
    """Guards the loops of the agent's threads. ``give_up`` is called if the process has to end.

    It may not wait.
    """

    def __init__(self, give_up: Callable[[], None] = lambda: None) -> None:
        self.given_up = False  # the process is to end with an exit code that has it restarted
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
            self._caught(name, error)
            if vital and self._in_a_row[name] >= MAX_IN_A_ROW:
                self._end(f"{name} failed {MAX_IN_A_ROW} times in a row")
            return None
        if name in self._in_a_row:
            del self._in_a_row[name]
        return result

    def thread_ended(self, arguments: threading.ExceptHookArgs) -> None:
        """Handle an exception that ended a thread without a guard.

        Used as ``threading.excepthook``.
        """
        name = arguments.thread.name if arguments.thread is not None else "unknown"
        thread = name.partition(" ")[0].partition("-")[0]
        if isinstance(arguments.exc_value, Exception):
            self._caught(name, arguments.exc_value)
            if thread != "http":  # input from the network may not end the process
                self._end(f"the thread {name} has ended")

    def _caught(self, name: str, error: Exception) -> None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = (name, f"{type(error).__name__} {frame.filename}:{frame.lineno}")
        # without a lock: two threads at the same moment may lose a count, or log a line twice
        self.count += 1
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
        if place not in self._logged:  # the same error is counted but not logged again
            self._logged.add(place)
            log.error(
                "unforeseen error in %s (%s): please report it",
                name,
                type(error).__name__,
                exc_info=error,
            )

    def _end(self, why: str) -> None:
        if not self.given_up:
            self.given_up = True
            log.error(
                "%s: the agent ends with exit code 1, so that its service manager restarts it", why
            )
            self._give_up()
