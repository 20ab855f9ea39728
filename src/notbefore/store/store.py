"""``Store``: the one owner of what the agent remembers, its outbox included. Memory is the truth, one file follows.

A step is applied to memory at once, and is *behind* until one transaction has written it, in the one thread that uses
the disk. Nobody else waits for the disk. Where it is sick (full, hanging, read-only; its file deleted or replaced),
deliveries go from memory after ``core.outbox.WRITE_PATIENCE``, and ``disk.degraded`` says why. An agent that is killed
meanwhile forgets what only memory knew.
"""

import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from notbefore.core.delivery import Delivery, Targets, Terms
from notbefore.core.outbox import Outbox, SendResult
from notbefore.errors import StoreError
from notbefore.metrics.totals import OutboxView, view_of
from notbefore.store.disk import DiskThread
from notbefore.store.file import FILE_NAME, FileClock, StoredChange, StoredState, Writing

ANSWER_PATIENCE: Final = 5.0  # seconds to read the history
ANSWER_BYTES: Final = 4 * 1024 * 1024  # of records in one answer; the file holds more
MAX_RECORDS: Final = 1_000  # that wait for the disk; older ones are dropped, and counted

log = logging.getLogger("notbefore.store")


class StoreClock(Protocol):
    """The clocks of this machine (``process.clock.Clock``)."""

    boot_id: str  # tells this boot of the machine from another

    def time(self) -> float:
        """The wall clock, in Unix seconds."""
        ...

    def boot_time(self) -> float:
        """Seconds since the boot, by a clock that nobody sets."""
        ...


