"""``diff(tracked, document, now)``: what happened to each event between two documents.

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

# the fields that older api-versions do not have
VERSIONED: Final = (
    "description",
    "event_source",
    "duration",
)
# events remembered after they are gone, to recognize them if they come back
MAX_DEPARTED: Final = 1_000
MAX_STEPS: Final = 64  # steps remembered per event, to recognize their repetitions

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
    departed = dict(tracked.departed)
    found = {event.key: comparison.listed(event) for event in document.events}
    events = {key: known for key, (known, _) in found.items()}
    changes = [change for _, change in found.values() if change is not None]
    unread = {flaw.key for flaw in document.flaws if flaw.rejected}
    if now.elsewhere:
        unread.add("")
    for key, known in tracked.events.items():
        if key in events:
            continue
        if key in unread or "" in unread:
            events[key] = comparison.measured(known)
            unread.add(key)
        else:
            departed[key], change = comparison.gone(known)
            changes.append(change)
    departed = _bounded({key: steps for key, steps in departed.items() if key not in events})
    return DiffResult(
        Tracked(events, departed, document.incarnation, frozenset(unread)), tuple(changes)
    )


def with_scopes(tracked: Tracked, vm: str | None) -> Tracked:
    """Return the tracked events with the scopes for the VM's name.

    No answer was read, so there is no change. While an event was taken for another VM's, nobody
    measured its interruption.
    """
    events: dict[str, TrackedEvent] = {}
    for key, known in tracked.events.items():
        scope = scope_of(known.event, vm)
        interruption = known.interruption
        if known.start is not None and known.scope == "peer" != scope:
            interruption = None
        events[key] = replace(known, scope=scope, interruption=interruption)
    return replace(tracked, events=events)


def as_another_vm(tracked: Tracked) -> Tracked:
    """Keep only the step counts of another VM's state: this VM sees each event anew, and its
    changes get other ids.
    """
    departed = {**tracked.departed, **{key: known.steps for key, known in tracked.events.items()}}
    return Tracked(departed=_bounded(departed), unread=frozenset(departed))


def _bounded(departed: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The newest ``MAX_DEPARTED`` entries."""
    return {key: departed[key] for key in list(departed)[-MAX_DEPARTED:]}


