"""``Tracked``: the events that the agent tracks, and how well they were watched. Pure.

``PendingView``: these events in the form that ``/api/v1/events`` returns to the page and the
commands.
"""

import math
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Struct

from notbefore.core.change import Change, ChangeKind, Reason, Scope
from notbefore.core.clock import Instant, elapsed
from notbefore.core.document import STARTED, Event
from notbefore.core.event_types import event_type_of
from notbefore.core.record import Vm

WATCHED: Final = 15.0
"""The most seconds between two good answers for which the time between them counts as watched:
more than one late answer (10 s), and less than the shortest event that was seen (a Preempt has
30 s of notice)."""

# an event may start so many seconds before its NotBefore: clocks differ, Date is in seconds
IMMINENT: Final = 15.0
ALWAYS: Final = datetime.min.replace(tzinfo=UTC)  # a moment before any other


class Observation(Struct, frozen=True):
    """When the document was read, on which VM, and how well the time before it was watched."""

    at: Instant
    vm: str | None = None  # the name of this VM; None while it is not known
    silence: float | None = 0.0  # seconds since the last good answer; None if unknown
    rebooted: bool = False  # the machine was booted since the last good answer
    last: datetime | None = None  # the time of the last good answer, by IMDS's clock
    # when the machine was down at the latest, by IMDS's clock; None: unknown
    down: datetime | None = None
    # the longest delay since the last good answer, in seconds; None: not measured
    gap: float | None = 0.0
    interval: float = 1.0  # seconds between polls
    # the first answer of another endpoint or api-version after a reload, or of an older api-version
    # after a restart: it may leave out events that are still listed
    elsewhere: bool = False
    other_version: bool = False  # the last good answer was in another api-version

    @property
    def watched(self) -> bool:
        """Whether no event can have come and gone unseen since the last good answer."""
        return self.silence is not None and self.silence <= WATCHED and not self.rebooted


class TrackedEvent(Struct, frozen=True):
    """The known facts of one listed event."""

    event: Event  # as last read; a field that could not be read keeps its last value
    scope: Scope
    seen: Instant  # when it was first seen
    beginning_seen: bool  # the poll before did not list it
    start: Instant | None = None  # when it was first seen Started
    start_seen: bool = False  # the poll before did not list it as Started
    not_before: datetime | None = None  # the last known one
    # the longest delay while Started, in seconds; None: a part was not measured
    interruption: float | None = 0.0
    # how often each step happened: this distinguishes a change from its repetition
    steps: dict[str, int] = {}

    @property
    def first_seen(self) -> datetime:
        """When it was first seen, by the wall clock, UTC."""
        return self.seen.wall

    @property
    def started(self) -> datetime | None:
        """When it was first seen Started: see ``Instant.time``."""
        if self.start is None:
            return None
        return self.start.time

    @property
    def notice(self) -> float | None:
        """Seconds from the first sight to NotBefore; 0 without notice.

        ``None`` if the beginning was not seen.
        """
        if not self.beginning_seen:
            return None
        if self.start == self.seen:
            return 0.0
        if self.not_before is None or self.seen.date is None:
            return None
        # an event may still be Scheduled a moment after its NotBefore: notice is never negative
        return max(0.0, (self.not_before - self.seen.date).total_seconds())

    def seconds_to(self, now: datetime) -> float | None:
        """Return the seconds from ``now`` to NotBefore, negative after it.

        ``None`` without NotBefore, and for a started event.
        """
        if self.event.event_status == STARTED or self.event.not_before is None:
            return None
        return (self.event.not_before - now).total_seconds()

    def change(
        self, identity: str, kind: ChangeKind, reason: Reason, at: Instant, incarnation: int
    ) -> Change:
        """Return the change that led to this state.

        ``identity``: its id. ``at``: when it was seen.
        """
        ahead = None
        if self.event.event_status != STARTED and self.not_before is not None:
            # ``Instant.time``, because the wall clock of this VM may be hours off
            ahead = (self.not_before - at.time).total_seconds()
        scheduled_seconds = None
        if self.beginning_seen and self.start_seen and self.start is not None:
            scheduled_seconds = elapsed(self.seen, self.start)
        return Change(
            id=identity,
            kind=kind,
            reason=reason,
            time=at.wall,
            event=self.event,
            scope=self.scope,
            incarnation=incarnation,
            first_seen=self.first_seen,
            not_before=self.not_before,
            ahead_seconds=ahead,
            notice_seconds=self.notice,
            scheduled_seconds=scheduled_seconds,
        )

    @property
    def may_be_ours(self) -> bool:
        """Whether it affects this VM, or may: while that is unknown, freezes are measured as if it
        did. An advice affects none.
        """
        return self.scope != "peer" and not self.event.is_advice


