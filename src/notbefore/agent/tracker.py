"""``Tracker`` follows the document of IMDS: bytes in, changes out to ``AgentState``.

The polling thread calls ``handle``, the thread that asks who this VM is calls ``identify``.
"""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from msgspec.structs import replace

from notbefore.agent.approval_log import without_old
from notbefore.agent.freeze import FreezeMeter
from notbefore.agent.state import AgentState, PollStatus, name_of
from notbefore.core.change import Change, Gap
from notbefore.core.clock import Instant, believable, elapsed, silence
from notbefore.core.document import Document, Flaw, parse
from notbefore.core.lifecycle import DiffResult, attributed, diff, with_scopes
from notbefore.core.record import Vm
from notbefore.core.tracked import Observation, Tracked
from notbefore.errors import DocumentError
from notbefore.imds.poller import Poll
from notbefore.metrics.process import PollFigures
from notbefore.metrics.totals import increased
from notbefore.process.clock import ClockReading
from notbefore.store.state import Store
from notbefore.store.state_file import StoredState

MAX_LOGGED: Final = 10  # EventIds in a line of the log
COMMIT_PATIENCE: Final = 0.3  # seconds: a disk that hangs does not keep IMDS from being asked

log = logging.getLogger("notbefore.agent.tracker")


class Tracker:
    """What is known of the present document, and how it was watched."""

    def __init__(self, state: AgentState, store: Store, freeze_meter: FreezeMeter) -> None:
        self._state = state
        self._store = store
        self._clock = clock = state.clock
        self._freeze_meter = freeze_meter
        self._started = clock.read()
        self._interval = 1.0  # seconds between polls
        self._document: Document | None = None
        self._rejected: DocumentError | None = None  # why the body that IMDS gives now is no document
        self._logged_vm = state.snapshot.vm
        self._expected: Tracked | None = None  # what `_imminent_from` was computed of, once and not each second
        self._imminent_from: datetime | None = None

    # ---- what the polling thread calls

    def handle(self, poll: Poll) -> None:
        """Take in one poll: count it, read its document, and commit what it changes."""
        if poll.error is not None:
            self._failed(poll, poll.error.reason, str(poll.error))
            return
        if poll.body is not None:
            self._read(poll.body)
        if self._rejected is not None:
            self._failed(poll, "rejected", str(self._rejected), self._rejected.reason)
        else:
            self._answered(poll)

    def use_api_version(self, api_version: str, interval: float = 1.0) -> None:
        """From now on documents are of this version, and asked for each ``interval`` seconds.

        What is known is outdated until the first of them has come.
        """
        self._interval = interval
        status = self._state.poll
        figures = replace(status.figures, api_version=api_version)
        self._state.publish(replace(status, figures=figures, outdated=True))

    def _read(self, body: bytes) -> None:
        try:
            self._document = parse(body, self._state.poll.figures.api_version)
            self._rejected = None
            _log_flaws(self._document.flaws)
        except DocumentError as error:
            self._rejected = error

    def _failed(self, poll: Poll, reason: str, detail: str, rejection: str | None = None) -> None:
        status = self._state.poll
        figures = status.figures.plus(reason, poll.lag, poll.duration)
        if rejection is not None:
            figures = replace(figures, documents_rejected=increased(figures.documents_rejected, rejection))
        if status.failure != reason:
            log.warning("IMDS: %s; asking again, and going on with what is known", detail)
        self._state.publish(replace(status, figures=figures, failure=reason))

    def _answered(self, poll: Poll) -> None:
        snapshot, document, now = self._state.snapshot, self._document, self._clock.read()
        last = self._state.poll
        if last.failure is not None:
            log.info("IMDS answers again")
        # since the last good answer: what the freeze meter measured; while it does not run, how late the poll was
        gap = self._freeze_meter.take() if self._freeze_meter.running else Gap(poll.wall_lag, poll.lag)
        result = "changed" if poll.body is not None else "unchanged"
        figures = last.figures.plus(result, poll.lag, poll.duration)
        # while an event of this VM is started, each poll may lengthen the interruption
        tracked = snapshot.state.tracked
        if document is None or (poll.body is None and not tracked.interrupting):
            self._state.publish(PollStatus(figures, now, poll.date, None, False, last.flaws))  # noqa: FBT003 - not outdated; by position it is cheaper, and this is done each second
            self._expect(tracked, now, poll.date)
            return
        if poll.body is not None:
            figures = _with_flaws(figures, document.flaws)
        status = PollStatus(figures, now, poll.date, flaws=document.flaws)

        def step(state: StoredState) -> tuple[StoredState, Sequence[Change]] | None:
            observation = self._observation(state, self._clock.instant(now, poll.date), gap)
            known = DiffResult(state.tracked) if observation.rebooted else self._attributed(state)
            compared = diff(known.tracked, document, observation)
            _log_foreign(compared)
            made = self._next(state, compared.tracked, (*known.changes, *compared.changes))
            # at the first answer this boot is written down, and that the last stop is over: a crash may follow
            return made or ((state, ()) if last.answered is None else None)

        self._state.commit(step, status, COMMIT_PATIENCE)
        self._expect(self._state.snapshot.state.tracked, now, poll.date)

    def _expect(self, tracked: Tracked, now: ClockReading, date: str) -> None:
        """Measure freezes closely from shortly before an event may start until it is over."""
        if tracked is not self._expected:
            self._expected, self._imminent_from = tracked, tracked.imminent_from
        imminent = False
        if self._imminent_from is not None:
            at = self._clock.instant(now, date)
            imminent = (at.date or at.wall) >= self._imminent_from
        self._freeze_meter.switch(on=imminent)

    def _observation(self, state: StoredState, at: Instant, gap: Gap) -> Observation:
        poll, vm = self._state.poll, self._state.vm_of(state)
        rebooted = state.seen is not None and state.seen.boot != at.boot
        last, measured = state.seen, None
        if poll.answered is not None:
            last = self._clock.instant(poll.answered, poll.date)
            measured = believable(gap, last, at)
        elif rebooted:  # the first good answer of this process, which measured no gap before it
            measured = self._gap_over_boot(state, at)
        return Observation(
            at=at,
            vm=name_of(vm),
            silence=silence(last, at) if last is not None else None,
            rebooted=rebooted,
            last=last.date if last is not None else None,
            down=_down(state, at) if rebooted else None,
            own=_is_own(state, vm) if rebooted else True,
            gap=measured,
            interval=self._interval,
        )

    def _gap_over_boot(self, state: StoredState, at: Instant) -> Gap | None:
        """From when the machine was last known to run before the boot to the start of this process, if that was noted.

        If another process was started in between, and ended before IMDS answered it, the VM ran in between as well.
        """
        if self._state.was_unanswered or state.last_running is None or not (state.clean or state.tracked.interrupting):
            return None
        between = elapsed(state.last_running, at)
        since_start = at.uptime - self._started.boot
        return Gap(max(0.0, between - since_start), 0.0) if between is not None else None

    def _attributed(self, state: StoredState) -> DiffResult:
        """What became of the events that were gone over the boot, where it is known whose they were."""
        vm = self._state.vm_of(state)
        own = _is_same(state.seen_by, vm)
        if state.tracked.boot is None or own is None:
            return DiffResult(state.tracked)
        result = attributed(state.tracked, name_of(vm), own=own)
        _log_foreign(result)
        return result

    def _next(
        self, state: StoredState, tracked: Tracked, changes: Sequence[Change]
    ) -> tuple[StoredState, Sequence[Change]] | None:
        if tracked == state.tracked and not changes:
            return None
        return replace(state, tracked=tracked, approvals=without_old(state.approvals, tracked)), changes

    # ---- what the thread that asks who this VM is calls

    def identify(self, vm: Vm | None) -> None:
        """Take in who this VM is, as IMDS says; ``None``: the configuration may have another name for it.

        What is listed may be this VM's, or another's, now that the name is known; so may be what was gone over a boot.
        No answer about events was read: nothing else is claimed.
        """
        others: list[str] = []

        def step(state: StoredState) -> tuple[StoredState, Sequence[Change]] | None:
            identified = replace(state, vm=vm or state.vm)
            name = name_of(self._state.vm_of(identified))
            if self._state.poll.answered is None:  # what is stored may be another VM's: see ``diff``
                return (identified, ()) if identified != state else None
            before = with_scopes(state.tracked, name)
            others.extend(
                key for key, one in before.events.items() if one.scope == "peer" != state.tracked.events[key].scope
            )
            seen = Observation(self._clock.instant(self._clock.read()), name, silence=None, gap=None)
            if vm is not None and _is_other(state.vm, vm) and self._document is not None:
                # it goes on as another VM, without a boot
                result = diff(before, self._document, replace(seen, own=False))
                _log_foreign(result)
                return replace(identified, tracked=result.tracked), result.changes
            result = self._attributed(replace(identified, tracked=before))
            changes = result.changes
            if result.tracked.boot != before.boot and self._document is not None:
                # what was another VM's is new to this one; what was this VM's may have changed over the boot
                result = diff(result.tracked, self._document, seen)
                changes = (*changes, *result.changes)
            made = self._next(identified, result.tracked, changes)
            return made or ((identified, ()) if identified != state else None)

        self._state.commit(step)
        self._store.no_longer_affected(others)  # what was announced as if it might be this VM's is not repeated
        vm = self._state.snapshot.vm
        if vm != self._logged_vm and vm is not None:
            log.info("this VM is %s", vm.name)
            conflict = self._state.snapshot.name_conflict(vm.name)
            if conflict:
                log.warning("%s; nothing is approved while they differ", conflict)
        self._logged_vm = vm


