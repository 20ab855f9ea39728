"""One agent and one courier a state directory: advisory locks on files, gone with the process that held them."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from notbefore.errors import StoreError
from notbefore.store.disk import DiskThread
from notbefore.store.private import NO_FOLLOW, is_ours_alone, open_file

DISK_PATIENCE: Final = 0.5  # seconds for the disk of the lock to answer


class DirectoryLock:
    """``acquire`` raises ``StoreError`` while another process holds it, ``OSError`` where no file can be made."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "agent.lock"
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the lock; taking it twice is one hold."""
        if self._file is not None:
            return
        file = os.fdopen(open_file(self._path), "r+", encoding="ascii")
        try:
            _lock(file)
        except OSError as error:
            file.close()
            raise StoreError(
                f"another notbefore is running with {self._path.parent}: stop it, or give this one its own --state-dir"
            ) from error
        self._file = file

    def renew(self) -> None:
        """Take the lock again, on the file that is there now: the directory may have been deleted and made anew."""
        self.release()
        self.acquire()

    def release(self) -> None:
        """Let go; without a hold nothing happens."""
        if self._file is not None:
            self._file.close()
            self._file = None


class CourierLock:
    """``acquire`` waits until the previous courier has ended, and kills it where it does not: it has no agent any more.

    ``otherwise``: where the lock is while the state directory cannot be written and has none, while its disk hangs, and
    where the previous courier hangs in that disk, so that it cannot be killed. Raises ``OSError``.
    """

    def __init__(self, directory: Path, otherwise: Path | None = None) -> None:
        self._otherwise = otherwise
        self._disk = DiskThread(DISK_PATIENCE)
        try:
            self._file = self._disk.do(lambda: _lock_file(directory / "courier.lock"))
        except OSError:
            if otherwise is None:
                raise
            self._use_other(otherwise)

    def _use_other(self, directory: Path) -> None:
        self._file = _lock_file(directory / "courier.lock")
        self._disk, self._otherwise = DiskThread(DISK_PATIENCE), None

    def acquire(self, patience: float, beat: Callable[[], None]) -> None:
        """Take the lock; ``beat`` is called while waiting, ``patience`` is in seconds."""
        deadline = time.monotonic() + patience
        while True:
            with suppress(OSError):
                _lock(self._file)
                break
            beat()
            if time.monotonic() > deadline:
                self._end_holder()
                if time.monotonic() > deadline + DISK_PATIENCE and self._otherwise is not None:
                    with suppress(OSError):  # there is none while the disk is in order
                        self._use_other(self._otherwise)
            time.sleep(0.05)
        with suppress(OSError):  # a disk that is full or hangs: only who has to kill this process misses its id
            self._disk.do(self._write_id)

    def _write_id(self) -> None:
        os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        os.write(self._file.fileno(), b"%-10d" % os.getpid())  # in place: what the file has already needs no room

    def _end_holder(self) -> None:
        # the lock is held, so the process that wrote its id there is alive, and the id its own
        if not is_ours_alone(self._file.fileno()):
            return
        self._file.seek(0)
        holder = self._file.read().strip()
        if holder.isdigit() and int(holder) != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(int(holder), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows ends it at either

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disk.end()
        self._file.close()


def _lock_file(path: Path) -> IO[str]:
    try:
        return os.fdopen(open_file(path), "r+", encoding="ascii")
    except OSError:
        if path.exists():  # on a disk that can only be read a file can be locked all the same
            return _open_for_reading(path)
        raise


def _open_for_reading(path: Path) -> IO[str]:
    return os.fdopen(os.open(path, os.O_RDONLY | NO_FOLLOW), encoding="ascii")


@contextmanager
def no_courier(directory: Path) -> Iterator[bool]:
    """Keep couriers from starting for a moment; gives whether none runs. Nothing is made where none has ever run."""
    try:
        file = _open_for_reading(directory / "courier.lock")
    except OSError:
        yield False
        return
    with file:
        try:
            _lock(file)
        except OSError:
            yield False
        else:
            yield True


if sys.platform == "win32":  # pragma: no cover - the tests run on POSIX
    import msvcrt

    _BEYOND = 1 << 30  # what is locked there nobody can read: it is no byte of the file

    def _lock(file: IO[str]) -> None:
        file.seek(_BEYOND)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        file.seek(0)
else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
