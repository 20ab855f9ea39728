"""``diff`` compares the tracked events with a new document, and returns the changes. Pure.

The table ``TRANSITIONS`` is the life of an event. Only what was observed is reported: an event that
is gone after a time without answers has ``ended``, unless Azure's rules leave only one explanation.
Each change has a reason.
"""

from datetime import timedelta
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import Change, ChangeKind, Outcome, Reason, change_id
from notbefore.core.clock import elapsed
from notbefore.core.document import SCHEDULED, STARTED, Document, Event, Flaw
from notbefore.core.event_types import event_type_of
from notbefore.core.tracked import Observation, Tracked, TrackedEvent, scope_of

MISSED_POLLS: Final = 3
"""No event starts and ends within so few unanswered polls, because Azure lists a started
event for minutes. An event that is gone after them was canceled, even if NotBefore has passed."""

# seconds beyond the interval after which an answer may still come without a missed poll
LATE_ANSWER: Final = 1.0

NOT_BEFORE_MARGIN: Final = timedelta(seconds=1)  # NotBefore and ``Date`` count whole seconds

# the fields of ``Event`` that older api-versions do not have
VERSIONED: Final = ("description", "event_source", "duration")
# events remembered after they are gone, to recognize them if they come back
MAX_DEPARTED: Final = 1_000
MAX_STEPS: Final = 64  # steps remembered per event, to recognize their repetitions
_UPDATED: Final = "updated "  # the start of the name of a step, before the content's digest

ABSENT: Final = "absent"
OTHER: Final = "other"
"""Phases besides Azure's two statuses: not listed, and any status that Azure may add."""

TRANSITIONS: Final[dict[tuple[str, str], tuple[ChangeKind, Reason]]] = {
    (ABSENT, SCHEDULED): ("announced", "first_seen_scheduled"),
    (ABSENT, STARTED): ("started", "first_seen_started"),
    (ABSENT, OTHER): ("announced", "first_seen_other_status"),
    (SCHEDULED, SCHEDULED): ("updated", "content_changed"),
    (SCHEDULED, STARTED): ("started", "status_started"),
    (SCHEDULED, OTHER): ("updated", "status_other"),
    (STARTED, SCHEDULED): ("updated", "status_went_back"),
    (STARTED, STARTED): ("updated", "content_changed"),
    (STARTED, OTHER): ("updated", "status_other"),
    (OTHER, SCHEDULED): ("updated", "status_other"),
    (OTHER, STARTED): ("started", "status_started"),
    (OTHER, OTHER): ("updated", "content_changed"),
    (SCHEDULED, ABSENT): ("canceled", "gone_before_start"),
    (STARTED, ABSENT): ("finished", "gone_after_start"),
    (OTHER, ABSENT): ("ended", "gone_from_other_status"),
}
WITHDRAWN: Final[tuple[ChangeKind, Reason]] = ("ended", "withdrawn")
"""The end of an advice: there was nothing to cancel or to finish."""

OUTCOMES: Final[dict[ChangeKind, Outcome]] = {
    "canceled": "canceled",
    "finished": "finished",
    "ended": "unknown",
}


class DiffResult(Struct, frozen=True):
    """The new tracked state, and the changes that lead to it."""

    tracked: Tracked
    changes: tuple[Change, ...] = ()


def diff(tracked: Tracked, document: Document, now: Observation) -> DiffResult:
    """Compare the tracked events with those of a new document, by content.

    An event that cannot be read keeps its last known state, and no change is reported. If even the
    EventId cannot be read, the same holds for every missing event, because it may be the unreadable
    one. It also holds for every missing event in the first answer of another endpoint or
    api-version: the next answer decides.
    """
    comparison = _Comparison(tracked, document, now)
    events: dict[str, TrackedEvent] = {}
    changes: list[Change] = []
    for event in document.events:
        tracked_event, change = comparison.listed(event)
        events[event.key] = tracked_event
        if change is not None:
            changes.append(change)

    unread = {flaw.key for flaw in document.flaws if flaw.rejected}
    if now.elsewhere:
        unread.add("")
    departed = dict(tracked.departed)
    for key, missing in tracked.events.items():
        if key in events:
            continue
        if key in unread or "" in unread:
            events[key] = comparison.measured(missing)
            unread.add(key)
        else:
            steps, end = comparison.gone(missing)
            departed[key] = steps
            changes.append(end)

    for key in events:
        departed.pop(key, None)  # the event has come back
    after = Tracked(
        events=events,
        departed=_newest(departed),
        incarnation=document.incarnation,
        unread=frozenset(unread),
    )
    return DiffResult(after, tuple(changes))


