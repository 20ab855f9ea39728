"""``Store``: the agent's memory on disk. A change, what is tracked after it and its history go in one transaction.

When the disk is full or read-only the store keeps everything in memory, says so (``degraded``), and writes it all when
it can again. A damaged file is set aside under another name and a new one begun.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from notbefore.core.approval import ApprovalAttempt
from notbefore.core.change import Change
from notbefore.core.delivery import Delivery
from notbefore.core.lifecycle import OUTCOMES, Tracked, TrackedEvent
from notbefore.core.record import Vm
from notbefore.errors import StoreError
from notbefore.metrics.totals import Totals
from notbefore.store import history, outbox_intake
from notbefore.store.history import ANSWER_BYTES, History, newest, read_history
from notbefore.store.lock import DirectoryLock
from notbefore.store.schema import BUSY_SECONDS, bring_up_to_date, transaction

FILE_NAME: Final = "notbefore.db"
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

log = logging.getLogger("notbefore.store")


class StoredState(Struct, frozen=True):
    """What the agent remembers across restarts."""

    tracked: Tracked = Tracked()
    totals: Totals = Totals()
    vm: Vm | None = None
    seen: datetime | None = None  # the last good answer of IMDS before this was staged
    beat: datetime | None = None  # when the machine was last known to be running
    boot_id: str = ""
    clean: bool = False  # the agent stopped in order, at ``beat``
    approvals: dict[str, ApprovalAttempt] = {}  # by the event's key


class StoredChange(Struct, frozen=True):
    """One change as it is kept. ``record``: the change as JSON, UTF-8. ``deliveries``: what is to be sent of it."""

    change: Change
    record: bytes
    deliveries: tuple[Delivery, ...] = ()


class Store:
    """One writer's hold on the state directory. Safe to call from several threads.

    Raises ``StoreError`` when another agent holds the directory, or a newer version made the file; any other trouble is
    survived in memory.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self.degraded: str | None = None  # why nothing is written, in words
        self.damaged_files = 0
        self._memory = threading.Lock()  # of the next three; never held over the disk
        self._state = StoredState()  # the newest
        self._unwritten: tuple[StoredChange, ...] = ()  # in order
        self._revision = 0  # how often something was staged
        self._disk = threading.RLock()  # of the rest: the connection serves one thread at a time
        self._db: sqlite3.Connection | None = None
        self._written_revision = 0  # the one on disk
        self._written: Tracked | None = None  # as it stands on disk; None: unknown, write all of it
        self._lock = DirectoryLock(directory)
        try:
            self._guarded(self._open)
        except StoreError:
            self.close()
            raise

    # ---- what the agent calls

    def load(self) -> StoredState:
        """What the last agent wrote; empty on a new or damaged file."""
        with self._disk:
            self._guarded(self._load)
            return self._state

    def stage(self, state: StoredState, changes: Sequence[StoredChange] = ()) -> None:
        """Take in what is to be written next: the state and the changes that led to it. Never waits for the disk.

        Only the newest state is written, and all changes in the order in which they came.
        """
        with self._memory:
            self._state = state
            self._unwritten = (*self._unwritten, *changes)[-history.MAX_ROWS :]
            self._revision += 1

    def write(self) -> bool:
        """Write what is staged, changes with their deliveries, in one transaction; returns whether it is on disk.

        While the state cannot be written it returns at once. Never raises.
        """
        revision = self._revision
        if self.degraded is not None:
            return False
        with self._disk:
            if self.degraded is None and self._written_revision < revision:
                self._guarded(self._write)
            return self.degraded is None

    def commit(self, state: StoredState, changes: Sequence[StoredChange]) -> bool:
        """``stage`` and ``write``."""
        self.stage(state, changes)
        return self.write()

    def beat(self, state: StoredState) -> None:
        """Stage a state of which only the times are new, and write these: one small commit. Never raises."""
        self.stage(state)
        if self.degraded is None:
            with self._disk:
                self._guarded(lambda: self._write_times(state))

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Take in deliveries that no change causes; lost while nothing can be written. Never raises."""
        if self.degraded is None:
            with self._disk:
                self._guarded(lambda: self._write_deliveries(deliveries))

    def leave(self, event_keys: Sequence[str]) -> None:
        """Remove reminders and repetitions of these events: they are other VMs'. Never raises."""
        if event_keys and self.degraded is None:
            with self._disk:
                self._guarded(lambda: self._write_left(event_keys))

    def retry(self) -> None:
        """While degraded: try to open the file and to write all that it lacks. Never raises."""
        with self._disk:
            if self.degraded is None:
                return
            self._disconnect()
            self._written = None
            if self._guarded(self._open) and self._guarded(self._write):
                log.info("the state is written again: %s", self.path)

    def history(self, since: float | None, limit: int, max_bytes: int = ANSWER_BYTES) -> History:
        """The newest records since a Unix time: at most ``limit``, and so many bytes. Never raises."""
        unwritten = [one.record for one in self._unwritten if since is None or one.change.time.timestamp() >= since]
        with suppress(sqlite3.Error):  # unreadable: what is in memory is all there is
            return read_history(self.path, since, limit, max_bytes, unwritten)
        return newest(reversed(unwritten), limit, max_bytes)

    def close(self) -> None:
        """Let go of the file and the directory."""
        with self._disk:
            self._disconnect()
            self._lock.release()

    # ---- opening

    def _open(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock.acquire()
        # autocommit: transactions are begun and ended in `transaction` alone
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA cache_size = -256")  # KiB: the file is small, and so shall the agent be
        result = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if result != "ok":
            error = sqlite3.DatabaseError(result)
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        bring_up_to_date(self._db, self.path)
        self.degraded = None

    # ---- reading and writing, inside _guarded

    def _load(self) -> None:
        db = self._connection()
        meta: dict[str, Any] = dict(db.execute("SELECT key, value FROM meta"))
        lives = db.execute("SELECT event_key, body FROM tracked").fetchall()
        steps = db.execute("SELECT event_key, steps FROM departed ORDER BY position").fetchall()
        tracked = Tracked(
            events={key: msgspec.json.decode(body, type=TrackedEvent) for key, body in lives},
            departed={key: msgspec.json.decode(body, type=dict[str, int]) for key, body in steps},
            incarnation=int(meta["incarnation"]) if "incarnation" in meta else None,
            unreadable=meta.get("unreadable") == "yes",
        )
        self._state = StoredState(
            tracked=tracked,
            totals=msgspec.msgpack.decode(meta["totals"], type=Totals) if "totals" in meta else Totals(),
            vm=msgspec.json.decode(meta["vm"], type=Vm) if "vm" in meta else None,
            seen=datetime.fromisoformat(meta["seen"]) if "seen" in meta else None,
            beat=datetime.fromisoformat(meta["beat"]) if "beat" in meta else None,
            boot_id=meta.get("boot_id", ""),
            clean=meta.get("clean") == "yes",
            approvals=msgspec.json.decode(meta["approvals"], type=dict[str, ApprovalAttempt])
            if "approvals" in meta
            else {},
        )
        self._written = tracked

    def _write(self) -> None:
        with self._memory:
            state, changes, revision = self._state, self._unwritten, self._revision
        now = time.time()
        with transaction(self._connection()) as db:
            if self._written is None:
                db.execute("DELETE FROM tracked")
                db.execute("DELETE FROM departed")
            self._write_tracked(db, state.tracked, self._written or Tracked())
            self._write_meta(db, state)
            history.add(db, ((one.change, one.record) for one in changes))
            self._write_outbox(db, changes, now)
            history.prune(db, now)
        self._written, self._written_revision = state.tracked, revision
        with self._memory:  # what was staged meanwhile stays
            written = set(map(id, changes))
            self._unwritten = tuple(one for one in self._unwritten if id(one) not in written)

    @staticmethod
    def _write_outbox(db: sqlite3.Connection, changes: Sequence[StoredChange], now: float) -> None:
        for one in changes:
            change, key = one.change, one.change.event.key
            if change.kind in OUTCOMES:
                outbox_intake.event_ended(db, key, now)
            elif change.kind == "started":
                outbox_intake.event_started(db, key, now)
            elif change.not_before_shift:
                outbox_intake.not_before_changed(db, key, change.not_before_shift, one.record, now)
            if change.no_longer_affected:
                outbox_intake.no_longer_affected(db, key, now)
            outbox_intake.put(db, one.deliveries, now)
        if changes:
            outbox_intake.expire(db, now)

    def _write_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        now = time.time()
        with transaction(self._connection()) as db:
            outbox_intake.put(db, deliveries, now)
            outbox_intake.expire(db, now)

    def _write_left(self, event_keys: Sequence[str]) -> None:
        with transaction(self._connection()) as db:
            for key in event_keys:
                outbox_intake.no_longer_affected(db, key, time.time())

    @staticmethod
    def _write_tracked(db: sqlite3.Connection, new: Tracked, old: Tracked) -> None:
        db.executemany(
            "DELETE FROM tracked WHERE event_key = ?", [(key,) for key in old.events if key not in new.events]
        )
        db.executemany(
            "INSERT OR REPLACE INTO tracked VALUES (?, ?)",
            [(key, msgspec.json.encode(life)) for key, life in new.events.items() if old.events.get(key) is not life],
        )
        db.executemany(
            "DELETE FROM departed WHERE event_key = ?", [(key,) for key in old.departed if key not in new.departed]
        )
        db.executemany(
            "INSERT OR REPLACE INTO departed SELECT ?, coalesce(max(position), 0) + 1, ? FROM departed",
            [(key, msgspec.json.encode(steps)) for key, steps in new.departed.items() if key not in old.departed],
        )

    @staticmethod
    def _write_meta(db: sqlite3.Connection, state: StoredState) -> None:
        values: dict[str, object] = {
            "boot_id": state.boot_id,
            "clean": "yes" if state.clean else "no",
            "unreadable": "yes" if state.tracked.unreadable else "no",
            "totals": msgspec.msgpack.encode(state.totals),
            "approvals": msgspec.json.encode(state.approvals),
        }
        if state.tracked.incarnation is not None:
            values["incarnation"] = str(state.tracked.incarnation)
        if state.vm is not None:
            values["vm"] = msgspec.json.encode(state.vm)
        else:
            db.execute("DELETE FROM meta WHERE key = 'vm'")  # it is not this VM's any longer
        values |= _times(state)
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def _write_times(self, state: StoredState) -> None:
        values = {"boot_id": state.boot_id, **_times(state)}
        with transaction(self._connection()) as db:
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise sqlite3.OperationalError(self.degraded or "the state is closed")
        return self._db

    # ---- trouble

    def _guarded(self, action: Any) -> bool:
        """Run ``action``; a damaged file is replaced and the action tried once more, other trouble degrades."""
        for attempt in ("first", "anew"):
            try:
                action()
            except (sqlite3.Error, msgspec.MsgspecError, ValueError, OSError) as error:
                if attempt == "first" and _is_damage(error) and self._set_aside(error):
                    continue
                self._degrade(error)
                return False
            return True
        return False

    def _set_aside(self, error: Exception) -> bool:
        """Rename the damaged file and open a new one; False if even that fails."""
        self._disconnect()
        self._written = None
        name = f"{FILE_NAME}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        try:
            for suffix in ("", "-wal", "-shm"):
                part = self.path.with_name(FILE_NAME + suffix)
                if part.exists():
                    part.replace(self.path.with_name(name + suffix))
            self._open()
        except (sqlite3.Error, OSError):
            return False
        self.damaged_files += 1
        log.error(
            "the state file was damaged (%s): it is kept as %s, and a new one is used", error, self.path.with_name(name)
        )
        saved = outbox_intake.copy_readable(self.path.with_name(name), self._connection())
        log.error("%d deliveries were copied from the damaged file; others that it held are only there", saved)
        return True

    def _degrade(self, error: Exception) -> None:
        if self.degraded is None:
            log.error(
                "the state cannot be written (%s: %s): it is kept in memory, and writing is tried again",
                self.path,
                error,
            )
        self.degraded = str(error) or type(error).__name__

    def _disconnect(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None


def _times(state: StoredState) -> dict[str, str]:
    times = {"seen": state.seen, "beat": state.beat}
    return {name: time.isoformat() for name, time in times.items() if time is not None}


def _is_damage(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):
        # the low byte is the primary code; errors of the sqlite3 module itself carry none
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
    return isinstance(error, (msgspec.MsgspecError, ValueError))  # a row that cannot be what we wrote
