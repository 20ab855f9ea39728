-- Each section brings the file from the version before it; the number is SQLite's user_version.

-- version 1
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value BLOB NOT NULL           -- incarnation, seen, boot_id, clean, vm, totals
) WITHOUT ROWID;

CREATE TABLE tracked (
    event_key TEXT PRIMARY KEY,   -- EventId, folded
    body      BLOB NOT NULL       -- events.lifecycle.Life as JSON
) WITHOUT ROWID;

CREATE TABLE departed (
    event_key TEXT PRIMARY KEY,
    position  INTEGER NOT NULL,   -- oldest first
    steps     BLOB NOT NULL       -- step -> how often, as JSON
) WITHOUT ROWID;

CREATE TABLE history (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    change_id TEXT NOT NULL,
    time      REAL NOT NULL,      -- Unix seconds at which the change was seen
    record    BLOB NOT NULL       -- events.record as JSON
);
CREATE INDEX history_time ON history (time);
