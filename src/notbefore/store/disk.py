"""``DiskThread``: what touches a disk is done in a thread of its own, and waited for with a deadline.

A disk that fails raises an error; one that hangs does not: ``fsync`` returns after minutes, or never. Nobody can end
it, so whoever waits for it goes on without it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

PATIENCE: Final = 1.5  # seconds: longer than a commit takes on a busy disk, much shorter than the notice of a Preempt
_SLICES: Final = 8  # a machine that was frozen for longer than the deadline loses one of them, not all

T = TypeVar("T")

log = logging.getLogger("notbefore.store")


class DiskHangsError(TimeoutError):
    """The disk has not answered in time; nobody knows what it has done. It is an ``OSError``."""


class DiskThread:
    """Does one thing after the other. Safe to call from several threads; the thread begins with the first call."""

    def __init__(self, patience: float = PATIENCE, name: str = "disk") -> None:
        self._patience = patience  # seconds
        self._name = name
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._since: float | None = None  # monotonic seconds: when the thread began what it does now
        self._lock = threading.Lock()  # of the next one
        self._thread: threading.Thread | None = None

    @property
    def hangs(self) -> bool:
        """What was begun has taken longer than the deadline, and has not ended."""
        since = self._since
        return since is not None and time.monotonic() - since > self._patience

    def do(self, action: Callable[[], T], patience: float | None = None) -> T:
        """What ``action`` returns or raises; ``DiskHangsError`` where it is not done after ``patience`` seconds.

        Then nobody knows what it has done, and it may still do it later. While the thread hangs, nothing is begun.
        """
        patience = self._patience if patience is None else patience
        if not self.hangs:
            job = self.post(action)
            if job.wait(patience):
                return job.outcome()
            job.given_up = True
        raise DiskHangsError(f"the disk has not answered for {patience:g} s")

    def post(self, action: Callable[[], T]) -> "Job[T]":
        """Have it done, after what was posted before; never waits."""
        job = Job(action)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._jobs.put(job)
        return job

    def end(self) -> None:
        """End the thread, once it has done what it was given; one that hangs ends with the process."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.given_up:
                self._since = time.monotonic()
                job.run()
                self._since = None


class Job(Generic[T]):
    """Something that a ``DiskThread`` does."""

    def __init__(self, action: Callable[[], T]) -> None:
        self.given_up = False  # not to be begun any more
        self._done = threading.Event()
        self._action = action
        self._error: Exception | None = None

    def run(self) -> None:
        """Do it; never raises."""
        try:
            self._value = self._action()
        except Exception as error:  # noqa: BLE001 - whoever waits for it is to get it
            self._error = error
            if self.given_up:
                log.warning("a disk operation that nobody waited for any more has failed: %s", error)
        self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether it is done; waits for it so long."""
        return any(self._done.wait(seconds / _SLICES) for _ in range(_SLICES))

    def outcome(self) -> T:
        """What it returned or raised."""
        if self._error is not None:
            raise self._error
        return self._value
