"""The spare state file: in memory (`/dev/shm`), used while the state file cannot be written.

It is an ordinary state file, so the agent and the courier work on it as on the other. It begins with the outbox of the
state file, as far as that can be read, and its rows are merged into the state file when that can be written again.
It survives the end of the agent, but not the end of the machine.

One of the two files is in use at any time: the spare one, if it is there. The courier looks for it inside each of its
transactions (``CourierOutbox``), so no delivery is sent from both.
"""

import os
import sqlite3
import stat
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from notbefore.errors import StoreError
from notbefore.store.connection import open_database
from notbefore.store.copying import copy_table
from notbefore.store.disk import PATIENCE, DiskHangsError, DiskThread
from notbefore.store.outbox import Outbox
from notbefore.store.schema import connect_for_reading, transaction
from notbefore.store.state_file import FILE_NAME, MEMORY, StateFile

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a private directory is made there
HANGING_PATIENCE: Final = 0.5  # seconds to read from a disk that hangs: perhaps that is still possible
UNIT_DIRECTORY: Final = Path("/run/notbefore")  # RuntimeDirectory= of the unit, for commands that run outside of it
# `passed`: all deliveries that were ever in this file; `copied`: they came from the state file
_TABLES: Final = """
CREATE TABLE spare (name TEXT NOT NULL, complete INTEGER NOT NULL, caught_up INTEGER NOT NULL);
CREATE TABLE passed (delivery_id TEXT PRIMARY KEY, copied INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TRIGGER outbox_passed AFTER INSERT ON outbox
    BEGIN INSERT OR IGNORE INTO passed (delivery_id) VALUES (new.delivery_id); END;
"""


def spare_path(state_dir: Path) -> Path:
    """Where the agent of a state directory keeps its spare file, if it needs one."""
    given = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if given:
        return _path_in(Path(given), state_dir)
    if SHARED_MEMORY.is_dir():
        return _path_in(SHARED_MEMORY, state_dir)
    import tempfile  # noqa: PLC0415 - Linux needs it not

    return _path_in(Path(tempfile.gettempdir()), state_dir)


def is_there(path: Path) -> bool:
    """Whether this user has a spare file: what others put in its place is not read."""
    return _is_private(path.parent) and path.exists()


def file_in_use(state_dir: Path) -> Path:
    """The state file of a directory, or the spare one where that is in use: for commands beside the agent."""
    for path in (spare_path(state_dir), _path_in(UNIT_DIRECTORY, state_dir)):
        with suppress(OSError):
            if path.stat().st_uid in (os.geteuid(), state_dir.stat().st_uid):
                return path
    return state_dir / FILE_NAME


def make(
    path: Path,
    state_file: Path,
    write: Callable[[StateFile, bool], None],
    patience: float = PATIENCE,
    failed: Path | None = None,
) -> StateFile:
    """A new spare file, or a database in memory (``MEMORY``), in use from the moment at which it is complete.

    ``write`` adds what the state file lacks; it is given whether the outbox of that could be copied. Each piece of it
    is waited for ``patience`` seconds: what cannot be read then is sent when the disk answers again. ``failed``: a
    spare file that could not be written: if it can be read, its outbox is copied instead.

    Raises ``OSError`` where no private directory can be made, and ``sqlite3.Error``.
    """
    if path != MEMORY:
        _make_private(path.parent)
        remove(path)
    made = StateFile(path if path == MEMORY else path.with_name("unfinished.db"))
    made.open()
    try:
        made.db.executescript(_TABLES)
        with transaction(made.db) as db:
            from_failed = failed is not None and _copy_outbox(failed, db, patience)
            for table in ("delivery_counts", "delivery_latency") if from_failed else ():
                db.execute(f"DELETE FROM {table}")  # noqa: S608 - ours; they are added when that file is merged
            copied = from_failed or _copy_outbox(state_file, db, patience)
            complete = copied and not from_failed
            db.execute("UPDATE passed SET copied = 1")
            db.execute("INSERT INTO spare VALUES (?, ?, ?)", (_new_name(), complete, not complete))
        write(made, copied)
        if path == MEMORY:
            return made
    except BaseException:
        made.close()
        raise
    made.close()
    made.path.replace(path)
    spare = StateFile(path)
    spare.open()
    return spare


def _new_name() -> str:
    return os.urandom(8).hex()


def catch_up(outbox: Outbox, state_file: Path) -> None:
    """Before the courier's first turn on a spare file: take in what it did with the copied rows in the meantime.

    Nobody else leases or removes them, and once there is a spare file the courier does so nowhere else. So they are
    read outside of a transaction, for whose end the agent would wait.
    """
    with outbox.transaction() as db:
        if db.execute("SELECT caught_up FROM spare").fetchone()[0]:
            return
    reader, left = DiskThread(HANGING_PATIENCE), None
    with suppress(sqlite3.Error, StoreError, DiskHangsError):
        left = reader.do(lambda: _what_is_left(state_file))
    reader.end()
    with outbox.transaction() as db:
        for (delivery_id,) in db.execute("SELECT delivery_id FROM passed WHERE copied").fetchall():
            if left is None:
                break
            if delivery_id in left:
                db.execute(
                    "UPDATE outbox SET leased = ?, state = ?, due = ?, attempts = ?, error = ? WHERE delivery_id = ?",
                    (*left[delivery_id], delivery_id),
                )
            else:
                db.execute("DELETE FROM outbox WHERE delivery_id = ?", (delivery_id,))
        db.execute("UPDATE spare SET caught_up = 1")


