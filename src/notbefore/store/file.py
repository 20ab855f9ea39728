"""``StateFile``: the one SQLite file that follows what the agent remembers.

All its SQL statements are here.

One process reads and writes it, in one thread. So it has no write-ahead log:
``journal_mode=TRUNCATE``, and ``synchronous=EXTRA``. Each transaction asks SQLite whether another
connection wrote to the file (``data_version``), and compares the inode at its path. This shows that
a file was restored or overwritten; then everything is written again.
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
from notbefore.core.delivery import Delivery, Lane
from notbefore.core.outbox_rows import Ledger, OutboxImage
from notbefore.core.record import HISTORY_RECORDS, Vm
from notbefore.core.tracked import Tracked
from notbefore.errors import StoreError
from notbefore.metrics.totals import Totals
from notbefore.store import SCHEMA_VERSION
from notbefore.store.lock import Inode, inode_of, prepare_file

FILE_NAME: Final = "notbefore.db"
# seconds to wait for a transaction of another process, such as a backup
BUSY_SECONDS: Final = 0.5
# the same while the file is opened: longer, because at the start only the file has the state
OPENING_SECONDS: Final = 10.0
HISTORY_BYTES: Final = 64 * 1024 * 1024  # of all records; above it the oldest are deleted
# changes between two checks of that bound, because a check reads the sizes of all records
HISTORY_CHECK: Final = 100
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
_DELETE_ROW: Final = "DELETE FROM rows WHERE kind = ? AND key = ?"
_REPLACE_ROW: Final = "REPLACE INTO rows VALUES (?, ?, ?)"
_NEWEST_RECORDS: Final = "SELECT record FROM history WHERE time >= ? ORDER BY seq DESC LIMIT ?"
_ADD_CHANGE: Final = "INSERT OR IGNORE INTO history (change_id, time, record) VALUES (?, ?, ?)"
_DELETE_ABOVE_COUNT: Final = """
    DELETE FROM history WHERE seq <= (SELECT max(seq) FROM history) - ?
"""
_DELETE_ABOVE_BYTES: Final = """
    DELETE FROM history WHERE seq <= (SELECT max(seq) FROM (
        SELECT seq, sum(length(record)) OVER (ORDER BY seq DESC) AS bytes FROM history
        ) WHERE bytes > ?)
