"""What the agent does with the outbox, inside the transaction that records a change: put in, withdraw, expire.

Each row that leaves is counted in the same transaction: see ``core.delivery.RESULTS`` for the sum that is always right.
Times are Unix seconds. The functions raise ``sqlite3.Error``.
"""

import sqlite3
from collections.abc import Iterable
from typing import Final

import msgspec

from notbefore.core.change import APPROVAL_KINDS
from notbefore.core.delivery import Delivery, SinkThread
from notbefore.core.routing import SEVERITIES

MAX_ROWS: Final = 10_000
LISTS: Final = ("ahead", "fallback", "others")  # columns that hold names, as JSON
WITHDRAWN: Final = 0  # the time of expiry of what is not to be sent any more: it has passed by every clock
_WAITS_FOR_OTHERS: Final = "(ahead <> '[]' AND attempts = 0)"  # its turn comes after that of other VMs
# its own time had not come, and nobody tried to send it: nobody missed anything
_NEVER_NEEDED: Final = f"(expires <= {WITHDRAWN} AND attempts = 0 AND (kind = 'reminder' OR {_WAITS_FOR_OTHERS}))"
THREAD_SECONDS: Final = 30 * 86_400.0  # how long the thread of an event's messages is remembered


def put(db: sqlite3.Connection, deliveries: Iterable[Delivery]) -> None:
    """Add deliveries, and count them as accepted; one whose id is there already is left as it is."""
    for one in deliveries:
        # it replaces what is repeated of the event, its reminder, and what waits for other VMs to notify
        db.execute(
            "DELETE FROM outbox WHERE sink = ? AND event_key = ? AND state = 'repeating'",
            (one.sink, one.event_key),
        )
        if one.kind not in ("reminder", *APPROVAL_KINDS):
            replaced = f"(kind = 'reminder' OR {_WAITS_FOR_OTHERS})"
            values = (one.sink, one.event_key, one.delivery_id)
            _withdraw(db, f"sink = ? AND event_key = ? AND delivery_id <> ? AND {replaced}", values)
        names = {name: msgspec.json.encode(getattr(one, name)).decode() for name in LISTS}
        row = msgspec.structs.asdict(one) | names | {"urgency": SEVERITIES.index(one.severity)}
        added = db.execute(
            "INSERT OR IGNORE INTO outbox (delivery_id, event_key, sink, kind, severity, urgency, created, due,"
            " expires, expires_with_event, not_before, record, ahead, fallback, others, fallback_at, note)"
            " SELECT :delivery_id, :event_key, :sink, :kind, :severity, :urgency, :created, :due, :expires,"
            " :expires_with_event, :not_before, :record, :ahead, :fallback, :others, :fallback_at, :note"
            " WHERE NOT EXISTS (SELECT 1 FROM unconfirmed WHERE delivery_id = :delivery_id)",
            row,
        )
        if added.rowcount:
            count(db, one.sink, "accepted")


def event_started(db: sqlite3.Connection, event_key: str) -> None:
    """Withdraw the reminders of an event, and what waits for other VMs to notify: it has started."""
    _withdraw(db, f"event_key = ? AND (kind = 'reminder' OR {_WAITS_FOR_OTHERS})", (event_key,))


def no_longer_affected(db: sqlite3.Connection, *event_keys: str) -> None:
    """Withdraw the reminders of events, and end their repetitions: they do not affect this VM any longer."""
    for event_key in event_keys:
        _withdraw(db, f"event_key = ? AND (kind = 'reminder' OR {_WAITS_FOR_OTHERS})", (event_key,))
        _end_repetitions(db, event_key)


def not_before_changed(db: sqlite3.Connection, event_key: str, seconds: float, record: bytes) -> None:
    """Move the reminders of an event whose NotBefore has moved by ``seconds``, and give them the new record.

    Also those to sinks whose route sends no message of the move.
    """
    db.execute(
        "UPDATE outbox SET created = created + ?1, due = due + ?1, expires = expires + ?1, record = ?2"
        " WHERE event_key = ?3 AND kind = 'reminder' AND state = 'pending' AND expires > ?4",
        (seconds, record, event_key, WITHDRAWN),
    )


