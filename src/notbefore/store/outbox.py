"""The outbox: the deliveries, on disk until the receiver has accepted them.

The agent puts deliveries in (``outbox_intake``) and shows what is there (``OutboxReader``). The courier, a process of
its own with a connection of its own (``Outbox``), leases what is due and reports the results.
"""

import sqlite3
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from notbefore.core.delivery import FALLBACK, Delivery, DeliveryResult, Terms
from notbefore.core.outbox import LATENCY_BOUNDS
from notbefore.store import outbox_fallback
from notbefore.store.confirmed_time import ConfirmedTime, boot_id, uptime
from notbefore.store.outbox_intake import LISTS, MAX_ROWS, count, expire
from notbefore.store.schema import COMMAND_BUSY_SECONDS, connect, inode_of, transaction

DEAD_SECONDS: Final = 30 * 86_400.0  # how long a dead letter is kept
REPEAT_SECONDS: Final = 400 * 86_400.0  # how long a delivery is repeated at most, when its event never ends
FAILED_REPEAT_SECONDS: Final = 60.0  # after which a repetition is tried again that the receiver refused
INTERRUPTED: Final = "interrupted: its courier ended while it ran; it is not run again (`rerun: true` would)"
BATCH_ROWS: Final = 100  # deliveries of one event that are leased at once

_COLUMNS: Final = (
    "delivery_id, event_key, sink, kind, severity, created, due, expires, expires_with_event, not_before, record,"
    " ahead, fallback, others, fallback_at, note, attempts, state, error"
)
# The order: a delivery waits for the earlier ones of its event to the same sink. Nothing waits for a reminder: it has a
# time of its own.
_FIRST_OF_ITS_EVENT: Final = """NOT EXISTS (
    SELECT 1 FROM outbox AS earlier
    WHERE earlier.sink = outbox.sink AND earlier.event_key = outbox.event_key AND earlier.seq < outbox.seq
      AND earlier.state = 'pending' AND earlier.kind <> 'reminder')"""
# The clock was set back after the change was seen, or after an attempt failed: the delivery does not wait until it is
# that time again. A reminder does, for its time comes from NotBefore. A pause counts; none is longer than an hour.
_FUTURE: Final = """((created > :now + 1 AND attempts = 0 OR due > :now + 3600 AND attempts > 0)
    AND state = 'pending' AND kind <> 'reminder')"""
# A sink waits until it is written elsewhere that its last delivery was accepted, where that is wanted; 5 s at most.
CONFIRMED: Final = """NOT EXISTS (SELECT 1 FROM unconfirmed WHERE unconfirmed.sink = outbox.sink
    AND time BETWEEN :now - 5 AND :now + 1)"""


class CourierTurn(Struct, frozen=True):
    """One turn of the courier: what came of its deliveries, and what it can take now."""

    results: Sequence[DeliveryResult]
    room: Mapping[str, int]  # sink -> how many deliveries it can take
    now: float  # Unix seconds
    batched: Collection[str] = ()  # sinks that take all due deliveries of an event at once
    confirm: bool = False  # a sink is given nothing until its last acceptance is written elsewhere (`unconfirmed`)


class OutboxMoved(sqlite3.OperationalError):
    """The outbox is in another file by now; nothing was done."""


