"""``elapsed`` and ``silence`` give a duration when clocks agree, and none when they do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.core.clock import Gap, Instant, believable, credible, elapsed, silence
from support.azure import at

BEGIN = Instant(at(0), "boot", 100.0, at(0))


def end(wall: float, uptime: float | None, date: float | None) -> Instant:
    """Return the moment that is this many seconds later by each clock.

    ``uptime=None``: after another boot. ``date=None``: IMDS gave no time.
    """
    imds_time = at(date) if date is not None else None
    if uptime is None:
        return Instant(at(wall), "another", 5.0, imds_time)
    return Instant(at(wall), "boot", 100.0 + uptime, imds_time)


@pytest.mark.parametrize(
    ("wall", "uptime", "date", "duration", "silent"),
    [
        # all agree
        (60.4, 60.5, 61, 60.5, 60.5),
        (60.4, 60.5, None, 60.5, None),
        # the wall clock was set back
        (-3600, 60, 60, 60, 60),
        # set back, and the VM may have been paused too
        (-3600, 60, None, None, None),
        # set ahead
        (86_400, 60, 60, 60, 60),
        # set ahead, or the VM was paused for a day
        (86_400, 60, None, None, None),
        # paused for 300 s, and the wall clock was corrected
        (360, 60, 360, 360, 360),
        # paused for 300 s, and no clock was corrected; or IMDS's clock was set
        (60, 60, 360, None, 360),
        # IMDS's clock was set back
        (60, 60, -3600, 60, 60),
        # no two agree
        (360, 60, 7200, None, 7200),
        # over a boot
        (300, None, 300, 300, 300),
        (300, None, None, None, None),
        # the clock was set over a boot
        (-50, None, 300, None, None),
        # clocks drift apart over a week
        (604_800, 604_500, 604_700, 604_500, 604_500),
    ],
)
def test_duration_and_silence_are_those_that_clocks_agree_on(
    wall: float,
    uptime: float | None,
    date: float | None,
    duration: float | None,
    silent: float | None,
) -> None:
    later = end(wall, uptime, date)

    assert elapsed(BEGIN, later) == duration
    assert silence(BEGIN, later) == silent


@pytest.mark.parametrize(("wall", "silent"), [(60.4, 60.5), (-3600, None), (86_400, None)])
def test_silence_uses_the_clocks_of_the_vm_when_imds_gave_no_time(
    wall: float, silent: float | None
) -> None:
    begin = Instant(at(0), "boot", 100.0)

    assert silence(begin, end(wall, 60.5, None)) == silent


def test_duration_is_over_a_boot_when_uptime_goes_back() -> None:
    assert elapsed(BEGIN, Instant(at(10), "boot", 3.0, at(10))) == 10.0


def test_silence_is_unknown_when_uptime_goes_back() -> None:
    assert silence(BEGIN, Instant(at(10), "boot", 3.0, None)) is None


@pytest.mark.parametrize(
    ("gap", "later", "believed"),
    [
        (Gap(5.0, 5.0), end(6, 6, 6), 5.0),
        (Gap(5.0, 0.0), end(6, 1, 6), 5.0),  # the clock since the boot stood still
        (Gap(3600.0, 0.2), end(3601, 1, 1), 0.2),  # the wall clock was set
        (Gap(3600.0, 0.2), end(3601, 1, None), None),  # set, or the VM was paused
        (Gap(0.1, 0.1), end(1, 1, None), 0.1),
        (Gap(3.0, 0.1), end(4, 1, 1), 0.1),  # set forward by three seconds
        (Gap(3.0, 0.1), end(4.1, 1.1, 2), 0.1),  # ``Date`` counts whole seconds
        (Gap(1.5, 0.1), end(2.5, 1, 1.9), None),  # set, or paused: ``Date`` cannot tell
        (Gap(1.5, 0.1), end(2.5, 1, None), None),
        (Gap(1.5, 0.1), end(2.5, 1, 2.5), 1.5),
        (Gap(5.0, 5.0), end(6, None, 6), None),  # of another boot
        (Gap(100.0, 0.1), end(1, 1, 1), 0.1),  # set forward and back
        (Gap(100.0, 0.1), end(1, 1, None), None),
        (Gap(0.1, 0.1), end(-99, 1, 1), 0.1),  # set back
        (Gap(0.1, 0.1), end(-99, 1, None), None),  # set back, perhaps over a pause
        (Gap(0.1, 0.1), end(-93, 1, 7), None),  # set back over a pause of six seconds
        (Gap(106.0, 0.1), end(107, 1, 7), None),  # set forward over a pause of six seconds
        (Gap(106.0, 0.1), end(7, 1, 7), None),  # and back again
        (Gap(0.1, 0.1), end(1, 1, 7), None),  # paused, and both clocks of the VM stood still
    ],
)
def test_gap_is_believed_when_imds_saw_as_much_time_pass(
    gap: Gap,
    later: Instant,
    believed: float | None,
) -> None:
    assert believable(gap, BEGIN, later) == believed


def test_instant_is_credible_without_a_time_of_imds() -> None:
    assert credible(end(60, 60, None), BEGIN)


def test_instant_is_not_credible_when_imds_is_far_ahead() -> None:
    assert not credible(end(60, 60, 100_000), BEGIN)


def test_instant_is_not_credible_when_imds_is_far_ahead_after_a_boot() -> None:
    assert not credible(end(60, None, 100_000), BEGIN)


SECONDS = st.floats(-100_000, 100_000)


@given(SECONDS, st.none() | st.floats(0, 100_000), st.none() | SECONDS)
def test_duration_is_never_negative_nor_longer_than_the_silence(
    wall: float,
    uptime: float | None,
    date: float | None,
) -> None:
    later = end(wall, uptime, date)

    duration = elapsed(BEGIN, later)
    silent = silence(BEGIN, later)

    assert duration is None or duration >= 0
    assert silent is None or silent >= 0
    # a silence may be known to be short when no duration is known, but not the other way round
    if duration is not None and silent is not None:
        assert duration <= silent + 2.0 + 0.002 * abs(duration)


@given(st.floats(0, 100_000), st.floats(-100_000, 100_000))
def test_duration_ignores_the_wall_clock_when_imds_gives_its_time(
    passed: float, step: float
) -> None:
    later = end(passed + step, passed, passed)

    assert elapsed(BEGIN, later) == pytest.approx(passed)
    assert silence(BEGIN, later) == pytest.approx(passed)