"""

log = logging.getLogger("notbefore.store")


class StoredState(Struct, frozen=True):
    """The state that the agent remembers across restarts."""

    tracked: Tracked = Tracked()
    totals: Totals = Totals()
    vm: Vm | None = None
    seen: Instant | None = None  # the last valid answer of IMDS, up to this state
    api_version: str = ""  # of that answer; empty before the first answer
    # the identity of this VM then, if known: a disk may move to another VM
    seen_by: Vm | None = None
    last_running: Instant | None = None  # when the machine was last known to be running
    clean: bool = False  # the agent stopped in order, at ``last_running``
    approvals: dict[str, ApprovalAttempt] = {}  # by the event's key

    @property
    def boot_id(self) -> str:
        """The id of the boot in which IMDS answered last; empty before the first answer."""
        if self.seen is None:
            return ""
        return self.seen.boot


class FileReplacedError(OSError):
    """The file is not as this process left it: deleted, restored, overwritten or damaged."""


class StoredChange(Struct, frozen=True):
    """One change to be stored. ``record``: the change as JSON, UTF-8.

    ``deliveries``: the messages about it. ``last``: see ``core.delivery.last_message``.
    """

    change: Change
    record: bytes
    deliveries: tuple[Delivery, ...] = ()
    last: Delivery | None = None


class FileClock(Struct, frozen=True):
    """The time at which the file was written, on clocks that cannot be set on this machine."""

    boot: str = ""  # the boot's id; empty if the time was not known in it: see ``Store.know_time``
    clock: float = 0.0  # seconds since the boot: the times of the deliveries are on this clock
    date: float | None = None  # Unix seconds by IMDS's clock, if that is known


class Content(NamedTuple):
    """The content of a file, without the history."""

    state: StoredState = StoredState()
    outbox: OutboxImage = OutboxImage()
    clock: FileClock = FileClock()


RowKey = tuple[str, str]
"""The kind of a row, and its key within that kind."""

_TYPES_BY_KIND: Final[dict[str, Any]] = {
    "state": StoredState,
    "delivery": Delivery,
    "thread": str,
    "ledger": Ledger,
    "file": FileClock,
}


class StateFile:
    """Reads and writes the file. Use it in one thread at a time.

    After an error (``sqlite3.Error``, ``OSError``, ``StoreError``) call ``forget``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # damaged files that were set aside, and rows that were left out at the start
        self.damaged = 0
        self._db: sqlite3.Connection | None = None
        self._inode: Inode | None = None  # of the open file
        # SQLite's ``data_version`` after the last ``write``: it changes if another connection
        # writes. None before the first one: then the content of the file is not known
        self._version: int | None = None
        self._rows: dict[RowKey, Any] = {}  # those in the file, if its content is known
        self._until_check = 0  # changes to add before the bytes of the history are summed again

    def load(self) -> Content:
        """Return the content; empty without a file.

        A damaged file is set aside, and read up to the damage.

        Raises ``StoreError`` if a newer version of notbefore wrote it.
        """
        try:
            with self._damage_set_aside():
                rows = self._open().execute(_ROWS).fetchall()
        except FileReplacedError:
            rows = _salvaged(self._path_aside("damaged"))
        return self._decode(rows)

    def _decode(self, rows: Iterable[tuple[str, str, bytes]]) -> Content:
        """Decode rows. One that cannot be read is logged, counted as damaged and left out."""
        decoded: dict[str, dict[str, Any]] = {kind: {} for kind in _TYPES_BY_KIND}
        for kind, key, body in rows:
            try:
                decoded[kind][key] = msgspec.msgpack.decode(body, type=_TYPES_BY_KIND[kind])
            except (ValueError, KeyError) as error:  # MsgspecError is a ValueError
                log.warning("a row of the state file cannot be read (%s %s): %s", kind, key, error)
                self.damaged += 1

        threads: list[tuple[Lane, str]] = []
        for key, thread in decoded["thread"].items():
            sink, _, event_key = key.partition("\n")
            threads.append(((sink, event_key), thread))

        clock = decoded["file"].get("", FileClock())
        outbox = OutboxImage(
            clock=clock.clock,
            rows=tuple(decoded["delivery"].values()),
            threads=tuple(threads),
            ledger=decoded["ledger"].get("", Ledger()),
        )
        return Content(decoded["state"].get("", StoredState()), outbox, clock)

    def write(self, content: Content, changes: Sequence[StoredChange]) -> None:
        """Write what differs from the file, and add changes to the history, in one transaction.

        Raises ``FileReplacedError`` if the file was replaced, overwritten or damaged.
        """
        rows = _rows_of(content)
        new_rows: list[tuple[str, str, bytes]] = []
        for (kind, key), value in rows.items():
            if self._rows.get((kind, key)) is not value:
                new_rows.append((kind, key, msgspec.msgpack.encode(value)))

        with self._damage_set_aside():
            db = self._open()
            db.execute("BEGIN IMMEDIATE")
            version = self.check()
            if self._version is None:
                db.execute("DELETE FROM rows")
            db.executemany(_DELETE_ROW, self._rows.keys() - rows.keys())
            db.executemany(_REPLACE_ROW, new_rows)
            if changes:
                self._add_history(db, changes)
            db.execute("COMMIT")
            self.check()
        self._version = version
        self._rows = rows

    @contextmanager
    def _damage_set_aside(self) -> Iterator[None]:
        """Set the file aside and raise ``FileReplacedError`` if SQLite finds that it is damaged.

        Other errors pass.
        """
        try:
            yield
        except sqlite3.Error as error:
            # errors of the sqlite3 module itself have no code
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
            self.damaged += 1
            self.set_aside("damaged", f"it is damaged ({error})")
            raise FileReplacedError(f"{self.path} is damaged") from error

    def _add_history(self, db: sqlite3.Connection, changes: Sequence[StoredChange]) -> None:
        for stored in changes:
            time = stored.change.time.timestamp()
            db.execute(_ADD_CHANGE, (stored.change.id, time, stored.record))
        db.execute(_DELETE_ABOVE_COUNT, (HISTORY_RECORDS,))

        self._until_check -= len(changes)
        if self._until_check <= 0:
            db.execute(_DELETE_ABOVE_BYTES, (HISTORY_BYTES,))
            self._until_check = HISTORY_CHECK

    def history(self, since: float, limit: int, max_bytes: int) -> tuple[list[bytes], bool]:
        """Return the newest records since a Unix time, newest first, and whether ``max_bytes`` left
        out older ones.

        Raises ``FileReplacedError`` if the file is damaged.
        """
        records: list[bytes] = []
        size = 0
        with self._damage_set_aside():
            for (record,) in self._open().execute(_NEWEST_RECORDS, (since, limit)):
                size += len(record)
                if records and size > max_bytes:
                    return records, True
                records.append(record)
        return records, False

    def check(self) -> int | None:
        """Return SQLite's ``data_version``; ``None`` if the file is not open.

        Raises ``FileReplacedError`` if the file at the path is not the open one, or was overwritten
        or damaged.
        """
        if self._db is None:
            return None
        if inode_of(self.path) != self._inode:
            raise FileReplacedError(f"{self.path} was deleted or replaced")
        with self._damage_set_aside():
            # writes through this connection do not change it
            version: int = self._db.execute("PRAGMA data_version").fetchone()[0]
        if self._version not in (None, version):
            raise FileReplacedError(f"{self.path} was overwritten")
        return version

    def forget(self) -> None:
        """Close the file after a failure, and roll back.

        The next ``write`` opens it again, and writes everything.
        """
        db = self._db
        self._db = None
        self._version = None
        self._rows = {}
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            prepare_file(self.path)
            self._inode = inode_of(self.path)
            # autocommit: only the statements here begin and end transactions
            self._db = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=OPENING_SECONDS
            )
            _prepare(self._db, self.path)
        return self._db

    def set_aside(self, mark: str, why: str) -> None:
        """Rename the file and its journals: SQLite would use old journals for the new file."""
        self.forget()
        aside = self._path_aside(mark)
        for suffix in ("", "-journal", "-wal", "-shm"):
            file = self.path.with_name(self.path.name + suffix)
            file_aside = aside.with_name(aside.name + suffix)
            file_aside.unlink(missing_ok=True)
            if file.exists():
                file.replace(file_aside)
        log.error(
            "the state file is set aside: %s. It is kept as %s, and a new one is used", why, aside
        )

    def _path_aside(self, mark: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{mark}")


def _rows_of(content: Content) -> dict[RowKey, Any]:
    """Return the rows that hold the content."""
    rows: dict[RowKey, Any] = {
        ("state", ""): content.state,
        ("ledger", ""): content.outbox.ledger,
        ("file", ""): content.clock,
    }
    for delivery in content.outbox.rows:
        rows["delivery", delivery.delivery_id] = delivery
    for (sink, event_key), thread in content.outbox.threads:
        rows["thread", f"{sink}\n{event_key}"] = thread
    return rows


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Set up a connection, and a new file. Raises ``StoreError`` for a file of a newer version."""
    db.execute("PRAGMA cache_size = -256")  # KiB: the file is small, and so is the agent
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer notbefore (schema {version}, this one knows"
            f" {SCHEMA_VERSION}): install that version again, or move the file away to start"
            " without it"
        )
    result = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if 0 < version < SCHEMA_VERSION:
        result = "an older notbefore wrote it, in a format that is no longer read"
    if result != "ok":
        error = sqlite3.DatabaseError(result)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error
    db.execute("PRAGMA journal_mode = TRUNCATE")
    db.execute("PRAGMA synchronous = EXTRA")
    if version == 0:
        db.executescript(_SCHEMA)
    db.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:.0f}")


def _salvaged(path: Path) -> list[tuple[str, str, bytes]]:
    """Return the rows of a damaged file, up to the first that cannot be read."""
    rows: list[tuple[str, str, bytes]] = []
    with (
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db,
        suppress(sqlite3.Error),
    ):
        for row in db.execute(_ROWS):
            rows.append(row)  # noqa: PERF402 - `extend` would lose those before the damage
    return rows