class Outbox:
    """A connection to the outbox of a state file, for the courier and for commands; for one thread at a time.

    ``busy_seconds``: how long it waits for another's transaction. ``unless``: whether another file holds the outbox
    by now. Raises ``StoreError`` where there is no such file, or one with another schema. Its methods
    raise ``sqlite3.Error``; those that write raise ``OutboxMoved``.
    """

    def __init__(
        self, path: Path, busy_seconds: float = COMMAND_BUSY_SECONDS, unless: Callable[[], bool] = lambda: False
    ) -> None:
        self.path = path
        self._unless = unless
        self._inode = inode_of(path)
        self._db = connect(path, "rw", busy_seconds)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @property
    def moved(self) -> bool:
        """The outbox is in another file by now."""
        return inode_of(self.path) != self._inode or self._unless()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction on the outbox that is in use; raises ``OutboxMoved`` where that is another one."""
        with transaction(self._db) as db:
            if self.moved:  # asked inside: who moves the outbox copies it in a transaction as well
                raise OutboxMoved(f"{self.path} is not in use any more")
            yield db

    def release_leases(self, now: float, run_once: Collection[str] = (), held: Collection[str] = ()) -> list[Delivery]:
        """Make due again what is leased and not held by this courier: a courier that has ended left it on its way.

        Only one courier runs at a time; it holds the deliveries ``held`` alone. To the sinks ``run_once`` nothing is
        sent again: it is dead, and returned.
        """
        with self.transaction() as db:
            rows = db.execute("SELECT delivery_id, sink FROM outbox WHERE leased").fetchall()
            left = [(delivery_id, sink) for delivery_id, sink in rows if delivery_id not in held]
            interrupted = [delivery_id for delivery_id, sink in left if sink in run_once]
            for delivery_id in interrupted:
                _record_result(db, DeliveryResult(delivery_id, "dead", now, error=INTERRUPTED))
            db.executemany("UPDATE outbox SET leased = 1 WHERE delivery_id = ?", [(one,) for one in held])
            db.executemany(
                "UPDATE outbox SET leased = 0, due = min(due, ?) WHERE delivery_id = ?",
                [(now, delivery_id) for delivery_id, _ in left],
            )
        return [one for delivery_id in interrupted for one in self.find(delivery_id)]

    def exchange(self, turn: CourierTurn) -> list[Delivery]:
        """Record the results of a turn, and lease what is due, the most severe first; returns the leased deliveries.

        A sink is given one delivery of an event at a time; a batched sink is given all that are due, in order.
        One transaction; none where there is no result and nothing is due.
        """
        wanted = {sink: count for sink, count in turn.room.items() if count > 0}
        if not turn.results and not self._anything_due(wanted, turn.now):
            return []
        with self.transaction() as db:
            for result in turn.results:
                _record_result(db, result, confirm=turn.confirm)
            expire(db, _surely(db, turn.now))
            outbox_fallback.activate(db, turn.now)
            leased: list[Delivery] = []
            for sink, count in wanted.items():
                leased += _lease(db, _due(db, sink, count, turn.now, batched=sink in turn.batched))
            return leased

    def _anything_due(self, sinks: Iterable[str], now: float) -> bool:
        query = (
            "SELECT 1 FROM outbox WHERE sink = :sink AND state <> 'dead'"  # noqa: S608 - ours
            f" AND (due <= :now OR expires <= :now OR {_FUTURE}) LIMIT 1"
        )
        return outbox_fallback.due(self._db, now) or any(
            self._db.execute(query, {"sink": sink, "now": now}).fetchone() for sink in sinks
        )

    def sinks_with_work(self) -> set[str]:
        """The sinks that have deliveries to send, now or later."""
        return {sink for (sink,) in self._db.execute("SELECT DISTINCT sink FROM outbox WHERE state <> 'dead'")}

    def next_due(self) -> float | None:
        """When the next delivery may be sent, in Unix seconds; ``None`` when none waits."""
        return next_due(self._db, time.time())

    def rows(self, state: str | None = None, sink: str | None = None, limit: int = MAX_ROWS) -> list[Delivery]:
        """What is in the outbox, oldest first; of one state or one sink where these are given."""
        found = self._db.execute(
            f"SELECT {_COLUMNS} FROM outbox WHERE (?1 IS NULL OR state = ?1) AND (?2 IS NULL OR sink = ?2)"  # noqa: S608 - ours
            " ORDER BY seq LIMIT ?3",
            (state, sink, limit),
        )
        return [_delivery(row) for row in found]

    def find(self, prefix: str) -> list[Delivery]:
        """The deliveries whose id begins with ``prefix``."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM outbox WHERE substr(delivery_id, 1, ?) = ?",  # noqa: S608 - ours
            (len(prefix), prefix),
        )
        return [_delivery(row) for row in rows]

    def listed_events(self) -> set[str]:
        """The keys of the events that are listed now."""
        return {key for (key,) in self._db.execute("SELECT event_key FROM tracked")}

    def free(self, ids: Iterable[str]) -> None:
        """Take back what a courier that was killed left on its way; for the time in which no courier runs."""
        with self.transaction() as db:
            db.executemany("UPDATE outbox SET leased = 0 WHERE delivery_id = ?", [(one,) for one in ids])

    def retry(self, ids: Iterable[str], now: float, expire_after: float | None) -> int:
        """Make deliveries due now, as if never tried; returns how many. What is on its way is left alone.

        ``expire_after``: the sink's, in seconds; ``None`` where it is not known: they are kept for a day at least.
        """
        with self.transaction() as db:
            return sum(
                db.execute(
                    "UPDATE outbox SET due = ?1, attempts = 0,"
                    " state = CASE state WHEN 'repeating' THEN 'repeating' ELSE 'pending' END,"
                    " expires = CASE WHEN kind = 'heartbeat' THEN expires"
                    " WHEN state = 'dead' AND ?4 THEN ?2 ELSE max(expires, ?2) END"
                    " WHERE delivery_id = ?3 AND NOT leased",
                    (now, now + (expire_after or Terms().expire_after), one, expire_after is not None),
                ).rowcount
                for one in ids
            )

    def drop(self, ids: Iterable[str]) -> int:
        """Delete deliveries and count them as dropped; returns how many. What is on its way is left alone."""
        dropped = 0
        with self.transaction() as db:
            for one in ids:
                gone = db.execute(
                    "DELETE FROM outbox WHERE delivery_id = ? AND NOT leased RETURNING sink, state", (one,)
                ).fetchall()
                dropped += len(gone)
                for sink, state in gone:
                    if state != "repeating":
                        count(db, sink, "dropped")
        return dropped


