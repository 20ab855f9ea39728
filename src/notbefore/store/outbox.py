"""The outbox: what is to be delivered, on disk until the far side has it.

The agent puts deliveries in (``outbox_intake``) and shows what is there (``OutboxReader``). The courier, a process of
its own with a connection of its own (``Outbox``), takes what is due and says what came of it.
"""

import sqlite3
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from notbefore.core.delivery import FALLBACK, Delivery, DeliveryResult, Terms
from notbefore.metrics.totals import LATENCY_BOUNDS
from notbefore.store.outbox_intake import MAX_ROWS, count, expire
from notbefore.store.schema import connect, transaction

DEAD_SECONDS: Final = 30 * 86_400.0  # how long a dead letter is kept
HELD_SECONDS: Final = 400 * 86_400.0

_COLUMNS: Final = (
    "delivery_id, event_key, sink, kind, severity, severity_given, created, due, expires, expires_with_event, record,"
    " attempts, state, error"
)
# the order: nothing is sent before an earlier delivery of the same event to the same sink; a reminder waits for its
# time, and nothing waits for it
_FIRST_OF_ITS_EVENT: Final = """NOT EXISTS (
    SELECT 1 FROM outbox AS earlier
    WHERE earlier.sink = outbox.sink AND earlier.event_key = outbox.event_key AND earlier.seq < outbox.seq
      AND earlier.state = 'pending' AND earlier.kind <> 'reminder')"""
# the clock was set back after the change was seen: nobody waits until it is that time again. A reminder's time is
# NotBefore's; what was tried has a pause that is to be kept, and none is longer than an hour
_AHEAD: Final = """(created > :now + 1 AND (attempts = 0 OR due > :now + 3600) AND state = 'pending'
    AND kind <> 'reminder')"""


