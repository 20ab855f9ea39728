"""The outbox: what is to be delivered, on disk until the far side has it.

The agent puts deliveries in, inside the transaction that records their change (``put``). The courier, a process of its
own with a connection of its own (``Outbox``), takes what is due and says what came of it. Each row that leaves is
counted in the same transaction, so that at any time accepted = delivered + expired + overflowed + dropped + rows.
"""

import sqlite3
import threading
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from notbefore.errors import StoreError
from notbefore.events.change import APPROVAL_KINDS
from notbefore.events.delivery import FALLBACK, Delivery, OutboxView, Settled
from notbefore.events.routing import SEVERITIES
from notbefore.events.totals import LATENCY_BOUNDS, Histogram

MAX_ROWS: Final = 10_000
DEAD_SECONDS: Final = 30 * 86_400.0  # how long a dead letter is kept
HELD_SECONDS: Final = 400 * 86_400.0
THREAD_SECONDS: Final = 30 * 86_400.0  # how long the first message of an event is remembered
BUSY_SECONDS: Final = 5.0  # how long to wait for another's transaction

_COLUMNS: Final = (
    "delivery_id, event_key, sink, kind, severity, created, due, expires, fades, record, attempts, state, error"
)
# the order: nothing is sent before an earlier delivery of the same event to the same sink; a reminder waits for its
# time, and nothing waits for it
_FIRST_OF_ITS_EVENT: Final = """NOT EXISTS (
    SELECT 1 FROM outbox AS earlier
    WHERE earlier.sink = outbox.sink AND earlier.event_key = outbox.event_key AND earlier.seq < outbox.seq
      AND earlier.state = 'pending' AND earlier.kind <> 'reminder')"""


# ---- what the agent does, inside its transaction


def put(db: sqlite3.Connection, deliveries: Iterable[Delivery], now: float) -> None:
    """Take deliveries in; what was taken in before, by its id, is left as it is."""
    for one in deliveries:
        # what was delivered of this event before is no longer to be repeated, nor reminded of: this is newer
        db.execute(
            "DELETE FROM outbox WHERE sink = ? AND event_key = ? AND state = 'held'",
            (one.sink, one.event_key),
        )
        if one.kind not in ("reminder", *APPROVAL_KINDS):
            _withdraw(db, "sink = ? AND event_key = ? AND kind = 'reminder'", (one.sink, one.event_key), now)
        row = msgspec.structs.asdict(one) | {"urgency": SEVERITIES.index(one.severity)}
        taken = db.execute(
            "INSERT OR IGNORE INTO outbox (delivery_id, event_key, sink, kind, severity, urgency, created, due,"
            " expires, fades, record) VALUES (:delivery_id, :event_key, :sink, :kind, :severity, :urgency, :created,"
            " :due, :expires, :fades, :record)",
            row,
        )
        if taken.rowcount:
            _count(db, one.sink, "accepted")


def event_started(db: sqlite3.Connection, event_key: str, now: float) -> None:
    """Nobody is to be reminded of it any more."""
    _withdraw(db, "event_key = ? AND kind = 'reminder'", (event_key,), now)


def event_ended(db: sqlite3.Connection, event_key: str, now: float) -> None:
    """What only helps before the end expires; what was repeated while the event lasted is at rest."""
    _withdraw(db, "event_key = ? AND fades", (event_key,), now)
    db.execute("DELETE FROM outbox WHERE event_key = ? AND state = 'held'", (event_key,))


def _withdraw(db: sqlite3.Connection, where: str, values: tuple[object, ...], now: float) -> None:
    # it may be on its way this very moment: it expires here, and is removed by `expire` unless it is delivered first
    db.execute(
        f"UPDATE outbox SET expires = min(expires, ?) WHERE state = 'pending' AND {where}",  # noqa: S608 - ours
        (now, *values),
    )


def expire(db: sqlite3.Connection, now: float, max_rows: int = MAX_ROWS) -> None:
    """Remove and count what can help nobody any more, and then what the outbox has no room for."""
    free = "leased_until <= ?"
    gone = db.execute(
        f"DELETE FROM outbox WHERE expires <= ? AND {free} AND state <> 'held' RETURNING sink",  # noqa: S608 - ours
        (now, now),
    ).fetchall()
    for (sink,) in gone:
        _count(db, sink, "expired")
    db.execute("DELETE FROM outbox WHERE expires <= ? AND state = 'held'", (now,))
    db.execute("DELETE FROM threads WHERE time < ?", (now - THREAD_SECONDS,))
    excess = db.execute("SELECT count(*) FROM outbox").fetchone()[0] - max_rows
    if excess > 0:
        pushed = db.execute(
            "DELETE FROM outbox WHERE seq IN (SELECT seq FROM outbox WHERE leased_until <= ?"
            " ORDER BY state = 'held' DESC, urgency DESC, seq LIMIT ?) RETURNING sink, state",
            (now, excess),
        ).fetchall()
        for sink, state in pushed:
            if state != "held":
                _count(db, sink, "overflowed")


