"""``Store``: the agent's memory on disk. A change, what is tracked after it and its deliveries go in one transaction.

While the state file cannot be written, a spare one in memory takes its place (``spare``), and deliveries go on. What it
has taken in is written to the state file when that is possible again. A damaged file is kept under another name; what
can be read of it, and what the agent knows, are written into a new one.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from notbefore.core.delivery import Delivery
from notbefore.errors import StoreError
from notbefore.store import history, spare
from notbefore.store.confirmed_time import ConfirmedTime, boot_id, uptime
from notbefore.store.copying import copy_readable
from notbefore.store.history import ANSWER_BYTES, History, newest, read_history
from notbefore.store.lock import DirectoryLock
from notbefore.store.private import check_directory
from notbefore.store.schema import DAMAGED, transaction
from notbefore.store.state_file import FILE_NAME, Loaded, Moment, StateFile, StoredChange, StoredState

log = logging.getLogger("notbefore.store")

Action = Callable[[StateFile], object]
_TROUBLE: Final = (sqlite3.Error, OSError)


class Store:
    """One writer's hold on the state directory. Safe to call from several threads.

    ``history_bytes``: of all records that are kept. Raises ``StoreError`` when another agent holds the directory, or a
    newer version made the file; any other trouble is survived in memory, and none of its methods raises.
    """

    def __init__(self, directory: Path, history_bytes: int = history.MAX_BYTES) -> None:
        self.path = directory / FILE_NAME
        self.spare_path = spare.spare_path(directory)
        self.degraded: str | None = None  # why the state file cannot be written, in words
        self.damaged_files = 0
        self.unreadable_rows = 0  # found since the start
        self._memory = threading.Lock()  # of the next three; never held over the disk
        self._state = StoredState()  # the newest
        self._unwritten: tuple[StoredChange, ...] = ()  # in order
        self._revision = 0  # how often something was staged
        self._disk = threading.RLock()  # of the rest: a connection serves one thread at a time
        self._main = StateFile(self.path, history_bytes)
        self._spare: StateFile | None = None  # while it is used
        self._written_revision = 0  # the one in the file that is used
        self._spare_failed = False  # and that was logged
        self._confirmed: ConfirmedTime | None = None
        self._lock = DirectoryLock(directory)
        try:
            self._begin()
        except StoreError:
            self.close()
            raise

    # ---- what the agent calls

    def load(self) -> StoredState:
        """What the last agent wrote; empty on a new file."""
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

        While the state file cannot be written, it is written to the spare one.
        """
        revision = self._revision
        with self._disk:
            if self._written_revision < revision:
                self._attempt(self._write_staged)
            return self.degraded is None

    def commit(self, state: StoredState, changes: Sequence[StoredChange]) -> bool:
        """``stage`` and ``write``."""
        self.stage(state, changes)
        return self.write()

    def beat(self, state: StoredState, *, durable: bool = True) -> None:
        """Stage a state of which only the times are new, and write these: see ``StateFile.write_times``."""
        self.stage(state)
        with self._disk:
            self._attempt(lambda file: file.write_times(state, self._moment(), durable=durable))

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Add deliveries that no change causes; they are lost while neither file can be written."""
        with self._disk:
            self._attempt(lambda file: file.put(deliveries, self._moment()))

    def leave(self, event_keys: Sequence[str]) -> None:
        """Withdraw the reminders of these events, and end their repetitions: they are other VMs'."""
        if event_keys:
            with self._disk:
                self._attempt(lambda file: file.no_longer_affected(event_keys))

    def retry(self) -> None:
        """While degraded: try to write to the state file all that it lacks."""
        with self._disk:
            if self.degraded is not None:
                self._recover()

    def check_file(self) -> None:
        """To be called each second: write the state file anew where it was deleted or replaced. Usually a `stat`."""
        if self.degraded is None and self._main.replaced:
            with self._disk:
                self._attempt(self._write_staged)

    def look_after(self) -> None:
        """To be called each few seconds: the same, where nobody else did, and give unused space back."""
        if not self._disk.acquire(blocking=False):  # somebody writes: that looks after it as well
            return
        try:
            if self.degraded is None and self._main.replaced:
                self._attempt(self._write_staged)
            elif self.degraded is None:
                with suppress(sqlite3.Error):  # if it is more than another's transaction, the next write fails too
                    self._main.give_space_back()
        finally:
            self._disk.release()

    def confirm_time(self, wall: float) -> None:
        """Go on from the time that IMDS says, in Unix seconds, instead of what passed since the last commit."""
        self._confirmed = ConfirmedTime(wall, uptime(), boot_id())

    def history(self, since: float | None, limit: int, max_bytes: int = ANSWER_BYTES) -> History:
        """The newest records since a Unix time: at most ``limit``, and so many bytes."""
        records = [one.record for one in self._unwritten if since is None or one.change.time.timestamp() >= since]
        for path in (self.spare_path, self.path) if self.degraded is not None else (self.path,):
            with suppress(sqlite3.Error):  # unreadable: the others are all there is
                found = read_history(path, since, limit, max_bytes, records)
                if found.cut:
                    return found
                records = found.records
        return newest(reversed(records), limit, max_bytes)

    def close(self) -> None:
        """Close the files, and leave the directory to others."""
        with self._disk:
            self._main.close()
            if self._spare is not None:
                self._spare.close()
            self._lock.release()

    # ---- the state file, and the spare one

    def _begin(self) -> None:
        """Open the state file and load what was written last, to it or to a spare file that was left behind."""
        loaded = Loaded()
        try:
            self._open_main()
            loaded = self._load()
        except _TROUBLE as error:
            if not (_is_damage(error) and self._set_aside(error)):
                self._say_degraded(error)
            with suppress(*_TROUBLE):
                loaded = self._load()
        self._state, self._confirmed = loaded.state, loaded.confirmed
        self.unreadable_rows = loaded.unreadable
        if loaded.unreadable:
            log.error("%d rows of the state cannot be read: they are in its table unreadable_rows", loaded.unreadable)
        if self.degraded is not None:
            self._use_spare()
        elif self._spare is not None:
            self._recover()

    def _open_main(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_directory(self.path.parent)
        self._lock.acquire()
        self._main.open()

    def _load(self) -> Loaded:
        if self._spare_left_behind():
            self._spare = StateFile(self.spare_path)
            try:
                self._spare.open()
                return self._spare.load()
            except (*_TROUBLE, StoreError) as error:
                self._discard_spare(error)
        if self._main.is_open:
            return self._main.load()
        with closing(StateFile(self.path)) as main, suppress(StoreError):
            main.open_for_reading()
            return main.load()
        return Loaded()

    def _spare_left_behind(self) -> bool:
        """Whether an agent ended while it used a spare file, and not while it removed one that it had merged."""
        if not self.spare_path.exists():
            return False
        if self._main.is_open and spare.is_merged(self.spare_path, self._main):
            spare.remove(self.spare_path)
            return False
        return True

    def _attempt(self, action: Action) -> None:
        """Do it with the state file; where that fails, with the spare one; else it is kept in memory."""
        if self.degraded is None:
            try:
                self._with_main(action)
            except (*_TROUBLE, StoreError) as error:
                self._say_degraded(error)
            else:
                return
        if self._spare is None or self._spare.replaced:
            self._use_spare()
        if self._spare is not None:
            try:
                action(self._spare)
            except _TROUBLE as error:
                self._say_spare_failed(error)

    def _with_main(self, action: Action) -> None:
        try:
            if self._main.replaced:
                self._follow()
            action(self._main)
        except _TROUBLE as error:
            if not (_is_damage(error) and self._set_aside(error)):
                raise
            self._write_staged(self._main)
            action(self._main)

    def _write_staged(self, file: StateFile) -> None:
        state, changes, revision = self._staged()
        if revision != self._written_revision:
            file.write(state, changes, self._moment())
            self._mark_written(changes, revision)

    def _staged(self) -> tuple[StoredState, tuple[StoredChange, ...], int]:
        with self._memory:
            return self._state, self._unwritten, self._revision

    def _mark_written(self, changes: Sequence[StoredChange], revision: int) -> None:
        self._written_revision = revision
        written = set(map(id, changes))
        with self._memory:  # what was staged meanwhile stays
            self._unwritten = tuple(one for one in self._unwritten if id(one) not in written)

    def _moment(self) -> Moment:
        now = time.time()
        confirmed = self._confirmed or ConfirmedTime(now, uptime(), boot_id())
        self._confirmed = confirmed.later(uptime(), boot_id())
        return Moment(now, self._confirmed)

    # ---- trouble

    def _say_degraded(self, error: Exception) -> None:
        if self.degraded is None:
            log.error("the state file %s cannot be written (%s): trying again", self.path, error)
        self.degraded = str(error) or type(error).__name__

    def _use_spare(self) -> None:
        state, changes, revision = self._staged()
        try:
            if self.spare_path.exists():
                file = StateFile(self.spare_path)
                file.open()
                file.write(state, changes, self._moment())
            else:
                moment = self._moment()
                file = spare.make(self.spare_path, self.path, lambda new: new.write(state, changes, moment))
        except (*_TROUBLE, StoreError) as error:
            self._say_spare_failed(error)
            return
        self._spare, self._spare_failed = file, False
        self._mark_written(changes, revision)
        log.error("until then deliveries go on from %s, which is lost when this machine stops", self.spare_path)

    def _say_spare_failed(self, error: Exception) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        if not self._spare_failed:
            log.error("nor can the spare state file %s be written (%s): deliveries wait", self.spare_path, error)
        self._spare_failed = True

    def _discard_spare(self, error: Exception) -> None:
        log.error("the spare state file %s cannot be used, it is removed: %s", self.spare_path, error)
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        spare.remove(self.spare_path)

    def _recover(self) -> None:
        """Merge the spare file into the state file, and write to that one again; if this fails, nothing changes."""
        try:
            if self._main.replaced:
                self._follow()
            elif not self._main.is_open:
                self._open_main()
            state, changes, revision = self._staged()
            if self._spare is None and self.spare_path.exists():  # one that could not be written
                self._reopen_spare()
            if self._spare is not None:
                spare.merge(self._spare, self._main, state, changes, self._moment())
                self._spare = None
            else:
                self._main.write(state, changes, self._moment())
        except (*_TROUBLE, StoreError) as error:
            if isinstance(error, sqlite3.Error) and not _is_passing(error):
                self._main.close()
            self._say_degraded(error)
            return
        self._mark_written(changes, revision)
        self.degraded, self._spare_failed = None, False
        log.info("the state is written again: %s", self.path)

    def _reopen_spare(self) -> None:
        self._spare = StateFile(self.spare_path)
        try:
            self._spare.open()
        except (*_TROUBLE, StoreError) as error:
            self._discard_spare(error)

    def _follow(self) -> None:
        """The state file was deleted or replaced: write into the one that is there now all that is known.

        The open connection still reads the old file, so its outbox and history are not lost either.
        """
        log.error("the state file %s was deleted or replaced: all that is known is written to it anew", self.path)
        self._main.remove_log()
        state, changes, revision = self._staged()
        with closing(self._successor()) as new:
            with transaction(self._main.db) as old, transaction(new.db) as db:
                copy_readable(old, db)
            new.write(state, changes, self._moment())
        self._main.close()
        if new.path != self.path:
            new.path.replace(self.path)
        self._lock.renew()
        self._main.open()
        self._mark_written(changes, revision)

    def _successor(self) -> StateFile:
        """Open the file that is in the place of one that is gone; where there is none, one to be put there."""
        if self.path.exists():
            found = StateFile(self.path, self._main.history_bytes)
            try:
                found.open()
            except sqlite3.Error as error:
                found.close()
                if not _is_damage(error):
                    raise
                self._rename_damaged(error)
            else:
                return found
        made = StateFile(self.path.with_name(FILE_NAME + ".new"), self._main.history_bytes)
        made.path.unlink(missing_ok=True)
        made.open()
        return made

    def _rename_damaged(self, error: Exception) -> Path:
        name = f"{FILE_NAME}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        aside = self.path.with_name(name)
        for suffix in ("", "-wal", "-shm"):
            part = self.path.with_name(FILE_NAME + suffix)
            if part.exists():
                part.replace(self.path.with_name(name + suffix))
        self.damaged_files += 1
        log.error("the state file was damaged (%s): it is kept as %s, and a new one is used", error, aside)
        return aside

    def _set_aside(self, error: Exception) -> bool:
        """Rename a damaged file and open a new one with what can be read of it; returns whether that was possible."""
        self._main.close()
        try:
            aside = self._rename_damaged(error)
            self._main.open()
            with closing(sqlite3.connect(aside)) as old, transaction(self._main.db) as db:
                saved = copy_readable(old, db)
        except _TROUBLE:
            return False
        self._written_revision = -1  # nothing of what is known is in the new file
        log.error("%d deliveries were copied from the damaged file; others that it held are only there", saved)
        return True


def _is_damage(error: Exception) -> bool:
    return _primary_code(error) in DAMAGED


def _is_passing(error: Exception) -> bool:
    """The connection can be used again: somebody else writes, or there is no room."""
    return _primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)


def _primary_code(error: Exception) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0)  # errors of the sqlite3 module itself carry none
    return code & 0xFF
