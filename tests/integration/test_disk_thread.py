"""The thread that touches the disk: what hangs in it holds nobody for longer than a deadline."""

import threading
from collections.abc import Iterator

import pytest

from notbefore.store.disk import DiskHangsError, DiskThread
from support.agent import PATIENCE, eventually

SOON = 0.2  # seconds after which what hangs is given up


@pytest.fixture
def disk() -> Iterator[DiskThread]:
    made = DiskThread(patience=PATIENCE)
    yield made
    made.end()


def test_it_gives_what_was_returned_and_raises_what_was_raised(disk: DiskThread) -> None:
    assert disk.do(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        disk.do(lambda: 1 // 0)
    assert disk.do(threading.current_thread) is not threading.current_thread()


def test_what_hangs_is_given_up_and_nothing_is_begun_until_it_has_ended() -> None:
    disk, answers, begun = DiskThread(SOON), threading.Event(), []
    with pytest.raises(DiskHangsError, match="has not answered"):
        disk.do(answers.wait)
    eventually(lambda: disk.hangs)
    with pytest.raises(DiskHangsError):
        disk.do(lambda: begun.append("while it hangs"))
    answers.set()
    eventually(lambda: not disk.hangs)
    disk.do(lambda: begun.append("afterwards"), PATIENCE)
    assert begun == ["afterwards"]
    disk.end()


def test_what_was_given_up_before_it_began_is_never_done(disk: DiskThread) -> None:
    answers, begun = threading.Event(), []
    first = disk.post(answers.wait)
    with pytest.raises(DiskHangsError):
        disk.do(lambda: begun.append("too late"), patience=SOON)
    answers.set()
    assert first.wait(PATIENCE)
    assert disk.do(lambda: list(begun)) == []


def test_what_fails_after_it_was_given_up_is_logged(disk: DiskThread, caplog: pytest.LogCaptureFixture) -> None:
    answers = threading.Event()

    def fail() -> None:
        answers.wait()
        raise OSError("Input/output error")

    with pytest.raises(DiskHangsError):
        disk.do(fail, SOON)
    answers.set()
    eventually(lambda: "nobody waited for any more has failed: Input/output error" in caplog.text)
