"""``Tracker``: what the agent does with each poll. Bytes in, changes counted, committed and told; in that order.

One thread calls ``handle``; scrapes read from others, under a lock that is never held over the network.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.agent.freeze import FreezeMeter
from notbefore.core.approval import ApprovalAttempt, ApprovalContext
from notbefore.core.change import Change, Gap
from notbefore.core.delivery import Routing, deliveries, heartbeat_delivery
from notbefore.core.document import Document, Flaw, parse
from notbefore.core.lifecycle import WATCHED, DiffResult, Observation, TrackedEvent, diff
from notbefore.core.listing import PendingApproval, PendingEvent, PendingView
from notbefore.core.record import Heartbeat, Record, Vm
from notbefore.errors import DocumentError
from notbefore.imds.poller import Poll
from notbefore.metrics.families import Family, Snapshot, samples
from notbefore.metrics.outbox import OutboxView
from notbefore.metrics.process import Figures
from notbefore.store.state import Store, StoredChange

KEPT_APPROVALS: Final = 20  # that are over, of events that are gone: a list that flaps brings them back

log = logging.getLogger("notbefore.agent.tracker")


def now_utc() -> datetime:
    """The wall clock, in UTC."""
    return datetime.now(UTC)


def read_boot_id() -> str:
    """What tells this boot from another; on systems without one, the time of the boot to ten seconds."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"booted-{round((time.time() - time.monotonic()) / 10)}"


