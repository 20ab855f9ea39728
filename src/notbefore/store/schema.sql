-- The state file. Times are Unix seconds. The version is `schema.SCHEMA_VERSION`, kept as SQLite's user_version.

-- `version` is the one of the row's own form (state_file.ROW_VERSION): a row that this version of notbefore cannot read
-- is moved to `unreadable_rows`, and costs nothing else.

CREATE TABLE meta (
    key     TEXT PRIMARY KEY,     -- a field of state_file.StoredState, or a word of the store's own
    version INTEGER NOT NULL,
    body    BLOB NOT NULL         -- its value as MessagePack
) WITHOUT ROWID;

CREATE TABLE tracked (
    event_key TEXT PRIMARY KEY,   -- EventId, folded
    version   INTEGER NOT NULL,
    body      BLOB NOT NULL       -- core.lifecycle.TrackedEvent as JSON
) WITHOUT ROWID;

CREATE TABLE departed (
    event_key TEXT PRIMARY KEY,
    version   INTEGER NOT NULL,
    body      BLOB NOT NULL,      -- step -> how often, as JSON
    position  INTEGER NOT NULL    -- oldest first
) WITHOUT ROWID;

CREATE TABLE approvals (
    event_key TEXT PRIMARY KEY,
    version   INTEGER NOT NULL,
    body      BLOB NOT NULL,      -- core.approval.ApprovalAttempt as JSON
    position  INTEGER NOT NULL    -- oldest first
) WITHOUT ROWID;

CREATE TABLE unreadable_rows (
    source  TEXT NOT NULL,        -- the table in which it was
    row_key TEXT NOT NULL,
    version INTEGER NOT NULL,
    body    BLOB NOT NULL,
    error   TEXT NOT NULL,        -- why it could not be read
    time    REAL NOT NULL,        -- when it was moved here
    PRIMARY KEY (source, row_key, time)
) WITHOUT ROWID;

CREATE TABLE history (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    change_id TEXT NOT NULL,
    time      REAL NOT NULL,      -- at which the change was seen
    record    BLOB NOT NULL       -- core.record as JSON
);
CREATE INDEX history_time ON history (time);

CREATE TABLE history_size (bytes INTEGER NOT NULL);  -- of all records; one row
INSERT INTO history_size VALUES (0);
CREATE TRIGGER history_added AFTER INSERT ON history
    BEGIN UPDATE history_size SET bytes = bytes + length(new.record); END;
CREATE TRIGGER history_removed AFTER DELETE ON history
    BEGIN UPDATE history_size SET bytes = bytes - length(old.record); END;

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
    record       BLOB NOT NULL,
    ahead        TEXT NOT NULL DEFAULT '[]',  -- this and the next two: names, as JSON
    fallback     TEXT NOT NULL DEFAULT '[]',
    others       TEXT NOT NULL DEFAULT '[]',
    fallback_at  REAL,                  -- NULL: there is no fallback, or it has been used
    note         TEXT NOT NULL DEFAULT ''
);
CREATE INDEX outbox_fallback ON outbox (fallback_at) WHERE fallback_at IS NOT NULL;
CREATE INDEX outbox_queue ON outbox (sink, urgency, not_before);
CREATE INDEX outbox_order ON outbox (sink, event_key, seq);
CREATE INDEX outbox_event ON outbox (event_key);
CREATE INDEX outbox_expires ON outbox (expires);

CREATE TABLE unconfirmed (
    delivery_id TEXT PRIMARY KEY,       -- its receiver has accepted it, which is not written elsewhere yet
    sink TEXT NOT NULL,                 -- that is given nothing until it is (store.outbox.CONFIRMED)
    time REAL NOT NULL                  -- Unix seconds
) WITHOUT ROWID;

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

CREATE TABLE sink_reports (
    sink TEXT PRIMARY KEY,              -- that refused a message
    time REAL NOT NULL                  -- when this was last reported to another sink
) WITHOUT ROWID;

CREATE TABLE threads (
    sink      TEXT NOT NULL,
    event_key TEXT NOT NULL,
    thread    TEXT NOT NULL,            -- the sink's name of the thread of messages about the event
    time      REAL NOT NULL,            -- Unix seconds
    PRIMARY KEY (sink, event_key)
) WITHOUT ROWID;
