"""``Instant``: one moment as several clocks show it, and how much time lies between two of them.

No clock of a VM can be trusted alone. The wall clock is set by NTP or by hand. The clock that counts since the boot
cannot be set, but it stands still while the host has paused the VM. The ``Date`` header of an answer is the host's
clock, to the second. A duration is given where clocks agree, and left out where they do not.
"""

from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

TOLERANCE: Final = 2.0
"""Seconds by which two clocks may differ and still agree: ``Date`` counts whole seconds."""

DRIFT: Final = 0.001
"""The part of a duration by which two clocks may drift apart and still agree: NTP corrects by up to 500 ppm."""

READING: Final = 0.5  # seconds by which clocks that are read one after the other may differ on a busy machine
MAX_DISAGREEMENT: Final = 86_400.0  # seconds by which ``Date`` may differ from the other clocks and be believed


class Instant(Struct, frozen=True):
    """One moment, as the clocks of this VM and of IMDS show it."""

    wall: datetime  # UTC, as this VM has it; may have been set
    boot: str = ""  # which boot of this machine ``uptime`` belongs to
    uptime: float = 0.0  # seconds since that boot, suspended time included (CLOCK_BOOTTIME); cannot be set
    date: datetime | None = None  # UTC, by IMDS's ``Date`` header: what NotBefore is compared with; None without one


class Gap(Struct, frozen=True):
    """The longest delay with which the agent woke up, in seconds, on both clocks: for so long it did not run.

    While a VM is frozen its monotonic clock may stand still and its wall clock be put right afterwards, or both run on.
    Neither alone is right on every host.
    """

    wall: float
    monotonic: float


def elapsed(begin: Instant, end: Instant) -> float | None:
    """Seconds from ``begin`` to ``end``; ``None`` where the clocks do not agree on them.

    Within a boot the clock since the boot counts, if another one agrees. While the host paused the VM that clock stood
    still: then the wall clock counts if IMDS's ``Date`` agrees with it, as it does over a boot.
    """
    uptime, wall, date = _passed(begin, end)
    if uptime is not None and (_agree(uptime, wall) or (date is not None and _agree(uptime, date))):
        return None if date is not None and not _agree(uptime, date) and date > uptime else uptime
    if date is not None and _agree(wall, date) and wall >= (uptime or 0.0):
        return max(0.0, wall)
    return None


def silence(begin: Instant, end: Instant) -> float | None:
    """Seconds in which something may have happened unseen: the longest that a clock allows; ``None`` if unknown.

    The wall clock counts only where IMDS gave no ``Date``, and only to say that the length is unknown.
    """
    uptime, wall, date = _passed(begin, end)
    if uptime is not None:
        if date is not None:
            return uptime if _agree(uptime, date) else max(uptime, date)
        if begin.date is not None:  # it was there, and no longer is: a pause of the VM may hide behind that
            return None
        return uptime if _agree(uptime, wall) else None
    return max(0.0, date) if date is not None and _agree(wall, date) else None


def believable(gap: Gap, begin: Instant, end: Instant) -> float | None:
    """Seconds of the delay, as far as it lies between two answers; ``None`` where its length is not known.

    Where the wall clock went further than the clock since the boot, it was set, or the VM was paused. ``Date`` went as
    far after a pause; it counts whole seconds, so it shows no pause that is shorter than one.
    """
    uptime, wall, date = _passed(begin, end)
    if uptime is None:
        return None
    ahead = wall - uptime
    if ahead <= READING + DRIFT * uptime:
        return max(gap.wall, gap.monotonic)  # either clock may have stood still
    if date is None:
        return None
    paused = date - uptime  # within a second
    if ahead > paused + TOLERANCE:  # the wall clock was set
        return gap.monotonic
    return max(gap.wall, gap.monotonic) if paused >= 1.0 else None


def credible(now: Instant, before: Instant | None) -> bool:
    """Whether ``Date`` may be right: it is within a day of the wall clock, or went on as the clock since the boot did.

    ``before``: the last answer of which ``Date`` was believed.
    """
    if now.date is None:
        return True
    others = [now.wall]
    if before is not None and before.date is not None and (uptime := _passed(before, now)[0]) is not None:
        others.append(before.date + timedelta(seconds=uptime))
    return any(abs((now.date - other).total_seconds()) <= MAX_DISAGREEMENT for other in others)


def _passed(begin: Instant, end: Instant) -> tuple[float | None, float, float | None]:
    """Seconds by the clock since the boot, the wall clock and ``Date``.

    ``None`` over a boot, or where the clock since the boot went backwards, which it cannot; and without a ``Date``.
    """
    same = begin.boot == end.boot and end.uptime >= begin.uptime
    date = (end.date - begin.date).total_seconds() if begin.date is not None and end.date is not None else None
    return end.uptime - begin.uptime if same else None, (end.wall - begin.wall).total_seconds(), date


def _agree(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE + DRIFT * abs(one)
