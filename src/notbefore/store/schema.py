"""The schema of the state file, and a connection beside the agent's to a file that the agent has made."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from notbefore.errors import StoreError

BUSY_SECONDS: Final = 5.0  # how long to wait for another's transaction
SCHEMA: Final = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8").split("-- version ")[1:]
SCHEMA_VERSION: Final = len(SCHEMA)


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open a state file that the agent has made; raises ``StoreError`` where it is not there or of another version."""
    try:
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,
            timeout=BUSY_SECONDS,
            check_same_thread=False,
        )
        if mode == "rw":
            db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA cache_size = -256")
        version = db.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be opened ({error}): {_hint(path, mode)}") from None
    if version != SCHEMA_VERSION:
        db.close()
        raise StoreError(f"{path} is of schema {version}, this version knows {SCHEMA_VERSION}: start `notbefore run`")
    return db


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All that is done inside, or nothing; waits for another's transaction to end. Raises ``sqlite3.Error``."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # the first error is the one to tell
            db.execute("ROLLBACK")
        raise


def _hint(path: Path, mode: str) -> str:
    """SQLite does not say why. The file is not opened for it: closing it would let go of our own locks on it."""
    try:
        path.stat()
        forbidden = not os.access(path, os.R_OK if mode == "ro" else os.R_OK | os.W_OK)
    except OSError as error:
        forbidden = isinstance(error, PermissionError)
    if forbidden:
        return "it is not readable by you: run this as root or as the agent's user"
    return "has `notbefore run` been started here?"
