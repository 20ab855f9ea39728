"""``StateFile``: the agent's connection to one SQLite file, with all that is written to it and read from it."""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.approval import ApprovalAttempt
from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.delivery import Delivery
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.record import Vm
from notbefore.core.tracked import Tracked, TrackedEvent
from notbefore.metrics.totals import Totals
from notbefore.store import history, outbox_fallback, outbox_intake
from notbefore.store.confirmed_time import ConfirmedTime
from notbefore.store.connection import open_database
from notbefore.store.private import prepare_database
from notbefore.store.schema import BUSY_SECONDS, Inode, bring_up_to_date, connect_for_reading, inode_of, transaction

FILE_NAME: Final = "notbefore.db"
MEMORY: Final = Path(":memory:")  # SQLite's name for a database in memory, which ends with the process
ROW_VERSION: Final = 1  # of the form in which a row's body is written
VACUUM_PAGES: Final = 64  # given back to the disk at once: 256 KiB

T = TypeVar("T")


class StoredState(Struct, frozen=True):
    """What the agent remembers across restarts."""

    tracked: Tracked = Tracked()
    totals: Totals = Totals()
    vm: Vm | None = None
    seen: Instant | None = None  # the last good answer of IMDS before this was staged
    seen_by: Vm | None = None  # who this VM was then, if known: a disk may move to another one
    last_running: Instant | None = None  # when the machine was last known to be running
    clean: bool = False  # the agent stopped in order, at ``last_running``
    unanswered: bool = False  # an agent was started after ``seen``, and IMDS has not answered it yet
    approvals: dict[str, ApprovalAttempt] = {}  # by the event's key

    @property
    def boot_id(self) -> str:
        """The boot of the machine in which IMDS answered last; empty before the first answer."""
        return self.seen.boot if self.seen is not None else ""


class StoredChange(Struct, frozen=True):
    """One change as it is kept. ``record``: the change as JSON, UTF-8. ``deliveries``: what is to be sent of it."""

    change: Change
    record: bytes
    deliveries: tuple[Delivery, ...] = ()


class Moment(NamedTuple):
    """When something is written: by the wall clock, in Unix seconds, and what is confirmed of it."""

    now: float
    confirmed: ConfirmedTime

    @property
    def surely(self) -> float:
        """Unix seconds: a time that has passed for certain. Only what has expired by then expires."""
        return min(self.now, self.confirmed.wall)


class Loaded(NamedTuple):
    """What ``StateFile.load`` found."""

    state: StoredState = StoredState()
    confirmed: ConfirmedTime | None = None  # when it was written
    unreadable: int = 0  # rows that could not be read; they are kept in the table `unreadable_rows`


