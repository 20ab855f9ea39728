"""``Store``: the one owner of what the agent remembers, its outbox included. Memory is the truth, one file follows.

A step is applied to memory at once, and is *behind* until one transaction has written it, in the one thread that uses
the disk. Nobody else waits for the disk. Where it is sick (full, hanging, read-only; its file deleted or replaced),
deliveries go from memory after ``core.outbox.WRITE_PATIENCE``, and ``degraded`` says why. After any doubt all of memory
is written anew. An agent that is killed meanwhile forgets what only memory knew.
"""

import logging
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from notbefore.core.change import Change
from notbefore.core.delivery import Delivery, MessageKind
from notbefore.core.outbox import GivenDelivery, Outbox, Row, SendResult
from notbefore.errors import StoreError
from notbefore.metrics.outbox import OutboxView, view_of
from notbefore.store.disk import DiskHangsError, DiskThread
from notbefore.store.file import (
    FILE_NAME,
    HISTORY_BYTES,
    MAX_SEQ,
    FileClock,
    FileReplacedError,
    HistoryRecord,
    Loaded,
    StateFile,
    StoredState,
    Writing,
)
from notbefore.store.lock import OwnerLock

START_PATIENCE: Final = 12.0  # seconds to read the file at the start: without it, all of it would be news
SLOW: Final = 1.0  # seconds of a transaction from which the disk counts as sick
RETRY_INTERVAL: Final = 1.0  # seconds between attempts to write to a disk that is sick
LOOK_INTERVAL: Final = 10.0  # seconds between looks whether the file was deleted
ANSWER_PATIENCE: Final = 5.0  # seconds to read the history
CLOSE_PATIENCE: Final = 1.5  # seconds to close the file
ANSWER_BYTES: Final = 4 * 1024 * 1024  # of records in one answer; the file holds more
MAX_RECORDS: Final = 1_000  # that wait for the disk; older ones are dropped, and counted
MAX_EXERCISES: Final = 10  # whose attempts are remembered
_TROUBLE: Final = (sqlite3.Error, OSError, StoreError)

log = logging.getLogger("notbefore.store")


class StoredChange(Struct, frozen=True):
    """One change as it is kept. ``record``: the change as JSON, UTF-8. ``deliveries``: what is to be sent of it."""

    change: Change
    record: bytes
    deliveries: tuple[Delivery, ...] = ()


class HistoryAnswer(NamedTuple):
    """Records as JSON, oldest first. ``rest``: where older ones begin that were left out, as too many bytes."""

    records: list[bytes]
    rest: int | None


class StoreClock(Protocol):
    """The clocks of this machine (``process.clock.Clock``)."""

    boot_id: str  # tells this boot of the machine from another

    def time(self) -> float:
        """The wall clock, in Unix seconds."""
        ...

    def boot_time(self) -> float:
        """Seconds since the boot, by a clock that nobody sets."""
        ...


class ExerciseAttempt(Struct, frozen=True):
    """An attempt at a delivery of an exercise."""

    sink: str
    kind: MessageKind
    result: SendResult
    took: float  # seconds since it was to be sent