class _Comparison(Struct, frozen=True):
    """A document, and what was known before it."""

    tracked: Tracked
    document: Document
    now: Observation

    # ---- listed events

    def listed(self, event: Event) -> tuple[TrackedEvent, Change | None]:
        """Return what is known of an event now, and its change, if any."""
        old, now = self.tracked.events.get(event.key), self.now
        if old is None:
            return self._new(event)
        event = _last_known(old.event, event, self.document.flaws)
        if now.elsewhere or now.other_version:
            old = replace(old, event=_in_both_versions(old.event, event))
        phase = _phase(event)
        starts = old.start is None and phase == STARTED
        # the NotBefore of a started event is not ahead
        noticed = old.not_before if phase == STARTED else None
        advanced = replace(
            old,
            event=event,
            scope=scope_of(event, now.vm),
            start=now.at if starts else old.start,
            start_seen=self._watched(event.key) if starts else old.start_seen,
            not_before=noticed or event.not_before or old.not_before,
        )
        known = self.measured(advanced)
        if (
            old.event == event or old.event.digest() == event.digest()
        ):  # only the order or case of resources
            return known, None
        known, change = self._step(known, *TRANSITIONS[_phase(old.event), phase])
        if (
            change.kind == "started" and old.start is not None
        ):  # for the second time: the first one reported it
            change = replace(change, scheduled_seconds=None)
        # a scope also changes when IMDS names this VM: Resources are then the same
        scope = (
            old.scope
            if old.scope != known.scope and old.event.resources != event.resources
            else None
        )
        return known, replace(change, previous=old.event, previous_scope=scope)

    def _new(self, event: Event) -> tuple[TrackedEvent, Change]:
        tracked, now, is_started = self.tracked, self.now, event.event_status == STARTED
        was_unread = event.key in tracked.unread or "" in tracked.unread
        watched = now.watched and not was_unread
        known = TrackedEvent(
            event=event,
            scope=scope_of(event, now.vm),
            seen=now.at,
            beginning_seen=watched,
            start=now.at if is_started else None,
            start_seen=is_started and watched,
            not_before=event.not_before,
            interruption=0.0 if watched or not is_started else None,
            steps=tracked.departed.get(event.key, {}),
        )
        kind, reason = TRANSITIONS[ABSENT, _phase(event)]
        came_back = event.key in tracked.departed and not was_unread
        return self._step(self.measured(known), kind, "came_back" if came_back else reason)

    # ---- how well an event was watched

    def _watched(self, key: str) -> bool:
        """Whether nothing can have happened to this event unseen: IMDS answered, and the event was
        readable.
        """
        return self.now.watched and key not in self.tracked.unread

    def measured(self, known: TrackedEvent) -> TrackedEvent:
        """Return the event with its longest gap so far as interruption, if it may affect
        this VM.
        """
        if known.start is None or not known.may_be_ours or known.interruption is None:
            return known
        gap = None if self.now.gap is None else max(known.interruption, self.now.gap)
        return replace(known, interruption=gap)

    # ---- events that are gone

    def gone(self, known: TrackedEvent) -> tuple[dict[str, int], Change]:
        """Return the steps to remember of an event that is gone, and its change."""
        known, now = self.measured(known), self.now
        if (
            now.rebooted or now.vm is not None
        ):  # the scope may have been stored before the name was known
            known = replace(known, scope=scope_of(known.event, now.vm))
        watched, proven = self._watched(known.event.key), self._proven_by_reboot(known)
        known, change = self._step(known, *self._ending(known, watched=watched, proven=proven))
        kind, interruption = change.kind, known.interruption
        begin = known.seen if kind == "canceled" else known.start
        duration = elapsed(begin, now.at) if begin is not None and watched else None
        if (
            known.start is None
        ):  # not seen Started before the boot: the gap over the boot is the interruption
            interruption = now.gap if now.rebooted else None
        return known.steps, replace(
            change,
            outcome="finished" if proven else OUTCOMES[kind],
            scheduled_seconds=(
                duration
                if kind == "canceled" and known.beginning_seen
                else change.scheduled_seconds
            ),
            started_seconds=duration if kind == "finished" and known.start_seen else None,
            interruption=interruption if known.scope == "self" and (watched or proven) else None,
        )

    def _ending(
        self, known: TrackedEvent, *, watched: bool, proven: bool
    ) -> tuple[ChangeKind, Reason]:
        """How the event ended, as far as that is certain, and the reason."""
        phase = _phase(known.event)
        if phase == STARTED:  # it can only finish
            unwatched = "machine_rebooted" if proven else "gone_after_start_unwatched"
            return TRANSITIONS[phase, ABSENT] if watched else ("finished", unwatched)
        if self.now.rebooted:
            return "ended", "machine_rebooted"
        if known.start is not None:  # it had started, whatever status was listed after that
            return "ended", "status_went_back"
        if self.document.was_empty_body:
            return "ended", "empty_answer"
        if not watched:
            return (
                "ended",
                "not_readable" if known.event.key in self.tracked.unread else "not_watched",
            )
        if phase == OTHER or self._cannot_have_started(known):
            return TRANSITIONS[phase, ABSENT]
        return "ended", "start_may_be_missed"

    def _cannot_have_started(self, known: TrackedEvent) -> bool:
        """Whether an event, if watched, cannot have started: few polls were missed, or NotBefore is
        still ahead.
        """
        now = self.now
        if now.silence is not None and now.silence <= _few_polls(now):
            return True
        if known.not_before is None or now.at.date is None:
            return False
        return now.at.date < known.not_before - NOT_BEFORE_MARGIN

    def _proven_by_reboot(self, known: TrackedEvent) -> bool:
        """Whether a boot proves that the event happened: it reboots this VM, and it had started or
        was due.

        It was due if it was listed as Scheduled until NotBefore (less a few polls), and the machine
        went down later.
        """
        now, due = self.now, known.not_before
        if not now.rebooted or known.scope != "self":
            return False
        if not event_type_of(known.event.event_type).reboots:
            return False
        if known.start is not None:
            return True
        if (
            known.event.event_status != SCHEDULED
            or due is None
            or now.down is None
            or now.last is None
        ):
            return False
        return now.last + timedelta(seconds=_few_polls(now)) >= due and now.down >= due

    # ---- changes

    def _step(
        self, known: TrackedEvent, kind: ChangeKind, reason: Reason
    ) -> tuple[TrackedEvent, Change]:
        """Return the event with this step counted, and the change."""
        digest = known.event.digest() if kind == "updated" else ""
        name = f"{kind} {digest}".rstrip()
        nth = known.steps.get(name, 0)
        steps = {**known.steps, name: nth + 1}
        if (
            len(steps) > MAX_STEPS
        ):  # the other kinds have one each, needed if the EventId comes back
            del steps[next(name for name in steps if name.startswith("updated "))]
        known, identity = replace(known, steps=steps), change_id(known.event.key, kind, digest, nth)
        return known, known.change(identity, (kind, reason), self.now.at, self.document.incarnation)


def _phase(event: Event) -> str:
    """The phase of a listed event, as in ``TRANSITIONS``."""
    return event.event_status if event.event_status in (SCHEDULED, STARTED) else OTHER


def _last_known(old: Event, event: Event, flaws: tuple[Flaw, ...]) -> Event:
    """The event as listed, with the last known value of each field that could not be read this
    time.
    """
    mine = [flaw.reason for flaw in flaws if flaw.key == event.key]
    lost: list[str] = [name for name in mine if getattr(event, name, "") in (None, ())]
    if "resources" in lost:
        lost.append("resources_cut")
    return replace(event, **{name: getattr(old, name) for name in lost}) if lost else event


def _in_both_versions(old: Event, event: Event) -> Event:
    """Return the old event with the new values of the fields that only one of the two api-versions
    has.
    """
    lacking = [
        name for name in VERSIONED if getattr(old, name) is None or getattr(event, name) is None
    ]
    return replace(old, **{name: getattr(event, name) for name in lacking})


def _few_polls(now: Observation) -> float:
    """Seconds without an answer in which no event starts and ends, or is canceled right before
    NotBefore.
    """
    return (MISSED_POLLS + 1) * now.interval + LATE_ANSWER
