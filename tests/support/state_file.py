"""The state file, as it stands on the disk."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec


def read_state(directory: Path, key: str) -> Any:
    """A field of the state, as it is written; ``None`` where it is not."""
    with closing(sqlite3.connect(directory / "notbefore.db", timeout=10)) as db:
        row = db.execute("SELECT body FROM rows WHERE kind = 'state'").fetchone()
        return msgspec.msgpack.decode(row[0])[key] if row else None


def change_state(directory: Path, key: str, **values: Any) -> None:
    """Give parts of a field other values."""
    with closing(sqlite3.connect(directory / "notbefore.db", timeout=10)) as db, db:
        state = msgspec.msgpack.decode(
            db.execute("SELECT body FROM rows WHERE kind = 'state'").fetchone()[0]
        )
        changed = msgspec.msgpack.encode(state | {key: state[key] | values})
        db.execute("UPDATE rows SET body = ? WHERE kind = 'state'", (changed,))


def read_records(directory: Path) -> list[dict[str, Any]]:
    """The history, oldest first."""
    with closing(sqlite3.connect(directory / "notbefore.db", timeout=10)) as db:
        return [
            msgspec.json.decode(record)
            for (record,) in db.execute("SELECT record FROM history ORDER BY seq")
        ]