class Tracker:
    """The agent's memory and what it makes of each poll."""

    def __init__(
        self, store: Store, figures: Figures, tell: Callable[[bytes], None], boot_id: Callable[[], str] = read_boot_id
    ) -> None:
        self.figures = figures
        self.routing = Routing()
        self.outbox: Callable[[], OutboxView] = OutboxView
        self.wake: Callable[[], None] = lambda: None  # called when there is something to deliver; must not wait
        self.moved: list[Callable[[], None]] = []  # called when there was a change; must not wait
        self.rules: tuple[str, ...] = ()  # of approval, those that may approve
        self.preview: Callable[[TrackedEvent, ListedEvents], PendingApproval | None] = lambda _life, _listed: None
        self.pulse = FreezeMeter()
        self._api_version = ""
        self.last_good: float | None = None  # monotonic seconds
        self._elsewhere = False  # what is known was said by another endpoint than the one that is asked now
        self._store = store
        self._tell = tell
        self._boot_id = boot_id()
        self._began = now_utc()
        self._lock = threading.RLock()
        self._memory = store.load()
        if self._memory.boot_id != self._boot_id:  # the state may have come along in an image: IMDS has to say it anew
            self._memory.vm = None
        self._memory.totals.since = self._memory.totals.since or now_utc()
        self._document: Document | None = None
        self._rejected: DocumentError | None = None  # why the body that IMDS gives now is no document
        self._trouble: str | None = None  # the bad state that was logged
        self._vm_name: str | None = None
        self._feel()

    # ---- what the poller calls

    def handle(self, poll: Poll) -> None:
        """Take one poll in: count it, and go on to what it changes."""
        with self._lock:
            self.figures.beat_lag = poll.lag
            self.figures.poll_duration.observe(poll.duration)
            if poll.error is not None:
                self._fail(poll.error.reason, str(poll.error))
                return
            if poll.body is not None:
                self._read(poll.body)
            if self._rejected is not None:
                self._fail("rejected", str(self._rejected))
                return
            self._good(poll)

    def _read(self, body: bytes) -> None:
        try:
            self._document = parse(body, self._api_version)
            self._rejected = None
            self._count_flaws(self._document.flaws)
        except DocumentError as error:
            self._rejected = error

    def _count_flaws(self, flaws: Iterable[Flaw]) -> None:
        for flaw in flaws:
            self.figures.flaws[flaw.reason] = self.figures.flaws.get(flaw.reason, 0) + 1
            log.warning(
                "event %s: %s cannot be read%s",
                flaw.event_id,
                flaw.reason,
                ", it is left as it was" if flaw.rejected else "",
            )

    def _fail(self, reason: str, detail: str) -> None:
        self.figures.polls[reason] += 1
        if reason == "rejected" and self._rejected is not None:
            self.figures.documents_rejected[self._rejected.reason] += 1
        if self._trouble != reason:
            log.warning("IMDS: %s; what was known is kept, and asked again", detail)
            self._trouble = reason

    def _good(self, poll: Poll) -> None:
        if self._trouble is not None:
            log.info("IMDS answers again")
            self._trouble = None
        self.figures.polls["changed" if poll.body is not None else "unchanged"] += 1
        now = now_utc()
        moment, first = self._moment(now, poll.lag), self.last_good is None
        tracked = self._memory.tracked
        if self._document is not None and (poll.body is not None or tracked.interrupting):
            self._step(diff(tracked, self._document, moment), moment)
        self._saw(now)
        if first:  # this boot, and that the last stop is over, are to be known after a crash as well
            self._commit([])
        # last: who is told that the agent is ready may count on it that what was seen is written down
        self.last_good, self.figures.last_successful_poll = time.monotonic(), now.timestamp()
        self._elsewhere = False

    def _moment(self, now: datetime, lag: float) -> Observation:
        memory = self._memory
        rebooted = memory.boot_id not in ("", self._boot_id)
        silence = None if memory.seen is None else max(0.0, (now - memory.seen).total_seconds())
        if self.last_good is not None and silence is not None:
            # each clock may stand still over a freeze: the one that moved more is right
            silence = max(silence, time.monotonic() - self.last_good)
        gap: Gap | None = self.pulse.take() if self.pulse.running else Gap(lag, lag)
        if self.last_good is None:  # the first good poll of this process: it felt nothing before
            gap = self._gap_over_boot() if rebooted else None
        return Observation(now, self._vm_name, silence, rebooted, gap)

    def _gap_over_boot(self) -> Gap | None:
        """From the last beat before the boot to the first after it, if beats were written down until then."""
        memory = self._memory
        if memory.beat is None or not (memory.clean or memory.tracked.interrupting):
            return None
        return Gap(max(0.0, (self._began - memory.beat).total_seconds()), 0.0)

    def _step(self, step: DiffResult, moment: Observation) -> None:
        memory = self._memory
        if step.tracked == memory.tracked and not step.changes:
            return
        memory.tracked = step.tracked
        over = [key for key, one in memory.approvals.items() if one.state == "done" and key not in step.tracked.events]
        forgotten = set(over[:-KEPT_APPROVALS])
        memory.approvals = {key: one for key, one in memory.approvals.items() if key not in forgotten}
        self._saw(moment.time)
        told = [self._told(change) for change in step.changes]
        for change in step.changes:
            memory.totals.add(change)
        self._commit(told)
        for one in told:
            self._tell(one.record + b"\n")
        self._feel()
        self._say_moved()

    def _say_moved(self) -> None:
        for hear in self.moved:
            hear()

    def _saw(self, now: datetime) -> None:
        """A good answer was read, and this boot was alive to read it."""
        memory = self._memory
        memory.seen = memory.beat = now
        memory.boot_id, memory.clean = self._boot_id, False

    def _told(self, change: Change) -> StoredChange:
        line = Record.of(change, self.vm).line()
        return StoredChange(change, line, deliveries(change, line, self.routing, self._vm_name))

    def _commit(self, changes: list[StoredChange]) -> None:
        self._store.commit(self._memory, changes)
        if any(told.deliveries for told in changes):
            self.wake()
        self._note_store()

    def _note_store(self) -> None:
        self.figures.store_degraded = self._store.degraded is not None
        self.figures.store_damaged = self._store.damaged_files

    def _feel(self) -> None:
        if self._memory.tracked.expecting:
            self.pulse.start()
        else:
            self.pulse.stop()

    # ---- what the agent's main thread calls

    def use_api_version(self, api_version: str) -> None:
        """From now on documents are of this version, and what is known is old until the first of them has come."""
        self._api_version = self.figures.api_version = api_version
        self._elsewhere = True

    def set_vm(self, vm: Vm | None, name: str | None) -> None:
        """Take in who this VM is: IMDS's word, and a name of the configuration that overrides it."""
        with self._lock:
            known = vm or self._memory.vm
            self._vm_name = name or (known.name if known else None)
            if name and known is None:
                known = Vm(name=name)
            changed = known != self._memory.vm
            self._memory.vm = known
            self.figures.vm = _vm_labels(known, self._vm_name) if known else {}
            if changed and known is not None and known.name:
                log.info("this VM is %s", self._vm_name)
                self._commit([])
            self._rescope()

    def _rescope(self) -> None:
        """What is listed may be ours, now that we know our name."""
        if self._document is not None and self.last_good is not None:
            moment = Observation(now_utc(), self._vm_name, 0.0, rebooted=False)
            before, step = self._memory.tracked.events, diff(self._memory.tracked, self._document, moment)
            self._step(step, moment)
            # what was announced as if it might be ours is not said again
            lives = step.tracked.events.items()
            self._store.leave([key for key, life in lives if life.scope == "peer" and before[key].scope != "peer"])

    def keep(self) -> bool:
        """Once a second: write the beat down while an event of this VM is started. Returns whether it is."""
        with self._lock:
            interrupting, boot_id = self._memory.tracked.interrupting, self._memory.boot_id
        if interrupting and boot_id == self._boot_id:
            self._store.beat(now_utc(), self._boot_id)
        return interrupting

    def heartbeat(self, sink: str, interval: float) -> None:
        """Have a sink told that this VM is watched, if it is known which one."""
        with self._lock:
            name, now = self._vm_name, now_utc()
            if name is None:
                return
            content = Heartbeat.of(self.vm, len(self._memory.tracked.events), self.figures.version, now)
        self._store.put([heartbeat_delivery(sink, name, content.line(), now.timestamp(), interval)])
        self.wake()

    # ---- what the approver calls

    def listed(self) -> "ListedEvents":
        """What is known now, and how far its approvals are."""
        with self._lock:
            memory, now = self._memory, now_utc()
            return ListedEvents(
                lives=memory.tracked.events,
                attempts=memory.approvals,
                where=ApprovalContext(now, self._vm_name, memory.tracked.incarnation or 0),
                fresh=self._is_fresh(now),
                flawed=frozenset(flaw.event_id.casefold() for flaw in self._flaws if flaw.event_id is not None),
            )

    def _is_fresh(self, now: datetime) -> bool:
        last = self.figures.last_successful_poll
        if self.last_good is None or last is None or self._elsewhere or self._trouble is not None:
            return False
        # either clock may have stood still over a freeze: the one that moved more is right
        return max(time.monotonic() - self.last_good, now.timestamp() - last) <= WATCHED

    def note(self, attempt: ApprovalAttempt, change: Change | None = None) -> bool:
        """Write down how far an approval is, and the record of it; returns whether it is on the disk."""
        with self._lock:
            memory, key = self._memory, attempt.life.event.key
            memory.approvals = {**memory.approvals, key: attempt}
            told = [self._told(change)] if change is not None else []
            if change is not None:
                memory.totals.add(change)
            self._commit(told)
            for one in told:
                self._tell(one.record + b"\n")
                self._say_moved()
            return self._store.degraded is None

    def mend(self) -> None:
        """Try to write what could not be written."""
        self._store.retry()
        with self._lock:
            self._note_store()

    def stop(self) -> None:
        """Write down that the watch ended in order, and when."""
        self.pulse.stop()
        with self._lock:
            if self.last_good is not None:
                self._memory.clean, self._memory.beat = True, now_utc()
                self._commit([])

    # ---- what others look at

    @property
    def expecting(self) -> bool:
        """An event that may hit this VM is listed."""
        return self._memory.tracked.expecting

    @property
    def trouble(self) -> str | None:
        """Why the last answer of IMDS was no good; ``None`` when it was."""
        return self._trouble

    @property
    def unreadable(self) -> int:
        """How many listed events cannot be read: nobody knows what they are."""
        return sum(flaw.rejected for flaw in self._flaws)

    @property
    def _flaws(self) -> tuple[Flaw, ...]:
        return self._document.flaws if self._document is not None else ()

    @property
    def listed_events(self) -> int:
        """How many events are listed."""
        return len(self._memory.tracked.events)

    @property
    def vm(self) -> Vm | None:
        """Who this VM is, as far as it is known, with the configured name."""
        vm = self._memory.vm
        return msgspec.structs.replace(vm, name=self._vm_name) if vm and self._vm_name else vm

    def families(self, overdue: float, *more: Callable[[Snapshot], Iterable[Family]]) -> list[Family]:
        """All samples of this moment, and what ``more`` make of it.

        ``overdue``: seconds since the next beat was due, negative before it.
        """
        with self._lock:
            self.figures.beat_lag = max(self.figures.beat_lag, overdue)
            view = Snapshot(
                tracked=self._memory.tracked,
                totals=self._memory.totals,
                figures=self.figures,
                now=now_utc(),
                outbox=self.outbox(),
                sinks=tuple(self.routing.sinks),
                rules=self.rules,
            )
            return [family for source in (samples, *more) for family in source(view)]

    def pending(self) -> PendingView:
        """What is listed now, as ``/api/v1/events`` answers it."""
        with self._lock:
            now, memory, last, listed = now_utc(), self._memory, self.figures.last_successful_poll, self.listed()
            return PendingView(
                incarnation=memory.tracked.incarnation,
                last_successful_poll=None if last is None else datetime.fromtimestamp(last, UTC),
                vm=self.vm,
                unreadable=self.unreadable,
                events=tuple(
                    PendingEvent.of(life, now, self.preview(life, listed)) for life in memory.tracked.events.values()
                ),
            )


class ListedEvents(Struct, frozen=True):
    """What the approver decides on."""

    lives: dict[str, TrackedEvent]
    attempts: dict[str, ApprovalAttempt]
    where: ApprovalContext
    fresh: bool  # IMDS has just said so: nothing is approved on old knowledge
    flawed: frozenset[str]  # events of which a part could not be read, by their keys

    def life(self, key: str) -> TrackedEvent | None:
        """A listed event that was read at the last look, if there is one."""
        life = self.lives.get(key)
        return life if life is not None and life.unread_since is None else None


def _vm_labels(vm: Vm, name: str | None) -> dict[str, str]:
    fields = msgspec.structs.asdict(vm)
    return {label: str(value) for label, value in fields.items() if isinstance(value, str)} | {"name": name or vm.name}
