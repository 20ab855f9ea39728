"""``DiskThread``: what touches a disk is done in a thread of its own, and waited for with a deadline.

A disk that fails raises an error; one that hangs does not: ``fsync`` returns after minutes, or never. Nobody can end
it, so whoever waits for it goes on without it.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

_SLICES: Final = 8  # a machine that was frozen for longer than the deadline loses one of them, not all

T = TypeVar("T")


class DiskHangsError(TimeoutError):
    """The disk has not answered in time; nobody knows what it has done. It is an ``OSError``."""


class DiskThread:
    """Does one thing after the other. Safe to call from several threads. ``patience``: in seconds, see ``hangs``."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._since: float | None = None  # monotonic seconds: when the thread began what it does now
        threading.Thread(target=self._run, name="disk", daemon=True).start()

    @property
    def hangs(self) -> bool:
        """What was begun has taken longer than the deadline, and has not ended."""
        since = self._since
        return since is not None and time.monotonic() - since > self._patience

    def do(self, action: Callable[[], T], patience: float) -> T:
        """What ``action`` returns or raises; ``DiskHangsError`` where it is not done after ``patience`` seconds.

        Then nobody knows what it has done, and it may still do it later. While the thread hangs, nothing is begun.
        """
        if not self.hangs:
            job = self.post(action)
            for _ in range(_SLICES):
                with suppress(TimeoutError):
                    return job.result(patience / _SLICES)
            job.cancel()  # where it has not begun
        raise DiskHangsError(f"the disk has not answered for {patience:g} s")

    def post(self, action: Callable[[], T]) -> Future[T]:
        """Have it done, after what was posted before; never waits."""
        job = Future[T]()
        self._jobs.put((job, action))
        return job

    def end(self) -> None:
        """End the thread, once it has done what it was given; one that hangs ends with the process."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (given := self._jobs.get()) is not None:
            job, action = given
            if job.set_running_or_notify_cancel():
                self._since = time.monotonic()
                try:
                    job.set_result(action())
                except Exception as error:  # noqa: BLE001 - whoever waits for it is to get it
                    job.set_exception(error)
                self._since = None
