"""``Clock``: the clocks of this machine. Nothing else in this room reads one, so that a test can step each of them."""

import time
from datetime import UTC, datetime

from msgspec import Struct

from notbefore.store.confirmed_time import boot_id, uptime


class Instant(Struct, frozen=True):
    """One moment on each clock."""

    wall: datetime  # UTC; somebody may set it
    monotonic: float  # seconds; may stand still while the VM is frozen
    boot: float  # seconds since the boot, those of a suspension included, where the system counts them

    def since(self, earlier: "Instant") -> float:
        """Seconds from ``earlier`` to this instant: what the clock that moved most says.

        Over a freeze a clock may stand still and be put right afterwards, or not; none moves on by itself.
        """
        wall = (self.wall - earlier.wall).total_seconds()
        return max(wall, self.monotonic - earlier.monotonic, self.boot - earlier.boot)


class Clock:
    """The clocks as they are; ``boot_id`` tells this boot of the machine from another."""

    def __init__(self) -> None:
        self.boot_id = boot_id()

    def now(self) -> datetime:
        """The wall clock, in UTC."""
        return datetime.now(UTC)

    def time(self) -> float:
        """The wall clock, in Unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some moment in the past."""
        return time.monotonic()

    def boot_time(self) -> float:
        """Seconds since the boot, those in which the machine was suspended included where the system counts them."""
        return uptime()

    def read(self) -> Instant:
        """This moment on each clock."""
        return Instant(self.now(), self.monotonic(), self.boot_time())
