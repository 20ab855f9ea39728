"""``Instant``: one moment as several clocks show it, and the time between two such moments.

No clock of a VM can be trusted alone. The wall clock may be set by NTP or by hand. The time since
the boot (``uptime``) cannot be set, but it stops while the host pauses the VM. The ``Date`` header
of an answer is the host's clock, in whole seconds. A duration is known only if two clocks agree on
it.
"""

from datetime import datetime, timedelta
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.document import read_time

# seconds by which two durations may differ and still agree: ``Date`` counts whole seconds
TOLERANCE: Final = 2.0
# the part of a duration by which they may also differ: NTP corrects by up to 500 ppm
DRIFT: Final = 0.001
# seconds by which two clocks may differ and agree: ``Date`` has whole seconds, and comes late
AGREE: Final = 3.0
# seconds between the reading of one clock and of the next, at most, on a busy machine
READING: Final = 0.5
# seconds; ``Date`` counts whole seconds, and so shows no shorter pause of the VM
SHORTEST_PAUSE: Final = 1.0
# seconds by which ``Date`` may differ from the other clocks and still be believed
MAX_DISAGREEMENT: Final = 86_400.0


class Instant(Struct, frozen=True):
    """One moment, as the clocks of this VM and of IMDS show it."""

    wall: datetime  # UTC, by this VM's wall clock, which may have been set
    boot: str = ""  # the id of the boot from which ``uptime`` counts
    # seconds since that boot, suspended time included (CLOCK_BOOTTIME); cannot be set
    uptime: float = 0.0
    # UTC, from IMDS's ``Date`` header, to compare with NotBefore; None without one
    date: datetime | None = None

    def dated(self, header: str) -> "Instant":
        """Return the same moment with IMDS's time.

        ``header``: the ``Date`` of an answer; empty if the answer has none.
        """
        if not header:
            return self
        return replace(self, date=read_time(header))

    @property
    def time(self) -> datetime:
        """UTC, by IMDS's clock; by this VM's if the two agree, or if IMDS gave no time."""
        if self.date is None:
            return self.wall
        difference = abs((self.wall - self.date).total_seconds())
        if difference <= AGREE:
            return self.wall
        return self.date


class _Passed(NamedTuple):
    """The seconds between two moments, as each clock shows them."""

    uptime: float | None  # ``None`` across boots, and if it went backwards (it cannot)
    wall: float
    date: float | None  # ``None`` if the ``Date`` of one moment is missing


class Gap(Struct, frozen=True):
    """The longest delay in waking up, in seconds, on two clocks: the agent did not run for that
    long.

    While a VM is frozen, ``uptime`` may stop and its wall clock be corrected afterwards, or both
    may run on. Neither clock alone is right on every host.
    """

    wall: float
    uptime: float


def elapsed(begin: Instant, end: Instant) -> float | None:
    """Return the seconds from ``begin`` to ``end``; ``None`` if the clocks do not agree.

    Within one boot the result is by ``uptime``, if another clock agrees. After a pause of the VM,
    which stops ``uptime``, and across boots, it is by the wall clock, if IMDS's ``Date`` agrees.
    """
    uptime, wall, date = _passed(begin, end)
    if uptime is not None:
        if date is not None and _agree(uptime, date):
            return uptime
        was_paused = date is not None and date > uptime
        if _agree(uptime, wall) and was_paused:
            return None
        if _agree(uptime, wall):
            return uptime

    if date is not None and _agree(wall, date) and wall >= (uptime or 0.0):
        return max(0.0, wall)
    return None


def silence(begin: Instant, end: Instant) -> float | None:
    """Return the seconds in which something may have happened unseen; ``None`` if unknown.

    They are the most that a believed clock shows. Within one boot the wall clock is never the
    result: it only decides whether another clock is believed.
    """
    passed = _passed(begin, end)
    if begin.date is not None and passed.date is None:
        return None  # ``Date`` is missing now: it might show a pause of the VM
    if passed.uptime is None or passed.date is None:
        return elapsed(begin, end)
    if _agree(passed.uptime, passed.date):
        return passed.uptime
    return max(passed.uptime, passed.date)


def believable(gap: Gap, begin: Instant, end: Instant) -> float | None:
    """Return the delay between two answers, in seconds, on the clock that can be right.

    ``None`` if it is unknown.

    The delay on the wall clock is longer than that on ``uptime`` in two cases: ``uptime`` stopped
    in a pause of the VM, or the wall clock was set. ``Date`` tells the cases apart, because only in
    a pause does it also gain on ``uptime``. A clock that was set may be set back, so its lead may
    be gone at ``end``.
    """
    uptime, wall, date = _passed(begin, end)
    if uptime is None:
        return None

    longest = max(gap.wall, gap.uptime)  # either clock may have stopped
    wall_lead = wall - uptime  # seconds that the wall clock has gained
    most_lead = max(wall_lead, gap.wall - gap.uptime)  # at the end, or at the longest delay
    drift = READING + DRIFT * uptime  # the most that a clock gains without being set
    if date is None:
        if wall_lead < -drift or most_lead > drift:
            return None
        return longest

    pause = date - uptime  # seconds for which ``uptime`` stopped, to within a second
    if pause > longest + TOLERANCE:  # a pause that neither clock shows
        return None
    if most_lead <= drift:
        return longest

    has_paused = pause >= SHORTEST_PAUSE
    is_lead_of_pause = most_lead <= pause + TOLERANCE
    if is_lead_of_pause and has_paused:
        return longest
    if is_lead_of_pause or has_paused:  # the wall clock was set: it does not show the pause
        return None
    return gap.uptime


def credible(now: Instant, before: Instant | None) -> bool:
    """Whether ``Date`` may be right: it is within a day of the wall clock, or it has advanced as
    ``uptime`` has.

    ``before``: the last answer whose ``Date`` was believed.
    """
    if now.date is None or _within_a_day(now.date, now.wall):
        return True
    if before is None or before.date is None:
        return False
    uptime = _passed(before, now).uptime
    if uptime is None:
        return False
    return _within_a_day(now.date, before.date + timedelta(seconds=uptime))


def _within_a_day(time: datetime, other: datetime) -> bool:
    return abs((time - other).total_seconds()) <= MAX_DISAGREEMENT


def _passed(begin: Instant, end: Instant) -> _Passed:
    uptime = None
    if begin.boot == end.boot and end.uptime >= begin.uptime:
        uptime = end.uptime - begin.uptime
    wall = (end.wall - begin.wall).total_seconds()
    date = None
    if begin.date is not None and end.date is not None:
        date = (end.date - begin.date).total_seconds()
    return _Passed(uptime, wall, date)


def _agree(seconds: float, other: float) -> bool:
    return abs(seconds - other) <= TOLERANCE + DRIFT * abs(seconds)
