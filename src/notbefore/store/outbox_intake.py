"""What the agent does with the outbox, inside the transaction that records a change: put in, withdraw, expire.

Each row that leaves is counted in the same transaction, so that at any time accepted = delivered + expired +
overflowed + dropped + rows.
"""

import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import msgspec

from notbefore.core.change import APPROVAL_KINDS
from notbefore.core.delivery import Delivery
from notbefore.core.routing import SEVERITIES

MAX_ROWS: Final = 10_000
THREAD_SECONDS: Final = 30 * 86_400.0  # how long the first message of an event is remembered


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
            " expires, expires_with_event, record, severity_given) VALUES (:delivery_id, :event_key, :sink, :kind,"
            " :severity, :urgency, :created, :due, :expires, :expires_with_event, :record, :severity_given)",
            row,
        )
        if taken.rowcount:
            count(db, one.sink, "accepted")


def event_started(db: sqlite3.Connection, event_key: str, now: float) -> None:
    """Nobody is to be reminded of it any more."""
    _withdraw(db, "event_key = ? AND kind = 'reminder'", (event_key,), now)


def event_left(db: sqlite3.Connection, event_key: str, now: float) -> None:
    """It does not hit this VM any longer: nobody is to be reminded of it, nor told again."""
    _withdraw(db, "event_key = ? AND kind = 'reminder'", (event_key,), now)
    _rest(db, event_key)


def event_moved(db: sqlite3.Connection, event_key: str, seconds: float, record: bytes, now: float) -> None:
    """NotBefore is another by so many seconds: who is to be reminded is reminded of that one, whoever else is told."""
    db.execute(
        "UPDATE outbox SET created = created + ?1, due = due + ?1, expires = expires + ?1, record = ?2"
        " WHERE event_key = ?3 AND kind = 'reminder' AND state = 'pending' AND expires > ?4",
        (seconds, record, event_key, now),
    )


def event_ended(db: sqlite3.Connection, event_key: str, now: float) -> None:
    """What only helps before the end expires; what was repeated while the event lasted is at rest."""
    _withdraw(db, "event_key = ? AND expires_with_event", (event_key,), now)
    _rest(db, event_key)


def _rest(db: sqlite3.Connection, event_key: str) -> None:
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
        count(db, sink, "expired")
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
                count(db, sink, "overflowed")


def count(db: sqlite3.Connection, sink: str, result: str) -> None:
    """One more delivery to a sink with that result."""
    db.execute(
        "INSERT INTO delivery_counts VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1", (sink, result)
    )


def salvage(damaged: Path, db: sqlite3.Connection) -> int:
    """Bring over what can be read of the outbox of a damaged file; returns how many deliveries. Never raises."""
    saved = 0
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{damaged.absolute().as_uri()}?mode=rw", uri=True)) as old:
        for table in ("delivery_counts", "delivery_latency", "threads", "outbox"):
            with suppress(sqlite3.Error):  # each row is tried for itself, up to one that cannot be read
                rows = old.execute(f"SELECT * FROM {table}")  # noqa: S608 - one of ours
                names = ", ".join(name for name, *_ in rows.description)  # an older version may have had fewer
                for row in rows:
                    marks = ", ".join("?" * len(row))
                    into = f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})"  # noqa: S608 - ours
                    saved += db.execute(into, row).rowcount
                    saved -= table != "outbox"
    return saved
