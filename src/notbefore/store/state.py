"""``Store``: the agent's memory on disk. A change, what is tracked after it and its history go in one transaction.

When the disk is full or read-only the store keeps everything in memory, says so (``degraded``), and writes it all when
it can again. A damaged file is set aside under another name and a new one begun.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, field

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


class StoredState(Struct):
    """What the agent knows when it starts: all that the last one wrote."""

    tracked: Tracked = field(default_factory=Tracked)
    totals: Totals = field(default_factory=Totals)
    vm: Vm | None = None
    seen: datetime | None = None  # the last good answer, as far as it was written down
    beat: datetime | None = None  # when the machine was last known to be alive, likewise
    boot_id: str = ""
    clean: bool = False  # it stopped in order, at ``beat``
    approvals: dict[str, ApprovalAttempt] = field(default_factory=dict)  # by the event's key


class StoredChange(Struct, frozen=True):
    """One change as it is kept: ``record`` is it as a JSON object, ``deliveries`` what is to be sent of it."""

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
        self._mutex = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._unwritten: deque[StoredChange] = deque(maxlen=history.MAX_ROWS)
        self._written: Tracked | None = None  # as it stands on disk; None: unknown, write all of it
        self._memory = StoredState()
        self._lock = DirectoryLock(directory)
        try:
            self._guarded(self._open)
        except StoreError:
            self.close()
            raise

    # ---- what the agent calls

    def load(self) -> StoredState:
        """What the last agent wrote; empty on a new or damaged file."""
        with self._mutex:
            self._guarded(self._load)
            return self._memory

    def commit(self, memory: StoredState, changes: Sequence[StoredChange]) -> None:
        """Keep what is tracked now, the changes that led there and their deliveries: one transaction. Never raises."""
        with self._mutex:
            self._memory = memory
            self._unwritten.extend(changes)
            if self.degraded is None:
                self._guarded(self._write)

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Take in deliveries that no change causes; lost while nothing can be written. Never raises."""
        with self._mutex:
            if self.degraded is None:
                self._guarded(lambda: self._write_deliveries(deliveries))

    def leave(self, event_keys: Sequence[str]) -> None:
        """Nobody is to be reminded of these events, nor told again: they are others'. Never raises."""
        with self._mutex:
            if event_keys and self.degraded is None:
                self._guarded(lambda: self._write_left(event_keys))

    def beat(self, alive: datetime, boot_id: str) -> None:
        """Write down that the machine was alive then, and the last good answer: one small commit. Never raises."""
        with self._mutex:
            self._memory.beat, self._memory.boot_id = alive, boot_id
            if self.degraded is None:
                self._guarded(self._write_beat)

    def retry(self) -> None:
        """While degraded: try to open the file and to write all that it lacks."""
        with self._mutex:
            if self.degraded is None:
                return
            self._disconnect()
            self._written = None
            if self._guarded(self._open) and self._guarded(self._write):
                log.info("the state is written again: %s", self.path)

    def history(self, since: float | None, limit: int, max_bytes: int = ANSWER_BYTES) -> History:
        """The newest records since a Unix time: at most ``limit``, and so many bytes. Never raises."""
        with self._mutex:
            unwritten = [one.record for one in self._unwritten if since is None or one.change.time.timestamp() >= since]
        with suppress(sqlite3.Error):  # unreadable: what is in memory is all there is
            return read_history(self.path, since, limit, max_bytes, unwritten)
        return newest(reversed(unwritten), limit, max_bytes)

    def close(self) -> None:
        """Let go of the file and the directory."""
        with self._mutex:
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
        self._memory = StoredState(
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
        memory, now = self._memory, time.time()
        with transaction(self._connection()) as db:
            if self._written is None:
                db.execute("DELETE FROM tracked")
                db.execute("DELETE FROM departed")
            self._write_tracked(db, memory.tracked, self._written or Tracked())
            self._write_meta(db, memory)
            history.add(db, ((one.change, one.record) for one in self._unwritten))
            self._write_outbox(db, now)
            history.prune(db, now)
        self._written = memory.tracked
        self._unwritten.clear()

    def _write_outbox(self, db: sqlite3.Connection, now: float) -> None:
        for one in self._unwritten:
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
        if self._unwritten:
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
    def _write_meta(db: sqlite3.Connection, memory: StoredState) -> None:
        values: dict[str, object] = {
            "boot_id": memory.boot_id,
            "clean": "yes" if memory.clean else "no",
            "unreadable": "yes" if memory.tracked.unreadable else "no",
            "totals": msgspec.msgpack.encode(memory.totals),
            "approvals": msgspec.json.encode(memory.approvals),
        }
        if memory.tracked.incarnation is not None:
            values["incarnation"] = str(memory.tracked.incarnation)
        if memory.vm is not None:
            values["vm"] = msgspec.json.encode(memory.vm)
        else:
            db.execute("DELETE FROM meta WHERE key = 'vm'")  # it is not this VM's any longer
        values |= _times(memory)
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def _write_beat(self) -> None:
        values = {"boot_id": self._memory.boot_id, **_times(self._memory)}
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


def _times(memory: StoredState) -> dict[str, str]:
    times = {"seen": memory.seen, "beat": memory.beat}
    return {name: time.isoformat() for name, time in times.items() if time is not None}


def _is_damage(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):
        # the low byte is the primary code; errors of the sqlite3 module itself carry none
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
    return isinstance(error, (msgspec.MsgspecError, ValueError))  # a row that cannot be what we wrote
