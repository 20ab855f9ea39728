"""Rows go from one state file into another: from a damaged or deleted one, into the spare one, and back."""

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from notbefore.store.disk import DiskThread

TABLES: Final = (
    "meta", "tracked", "departed", "approvals", "unreadable_rows", "history",
    "delivery_counts", "delivery_latency", "threads", "unconfirmed", "outbox",
)  # fmt: skip
PIECE: Final = 100  # rows: of events with 1,000 resources 3 MB
_SEQ: Final = "seq"  # a number of the file's own

T = TypeVar("T")


def copy_table(
    source: sqlite3.Connection,
    target: sqlite3.Connection,
    table: str,
    conflict: str = "IGNORE",
    disk: DiskThread | None = None,
) -> int:
    """Copy all rows of a table, in their order; returns how many were new. Raises ``sqlite3.Error``.

    ``conflict``: ``IGNORE`` keeps the row that is there already, ``REPLACE`` does not. A change is not added twice to
    the history. ``disk``: the thread that reads the source; raises ``DiskHangsError`` where it waits for one piece for
    longer than its deadline.
    """
    known = set(target.execute("SELECT change_id FROM history")) if table == "history" else set()
    ordered = table in ("history", "outbox")
    query = f"SELECT * FROM {table}{' ORDER BY seq' if ordered else ''}"  # noqa: S608 - one of ours
    copied = 0
    rows = source.cursor()
    try:
        _in_turn(disk, lambda: rows.execute(query))
        names = [name for name, *_ in rows.description]
        first = 1 if names[0] == _SEQ else 0
        columns, marks = ", ".join(names[first:]), ", ".join("?" * len(names[first:]))
        into = f"INSERT OR {conflict} INTO {table} ({columns}) VALUES ({marks})"  # noqa: S608 - one of ours
        while piece := _in_turn(disk, lambda: rows.fetchmany(PIECE if disk is not None else 1)):
            for row in piece:
                if table != "history" or (row[1],) not in known:
                    copied += target.execute(into, row[first:]).rowcount
    finally:
        if disk is None:
            rows.close()
        else:
            disk.post(rows.close)  # after what hangs now: a cursor that is left open keeps its connection open
    return copied


def _in_turn(disk: DiskThread | None, action: Callable[[], T]) -> T:
    return action() if disk is None else disk.do(action)


def copy_readable(source: sqlite3.Connection, target: sqlite3.Connection) -> int:
    """Copy what can be read of a state file, in the caller's transaction; returns how many deliveries. Never raises."""
    copied = 0
    for table in TABLES:
        with suppress(sqlite3.Error):  # row by row, up to one that cannot be read
            copied = copy_table(source, target, table)
    return copied
