"""``Recent``: a value that many ask for and that is made only now and then."""

import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

Value = TypeVar("Value")

INTERVAL: Final = 0.5  # seconds; Prometheus scrapes each second at most, and the page refreshes twice a second


class Recent(Generic[Value]):
    """Gives the value that ``make`` returned at most ``interval`` seconds ago, or calls it again.

    There is no lock: two threads that find the value too old at the same moment both make it.
    """

    def __init__(self, make: Callable[[], Value], interval: float = INTERVAL) -> None:
        self._make = make
        self._interval = interval
        self._kept: tuple[float, Value] | None = None  # the end of its making, in monotonic seconds

    def get(self) -> Value:
        """The value; raises what ``make`` raises."""
        kept = self._kept
        if kept is None or time.monotonic() - kept[0] >= self._interval:
            value = self._make()
            self._kept = kept = time.monotonic(), value
        return kept[1]