class Store:
    """Safe to call from several threads. ``to_deliver`` is called when a courier may find something; it may not wait.

    Raises ``StoreError`` when another agent holds the directory, or a newer version made the file; any other trouble is
    survived in memory, and none of its methods raises.
    """

    def __init__(
        self,
        directory: Path,
        clock: StoreClock,
        history_bytes: int = HISTORY_BYTES,
        to_deliver: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = directory / FILE_NAME
        self.unreadable_rows = 0  # found at the start
        self._clock = clock
        self._to_deliver = to_deliver
        self._disk = DiskThread(SLOW)  # uses the file, and nothing else does
        self.file = StateFile(self.path, history_bytes)
        self.lock = OwnerLock(directory)  # a courier inherits it
        self._memory = threading.Condition()  # of all below; never held over the disk
        self._state = self._written_state = StoredState()
        self._outbox = Outbox(random.random)
        self._records: list[HistoryRecord] = []  # that no transaction has tried to write, oldest first
        self._writing: list[HistoryRecord] = []  # ... that one has, and maybe has not
        self._dropped_records = 0  # of these, since the disk is sick: they are missing in the history
        self._recent: deque[tuple[float, HistoryRecord]] = deque()  # written in the last seconds, and when
        self._exercised: dict[str, list[ExerciseAttempt]] = {}  # event key -> its attempts; of the last exercises
        self._sinks: Collection[str] | None = None  # those that are configured
        self._targets: Callable[[Row], Sequence[str]] = lambda _row: ()
        self._date: tuple[float, float] | None = None  # Unix seconds by IMDS, at a moment since the boot; see ``_boot``
        self._boot = clock.boot_id  # of the machine, up to which the time is known that has passed
        self._step = 0  # the newest
        self._written_step = 0
        self._everything = False  # nobody knows what is in the file: all of memory is behind
        self._unread = False  # the file could not be read at the start: it is not to be overwritten
        self._posted = False  # the disk thread will write what is behind
        self._trouble: str | None = None  # why the last transaction failed
        self._attempted = self._looked = time.monotonic()
        self._begin()

    # ---- the state

    def load(self) -> StoredState:
        """What is remembered: at the start, what the last agent wrote."""
        return self._state

    def commit(self, state: StoredState, changes: Sequence[StoredChange] = ()) -> int:
        """Remember a state, and the changes that led to it with their deliveries; returns the number of this step."""
        now, wall = self._clock.boot_time(), self._clock.time()
        with self._memory:
            self._state = state
            for one in changes:
                self._outbox.take(one.change, one.record, one.deliveries, now, wall)
                self._remember(HistoryRecord(one.change.id, one.change.time.timestamp(), one.record))
            step = self._stepped()
        if any(one.deliveries for one in changes):
            self._to_deliver()
        return step

    def wait_written(self, step: int | None, seconds: float) -> bool:
        """Whether a step (``None``: the newest) is on disk; waits for it so long, and not for a sick disk.

        For those alone that may not go on without it.
        """
        deadline = time.monotonic() + seconds
        with self._memory:
            step = self._step if step is None else step
            while self._written_step < step and self.degraded is None and time.monotonic() < deadline:
                self._memory.wait(min(SLOW / 4, seconds))
            return self._written_step >= step

    @contextmanager
    def outbox(self) -> Iterator[tuple[Outbox, float]]:
        """The outbox, and the time on its clock, for whoever does not wait meanwhile. What changes in it is written."""
        with self._memory:
            yield self._outbox, self._clock.boot_time()
            changed = bool(self._outbox.changed)
            self._stepped()
        if changed:
            self._to_deliver()

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Add deliveries that no change causes."""
        with self.outbox() as (outbox, now):
            outbox.put(deliveries, now, self._clock.time())

    def rows(self) -> list[Row]:
        """What is in the outbox, oldest first."""
        with self._memory:
            return list(self._outbox.rows())

    def outbox_view(self) -> OutboxView:
        """The numbers of the outbox now."""
        with self._memory:
            return view_of(self._outbox, self._clock.boot_time(), self._clock.time())

    def exercise(self, event_key: str, steps: Iterable[StoredChange] = ()) -> list[ExerciseAttempt]:
        """The attempts at the deliveries of an exercise, so far; where ``steps`` of it are given, have them sent first.

        They are delivered as changes are, and are no part of the state and the history.
        """
        with self.outbox() as (outbox, now):
            attempts = self._exercised.setdefault(event_key, [])
            if len(self._exercised) > MAX_EXERCISES:
                del self._exercised[next(iter(self._exercised))]
            for step in steps:
                outbox.take(step.change, step.record, step.deliveries, now, self._clock.time())
            return attempts.copy()

    def know_time(self, date: float | None) -> None:
        """IMDS has answered, at this time by its clock, in Unix seconds; ``None``: it does not say it."""
        with self._memory:
            now = self._clock.boot_time()
            counted = self._date_at(now)
            known = self._outbox.time_known
            if date is not None or not known:
                self._date = (date, now) if date is not None else None
            if not known:
                self._boot = self._clock.boot_id
                self._outbox.advance(max(0.0, date - counted) if date is not None and counted is not None else 0.0)
                self._stepped()

    def _date_at(self, now: float) -> float | None:
        """Unix seconds by IMDS, where no time has passed unseen; ``None``: they are not known."""
        return self._date[0] + now - self._date[1] if self._date is not None else None

    # ---- the courier

    def exchange(self, results: Iterable[SendResult], room: Mapping[str, int]) -> Sequence[GivenDelivery]:
        """Take in results, and give what is due; ``room``: how many deliveries a sink can take."""
        with self._memory:
            results, now = list(results), self._clock.boot_time()
            for result in results:
                row = self._outbox.get(result.delivery_id)
                if row is not None and row.delivery.event_key in self._exercised:
                    one, took = row.delivery, max(0.0, now - row.since)
                    self._exercised[one.event_key].append(ExerciseAttempt(one.sink, one.kind, result, took))
            given = self._outbox.exchange(results, room, now)
            self._stepped()
            return given

    def courier_ended(self) -> None:
        """What the courier had is due again; what may run once is dead."""
        with self._memory:
            for row in self._outbox.release(self._clock.boot_time()):
                one = row.delivery
                log.error("sink %s: `%s` of event %s: %s", one.sink, one.kind, one.event_key, row.error)
            self._redirect()
            self._stepped()

    def next_due(self) -> float | None:
        """Seconds until a courier is needed, 0 or less: now; ``None``: nothing waits."""
        with self._memory:
            now = self._clock.boot_time()
            due = self._outbox.next_due()
            return None if due is None else due - now

    def use_sinks(self, sinks: Collection[str], targets: Callable[[Row], Sequence[str]]) -> None:
        """From now on these are configured; ``targets``: where a delivery to another sink would go by the routes."""
        with self._memory:
            self._sinks, self._targets = sinks, targets
            self._redirect()
            self._stepped()

    def _redirect(self) -> None:
        if self._sinks is None:
            return
        left: dict[str, int] = {}
        for row in self._outbox.redirect(self._sinks, self._targets, self._clock.boot_time()):
            left[row.delivery.sink] = left.get(row.delivery.sink, 0) + 1
        for sink, count in left.items():
            log.warning(
                "sink %s is not configured any more: %d deliveries that wait for it go where the routes lead now, and"
                " are dead where no route names another sink (`notbefore outbox list`)", sink, count,
            )  # fmt: skip

    # ---- readers

    def history(
        self, since: float | None, limit: int, max_bytes: int = ANSWER_BYTES, before: int | None = None
    ) -> HistoryAnswer:
        """The newest records since a Unix time: at most ``limit``, and as many as ``max_bytes`` hold.

        The newest one, and those that are not on disk, are given in any case. ``before``: the ``rest`` of an earlier
        answer, to go on with the next older ones.
        """
        since, newer = since or 0.0, list[HistoryRecord]()
        if before is None:
            with self._memory:
                newer = [*(one for _, one in self._recent), *self._writing, *self._records]
        numbers: dict[bytes, int | None] = {one.record: None for one in reversed(newer) if one.time >= since}
        with suppress(*_TROUBLE):  # what is in memory is all there is
            read = self._disk.do(lambda: self._read_history(since, limit, max_bytes, before), ANSWER_PATIENCE)
            numbers |= {record: number for number, record in read}
        records: list[bytes] = []
        rest = MAX_SEQ if before is None else before
        for record, number in list(numbers.items())[:limit]:
            max_bytes -= len(record)
            if records and max_bytes < 0 and number is not None:  # what is in memory alone has no place to go on from
                return HistoryAnswer(records[::-1], rest)
            records.append(record)
            rest = rest if number is None else number
        return HistoryAnswer(records[::-1], None)

    # ---- how the disk is

    @property
    def degraded(self) -> str | None:
        """Why what is known is not on disk, in words; ``None``: it is, or will be in a moment."""
        if self._disk.hangs:
            return self._trouble or f"the disk has not answered for {SLOW:g} s"
        return self._trouble

    @property
    def behind(self) -> int:
        """Steps that are not on disk."""
        return self._step - self._written_step

    @property
    def hangs(self) -> bool:
        """The thread waits for the disk, and may do so for ever."""
        return self._disk.hangs

    def tick(self) -> None:
        """To be called each few seconds, each second while ``degraded``: write what is behind, notice a lost file."""
        now = time.monotonic()
        with self._memory:
            if self.degraded is not None and now - self._attempted >= RETRY_INTERVAL:
                self._post()
            elif now - self._looked >= LOOK_INTERVAL and not self._posted:
                self._looked = now
                self._disk.post(self._look)

    def close(self) -> None:
        """Write what is behind, close the file, and leave the directory to others; a sick disk is not waited for."""
        self.wait_written(None, SLOW)
        with suppress(DiskHangsError):
            self._disk.do(self.file.forget, CLOSE_PATIENCE)
        self._disk.end()
        self.lock.release()

    # ---- behind; with ``_memory`` held

    def _stepped(self) -> int:
        """Note that memory has changed, and have it written."""
        if (
            self._everything
            or self._writing
            or self._records
            or self._outbox.changed
            or self._state is not self._written_state
        ):
            self._step += 1
            if self._trouble is None:  # else the next attempt is made by ``tick``
                self._post()
        return self._step

    def _post(self) -> None:
        if not self._posted:
            self._posted = True
            self._disk.post(self._write)

    def _remember(self, record: HistoryRecord) -> None:
        self._records.append(record)
        if len(self._writing) + len(self._records) > MAX_RECORDS:
            del (self._writing or self._records)[0]
            self._dropped_records += 1

    def _behind(self) -> Writing:
        """What is to be written now."""
        now = self._clock.boot_time()
        while self._recent and self._recent[0][0] < time.monotonic() - LOOK_INTERVAL:
            self._recent.popleft()
        self._writing, self._records = [*self._writing, *self._records], []
        again = [one for _, one in self._recent] if self._everything else []
        return Writing(
            state=self._state,
            outbox=self._outbox.take_changes(everything=self._everything),
            records=[*again, *self._writing],
            clock=FileClock(self._boot, now, self._date_at(now)),
            everything=self._everything,
        )

    # ---- in the thread of the disk

    def _write(self) -> None:
        self._attempted = begun = time.monotonic()
        try:
            with self._memory:
                self._posted = False
                step, writing = self._step, self._behind()
            self.lock.hold()
            if self._unread:
                self.file.set_aside_unread()
            self.file.write(writing)
        except Exception as error:  # noqa: BLE001 - without memory, say: what it held is behind again in any case
            self._failed(error)
            return
        took = time.monotonic() - begun
        self._wrote(writing, step, f"it took {took:.1f} s" if took >= SLOW else None)

    def _wrote(self, writing: Writing, step: int, trouble: str | None) -> None:
        """A transaction has succeeded, up to this step. ``trouble``: why the disk is sick all the same."""
        with self._memory:
            self._everything = self._unread = False
            self._recent.extend((time.monotonic(), one) for one in self._writing)
            self._writing = []
            self._written_state, self._written_step = writing.state, step
            waited = self._outbox.written(writing.outbox.step)
            recovered, self._trouble = self._trouble is not None and trouble is None, trouble
            missing = self._dropped_records if recovered else 0
            self._dropped_records -= missing
            if self._step > step and trouble is None:  # while the disk counted as sick nobody had this one written
                self._post()
            self._memory.notify_all()
        if recovered:
            log.info("the state is written again: %s", self.path)
        if missing:
            log.warning("%d records are missing in the history: too many waited for the disk", missing)
        if waited:
            self._to_deliver()

    def _failed(self, error: Exception) -> None:
        self.file.forget()
        with self._memory:
            first, self._trouble = self._trouble is None, str(error) or type(error).__name__
            self._everything = True
            if first and isinstance(error, FileReplacedError):  # the disk is not sick
                self._post()
            else:
                self._memory.notify_all()
        if first:
            log.error("the state file cannot be written (%s): all that is known is written anew when it can be", error)

    def _look(self) -> None:
        try:
            self.file.check()
        except OSError as error:
            self._failed(error)

    def _read_history(self, since: float, limit: int, max_bytes: int, before: int | None) -> list[tuple[int, bytes]]:
        try:
            return self.file.history(since, limit, max_bytes, before)
        except FileReplacedError as error:  # a damaged page, which nothing else has read
            self._failed(error)
            raise

    # ---- the start

    def _begin(self) -> None:
        try:
            loaded = self._disk.do(self._open, START_PATIENCE)
        except StoreError:
            self._disk.end()
            self.lock.release()
            raise
        except (sqlite3.Error, OSError) as error:
            self._unread = True
            self._failed(error)
            return
        self._state = self._written_state = loaded.state
        self.unreadable_rows = loaded.unreadable
        self._boot = loaded.clock.boot or self._clock.boot_id
        now, same_boot = self._clock.boot_time(), self._boot == self._clock.boot_id
        passed = now - loaded.clock.clock if loaded.clock.boot and same_boot else 0.0
        self._date = (loaded.clock.date + passed, now) if loaded.clock.date is not None else None
        self._outbox.restore(loaded.outbox, now, passed, time_known=same_boot)
        with self._memory:
            self._everything = not self.file.known  # it was damaged, or another process has locked it
            self._stepped()

    def _open(self) -> Loaded:
        self.lock.hold()
        return self.file.load()
