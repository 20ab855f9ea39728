"""``Tracker`` follows the document of IMDS: bytes in, changes out to ``AgentState``.

The polling thread alone calls it.
"""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from notbefore.agent.freeze import FreezeMeter, MeasuredGap, PollGaps
from notbefore.agent.state import AgentSnapshot, AgentState, PollStatus, name_of
from notbefore.core.clock import Gap, Instant, believable, credible, elapsed, silence
from notbefore.core.document import EMPTY_BODIES, Document, Flaw, parse
from notbefore.core.lifecycle import as_another_vm, diff, with_scopes
from notbefore.core.record import Vm
from notbefore.core.tracked import Observation, Tracked
from notbefore.errors import DocumentError, ImdsError
from notbefore.metrics.totals import PollFigures, increased
from notbefore.store.store import Store

MAX_LOGGED: Final = 10  # EventIds in a log line
NAME_PATIENCE: Final = 10.0  # seconds: a Preempt has 30 s of notice

log = logging.getLogger("notbefore.agent.tracker")


class Poll(Struct, frozen=True):
    """One poll: a new ``body``, nothing new (``body`` and ``error`` are None), or an error."""

    lag: float  # seconds by which the poll began late, on the clock since the boot
    duration: float  # seconds until the answer or the error
    body: bytes | None = None
    error: ImdsError | None = None
    date: str = ""  # the answer's ``Date`` header (IMDS's clock), unparsed
    # ``lag`` on the wall clock: in a freeze one of the clocks may stop
    wall_lag: float = 0.0
    asked: Instant | None = None  # when the request was sent; None: just now
    # seconds from the previous request until the polling waited again
    busy: float = 0.0


class Source(NamedTuple):
    """The source of documents."""

    endpoint: str
    api_version: str


