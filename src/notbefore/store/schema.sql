-- Each section brings the file from the version before it; the number is SQLite's user_version.

-- version 1
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value BLOB NOT NULL           -- incarnation, unreadable, seen, boot_id, clean, vm, totals
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

CREATE TABLE outbox (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    delivery_id TEXT NOT NULL UNIQUE,  -- one change to one sink, whoever sees it and however often it is tried
    change_id   TEXT NOT NULL,
    event_key   TEXT NOT NULL,         -- the order is kept within an event and a sink
    sink        TEXT NOT NULL,
    severity    TEXT NOT NULL,
    due         REAL NOT NULL,         -- Unix seconds from which on it may be sent
    record      BLOB NOT NULL
);
CREATE INDEX outbox_due ON outbox (due);
