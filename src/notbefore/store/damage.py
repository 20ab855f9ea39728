"""Which errors of SQLite mean that a file is damaged, and where a damaged file is kept."""

import sqlite3
import time
from pathlib import Path
from typing import Final

DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # primary codes
PASSING: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)


def is_damage(error: Exception) -> bool:
    """Whether the file itself is the cause of the error."""
    return _primary_code(error) in DAMAGED


def is_passing(error: Exception) -> bool:
    """Whether the connection can be used again: somebody else writes, or there is no room."""
    return _primary_code(error) in PASSING


def _primary_code(error: Exception) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0)  # errors of the sqlite3 module itself carry none
    return code & 0xFF


def kept_aside(path: Path) -> Path:
    """Rename a damaged file, its log and its index; returns the new path. Raises ``OSError``."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.replace(aside.with_name(aside.name + suffix))
    return aside
