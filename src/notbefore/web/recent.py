"""``Recent``: a value that many ask for and that is made only now and then."""

import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

Value = TypeVar("Value")

INTERVAL: Final = 0.5  # seconds


class Recent(Generic[Value]):
    """Gives the value that ``make`` returned at most ``interval`` seconds ago, or calls it again.

    It is also made again when ``source`` returns another object than before: what the value is made from has changed.
    There is no lock: two threads that find the value too old at the same moment both make it.
    """

    def __init__(
        self, make: Callable[[], Value], interval: float = INTERVAL, source: Callable[[], object] = lambda: None
    ) -> None:
        self._make = make
        self._interval = interval
        self._source = source
        self._kept: tuple[float, object, Value] | None = None  # monotonic seconds, the source and the value

    def get(self) -> Value:
        """The value; raises what ``make`` raises."""
        kept, source = self._kept, self._source()
        if kept is None or source is not kept[1] or time.monotonic() - kept[0] >= self._interval:
            value = self._make()
            self._kept = kept = time.monotonic(), source, value
        return kept[2]
