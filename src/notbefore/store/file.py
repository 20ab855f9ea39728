"""``StateFile``: the one SQLite file that follows what the agent remembers. All SQL statements are here.

One process reads and writes it, in one thread. So there is no write-ahead log: ``journal_mode=TRUNCATE``, and
``synchronous=EXTRA``. Each transaction asks SQLite whether somebody else has written to the file (``data_version``),
and looks where its path leads: one that was restored or overwritten meanwhile is noticed, and written anew.
"""

import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from notbefore.core.approval import ApprovalAttempt
from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.delivery import Delivery
from notbefore.core.outbox_rows import Ledger, OutboxChanges, OutboxImage
from notbefore.core.record import Vm
from notbefore.core.tracked import Tracked
from notbefore.errors import StoreError
from notbefore.metrics.totals import Totals
from notbefore.store import SCHEMA_VERSION
from notbefore.store.lock import Inode, inode_of, prepare_file

FILE_NAME: Final = "notbefore.db"
BUSY_SECONDS: Final = 0.5  # for another's transaction, such as that of a backup
OPENING_SECONDS: Final = 10.0  # the same where the file is opened: at the start it is all that is known
HISTORY_ROWS: Final = 10_000
HISTORY_BYTES: Final = 64 * 1024 * 1024  # of the records in it; the oldest are deleted
_SCHEMA: Final = f"""
BEGIN IMMEDIATE;
-- What is remembered, as MessagePack. kind: state, delivery, thread, ledger, file
CREATE TABLE rows (
    kind TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (kind, key)
) WITHOUT ROWID;
CREATE TABLE history (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    change_id TEXT NOT NULL,
    time      REAL NOT NULL,  -- Unix seconds, at which the change was seen
    record    BLOB NOT NULL,  -- core.record as JSON
    UNIQUE (change_id, time)
);
CREATE INDEX history_time ON history (time);
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_ROWS: Final = "SELECT kind, key, body FROM rows"
_TOO_MANY_BYTES: Final = """
    DELETE FROM history WHERE seq <= (SELECT max(seq) FROM (
        SELECT seq, sum(length(record)) OVER (ORDER BY seq DESC) AS bytes FROM history) WHERE bytes > ?)
