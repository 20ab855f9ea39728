"""The thread that touches the disk: what hangs in it holds nobody for longer than a deadline."""

import threading
from collections.abc import Iterator

import pytest

from notbefore.store.disk import DiskHangsError, DiskThread
from support.agent import PATIENCE, eventually

SOON = 0.2  # seconds after which what hangs is given up


@pytest.fixture
def disk() -> Iterator[DiskThread]:
    made = DiskThread(SOON)
    yield made
    made.end()


def test_it_gives_what_was_returned_and_raises_what_was_raised(disk: DiskThread) -> None:
    assert disk.do(threading.current_thread, PATIENCE) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        disk.do(lambda: 1 // 0, PATIENCE)


def test_what_hangs_is_given_up_and_what_had_not_begun_by_then_is_never_done(disk: DiskThread) -> None:
    answers, begun = threading.Event(), []
    first = disk.post(answers.wait)
    with pytest.raises(DiskHangsError, match="has not answered"):
        disk.do(lambda: begun.append("behind what hangs"), SOON)
    eventually(lambda: disk.hangs)
    with pytest.raises(DiskHangsError):
        disk.do(lambda: begun.append("while it hangs"), PATIENCE)
    answers.set()
    assert first.result(PATIENCE)
    eventually(lambda: not disk.hangs)
    disk.do(lambda: begun.append("afterwards"), PATIENCE)
    assert begun == ["afterwards"]
