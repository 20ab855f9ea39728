"""``DiskThread``: the one thread that uses the disk.

It writes the changes of memory to the state file. No other thread waits for a sick disk.

A failing disk raises an error. A hanging one does not: ``fsync`` returns after minutes or never,
and cannot be interrupted. After any doubt, all of memory is written again.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from notbefore.errors import StoreError
from notbefore.store.file import FILE_NAME, Content, StateFile, StoredChange
from notbefore.store.lock import OwnerLock

# seconds to read the file at the start; without its content, every listed event would be new
START_PATIENCE: Final = 12.0
SLOW: Final = 1.0  # seconds; the disk counts as sick if a transaction takes as long
RETRY_INTERVAL: Final = 1.0  # seconds between attempts to write to a sick disk
LOOK_INTERVAL: Final = 10.0  # seconds between checks that the file was not replaced
CLOSE_PATIENCE: Final = 1.5  # seconds for the thread to end

log = logging.getLogger("notbefore.store")

T = TypeVar("T")


class Unwritten(NamedTuple):
    """The content of the next transaction."""

    content: Content  # the file holds this afterwards
    changes: Sequence[StoredChange]  # to add to the history


class Memory(Protocol):
    """The memory that the disk thread writes (``store.Store``).

    The disk thread calls both methods with the lock of the memory held. It never holds that lock
    while it uses the disk.
    """

    def collect_unwritten(self) -> Unwritten:
        """Return what is to be written."""

    def note_written(self, changes: Sequence[StoredChange]) -> None:
        """Note that what was collected last is on disk; ``changes``: its changes."""


class Job(NamedTuple):
    """An action for the disk thread."""

    action: Callable[[], Any]
    result: Future[Any]


class DiskThread:
    """Writes a memory to its state file. ``memory_lock``: the lock of that memory."""

    def __init__(self, directory: Path, memory: Memory, memory_lock: threading.Condition) -> None:
        self.file = StateFile(directory / FILE_NAME)
        self.lock = OwnerLock(directory)  # the courier inherits it
        self._memory = memory
        self._memory_lock = memory_lock
        self._jobs: deque[Job] = deque()
        self._step = 0  # the newest step of memory
        self._written_step = 0  # the newest step on disk
        self._is_unread = True  # the file may have content that is not in memory
        self._trouble: str | None = None  # why the last transaction failed
        self._next_look = time.monotonic() + LOOK_INTERVAL  # when to check or try the disk again
        self._busy_since: float | None = None  # monotonic seconds: the start of the present job
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    # ---- the state of the disk

    @property
    def hangs(self) -> bool:
        """Whether the present job takes longer than ``SLOW``; it may never end."""
        busy_since = self._busy_since
        return busy_since is not None and time.monotonic() - busy_since > SLOW

    @property
    def degraded(self) -> str | None:
        """Why memory is not on disk, in words; ``None`` if it is, or will be in a moment."""
        if self._trouble is not None:
            return self._trouble
        if self.hangs:
            return f"the disk has not answered for {SLOW:g} s"
        return None

    # ---- for the owner of the memory

    def load(self, *, must_read: bool = False) -> Content:
        """Return the content of the file; empty if the file cannot be read.

        An unreadable file is set aside before anything is written. With ``must_read``, it stays as
        it is: raises ``StoreError``.
        """

        def read() -> Content:
            self.lock.hold()
            try:
                return self.file.load()
            except (sqlite3.Error, OSError) as error:
                if must_read:
                    raise self._cannot_open(error) from None
                raise

        try:
            content = self.do(read, START_PATIENCE)
        except StoreError:
            self.close()
            raise
        except (sqlite3.Error, OSError) as error:
            if must_read:  # the disk hangs
                self.close()
                raise self._cannot_open(error) from None
            self._note_failure(error)
            return Content()
        self._is_unread = False
        return content

    def _cannot_open(self, error: Exception) -> StoreError:
        return StoreError(f"{self.file.path} cannot be opened ({error})")

    def request_write(self) -> None:
        """Write memory soon, because it has changed. The caller holds the lock of the memory."""
        self._step += 1
        self._memory_lock.notify_all()

    def wait_written(self, seconds: float) -> bool:
        """Wait until all of memory is on disk, but not for a sick disk; return whether it is.

        Only for callers that must not continue without it.
        """
        deadline = time.monotonic() + seconds
        with self._memory_lock:
            step = self._step
            while self._written_step < step:
                if self.degraded is not None or time.monotonic() >= deadline:
                    return False
                self._memory_lock.wait(min(SLOW / 4, seconds))
            return True

    @property
    def step(self) -> int:
        """The number of the newest step of memory."""
        return self._step

    def wait_step(self, step: int, seconds: float) -> None:
        """Wait until a step is on disk, at most ``seconds``, also for a sick disk."""

        def is_written() -> bool:
            return self._written_step >= step

        with self._memory_lock:
            self._memory_lock.wait_for(is_written, seconds)

    def do(self, action: Callable[[], T], patience: float) -> T:
        """Run ``action`` in the disk thread; return its result, or raise its error.

        Raises ``TimeoutError`` after ``patience`` seconds. An action that has begun by then may
        still end; no other one begins. While the thread hangs, no action is accepted.
        """
        timeout = TimeoutError(f"the disk has not answered for {patience:g} s")
        if self.hangs:
            raise timeout
        result: Future[T] = Future()
        with self._memory_lock:
            self._jobs.append(Job(action, result))
            self._memory_lock.notify_all()

        # in two halves: after a freeze of the machine, which may take all of the first one, the
        # thread still has the second
        for _ in range(2):
            wait([result], patience / 2)
            if result.done():
                return result.result()
        result.cancel()
        raise timeout

    def close(self) -> None:
        """Write all of memory, close the file, and release the directory.

        Does not wait for a sick disk.
        """
        for _ in range(2):  # the first attempt may find that the file was deleted or replaced
            with suppress(sqlite3.Error, OSError, StoreError):
                self.do(self._write_or_look, SLOW)
        with self._memory_lock:
            self._is_closing = True
            self._memory_lock.notify_all()
        if not self.hangs:  # a hanging thread ends with the process
            self._thread.join(CLOSE_PATIENCE)
        self.lock.release()

    # ---- in the thread

    def _run(self) -> None:
        while self._wait_for_work():
            self._busy_since = time.monotonic()
            self._work()
            self._busy_since = None
        self.file.forget()

    def _work(self) -> None:
        job = self._take_job()
        if job is not None:
            self._do_job(job)
        else:
            self._write_or_fail()

    def _wait_for_work(self) -> bool:
        """Wait for the next work; return False if there is none left and the thread is to end."""
        with self._memory_lock:
            pause = max(0.0, self._next_look - time.monotonic())
            self._memory_lock.wait_for(self._has_news, pause)
            return self._has_work() or not self._is_closing

    def _has_news(self) -> bool:
        return self._has_work() or self._is_closing

    def _has_work(self) -> bool:
        return len(self._jobs) > 0 or self._is_behind()

    def _is_behind(self) -> bool:
        """Whether a step can be written now."""
        return self._trouble is None and self._step > self._written_step

    def _take_job(self) -> Job | None:
        """Return the next job; ``None``: write or look first.

        Memory is written first, so that a job which reads the history finds the newest changes.
        """
        with self._memory_lock:
            is_look_due = time.monotonic() >= self._next_look
            if self._is_behind() or is_look_due or not self._jobs:
                return None
            return self._jobs.popleft()

    def _do_job(self, job: Job) -> None:
        if not job.result.set_running_or_notify_cancel():
            return
        try:
            result = job.action()
        except Exception as error:  # noqa: BLE001 - the caller of ``do`` gets any error
            self.file.forget()  # so that all of memory is written again
            if not isinstance(error, StoreError):  # a StoreError only refuses to begin
                self._note_failure(error)
            job.result.set_exception(error)
        else:
            job.result.set_result(result)

    def _write_or_fail(self) -> None:
        try:
            self._write_or_look()
        except Exception as error:  # noqa: BLE001 - such as a lack of memory; the thread continues
            self.file.forget()  # so that all of memory is written again
            self._note_failure(error)

    def _write_or_look(self) -> None:
        """Write memory if it has changed or the last attempt failed; else check the file."""
        if self._trouble is not None or self._is_behind():
            self._write()
        else:
            self._next_look = time.monotonic() + LOOK_INTERVAL
            self.file.check()

    def _write(self) -> None:
        started = time.monotonic()
        self.lock.hold()
        if self._is_unread and self.file.path.exists():
            self.file.set_aside("unread", "it could not be read at the start")
            self._is_unread = False  # if writing fails, the next file is not set aside
        with self._memory_lock:
            step = self._step
            unwritten = self._memory.collect_unwritten()
        self.file.write(unwritten.content, unwritten.changes)

        duration = time.monotonic() - started
        with self._memory_lock:
            was_in_trouble = self._trouble is not None
            self._is_unread = False
            self._written_step = step
            if duration < SLOW:
                self._trouble = None
                self._next_look = time.monotonic() + LOOK_INTERVAL
            else:
                self._trouble = f"writing took {duration:.1f} s"
                self._next_look = time.monotonic() + RETRY_INTERVAL
            self._memory.note_written(unwritten.changes)
            self._memory_lock.notify_all()
        if was_in_trouble and self._trouble is None:
            log.info("the state is written again: %s", self.file.path)

    def _note_failure(self, error: Exception) -> None:
        with self._memory_lock:
            was_in_trouble = self._trouble is not None
            self._trouble = str(error) or type(error).__name__
            self._next_look = time.monotonic() + RETRY_INTERVAL
            self._memory_lock.notify_all()
        if not was_in_trouble:
            log.error(
                "the state file cannot be written (%s): everything is written again as soon as"
                " possible",
                error,
            )