def with_scopes(tracked: Tracked, vm: str | None) -> Tracked:
    """Return the tracked events with their scopes for a VM of this name.

    No answer was read, so there is no change. While an event counted as another VM's, its
    interruption was not measured.
    """
    events: dict[str, TrackedEvent] = {}
    for key, tracked_event in tracked.events.items():
        scope = scope_of(tracked_event.event, vm)
        interruption = tracked_event.interruption
        is_unmeasured = tracked_event.scope == "peer" and scope != "peer"
        if tracked_event.start is not None and is_unmeasured:
            interruption = None
        events[key] = replace(tracked_event, scope=scope, interruption=interruption)
    return replace(tracked, events=events)


def as_another_vm(tracked: Tracked) -> Tracked:
    """Keep only the step counts of another VM's state.

    This VM sees each event for the first time, and its changes get other ids.
    """
    departed = dict(tracked.departed)
    for key, tracked_event in tracked.events.items():
        departed[key] = tracked_event.steps
    return Tracked(departed=_newest(departed), unread=frozenset(departed))


def _newest(departed: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the newest ``MAX_DEPARTED`` entries."""
    keys = list(departed)[-MAX_DEPARTED:]
    return {key: departed[key] for key in keys}


class _Comparison(Struct, frozen=True):
    """A new document, and the tracked events before it."""

    tracked: Tracked
    document: Document
    now: Observation

    # ---- listed events

    def listed(self, event: Event) -> tuple[TrackedEvent, Change | None]:
        """Return the new state of a listed event, and its change, if any."""
        before = self.tracked.events.get(event.key)
        if before is None:
            return self._appeared(event)

        event = _with_last_known(before.event, event, self.document.flaws)
        previous = before.event
        if self.now.elsewhere or self.now.other_version:
            previous = _in_both_versions(previous, event)

        after = self.measured(self._advanced(before, event))
        # equal digests: at most the order or the case of Resources differ
        if previous == event or previous.digest() == event.digest():
            return after, None

        kind, reason = TRANSITIONS[_phase(previous), _phase(event)]
        after, change = self._step(after, kind, reason)
        if kind == "started" and before.start is not None:
            # it starts for the second time: the change of its first start has the duration
            change = replace(change, scheduled_seconds=None)
        previous_scope = None
        # if Resources are the same, the scope changed because IMDS has named this VM
        if before.scope != after.scope and previous.resources != event.resources:
            previous_scope = before.scope
        return after, replace(change, previous=previous, previous_scope=previous_scope)

    def _appeared(self, event: Event) -> tuple[TrackedEvent, Change]:
        """Return the state of an event that the tracked ones lack, and its first change."""
        now = self.now
        unread = self.tracked.unread
        was_unread = event.key in unread or "" in unread
        beginning_seen = now.watched and not was_unread
        start = None
        start_seen = False
        interruption: float | None = 0.0
        if event.has_started:
            start = now.at
            start_seen = beginning_seen
            if not beginning_seen:
                interruption = None

        appeared = TrackedEvent(
            event=event,
            scope=scope_of(event, now.vm),
            seen=now.at,
            beginning_seen=beginning_seen,
            start=start,
            start_seen=start_seen,
            not_before=event.not_before,
            interruption=interruption,
            steps=self.tracked.departed.get(event.key, {}),
        )
        kind, reason = TRANSITIONS[ABSENT, _phase(event)]
        if event.key in self.tracked.departed and not was_unread:
            reason = "came_back"
        return self._step(self.measured(appeared), kind, reason)

    def _advanced(self, before: TrackedEvent, event: Event) -> TrackedEvent:
        """Return a tracked event with its new content, and with its start if it starts now."""
        start = before.start
        start_seen = before.start_seen
        not_before = event.not_before or before.not_before
        if event.has_started:
            # Azure empties NotBefore of a started event, or shows a time that is not ahead
            not_before = before.not_before or event.not_before
            if start is None:
                start = self.now.at
                start_seen = self._is_watched(event.key)
        return replace(
            before,
            event=event,
            scope=scope_of(event, self.now.vm),
            start=start,
            start_seen=start_seen,
            not_before=not_before,
        )

    # ---- how well an event was watched

    def _is_watched(self, key: str) -> bool:
        """Whether nothing can have happened to this event unseen: IMDS answered, and the event was
        readable.
        """
        return self.now.watched and key not in self.tracked.unread

    def measured(self, tracked_event: TrackedEvent) -> TrackedEvent:
        """Return the event with its interruption so far: the longest delay since its start.

        It is not measured for an event of other VMs.
        """
        if (
            tracked_event.start is None
            or not tracked_event.may_be_ours
            or tracked_event.interruption is None
        ):
            return tracked_event
        interruption = None
        if self.now.gap is not None:
            interruption = max(tracked_event.interruption, self.now.gap)
        return replace(tracked_event, interruption=interruption)

    # ---- events that are gone

    def gone(self, missing: TrackedEvent) -> tuple[dict[str, int], Change]:
        """Return the counts of steps to remember of an event that is gone, and its last change."""
        now = self.now
        tracked_event = self.measured(missing)
        if now.rebooted or now.vm is not None:
            # the scope may have been stored before the name of this VM was known
            tracked_event = replace(tracked_event, scope=scope_of(tracked_event.event, now.vm))
        is_watched = self._is_watched(tracked_event.event.key)
        is_proven = self._is_proven_by_reboot(tracked_event)
        kind, reason = self._ending(tracked_event, is_watched=is_watched, is_proven=is_proven)
        tracked_event, change = self._step(tracked_event, kind, reason)

        outcome = OUTCOMES[kind]
        if is_proven:
            outcome = "finished"
        scheduled_seconds = change.scheduled_seconds
        if kind == "canceled" and tracked_event.beginning_seen:
            scheduled_seconds = elapsed(tracked_event.seen, now.at)
        started_seconds = None
        if kind == "finished" and is_watched:
            started_seconds = self._seconds_since_start(tracked_event)
        interruption = None
        if tracked_event.scope == "self" and (is_watched or is_proven):
            interruption = self._interruption(tracked_event)
        final = replace(
            change,
            outcome=outcome,
            scheduled_seconds=scheduled_seconds,
            started_seconds=started_seconds,
            interruption=interruption,
        )
        return tracked_event.steps, final

    def _seconds_since_start(self, tracked_event: TrackedEvent) -> float | None:
        if tracked_event.start is None or not tracked_event.start_seen:
            return None
        return elapsed(tracked_event.start, self.now.at)

    def _interruption(self, tracked_event: TrackedEvent) -> float | None:
        """Return for how many seconds an event that is gone interrupted this VM."""
        if tracked_event.start is not None:
            return tracked_event.interruption
        if self.now.rebooted:  # not seen Started before the boot: the delay is that of the boot
            return self.now.gap
        return None

    def _ending(
        self, tracked_event: TrackedEvent, *, is_watched: bool, is_proven: bool
    ) -> tuple[ChangeKind, Reason]:
        """Return how the event ended, if that is certain, and the reason."""
        if tracked_event.event.is_advice:
            return WITHDRAWN
        phase = _phase(tracked_event.event)
        if phase == STARTED:
            return _ending_of_started(is_watched=is_watched, is_proven=is_proven)
        if self.now.rebooted:
            return "ended", "machine_rebooted"
        if tracked_event.start is not None:  # it had started, whatever status was listed after that
            return "ended", "status_went_back"
        if self.document.was_empty_body:
            return "ended", "empty_answer"
        if tracked_event.event.key in self.tracked.unread:
            return "ended", "not_readable"
        if not is_watched:
            return "ended", "not_watched"
        if phase == OTHER or self._cannot_have_started(tracked_event):
            return TRANSITIONS[phase, ABSENT]
        return "ended", "start_may_be_missed"

    def _cannot_have_started(self, tracked_event: TrackedEvent) -> bool:
        """Whether an event, if watched, cannot have started: few polls were missed, or NotBefore is
        still ahead.
        """
        now = self.now
        if now.silence is not None and now.silence <= _few_polls(now):
            return True
        if tracked_event.not_before is None or now.at.date is None:
            return False
        return now.at.date < tracked_event.not_before - NOT_BEFORE_MARGIN

    def _is_proven_by_reboot(self, tracked_event: TrackedEvent) -> bool:
        """Whether a boot proves that the event happened: it reboots this VM, and it had started or
        was due.

        It was due if it was listed as Scheduled until NotBefore (less a few polls), and the machine
        went down later.
        """
        now = self.now
        if not now.rebooted or tracked_event.scope != "self":
            return False
        if not event_type_of(tracked_event.event.event_type).reboots:
            return False
        if tracked_event.start is not None:
            return True

        due = tracked_event.not_before
        if tracked_event.event.event_status != SCHEDULED or due is None:
            return False
        if now.down is None or now.last is None:
            return False
        return now.last + timedelta(seconds=_few_polls(now)) >= due and now.down >= due

    # ---- changes

    def _step(
        self, tracked_event: TrackedEvent, kind: ChangeKind, reason: Reason
    ) -> tuple[TrackedEvent, Change]:
        """Return the event with this step counted, and the change."""
        step: str = kind
        digest = ""
        if kind == "updated":
            digest = tracked_event.event.digest()
            step = _UPDATED + digest

        nth = tracked_event.steps.get(step, 0)
        steps = {**tracked_event.steps, step: nth + 1}
        if len(steps) > MAX_STEPS:
            # the other kinds have one each, which is needed if the EventId comes back
            oldest_update = next(name for name in steps if name.startswith(_UPDATED))
            del steps[oldest_update]

        counted = replace(tracked_event, steps=steps)
        change = counted.change(
            identity=change_id(tracked_event.event.key, kind, digest, nth),
            kind=kind,
            reason=reason,
            at=self.now.at,
            incarnation=self.document.incarnation,
        )
        return counted, change


def _ending_of_started(*, is_watched: bool, is_proven: bool) -> tuple[ChangeKind, Reason]:
    """Return the end of a started event, which can only finish, and the reason."""
    if is_watched:
        return TRANSITIONS[STARTED, ABSENT]
    if is_proven:
        return "finished", "machine_rebooted"
    return "finished", "gone_after_start_unwatched"


def _phase(event: Event) -> str:
    """Return the phase of a listed event, as in ``TRANSITIONS``."""
    if event.has_started:
        return STARTED
    if event.event_status == SCHEDULED:
        return SCHEDULED
    return OTHER


def _with_last_known(old: Event, event: Event, flaws: tuple[Flaw, ...]) -> Event:
    """Return the event as listed, with the last known value of each field that could not be read
    this time.
    """
    fields = {flaw.reason for flaw in flaws if flaw.key == event.key}
    last_known: dict[str, object] = {}
    for name in fields:
        if getattr(event, name, "") in (None, ()):  # a field that was cut has a value
            last_known[name] = getattr(old, name)
    if "resources" in last_known:
        last_known["resources_cut"] = old.resources_cut
    return replace(event, **last_known)


def _in_both_versions(old: Event, event: Event) -> Event:
    """Return the old event in the fields that both api-versions have.

    The other fields get their new values, so that they make no difference.
    """
    new_values: dict[str, object] = {}
    for name in VERSIONED:
        if getattr(old, name) is None or getattr(event, name) is None:
            new_values[name] = getattr(event, name)
    return replace(old, **new_values)


def _few_polls(now: Observation) -> float:
    """Return the seconds that a few polls take: an event does not start and end within them."""
    return (MISSED_POLLS + 1) * now.interval + LATE_ANSWER
