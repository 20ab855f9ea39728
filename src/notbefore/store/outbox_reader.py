"""What the agent shows of the outbox."""

import sqlite3
import time
from pathlib import Path

from notbefore.errors import StoreError
from notbefore.metrics.outbox import OutboxView
from notbefore.metrics.totals import LATENCY_BOUNDS, Histogram
from notbefore.store.outbox import next_due
from notbefore.store.schema import BUSY_SECONDS, Inode, connect, inode_of


class OutboxReader:
    """What is in the outbox, kept as it was last read. ``refresh`` reads the file, and only if it has changed.

    ``refresh`` and ``close`` are called by one thread; ``view`` and ``next_due`` may be read by any, without waiting.
    ``spare``: the file that holds the outbox while it is there.
    """

    def __init__(self, path: Path, spare: Path | None = None) -> None:
        self._path = path
        self._spare = spare
        self._db: sqlite3.Connection | None = None
        self._file: Inode | None = None
        self._version: int | None = None
        self._read_at = 0.0  # Unix seconds
        self._kept: tuple[OutboxView, float | None] = (OutboxView(), None)

    @property
    def view(self) -> OutboxView:
        """What was in the outbox at the last ``refresh`` that could read it."""
        return self._kept[0]

    @property
    def next_due(self) -> float | None:
        """When the next delivery was due then, in Unix seconds; ``None`` without one."""
        return self._kept[1]

    def refresh(self) -> None:
        """Read the file, if it has changed. Never raises: what cannot be read stays as it is known."""
        try:
            db = self._open()
            version = db.execute("PRAGMA data_version").fetchone()[0]
            now = time.time()
            if version != self._version or now < self._read_at:  # the clock was set back: other rows may be due
                self._kept, self._version = (_view(db), next_due(db, now)), version
            self._read_at = now
        except (sqlite3.Error, StoreError, OSError):
            self.close()

    def _open(self) -> sqlite3.Connection:
        path, found = self._path, None
        if self._spare is not None and (found := inode_of(self._spare)) is not None:
            path = self._spare
        found = found or inode_of(path)
        if self._db is None or self._file != found:
            self.close()
            self._db, self._file = connect(path, "ro", BUSY_SECONDS), found
        return self._db

    def close(self) -> None:
        """Let go of the file; the next ``refresh`` opens it again."""
        if self._db is not None:
            self._db.close()
        self._db = self._version = None


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
    return OutboxView(
        rows={(sink, state): count for sink, state, count in rows},
        oldest={(sink, severity): created for sink, severity, created in pending},
        counts={(sink, result): count for sink, result, count in counts},
        latency={sink: Histogram(LATENCY_BOUNDS, tuple(found), sums[sink]) for sink, found in buckets.items()},
    )
