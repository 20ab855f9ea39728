"""``Tracker`` follows the document of IMDS: bytes in, changes out to ``AgentState``.

The polling thread alone calls it.
"""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from math import inf
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.agent.freeze import FreezeMeter
from notbefore.agent.state import AgentState, PollStatus, name_of
from notbefore.core.approval import without_old
from notbefore.core.change import Change
from notbefore.core.clock import Gap, Instant, believable, credible, elapsed, silence
from notbefore.core.document import Document, Flaw, parse
from notbefore.core.lifecycle import as_another_vm, diff, with_scopes
from notbefore.core.record import Vm
from notbefore.core.tracked import Observation, Tracked
from notbefore.errors import DocumentError, ImdsError
from notbefore.metrics.totals import PollFigures, increased
from notbefore.store.file import StoredState
from notbefore.store.store import Store

MAX_LOGGED: Final = 10  # EventIds in a log line
DATE_CHECK: Final = 60.0  # seconds between two checks; checking each one would be a third of a poll's cost
NAME_PATIENCE: Final = 10.0  # seconds: a Preempt has 30 s of notice

log = logging.getLogger("notbefore.agent.tracker")


class Poll(Struct, frozen=True):
    """One poll: a new ``body``, nothing new (``body`` and ``error`` are None), or an error."""

    lag: float  # seconds by which the poll began late, on the clock since the boot
    duration: float  # seconds until the answer or the error
    body: bytes | None = None
    error: ImdsError | None = None
    date: str = ""  # the answer's ``Date`` header (IMDS's clock), unparsed
    wall_lag: float = 0.0  # the same on the wall clock: in a freeze one of the clocks may stop


class Tracker:
    """Compares each new document with the state, and keeps how well the time between was watched.

    The first comparison waits for the identity of this VM, ``NAME_PATIENCE`` at most: after a boot the disk may be
    another VM's. Until then no answer counts as one.
    """

    def __init__(self, state: AgentState, store: Store, freeze_meter: FreezeMeter) -> None:
        self._state = state
        self._store = store
        self._clock = clock = state.clock
        self._freeze_meter = freeze_meter
        self._started = clock.boot_time()
        self._interval = 1.0  # seconds between polls
        self._source = ("", "")  # the endpoint, and the api-version of its documents
        self._document: Document | DocumentError | None = None  # IMDS's present document, or why it is not one
        self._logged_vm = state.snapshot.vm
        self._first_answer: float | None = None  # seconds since the boot
        self._checked: Instant | None = None  # when ``Date`` was last checked; without ``date`` if it was not believed
        self._expected: Tracked | None = None  # the next two are computed from it, only when it changes
        self._each_counts = False  # an unchanged document matters too: for an interruption, or for unreadable events
        self._imminent_at = inf  # seconds since the boot

    def handle(self, poll: Poll) -> None:
        """Handle one poll: count it, read its document, and commit what it changes."""
        if poll.body is not None:
            try:
                self._document = parse(poll.body)
            except DocumentError as error:
                self._document = error
        if poll.error is not None:
            self._failed(poll, poll.error.reason, str(poll.error))
        elif isinstance(self._document, DocumentError):
            self._failed(poll, "rejected", str(self._document), self._document.reason)
        else:
            self._answered(poll, self._document)

    def use(self, endpoint: str, api_version: str, interval: float = 1.0) -> None:
        """Expect documents from this endpoint in this version, each ``interval`` seconds, from now on.

        If the endpoint or the version is another than before, the known state is outdated until the first answer.
        """
        self._interval = interval
        status, source = self._state.snapshot.poll, (endpoint, api_version)
        self._state.publish(replace(status, outdated=status.outdated or source != self._source))
        self._source = source

    def _failed(self, poll: Poll, reason: str, detail: str, rejection: str | None = None) -> None:
        status = self._state.snapshot.poll
        figures = status.figures.plus(reason, poll.lag, poll.duration)
        if rejection is not None:
            figures = replace(figures, documents_rejected=increased(figures.documents_rejected, rejection))
        if status.failure != reason:
            log.warning("IMDS: %s; the agent asks again, and keeps the last known state", detail)
        self._state.publish(replace(status, figures=figures, failure=reason))

    def _answered(self, poll: Poll, document: Document | None) -> None:
        last, now = self._state.snapshot.poll, self._clock.read()
        if last.failure is not None:
            log.info("IMDS answers again")
        figures = last.figures.plus("changed" if poll.body is not None else "unchanged", poll.lag, poll.duration)
        if poll.body is not None and document is not None:
            figures = _with_flaws(figures, document.flaws)
        self._first_answer = now.uptime if self._first_answer is None else self._first_answer
        unnamed = last.answered is None and self._state.snapshot.vm_name is None
        if unnamed and now.uptime - self._first_answer < NAME_PATIENCE:
            self._state.publish(replace(last, figures=figures, failure=None))
            return
        # since the last good answer: the freeze meter's gap, or the lateness of the poll if the meter does not run
        gap = self._freeze_meter.take() if self._freeze_meter.running else Gap(poll.wall_lag, poll.lag)
        date = self._believed_date(now, poll.date, changed=poll.body is not None)
        tracked = self._state.snapshot.state.tracked
        self._expect(tracked, now, date)
        if document is None or (poll.body is None and last.answered is not None and not self._each_counts):
            self._state.publish(PollStatus(figures, now, date, flaws=last.flaws))
            return
        at = now.dated(date)

        def step(state: StoredState) -> tuple[StoredState, Sequence[Change]] | None:
            compared = diff(state.tracked, document, self._observation(state, at, gap))
            # the first answer is always stored: it has this boot's id, and no clean stop, in case a crash follows
            if compared.tracked == state.tracked and not compared.changes and last.answered is not None:
                return None
            approvals = without_old(state.approvals, compared.tracked)
            return replace(state, tracked=compared.tracked, approvals=approvals), compared.changes

        self._state.commit(step, PollStatus(figures, now, date, flaws=document.flaws))
        self._expect(self._state.snapshot.state.tracked, now, date)

    def _believed_date(self, now: Instant, date: str, *, changed: bool) -> str:
        """The ``Date`` header of an answer; empty if it cannot be right.

        After one was believed, the next check is at a changed document, or ``DATE_CHECK`` seconds later.
        """
        checked = self._checked
        if checked and checked.date and not changed and now.uptime - checked.uptime < DATE_CHECK:
            return date
        at = now.dated(date)
        if credible(at, checked or self._state.snapshot.state.seen):
            self._checked = at
            return date
        self._checked = replace(at, date=None)
        if checked is None or checked.date is not None:  # once, not at each answer
            log.warning(
                "IMDS's Date (%s) is more than a day off from this VM's clocks, and is not believed: no notice is"
                " measured. Is this VM's clock right?",
                date,
            )
        return ""

    def _expect(self, tracked: Tracked, now: Instant, date: str) -> None:
        """Run the freeze meter from shortly before an event may start until it is over."""
        if tracked is not self._expected:
            at, begins = now.dated(date), tracked.imminent_from
            self._expected, self._each_counts = tracked, tracked.interrupting or bool(tracked.unread)
            self._imminent_at = now.uptime + (begins - (at.date or at.wall)).total_seconds() if begins else inf
        self._freeze_meter.switch(on=now.uptime >= self._imminent_at)

    def _observation(self, state: StoredState, at: Instant, gap: Gap) -> Observation:
        poll, noted = self._state.snapshot.poll, self._state.noted
        rebooted = state.seen is not None and state.seen.boot != at.boot
        elsewhere = poll.outdated and poll.answered is not None
        seen, measured = poll.seen, None
        last = seen or state.seen
        if seen is not None:
            measured = believable(gap, seen, at)
        elif rebooted and noted is not None:  # from when the machine last ran before the boot, to this process's start
            between = elapsed(noted, at)
            measured = max(0.0, between - (at.uptime - self._started)) if between is not None else None
        return Observation(
            at=at,
            vm=name_of(self._state.vm_of(state)),
            silence=silence(last, at) if last is not None and not elsewhere else None,
            rebooted=rebooted,
            last=last.date if last is not None else None,
            down=_down(noted, at) if rebooted else None,
            gap=measured,
            interval=self._interval,
            elsewhere=elsewhere,
        )

    def identify(self, vm: Vm | None) -> None:
        """Use the identity of this VM from IMDS; ``None``: only the configured name may have changed.

        After a boot the state may be another VM's; it is then dropped before the first comparison. With the name known,
        the scopes of the listed events are set again. There is no other change, because no answer was read.
        """
        before = self._state.snapshot

        def step(state: StoredState) -> tuple[StoredState, Sequence[Change]] | None:
            identified = replace(state, vm=vm or state.vm)
            owner = self._state.vm_of(identified)
            booted = state.seen is not None and state.seen.boot != self._clock.boot_id
            if before.poll.answered is not None:
                identified = replace(identified, tracked=with_scopes(state.tracked, name_of(owner)))
            elif booted and not _is_same(state.seen_by, owner):
                identified = replace(identified, tracked=_forgotten(state.tracked), seen_by=owner)
            return (identified, ()) if identified != state else None

        self._state.commit(step)
        after, known = self._state.snapshot, before.state.tracked.events
        # stop repeating events that were announced because they might have affected this VM
        others = [one for key, one in after.state.tracked.events.items() if one.scope == "peer" != known[key].scope]
        with self._store.opened() as (outbox, now):
            outbox.no_longer_affected([one.event.key for one in others], now)
        if after.vm != self._logged_vm and after.vm is not None:
            log.info("this VM is %s", after.vm.name)
        self._logged_vm = after.vm


