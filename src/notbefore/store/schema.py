"""The schema of the state file: how a file is brought to it, and how others than the agent open the file."""

import os
import pkgutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from notbefore.errors import StoreError
from notbefore.store.connection import open_database

BUSY_SECONDS: Final = 0.5  # how long the agent and its courier wait for another's transaction
COMMAND_BUSY_SECONDS: Final = 5.0  # how long commands wait for it
SCHEMA: Final = (pkgutil.get_data(__package__, "schema.sql") or b"").decode()  # also from a ZIP: courier/package.py
SCHEMA_VERSION: Final = 1
MIGRATIONS: Final[dict[int, str]] = {}  # schema version -> the statements that lead to the next one


Inode = tuple[int, int]  # device and number: what a path leads to


def inode_of(path: Path) -> Inode | None:
    """What a path leads to now; ``None`` where there is nothing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def connect(path: Path, mode: str, busy_seconds: float = COMMAND_BUSY_SECONDS) -> sqlite3.Connection:
    """Open a state file that the agent has made; ``mode`` is ``ro`` or ``rw``.

    Raises ``StoreError`` where there is no such file, where it may not be read, or where its schema is another.
    """
    try:
        db, version = _open(f"{path.absolute().as_uri()}?mode={mode}", busy_seconds)
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be opened ({error}): {hint(path, mode)}") from None
    if version != SCHEMA_VERSION:
        db.close()
        raise StoreError(_other_schema(path, version))
    return db


def connect_for_reading(path: Path) -> sqlite3.Connection:
    """Open a state file to read it once, also on a disk that is full, read-only, or hangs for all that write to it.

    Raises ``StoreError``.
    """
    # without one of these words SQLite would make a file beside it, or open one for writing
    log = inode_of(path.with_name(path.name + "-wal"))  # without a log nobody has it open, so nobody writes
    with suppress(sqlite3.Error):
        how = "immutable=1" if log is None else "readonly_shm=1"
        db, version = _open(f"{path.absolute().as_uri()}?mode=ro&{how}", BUSY_SECONDS)
        if version == SCHEMA_VERSION:
            return db
        db.close()
    return connect(path, "ro", BUSY_SECONDS)


def _open(uri: str, busy_seconds: float) -> tuple[sqlite3.Connection, int]:
    db = open_database(uri, uri=True, isolation_level=None, timeout=busy_seconds, check_same_thread=False)
    try:
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA cache_size = -256")
        return db, _version(db)
    except BaseException:
        db.close()
        raise


def _other_schema(path: Path, version: int) -> str:
    if version < SCHEMA_VERSION:
        return f"{path} was written by an older notbefore: start `notbefore run`, which brings it up to date"
    return (
        f"{path} was written by a newer notbefore (schema {version}, this one knows {SCHEMA_VERSION}): "
        "install that version again, or move the file away to begin anew"
    )


def bring_up_to_date(db: sqlite3.Connection, path: Path) -> None:
    """Give a new file its schema, and an older one the schema of this version, after a copy of it was made.

    Raises ``StoreError`` where a newer version of notbefore wrote the file, and ``sqlite3.Error``.
    """
    version = _version(db)
    if version > SCHEMA_VERSION:
        raise StoreError(_other_schema(path, version))
    if version == 0:
        _execute(db, SCHEMA, SCHEMA_VERSION)
    elif version < SCHEMA_VERSION:
        _copy(db, path.with_name(f"{path.name}.schema-{version}"))
    for older in range(version or SCHEMA_VERSION, SCHEMA_VERSION):
        _execute(db, MIGRATIONS[older], older + 1)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All that is done inside, or nothing; waits for another's transaction to end. Raises ``sqlite3.Error``."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # the first error is the one to report
            db.execute("ROLLBACK")
        raise


def _version(db: sqlite3.Connection) -> int:
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    return version


def _execute(db: sqlite3.Connection, statements: str, version: int) -> None:
    # `executescript` ends a transaction that is open, so it has to begin its own
    db.executescript(f"BEGIN IMMEDIATE;\n{statements}\nPRAGMA user_version = {version};\nCOMMIT;")


def _copy(db: sqlite3.Connection, path: Path) -> None:
    path.unlink(missing_ok=True)  # of a migration that did not end
    with closing(open_database(path)) as copy:
        db.backup(copy)


def hint(path: Path, mode: str) -> str:
    """Return what to do about a state file that cannot be opened: SQLite does not say why.

    The file is not opened for it: closing it would release our own locks on it.
    """
    try:
        path.stat()
        forbidden = not os.access(path, os.R_OK if mode == "ro" else os.R_OK | os.W_OK)
    except OSError as error:
        forbidden = isinstance(error, PermissionError)
    if forbidden:
        return "it is not readable by you: run this as root or as the agent's user"
    return "has `notbefore run` been started here?"
