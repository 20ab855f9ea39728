"""``open_database``: connections to SQLite that only ``close`` closes."""

import sqlite3
from pathlib import Path
from typing import Any, Final

_open: Final[set["Connection"]] = set()


class Connection(sqlite3.Connection):
    """Kept until it is closed, whoever uses it.

    The garbage collector would close it in whatever thread it happens to run in. That one would then wait for a disk
    that hangs: closing the last connection writes to the state file.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _open.add(self)

    def close(self) -> None:
        """Close it; this may wait for the disk."""
        super().close()
        _open.discard(self)


def open_database(path: Path | str, **settings: Any) -> Connection:
    """Open a file; ``settings`` as for ``sqlite3.connect``. Raises ``sqlite3.Error``."""
    return sqlite3.connect(path, factory=Connection, **settings)
