"""One agent and one courier a state directory: advisory locks on files, gone with the process that held them."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from notbefore.errors import StoreError
from notbefore.store.disk import DiskThread
from notbefore.store.private import NO_FOLLOW, is_ours_alone, open_file

LOCK_PATIENCE: Final = 2.0  # seconds for the courier of an agent that was killed to end
DISK_PATIENCE: Final = 0.5  # seconds for the disk of the lock to answer


class DirectoryLock:
    """``acquire`` raises ``StoreError`` while another process holds it, ``OSError`` where no file can be made.

    An agent that was killed while it waited for the disk holds it until the disk answers: that is an ``OSError`` too.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "agent.lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; taking it twice is one hold."""
        if self._descriptor is not None:
            return
        descriptor = open_file(self._path)
        try:
            _lock(descriptor)
        except OSError as error:
            holder = _read_id(descriptor)
            os.close(descriptor)
            if holder is not None and is_zombie(holder):
                raise OSError(f"the previous agent was killed, but process {holder} waits for the disk") from None
            raise StoreError(
                f"another notbefore is running with {self._path.parent}: stop it, or give this one its own --state-dir"
            ) from error
        self._descriptor = descriptor
        with suppress(OSError):
            _write_id(descriptor)
            os.fsync(descriptor)  # a disk that hangs is waited for here: SQLite would do it with locks of its own

    def renew(self) -> None:
        """Take the lock again, on the file that is there now: the directory may have been deleted and made again."""
        self.release()
        self.acquire()

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class OwnerLock:
    """The lock on the state directory: who holds it writes there, and sends. Its courier inherits it, and ends with it.

    ``descriptor``: of the lock, for the courier; ``None`` while it is not held.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.descriptor: int | None = None

    def acquire(self, patience: float = LOCK_PATIENCE) -> None:
        """Take the lock; what a killed agent left running ends within a moment, so it is waited for: ``patience``.

        Raises ``StoreError`` while another process holds it, ``OSError`` where there is no directory.
        """
        descriptor = _open_directory(self._directory)
        deadline = time.monotonic() + patience
        while True:
            try:
                _lock(descriptor)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    raise StoreError(
                        f"another notbefore is running with {self._directory}: stop it, or give this one its own"
                        " --state-dir"
                    ) from error
            time.sleep(0.01)
        self.release()
        self.descriptor = descriptor

    def is_of(self, directory: Path) -> bool:
        """It is held, and on the directory that is there now."""
        with suppress(FileNotFoundError):
            return self.descriptor is not None and os.path.samestat(os.fstat(self.descriptor), directory.stat())
        return False

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class CourierLock:
    """``acquire`` waits until the previous courier has ended, and kills it where it does not: it has no agent any more.

    ``otherwise``: where the lock is while the disk of the state directory hangs, and where the previous courier hangs
    in it, so that it cannot be killed; once that directory is there.
    """

    def __init__(self, directory: Path, otherwise: Path | None = None) -> None:
        self._directory = directory
        self._otherwise = otherwise
        self._disk = DiskThread(DISK_PATIENCE)
        self._descriptor: int | None = None
        self._others = 0  # locks of that directory that were tried

    def acquire(self, patience: float, waiting: Callable[[], None]) -> None:
        """Take the lock; ``waiting`` is called while waiting, ``patience`` is in seconds. Raises ``OSError``."""
        begun = time.monotonic()
        while not self._is_taken(time.monotonic() - begun - patience):
            waiting()
            time.sleep(0.05)
        if (descriptor := self._descriptor) is not None:
            # only who has to kill this process misses its id meanwhile: it is not given up, however slow all this is
            self._disk.post(lambda: _write_id(descriptor)).wait(DISK_PATIENCE)

    def _is_taken(self, overdue: float) -> bool:
        """Try once; ``overdue``: seconds for which the previous courier should have been gone."""
        if self._descriptor is None:
            self._open(last=overdue > 0)
        if self._descriptor is None:
            return False
        with suppress(OSError):
            _lock(self._descriptor)
            return True
        holder = self._holder()
        if overdue > 0 and holder is not None:
            with suppress(ProcessLookupError):
                os.kill(holder, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows ends it at either
        if (overdue > DISK_PATIENCE and not self._others) or (holder is not None and is_zombie(holder)):
            self._use_other()
        return False

    def _open(self, *, last: bool) -> None:
        try:
            self._descriptor = self._disk.do(lambda: _open_lock(self._directory))
        except OSError:
            if not self._use_other() and (last or self._otherwise is None):
                raise

    def _use_other(self) -> bool:
        """Use the next lock of the other directory, if there is one by now."""
        if self._otherwise is None or not self._otherwise.is_dir():
            return False
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._others += 1
        self._descriptor = _open_lock(self._otherwise, f"courier-{self._others}.lock")
        self._disk = DiskThread(DISK_PATIENCE)
        return True

    def _holder(self) -> int | None:
        """The process that holds the lock: the id that it wrote there is its own, for it is alive."""
        descriptor = self._descriptor
        if descriptor is None or not is_ours_alone(descriptor):
            return None
        with suppress(OSError):  # the disk hangs
            return self._disk.do(lambda: _read_id(descriptor))
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if (descriptor := self._descriptor) is not None:
            self._disk.post(lambda: os.close(descriptor)).wait(DISK_PATIENCE)  # after its id was written
        self._disk.end()


def _write_id(descriptor: int) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, b"%-10d" % os.getpid())  # in place: what the file has already needs no room


def _read_id(descriptor: int) -> int | None:
    """The process that has written its id there; ``None``: nobody has, or this one."""
    with suppress(OSError):  # it is a directory
        os.lseek(descriptor, 0, os.SEEK_SET)
        found = os.read(descriptor, 10).strip()
        return int(found) if found.isdigit() and int(found) != os.getpid() else None
    return None


def is_zombie(process: int) -> bool:
    """It has ended, but for a thread that waits for a disk: it holds its files and locks for as long as that takes."""
    with suppress(OSError):  # only Linux says so
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    return False


def _open_lock(directory: Path, name: str = "courier.lock") -> int:
    path = directory / name
    try:
        return open_file(path)
    except OSError:
        # on a disk that can only be read a file can be locked all the same; where there is none, the directory
        return _open_for_reading(path if path.exists() else directory)


def _open_for_reading(path: Path) -> int:
    return os.open(path, os.O_RDONLY | NO_FOLLOW)


@contextmanager
def no_courier(directory: Path) -> Iterator[bool]:
    """Keep couriers from starting for a moment; gives whether none runs. Nothing is made where none has ever run."""
    try:
        descriptor = _open_for_reading(directory / "courier.lock")
    except OSError:
        yield False
        return
    try:
        _lock(descriptor)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


if sys.platform == "win32":  # pragma: no cover - the tests run on POSIX
    import msvcrt

    _BEYOND = 1 << 30  # what is locked there nobody can read: it is no byte of the file

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, _BEYOND, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _open_directory(directory: Path) -> int:
        return open_file(directory / "agent.lock")  # a directory cannot be opened there
else:
    import fcntl

    def _open_directory(directory: Path) -> int:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | NO_FOLLOW)

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