def _with_flaws(figures: PollFigures, flaws: Iterable[Flaw]) -> PollFigures:
    """Return the figures with the flaws of a new document added; log each flaw."""
    counts = figures.flaws
    for flaw in flaws:
        counts = increased(counts, flaw.reason)
        which = f"event {flaw.event_id}" if flaw.event_id is not None else "an event without a readable id"
        extent = f"({flaw.reason}): what was known of it is kept" if flaw.rejected else f"in full ({flaw.reason})"
        log.warning("%s cannot be read %s", which, extent)
    return replace(figures, flaws=counts)


def _down(noted: Instant | None, at: Instant) -> datetime | None:
    """When the machine was down at the latest, by IMDS's clock; ``None`` if IMDS gives no time."""
    if at.date is None:
        return None
    booted = at.date - timedelta(seconds=at.uptime)
    return min(booted, noted.date) if noted is not None and noted.date is not None else booted


def _is_same(owner: Vm | None, vm: Vm | None) -> bool:
    """Whether the state that ``owner`` stored is this VM's. It is, unless an id or a name differs."""
    if owner is None or vm is None:
        return True
    if owner.vm_id and vm.vm_id:
        return owner.vm_id.casefold() == vm.vm_id.casefold()
    return owner.name.casefold() == vm.name.casefold()


def _forgotten(tracked: Tracked) -> Tracked:
    """Return what to keep of another VM's state, and log its events."""
    events = [known.event.event_id for known in tracked.events.values()]
    if events:
        names = ", ".join(events[:MAX_LOGGED])
        log.warning("this disk was another VM's: %d events of that VM are forgotten (%s)", len(events), names)
    return as_another_vm(tracked)
