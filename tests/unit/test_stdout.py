"""Records go to standard output in a thread of their own."""

import io
import os
import threading

import pytest

from notbefore.process import stdout as tell
from notbefore.process.stdout import StdoutWriter


def test_what_waits_is_written_before_it_stops() -> None:
    out = io.BytesIO()
    teller = StdoutWriter(out)
    for number in range(100):
        teller(b"%d\n" % number)
    teller.start()
    teller.stop(20)
    assert out.getvalue().split() == [b"%d" % number for number in range(100)]


def test_too_much_is_left_out_and_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tell, "MAX_WAITING", 2)
    out = io.BytesIO()
    teller = StdoutWriter(out)
    for number in range(5):
        teller(b"%d\n" % number)
    assert caplog.text.count("standard output: nobody reads it") == 1
    teller.stop(0)  # it was never started: nothing to wait for


def test_a_pipe_that_is_gone_does_not_end_it_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    before = threading.active_count()
    with os.fdopen(writing, "wb", buffering=0) as out:
        teller = StdoutWriter(out)
        teller.start()
        teller(b"lost\n")
        teller(b"lost as well\n")
        teller.stop(20)
    assert threading.active_count() == before
    assert caplog.text.count("Broken pipe") == 1