def _count(db: sqlite3.Connection, sink: str, result: str) -> None:
    db.execute(
        "INSERT INTO delivery_counts VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1", (sink, result)
    )


def salvage(damaged: Path, db: sqlite3.Connection) -> int:
    """Bring over what can be read of the outbox of a damaged file; returns how many deliveries. Never raises."""
    saved = 0
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{damaged.absolute().as_uri()}?mode=rw", uri=True)) as old:
        for table in ("delivery_counts", "delivery_latency", "threads", "outbox"):
            with suppress(sqlite3.Error):  # each row is tried for itself, up to one that cannot be read
                for row in old.execute(f"SELECT * FROM {table}"):  # noqa: S608 - one of ours
                    marks = ", ".join("?" * len(row))
                    saved += db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row).rowcount  # noqa: S608 - ours
                    saved -= table != "outbox"
    return saved


# ---- what the courier and the commands do, each with a connection of its own


class Outbox:
    """A hold on the outbox of a state file beside the agent's; one thread at a time. Methods raise ``sqlite3.Error``.

    Raises ``StoreError`` where there is no such file, or another version's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = _connect(path, "rw")

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # the first error is the one to tell
                self._db.execute("ROLLBACK")
            raise

    def void_leases(self) -> None:
        """Whoever held a lease is dead: what it had is free."""
        with self._transaction() as db:
            db.execute("UPDATE outbox SET leased_until = 0 WHERE leased_until > 0")

    def exchange(
        self,
        settled: Sequence[Settled],
        room: Mapping[str, int],
        now: float,
        until: float,
        whole: Collection[str] = (),
    ) -> list[Delivery]:
        """Say what came of deliveries, and lease what is due: at most ``room[sink]`` each, until that time.

        To the sinks ``whole`` go all due deliveries of an event at once, in order; to others one after the other.
        One transaction; none at all where there is nothing to say and nothing due.
        """
        wanted = {sink: count for sink, count in room.items() if count > 0}
        if not settled and not self._anything_due(wanted, now):
            return []
        with self._transaction() as db:
            for one in settled:
                _settle(db, one)
            expire(db, now)
            leased: list[Delivery] = []
            for sink, count in wanted.items():
                leased += _lease(db, _due(db, sink, count, now, whole=sink in whole), until)
            return leased

    def _anything_due(self, sinks: Iterable[str], now: float) -> bool:
        query = "SELECT 1 FROM outbox WHERE sink = ? AND state <> 'dead' AND (due <= ? OR expires <= ?) LIMIT 1"
        return any(self._db.execute(query, (sink, now, now)).fetchone() for sink in sinks)

    def sinks_with_work(self) -> set[str]:
        """Whose deliveries wait, now or later."""
        return {sink for (sink,) in self._db.execute("SELECT DISTINCT sink FROM outbox WHERE state <> 'dead'")}

    def next_due(self) -> float | None:
        """When the next delivery may be sent, in Unix seconds; ``None`` when none waits."""
        return next_due(self._db)

    def rows(self, state: str | None = None, sink: str | None = None, limit: int = MAX_ROWS) -> list[Delivery]:
        """What is in the outbox, oldest first."""
        found = self._db.execute(
            f"SELECT {_COLUMNS} FROM outbox WHERE (?1 IS NULL OR state = ?1) AND (?2 IS NULL OR sink = ?2)"  # noqa: S608 - ours
            " ORDER BY seq LIMIT ?3",
            (state, sink, limit),
        )
        return [_delivery(row) for row in found]

    def find(self, prefix: str) -> list[Delivery]:
        """The deliveries whose id begins so."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM outbox WHERE substr(delivery_id, 1, ?) = ?",  # noqa: S608 - ours
            (len(prefix), prefix),
        )
        return [_delivery(row) for row in rows]

    def retry(self, ids: Iterable[str], now: float, expire_after: float) -> int:
        """Have deliveries sent again now, as if never tried; returns how many there were."""
        with self._transaction() as db:
            return sum(
                db.execute(
                    "UPDATE outbox SET state = 'pending', due = ?1, attempts = 0,"
                    " expires = CASE state WHEN 'dead' THEN ?2 ELSE max(expires, ?2) END"
                    " WHERE delivery_id = ?3 AND state <> 'held' AND leased_until <= ?1",
                    (now, now + expire_after, one),
                ).rowcount
                for one in ids
            )

    def drop(self, ids: Iterable[str], now: float) -> int:
        """Take deliveries out, counted as dropped; returns how many there were."""
        dropped = 0
        with self._transaction() as db:
            for one in ids:
                gone = db.execute(
                    "DELETE FROM outbox WHERE delivery_id = ? AND leased_until <= ? RETURNING sink, state", (one, now)
                ).fetchall()
                dropped += len(gone)
                for sink, state in gone:
                    if state != "held":
                        _count(db, sink, "dropped")
        return dropped


