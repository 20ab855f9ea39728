"""A freeze is measured: of a process that is really stopped, and with clocks that a test sets."""

import signal
import subprocess
import sys
import time

import pytest

from notbefore.agent.freeze import FreezeMeter
from notbefore.core.clock import Gap
from support.tracking import SteppedClock

CHILD = """
import sys
from notbefore.process.clock import Clock
from notbefore.agent.freeze import FreezeMeter
meter = FreezeMeter(Clock())
meter.switch(on=True)
print("measuring", flush=True)
sys.stdin.readline()
print(meter.take().wall, flush=True)
"""


def test_a_stopped_process_measures_how_long_it_was_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin
        assert child.stdout
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # this is the freeze itself
        child.send_signal(signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        assert 1.2 < float(child.stdout.readline()) < 10


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