class Tracker:
    """Compares each new document with the state, and notes how well the time between was watched.

    The first comparison waits for the identity of this VM, at most ``NAME_PATIENCE`` seconds: after
    a boot the disk may be another VM's. Until then, answers do not count.
    """

    def __init__(self, state: AgentState, store: Store, freeze_meter: FreezeMeter) -> None:
        self._state = state
        self._store = store
        self._clock = state.clock
        self._freeze_meter = freeze_meter
        self._gaps = PollGaps(freeze_meter)
        self._started = state.clock.boot_time()
        self._interval = 1.0  # seconds between polls
        self._source = Source("", "")
        # IMDS's present document, or why it is not one
        self._document: Document | DocumentError | None = None
        self._empty_bodies = 0  # in a row
        self._logged_vm = state.snapshot.vm
        self._first_answer: float | None = None  # seconds since the boot
        self._dated: Instant | None = None  # the last answer whose ``Date`` was believed
        self._has_wrong_date = False  # the ``Date`` of the last answer was not believed

    def use(self, endpoint: str, api_version: str, interval: float = 1.0) -> None:
        """Expect documents from this endpoint in this version, every ``interval`` seconds.

        If the endpoint or the version is another one, the known state is outdated until the first
        answer.
        """
        source = Source(endpoint, api_version)
        status = self._state.snapshot.poll
        outdated = status.outdated or source != self._source
        self._interval = interval
        self._source = source
        self._state.publish(replace(status, outdated=outdated))

    # ---- one poll

    def handle(self, poll: Poll) -> None:
        """Handle one poll: count it, read its document, and commit what it changes."""
        if poll.body is not None:
            self._document = _read(poll.body)
        poll = self._count_empty_bodies(poll)

        self._gaps.add(Gap(poll.wall_lag, poll.lag), poll.busy)
        figures = self._state.snapshot.poll.figures
        if poll.error is not None:
            self._handle_failure(poll, poll.error.reason, str(poll.error), figures)
        elif isinstance(self._document, DocumentError):
            rejected = increased(figures.documents_rejected, self._document.reason)
            figures = replace(figures, documents_rejected=rejected)
            self._handle_failure(poll, "rejected", str(self._document), figures)
        else:
            self._handle_answer(poll, self._document)

    def _count_empty_bodies(self, poll: Poll) -> Poll:
        """Count empty bodies; ``EMPTY_BODIES`` in a row are a document that lists nothing.

        Returns the poll. The poll that completes the row brings that document as a new one.
        """
        document = self._document
        is_empty = isinstance(document, DocumentError) and document.reason == "empty"
        if poll.error is not None or (poll.body is not None and not is_empty):
            self._empty_bodies = 0
        if poll.error is not None or not is_empty:
            return poll

        self._empty_bodies += 1
        if self._empty_bodies < EMPTY_BODIES:
            return poll
        if self._empty_bodies == EMPTY_BODIES:
            log.info("IMDS sends empty answers: this means that no event is scheduled")
        incarnation = self._state.snapshot.state.tracked.incarnation
        self._document = Document(incarnation or 0, (), was_empty_body=True)
        return replace(poll, body=b"")

    def _handle_failure(self, poll: Poll, reason: str, detail: str, figures: PollFigures) -> None:
        status = self._state.snapshot.poll
        if status.failure != reason:
            log.warning("IMDS: %s; the agent asks again, and keeps the last known state", detail)
        figures = figures.plus(reason, poll.lag, poll.duration)
        self._state.publish(replace(status, figures=figures, failure=reason))

    def _handle_answer(self, poll: Poll, document: Document | None) -> None:
        last = self._state.snapshot.poll
        now = self._clock.read()
        is_new = poll.body is not None
        is_first = last.answered is None
        if last.failure is not None:
            log.info("IMDS answers again")

        figures = _with_answer(last.figures, poll, document)

        if self._waits_for_name(now):
            self._state.publish(replace(last, figures=figures, failure=None))
            return

        asked = poll.asked or now
        gap = self._gaps.take(asked, now)
        at = self._dated_answer(now, poll.date)
        self._switch_freeze_meter(at)

        status = PollStatus(
            figures=figures,
            answered=at,
            flaws=last.flaws,
            asked=replace(asked, date=at.date),
            api_version=self._source.api_version,
        )
        has_news = is_new or is_first or self._each_answer_counts()
        if document is None or not has_news:
            self._state.publish(status)
            return

        status = replace(status, flaws=document.flaws)
        self._compare(document, status, self._observation(at, gap))
        self._switch_freeze_meter(at)

    def _each_answer_counts(self) -> bool:
        """Whether an unchanged document matters too: for an interruption, or for unreadable
        events.
        """
        tracked = self._state.snapshot.state.tracked
        return tracked.interrupting or bool(tracked.unread)

    def _compare(self, document: Document, status: PollStatus, observation: Observation) -> None:
        """Compare a document with the tracked events, and commit what differs."""
        snapshot = self._state.snapshot
        tracked = snapshot.state.tracked
        compared = diff(tracked, document, observation)
        # the first answer is always stored: a crash may follow, and it has this boot's id
        is_first = snapshot.poll.answered is None
        if is_first or compared.changes or compared.tracked != tracked:
            self._state.track(compared.tracked, compared.changes, status)
        else:
            self._state.publish(status)

    def _waits_for_name(self, now: Instant) -> bool:
        """Whether the first comparison still waits for the name of this VM."""
        if self._first_answer is None:
            self._first_answer = now.uptime
        snapshot = self._state.snapshot
        if snapshot.poll.answered is not None or snapshot.vm_name is not None:
            return False
        return now.uptime - self._first_answer < NAME_PATIENCE

    def _dated_answer(self, now: Instant, header: str) -> Instant:
        """Return the moment of an answer with its ``Date``, unless that cannot be right."""
        at = now.dated(header)
        if credible(at, self._dated or self._state.snapshot.state.seen):
            self._has_wrong_date = False
            if at.date is not None:
                self._dated = at
            return at

        if not self._has_wrong_date:  # log it once, not at each answer
            log.warning(
                "IMDS's Date (%s) is more than a day off from this VM's clocks, and is not"
                " believed: no notice is measured. Is this VM's clock right?",
                header,
            )
        self._has_wrong_date = True
        return now

    def _switch_freeze_meter(self, at: Instant) -> None:
        """Run the freeze meter from shortly before an event may start until it ends."""
        imminent_from = self._state.snapshot.state.tracked.imminent_from
        is_imminent = imminent_from is not None and (at.date or at.wall) >= imminent_from
        self._freeze_meter.switch(on=is_imminent)

    # ---- how well the time since the last answer was watched

    def _observation(self, at: Instant, gap: MeasuredGap) -> Observation:
        snapshot = self._state.snapshot
        state = snapshot.state
        poll = snapshot.poll
        last = poll.asked or state.seen
        rebooted = state.seen is not None and state.seen.boot != at.boot
        is_restart = poll.answered is None
        # the events of a state without a version may have been read in this one
        previous_version = state.api_version or self._source.api_version
        elsewhere = poll.outdated
        if is_restart:
            elsewhere = previous_version > self._source.api_version

        unwatched = None
        if last is not None and not elsewhere:
            unwatched = silence(last, at)
        down = None
        if rebooted:
            down = _down(self._state.noted, at)
        last_date = None
        if last is not None:
            last_date = last.date
        return Observation(
            at=at,
            vm=name_of(self._state.vm_of(state)),
            silence=unwatched,
            rebooted=rebooted,
            last=last_date,
            down=down,
            gap=self._measured_gap(poll, at, gap, rebooted=rebooted),
            interval=self._interval,
            elsewhere=elsewhere,
            other_version=is_restart and previous_version != self._source.api_version,
        )

    def _measured_gap(
        self,
        poll: PollStatus,
        at: Instant,
        gap: MeasuredGap,
        *,
        rebooted: bool,
    ) -> float | None:
        """Return the seconds for which this VM stood still; ``None`` if they were not measured."""
        if poll.answered is not None:
            return gap.believed(believable(gap.longest, poll.answered, at))
        noted = self._state.noted
        if not rebooted or noted is None:
            return None

        # from when the machine last ran before the boot, to this process's start
        between = elapsed(noted, at)
        if between is None:
            return None
        return max(0.0, between - (at.uptime - self._started))

    # ---- the identity of this VM

    def identify(self, vm: Vm | None) -> None:
        """Use the identity of this VM from IMDS; ``None``: only the configured name may be new.

        After a boot the state may be another VM's; it is then dropped before the first comparison.
        With the name known, the scopes of the listed events are set again. Nothing else changes,
        because no answer was read.
        """
        before = self._state.snapshot
        state = replace(before.state, vm=vm or before.state.vm)
        owner = self._state.vm_of(state)
        booted = state.seen is not None and state.seen.boot != self._clock.boot_id

        if before.poll.answered is not None:
            self._state.identify(state.vm, with_scopes(state.tracked, name_of(owner)))
        elif booted and not _is_same(state.seen_by, owner):
            self._state.identify(state.vm, _forgotten(state.tracked), owner)
        else:
            self._state.identify(state.vm, state.tracked)

        after = self._state.snapshot
        self._end_repetitions(before, after)
        if after.vm is not None and after.vm != self._logged_vm:
            log.info("this VM is %s", after.vm.name)
        self._logged_vm = after.vm

    def _end_repetitions(self, before: AgentSnapshot, after: AgentSnapshot) -> None:
        """Stop repeating events that were announced because they might have affected this VM."""
        keys: list[str] = []
        for key, tracked in after.state.tracked.events.items():
            earlier = before.state.tracked.events[key]
            if tracked.scope == "peer" and earlier.scope != "peer":
                keys.append(tracked.event.key)
        with self._store.opened() as (outbox, now):
            outbox.no_longer_affected(keys, now)