class Outbox:
    """A hold on the outbox of a state file beside the agent's; one thread at a time. Methods raise ``sqlite3.Error``.

    Raises ``StoreError`` where there is no such file, or another version's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = connect(path, "rw")

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def void_leases(self, now: float) -> None:
        """Whoever held a lease is dead: what it had is free, and was due."""
        with transaction(self._db) as db:
            db.execute("UPDATE outbox SET leased_until = 0, due = min(due, ?) WHERE leased_until > 0", (now,))

    def exchange(
        self,
        settled: Sequence[DeliveryResult],
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
        with transaction(self._db) as db:
            for one in settled:
                _settle(db, one)
            expire(db, now)
            leased: list[Delivery] = []
            for sink, count in wanted.items():
                leased += _lease(db, _due(db, sink, count, now, whole=sink in whole), until)
            return leased

    def _anything_due(self, sinks: Iterable[str], now: float) -> bool:
        query = (
            "SELECT 1 FROM outbox WHERE sink = :sink AND state <> 'dead'"  # noqa: S608 - ours
            f" AND (due <= :now OR expires <= :now OR {_AHEAD}) LIMIT 1"
        )
        return any(self._db.execute(query, {"sink": sink, "now": now}).fetchone() for sink in sinks)

    def sinks_with_work(self) -> set[str]:
        """Whose deliveries wait, now or later."""
        return {sink for (sink,) in self._db.execute("SELECT DISTINCT sink FROM outbox WHERE state <> 'dead'")}

    def next_due(self) -> float | None:
        """When the next delivery may be sent, in Unix seconds; ``None`` when none waits."""
        return next_due(self._db, time.time())

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

    def listed(self) -> set[str]:
        """The events that are listed now, by their keys."""
        return {key for (key,) in self._db.execute("SELECT event_key FROM tracked")}

    def retry(self, ids: Iterable[str], now: float, expire_after: float | None) -> int:
        """Have deliveries sent again now, as if never tried; returns how many there were.

        ``expire_after``: the sink's; where it is not known, they have a day at least, and what they had.
        """
        with transaction(self._db) as db:
            return sum(
                db.execute(
                    "UPDATE outbox SET due = ?1, attempts = 0,"
                    " state = CASE state WHEN 'held' THEN 'held' ELSE 'pending' END,"
                    " expires = CASE WHEN kind = 'heartbeat' THEN expires"
                    " WHEN state = 'dead' AND ?4 THEN ?2 ELSE max(expires, ?2) END"
                    " WHERE delivery_id = ?3 AND leased_until <= ?1",
                    (now, now + (expire_after or Terms().expire_after), one, expire_after is not None),
                ).rowcount
                for one in ids
            )

    def drop(self, ids: Iterable[str], now: float) -> int:
        """Take deliveries out, counted as dropped; returns how many there were."""
        dropped = 0
        with transaction(self._db) as db:
            for one in ids:
                gone = db.execute(
                    "DELETE FROM outbox WHERE delivery_id = ? AND leased_until <= ? RETURNING sink, state", (one, now)
                ).fetchall()
                dropped += len(gone)
                for sink, state in gone:
                    if state != "held":
                        count(db, sink, "dropped")
        return dropped


def _due(db: sqlite3.Connection, sink: str, count: int, now: float, *, whole: bool) -> list[int]:
    """What may be sent now, the gravest first: rows by their numbers."""
    rows = db.execute(
        f"SELECT seq, event_key FROM outbox WHERE sink = :sink AND state <> 'dead' AND (due <= :now OR {_AHEAD})"  # noqa: S608 - ours
        f" AND leased_until <= :now AND {_FIRST_OF_ITS_EVENT} ORDER BY urgency, due, seq LIMIT :count",
        {"sink": sink, "now": now, "count": count},
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
    sink, event_key, first = head
    for seq, is_due, leased_until in db.execute(
        f"SELECT seq, due <= :now OR {_AHEAD}, leased_until FROM outbox WHERE sink = :sink AND event_key = :event_key"  # noqa: S608 - ours
        " AND seq > :first AND state = 'pending' AND kind <> 'reminder' ORDER BY seq LIMIT 100",
        {"now": now, "sink": sink, "event_key": event_key, "first": first},
    ):
        if not is_due or leased_until > now:
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
    return Delivery(**values | {name: bool(values[name]) for name in ("expires_with_event", "severity_given")})


def _settle(db: sqlite3.Connection, one: DeliveryResult) -> None:
    row = db.execute(
        "SELECT sink, event_key, state, created FROM outbox WHERE delivery_id = ?", (one.delivery_id,)
    ).fetchone()
    if row is None:  # taken out by hand, or pushed out, while it was on its way
        return
    sink, event_key, state, created = row
    if one.fallback:
        count(db, sink, FALLBACK)
    if one.pause:  # what is due now waits as well, whichever courier looks next
        db.execute(
            "UPDATE outbox SET due = max(due, ?) WHERE sink = ? AND state <> 'dead' AND kind <> 'reminder'",
            (one.due, sink),
        )
    if one.result == "delivered":
        _delivered(db, one, (sink, event_key, state, created))
        return
    if state == "held":  # a repetition that failed; what it repeats was delivered long ago
        count(db, sink, "failed")
        db.execute(
            "UPDATE outbox SET leased_until = 0, due = ?, error = ? WHERE delivery_id = ?",
            (one.due if one.due is not None else one.time + 60, one.error, one.delivery_id),
        )
        return
    if one.result == "dead":
        count(db, sink, "dead")
        db.execute(
            # a sign of life helps nobody once the next one is due: it is not kept any longer
            "UPDATE outbox SET state = 'dead', leased_until = 0, error = ?,"
            " expires = CASE kind WHEN 'heartbeat' THEN expires ELSE ? END WHERE delivery_id = ?",
            (one.error, one.time + DEAD_SECONDS, one.delivery_id),
        )
        return
    count(db, sink, "failed")
    db.execute(
        "UPDATE outbox SET leased_until = 0, due = ?, error = ? WHERE delivery_id = ?",
        (one.due, one.error, one.delivery_id),
    )


def _delivered(db: sqlite3.Connection, one: DeliveryResult, row: tuple[str, str, str, float]) -> None:
    sink, event_key, state, created = row
    if one.thread is not None:
        db.execute("INSERT OR REPLACE INTO threads VALUES (?, ?, ?, ?)", (sink, event_key, one.thread, one.time))
    if state != "held":
        count(db, sink, "delivered")
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
        "UPDATE outbox SET state = 'held', leased_until = 0, due = ?, expires = ?, attempts = 0, error = ''"
        " WHERE delivery_id = ?",
        (one.time + one.repeat, one.time + HELD_SECONDS, one.delivery_id),
    )


def next_due(db: sqlite3.Connection, now: float) -> float | None:
    """When the next delivery may be sent, in Unix seconds; ``None`` when none waits.

    Leases do not count: who asks this has no courier that could hold one.
    """
    query = (
        f"SELECT min(CASE WHEN {_AHEAD} THEN min(due, :now) ELSE due END) FROM outbox"  # noqa: S608 - ours
        f" WHERE state <> 'dead' AND {_FIRST_OF_ITS_EVENT}"
    )
    due: float | None = db.execute(query, {"now": now}).fetchone()[0]
    return due