def _due(db: sqlite3.Connection, sink: str, count: int, now: float, *, whole: bool) -> list[int]:
    """What may be sent now, the gravest first: rows by their numbers."""
    rows = db.execute(
        "SELECT seq, event_key FROM outbox WHERE sink = ? AND state <> 'dead' AND due <= ?"  # noqa: S608 - ours
        f" AND leased_until <= ? AND {_FIRST_OF_ITS_EVENT} ORDER BY urgency, due, seq LIMIT ?",
        (sink, now, now, count),
    ).fetchall()
    # two of one event may both be free (a reminder and a change): one after the other
    first: dict[str, int] = {}
    for seq, event_key in rows:
        first.setdefault(event_key, seq)
    if not whole:
        return list(first.values())
    found: list[int] = []
    for event_key, seq in first.items():
        found += [seq, *_followers(db, (sink, event_key, seq), now)]
        if len(found) >= count:
            break
    return found


def _followers(db: sqlite3.Connection, head: tuple[str, str, int], now: float) -> list[int]:
    """What may go along with an event's first delivery: the next ones, up to one that has to wait."""
    found: list[int] = []
    for seq, due, leased_until in db.execute(
        "SELECT seq, due, leased_until FROM outbox WHERE sink = ? AND event_key = ? AND seq > ?"
        " AND state = 'pending' AND kind <> 'reminder' ORDER BY seq LIMIT 100",
        head,
    ):
        if due > now or leased_until > now:
            break
        found.append(seq)
    return found


def _lease(db: sqlite3.Connection, rows: list[int], until: float) -> list[Delivery]:
    query = (
        f"SELECT {_COLUMNS}, (SELECT thread FROM threads WHERE threads.sink = outbox.sink"  # noqa: S608 - ours
        " AND threads.event_key = outbox.event_key) FROM outbox WHERE seq = ?"
    )
    leased = [_delivery(db.execute(query, (seq,)).fetchone()) for seq in rows]
    db.executemany(
        "UPDATE outbox SET leased_until = ?, attempts = attempts + 1 WHERE seq = ?", [(until, seq) for seq in rows]
    )
    return leased


def _delivery(row: tuple[Any, ...]) -> Delivery:
    names = [*_COLUMNS.split(", "), "thread"]
    values = dict(zip(names, row, strict=False))  # the thread is only asked for where it matters
    return Delivery(**values | {"fades": bool(values["fades"])})


def _settle(db: sqlite3.Connection, one: Settled) -> None:
    row = db.execute(
        "SELECT sink, event_key, state, created FROM outbox WHERE delivery_id = ?", (one.delivery_id,)
    ).fetchone()
    if row is None:  # taken out by hand, or pushed out, while it was on its way
        return
    sink, event_key, state, created = row
    if one.fallback:
        _count(db, sink, FALLBACK)
    if one.result == "delivered":
        _delivered(db, one, (sink, event_key, state, created))
        return
    if state == "held":  # a repetition that failed; what it repeats was delivered long ago
        db.execute(
            "UPDATE outbox SET leased_until = 0, due = ?, error = ? WHERE delivery_id = ?",
            (one.due if one.due is not None else one.time + 60, one.error, one.delivery_id),
        )
        return
    if one.result == "dead":
        _count(db, sink, "dead")
        db.execute(
            "UPDATE outbox SET state = 'dead', leased_until = 0, error = ?, expires = ? WHERE delivery_id = ?",
            (one.error, one.time + DEAD_SECONDS, one.delivery_id),
        )
        return
    _count(db, sink, "failed")
    db.execute(
        "UPDATE outbox SET leased_until = 0, due = ?, error = ? WHERE delivery_id = ?",
        (one.due, one.error, one.delivery_id),
    )


