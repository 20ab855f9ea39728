"""The history in the state file: the records of past changes, newest last, bounded in rows and bytes."""

import sqlite3
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Final, NamedTuple

from notbefore.core.change import Change
from notbefore.store.connection import open_database

MAX_ROWS: Final = 10_000
MAX_BYTES: Final = 64 * 1024 * 1024
ANSWER_BYTES: Final = 4 * 1024 * 1024  # of records in one answer; the state file holds more


class HistoryAnswer(NamedTuple):
    """Records as JSON, oldest first. ``cut``: older ones were left out, because there were too many bytes."""

    records: list[bytes]
    cut: bool


def read_history(
    path: Path, since: float | None, limit: int, max_bytes: int = sys.maxsize, newer: Sequence[bytes] = ()
) -> HistoryAnswer:
    """The newest records of a state file, at most ``limit`` of them; nothing is written to the file.

    ``since``: Unix seconds of the oldest that is wanted. ``newer``: records that are not in the file yet, oldest first.
    Raises ``sqlite3.Error``.
    """
    with closing(open_database(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as db:
        return history_in(db, since, limit, max_bytes, newer)


def history_in(
    db: sqlite3.Connection, since: float | None, limit: int, max_bytes: int, newer: Sequence[bytes] = ()
) -> HistoryAnswer:
    """The same, over a connection that is open."""
    rows = db.execute(
        "SELECT record FROM history WHERE time >= ? ORDER BY seq DESC LIMIT ?",
        (since if since is not None else 0, limit),
    )
    known = set(newer)  # they may have been written just now
    written = (record for (record,) in rows if record not in known)
    return newest(chain(reversed(newer), written), limit, max_bytes)


def interruptions(path: Path, event_type: str, vm_id: str) -> list[float]:
    """The measured interruptions of past events of a type that affected this VM, in seconds.

    ``vm_id``: the one of this VM, as its records have it; empty where it is not known. Raises ``sqlite3.Error``.
    """
    with closing(open_database(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)) as db:
        return [seconds for (seconds,) in db.execute(_INTERRUPTIONS, (event_type, vm_id))]


def _attribute(name: str) -> str:
    return f"""json_extract(line, '$."{name}"')"""


_INTERRUPTIONS: Final = f"""
    SELECT {_attribute("azure.scheduled_event.interruption_seconds")} AS seconds
    FROM (SELECT CAST(record AS TEXT) AS line FROM history)
    WHERE json_valid(line) AND {_attribute("azure.scheduled_event.change")} = 'finished'
        AND {_attribute("azure.scheduled_event.scope")} = 'self' AND seconds IS NOT NULL
        AND {_attribute("azure.scheduled_event.type")} = ? AND COALESCE({_attribute("host.id")}, '') = ?
"""  # noqa: S608 - made of constants


def newest(newest_first: Iterable[bytes], limit: int, max_bytes: int) -> HistoryAnswer:
    """Of records that come newest first: the first ``limit`` of them that are ``max_bytes`` or less together."""
    found: list[bytes] = []
    for record in islice(newest_first, limit):
        max_bytes -= len(record)
        if max_bytes < 0:
            return HistoryAnswer(found[::-1], cut=True)
        found.append(record)
    return HistoryAnswer(found[::-1], cut=False)


def add(db: sqlite3.Connection, changes: Iterable[tuple[Change, bytes]]) -> None:
    """Append changes with their records, inside the caller's transaction."""
    db.executemany(
        "INSERT INTO history (change_id, time, record) VALUES (?, ?, ?)",
        [(change.id, change.time.timestamp(), record) for change, record in changes],
    )


def prune(db: sqlite3.Connection, max_bytes: int = MAX_BYTES) -> None:
    """Delete what is too much, the oldest first; ``max_bytes``: of all records.

    Not by age: a record has the time of a clock that may have been years behind.
    """
    db.execute("DELETE FROM history WHERE seq <= (SELECT max(seq) FROM history) - ?", (MAX_ROWS,))
    excess = db.execute("SELECT bytes FROM history_size").fetchone()[0] - max_bytes
    if excess > 0:
        last = None
        for seq, size in db.execute("SELECT seq, length(record) FROM history ORDER BY seq"):
            last, excess = seq, excess - size
            if excess <= 0:
                break
        db.execute("DELETE FROM history WHERE seq <= ?", (last,))
