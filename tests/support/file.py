"""The state file, as it stands on the disk."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec


def read_state(directory: Path, key: str) -> Any:
    """A field of the state, as it is written; ``None`` where it is not."""
    with closing(sqlite3.connect(directory / "notbefore.db", timeout=10)) as db:
        row = db.execute("SELECT body FROM rows WHERE kind = 'state' AND key = ?", (key,)).fetchone()
        return msgspec.msgpack.decode(row[0]) if row else None


def change_state(directory: Path, key: str, **values: Any) -> None:
    """Give parts of a field other values."""
    changed = msgspec.msgpack.encode(read_state(directory, key) | values)
    with closing(sqlite3.connect(directory / "notbefore.db", timeout=10)) as db, db:
        db.execute("UPDATE rows SET body = ? WHERE kind = 'state' AND key = ?", (changed, key))


def read_records(directory: Path) -> list[dict[str, Any]]:
    """The history, oldest first."""
    with closing(sqlite3.connect(directory / "notbefore.db", timeout=10)) as db:
        return [msgspec.json.decode(record) for (record,) in db.execute("SELECT record FROM history ORDER BY seq")]
