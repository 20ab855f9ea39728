"""``Store``: the agent's memory on disk. A change, what is tracked after it and its deliveries go in one transaction.

While the state file cannot be written, a spare one in memory takes its place (``spare``), and deliveries go on. What it
has taken in is written to the state file when that is possible again. A damaged file is kept under another name; what
can be read of it, and what the agent knows, are written into a new one. The state file is used in a thread of its own:
where its disk hangs, nobody waits for it for longer than a deadline.
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final

from notbefore.core.delivery import Delivery, SinkThread
from notbefore.errors import StoreError
from notbefore.store import history, outbox_intake, spare
from notbefore.store.agent_outbox import OutboxInMemory, answer
from notbefore.store.confirmed_time import ConfirmedTime, boot_id, uptime
from notbefore.store.connection import open_database
from notbefore.store.copying import copy_readable
from notbefore.store.damage import is_damage, is_passing, kept_aside
from notbefore.store.disk import PATIENCE, DiskHangsError, DiskThread
from notbefore.store.history import ANSWER_BYTES, HistoryAnswer, history_in, newest, read_history
from notbefore.store.lock import DirectoryLock
from notbefore.store.outbox_reader import OutboxRead, OutboxReader, read_outbox
from notbefore.store.private import check_directory
from notbefore.store.schema import transaction
from notbefore.store.state_file import FILE_NAME, MEMORY, Loaded, Moment, StateFile, StoredChange, StoredState

log = logging.getLogger("notbefore.store")

Action = Callable[[StateFile], object]
RECENT: Final = 10.0  # seconds: what was written in them is remembered, for where the file cannot be read any more
OPEN_PATIENCE: Final = 3.0  # seconds to open the state file at the start: all of it is read
READ_PATIENCE: Final = 12.0  # seconds to read there what was written last: without it, all of it would be news
ANSWER_PATIENCE: Final = 5.0  # seconds to read the history
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
        self._memory = threading.Lock()  # of the next four; never held over the disk
        self._state = StoredState()  # the newest
        self._unwritten: tuple[StoredChange, ...] = ()  # in order
        self._written: tuple[StoredChange, ...] = ()  # those of the last seconds
        self._revision = 0  # how often something was staged
        self._turn = threading.RLock()  # of the rest: a file is used by one thread at a time
        self.disk = DiskThread()  # uses the state file
        self._history_disk = DiskThread(ANSWER_PATIENCE)  # reads it for those who ask for the history
        self._main = StateFile(self.path, history_bytes)
        self._doubtful = False  # it is not known what is in it: the disk did not answer
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
        with self._turn:
            if self._written_revision < revision:
                self._attempt(self._write_staged)
            return self.degraded is None

    def commit(self, state: StoredState, changes: Sequence[StoredChange]) -> bool:
        """``stage`` and ``write``."""
        self.stage(state, changes)
        return self.write()

    def note_running(self, state: StoredState, *, durable: bool = True) -> None:
        """Stage a state of which only the times are new, and write these: see ``StateFile.write_times``."""
        self.stage(state)
        self._attempt_if_free(lambda file: self._write_times(file, durable=durable))

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Add deliveries that no change causes; they are lost while neither file can be written."""

        def add(db: sqlite3.Connection) -> None:
            outbox_intake.put(db, deliveries)
            outbox_intake.expire(db, self._moment().surely)

        self._change_outbox(add)

    def put_threads(self, threads: Sequence[SinkThread]) -> None:
        """Go on with events that another instance has notified of."""
        self._change_outbox(lambda db: outbox_intake.put_threads(db, threads))

    def no_longer_affected(self, event_keys: Sequence[str]) -> None:
        """Withdraw the reminders of these events, and end their repetitions: they are other VMs'."""
        if event_keys:
            self._change_outbox(lambda db: outbox_intake.no_longer_affected(db, *event_keys))

    def confirm(self, ids: Collection[str]) -> None:
        """Another place has written down that these deliveries were accepted: their sinks may be given more."""
        self._change_outbox(lambda db: outbox_intake.confirm(db, ids))

    def leave_deliveries(self, ids: Collection[str] | None) -> None:
        """Delete what is to be sent: it is another's; ``None``: all changes. What is on its way is not retried."""
        self._change_outbox(lambda db: outbox_intake.leave(db, ids))

    def _change_outbox(self, change: Callable[[sqlite3.Connection], None]) -> None:
        with self._turn:
            self._attempt(lambda file: file.change_outbox(change))

    def retry(self) -> None:
        """While degraded: try to write to the state file all that it lacks."""
        with self._turn:
            if self.degraded is not None:
                self._recover()

    def look_after(self, *, writes: bool = False) -> None:
        """To be called each few seconds: write a new file for one that was deleted or replaced; give unused space back.

        ``writes``: see as well whether it can be written, and the disk answers: the courier says that it cannot.
        """
        if self.degraded is None:
            self._attempt_if_free(self._write_times if writes else _give_space_back)

    def confirm_time(self, wall: float) -> None:
        """Go on from the time that IMDS says, in Unix seconds, instead of what passed since the last commit."""
        self._confirmed = ConfirmedTime(wall, uptime(), boot_id())

    def history(self, since: float | None, limit: int, max_bytes: int = ANSWER_BYTES) -> HistoryAnswer:
        """The newest records since a Unix time: at most ``limit``, and at most ``max_bytes`` in all."""
        records = [one.record for one in self._unwritten if since is None or one.change.time.timestamp() >= since]
        with self._turn:
            if self.in_memory and self._spare is not None:
                found = history_in(self._spare.db, since, limit, max_bytes, records)
                if found.cut:
                    return found
                records = found.records
        for path in (self.spare_path, self.path) if self.degraded is not None else (self.path,):
            with suppress(*_TROUBLE):  # unreadable: the others are all there is
                found = self._history_disk.do(partial(read_history, path, since, limit, max_bytes, records))
                if found.cut:
                    return found
                records = found.records
        return newest(reversed(records), limit, max_bytes)

    @property
    def in_memory(self) -> bool:
        """The outbox is in no file: the courier is to ask for it (``serve``)."""
        return self._spare is not None and self._spare.path == MEMORY

    def unconfirmed(self) -> set[str]:
        """The deliveries that were accepted and wait for ``confirm``, in what is used instead of the state file."""
        with self._turn:
            rows = self._spare.db.execute("SELECT delivery_id FROM unconfirmed") if self._spare is not None else ()
            return {one for (one,) in rows}

    def serve(self, request: bytes) -> bytes:
        """Answer a courier that asks for the outbox in this process; raises ``sqlite3.Error``."""
        with self._turn:
            in_memory = self._spare if self.in_memory else None
            return answer(OutboxInMemory(in_memory.db) if in_memory is not None else None, request)

    def reader(self) -> OutboxReader:
        """What shows the outbox, wherever it is."""
        return OutboxReader(self.path, self.disk, self.spare_path, self._read_in_memory)

    def _read_in_memory(self) -> OutboxRead | None:
        if not self.in_memory:
            return None
        with self._turn:
            return read_outbox(self._spare.db, time.time()) if self._spare is not None else None

    @property
    def hangs(self) -> bool:
        """A thread waits for the disk, and may do so for ever."""
        return self.disk.hangs or self._history_disk.hangs

    def close(self) -> None:
        """Close the files, and leave the directory to others."""
        with self._turn:
            with suppress(DiskHangsError):
                self.disk.do(self._main.close)
            for thread in (self.disk, self._history_disk):
                thread.end()
            if self._spare is not None:
                self._spare.close()
            self._lock.release()

    # ---- the state file, and the spare one

    def _begin(self) -> None:
        """Open the state file and load what was written last, to it or to a spare file that was left behind."""
        try:
            self.disk.do(self._open_main, OPEN_PATIENCE)
        except _TROUBLE as error:
            self._say_degraded(error)
        loaded = self._load_spare() or Loaded()
        if self._spare is None:
            try:
                loaded = self._load_main()
            except _TROUBLE as error:
                self._say_degraded(error)
        self._state, self._confirmed = loaded.state, loaded.confirmed
        self.unreadable_rows = loaded.unreadable
        if loaded.unreadable:
            log.error("%d rows of the state cannot be read: they are in its table unreadable_rows", loaded.unreadable)
        if self.degraded is not None:
            self._use_spare()
        elif self._spare is not None:
            self._recover()

    def _open_main(self) -> None:
        if not self.path.parent.is_dir():  # on a disk that hangs, `mkdir` would wait even then: the lock comes first
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_directory(self.path.parent)
        self._lock.acquire()
        try:
            self._main.open()
        except _TROUBLE as error:
            if not self._set_aside(error):
                raise

    def _load_main(self) -> Loaded:
        if self.degraded is None:
            return self.disk.do(self._load_open, READ_PATIENCE)
        return self._history_disk.do(self._load_for_reading, READ_PATIENCE)  # the other thread may hang

    def _load_open(self) -> Loaded:
        try:
            return self._main.load()
        except sqlite3.Error as error:
            if not self._set_aside(error):
                raise
            return self._main.load()

    def _load_for_reading(self) -> Loaded:
        with closing(StateFile(self.path)) as main, suppress(StoreError):
            main.open_for_reading()
            return main.load()
        return Loaded()

    def _load_spare(self) -> Loaded | None:
        """What an agent left in a spare file that it used when it ended; nothing where it had just merged it."""
        if not spare.is_there(self.spare_path):
            if self.degraded is None:  # so nobody else uses this directory: one that was killed may have left a part
                spare.remove(self.spare_path)
            return None
        merged = ""
        if self.degraded is None:
            with suppress(*_TROUBLE):
                merged = self.disk.do(self._main.merged_spare)
        if merged and spare.is_merged(self.spare_path, merged):
            spare.remove(self.spare_path)
            return None
        self._reopen_spare()
        try:
            return self._spare.load() if self._spare is not None else None
        except (*_TROUBLE, StoreError) as error:
            self._discard_spare(error)
            return None

    def _attempt(self, action: Action) -> None:
        """Do it with the state file; where that fails, with the spare one; else it is kept in memory."""
        if self.degraded is None:
            try:
                self.disk.do(lambda: self._with_main(action))
            except (*_TROUBLE, StoreError) as error:
                self._doubtful = isinstance(error, DiskHangsError)
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
                if self._spare is not None:  # in memory
                    with suppress(*_TROUBLE):
                        action(self._spare)

    def _attempt_if_free(self, action: Action) -> None:
        """The same; nothing while another thread writes: that may wait for a disk that hangs, and finds it out."""
        if self._turn.acquire(blocking=False):
            try:
                self._attempt(action)
            finally:
                self._turn.release()

    def _with_main(self, action: Action) -> None:
        try:
            if self._main.replaced:
                self._follow()
            action(self._main)
        except _TROUBLE as error:
            if not self._set_aside(error):
                raise
            self._write_staged(self._main)
            action(self._main)

    def _write_staged(self, file: StateFile) -> None:
        state, changes, revision = self._staged()
        if revision != self._written_revision:
            file.write(state, changes, self._moment())
            self._mark_written(changes, revision)

    def _write_times(self, file: StateFile, *, durable: bool = True) -> None:
        file.write_times(self._state, self._moment(), durable=durable)

    def _staged(self) -> tuple[StoredState, tuple[StoredChange, ...], int]:
        with self._memory:
            return self._state, self._unwritten, self._revision

    def _mark_written(self, changes: Sequence[StoredChange], revision: int) -> None:
        self._written_revision = revision
        written = set(map(id, changes))
        since = time.time() - RECENT
        with self._memory:  # what was staged meanwhile stays
            self._unwritten = tuple(one for one in self._unwritten if id(one) not in written)
            self._written = (*(one for one in self._written if one.change.time.timestamp() > since), *changes)

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

    def _use_spare(self, *, in_memory: bool = False) -> None:
        state, changes, revision = self._staged()
        path = MEMORY if in_memory else self.spare_path
        self._close_spare()
        try:
            if path != MEMORY and spare.is_there(path):
                file = StateFile(path)
                file.open()
                file.write(state, changes, self._moment())
            else:
                moment = self._moment()

                def add(new: StateFile, copied: bool) -> None:  # noqa: FBT001 - as `make` calls it
                    # what cannot be read there may not be delivered yet: rather twice, under the same id
                    if not copied:
                        new.write(state, self._written, moment)
                        new.db.execute("DELETE FROM delivery_counts")  # the state file has counted it
                    new.write(state, changes, moment)

                patience = spare.HANGING_PATIENCE if self.disk.hangs else PATIENCE
                failed = self.spare_path if in_memory and spare.is_there(self.spare_path) else None
                file = spare.make(path, self.path, add, patience, failed)
        except (*_TROUBLE, StoreError) as error:
            if not in_memory:
                self._say_spare_failed(error)
            return
        self._spare = file
        self._mark_written(changes, revision)
        where, until = (self.spare_path, "this machine") if path != MEMORY else ("the memory of this process", "it")
        log.error("until then deliveries go on from %s; what is not delivered is lost when %s stops", where, until)

    def _say_spare_failed(self, error: Exception) -> None:
        self._close_spare()
        if not self._spare_failed:
            log.error("nor can the spare state file %s be written: %s", self.spare_path, error)
        self._spare_failed = True
        if hasattr(os, "posix_spawn"):  # else no courier could ask for it
            self._use_spare(in_memory=True)

    def _discard_spare(self, error: Exception) -> None:
        log.error("the spare state file %s cannot be used, it is removed: %s", self.spare_path, error)
        self._close_spare()
        spare.remove(self.spare_path)

    def _close_spare(self) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _recover(self) -> None:
        """Merge the spare file into the state file, and write to that one again; if this fails, nothing changes."""
        try:
            self.disk.do(self._reopen_main)
            state, changes, revision = self._staged()
            if self._spare is None and spare.is_there(self.spare_path):  # one that could not be written
                self._reopen_spare()
            moment = self._moment()
            try:
                if self.in_memory and spare.is_there(self.spare_path):
                    self._merge_failed_spare()
                if self._spare is not None:
                    self._merge(self._spare, state, changes, moment)
                else:
                    self.disk.do(lambda: self._main.write(state, changes, moment))
            except DiskHangsError:
                self._doubtful = True
                raise
        except (*_TROUBLE, StoreError) as error:
            if isinstance(error, sqlite3.Error) and not is_passing(error):
                self._doubtful = True
            self._say_degraded(error)
            return
        self._mark_written(changes, revision)
        self.degraded, self._spare_failed = None, False
        log.info("the state is written again: %s", self.path)

    def _merge(self, file: StateFile, state: StoredState, changes: Sequence[StoredChange], moment: Moment) -> None:
        spare.merge(file, self._main, lambda db: self._main.write_within(db, state, changes, moment), self.disk.do)
        self._spare = None
        self._main.written(state)

    def _merge_failed_spare(self) -> None:
        """Merge the file that memory has replaced, before what is in memory, which knows what became of its rows."""
        memory = self._spare
        try:
            self._reopen_spare()
            failed = self._spare
        finally:
            self._spare = memory
        if failed is not None:
            with closing(failed):
                spare.merge(failed, self._main, lambda _: None, self.disk.do)

    def _reopen_main(self) -> None:
        if self._doubtful:
            self._main.close()
            self._doubtful = False
        if self._main.replaced:
            self._follow()
        elif not self._main.is_open:
            self._open_main()

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
        log.error(
            "the state file %s was deleted or replaced: everything that the agent knows is written to a new one",
            self.path,
        )
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
                if not is_damage(error):
                    raise
                self._rename_damaged(error)
            else:
                return found
        made = StateFile(self.path.with_name(FILE_NAME + ".new"), self._main.history_bytes)
        made.path.unlink(missing_ok=True)
        made.open()
        return made

    def _rename_damaged(self, error: Exception) -> Path:
        aside = kept_aside(self.path)
        self.damaged_files += 1
        log.error("the state file was damaged (%s): it is kept as %s, and a new one is used", error, aside)
        return aside

    def _set_aside(self, error: Exception) -> bool:
        """Rename a file that is damaged, and open a new one with what can be read; returns whether that was done."""
        if not is_damage(error):
            return False
        self._main.close()
        try:
            aside = self._rename_damaged(error)
            self._main.open()
            with closing(open_database(aside)) as old, transaction(self._main.db) as db:
                saved = copy_readable(old, db)
        except _TROUBLE:
            return False
        self._written_revision = -1  # nothing of what is known is in the new file
        log.error("%d deliveries were copied from the damaged file; others that it held are only there", saved)
        return True


def _give_space_back(file: StateFile) -> None:
    with suppress(sqlite3.Error):  # if it is more than another's transaction, the next write fails too
        file.give_space_back()