class Tracked(Struct, frozen=True):
    """The agent's memory of the document: the listed events, and the steps of events that are
    gone.
    """

    events: dict[str, TrackedEvent] = {}
    departed: dict[str, dict[str, int]] = {}
    incarnation: int | None = None
    # keys of unreadable events in the last document; "": it may be any event
    unread: frozenset[str] = frozenset()

    @property
    def by_urgency(self) -> list[TrackedEvent]:
        """Started events first, then by NotBefore; events without NotBefore last."""
        return sorted(self.events.values(), key=_urgency)

    @property
    def interrupting(self) -> bool:
        """Whether an event that affects this VM, or may, is Started: delays have to be measured."""
        ours = [tracked for tracked in self.events.values() if tracked.may_be_ours]
        return any(tracked.event.has_started for tracked in ours)

    @property
    def imminent_from(self) -> datetime | None:
        """When an event that affects this VM, or may, can start at the earliest: ``IMMINENT``
        seconds before NotBefore.

        ``ALWAYS`` if one is Started, or has no NotBefore; ``None`` if none is listed.
        """
        ours = [tracked for tracked in self.events.values() if tracked.may_be_ours]
        earliest_starts = [_earliest_start(tracked.event) for tracked in ours]
        return min(earliest_starts, default=None)


def _urgency(tracked: TrackedEvent) -> float:
    if tracked.event.has_started:
        return 0.0
    if tracked.not_before is None:
        return math.inf
    return tracked.not_before.timestamp()


def _earliest_start(event: Event) -> datetime:
    if event.event_status == STARTED or event.not_before is None:
        return ALWAYS
    return event.not_before - timedelta(seconds=IMMINENT)


def scope_of(event: Event, vm: str | None) -> Scope:
    """Return ``self`` if the VM is in ``Resources``, else ``peer``.

    It is ``unknown`` if the name or a resource is not known.
    """
    if vm is None or not event.resources:
        return "unknown"
    if vm.casefold() in event.vms:
        return "self"
    if event.resources_cut:
        return "unknown"
    return "peer"


class PendingApproval(Struct, frozen=True):
    """The decision of the approval rules on a listed event, in ``/api/v1/events``."""

    action: str  # one of ``approval_plan.PlannedAction``
    rule: str  # the name of the rule that decides; empty if none matches
    at: datetime | None  # the earliest time of the approval
    words: str  # the plan in a sentence


class PendingEvent(Struct, frozen=True):
    """One listed event in ``/api/v1/events``; durations in seconds."""

    event_id: str
    event_type: str
    event_status: str
    event_source: str | None
    scope: str
    resources: tuple[str, ...]
    description: str | None
    not_before: datetime | None
    seconds_to_not_before: float | None
    expected_duration_seconds: int | None
    first_seen: datetime
    notice_seconds: float | None
    started: datetime | None
    start_seen: bool  # the start was observed; else it had started before the agent saw it
    approval: PendingApproval | None = None  # ``None``: there are no rules, and nothing was sent

    @property
    def is_advice(self) -> bool:
        """Whether it only advises: there is no time at which anything happens to the VM."""
        return event_type_of(self.event_type).is_advice

    @classmethod
    def of(
        cls,
        tracked: TrackedEvent,
        now: datetime,
        approval: PendingApproval | None = None,
    ) -> "PendingEvent":
        """Return the event as it is at ``now``."""
        event = tracked.event
        return cls(
            event_id=event.event_id,
            event_type=event.event_type,
            event_status=event.event_status,
            event_source=event.event_source,
            scope=tracked.scope,
            resources=event.resources,
            description=event.description or None,  # Azure writes "" where it has none
            not_before=tracked.not_before,
            seconds_to_not_before=tracked.seconds_to(now),
            expected_duration_seconds=event.duration,
            first_seen=tracked.first_seen,
            notice_seconds=tracked.notice,
            started=tracked.started,
            start_seen=tracked.start_seen,
            approval=approval,
        )


class PendingView(Struct, frozen=True):
    """The body of ``/api/v1/events``."""

    incarnation: int | None
    last_successful_poll: datetime | None
    vm: Vm | None
    unreadable: int  # the number of listed events that cannot be read; ``events`` lacks them
    events: tuple[PendingEvent, ...]
    silence: str = ""  # why ``events`` may be outdated, in words; empty while it is current
