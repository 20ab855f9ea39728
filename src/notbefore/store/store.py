"""``Store``: the one owner of all that the agent remembers, with its outbox.

Memory is the truth, one file follows it.

A step is applied to memory at once, and is *behind* until one transaction has written it, in the
one thread that uses the disk. No other thread waits for it. If the disk is sick (full, hanging,
read-only), or the file was deleted or replaced, deliveries are sent from memory after
``core.outbox.DISK_PATIENCE``, and ``disk.degraded`` tells the cause. If the agent is killed
meanwhile, the steps that are only in memory are lost.
"""

import logging
import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from notbefore.core.delivery import Delivery, Targets
from notbefore.core.outbox import Outbox, SendResult
from notbefore.core.routing import Terms
from notbefore.errors import StoreError
from notbefore.metrics.totals import OutboxView, view_of
from notbefore.store.disk import DiskThread
from notbefore.store.file import FILE_NAME, Content, FileClock, StoredChange, StoredState

READ_PATIENCE: Final = 5.0  # seconds to read the history
# seconds for what must be on disk: an approval, an orderly end, a command's change
WRITE_PATIENCE: Final = 10.0
ANSWER_BYTES: Final = 4 * 1024 * 1024  # of records in one answer; the file holds more
# that wait for the disk; older ones are dropped, and the log says how many
MAX_RECORDS: Final = 1_000

log = logging.getLogger("notbefore.store")


class StoreClock(Protocol):
    """The clocks of this machine (``process.clock.Clock``)."""

    boot_id: str  # distinguishes this boot of the machine from others

    def time(self) -> float:
        """The wall clock, in Unix seconds."""

    def boot_time(self) -> float:
        """Seconds since the boot, on a clock that cannot be set."""