def _surely(db: sqlite3.Connection, now: float) -> float:
    """A time that has passed for certain, in Unix seconds: nothing expires by a clock that was set too far ahead."""
    row = db.execute("SELECT body FROM meta WHERE key = 'confirmed_time'").fetchone()
    if row is None:
        return 0.0
    confirmed = msgspec.msgpack.decode(row[0], type=ConfirmedTime)
    return min(now, confirmed.later(uptime(), boot_id()).wall)


def _due(db: sqlite3.Connection, sink: str, count: int, now: float, *, batched: bool) -> list[int]:
    """What may be sent now, the most severe first: the numbers of the rows."""
    rows = db.execute(
        f"SELECT seq, event_key FROM outbox WHERE sink = :sink AND state <> 'dead' AND (due <= :now OR {_FUTURE})"  # noqa: S608 - ours
        f" AND NOT leased AND {CONFIRMED} AND {_FIRST_OF_ITS_EVENT} ORDER BY urgency, not_before, seq LIMIT :count",
        {"sink": sink, "now": now, "count": count},
    ).fetchall()
    # two of one event may both be free (a reminder and a change): one after the other
    first: dict[str, int] = {}
    for seq, event_key in rows:
        first.setdefault(event_key, seq)
    if not batched:
        return list(first.values())
    found: list[int] = []
    for event_key, seq in first.items():
        found += [seq, *_followers(db, (sink, event_key, seq), now)]
        if len(found) >= count:
            break
    return found


def _followers(db: sqlite3.Connection, head: tuple[str, str, int], now: float) -> list[int]:
    """What a batched sink is given with an event's first delivery: the next ones, up to one that has to wait."""
    found: list[int] = []
    sink, event_key, first = head
    for seq, is_due, leased in db.execute(
        f"SELECT seq, due <= :now OR {_FUTURE}, leased FROM outbox WHERE sink = :sink"  # noqa: S608 - ours
        " AND event_key = :event_key AND seq > :first AND state = 'pending' AND kind <> 'reminder' ORDER BY seq"
        " LIMIT :limit",
        {"now": now, "sink": sink, "event_key": event_key, "first": first, "limit": BATCH_ROWS},
    ):
        if leased or not is_due:
            break
        found.append(seq)
    return found


def _lease(db: sqlite3.Connection, rows: list[int]) -> list[Delivery]:
    query = (
        f"SELECT {_COLUMNS}, (SELECT thread FROM threads WHERE threads.sink = outbox.sink"  # noqa: S608 - ours
        " AND threads.event_key = outbox.event_key) FROM outbox WHERE seq = ?"
    )
    leased = [_delivery(db.execute(query, (seq,)).fetchone()) for seq in rows]
    db.executemany("UPDATE outbox SET leased = 1, attempts = attempts + 1 WHERE seq = ?", [(seq,) for seq in rows])
    return leased


def _delivery(row: tuple[Any, ...]) -> Delivery:
    names = [*_COLUMNS.split(", "), "thread"]
    values = dict(zip(names, row, strict=False))  # the thread is only asked for where it matters
    values |= {name: msgspec.json.decode(values[name], type=tuple[str, ...]) for name in LISTS}
    return Delivery(**values | {"expires_with_event": bool(values["expires_with_event"])})


