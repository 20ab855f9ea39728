"""The pulse feels a freeze: of a process that is really stopped."""

import signal
import subprocess
import sys
import time

import pytest

from notbefore.agent.freeze import FreezeMeter
from notbefore.core.change import Gap

CHILD = """
import sys
from notbefore.agent.freeze import FreezeMeter
pulse = FreezeMeter()
pulse.start()
print("beating", flush=True)
sys.stdin.readline()
print(pulse.take().seconds, flush=True)
"""


def test_a_stopped_process_feels_how_long_it_was_stopped() -> None:
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


class Clocks:
    def __init__(self) -> None:
        self.wall, self.monotonic = 1000.0, 5.0

    def pulse(self) -> FreezeMeter:
        pulse = FreezeMeter(lambda: self.wall, lambda: self.monotonic)
        pulse.start()
        return pulse


def test_each_clock_is_kept_for_itself() -> None:
    clocks = Clocks()
    pulse = clocks.pulse()
    clocks.wall += 6.1  # put right after a freeze in which the monotonic clock stood still
    gap = pulse.take()
    assert gap.wall == pytest.approx(6.0)
    assert gap.monotonic == 0.0
    assert pulse.take() == Gap(0.0, 0.0)
    pulse.stop()
    assert not pulse.running


def test_a_clock_that_is_set_back_is_no_gap() -> None:
    clocks = Clocks()
    pulse = clocks.pulse()
    clocks.wall -= 100
    assert pulse.take() == Gap(0.0, 0.0)
    pulse.stop()