def _delivered(db: sqlite3.Connection, one: Settled, row: tuple[str, str, str, float]) -> None:
    sink, event_key, state, created = row
    if one.thread is not None:
        db.execute("INSERT OR REPLACE INTO threads VALUES (?, ?, ?, ?)", (sink, event_key, one.thread, one.time))
    if state != "held":
        _count(db, sink, "delivered")
        latency = max(0.0, one.time - created)
        db.execute(
            "INSERT INTO delivery_latency VALUES (?, ?, 1, ?)"
            " ON CONFLICT DO UPDATE SET count = count + 1, sum = sum + excluded.sum",
            (sink, bisect_left(LATENCY_BOUNDS, latency), latency),
        )
    newer = (
        "SELECT 1 FROM outbox WHERE sink = ? AND event_key = ? AND state = 'pending' AND kind <> 'reminder'"
        " AND delivery_id <> ? LIMIT 1"
    )
    listed = db.execute("SELECT 1 FROM tracked WHERE event_key = ?", (event_key,)).fetchone()
    if one.repeat is None or not listed or db.execute(newer, (sink, event_key, one.delivery_id)).fetchone():
        db.execute("DELETE FROM outbox WHERE delivery_id = ?", (one.delivery_id,))
        return
    db.execute(
        "DELETE FROM outbox WHERE sink = ? AND event_key = ? AND state = 'held' AND delivery_id <> ?",
        (sink, event_key, one.delivery_id),
    )
    db.execute(
        # it lasts as long as its event does: `event_ended` and what is newer remove it
        "UPDATE outbox SET state = 'held', leased_until = 0, due = ?, expires = ?, error = '' WHERE delivery_id = ?",
        (one.time + one.repeat, one.time + HELD_SECONDS, one.delivery_id),
    )


def next_due(db: sqlite3.Connection) -> float | None:
    """When the next delivery may be sent, in Unix seconds; ``None`` when none waits.

    Leases do not count: who asks this has no courier that could hold one.
    """
    query = f"SELECT min(due) FROM outbox WHERE state <> 'dead' AND {_FIRST_OF_ITS_EVENT}"  # noqa: S608 - ours
    due: float | None = db.execute(query).fetchone()[0]
    return due


class OutboxReader:
    """What the agent shows of the outbox: read without ever waiting for a writer, and only when it has changed.

    Safe to call from several threads.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._version: int | None = None
        self._view = OutboxView()
        self._due: float | None = None

    def look(self) -> tuple[OutboxView, float | None]:
        """What is in the outbox, and when the next of it is due; what was known last while it cannot be read."""
        with self._lock:
            try:
                db = self._open()
                version = db.execute("PRAGMA data_version").fetchone()[0]
                if version != self._version:
                    self._view, self._due, self._version = _view(db), next_due(db), version
            except (sqlite3.Error, StoreError, OSError):
                self.close()
            return self._view, self._due

    def _open(self) -> sqlite3.Connection:
        found = self._path.stat()
        if self._db is None or self._file != (
            found.st_dev,
            found.st_ino,
        ):  # the file was set aside, and a new one begun
            self.close()
            self._db = _connect(self._path, "ro")
            self._file = (found.st_dev, found.st_ino)
        return self._db

    def close(self) -> None:
        """Let go of the file; the next look opens it again."""
        with self._lock:
            if self._db is not None:
                self._db.close()
            self._db = self._version = None


def _view(db: sqlite3.Connection) -> OutboxView:
    rows = db.execute("SELECT sink, state, count(*), min(created) FROM outbox GROUP BY sink, state").fetchall()
    latency: dict[str, Histogram] = {}
    for sink, bucket, count, total in db.execute("SELECT sink, bucket, count, sum FROM delivery_latency"):
        histogram = latency.setdefault(sink, Histogram.empty(LATENCY_BOUNDS))
        histogram.counts[bucket] += count
        histogram.sum += total
    counts = db.execute("SELECT sink, result, count FROM delivery_counts").fetchall()
    return OutboxView(
        rows={(sink, state): count for sink, state, count, _ in rows},
        oldest={sink: created for sink, state, _, created in rows if state == "pending"},
        counts={(sink, result): count for sink, result, count in counts},
        latency=latency,
    )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
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
        raise StoreError(f"{path} cannot be opened ({error}): has `notbefore run` been started here?") from None
    if version != SCHEMA_VERSION:
        db.close()
        raise StoreError(f"{path} is of schema {version}, this version knows {SCHEMA_VERSION}: start `notbefore run`")
    return db


SCHEMA: Final = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8").split("-- version ")[1:]
SCHEMA_VERSION: Final = len(SCHEMA)