class StoredOutbox:
    """Safe to call from several threads. ``memory``: the lock of all that is remembered.

    With it held, ``stepped`` is called after each change. ``to_deliver`` is called when a courier may find something;
    it may not wait.
    """

    def __init__(
        self,
        outbox: Outbox,
        memory: threading.Condition,
        clock: StoreClock,
        stepped: Callable[[], object],
        to_deliver: Callable[[], None],
    ) -> None:
        self._outbox = outbox
        self._memory = memory
        self._clock = clock
        self._stepped = stepped
        self._to_deliver = to_deliver

    @contextmanager
    def opened(self, *, by_courier: bool = False) -> Iterator[tuple[Outbox, float]]:
        """The outbox, and the time on its clock, for whoever does not wait meanwhile."""
        with self._memory:
            yield self._outbox, self._clock.boot_time()
            changed = bool(self._outbox.rows.changed)
            self._stepped()
        if changed and not by_courier:
            self._to_deliver()

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Add deliveries that no change causes."""
        with self.opened() as (outbox, now):
            outbox.put(deliveries, now, self._clock.time())

    def view(self) -> OutboxView:
        """The numbers of the outbox now."""
        with self._memory:
            return view_of(self._outbox, self._clock.boot_time(), self._clock.time())

    # ---- the courier: see ``courier.supervisor``

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int]) -> Sequence[Delivery]:
        """Take in results, and give what is due; ``room``: how many deliveries a sink can take."""
        with self.opened(by_courier=True) as (outbox, now):
            return outbox.exchange(list(results), room, now)

    def courier_ended(self) -> None:
        """What the courier had is due again; what may run once is dead."""
        with self.opened(by_courier=True) as (outbox, now):
            for row in outbox.release(now):
                log.error("sink %s: `%s` of event %s: %s", row.sink, row.kind, row.event_key, row.error)
            _log_redirected(outbox.redirect(now))

    def next_due(self) -> float | None:
        """Seconds until a courier is needed, 0 or less: now; ``None``: nothing waits."""
        with self._memory:
            due = self._outbox.rows.next_due()
            return None if due is None else due - self._clock.boot_time()

    def use_sinks(self, terms: Mapping[str, Terms], targets: Callable[[Delivery], Targets]) -> None:
        """From now on these are configured; ``targets``: where a delivery to another sink would go by the routes."""
        with self.opened(by_courier=True) as (outbox, now):
            _log_redirected(outbox.use_sinks(terms, targets, now))


def _log_redirected(left: Iterable[Delivery]) -> None:
    for sink, count in Counter(row.sink for row in left).items():
        log.warning(
            "sink %s is not configured any more: %d deliveries that wait for it go where the routes lead now, and"
            " are dead where no route names another sink (`notbefore outbox list`)", sink, count,
        )  # fmt: skip


class Store:
    """Safe to call from several threads. ``to_deliver``: see ``StoredOutbox``; it is also called with the lock held.

    Raises ``StoreError`` when another agent holds the directory, or a newer version made the file; any other trouble is
    survived in memory, and none of its methods raises.
    """

    def __init__(self, directory: Path, clock: StoreClock, to_deliver: Callable[[], None] = lambda: None) -> None:
        self.path = directory / FILE_NAME
        self._clock = clock
        self._to_deliver = to_deliver
        self._memory = threading.Condition()  # of all below; never held over the disk
        self._state = StoredState()
        self._outbox = Outbox(lambda: os.urandom(1)[0] / 255)  # `random` costs 0.2 MiB
        self._records: list[StoredChange] = []  # that the history in the file does not hold yet, oldest first
        self._date: tuple[float, float] | None = None  # Unix seconds by IMDS, at a moment since the boot; see ``_boot``
        self._boot = clock.boot_id  # of the machine, up to which the time is known that has passed
        self.outbox = StoredOutbox(self._outbox, self._memory, clock, self._stepped, to_deliver)
        self.disk = DiskThread(directory, self._memory, self._behind, self._written)
        self._begin()

    def _begin(self) -> None:
        loaded = self.disk.load()
        if loaded is None:
            return
        with self._memory:
            self._state = loaded.state
            self._boot = loaded.clock.boot or self._clock.boot_id
            now, same_boot = self._clock.boot_time(), self._boot == self._clock.boot_id
            passed = now - loaded.clock.clock if loaded.clock.boot and same_boot else 0.0
            self._date = (loaded.clock.date + passed, now) if loaded.clock.date is not None else None
            self._outbox.restore(loaded.outbox, now, passed, time_known=same_boot)
            self._stepped()

    # ---- the state

    def load(self) -> StoredState:
        """What is remembered: at the start, what the last agent wrote."""
        return self._state

    def commit(self, state: StoredState, changes: Sequence[StoredChange] = ()) -> int:
        """Remember a state, and the changes that led to it with their deliveries; returns the number of this step."""
        now, wall = self._clock.boot_time(), self._clock.time()
        with self._memory:
            news, self._state = state is not self._state, state
            for one in changes:
                self._outbox.take(one.change, one.deliveries, now, wall)
            self._records += changes
            too_many = max(0, len(self._records) - MAX_RECORDS)
            del self._records[:too_many]
            step = self._stepped(news=news)
        if too_many:
            log.warning("%d records are missing in the history: too many wait for the disk", too_many)
        if any(one.deliveries for one in changes):
            self._to_deliver()
        return step

    def know_time(self, date: float | None) -> None:
        """IMDS has answered, at this time by its clock, in Unix seconds; ``None``: it does not say it."""
        with self._memory:
            now = self._clock.boot_time()
            counted = self._date_at(now)
            known = self._outbox.rows.time_known
            if date is not None or not known:
                self._date = (date, now) if date is not None else None
            if not known:
                self._boot = self._clock.boot_id
                self._outbox.advance(max(0.0, date - counted) if date is not None and counted is not None else 0.0)
                self._stepped()

    def _date_at(self, now: float) -> float | None:
        """Unix seconds by IMDS, where no time has passed unseen; ``None``: they are not known."""
        return self._date[0] + now - self._date[1] if self._date is not None else None

    # ---- readers

    def history(self, since: float | None, limit: int, max_bytes: int = ANSWER_BYTES) -> tuple[list[bytes], bool]:
        """The newest records since a Unix time as JSON, oldest first: at most ``limit``, and ``max_bytes`` of the file.

        With it, whether older ones were left out because of their bytes.
        """
        start = since or 0.0
        with self._memory:
            waiting = [one.record for one in self._records if one.change.time.timestamp() >= start]
        known, cut = dict.fromkeys(waiting[::-1]), False  # newest first; some of them may be in the file by then
        with suppress(sqlite3.Error, OSError, StoreError):  # what is in memory is all there is
            read, cut = self.disk.do(lambda: self.disk.file.history(start, limit, max_bytes), ANSWER_PATIENCE)
            known |= dict.fromkeys(read)
        return list(known)[:limit][::-1], cut

    def close(self) -> None:
        """Write what is behind, and leave the directory to others; a sick disk is not waited for."""
        self.disk.close()

    # ---- behind; with ``_memory`` held

    def _stepped(self, *, news: bool = False) -> int:
        """Note that memory has changed, and have it written; returns the newest step."""
        return self.disk.stepped(news=bool(news or self._records or self._outbox.rows.changed))

    def _behind(self, everything: bool) -> Writing:  # noqa: FBT001 - it is called by its place
        now = self._clock.boot_time()
        return Writing(
            state=self._state,
            outbox=self._outbox.rows.take_changes(everything=everything),
            records=[*self._records],
            clock=FileClock(self._boot, now, self._date_at(now)),
            everything=everything,
        )

    def _written(self, writing: Writing) -> None:
        if self._outbox.rows.written(writing.outbox.step):
            self._to_deliver()
        written = set(map(id, writing.records))
        self._records = [one for one in self._records if id(one) not in written]
