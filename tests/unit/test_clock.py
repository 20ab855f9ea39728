"""``elapsed`` and ``silence``: what several clocks say together, and what is left out where they do
not agree.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.core.clock import Gap, Instant, believable, credible, elapsed, silence
from support.azure import at

BEGIN = Instant(at(0), "boot", 100.0, at(0))


def end(wall: float, uptime: float | None, date: float | None) -> Instant:
    """So many seconds later by each clock; ``uptime=None``: after another boot."""
    boot = ("boot", 100.0 + uptime) if uptime is not None else ("another", 5.0)
    return Instant(at(wall), *boot, at(date) if date is not None else None)


@pytest.mark.parametrize(
    ("wall", "uptime", "date", "duration", "silent"),
    [
        (60.4, 60.5, 61, 60.5, 60.5),  # all agree
        (60.4, 60.5, None, 60.5, None),
        (-3600, 60, 60, 60, 60),  # the wall clock was set back
        (-3600, 60, None, None, None),  # set back, and the VM may have been paused as well
        (86_400, 60, 60, 60, 60),  # set ahead
        (86_400, 60, None, None, None),  # set ahead, or the VM was paused for a day
        (360, 60, 360, 360, 360),  # paused for 300 s, and the wall clock was put right
        (
            60,
            60,
            360,
            None,
            360,
        ),  # paused for 300 s, and nothing was put right; or IMDS's clock was set
        (60, 60, -3600, 60, 60),  # IMDS's clock was set back
        (360, 60, 7200, None, 7200),  # no two agree
        (300, None, 300, 300, 300),  # over a boot
        (300, None, None, None, None),
        (-50, None, 300, None, None),  # the clock was set over a boot
        (604_800, 604_500, 604_700, 604_500, 604_500),  # clocks drift apart over a week
    ],
)
def test_a_duration_is_what_clocks_agree_on(
    wall: float,
    uptime: float | None,
    date: float | None,
    duration: float | None,
    silent: float | None,
) -> None:
    assert (elapsed(BEGIN, end(wall, uptime, date)), silence(BEGIN, end(wall, uptime, date))) == (
        duration,
        silent,
    )


@pytest.mark.parametrize(("wall", "silent"), [(60.4, 60.5), (-3600, None), (86_400, None)])
def test_without_any_date_the_clocks_of_the_vm_are_all_there_is(
    wall: float, silent: float | None
) -> None:
    begin = Instant(at(0), "boot", 100.0)
    assert silence(begin, end(wall, 60.5, None)) == silent


def test_a_clock_since_the_boot_that_goes_back_is_of_another_boot() -> None:
    assert elapsed(BEGIN, Instant(at(10), "boot", 3.0, at(10))) == 10.0
    assert silence(BEGIN, Instant(at(10), "boot", 3.0, None)) is None


@pytest.mark.parametrize(
    ("gap", "later", "believed"),
    [
        (Gap(5.0, 5.0), end(6, 6, 6), 5.0),
        (Gap(5.0, 0.0), end(6, 1, 6), 5.0),  # the clock since the boot stood still
        (Gap(3600.0, 0.2), end(3601, 1, 1), 0.2),  # the wall clock was set
        (Gap(3600.0, 0.2), end(3601, 1, None), None),  # or the VM was paused: nobody knows
        (Gap(0.1, 0.1), end(1, 1, None), 0.1),
        (Gap(3.0, 0.1), end(4, 1, 1), 0.1),  # set forward by three seconds
        (Gap(3.0, 0.1), end(4.1, 1.1, 2), 0.1),  # ``Date`` counts whole seconds
        (Gap(1.5, 0.1), end(2.5, 1, 1.9), None),  # set, or paused: ``Date`` cannot tell
        (Gap(1.5, 0.1), end(2.5, 1, None), None),
        (Gap(1.5, 0.1), end(2.5, 1, 2.5), 1.5),
        (Gap(5.0, 5.0), end(6, None, 6), None),  # of another boot
        (Gap(100.0, 0.1), end(1, 1, 1), 0.1),  # set forth and back
        (Gap(100.0, 0.1), end(1, 1, None), None),
        (Gap(0.1, 0.1), end(-99, 1, 1), 0.1),  # set back
        (Gap(0.1, 0.1), end(-99, 1, None), None),  # set back, perhaps over a pause
        (Gap(0.1, 0.1), end(-93, 1, 7), None),  # set back over a pause of six seconds
        (Gap(106.0, 0.1), end(107, 1, 7), None),  # set forward over a pause of six seconds
        (Gap(106.0, 0.1), end(7, 1, 7), None),  # and back again
        (Gap(0.1, 0.1), end(1, 1, 7), None),  # paused, and both clocks of the VM stood still
    ],
)
def test_a_gap_is_believed_as_far_as_imds_saw_time_pass(
    gap: Gap, later: Instant, believed: float | None
) -> None:
    assert believable(gap, BEGIN, later) == believed


def test_a_date_that_is_not_given_is_not_wrong() -> None:
    assert credible(end(60, 60, None), BEGIN)
    assert not credible(end(60, 60, 100_000), BEGIN)


seconds = st.floats(-100_000, 100_000)


@given(seconds, st.none() | st.floats(0, 100_000), st.none() | seconds)
def test_a_duration_is_never_negative_and_never_longer_than_the_silence(
    wall: float, uptime: float | None, date: float | None
) -> None:
    later = end(wall, uptime, date)
    duration, silent = elapsed(BEGIN, later), silence(BEGIN, later)
    assert duration is None or duration >= 0
    assert silent is None or silent >= 0
    # a silence may be known to be short though a duration is not known; never the other way round
    assert duration is None or silent is None or duration <= silent + 2.0 + 0.002 * abs(duration)


@given(st.floats(0, 100_000), st.floats(-100_000, 100_000))
def test_setting_the_wall_clock_changes_nothing_where_imds_gives_its_own(
    passed: float, step: float
) -> None:
    later = end(passed + step, passed, passed)
    assert (elapsed(BEGIN, later), silence(BEGIN, later)) == pytest.approx((passed, passed))