class StateFile:
    """One state file, for one thread at a time. Its methods raise ``sqlite3.Error`` and ``OSError``."""

    def __init__(self, path: Path, history_bytes: int = history.MAX_BYTES) -> None:
        self.path = path
        self.history_bytes = history_bytes
        self._connection: sqlite3.Connection | None = None
        self._inodes: dict[str, Inode | None] = {}  # of the open file and of its log, by their suffixes
        self._written: StoredState | None = None  # as it stands in the file; None: unknown, write all of it

    def open(self) -> None:
        """Open the file, and make it where there is none.

        Raises ``StoreError`` where a newer version of notbefore wrote it, ``sqlite3.DatabaseError`` with a code of
        ``damage.DAMAGED`` where it is damaged.
        """
        self.close()
        if self.path != MEMORY:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            prepare_database(self.path)
        # autocommit: transactions are begun and ended in `transaction` alone
        db = open_database(self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
        self._connection = db
        try:
            self._prepare(db)
        except BaseException:
            self.close()
            raise
        self._inodes = {suffix: inode_of(self._part(suffix)) for suffix in ("", "-wal", "-shm")}

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # first: it is fixed once the file has a page
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA journal_size_limit = 1048576")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA cache_size = -256")  # KiB: the file is small, and so shall the agent be
        result = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if result != "ok":
            error = sqlite3.DatabaseError(result)
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        bring_up_to_date(db, self.path)

    def open_for_reading(self) -> None:
        """Open a file that cannot be written; what is read cannot be marked as unreadable either."""
        self.close()
        self._connection = connect_for_reading(self.path)

    def remove_log(self) -> None:
        """Remove the write-ahead log of a file that is gone: SQLite would take it for the next file's."""
        for suffix in ("-wal", "-shm"):
            if self._inodes.get(suffix) == inode_of(self._part(suffix)):
                self._part(suffix).unlink(missing_ok=True)

    def _part(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def close(self) -> None:
        """Close the file; nothing where it is closed."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = self._written = None
        self._inodes = {}

    @property
    def is_open(self) -> bool:
        """There is a connection, whatever has become of the file."""
        return self._connection is not None

    @property
    def replaced(self) -> bool:
        """The path is another file by now, or none: what is written to the open one would be lost."""
        return bool(self._inodes) and inode_of(self.path) != self._inodes[""]

    @property
    def db(self) -> sqlite3.Connection:
        """The connection; raises ``sqlite3.OperationalError`` where the file is not open."""
        if self._connection is None:
            raise sqlite3.OperationalError(f"{self.path} is not open")
        return self._connection

    # ---- reading

    def load(self) -> Loaded:
        """What was written; rows that cannot be read are moved to the table `unreadable_rows`."""
        reader = _Reader(self.db)
        meta = reader.meta()
        state = StoredState(
            tracked=replace(
                meta.get("tracked", Tracked()),
                events=dict(reader.rows("tracked", TrackedEvent)),
                departed=dict(reader.rows("departed", dict[str, int], "position")),
            ),
            approvals=dict(reader.rows("approvals", ApprovalAttempt, "position")),
            **{name: meta[name] for name in _STATE_META if name in meta},
        )
        if reader.unreadable:
            # where nothing can be written they stay in their places
            with suppress(sqlite3.OperationalError), transaction(self.db) as db:
                _move_unreadable(db, reader.unreadable)
        self._written = state
        return Loaded(state, meta.get("confirmed_time"), len(reader.unreadable))

    # ---- writing

    def write(self, state: StoredState, changes: Sequence[StoredChange], moment: Moment) -> None:
        """Write the state, and changes with their deliveries, in one transaction."""
        with transaction(self.db) as db:
            self.write_within(db, state, changes, moment)
        self.written(state)

    def write_within(
        self, db: sqlite3.Connection, state: StoredState, changes: Sequence[StoredChange], moment: Moment
    ) -> None:
        """The same, inside a transaction of the caller, who calls ``written`` after it."""
        old = self._written
        if old is None:
            for table in ("tracked", "departed", "approvals"):
                db.execute(f"DELETE FROM {table}")  # noqa: S608 - one of three
            old = StoredState()
        _write_rows(db, "tracked", old.tracked.events, state.tracked.events)
        _write_ordered_rows(db, "departed", old.tracked.departed, state.tracked.departed)
        _write_ordered_rows(db, "approvals", old.approvals, state.approvals)
        values = {name: getattr(state, name) for name in _STATE_META}
        rest = replace(state.tracked, events={}, departed={})  # these have tables of their own
        _write_meta(db, values | {"tracked": rest, "confirmed_time": moment.confirmed})
        history.add(db, ((one.change, one.record) for one in changes))
        history.prune(db, self.history_bytes)
        _write_outbox(db, changes)
        outbox_intake.expire(db, moment.surely)

    def written(self, state: StoredState) -> None:
        """The state is in the file now: the next time only what differs is written."""
        self._written = state

    def write_times(self, state: StoredState, moment: Moment, *, durable: bool) -> None:
        """Write only when IMDS answered last, and the machine was last known to be running.

        What is not ``durable`` survives the end of the process, but not a loss of power, and costs no write to the disk
        at once.
        """
        values = {name: getattr(state, name) for name in ("seen", "seen_by", "last_running")}
        if not durable:
            self.db.execute("PRAGMA synchronous = NORMAL")
        try:
            with transaction(self.db) as db:
                _write_meta(db, values | {"confirmed_time": moment.confirmed})
        finally:
            self.db.execute("PRAGMA synchronous = FULL")

    def change_outbox(self, change: Callable[[sqlite3.Connection], None]) -> None:
        """Do this with the outbox (``outbox_intake``) in one transaction."""
        with transaction(self.db) as db:
            change(db)

    def merged_spare(self) -> str:
        """The name of the spare file that was merged last."""
        name: str = _Reader(self.db).meta().get("merged_spare", "")
        return name

    def mark_merged(self, db: sqlite3.Connection, spare: str) -> None:
        """Note, in the caller's transaction, that the spare file of that name was merged."""
        _write_meta(db, {"merged_spare": spare})

    def give_space_back(self) -> None:
        """Return some unused pages to the disk, if there are many."""
        if self.db.execute("PRAGMA freelist_count").fetchone()[0] > VACUUM_PAGES:
            # not `execute`, which would take the first step of it: one page
            self.db.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")


_STATE_META: Final = {  # fields of StoredState that are rows of `meta`
    "totals": Totals, "vm": Vm | None, "seen": Instant | None, "seen_by": Vm | None, "last_running": Instant | None,
    "clean": bool, "unanswered": bool,
}  # fmt: skip
_META: Final[dict[str, Any]] = {
    **_STATE_META, "tracked": Tracked, "confirmed_time": ConfirmedTime, "merged_spare": str,
}  # fmt: skip


class _UnreadableRow(NamedTuple):
    table: str
    key: str
    version: int
    body: object
    error: str


class _Reader:
    """Reads rows, and remembers those that it could not read."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.unreadable: list[_UnreadableRow] = []

    def rows(self, table: str, form: type[T], order: str = "event_key") -> Iterator[tuple[str, T]]:
        query = f"SELECT event_key, version, body FROM {table} ORDER BY {order}"  # noqa: S608 - ours
        for key, version, body in self._db.execute(query).fetchall():
            try:
                _check_version(version)
                yield key, msgspec.json.decode(body, type=form)
            except (ValueError, TypeError) as error:  # MsgspecError is a ValueError
                self.unreadable.append(_UnreadableRow(table, key, version, body, str(error)))

    def meta(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, version, body in self._db.execute("SELECT key, version, body FROM meta").fetchall():
            try:
                _check_version(version)
                found[key] = msgspec.msgpack.decode(body, type=_META[key])
            except (ValueError, TypeError, KeyError) as error:
                self.unreadable.append(_UnreadableRow("meta", key, version, body, str(error)))
        return found


def _check_version(version: int) -> None:
    if version != ROW_VERSION:
        raise ValueError(f"version {version} of the row is not known")


def _move_unreadable(db: sqlite3.Connection, rows: Iterable[_UnreadableRow]) -> None:
    for row in rows:
        key = "key" if row.table == "meta" else "event_key"
        db.execute(
            "INSERT OR REPLACE INTO unreadable_rows VALUES (?, ?, ?, ?, ?, ?)",
            (row.table, row.key, row.version, row.body, row.error, time.time()),
        )
        db.execute(f"DELETE FROM {row.table} WHERE {key} = ?", (row.key,))  # noqa: S608 - one of ours


def _write_rows(db: sqlite3.Connection, table: str, old: Mapping[str, T], new: Mapping[str, T]) -> None:
    """Write what differs: values are frozen, so what is the same value is in the file already."""
    _delete_gone(db, table, old, new)
    db.executemany(
        f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)",  # noqa: S608 - one of ours
        [(key, ROW_VERSION, msgspec.json.encode(value)) for key, value in new.items() if old.get(key) is not value],
    )


def _write_ordered_rows(db: sqlite3.Connection, table: str, old: Mapping[str, T], new: Mapping[str, T]) -> None:
    """The same, for a table that keeps the order in which its keys came."""
    _delete_gone(db, table, old, new)
    db.executemany(
        f"INSERT INTO {table} SELECT ?, ?, ?, coalesce(max(position), 0) + 1 FROM {table}"  # noqa: S608 - one of ours
        " WHERE true ON CONFLICT DO UPDATE SET version = excluded.version, body = excluded.body",
        [(key, ROW_VERSION, msgspec.json.encode(value)) for key, value in new.items() if old.get(key) is not value],
    )


def _delete_gone(db: sqlite3.Connection, table: str, old: Mapping[str, T], new: Mapping[str, T]) -> None:
    gone = [(key,) for key in old if key not in new]
    db.executemany(f"DELETE FROM {table} WHERE event_key = ?", gone)  # noqa: S608 - one of ours


def _write_meta(db: sqlite3.Connection, values: Mapping[str, Any]) -> None:
    rows = [(key, ROW_VERSION, msgspec.msgpack.encode(value)) for key, value in values.items()]
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", rows)


def _write_outbox(db: sqlite3.Connection, changes: Iterable[StoredChange]) -> None:
    for one in changes:
        change, key = one.change, one.change.event.key
        if change.kind in OUTCOMES:
            outbox_intake.event_ended(db, key)
        elif change.kind == "started":
            outbox_intake.event_started(db, key)
        elif change.not_before_shift:
            outbox_intake.not_before_changed(db, key, change.not_before_shift, one.record)
        if change.no_longer_affected:
            outbox_intake.no_longer_affected(db, key)
        outbox_intake.put(db, one.deliveries)
        if change.kind in OUTCOMES or change.no_longer_affected:
            outbox_fallback.follow(db, one.deliveries)
