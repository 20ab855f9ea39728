"""A freeze is measured: of a process that is really stopped, and with clocks that a test sets."""

import pytest

from notbefore.agent.freeze import FreezeMeter
from notbefore.core.clock import Gap
from support.tracking import SteppedClock


def started(clock: SteppedClock) -> FreezeMeter:
    meter = FreezeMeter(clock)
    meter.switch(on=True)
    return meter


def test_each_clock_is_measured_for_itself() -> None:
    clock = SteppedClock()
    meter = started(clock)
    clock.go(6.1, steady=0.0)  # put right after a freeze in which the monotonic clock stood still
    gap = meter.take()
    assert gap.wall == pytest.approx(6.0)
    assert gap.monotonic == 0.0
    assert meter.take() == Gap(0.0, 0.0)
    meter.switch(on=False)
    assert not meter.running


def test_a_clock_that_is_set_back_is_no_gap() -> None:
    clock = SteppedClock()
    meter = started(clock)
    clock.go(-100, steady=0.0)
    assert meter.take() == Gap(0.0, 0.0)
    meter.switch(on=False)


def test_what_was_before_it_was_switched_on_is_not_measured() -> None:
    clock = SteppedClock()
    meter = started(clock)
    meter.switch(on=False)
    clock.go(50)
    meter.switch(on=True)
    meter.switch(on=True)
    assert meter.take() == Gap(0.0, 0.0)
    meter.switch(on=False)
