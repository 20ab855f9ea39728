"""A freeze is measured with clocks that a test sets.

Of a process that is really stopped see acceptance/test_agent.
"""

import pytest

from notbefore.agent.freeze import FreezeMeter
from notbefore.core.clock import Gap
from support.tracking import SteppedClock

NOTHING = Gap(0.0, 0.0)


def test_each_clock_is_measured_for_itself_and_what_was_before_it_was_switched_on_is_not() -> None:
    clock = SteppedClock()
    meter = FreezeMeter(clock)
    meter.switch(on=True)
    # put right after a freeze in which the clock since the boot stood still
    clock.go(6.1, booted=0.0)
    gap = meter.take()
    assert gap.wall == pytest.approx(6.0)
    assert gap.uptime == 0.0
    clock.go(-100, booted=0.0)
    assert meter.take() == NOTHING
    meter.switch(on=False)
    clock.go(50)
    for _ in range(2):
        meter.switch(on=True)
    assert meter.take() == NOTHING
    meter.switch(on=False)
    assert not meter.running