def _record_result(db: sqlite3.Connection, result: DeliveryResult, *, confirm: bool = False) -> None:
    row = db.execute(
        "SELECT sink, event_key, state, created, note FROM outbox WHERE delivery_id = ?", (result.delivery_id,)
    ).fetchone()
    if row is None:  # an operator dropped it, or a full outbox pushed it out, while it was on its way
        return
    sink, event_key, state, created, note = row
    if result.fallback and not result.counted:
        count(db, sink, FALLBACK)
    if result.pause:  # for all that is due to the sink, whichever courier takes it
        db.execute(
            "UPDATE outbox SET due = max(due, ?) WHERE sink = ? AND state <> 'dead' AND kind <> 'reminder'",
            (result.due, sink),
        )
    if confirm and result.result == "delivered" and state != "repeating":
        db.execute("DELETE FROM unconfirmed WHERE time < ?", (result.time - DEAD_SECONDS,))
        db.execute("INSERT OR REPLACE INTO unconfirmed VALUES (?, ?, ?)", (result.delivery_id, sink, result.time))
    if result.result == "delivered":
        # a sink that names no thread, and got this as another one's fallback, is to get the event's end as well
        thread = "" if result.thread is None and note else result.thread
        if thread is not None:
            values = (sink, event_key, thread, result.time)
            db.execute("INSERT OR REPLACE INTO threads VALUES (?, ?, ?, ?)", values)
        _record_delivered(db, result, (sink, event_key, state, created))
    elif result.result == "dead" and state != "repeating":
        count(db, sink, "dead")
        db.execute(
            # a heartbeat is of no use once the next one is due: it is not kept longer
            "UPDATE outbox SET state = 'dead', leased = 0, error = ?, fallback_at = min(fallback_at, 0),"
            " expires = CASE kind WHEN 'heartbeat' THEN expires ELSE ? END WHERE delivery_id = ?",
            (result.error, result.time + DEAD_SECONDS, result.delivery_id),
        )
        outbox_fallback.report(db, result)
    elif result.result == "yielded":
        count(db, sink, "yielded")
        db.execute("DELETE FROM outbox WHERE delivery_id = ?", (result.delivery_id,))
    else:  # a repetition that was refused is tried again: the message itself was delivered long ago
        count(db, sink, "failed")
        due = result.time + FAILED_REPEAT_SECONDS if result.due is None else result.due
        db.execute(
            "UPDATE outbox SET leased = 0, due = ?, error = ? WHERE delivery_id = ?",
            (due, result.error, result.delivery_id),
        )


def _record_delivered(db: sqlite3.Connection, result: DeliveryResult, row: tuple[str, str, str, float]) -> None:
    sink, event_key, state, created = row
    if state != "repeating" and not result.counted:
        count(db, sink, "delivered")
        latency = max(0.0, result.time - created)
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
    if result.repeat is None or not listed or db.execute(newer, (sink, event_key, result.delivery_id)).fetchone():
        db.execute("DELETE FROM outbox WHERE delivery_id = ?", (result.delivery_id,))
        return
    db.execute(
        "DELETE FROM outbox WHERE sink = ? AND event_key = ? AND state = 'repeating' AND delivery_id <> ?",
        (sink, event_key, result.delivery_id),
    )
    db.execute(
        # until its event ends (`event_ended`), or a newer delivery of the event replaces it (`put`)
        "UPDATE outbox SET state = 'repeating', leased = 0, due = ?, expires = ?, attempts = 0, error = ''"
        " WHERE delivery_id = ?",
        (result.time + result.repeat, result.time + REPEAT_SECONDS, result.delivery_id),
    )


def next_due(db: sqlite3.Connection, now: float) -> float | None:
    """When the next delivery may be sent, in Unix seconds; ``None`` when none waits.

    What is leased counts as well: no courier runs when this is asked, so the one that leased it has ended.
    """
    query = (
        f"SELECT min(CASE WHEN {_FUTURE} THEN min(due, :now) ELSE due END) FROM outbox"  # noqa: S608 - ours
        f" WHERE state <> 'dead' AND {_FIRST_OF_ITS_EVENT}"
    )
    times = (db.execute(query, {"now": now}).fetchone()[0], outbox_fallback.next_at(db))
    return min((time for time in times if time is not None), default=None)
