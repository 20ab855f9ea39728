"""``DiskThread``: the one thread that uses the disk.

It writes what is behind, and no other thread waits for that.

A failing disk raises an error; a hanging one does not: ``fsync`` returns after minutes or never,
and cannot be interrupted. After any doubt, all of memory is written again.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from notbefore.errors import StoreError
from notbefore.store.file import FILE_NAME, Content, StateFile, StoredChange
from notbefore.store.lock import OwnerLock

# seconds to read the file at the start; without it, every listed event would be new
START_PATIENCE: Final = 12.0
SLOW: Final = 1.0  # seconds; the disk counts as sick if a transaction takes as long
RETRY_INTERVAL: Final = 1.0  # seconds between attempts to write to a sick disk
LOOK_INTERVAL: Final = 10.0  # seconds between checks that the file is still ours
CLOSE_PATIENCE: Final = 1.5  # seconds to close the file

log = logging.getLogger("notbefore.store")

T = TypeVar("T")


class DiskThread:
    """Writes the memory of its owner. ``memory``: the lock of that memory.

    Never held while the disk is used.

    It is held for calls of ``collect``, which returns what is to be in the file and the news for
    its history, and of ``written``, which gets these news after that is on disk.
    """

    def __init__(
        self,
        directory: Path,
        memory: threading.Condition,
        collect: Callable[[], tuple[Content, Sequence[StoredChange]]],
        written: Callable[[Sequence[StoredChange]], None],
    ) -> None:
        self.file = StateFile(directory / FILE_NAME)
        self.lock = OwnerLock(directory)  # a courier inherits it
        self._memory = memory
        self._collect = collect
        self._written = written
        # actions, and where their results go
        self._jobs: deque[tuple[Callable[[], Any], SimpleQueue[Any]]] = deque()
        self._step = self._written_step = 0
        self._unread = True  # the content of the file is not in memory
        self._trouble: str | None = None  # why the last transaction failed
        self._next = time.monotonic() + LOOK_INTERVAL  # when to check or try the disk again
        self._since: float | None = None  # monotonic seconds: the start of the present work
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    # ---- the state of the disk

    @property
    def hangs(self) -> bool:
        """Whether the present work takes longer than ``SLOW``; maybe it never ends."""
        since = self._since
        return since is not None and time.monotonic() - since > SLOW

    @property
    def degraded(self) -> str | None:
        """Why memory is not on disk, in words; ``None``: it is, or will be in a moment."""
        return self._trouble or (
            f"the disk has not answered for {SLOW:g} s" if self.hangs else None
        )

    # ---- for the owner of the memory

    def load(self) -> Content:
        """Return the content of the file; empty if it cannot be read: it will be set aside.

        Raises ``StoreError``.
        """

        def read() -> Content:
            self.lock.hold()
            return self.file.load()

        try:
            loaded = self.do(read, START_PATIENCE)
        except StoreError:
            self.close()
            raise
        except (sqlite3.Error, OSError) as error:
            self._failed(error)
            return Content()
        self._unread = False
        return loaded

    def stepped(self) -> None:
        """Let memory be written: it has changed. The caller holds the lock."""
        self._step += 1
        self._memory.notify_all()

    def wait_written(self, seconds: float) -> bool:
        """Wait until all of memory is on disk, but not for a sick disk; return whether it is.

        Only for callers that must not continue without it.
        """
        deadline = time.monotonic() + seconds
        with self._memory:
            step = self._step
            while (
                self._written_step < step and self.degraded is None and time.monotonic() < deadline
            ):
                self._memory.wait(min(SLOW / 4, seconds))
            return self._written_step >= step

    @property
    def step(self) -> int:
        """The number of the newest step of memory."""
        return self._step

    def wait_step(self, step: int, seconds: float) -> None:
        """Wait until a step is on disk, at most ``seconds``, also for a sick disk."""
        with self._memory:
            self._memory.wait_for(lambda: self._written_step >= step, seconds)

    def do(self, action: Callable[[], T], patience: float) -> T:
        """Return the result of ``action``, or raise its error.

        ``TimeoutError`` after ``patience`` seconds.

        Then it is not known what it has done, and it may go on later. While the thread hangs, no
        action begins.
        """
        if not self.hangs:
            answer = SimpleQueue[tuple[T] | Exception]()
            with self._memory:
                self._jobs.append((action, answer))
                self._memory.notify_all()
            for _ in range(
                2
                # if the machine was frozen for longer than ``patience``, the thread has half of it
                # left
            ):
                with suppress(Empty):
                    result = answer.get(timeout=patience / 2)
                    if isinstance(result, Exception):
                        raise result
                    return result[0]
            with self._memory, suppress(ValueError):  # the action has begun
                self._jobs.remove((action, answer))
        raise TimeoutError(f"the disk has not answered for {patience:g} s")

    def close(self) -> None:
        """Write what is behind, close the file, and release the directory.

        Does not wait for a sick disk.
        """
        for _ in range(2):  # the first attempt may find that the file was deleted or replaced
            with suppress(sqlite3.Error, OSError, StoreError):
                self.do(self._write_or_look, SLOW)
        with self._memory:
            self._ends = True
            self._memory.notify_all()
        # a hanging thread ends with the process
        self._thread.join(0.0 if self.hangs else CLOSE_PATIENCE)
        self.lock.release()

    # ---- in the thread

    def _run(self) -> None:
        while True:
            with self._memory:
                pause = max(0.0, self._next - time.monotonic())
                self._memory.wait_for(lambda: self._jobs or self._ends or self._is_behind(), pause)
                # then the history has the news
                first = self._is_behind() or time.monotonic() >= self._next
                job = None if first or not self._jobs else self._jobs.popleft()
                if self._ends and not (self._jobs or job or self._is_behind()):
                    break
            self._since = time.monotonic()
            action, answer = job or (self._write_or_look, SimpleQueue())
            try:
                answer.put((action(),))
            except Exception as error:  # noqa: BLE001 - such as no memory; the caller of ``do`` gets its own
                self.file.forget()  # now everything is behind
                if job is None or not isinstance(error, StoreError):  # which only refuses to begin
                    self._failed(error)
                answer.put(error)
            self._since = None
        self.file.forget()

    def _is_behind(self) -> bool:
        return self._trouble is None and self._step > self._written_step

    def _write_or_look(self) -> None:
        """Write what is behind, or try to; if nothing is, check that the file is still ours."""
        begun = time.monotonic()
        if self._trouble is None and not self._is_behind():
            self._next = begun + LOOK_INTERVAL
            self.file.check()
            return
        self.lock.hold()
        if self._unread and self.file.path.exists():  # do not overwrite its content
            self.file.set_aside("unread", "it could not be read at the start")
            self._unread = False  # if writing fails, the next file is not kept in place of this one
        with self._memory:
            step, (content, news) = self._step, self._collect()
        self.file.write(content, news)
        took = time.monotonic() - begun
        with self._memory:
            self._unread, self._written_step = False, step
            before, self._trouble = (
                self._trouble,
                f"writing took {took:.1f} s" if took >= SLOW else None,
            )
            self._next = time.monotonic() + (
                LOOK_INTERVAL if self._trouble is None else RETRY_INTERVAL
            )
            self._written(news)
            self._memory.notify_all()
        if before is not None and self._trouble is None:
            log.info("the state is written again: %s", self.file.path)

    def _failed(self, error: Exception) -> None:
        with self._memory:
            first, self._trouble = self._trouble is None, str(error) or type(error).__name__
            self._next = time.monotonic() + RETRY_INTERVAL
            self._memory.notify_all()
        if first:
            log.error(
                "the state file cannot be written (%s): everything is written again as soon as"
                " possible",
                error,
            )
