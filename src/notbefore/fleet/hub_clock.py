"""``HubClock``: the hub's time, independent of this machine's clock.

If the machine's clock is an hour ahead, or is set, no VM becomes silent and no event ends.
"""

import time
from collections.abc import Callable
from typing import Final

TRUSTED: Final = 600.0  # seconds after which a record may also set the clock back


class HubClock:
    """The time of the newest record of any partition, plus the seconds since that record came.

    ``monotonic`` returns seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ahead: float | None = None  # the hub's Unix time minus the monotonic time
        self._heard = 0.0  # monotonic seconds at which ``_ahead`` was set

    def hear(self, enqueued: float) -> None:
        """Note that a record has just come.

        ``enqueued``: when the hub accepted it, in Unix seconds.
        """
        if self._monotonic() - self._heard > TRUSTED:
            self._ahead = None
        self.advance_to(enqueued)

    def advance_to(self, hub_time: float) -> None:
        """Note that the hub's clock shows ``hub_time`` (Unix seconds) or a later time."""
        now = self._monotonic()
        ahead = hub_time - now
        if self._ahead is None or ahead >= self._ahead:
            self._ahead = ahead
            self._heard = now

    def now(self) -> float:
        """Return the hub's time in Unix seconds, or somewhat less.

        Until a record has come, it is the time of this machine.
        """
        if self._ahead is None:
            return time.time()
        return self._ahead + self._monotonic()
