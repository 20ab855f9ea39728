"""``StdoutWriter`` writes records to standard output in a thread of its own."""

import os
import sys
import threading
import time

import pytest

from notbefore.core.outbox import DISK_PATIENCE
from notbefore.process.stdout import StdoutWriter
from support.agent import eventually


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe of Windows takes a line or none of it")
def test_stop_writes_the_rest_of_a_line_and_the_waiting_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # a full pipe takes only a part of a long line
    writer = StdoutWriter(writing)
    writer.write(b"x" * 100_000 + b"\n")
    writer.start()
    eventually(lambda: "temporarily unavailable" in caplog.text)
    written = os.read(reading, 100_000)
    writer.write(b"the next one\n")

    writer.stop(20)

    written += os.read(reading, 100_000)
    assert written == b"x" * 100_000 + b"\nthe next one\n"


def test_lines_above_the_bound_are_dropped_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("notbefore.process.stdout.MAX_WAITING", 2)
    writer = StdoutWriter(1)

    for number in range(5):
        writer.write(b"%d\n" % number)

    assert caplog.text.count("standard output: no one reads it") == 1


def test_stop_writes_nothing_when_writer_was_not_started() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    writer = StdoutWriter(writing)
    writer.write(b"lost\n")

    writer.stop(20)

    with pytest.raises(BlockingIOError):
        os.read(reading, 100)


def test_closed_pipe_is_logged_once_and_does_not_end_the_writer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = StdoutWriter(writing)
    writer.start()

    writer.write(b"lost\n")
    writer.write(b"lost too\n")
    writer.stop(20)

    assert caplog.text.count("records are missing there") == 1


class SickDisk:
    """Writes no step, so every wait takes its full time."""

    def __init__(self) -> None:
        self.step = 1
        self.waits: list[tuple[int, float]] = []  # the step and the longest time of each wait

    def wait_step(self, step: int, seconds: float) -> None:
        self.waits.append((step, seconds))
        time.sleep(seconds)


class SlowDisk(SickDisk):
    """Writes its step at ``write``. Waits last until then, however slow the test is."""

    def __init__(self) -> None:
        super().__init__()
        self._written = threading.Event()

    def wait_step(self, step: int, seconds: float) -> None:
        self.waits.append((step, seconds))
        self._written.wait(60)

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
    assert patience > 0
    assert patience <= DISK_PATIENCE


def test_lines_wait_for_a_sick_disk_together() -> None:
    reading, writing = os.pipe()
    disk = SickDisk()
    writer = StdoutWriter(writing, disk)
    writer.write(b"first\n")
    writer.write(b"second\n")
    writer.start()

    writer.stop(20)

    assert os.read(reading, 100) == b"first\nsecond\n"
    assert sum(patience for _, patience in disk.waits) < DISK_PATIENCE + 0.5