class StoredOutbox:
    """An outbox for several threads.

    ``to_deliver``: called if there may be something to deliver; it must not wait.
    """

    def __init__(self, outbox: Outbox, clock: StoreClock, to_deliver: Callable[[], None]) -> None:
        self._outbox = outbox
        self._memory = threading.Condition()  # of all that is remembered; never held over the disk
        self._clock = clock
        self._to_deliver = to_deliver

    def _stepped(self) -> None:
        """Called after each change, with the lock held."""

    @contextmanager
    def opened(self, *, by_courier: bool = False) -> Iterator[tuple[Outbox, float]]:
        """Give the outbox and the time on its clock, with the lock held: the caller must not wait
        meanwhile.
        """
        with self._memory:
            now = self._clock.boot_time()
            yield self._outbox, now
            removed = self._outbox.make_room(now)
            changed = bool(self._outbox.rows.changed)
            self._stepped()
        _log_overflowed(removed)
        if changed and not by_courier:
            self._to_deliver()

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Add deliveries that do not belong to a change."""
        with self.opened() as (outbox, now):
            outbox.put(deliveries, now, self._clock.time())

    def view(self, now: float) -> OutboxView:
        """Return the present numbers of the outbox.

        ``now``: this moment in Unix seconds, by the reader's clock.
        """
        with self._memory:
            return view_of(self._outbox, self._clock.boot_time(), now)

    # ---- the courier: see ``courier.supervisor``

    def exchange(
        self, results: Iterable[SendResult], limits: Mapping[str, int]
    ) -> Sequence[Delivery]:
        """Record results, and return due deliveries.

        ``limits``: sink -> how many it may have at a time.
        """
        with self.opened(by_courier=True) as (outbox, now):
            return outbox.exchange(list(results), limits, now)

    def under_way(self) -> Sequence[Delivery]:
        """Return the deliveries that the courier has."""
        with self._memory:
            return self._outbox.rows.under_way

    def courier_ended(self) -> None:
        """Make the deliveries of the ended courier due again.

        Those that may be attempted only once are dead.
        """
        with self.opened(by_courier=True) as (outbox, now):
            for row in outbox.release(now):
                log.error(
                    "sink %s: `%s` of event %s: %s", row.sink, row.kind, row.event_key, row.error
                )
            _log_redirected(outbox.redirect(now))

    def next_due(self) -> float:
        """Return the seconds until a courier is needed; 0 or less: now.

        Infinite if nothing waits.
        """
        with self._memory:
            return self._outbox.rows.next_due() - self._clock.boot_time()

    def use_sinks(self, terms: Mapping[str, Terms], targets: Callable[[Delivery], Targets]) -> None:
        """Set the configured sinks.

        ``targets``: where the routes send a delivery whose sink was removed.
        """
        with self.opened(by_courier=True) as (outbox, now):
            _log_redirected(outbox.use_sinks(terms, targets, now))


def _log_redirected(left: Iterable[Delivery]) -> None:
    for sink, count in Counter(row.sink for row in left).items():
        log.warning(
            "sink %s is no longer configured: %d waiting deliveries go to the sinks of"
            " the present routes, and are dead if no route gives another sink (`notbefore outbox"
            " list`)",
            sink,
            count,
        )


def _log_overflowed(rows: Sequence[Delivery]) -> None:
    if not rows:
        return
    counts = Counter(row.sink for row in rows)
    sinks = ", ".join(f"{sink}: {count}" for sink, count in sorted(counts.items()))
    log.error("the outbox is full: %d deliveries are removed and not sent (%s)", len(rows), sinks)


def log_left_open(left_open: Iterable[tuple[str, str]]) -> None:
    """Log what stays open after its event: the sink, which was removed, and the EventId."""
    for sink, event_id in left_open:
        log.warning(
            "sink %s is no longer configured, so it does not get the end of event %s: close by hand"
            " what is still open there",
            sink,
            event_id,
        )


class History(Struct, frozen=True):
    """The newest records as JSON, oldest first."""

    records: Sequence[bytes]
    was_cut: bool = False  # older ones were left out, because one answer cannot hold them
    problem: str = ""  # why the file could not be read: then only those in memory are here


class Store(StoredOutbox):
    """Safe to call from several threads. ``to_deliver``: see ``StoredOutbox``.

    It is also called with the lock held.

    Raises ``StoreError`` if the directory cannot be used (``OwnerLock.hold``), or if a newer
    version wrote the file. After any other failure it works from memory. Its methods do not raise.
    """

    def __init__(
        self, directory: Path, clock: StoreClock, to_deliver: Callable[[], None] = lambda: None
    ) -> None:
        self.path = directory / FILE_NAME
        super().__init__(Outbox(random.random), clock, to_deliver)
        self.state = StoredState()  # at the start, that of the file
        self._records: list[StoredChange] = []  # not in the history of the file yet, oldest first
        self._epoch: float | None = None  # IMDS's time in Unix seconds at the boot, if it is known
        self.disk = DiskThread(directory, self._memory, self._behind, self._written)
        loaded = self.disk.load()
        with self._memory:
            self.state = loaded.state
            now = self._clock.boot_time()
            # a clock that has gone back is that of another boot, whatever its id: a checkpoint was
            # restored
            same_boot = loaded.clock.boot == self._clock.boot_id and now >= loaded.clock.clock
            passed = now - loaded.clock.clock if same_boot else 0.0
            self._epoch = (
                loaded.clock.date + passed - now if loaded.clock.date is not None else None
            )
            self._outbox.restore(
                loaded.outbox, now, passed, time_known=same_boot or not loaded.outbox.rows
            )
            removed = self._outbox.make_room(now)
            self._stepped()
        _log_overflowed(removed)

    # ---- the state

    def commit(self, state: StoredState, changes: Sequence[StoredChange] = ()) -> None:
        """Remember a state, the changes that led to it, and their deliveries."""
        now = self._clock.boot_time()
        wall = self._clock.time()
        left_open: list[tuple[str, str]] = []  # sinks that are not configured, with an EventId
        with self._memory:
            news = state is not self.state
            self.state = state
            for stored in changes:
                gone = self._outbox.take(stored.change, stored.deliveries, now, wall, stored.last)
                left_open += [(sink, stored.change.event.event_id) for sink in gone]
            removed = self._outbox.make_room(now)
            self._records += changes
            too_many = max(0, len(self._records) - MAX_RECORDS)
            del self._records[:too_many]
            self._stepped(news=news)

        _log_overflowed(removed)
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
        with self._memory:
            counted, epoch = (
                self._epoch,
                date - self._clock.boot_time() if date is not None else None,
            )
            if (
                not self._outbox.rows.time_known
            ):  # then ``counted`` is without the time between two boots
                self._epoch = epoch
                self._outbox.advance(
                    max(0.0, epoch - counted) if epoch is not None and counted is not None else 0.0
                )
                self._stepped()
            elif epoch is not None:
                self._epoch = epoch

    # ---- readers

    def history(self, since: float | None, limit: int, max_bytes: int = ANSWER_BYTES) -> History:
        """Return the newest records since a Unix time: at most ``limit``.

        At most ``max_bytes`` come from the file.
        """
        start = since or 0.0
        with self._memory:
            waiting = [one.record for one in self._records if one.change.time.timestamp() >= start]

        newest_first = dict.fromkeys(reversed(waiting))
        was_cut = False
        problem = ""
        try:
            stored, was_cut = self.disk.do(
                lambda: self.disk.file.history(start, limit, max_bytes), READ_PATIENCE
            )
        except (sqlite3.Error, OSError, StoreError) as error:
            problem = str(error)
        else:
            newest_first |= dict.fromkeys(stored)  # the file may have some of them as well

        records = list(newest_first)[:limit]
        records.reverse()
        return History(records, was_cut=was_cut, problem=problem)

    def close(self) -> None:
        """Write what is behind, and release the directory; does not wait for a sick disk."""
        self.disk.close()

    # ---- behind; with ``_memory`` held

    def _stepped(self, *, news: bool = False) -> None:
        """Let memory be written, if it has changed; ``news``: the state has."""
        if news or self._records or self._outbox.rows.changed:
            self.disk.stepped()

    def _behind(self) -> tuple[Content, Sequence[StoredChange]]:
        now = self._clock.boot_time()
        date = self._epoch + now if self._epoch is not None else None
        clock = FileClock(self._clock.boot_id if self._outbox.rows.time_known else "", now, date)
        return Content(self.state, self._outbox.rows.take(now), clock), [*self._records]

    def _written(self, news: Sequence[StoredChange]) -> None:
        if self._outbox.rows.written():
            self._to_deliver()
        written = set(map(id, news))
        self._records = [one for one in self._records if id(one) not in written]
