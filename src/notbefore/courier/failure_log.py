"""``FailureLog``: a sink that fails is logged once, and then counted once a minute with its newest cause."""

import logging
from collections.abc import Callable
from typing import Final

from msgspec import Struct

EVERY: Final = 60.0  # seconds between two counts

log = logging.getLogger("notbefore.courier")


class Failure(Struct, frozen=True):
    """One attempt that failed."""

    sink: str
    level: int  # of ``logging``
    text: str  # the line for the first one
    cause: str  # what the receiver said, without secrets


class FailureLog:
    """``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._more: dict[tuple[str, int], tuple[int, str]] = {}  # sink and level -> how many since, the newest cause
        self._counted = clock()

    def failed(self, failure: Failure) -> None:
        """Log the first failure of a sink; the next ones are counted."""
        key = (failure.sink, failure.level)
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
        for (sink, level), (number, cause) in self._more.items():
            if number:
                more = f"{number} more deliver{'y' if number == 1 else 'ies'} failed"
                log.log(level, "sink %s: %s (the last one: %s)", sink, more, cause)
                self._more[sink, level] = (0, cause)
