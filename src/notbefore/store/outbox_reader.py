"""What the agent shows of the outbox."""

import sqlite3
import threading
import time
from pathlib import Path

from notbefore.errors import StoreError
from notbefore.metrics.outbox import OutboxView
from notbefore.metrics.totals import LATENCY_BOUNDS, Histogram
from notbefore.store.outbox import next_due
from notbefore.store.schema import connect


class OutboxReader:
    """The outbox, read without ever waiting for a writer, and only when it has changed.

    Safe to call from several threads.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._version: int | None = None
        self._looked = 0.0  # Unix seconds
        self._view = OutboxView()
        self._due: float | None = None

    def look(self) -> tuple[OutboxView, float | None]:
        """What is in the outbox, and when the next of it is due; what was known last while it cannot be read."""
        with self._lock:
            try:
                db = self._open()
                version = db.execute("PRAGMA data_version").fetchone()[0]
                now = time.time()
                if version != self._version or now < self._looked:  # the clock was set back: other rows may be due
                    self._view, self._due, self._version = _view(db), next_due(db, now), version
                self._looked = now
            except (sqlite3.Error, StoreError, OSError):
                self.close()
            return self._view, self._due

    def _open(self) -> sqlite3.Connection:
        found = self._path.stat()
        if self._db is None or self._file != (
            found.st_dev,
            found.st_ino,
        ):  # the file was set aside, and a new one begun
            self.close()
            self._db = connect(self._path, "ro")
            self._file = (found.st_dev, found.st_ino)
        return self._db

    def close(self) -> None:
        """Let go of the file; the next look opens it again."""
        with self._lock:
            if self._db is not None:
                self._db.close()
            self._db = self._version = None


def _view(db: sqlite3.Connection) -> OutboxView:
    rows = db.execute("SELECT sink, state, count(*), min(created) FROM outbox GROUP BY sink, state").fetchall()
    latency: dict[str, Histogram] = {}
    for sink, bucket, count, total in db.execute("SELECT sink, bucket, count, sum FROM delivery_latency"):
        histogram = latency.setdefault(sink, Histogram.empty(LATENCY_BOUNDS))
        histogram.counts[bucket] += count
        histogram.sum += total
    counts = db.execute("SELECT sink, result, count FROM delivery_counts").fetchall()
    return OutboxView(
        rows={(sink, state): count for sink, state, count, _ in rows},
        oldest={sink: created for sink, state, _, created in rows if state == "pending"},
        counts={(sink, result): count for sink, result, count in counts},
        latency=latency,
    )
