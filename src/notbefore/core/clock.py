"""``Instant``: one moment as several clocks show it, and the time between two such moments.

No clock of a VM can be trusted alone. The wall clock may be set by NTP or by hand. The time since
the boot (``uptime``) cannot be set, but it stops while the host pauses the VM. The ``Date`` header
of an answer is the host's clock, in whole seconds. A duration is known only if two clocks agree on
it.
"""

from datetime import datetime, timedelta
from typing import Final

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
        """The same moment with IMDS's time, from the ``Date`` header of an answer.

        Empty: it gave none.
        """
        return replace(self, date=read_time(header)) if header else self

    @property
    def time(self) -> datetime:
        """UTC, by IMDS's clock; by this VM's if the two agree, or if IMDS gave no time."""
        return (
            self.wall
            if self.date is None or abs((self.wall - self.date).total_seconds()) <= AGREE
            else self.date
        )


class Gap(Struct, frozen=True):
    """The longest delay in waking up, in seconds, on two clocks: the agent did not run for that
    long.

    While a VM is frozen, ``uptime`` may stop and its wall clock be corrected afterwards, or both
    may run on. Neither clock alone is right on every host.
    """

    wall: float
    uptime: float


def elapsed(begin: Instant, end: Instant) -> float | None:
    """Seconds from ``begin`` to ``end``; ``None`` if the clocks do not agree.

    Within one boot the result is by ``uptime``, if another clock agrees. After a pause of the VM,
    which stops ``uptime``, and across boots, it is by the wall clock, if IMDS's ``Date`` agrees.
    """
    uptime, wall, date = _passed(begin, end)
    if uptime is not None and (_agree(uptime, wall) or (date is not None and _agree(uptime, date))):
        return None if date is not None and not _agree(uptime, date) and date > uptime else uptime
    if date is not None and _agree(wall, date) and wall >= (uptime or 0.0):
        return max(0.0, wall)
    return None


def silence(begin: Instant, end: Instant) -> float | None:
    """Seconds in which something may have happened unseen: the most that a believed clock shows;
    ``None`` if unknown.

    Within one boot the wall clock is never the result: it only decides whether another clock is
    believed.
    """
    uptime, _, date = _passed(begin, end)
    if (
        begin.date is not None and date is None
    ):  # ``Date`` is missing now: it might show a pause of the VM
        return None
    if uptime is None or date is None:
        return elapsed(begin, end)
    return uptime if _agree(uptime, date) else max(uptime, date)


def believable(gap: Gap, begin: Instant, end: Instant) -> float | None:
    """Return the delay between two answers, in seconds, on the clock that can be right.

    ``None`` if it is unknown.

    The delay on the wall clock is longer if ``uptime`` stopped in a pause of the VM, or if the wall
    clock was set; it may be set forth and back, so the step may be gone at ``end``. After a pause
    ``Date`` has advanced as much. It counts whole seconds, so it shows no pause shorter than one.
    """
    uptime, wall, date = _passed(begin, end)
    if uptime is None:
        return None

    longest = max(gap.wall, gap.uptime)  # either clock may have stopped
    step = wall - uptime
    unset = READING + DRIFT * uptime  # the most that ``step`` is without a step
    ahead = max(step, gap.wall - gap.uptime)
    if date is None:
        return longest if step >= -unset and ahead <= unset else None

    paused = date - uptime  # within a second
    if paused > longest + TOLERANCE:  # a pause that neither clock shows
        return None
    if ahead <= unset:
        return longest
    if ahead <= paused + TOLERANCE:
        return longest if paused >= 1.0 else None
    # the wall clock was set, and cannot tell how long a pause was
    return gap.uptime if paused < 1.0 else None


def credible(now: Instant, before: Instant | None) -> bool:
    """Whether ``Date`` may be right: it is within a day of the wall clock, or it has advanced as
    ``uptime`` has.

    ``before``: the last answer whose ``Date`` was believed.
    """
    if now.date is None:
        return True
    others = [now.wall]
    if (
        before is not None
        and before.date is not None
        and (uptime := _passed(before, now)[0]) is not None
    ):
        others.append(before.date + timedelta(seconds=uptime))
    return any(abs((now.date - other).total_seconds()) <= MAX_DISAGREEMENT for other in others)


def _passed(begin: Instant, end: Instant) -> tuple[float | None, float, float | None]:
    """Seconds by ``uptime``, by the wall clock and by ``Date``.

    ``uptime`` is ``None`` across boots, and if it went backwards (it cannot); ``Date`` is ``None``
    if one is missing.
    """
    same = begin.boot == end.boot and end.uptime >= begin.uptime
    date = (
        (end.date - begin.date).total_seconds()
        if begin.date is not None and end.date is not None
        else None
    )
    return (
        end.uptime - begin.uptime if same else None,
        (end.wall - begin.wall).total_seconds(),
        date,
    )


def _agree(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE + DRIFT * abs(one)
