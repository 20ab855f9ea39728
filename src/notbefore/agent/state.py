"""``AgentState``: what the agent knows. Only here is it changed and published.

Each change makes a new frozen value, under a lock, in order. The store remembers it at once and
writes it to the disk when it can; only a caller that needs it on disk waits. Readers see
``snapshot``, which one assignment replaces, so they need no lock.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from notbefore.agent.runtime import Published, Runtime
from notbefore.config.model import Config
from notbefore.core.approval import ApprovalAttempt, without_old
from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.delivery import deliveries, last_message
from notbefore.core.document import Flaw
from notbefore.core.record import Vm
from notbefore.core.tracked import Tracked
from notbefore.metrics.totals import PollFigures
from notbefore.process.clock import Clock
from notbefore.store.file import StoredChange, StoredState
from notbefore.store.store import WRITE_PATIENCE, Store
from notbefore.wording.records import record_of


class PollStatus(Struct, frozen=True):
    """The result of the last poll, and the counts of all polls since the start of this process."""

    figures: PollFigures = PollFigures()
    # when the last good answer came; None before the first of this process
    answered: Instant | None = None
    failure: str | None = None  # why the last poll brought no good answer
    # the known state is from another endpoint or api-version than the present one
    outdated: bool = False
    flaws: tuple[Flaw, ...] = ()  # of the last document that could be read
    # when the request of the last good answer was sent: the answer is as old as its request
    asked: Instant | None = None
    api_version: str = ""  # of the last good answer

    @property
    def took(self) -> float:
        """Seconds from the request of the last good answer to the answer."""
        if self.answered is None or self.asked is None:
            return 0.0
        return self.answered.uptime - self.asked.uptime


class AgentSnapshot(Struct, frozen=True):
    """A consistent, immutable view for readers."""

    state: StoredState = StoredState()
    poll: PollStatus = PollStatus()
    # this VM's identity as far as it is known, with the configured name if IMDS gives none
    vm: Vm | None = None

    @property
    def vm_name(self) -> str | None:
        """The name that this VM has in ``Resources``; ``None`` while it is not known."""
        return name_of(self.vm)

    @property
    def unreadable(self) -> int:
        """The number of listed events that cannot be read."""
        return sum(flaw.rejected for flaw in self.poll.flaws)


class Listener(Protocol):
    """A part that handles changes."""

    def wake(self) -> None:
        """Handle a change soon. Called from any thread; must not wait."""


class AgentState:
    """Begins with the stored state. Safe to call from several threads; all parts share ``clock``.

    Only the polling thread changes the tracked events and the identity, and only the approver's
    thread changes approvals. So each may compute a new value from ``snapshot`` and commit it later.
    The rest of the state is derived here, under the lock.

    ``write_record`` gets the record of each change as a line of JSON, after the store has its step.
    It must not wait.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        runtime: Published[Runtime],
        write_record: Callable[[bytes], None],
    ) -> None:
        self.clock = clock
        self._store = store
        self._runtime = runtime
        self._write_record = write_record
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.Lock()  # never held over the disk or the network

        if store.state.seen is not None:
            clock.recognize(store.state.seen)
        state = _restored(store.state, clock)

        # when the machine last ran before this process, if that was noted to the second
        self.noted: Instant | None = None
        if state.clean or state.tracked.interrupting:
            self.noted = state.last_running
        if state.tracked.events:  # not for the next process: the machine runs again now
            state = replace(state, clean=False, last_running=None)
            store.commit(state)
        self._snapshot = AgentSnapshot(state, vm=self.vm_of(state))

    # ---- readers

    @property
    def snapshot(self) -> AgentSnapshot:
        """The newest state, in memory; the disk may be behind it."""
        return self._snapshot

    def vm_of(self, state: StoredState) -> Vm | None:
        """Return the identity of this VM by a state and the configuration; ``None``: unknown."""
        return identity(state.vm, self._runtime.current.config)

    def now(self) -> datetime:
        """Return the present time: see ``Instant.time``."""
        return self.instant().time

    def instant(self) -> Instant:
        """Return the present moment, with IMDS's clock extrapolated from the last answer."""
        now = self.clock.read()
        last = self._snapshot.poll.answered
        if last is None or last.date is None:
            return now
        return replace(now, date=last.date + timedelta(seconds=now.uptime - last.uptime))

    def add_listener(self, listener: Listener) -> None:
        """Wake ``listener`` after each change. Only the main thread adds and removes listeners."""
        self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop waking ``listener``."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    # ---- the polling thread

    def publish(self, poll: PollStatus) -> None:
        """Publish the result of the last poll, with an unchanged state."""
        with self._lock:
            self._publish(self._snapshot.state, poll)

    def track(self, tracked: Tracked, changes: Sequence[Change], poll: PollStatus) -> None:
        """Commit the tracked events after a poll, and the changes that the poll brought."""
        with self._lock:
            state = self._snapshot.state
            approvals = without_old(state.approvals, tracked)
            state = replace(state, tracked=tracked, approvals=approvals)
            self._commit(state, changes, poll)
        self._wake_listeners(changes)

    def identify(self, vm: Vm | None, tracked: Tracked, owner: Vm | None = None) -> None:
        """Commit the identity of this VM, and the events as this VM sees them.

        ``owner``: the new owner of the state, if it was another VM's. If nothing differs, at most
        the configured name has changed, which is published.
        """
        with self._lock:
            before = self._snapshot.state
            state = replace(before, vm=vm, tracked=tracked)
            if owner is not None:
                state = replace(state, seen_by=owner)
            if state == before:
                self._publish(before, self._snapshot.poll)
            else:
                self._commit(state)

    # ---- the approver

    def write_attempt(self, attempt: ApprovalAttempt, change: Change | None = None) -> bool:
        """Commit the progress of an approval, and its record; return whether both are on disk.

        Waits for the disk at most ``WRITE_PATIENCE`` seconds.
        """
        changes: list[Change] = []
        if change is not None:
            changes.append(change)
        with self._lock:
            state = self._snapshot.state
            approvals = {**state.approvals, attempt.tracked.event.key: attempt}
            self._commit(replace(state, approvals=approvals), changes)
        self._wake_listeners(changes)
        return self._store.disk.wait_written(WRITE_PATIENCE)

    # ---- the main thread

    def note_running(self) -> None:
        """Store when IMDS last answered, and that the machine runs, if an event is listed."""
        with self._lock:
            state = self._snapshot.state
            # before the first good answer of this boot, the events may be gone
            if state.tracked.events and state.boot_id == self.clock.boot_id:
                self._commit(self._running(state, clean=False))

    def write_stop(self) -> None:
        """Store that the agent stopped in order, and when. Without a good answer, do nothing."""
        if self._snapshot.poll.answered is None:
            return
        with self._lock:
            self._commit(self._running(self._snapshot.state, clean=True))
        self._store.disk.wait_written(WRITE_PATIENCE)

    def _running(self, state: StoredState, *, clean: bool) -> StoredState:
        config = self._runtime.current.config
        state = _with_times(state, self._snapshot.poll, config)
        return replace(state, last_running=self.instant(), clean=clean)

    # ---- one step; with the lock held

    def _commit(
        self,
        state: StoredState,
        changes: Sequence[Change] = (),
        poll: PollStatus | None = None,
    ) -> None:
        """Store a new state, its changes and their deliveries; publish it and write the records.

        ``poll``: the result of the poll that led to the step; it is published with the state.
        """
        config = self._runtime.current.config
        routing = config.routing
        vm = identity(state.vm, config)

        stored: list[StoredChange] = []
        for change in changes:
            state = replace(state, totals=state.totals.plus(change))
            line = record_of(change, vm).line()
            step = StoredChange(
                change=change,
                record=line,
                deliveries=deliveries(change, line, routing, vm),
                last=last_message(change, line),
            )
            stored.append(step)

        if poll is not None and poll.asked is not None:
            state = _with_times(state, poll, config)
            imds_time = None
            if poll.asked.date is not None:
                imds_time = poll.asked.date.timestamp()
            self._store.know_time(imds_time)

        self._store.commit(state, stored)
        self._publish(state, poll or self._snapshot.poll)
        for step in stored:
            self._write_record(step.record + b"\n")

    def _publish(self, state: StoredState, poll: PollStatus) -> None:
        self._snapshot = AgentSnapshot(state, poll, self.vm_of(state))

    # ---- without the lock

    def _wake_listeners(self, changes: Sequence[Change]) -> None:
        if changes:
            for listener in self._listeners:
                listener.wake()