def _what_is_left(state_file: Path) -> dict[str, tuple[Any, ...]]:
    with closing(connect_for_reading(state_file)) as main:
        query = "SELECT delivery_id, leased, state, due, attempts, error FROM outbox"
        return {delivery_id: tuple(values) for delivery_id, *values in main.execute(query)}


def is_merged(path: Path, merged: str) -> bool:
    """Whether this spare file is the one of that name: the agent that merged it ended before it removed the file."""
    with suppress(sqlite3.Error), closing(open_database(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        return bool(db.execute("SELECT name FROM spare").fetchone()[0] == merged)
    return False


def merge(
    spare: StateFile,
    main: StateFile,
    write: Callable[[sqlite3.Connection], None],
    do: Callable[[Callable[[], None]], None],
) -> None:
    """Merge a spare file into the state file, ``write`` what both lack, close the spare file and remove it.

    All of it is one transaction, during which the courier waits; ``do`` has the state file used, with a deadline. It
    may end at any point and be done again. Raises ``sqlite3.Error``, ``OSError`` or ``StoreError``: then the spare file
    stays in use.
    """
    hangs: DiskHangsError | None = None
    with transaction(spare.db) as source:
        name, complete = source.execute("SELECT name, complete FROM spare").fetchone()

        def into_main() -> None:
            with transaction(main.db) as db:
                if main.merged_spare() != name:
                    _take_over(source, db, complete=complete)
                write(db)
                main.mark_merged(db, name)

        try:
            do(into_main)
        except DiskHangsError as error:  # it may still be done: under a new name all is merged again
            source.execute("UPDATE spare SET name = ?", (_new_name(),))
            hangs = error
        else:
            remove(spare.path)  # before the courier gets in: it finds that the file is gone, and uses the other one
    if hangs is not None:
        raise hangs
    spare.close()


def remove(path: Path) -> None:
    """Remove a spare file, what is left of others, and their directory; nothing that another user has made."""
    if path == MEMORY or not _is_private(path.parent):
        return
    for found in path.parent.glob("*.db*"):
        found.unlink(missing_ok=True)
    with suppress(OSError):
        path.parent.rmdir()


def _take_over(spare: sqlite3.Connection, main: sqlite3.Connection, *, complete: bool) -> None:
    passed = spare.execute("SELECT delivery_id FROM passed").fetchall()
    main.executemany("DELETE FROM outbox WHERE delivery_id = ?", passed)
    copy_table(spare, main, "outbox")
    copy_table(spare, main, "threads", "REPLACE")
    copy_table(spare, main, "history")
    copy_table(spare, main, "unreadable_rows", "REPLACE")
    # where the outbox could be copied, its figures were too, and went on from there; else they began at 0
    keep = 0 if complete else 1
    for sink, result, count in spare.execute("SELECT sink, result, count FROM delivery_counts"):
        main.execute(
            "INSERT INTO delivery_counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET count = excluded.count + ? * count",
            (sink, result, count, keep),
        )
    for sink, bucket, count, total in spare.execute("SELECT sink, bucket, count, sum FROM delivery_latency"):
        main.execute(
            "INSERT INTO delivery_latency VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET count = excluded.count + ?5 * count, sum = excluded.sum + ?5 * sum",
            (sink, bucket, count, total, keep),
        )


def _copy_outbox(state_file: Path, db: sqlite3.Connection, patience: float) -> bool:
    """Copy the outbox and its figures; returns whether they could be read."""
    reader, tables = DiskThread(patience), ("outbox", "threads", "delivery_counts", "delivery_latency")
    opened: list[sqlite3.Connection] = []

    def close() -> None:
        for one in opened:
            one.close()

    try:
        reader.do(lambda: opened.append(connect_for_reading(state_file)))
        for table in tables:
            copy_table(opened[0], db, table, disk=reader)
    except (sqlite3.Error, StoreError, DiskHangsError):
        for table in (*tables, "passed"):
            db.execute(f"DELETE FROM {table}")  # noqa: S608 - one of ours
        return False
    finally:
        reader.post(close)  # after what hangs now: that may still open the file
        reader.end()
    return True


def _path_in(directory: Path, state_dir: Path) -> Path:
    path = os.fsencode(state_dir.resolve())
    name = f"{zlib.crc32(path):08x}{zlib.adler32(path):08x}"  # tells directories apart; no digest: see core/digest
    return directory / f"notbefore-{name}" / FILE_NAME


def _make_private(directory: Path) -> None:
    """Make a directory that only this user can use; raises ``OSError``, also if another user made one of that name."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if not _is_private(directory):
        raise PermissionError(f"{directory} is somebody else's")


def _is_private(directory: Path) -> bool:
    """Whether there is a directory, and only this user can use it."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    foreign = os.name == "posix" and (found.st_uid != os.geteuid() or found.st_mode & 0o077)
    return stat.S_ISDIR(found.st_mode) and not foreign
