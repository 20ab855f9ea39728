"""``HubClock``: what time it is by the hub, whatever the clock of this machine says. Pure.

The fold goes by the times at which the hub took records in. Where a partition is quiet, time passes there as well: by
the newest record of any partition, and the seconds since it came. A clock of the machine that is an hour ahead, or is
set, makes no VM silent and ends no event.
"""

from typing import Final

TRUSTED: Final = 600.0  # seconds for which the newest record counts: then one that seems older does


class HubClock:
    """``hear`` of each record; times in seconds."""

    def __init__(self) -> None:
        self._ahead: float | None = None  # the hub's Unix time, less the monotonic time
        self._heard = 0.0

    def hear(self, enqueued: float, monotonic: float) -> None:
        """Note a record that the hub took in at ``enqueued``, in Unix seconds, and that came by ``monotonic``."""
        ahead = enqueued - monotonic
        if self._ahead is None or ahead >= self._ahead or monotonic - self._heard > TRUSTED:
            self._ahead, self._heard = ahead, monotonic

    def now(self, monotonic: float, wall: float) -> float:
        """The hub's time in Unix seconds, or somewhat less; ``wall``, this machine's, where no record has come yet."""
        return wall if self._ahead is None else self._ahead + monotonic
