"""``LockedDisk`` keeps SQLite's lock on a state file, so that its store cannot write."""

import sqlite3
from typing import Self

from notbefore.store.store import Store
from support.agent import eventually


class LockedDisk:
    """Prevents the writes of a store until ``heal``, or until the end of ``with``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = sqlite3.connect(
            store.path, isolation_level=None, timeout=5, check_same_thread=False
        )
        self._db.execute("BEGIN EXCLUSIVE")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def heal(self) -> None:
        """Release the lock, and wait until the store has written everything."""
        self._db.close()
        wait_until_written(self._store)


def wait_until_written(store: Store) -> None:
    """Wait until a store has written everything."""
    eventually(lambda: store.disk.wait_written(0) and store.disk.degraded is None)