"""

log = logging.getLogger("notbefore.store")


class StoredState(Struct, frozen=True):
    """What the agent remembers across restarts."""

    tracked: Tracked = Tracked()
    totals: Totals = Totals()
    vm: Vm | None = None
    seen: Instant | None = None  # the last good answer of IMDS before this was staged
    seen_by: Vm | None = None  # who this VM was then, if known: a disk may move to another one
    last_running: Instant | None = None  # when the machine was last known to be running
    clean: bool = False  # the agent stopped in order, at ``last_running``
    approvals: dict[str, ApprovalAttempt] = {}  # by the event's key

    @property
    def boot_id(self) -> str:
        """The boot of the machine in which IMDS answered last; empty before the first answer."""
        return self.seen.boot if self.seen is not None else ""


class FileReplacedError(OSError):
    """The file is not the one that was written last: it was deleted, restored or overwritten."""


class StoredChange(Struct, frozen=True):
    """One change as it is kept. ``record``: the change as JSON, UTF-8. ``deliveries``: what is to be sent of it."""

    change: Change
    record: bytes
    deliveries: tuple[Delivery, ...] = ()


class FileClock(Struct, frozen=True):
    """When a file was written, by clocks that nobody sets."""

    boot: str = ""  # the boot of the machine to which ``clock`` belongs
    clock: float = 0.0  # seconds: the times of the rows are on this clock
    date: float | None = None  # Unix seconds by IMDS's clock, if that is known


class Loaded(NamedTuple):
    """What a file holds."""

    state: StoredState
    outbox: OutboxImage
    clock: FileClock
    unreadable: int  # rows that could not be read; each is named in the log, and dropped


class Writing(NamedTuple):
    """What one transaction writes."""

    state: StoredState
    outbox: OutboxChanges
    records: Sequence[StoredChange]
    clock: FileClock
    everything: bool  # there is nothing but this: all other rows are deleted


class StateFile:
    """For one thread at a time. Its methods raise ``sqlite3.Error``, ``OSError`` and ``StoreError``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0  # how often it was set aside since it was damaged
        self.unreadable_rows = 0  # found at the start
        self._db: sqlite3.Connection | None = None
        self._inode: Inode | None = None  # of the open file
        self._version: int | None = None  # of what is in the file, by SQLite's count; None: that is not known
        self._state: StoredState | None = None  # as it stands in the file

    def load(self) -> Loaded:
        """What was written last; empty where there is no file. A damaged one is set aside, and read as far as it goes.

        Raises ``StoreError`` where a newer version of notbefore wrote it.
        """
        try:
            db = self._open()
            version = _version_of(db)
            loaded = _read(db.execute(_ROWS))
        except sqlite3.Error as error:
            self._set_aside_damaged(error)
            loaded = _salvaged(self._aside("damaged"))
        else:
            if not loaded.unreadable:
                self._version, self._state = version, loaded.state
        self.unreadable_rows = loaded.unreadable
        return loaded

    @property
    def known(self) -> bool:
        """It is known what is in it; else all has to be written."""
        return self._version is not None

    def write(self, writing: Writing) -> None:
        """Write it in one transaction. Raises ``FileReplacedError`` where another file is there by now."""
        with self._damage_noticed():
            db = self._open()
            self.check()
            self._transact(db, writing)
            self.check()

    @contextmanager
    def _damage_noticed(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self._set_aside_damaged(error)
            raise FileReplacedError(f"{self.path} is damaged") from error

    def _transact(self, db: sqlite3.Connection, writing: Writing) -> None:
        rows: dict[tuple[str, str], Any] = {("delivery", one): row for one, row in writing.outbox.rows.items()}
        rows |= {("thread", "\n".join(lane)): thread for lane, thread in writing.outbox.threads.items()}
        rows |= {("ledger", ""): writing.outbox.ledger, ("file", ""): writing.clock}
        if writing.everything or writing.state is not self._state:
            rows["state", ""] = writing.state
        db.execute("BEGIN IMMEDIATE")
        try:
            version = _version_of(db)  # what is written here does not change it
            if writing.everything:
                db.execute("DELETE FROM rows")
            elif version != self._version:
                raise FileReplacedError(f"{self.path} was overwritten")  # noqa: TRY301 - the transaction is rolled back
            gone = [key for key, value in rows.items() if value is None]
            db.executemany("DELETE FROM rows WHERE kind = ? AND key = ?", gone)
            kept = [(*key, msgspec.msgpack.encode(value)) for key, value in rows.items() if value is not None]
            db.executemany("REPLACE INTO rows VALUES (?, ?, ?)", kept)
            if writing.records:
                self._add_history(db, writing.records)
            db.execute("COMMIT")
        except BaseException:
            self.forget()  # which rolls it back; after any failure all is written anew
            raise
        self._version, self._state = version, writing.state

    def _add_history(self, db: sqlite3.Connection, changes: Sequence[StoredChange]) -> None:
        records = [(one.change.id, one.change.time.timestamp(), one.record) for one in changes]
        db.executemany("INSERT OR IGNORE INTO history (change_id, time, record) VALUES (?, ?, ?)", records)
        db.execute("DELETE FROM history WHERE seq <= (SELECT max(seq) FROM history) - ?", (HISTORY_ROWS,))
        if db.execute("SELECT sum(length(record)) FROM history").fetchone()[0] > HISTORY_BYTES:
            db.execute(_TOO_MANY_BYTES, (HISTORY_BYTES,))

    def history(self, since: float, limit: int, max_bytes: int) -> tuple[list[bytes], bool]:
        """The newest records since a Unix time, newest first, and whether ``max_bytes`` cut off older ones.

        Raises ``FileReplacedError`` where the file is damaged.
        """
        query = "SELECT record FROM history WHERE time >= ? ORDER BY seq DESC LIMIT ?"
        found: list[bytes] = []
        with self._damage_noticed():
            for (record,) in self._open().execute(query, (since, limit)):
                max_bytes -= len(record)
                if found and max_bytes < 0:
                    return found, True
                found.append(record)
        return found, False

    def check(self) -> None:
        """Raise ``FileReplacedError`` where the path leads to another file than the open one, or to none."""
        if self._db is not None and inode_of(self.path) != self._inode:
            raise FileReplacedError(f"{self.path} was deleted or replaced")

    def forget(self) -> None:
        """After a failure: close the file; the next ``write`` opens what is there, and has to write everything."""
        db, self._db, self._version = self._db, None, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            prepare_file(self.path)
            self._inode = inode_of(self.path)
            # autocommit: transactions are begun and ended here alone
            db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=OPENING_SECONDS)
            try:
                _prepare(db, self.path)
            except BaseException:
                db.close()
                raise
            self._db = db
        return self._db

    def _set_aside_damaged(self, error: sqlite3.Error) -> None:
        """Raises any other error."""
        if _code_of(error) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise error
        self.damaged += 1
        self.set_aside("damaged", f"it is damaged ({error})")

    def set_aside(self, mark: str, why: str) -> None:
        """Rename the file, with what belongs to it: SQLite would take that for the next file's."""
        self.forget()
        aside = self._aside(mark)
        for suffix in ("", "-journal", "-wal", "-shm"):
            there, kept = (path.with_name(path.name + suffix) for path in (self.path, aside))
            kept.unlink(missing_ok=True)
            if there.exists():
                there.replace(kept)
        if self.damaged in (0, 1):  # a disk may damage whatever is written, each second
            log.error("the state file is set aside: %s. It is kept as %s, and a new one is used", why, aside)

    def _aside(self, mark: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{mark}")


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Set up a connection, and a file that is new. Raises ``StoreError`` for one of a newer version."""
    db.execute("PRAGMA cache_size = -256")  # KiB: the file is small, and so shall the agent be
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer notbefore (schema {version}, this one knows {SCHEMA_VERSION}):"
            " install that version again, or move the file away to begin anew"
        )
    result = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if 0 < version < SCHEMA_VERSION:
        result = "an older notbefore wrote it, in a form that is not read any more"
    if result != "ok":
        error = sqlite3.DatabaseError(result)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error
    db.execute("PRAGMA journal_mode = TRUNCATE")
    db.execute("PRAGMA synchronous = EXTRA")
    if version == 0:
        db.executescript(_SCHEMA)
    db.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:.0f}")


# ---- reading

_TYPES: Final[dict[str, Any]] = {
    "state": StoredState,
    "delivery": Delivery,
    "thread": str,
    "ledger": Ledger,
    "file": FileClock,
}


def _read(rows: Iterable[tuple[str, str, bytes]]) -> Loaded:
    """What rows say; a row that cannot be read costs that row."""
    found: dict[str, dict[str, Any]] = {kind: {} for kind in _TYPES}
    unreadable = 0
    for kind, key, body in rows:
        try:
            found[kind][key] = msgspec.msgpack.decode(body, type=_TYPES[kind])
        except (ValueError, KeyError) as error:  # MsgspecError is a ValueError
            log.warning("a row of the state file cannot be read (%s %s): %s", kind, key, error)
            unreadable += 1
    clock = found["file"].get("", FileClock())
    # the key of a thread is a sink and an event
    threads = tuple((key.partition("\n")[::2], thread) for key, thread in found["thread"].items())
    image = OutboxImage(clock.clock, tuple(found["delivery"].values()), threads, found["ledger"].get("", Ledger()))
    return Loaded(found["state"].get("", StoredState()), image, clock, unreadable)


def _salvaged(path: Path) -> Loaded:
    """What a damaged file holds, up to a row that cannot be read."""
    rows: list[tuple[str, str, bytes]] = []
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db, suppress(sqlite3.Error):
        for row in db.execute(_ROWS):
            rows.append(row)  # noqa: PERF402 - `extend` would lose those before the damage
    return _read(rows)


def _version_of(db: sqlite3.Connection) -> int:
    """Another number than before, where anybody but this connection has written to the file."""
    version: int = db.execute("PRAGMA data_version").fetchone()[0]
    return version


def _code_of(error: sqlite3.Error) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0)  # errors of the sqlite3 module itself carry none
    return code & 0xFF
