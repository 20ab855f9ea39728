"""A disk that takes nothing for a while: somebody else holds SQLite's lock on the state file."""

import sqlite3
from typing import Self

from notbefore.store.store import Store
from support.agent import eventually


class LockedDisk:
    """From its making on nothing can be written for ``store``, until ``heal``."""

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
        """Let it write again, and wait until all is written."""
        self._db.close()
        wait_until_written(self._store)


def wait_until_written(store: Store) -> None:
    """Wait until all is written."""
    eventually(lambda: store.disk.wait_written(0) and store.disk.degraded is None)