def _read(body: bytes) -> Document | DocumentError:
    """Return the document in a body, or why it is none."""
    try:
        return parse(body)
    except DocumentError as error:
        return error


def _with_answer(figures: PollFigures, poll: Poll, document: Document | None) -> PollFigures:
    """Return the figures with one more answer; log the flaws of a new document."""
    if poll.body is None:
        return figures.plus("unchanged", poll.lag, poll.duration)
    figures = figures.plus("changed", poll.lag, poll.duration)
    if document is None:
        return figures
    return _with_flaws(figures, document.flaws)


def _with_flaws(figures: PollFigures, flaws: Iterable[Flaw]) -> PollFigures:
    """Return the figures with the flaws of a new document added; log each flaw."""
    counts = figures.flaws
    for flaw in flaws:
        counts = increased(counts, flaw.reason)
        event = "an event without a readable id"
        if flaw.event_id is not None:
            event = f"event {flaw.event_id}"
        extent = f"in full ({flaw.reason})"
        if flaw.rejected:
            extent = f"({flaw.reason}): what was known of it is kept"
        log.warning("%s cannot be read %s", event, extent)
    return replace(figures, flaws=counts)


def _down(noted: Instant | None, at: Instant) -> datetime | None:
    """Return when the machine was down at the latest, by IMDS's clock; ``None``: it is unknown."""
    if at.date is None:
        return None
    booted = at.date - timedelta(seconds=at.uptime)
    if noted is None or noted.date is None:
        return booted
    return min(booted, noted.date)


def _is_same(owner: Vm | None, vm: Vm | None) -> bool:
    """Whether ``owner``, which stored the state, is this VM: no known id or name differs."""
    if owner is None or vm is None:
        return True
    if owner.vm_id and vm.vm_id:
        return owner.vm_id.casefold() == vm.vm_id.casefold()
    return owner.name.casefold() == vm.name.casefold()


def _forgotten(tracked: Tracked) -> Tracked:
    """Return what to keep of another VM's state, and log its events."""
    ids = [tracked_event.event.event_id for tracked_event in tracked.events.values()]
    if ids:
        text = "this disk was another VM's: %d events of that VM are forgotten (%s)"
        log.warning(text, len(ids), ", ".join(ids[:MAX_LOGGED]))
    return as_another_vm(tracked)
