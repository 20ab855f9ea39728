"""The meter of freezes with clocks that a test sets.

acceptance/test_agent.py stops a real process.
"""

from collections.abc import Iterator

import pytest

from notbefore.agent.freeze import FreezeMeter
from notbefore.core.clock import Gap
from support.tracking import SteppedClock

NOTHING = Gap(0.0, 0.0)


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def meter(clock: SteppedClock) -> Iterator[FreezeMeter]:
    """A meter that is switched on."""
    meter = FreezeMeter(clock)
    meter.switch(on=True)
    yield meter
    meter.switch(on=False)


def test_meter_measures_each_clock_separately(clock: SteppedClock, meter: FreezeMeter) -> None:
    # set right after a freeze in which the clock since the boot stood still
    clock.go(6.1, booted=0.0)

    gap = meter.take()

    assert gap.wall == pytest.approx(6.0)
    assert gap.uptime == 0.0


def test_meter_ignores_a_clock_that_is_set_back(clock: SteppedClock, meter: FreezeMeter) -> None:
    clock.go(-100, booted=0.0)

    assert meter.take() == NOTHING


def test_meter_ignores_the_time_in_which_it_was_off(
    clock: SteppedClock, meter: FreezeMeter
) -> None:
    meter.switch(on=False)
    clock.go(50)
    meter.switch(on=True)

    assert meter.take() == NOTHING


def test_meter_stops_when_switched_off_once(meter: FreezeMeter) -> None:
    meter.switch(on=True)

    meter.switch(on=False)

    assert not meter.running
