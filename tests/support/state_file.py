"""Reads and changes the state file of an agent on the disk."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from support.agent import PATIENCE

SELECT_STATE = "SELECT body FROM rows WHERE kind = 'state'"


def read_state(directory: Path, key: str) -> Any:
    """Return a field of the state; ``None`` if no state is written yet."""
    with closing(_opened(directory)) as db:
        row = db.execute(SELECT_STATE).fetchone()
    if row is None:
        return None
    return msgspec.msgpack.decode(row[0])[key]


def change_state(directory: Path, key: str, **values: Any) -> None:
    """Replace values within a field of the state."""
    with closing(_opened(directory)) as db, db:
        (body,) = db.execute(SELECT_STATE).fetchone()
        state = msgspec.msgpack.decode(body)
        state[key].update(values)
        changed_body = msgspec.msgpack.encode(state)
        db.execute("UPDATE rows SET body = ? WHERE kind = 'state'", (changed_body,))


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of the history, oldest first."""
    with closing(_opened(directory)) as db:
        rows = db.execute("SELECT record FROM history ORDER BY seq").fetchall()
    return [msgspec.json.decode(record) for (record,) in rows]


def _opened(directory: Path) -> sqlite3.Connection:
    return sqlite3.connect(directory / "notbefore.db", timeout=PATIENCE)
