"""Records go to standard output in a thread of their own."""

import os
import sys
import threading

import pytest

from notbefore.core.outbox import DISK_PATIENCE
from notbefore.process.stdout import StdoutWriter
from support.agent import eventually


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe of Windows takes a line or none of it")
def test_what_waits_is_written_before_it_stops_and_each_line_in_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reading, writing = os.pipe()
    # so that it takes a part of a line, as when the process is paused meanwhile
    os.set_blocking(writing, False)
    teller = StdoutWriter(writing)
    teller.write(b"x" * 100_000 + b"\n")
    teller.start()
    eventually(lambda: "temporarily unavailable" in caplog.text)
    got = os.read(reading, 100_000)
    teller.write(b"the next one\n")
    teller.stop(20)
    assert got + os.read(reading, 100_000) == b"x" * 100_000 + b"\nthe next one\n"


def test_too_much_is_left_out_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("notbefore.process.stdout.MAX_WAITING", 2)
    teller = StdoutWriter(1)
    for number in range(5):
        teller.write(b"%d\n" % number)
    assert caplog.text.count("standard output: nobody reads it") == 1
    teller.stop(0)  # it was never started: nothing to wait for


def test_a_pipe_that_is_gone_does_not_end_it_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    teller = StdoutWriter(writing)
    teller.start()
    teller.write(b"lost\n")
    teller.write(b"lost as well\n")
    teller.stop(20)
    assert caplog.text.count("records are missing there") == 1


class SlowDisk:
    """Has no step on disk until ``write``."""

    def __init__(self) -> None:
        self.step = 1
        self.waits: list[tuple[int, float]] = []  # for which step, and how long at most
        self._written = threading.Event()

    def wait_step(self, step: int, seconds: float) -> None:
        self.waits.append((step, seconds))
        self._written.wait(seconds)

    def write(self) -> None:
        self._written.set()


def test_line_waits_for_its_step_on_disk() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    disk = SlowDisk()
    writer = StdoutWriter(writing, disk)
    writer.start()
    writer.write(b"first\n")
    eventually(lambda: bool(disk.waits))
    with pytest.raises(BlockingIOError):
        os.read(reading, 100)

    disk.write()
    writer.stop(20)

    assert os.read(reading, 100) == b"first\n"
    ((step, patience),) = disk.waits
    assert step == 1
    assert 0 < patience <= DISK_PATIENCE


def test_lines_wait_for_a_sick_disk_together() -> None:
    reading, writing = os.pipe()
    disk = SlowDisk()
    writer = StdoutWriter(writing, disk)
    writer.write(b"first\n")
    writer.write(b"second\n")
    writer.start()
    writer.stop(20)

    assert os.read(reading, 100) == b"first\nsecond\n"
    assert sum(patience for _, patience in disk.waits) < DISK_PATIENCE + 0.5
