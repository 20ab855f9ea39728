"""Rows go from one state file into another: from a damaged or deleted one, into the spare one, and back."""

import sqlite3
from contextlib import suppress
from typing import Final

TABLES: Final = (
    "meta", "tracked", "departed", "approvals", "unreadable_rows", "history",
    "delivery_counts", "delivery_latency", "threads", "unconfirmed", "outbox",
)  # fmt: skip
_SEQ: Final = "seq"  # a number of the file's own


def copy_table(source: sqlite3.Connection, target: sqlite3.Connection, table: str, conflict: str = "IGNORE") -> int:
    """Copy all rows of a table, in their order; returns how many were new. Raises ``sqlite3.Error``.

    ``conflict``: ``IGNORE`` keeps the row that is there already, ``REPLACE`` does not. A change is not added twice to
    the history.
    """
    known = set(target.execute("SELECT change_id FROM history")) if table == "history" else set()
    ordered = table in ("history", "outbox")
    rows = source.execute(f"SELECT * FROM {table}{' ORDER BY seq' if ordered else ''}")  # noqa: S608 - one of ours
    names = [name for name, *_ in rows.description]
    first = 1 if names[0] == _SEQ else 0
    columns, marks = ", ".join(names[first:]), ", ".join("?" * len(names[first:]))
    into = f"INSERT OR {conflict} INTO {table} ({columns}) VALUES ({marks})"  # noqa: S608 - one of ours
    copied = 0
    for row in rows:
        if table != "history" or (row[1],) not in known:
            copied += target.execute(into, row[first:]).rowcount
    return copied


def copy_readable(source: sqlite3.Connection, target: sqlite3.Connection) -> int:
    """Copy what can be read of a state file, in the caller's transaction; returns how many deliveries. Never raises."""
    copied = 0
    for table in TABLES:
        with suppress(sqlite3.Error):  # row by row, up to one that cannot be read
            copied = copy_table(source, target, table)
    return copied
