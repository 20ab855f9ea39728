"""``AgentState``: what the agent knows. Only here is it changed and published.

Each step makes a new frozen value, under a lock, in order. The store remembers it at once and writes it to the disk
when it can; only a caller that needs it on disk waits. Readers see ``snapshot``, which one assignment replaces, so
they need no lock.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from notbefore.config.model import Config
from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.delivery import deliveries
from notbefore.core.document import Flaw
from notbefore.core.record import Record, Vm
from notbefore.metrics.totals import PollFigures
from notbefore.process.clock import Clock
from notbefore.store.file import StoredChange, StoredState
from notbefore.store.store import WRITE_PATIENCE, Store


class PollStatus(Struct, frozen=True):
    """The result of the last poll, and the counts of all polls since the start of this process."""

    figures: PollFigures = PollFigures()
    answered: Instant | None = None  # the last good answer, undated; None before the first of this process
    date: str = ""  # its ``Date`` header, unparsed
    failure: str | None = None  # why the last poll brought no good answer
    outdated: bool = False  # the known state is from another endpoint or api-version than the present one
    flaws: tuple[Flaw, ...] = ()  # of the last document that could be read

    @property
    def seen(self) -> Instant | None:
        """The last good answer of this process, also by IMDS's clock."""
        return self.answered.dated(self.date) if self.answered is not None else None


class AgentSnapshot(Struct, frozen=True):
    """A consistent, immutable view for readers."""

    state: StoredState = StoredState()
    poll: PollStatus = PollStatus()
    vm: Vm | None = None  # this VM's identity as far as known, with the configured name if IMDS gives none

    @property
    def vm_name(self) -> str | None:
        """The name that this VM has in ``Resources``; ``None`` while it is not known."""
        return name_of(self.vm)

    @property
    def unreadable(self) -> int:
        """The number of listed events that cannot be read."""
        return sum(flaw.rejected for flaw in self.poll.flaws)


Step = Callable[[StoredState], tuple[StoredState, Sequence[Change]] | None]
"""Makes the next state from the newest one, with the changes that lead to it; ``None``: nothing to write."""


class AgentState:
    """Begins with the stored state. Safe to call from several threads; all parts share ``clock``.

    ``config`` returns the configuration in use, which a reload may replace.
    After a change, ``write_record`` gets its record as a line of JSON, then ``changed`` is called. Neither may wait.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        config: Callable[[], Config],
        write_record: Callable[[bytes], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self.clock = clock
        self._config = config
        self._write_record = write_record
        self._changed = changed
        self._lock = threading.Lock()  # never held over the disk or the network
        state = store.state
        if state.seen is not None:
            clock.recognize(state.seen)
        if state.boot_id != clock.boot_id:  # the state may come from a disk image: IMDS has to identify the VM again
            state = replace(state, vm=None)
        since = state.totals.since or clock.now()
        state = replace(state, totals=replace(state.totals, since=since))
        # when the machine last ran before this process, if that was noted to the second
        self.noted = state.last_running if state.clean or state.tracked.interrupting else None
        if state.tracked.events:  # not for the next process: the machine runs again now
            state = replace(state, clean=False, last_running=None)
            store.commit(state)
        self._snapshot = AgentSnapshot(state, vm=self.vm_of(state))

    @property
    def snapshot(self) -> AgentSnapshot:
        """The newest state, in memory; the disk may be behind it."""
        return self._snapshot

    def publish(self, poll: PollStatus) -> None:
        """Publish the result of the last poll, with an unchanged state."""
        with self._lock:
            self._snapshot = AgentSnapshot(self._snapshot.state, poll, self._snapshot.vm)

    def commit(self, step: Step, poll: PollStatus | None = None, on_disk: float = 0.0) -> bool:
        """Take one step: store the new state and its changes, and publish the state.

        ``step`` is called under the lock, so it may not wait. ``poll``: the result of the poll that led to the step,
        published with the state. Waits at most ``on_disk`` seconds; returns whether all of it is on disk then.
        """
        with self._lock:
            made = step(self._snapshot.state)
            if made is None:
                self._publish(self._snapshot.state, poll)
                return True
            state, changes = made
            for change in changes:
                state = replace(state, totals=state.totals.plus(change))
            vm, routing = self.vm_of(state), self._config().routing
            records = [(change, Record.of(change, vm).line()) for change in changes]
            stored = [StoredChange(change, line, deliveries(change, line, routing, vm)) for change, line in records]
            if poll is not None and poll.seen is not None:
                state, date = self._with_times(state, poll), poll.seen.date
                self._store.know_time(date.timestamp() if date is not None else None)
            self._store.commit(state, stored)
            self._publish(state, poll)
            for one in stored:
                self._write_record(one.record + b"\n")
        if stored:
            self._changed()
        return self._store.disk.wait_written(on_disk)

    def _publish(self, state: StoredState, poll: PollStatus | None = None) -> None:
        self._snapshot = AgentSnapshot(state, poll or self._snapshot.poll, self.vm_of(state))

    def note_running(self) -> None:
        """While an event is listed, store the time of the last good answer, and that the machine runs now."""

        def step(state: StoredState) -> tuple[StoredState, Sequence[Change]] | None:
            # before the first good answer of this boot, the events may be gone
            noted = state.tracked.events and state.boot_id == self.clock.boot_id
            return (self._running(state, clean=False), ()) if noted else None

        self.commit(step)

    def write_stop(self) -> None:
        """Store that the agent stopped in order, and when; not if it has had no good answer."""
        if self._snapshot.poll.answered is not None:
            self.commit(lambda state: (self._running(state, clean=True), ()), on_disk=WRITE_PATIENCE)

    def _running(self, state: StoredState, *, clean: bool) -> StoredState:
        return replace(self._with_times(state, self._snapshot.poll), last_running=self.instant(), clean=clean)

    def vm_of(self, state: StoredState) -> Vm | None:
        """The identity of this VM from a state and the configuration; ``None`` if neither has one."""
        config, vm = self._config(), state.vm
        if config.vm.name and name_of(vm) is None:
            vm = replace(vm or Vm(), name=config.vm.name)
        return replace(vm, record_tags=config.records.tags) if vm is not None and config.records.tags else vm

    def _with_times(self, state: StoredState, poll: PollStatus) -> StoredState:
        seen = poll.seen
        if seen is None:  # this process has learnt nothing new
            return state
        owner = self.vm_of(state) or state.seen_by  # while the identity is unknown, the owner stays
        return replace(state, seen=seen, last_running=seen, seen_by=owner, clean=False)

    def now(self) -> datetime:
        """Return the present time: see ``Instant.time``."""
        return self.instant().time

    def instant(self) -> Instant:
        """The present moment, with IMDS's clock extrapolated from the last answer."""
        seen, now = self._snapshot.poll.seen, self.clock.read()
        if seen is None or seen.date is None:
            return now
        return replace(now, date=seen.date + timedelta(seconds=now.uptime - seen.uptime))


def name_of(vm: Vm | None) -> str | None:
    """The name of a VM; ``None`` while it is not known."""
    return (vm.name or None) if vm is not None else None
