"""``HubClock``: what time it is by the hub, whatever the clock of this machine says.

Where a partition is quiet, time passes by the newest record of any partition, and the seconds since it came. A clock of
the machine that is an hour ahead, or is set, makes no VM silent and ends no event.
"""

import time
from collections.abc import Callable
from typing import Final

TRUSTED: Final = 600.0  # seconds for which the newest record counts: then one that seems older does


class HubClock:
    """``hear`` of each record; ``monotonic`` is in seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ahead: float | None = None  # the hub's Unix time, less the monotonic time
        self._heard = 0.0

    def hear(self, enqueued: float) -> None:
        """Note a record that has come just now, and that the hub took in at ``enqueued``, in Unix seconds."""
        now = self._monotonic()
        ahead = enqueued - now
        if self._ahead is None or ahead >= self._ahead or now - self._heard > TRUSTED:
            self._ahead, self._heard = ahead, now

    def now(self) -> float:
        """The hub's time in Unix seconds, or somewhat less; this machine's, where no record has come yet."""
        return time.time() if self._ahead is None else self._ahead + self._monotonic()
