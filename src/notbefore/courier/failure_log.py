"""``FailureLog``: a sink that fails is logged once for each cause, and then counted once a minute."""

import logging
import re
from collections.abc import Callable
from typing import Final

from msgspec import Struct

EVERY: Final = 60.0  # seconds between two counts
MAX_CAUSES: Final = 20  # of one sink that have a line of their own
_VARYING: Final = re.compile(r"[0-9a-f]{8,}|\d+", re.IGNORECASE)  # ids, times and ports make no other cause

log = logging.getLogger("notbefore.courier")


class Failure(Struct, frozen=True):
    """One attempt that failed."""

    sink: str
    level: int  # of ``logging``
    text: str  # the line for the first of its kind
    cause: str  # what the receiver said, without secrets


class FailureLog:
    """``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._more: dict[tuple[str, int, str], tuple[int, str]] = {}  # what was logged -> how many since, and a cause
        self._counted = clock()

    def failed(self, failure: Failure) -> None:
        """Log the first failure of a kind; the next ones are counted."""
        key = (failure.sink, failure.level, _VARYING.sub("#", failure.cause))
        if key not in self._more and sum(sink == failure.sink for sink, *_ in self._more) >= MAX_CAUSES:
            key = (failure.sink, failure.level, "")
        if key in self._more:
            self._more[key] = (self._more[key][0] + 1, failure.cause)
        else:
            self._more[key] = (0, failure.cause)
            log.log(failure.level, "%s", failure.text)

    def delivered(self, sink: str) -> None:
        """Log that a sink which has failed accepts messages again."""
        known = [key for key in self._more if key[0] == sink]
        if known:
            self.count()
            for key in known:
                del self._more[key]
            log.info("sink %s accepts messages again", sink)

    def tick(self) -> None:
        """Log the counts, once a minute."""
        if self._clock() - self._counted >= EVERY:
            self.count()

    def count(self) -> None:
        """Log how many deliveries have failed since the last time."""
        self._counted = self._clock()
        for (sink, level, kind), (number, cause) in self._more.items():
            if number:
                more = "1 more delivery" if number == 1 else f"{number} more deliveries"
                log.log(level, "sink %s: %s failed like the one before (%s)", sink, more, cause)
                self._more[sink, level, kind] = (0, cause)
