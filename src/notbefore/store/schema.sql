-- The state file. Times are Unix seconds. The version is `schema.SCHEMA_VERSION`, kept as SQLite's user_version.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value BLOB NOT NULL           -- incarnation, unreadable, seen, beat, boot_id, clean, vm, totals, approvals
) WITHOUT ROWID;

CREATE TABLE tracked (
    event_key TEXT PRIMARY KEY,   -- EventId, folded
    body      BLOB NOT NULL       -- core.lifecycle.TrackedEvent as JSON
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
    record    BLOB NOT NULL       -- core.record as JSON
);
CREATE INDEX history_time ON history (time);

CREATE TABLE outbox (
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,
    delivery_id  TEXT NOT NULL UNIQUE,  -- one change to one sink: the same on every VM, at every attempt
    event_key    TEXT NOT NULL,         -- the order is kept within an event and a sink
    sink         TEXT NOT NULL,
    kind         TEXT NOT NULL,         -- core.delivery.MessageKind
    severity     TEXT NOT NULL,
    urgency      INTEGER NOT NULL,      -- 0 is the most severe
    state        TEXT NOT NULL DEFAULT 'pending',  -- core.delivery.STATES
    created      REAL NOT NULL,         -- this and the next three: Unix seconds
    due          REAL NOT NULL,
    expires      REAL NOT NULL,
    not_before   REAL NOT NULL,         -- the order of sending: urgency, not_before, seq
    leased       INTEGER NOT NULL DEFAULT 0,  -- 1: on its way, in the hands of the courier that runs
    expires_with_event        INTEGER NOT NULL,      -- 1: expires when the event ends
    attempts     INTEGER NOT NULL DEFAULT 0,
    error        TEXT NOT NULL DEFAULT '',
    record       BLOB NOT NULL
);
CREATE INDEX outbox_queue ON outbox (sink, urgency, not_before);
CREATE INDEX outbox_order ON outbox (sink, event_key, seq);
CREATE INDEX outbox_event ON outbox (event_key);
CREATE INDEX outbox_expires ON outbox (expires);

CREATE TABLE delivery_counts (
    sink   TEXT NOT NULL,
    result TEXT NOT NULL,               -- core.delivery.RESULTS
    count  INTEGER NOT NULL,
    PRIMARY KEY (sink, result)
) WITHOUT ROWID;

CREATE TABLE delivery_latency (
    sink   TEXT NOT NULL,
    bucket INTEGER NOT NULL,            -- the index of metrics.totals.LATENCY_BOUNDS
    count  INTEGER NOT NULL,
    sum    REAL NOT NULL,               -- seconds
    PRIMARY KEY (sink, bucket)
) WITHOUT ROWID;

CREATE TABLE threads (
    sink      TEXT NOT NULL,
    event_key TEXT NOT NULL,
    thread    TEXT NOT NULL,            -- the sink's name of the thread of messages about the event
    time      REAL NOT NULL,            -- Unix seconds
    PRIMARY KEY (sink, event_key)
) WITHOUT ROWID;
