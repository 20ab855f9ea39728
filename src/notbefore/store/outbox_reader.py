"""What the agent shows of the outbox."""

import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from notbefore.core.outbox import LATENCY_BOUNDS
from notbefore.errors import StoreError
from notbefore.metrics.outbox import OutboxView
from notbefore.metrics.totals import Histogram
from notbefore.store.disk import DiskHangsError, DiskThread
from notbefore.store.outbox import next_due
from notbefore.store.schema import BUSY_SECONDS, Inode, connect, inode_of


class OutboxReader:
    """What is in the outbox, kept as it was last read. ``refresh`` reads the file, and only if it has changed.

    ``refresh`` and ``close`` are called by one thread; ``view`` may be read by any, without waiting.
    ``disk``: the thread that reads the file ``path``. ``spare``: the file that holds the outbox while it is there.
    ``in_memory``: what is in the outbox while it is in no file. ``readable``: the last ``refresh`` could read it.
    """

    def __init__(
        self,
        path: Path,
        disk: DiskThread,
        spare: Path | None = None,
        in_memory: Callable[[], "OutboxRead | None"] = lambda: None,
    ) -> None:
        self._in_memory = in_memory
        self._main = _OutboxFile(path)
        self._spare = _OutboxFile(spare) if spare is not None else None
        self._disk = disk
        self._kept = OutboxRead(OutboxView(), None)
        self.readable = True

    @property
    def view(self) -> OutboxView:
        """What was in the outbox at the last ``refresh`` that could read it."""
        return self._kept.view

    def refresh(self) -> float | None:
        """Read the file, if it has changed; returns when the next delivery is due, in Unix seconds, if there is one.

        Never raises: what cannot be read stays as it is known.
        """
        self.readable = False
        with suppress(sqlite3.Error, StoreError, OSError):
            if (found := self._in_memory()) is not None:
                self._kept = found
            elif self._spare is not None and self._spare.path.exists():
                self._kept = self._spare.read()
            else:
                if self._spare is not None:
                    self._spare.close()
                self._kept = self._disk.do(self._main.read)
            self.readable = True
        return self._kept.next_due

    def close(self) -> None:
        """Close the files; the next ``refresh`` opens them again."""
        with suppress(DiskHangsError):
            self._disk.do(self._main.close)
        if self._spare is not None:
            self._spare.close()


class OutboxRead(NamedTuple):
    """What is in the outbox."""

    view: OutboxView
    next_due: float | None  # Unix seconds


def read_outbox(db: sqlite3.Connection, now: float) -> OutboxRead:
    """Read an outbox; ``now``: Unix seconds. Raises ``sqlite3.Error``."""
    return OutboxRead(_view(db), next_due(db, now))


class _OutboxFile:
    """One file that may hold the outbox; used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._inode: Inode | None = None
        self._last: _Reading | None = None

    def read(self) -> OutboxRead:
        """What is in it; raises ``sqlite3.Error``, ``StoreError`` or ``OSError``."""
        try:
            db = self._open()
            version, now = db.execute("PRAGMA data_version").fetchone()[0], time.time()
            last = self._last
            # where the clock was set back, other rows may be due
            found = last.found if last and last.version == version and last.time <= now else read_outbox(db, now)
            self._last = _Reading(version, now, found)
        except (sqlite3.Error, StoreError, OSError):
            self.close()
            raise
        return found

    def _open(self) -> sqlite3.Connection:
        inode = inode_of(self.path)
        if self._db is None or self._inode != inode:
            self.close()
            self._db, self._inode = connect(self.path, "ro", BUSY_SECONDS), inode
        return self._db

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
        self._db = self._last = None


class _Reading(NamedTuple):
    version: int  # SQLite's of the data, as this connection sees it
    time: float  # Unix seconds
    found: OutboxRead


def _view(db: sqlite3.Connection) -> OutboxView:
    rows = db.execute("SELECT sink, state, count(*) FROM outbox GROUP BY sink, state").fetchall()
    pending = db.execute(  # without what waits for other VMs to notify
        "SELECT sink, severity, min(created) FROM outbox WHERE state = 'pending' AND (ahead = '[]' OR attempts > 0)"
        " GROUP BY sink, severity"
    ).fetchall()
    buckets: dict[str, list[int]] = {}
    sums: dict[str, float] = {}
    for sink, bucket, count, total in db.execute("SELECT sink, bucket, count, sum FROM delivery_latency"):
        buckets.setdefault(sink, [0] * (len(LATENCY_BOUNDS) + 1))[bucket] += count
        sums[sink] = sums.get(sink, 0.0) + total
    counts = db.execute("SELECT sink, result, count FROM delivery_counts").fetchall()
    errors = db.execute("SELECT sink, error, max(created) FROM outbox WHERE error != '' GROUP BY sink").fetchall()
    return OutboxView(
        rows={(sink, state): count for sink, state, count in rows},
        oldest={(sink, severity): created for sink, severity, created in pending},
        counts={(sink, result): count for sink, result, count in counts},
        errors={sink: error for sink, error, _ in errors},
        latency={sink: Histogram(LATENCY_BOUNDS, tuple(found), sums[sink]) for sink, found in buckets.items()},
    )