def _restored(state: StoredState, clock: Clock) -> StoredState:
    """Return the stored state as this process begins with it."""
    since = state.totals.since or clock.now()
    totals = replace(state.totals, since=since)
    if state.boot_id == clock.boot_id:
        return replace(state, totals=totals)
    # the state may come from a disk image: IMDS has to identify the VM again
    return replace(state, totals=totals, vm=None)


def name_of(vm: Vm | None) -> str | None:
    """Return the name of a VM; ``None`` while it is not known."""
    if vm is None:
        return None
    return vm.name or None


def identity(vm: Vm | None, config: Config) -> Vm | None:
    """Return the identity from IMDS with the configured tags, and the configured name if needed."""
    if config.vm.name and name_of(vm) is None:
        vm = replace(vm or Vm(), name=config.vm.name)
    if vm is None or not config.records.tags:
        return vm
    return replace(vm, record_tags=config.records.tags)


def _with_times(state: StoredState, poll: PollStatus, config: Config) -> StoredState:
    """Return the state with the time of the last good answer, and with this VM as its reader."""
    if poll.asked is None:  # this process has learned nothing new
        return state
    # while the identity is unknown, the owner stays
    owner = identity(state.vm, config) or state.seen_by
    return replace(
        state,
        seen=poll.asked,
        api_version=poll.api_version,
        last_running=poll.answered,
        seen_by=owner,
        clean=False,
    )
