"""``Store``: the one owner of all that the agent remembers, with its outbox.

Memory is the truth, and one file follows it.

A step is applied to memory at once. Later the one thread that uses the disk writes it in one
transaction. No other thread waits for that. If the disk is sick (full, hanging, read-only), or the
file was deleted or replaced, deliveries leave from memory after ``core.outbox.DISK_PATIENCE``, and
``disk.degraded`` names the cause. If the agent is killed meanwhile, the steps that are only in
memory are lost.
"""

import logging
import random
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from notbefore.core.outbox import Outbox
from notbefore.errors import StoreError
from notbefore.store.disk import DiskThread, Unwritten
from notbefore.store.file import FILE_NAME, Content, FileClock, StoredChange, StoredState
from notbefore.store.stored_outbox import StoreClock, StoredOutbox, log_left_open, log_overflow

READ_PATIENCE: Final = 5.0  # seconds to read the history
# seconds for what must be on disk: an approval, an orderly end, a command's change
WRITE_PATIENCE: Final = 10.0
ANSWER_BYTES: Final = 4 * 1024 * 1024  # of records in one answer; the file holds more
# records that wait for the disk; older ones are dropped, and the log says how many
MAX_RECORDS: Final = 1_000

log = logging.getLogger("notbefore.store")


class HistoryRecords(Struct, frozen=True):
    """The newest records as JSON, oldest first."""

    records: Sequence[bytes]
    was_cut: bool = False  # older ones were left out, because one answer cannot hold them
    problem: str = ""  # why the file could not be read: then only records in memory are here


def _notify_no_one() -> None:
    """Do nothing: there is no courier."""


class Store(StoredOutbox):
    """Safe to call from several threads. ``to_deliver``: see ``StoredOutbox``.

    ``to_deliver`` is also called with the lock held.

    Raises ``StoreError`` if the directory cannot be used (``OwnerLock.hold``), or if a newer
    version wrote the file. After any other failure it works from memory; with ``must_read``, such a
    failure raises ``StoreError`` too, and the file stays as it is. Its methods do not raise.
    """

    def __init__(
        self,
        directory: Path,
        clock: StoreClock,
        to_deliver: Callable[[], None] = _notify_no_one,
        *,
        must_read: bool = False,
    ) -> None:
        super().__init__(Outbox(random.random), clock, to_deliver)
        self.path = directory / FILE_NAME
        self.state = StoredState()
        self._unwritten_changes: list[StoredChange] = []  # not in the file's history yet
        self._epoch: float | None = None  # the boot, in Unix seconds by IMDS's clock, if known
        self.disk = DiskThread(directory, self, self._memory_lock)
        self._restore(self.disk.load(must_read=must_read))

    def _restore(self, content: Content) -> None:
        """Begin with the content of the file."""
        with self._memory_lock:
            self.state = content.state
            now = self._clock.boot_time()
            written_at = content.clock
            # a clock that has gone back belongs to another boot, even with the same id: a
            # checkpoint of the VM was restored
            is_same_boot = written_at.boot == self._clock.boot_id and now >= written_at.clock
            passed = 0.0
            if is_same_boot:
                passed = now - written_at.clock
            if written_at.date is not None:
                self._epoch = written_at.date + passed - now

            time_known = is_same_boot or not content.outbox.rows
            self._outbox.restore(content.outbox, now, passed, time_known=time_known)
            removed = self._outbox.make_room(now)
            self._save_changes()
        log_overflow(removed)

    # ---- the state

    def commit(self, state: StoredState, changes: Sequence[StoredChange] = ()) -> None:
        """Remember a state, the changes that led to it, and their deliveries."""
        now = self._clock.boot_time()
        wall = self._clock.time()
        left_open: list[tuple[str, str]] = []  # sinks that are not configured, with an EventId
        with self._memory_lock:
            has_new_state = state is not self.state
            self.state = state
            for stored in changes:
                sinks = self._outbox.take(stored.change, stored.deliveries, now, wall, stored.last)
                left_open += [(sink, stored.change.event.event_id) for sink in sinks]
            removed = self._outbox.make_room(now)

            self._unwritten_changes += changes
            too_many = max(0, len(self._unwritten_changes) - MAX_RECORDS)
            del self._unwritten_changes[:too_many]
            self._save_changes(has_new_state=has_new_state)

        log_overflow(removed)
        if too_many:
            log.warning(
                "%d records are missing in the history: too many wait for the disk", too_many
            )
        log_left_open(left_open)
        if any(stored.deliveries or stored.last is not None for stored in changes):
            self._to_deliver()

    def know_time(self, date: float | None) -> None:
        """Note that IMDS answered at ``date`` by its clock, in Unix seconds.

        ``None``: its answer has no date.
        """
        with self._memory_lock:
            epoch = None
            if date is not None:
                epoch = date - self._clock.boot_time()
            if self._outbox.rows.time_known:
                if epoch is not None:
                    self._epoch = epoch
                return

            # after a reboot: the stored epoch lacks the time between the two boots
            unseen_seconds = 0.0
            if epoch is not None and self._epoch is not None:
                unseen_seconds = max(0.0, epoch - self._epoch)
            self._epoch = epoch
            self._outbox.advance(unseen_seconds)
            self._save_changes()

    # ---- readers

    def history(
        self, since: float | None, limit: int, max_bytes: int = ANSWER_BYTES
    ) -> HistoryRecords:
        """Return the newest records since a Unix time, at most ``limit``.

        At most ``max_bytes`` of them come from the file.
        """
        start = since or 0.0
        newest_first: dict[bytes, None] = {}  # a set in order: the file may have some of them too
        with self._memory_lock:
            for stored in reversed(self._unwritten_changes):
                if stored.change.time.timestamp() >= start:
                    newest_first[stored.record] = None

        def read_file() -> tuple[list[bytes], bool]:
            return self.disk.file.history(start, limit, max_bytes)

        was_cut = False
        problem = ""
        try:
            in_file, was_cut = self.disk.do(read_file, READ_PATIENCE)
        except (sqlite3.Error, OSError, StoreError) as error:
            problem = str(error)
        else:
            newest_first |= dict.fromkeys(in_file)

        records = list(newest_first)[:limit]
        records.reverse()
        return HistoryRecords(records, was_cut=was_cut, problem=problem)

    def close(self) -> None:
        """Write all of memory, and release the directory; does not wait for a sick disk."""
        self.disk.close()

    # ---- for the disk thread; all with the lock held

    def _save_changes(self, *, has_new_state: bool = False) -> None:
        if has_new_state or self._unwritten_changes or self._outbox.rows.changed:
            self.disk.request_write()

    def collect_unwritten(self) -> Unwritten:
        """Return what is to be written."""
        now = self._clock.boot_time()
        date = None
        if self._epoch is not None:
            date = self._epoch + now
        boot_id = ""
        if self._outbox.rows.time_known:
            boot_id = self._clock.boot_id

        clock = FileClock(boot_id, now, date)
        content = Content(self.state, self._outbox.rows.take(now), clock)
        return Unwritten(content, list(self._unwritten_changes))

    def note_written(self, changes: Sequence[StoredChange]) -> None:
        """Note that what was collected last is on disk; ``changes``: its changes."""
        has_waited = self._outbox.rows.written()
        if has_waited:
            self._to_deliver()
        written = {id(stored) for stored in changes}
        self._unwritten_changes = [
            stored for stored in self._unwritten_changes if id(stored) not in written
        ]
