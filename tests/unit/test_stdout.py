"""``StdoutWriter`` writes records to standard output in a thread of its own."""

import os
import sys
import threading

import pytest

from notbefore.core.outbox import DISK_PATIENCE
from notbefore.process.stdout import StdoutWriter
from support.agent import eventually


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe of Windows takes a line or none of it")
def test_waiting_lines_are_written_in_full_before_the_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reading, writing = os.pipe()
    # the pipe takes a part of a line, as when the process is paused meanwhile
    os.set_blocking(writing, False)
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


def test_writer_stops_at_once_when_it_was_not_started() -> None:
    writer = StdoutWriter(1)
    writer.write(b"lost\n")

    writer.stop(0)


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
    assert patience > 0
    assert patience <= DISK_PATIENCE


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