def event_ended(db: sqlite3.Connection, event_key: str) -> None:
    """Withdraw what is of no use after an event's end, and end its repetitions."""
    _withdraw(db, f"event_key = ? AND (expires_with_event OR {_WAITS_FOR_OTHERS})", (event_key,))
    _end_repetitions(db, event_key)


def confirm(db: sqlite3.Connection, ids: Iterable[str]) -> None:
    """Another place has written down that these deliveries were accepted: their sinks may be given more."""
    db.executemany("DELETE FROM unconfirmed WHERE delivery_id = ?", [(one,) for one in ids])


def put_threads(db: sqlite3.Connection, threads: Iterable[SinkThread]) -> None:
    """What sinks said of the first messages of events, which went through another outbox."""
    rows = [(one.sink, one.event_key, one.thread, one.time) for one in threads]
    db.executemany("INSERT OR REPLACE INTO threads VALUES (?, ?, ?, ?)", rows)


def leave(db: sqlite3.Connection, ids: Iterable[str] | None) -> None:
    """Delete what is to be sent, and count it as another's; ``None``: all changes.

    What is on its way is not tried again.
    """
    if ids is None:
        ids = [one for (one,) in db.execute("SELECT delivery_id FROM outbox WHERE kind <> 'sink_failed'")]
    query = "DELETE FROM outbox WHERE delivery_id = ? AND state = 'pending' AND NOT leased RETURNING sink"
    for one in ids:
        db.execute(f"UPDATE outbox SET expires = {WITHDRAWN} WHERE delivery_id = ? AND leased", (one,))  # noqa: S608 - ours
        for (sink,) in db.execute(query, (one,)).fetchall():
            count(db, sink, "yielded")


def _end_repetitions(db: sqlite3.Connection, event_key: str) -> None:
    db.execute("DELETE FROM outbox WHERE event_key = ? AND state = 'repeating'", (event_key,))


def _withdraw(db: sqlite3.Connection, where: str, values: tuple[object, ...]) -> None:
    # It may be on its way at this moment. So it only gets another time of expiry: `expire` deletes and counts it,
    # unless it is delivered before.
    db.execute(f"UPDATE outbox SET expires = {WITHDRAWN} WHERE state = 'pending' AND {where}", values)  # noqa: S608 - ours


def expire(db: sqlite3.Connection, surely: float, max_rows: int = MAX_ROWS) -> None:
    """Delete and count what has expired; then what is beyond ``max_rows``, the least severe and oldest first.

    ``surely``: a time that has passed for certain (``confirmed_time``). What is on its way stays.
    """
    expired = db.execute(
        "DELETE FROM outbox WHERE expires <= ? AND NOT leased AND state <> 'repeating'"  # noqa: S608 - ours
        f" RETURNING sink, {_NEVER_NEEDED}",
        (surely,),
    ).fetchall()
    for sink, never_needed in expired:
        count(db, sink, "withdrawn" if never_needed else "expired")
    db.execute("DELETE FROM outbox WHERE expires <= ? AND state = 'repeating'", (surely,))
    db.execute("DELETE FROM threads WHERE time < ?", (surely - THREAD_SECONDS,))
    excess = db.execute("SELECT count(*) FROM outbox").fetchone()[0] - max_rows
    if excess > 0:
        overflowed = db.execute(
            "DELETE FROM outbox WHERE seq IN (SELECT seq FROM outbox WHERE NOT leased"
            " ORDER BY state = 'repeating' DESC, urgency DESC, seq LIMIT ?) RETURNING sink, state",
            (excess,),
        ).fetchall()
        for sink, state in overflowed:
            if state != "repeating":
                count(db, sink, "overflowed")


def count(db: sqlite3.Connection, sink: str, result: str) -> None:
    """Count one more delivery to a sink with that result (``core.delivery.RESULTS``)."""
    db.execute(
        "INSERT INTO delivery_counts VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1", (sink, result)
    )