def _with_flaws(figures: PollFigures, flaws: Iterable[Flaw]) -> PollFigures:
    counts = figures.flaws
    for flaw in flaws:
        counts = increased(counts, flaw.reason)
    return replace(figures, flaws=counts)


def _down(state: StoredState, at: Instant) -> datetime | None:
    """When the machine had gone down at the latest, by IMDS's clock; ``None`` where IMDS gives no time."""
    if at.date is None:
        return None
    booted = at.date - timedelta(seconds=at.uptime)
    noted = state.last_running if state.clean or state.tracked.interrupting else None
    return min(booted, noted.date) if noted is not None and noted.date is not None else booted


def _is_own(state: StoredState, vm: Vm | None) -> bool | None:
    """Whether what is stored is of this VM; ``None`` while it is not known which VM this is."""
    if state.tracked.boot is not None:  # during the whole boot before it was not known which VM that was
        return False
    return _is_same(state.seen_by, vm)


def _is_same(one: Vm | None, other: Vm | None) -> bool | None:
    """Whether both are the same VM; ``None`` while it is not known who the other one is.

    A state whose VM was never known is never taken for this one's.
    """
    if one is None:
        return False
    if other is None:
        return None
    if one.vm_id and other.vm_id:
        return one.vm_id.casefold() == other.vm_id.casefold()
    return one.name.casefold() == other.name.casefold()


def _is_other(known: Vm | None, vm: Vm) -> bool:
    """IMDS has named another VM before."""
    return bool(known and known.vm_id and vm.vm_id) and not _is_same(known, vm)


def _log_foreign(result: DiffResult) -> None:
    if result.foreign:
        log.warning(
            "this disk was another VM's: %d events of that VM are forgotten (%s)",
            len(result.foreign),
            ", ".join(result.foreign[:MAX_LOGGED]),
        )


def _log_flaws(flaws: Iterable[Flaw]) -> None:
    for flaw in flaws:
        which = f"event {flaw.event_id}" if flaw.event_id is not None else "an event without a readable id"
        if flaw.rejected:
            log.warning("%s cannot be read (%s): what was known of it is kept", which, flaw.reason)
        else:
            log.warning("%s cannot be read in full (%s)", which, flaw.reason)
