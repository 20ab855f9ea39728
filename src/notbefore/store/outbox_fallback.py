"""What becomes of a delivery that its own sink does not accept: it goes to other sinks, and people are notified.

The functions raise ``sqlite3.Error``. Times are Unix seconds.
"""

import sqlite3
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec.structs import replace

from notbefore.core.delivery import Delivery, DeliveryResult, MessageKind, Terms, delivery_id
from notbefore.core.record import Record
from notbefore.core.routing import Severity
from notbefore.store.outbox_intake import WITHDRAWN, put

REPORT_EVERY: Final = 3600.0  # seconds between two reports of one sink
_DUE: Final = f"fallback_at <= ? AND state <> 'repeating' AND expires > {WITHDRAWN}"


def due(db: sqlite3.Connection, now: float) -> bool:
    """Whether a delivery is to go to its fallback now."""
    return db.execute(f"SELECT 1 FROM outbox WHERE {_DUE} LIMIT 1", (now,)).fetchone() is not None  # noqa: S608 - ours


def next_at(db: sqlite3.Connection) -> float | None:
    """When the next delivery will go to its fallback."""
    at: float | None = db.execute("SELECT min(fallback_at) FROM outbox").fetchone()[0]
    return at


def activate(db: sqlite3.Connection, now: float) -> None:
    """Add what is dead, or has waited for too long, to the sinks of its fallback as well; each only once."""
    for values in db.execute(
        "SELECT delivery_id, event_key, sink, kind, severity, created, expires_with_event, not_before, record,"  # noqa: S608 - ours
        f" fallback, state, error FROM outbox WHERE {_DUE}",
        (now,),
    ).fetchall():
        primary, event_key, sink, kind, severity, created, with_event, not_before, record, names, state, error = values
        why = f"{sink} refused it" if state == "dead" else f"{sink} has not accepted it within {now - created:.0f} s"
        for name in msgspec.json.decode(names, type=tuple[str, ...]):
            copy = Delivery(
                delivery_id=delivery_id(_change_id(record, primary), name),
                event_key=event_key,
                sink=name,
                kind=kind,
                severity=severity,
                created=created,
                due=now,
                expires=now + Terms().expire_after,
                expires_with_event=bool(with_event),
                record=record,
                not_before=not_before,
                note=f"{why}: {error}" if error else why,
            )
            put(db, [copy])
        db.execute("UPDATE outbox SET fallback_at = NULL WHERE delivery_id = ?", (primary,))


def follow(db: sqlite3.Connection, deliveries: Iterable[Delivery]) -> None:
    """Send the end of an event also to the sinks of the fallback that were given its beginning: what is open is closed.

    A sink was given it where a thread of the event is known, or a message of it is still to be sent there.
    """
    for one in deliveries:
        for name in one.fallback:
            given = db.execute(
                "SELECT 1 FROM threads WHERE sink = ?1 AND event_key = ?2 UNION SELECT 1 FROM outbox"  # noqa: S608 - ours
                f" WHERE sink = ?1 AND event_key = ?2 AND state = 'pending' AND expires > {WITHDRAWN}",
                (name, one.event_key),
            ).fetchone()
            if given is not None:
                copied = delivery_id(_change_id(one.record, one.delivery_id), name)
                note = f"an earlier message of this event came here instead of {one.sink}"
                fields = {"ahead": (), "fallback": (), "fallback_at": None, "others": (), "due": one.created}
                put(db, [replace(one, delivery_id=copied, sink=name, note=note, **fields)])


def report(db: sqlite3.Connection, result: DeliveryResult) -> None:
    """Notify people through another sink of the same route that a sink refuses messages: once an hour for each sink."""
    sink, severity, others, record = db.execute(
        "SELECT sink, severity, others, record FROM outbox WHERE delivery_id = ?", (result.delivery_id,)
    ).fetchone()
    failing = {name for (name,) in db.execute("SELECT sink FROM sink_reports WHERE time > ?", (_ago(result),))}
    able = [name for name in msgspec.json.decode(others, type=tuple[str, ...]) if name not in {*failing, sink}]
    if sink in failing or not able:
        return
    db.execute("INSERT OR REPLACE INTO sink_reports VALUES (?, ?)", (sink, result.time))
    put(db, [_report_of((sink, severity, record), able[0], result)])


def _report_of(refused: tuple[str, Severity, bytes], to: str, result: DeliveryResult) -> Delivery:
    sink, severity, record = refused
    report: MessageKind = "sink_failed"
    return Delivery(
        delivery_id=delivery_id(result.delivery_id, to, report),
        event_key=f"sink {sink}",
        sink=to,
        kind=report,
        severity=severity,
        created=result.time,
        due=result.time,
        expires=result.time + Terms().expire_after,
        expires_with_event=False,
        record=record,
        note=f"sink {sink} refused a message: {result.error}",
    )


def _ago(result: DeliveryResult) -> float:
    return result.time - REPORT_EVERY


def _change_id(record: bytes, otherwise: str) -> str:
    try:
        return Record.read(record).change_id
    except msgspec.DecodeError:
        return otherwise
