"""What became of each event between two documents: ``diff(tracked, document, now)``.

The life of an event is the table ``TRANSITIONS``. What was not observed is not claimed: an event that is gone after a
time in which nobody looked has ``ended``, and nobody knows how.
"""

from datetime import datetime, timedelta
from enum import Enum
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.core.change import Change, ChangeKind, Gap, Outcome, Reason, Scope, change_id, quiet
from notbefore.core.document import SCHEDULED, STARTED, Document, Event

WATCHED: Final = 15.0
"""Seconds between two good answers up to which the agent counts as having watched.

Above one late answer (10 s) and below the shortest lives seen (a Preempt has 30 s of notice). A longer silence could
hide a start and an end, also before NotBefore, since any VM of the group may approve the event.
"""

REBOOTING: Final = frozenset({"Reboot", "Redeploy"})  # the types that a reboot of this machine proves
MAX_DEPARTED: Final = 1_000  # events remembered after they were gone, to know them when they come back
MAX_STEPS: Final = 64  # steps of one event that are told apart from their repetitions


class Phase(Enum):
    """Where an event stands, as the document says it."""

    ABSENT = "absent"
    SCHEDULED = "scheduled"
    STARTED = "started"
    OTHER = "other"  # a status that Azure may add

    @staticmethod
    def of(event: Event | None) -> "Phase":
        """The phase of an event as listed; ``None`` is one that is not listed."""
        if event is None:
            return Phase.ABSENT
        return {SCHEDULED: Phase.SCHEDULED, STARTED: Phase.STARTED}.get(event.event_status, Phase.OTHER)


ABSENT_, SCHEDULED_, STARTED_, OTHER_ = Phase.ABSENT, Phase.SCHEDULED, Phase.STARTED, Phase.OTHER

TRANSITIONS: Final[dict[tuple[Phase, Phase], tuple[ChangeKind, Reason]]] = {
    (ABSENT_, SCHEDULED_): ("announced", "first_seen_scheduled"),
    (ABSENT_, STARTED_): ("started", "first_seen_started"),
    (ABSENT_, OTHER_): ("announced", "first_seen_other_status"),
    (SCHEDULED_, SCHEDULED_): ("updated", "content_changed"),
    (SCHEDULED_, STARTED_): ("started", "status_started"),
    (SCHEDULED_, OTHER_): ("updated", "status_other"),
    (STARTED_, SCHEDULED_): ("updated", "status_went_back"),
    (STARTED_, STARTED_): ("updated", "content_changed"),
    (STARTED_, OTHER_): ("updated", "status_other"),
    (OTHER_, SCHEDULED_): ("updated", "status_other"),
    (OTHER_, STARTED_): ("started", "status_started"),
    (OTHER_, OTHER_): ("updated", "content_changed"),
    (SCHEDULED_, ABSENT_): ("canceled", "gone_before_start"),
    (STARTED_, ABSENT_): ("finished", "gone_after_start"),
    (OTHER_, ABSENT_): ("ended", "gone_from_other_status"),
}
OUTCOMES: Final[dict[ChangeKind, Outcome]] = {"canceled": "canceled", "finished": "finished", "ended": "unknown"}


class Observation(Struct, frozen=True):
    """When the document was read, by whom, and how well the time before it was watched."""

    time: datetime  # UTC
    vm: str | None = None  # the name of this VM; None while it is not known
    silence: float | None = 0.0  # seconds since the last good answer; None when there was none ever
    rebooted: bool = False  # the machine was booted since the last good answer
    gap: Gap | None = Gap(0.0, 0.0)  # the longest between beats since the last good answer; None: no beats were kept

    @property
    def watched(self) -> bool:
        """Nothing can have come and gone unseen since the last good answer."""
        return self.silence is not None and self.silence <= WATCHED and not self.rebooted


class TrackedEvent(Struct, frozen=True):
    """What is known of one listed event."""

    event: Event
    scope: Scope
    first_seen: datetime
    beginning_seen: bool  # it was not there a beat before
    started: datetime | None = None  # when it was first seen Started
    start_seen: bool = False  # it was not Started a beat before
    not_before: datetime | None = None  # the last one known
    reported_not_before: datetime | None = None  # the last one that was not a quiet update
    interruption: Gap | None = None  # the longest felt while Started
    unmeasured: bool = False  # part of the time in which it was Started nobody kept beats
    unread_since: datetime | None = None  # it is listed, but cannot be read, since its last good reading
    steps: dict[str, int] = {}

    @property
    def notice(self) -> float | None:
        """Seconds from the first sight to NotBefore; 0 without notice, ``None`` when the beginning was not seen."""
        if not self.beginning_seen:
            return None
        if self.started == self.first_seen:
            return 0.0
        if self.not_before is None:
            return None
        # an event may be listed as Scheduled a moment after its NotBefore: there is no less notice than none
        return max(0.0, (self.not_before - self.first_seen).total_seconds())

    def seconds_to(self, now: datetime) -> float | None:
        """Seconds from ``now`` to NotBefore, negative after it; ``None`` without one, and for what is started."""
        if Phase.of(self.event) is Phase.STARTED or self.event.not_before is None:
            return None
        return (self.event.not_before - now).total_seconds()


class Tracked(Struct, frozen=True):
    """All that the agent remembers of the document: what is listed, and the steps of what was."""

    events: dict[str, TrackedEvent] = {}
    departed: dict[str, dict[str, int]] = {}
    incarnation: int | None = None
    unreadable: bool = False  # the last document listed an event that could not be read and is none of the above

    @property
    def interrupting(self) -> bool:
        """An event that hits this VM is Started: the beats are to be kept."""
        return any(_hits(life) and Phase.of(life.event) is Phase.STARTED for life in self.events.values())

    @property
    def expecting(self) -> bool:
        """An event that hits this VM is listed, Started or not."""
        return any(_hits(life) for life in self.events.values())


class DiffResult(Struct, frozen=True):
    """The result of ``diff``: what is remembered from now on, and what changed."""

    tracked: Tracked
    changes: tuple[Change, ...]


def scope_of(event: Event, vm: str | None) -> Scope:
    """``self`` if the VM is in ``Resources``, else ``peer``; ``unknown`` without a name or resources."""
    if vm is None or not event.resources:
        return "unknown"
    return "self" if vm.casefold() in (name.casefold() for name in event.resources) else "peer"


def _hits(life: TrackedEvent) -> bool:
    # an event that may be ours is watched as if it were: its interruption is given only once it is known to be ours
    return life.scope != "peer"


def diff(tracked: Tracked, document: Document, now: Observation) -> DiffResult:
    """Compare what is tracked with a new document. The content decides; the incarnation only helps.

    Events that the document rejected keep their last known state, but nothing is claimed of the time in which they
    could not be read; while one could not even be identified, no event that is missing is taken for gone, since the
    unreadable one may be it.
    """
    events: dict[str, TrackedEvent] = {}
    departed = dict(tracked.departed)
    changes: list[Change] = []
    for event in document.events:
        life, change = _seen(tracked, event, document.incarnation, now)
        events[event.key] = life
        if change is not None:
            changes.append(change)
    kept = {flaw.event_id.casefold() for flaw in document.flaws if flaw.rejected and flaw.event_id is not None}
    unidentified = any(flaw.rejected and flaw.event_id is None for flaw in document.flaws)
    for key, life in tracked.events.items():
        if key in events:
            continue
        if unidentified or key in kept:
            events[key] = _unread(_felt(life, now), now)
            continue
        departed[key], change = _gone(_felt(life, now), document.incarnation, now)
        changes.append(change)
    for back in departed.keys() & events.keys():
        del departed[back]
    for oldest in list(departed)[: max(0, len(departed) - MAX_DEPARTED)]:
        del departed[oldest]
    unreadable = unidentified or not kept <= events.keys()
    return DiffResult(Tracked(events, departed, document.incarnation, unreadable), tuple(changes))


def _seen(tracked: Tracked, event: Event, incarnation: int, now: Observation) -> tuple[TrackedEvent, Change | None]:
    old = tracked.events.get(event.key)
    if old is not None and old.event == event and old.scope == scope_of(event, now.vm):
        return _read(_felt(old, now)), None
    before, after = Phase.of(old.event if old else None), Phase.of(event)
    kind, reason = TRANSITIONS[before, after]
    digest = event.digest()
    moved = old is None or old.event.digest() != digest
    life = _felt(_grown(old, event, now), now) if old else _born(tracked, event, now)
    if not moved:  # only the order of the resources, the case of a name, or what we know of ourselves
        return life, None
    if old is None and event.key in tracked.departed:
        reason = "came_back"
    life, identity = _numbered(life, kind, digest if kind == "updated" else "")
    change = _change(life, identity, (kind, reason), incarnation, now)
    if old is None:
        return life, change
    # a scope may change as well because IMDS says who we are: Resources did not move then
    scope = old.scope if old.scope != life.scope and old.event.resources != event.resources else None
    return life, msgspec.structs.replace(
        change, previous=old.event, previous_scope=scope, previous_not_before=_reported(old)
    )


def _born(tracked: Tracked, event: Event, now: Observation) -> TrackedEvent:
    is_started = Phase.of(event) is Phase.STARTED
    watched = now.watched and not tracked.unreadable
    scope = scope_of(event, now.vm)
    return TrackedEvent(
        event=event,
        scope=scope,
        first_seen=now.time,
        beginning_seen=watched,
        started=now.time if is_started else None,
        start_seen=is_started and watched,
        not_before=event.not_before,
        reported_not_before=event.not_before,
        interruption=now.gap if is_started and scope != "peer" else None,
        unmeasured=is_started and (now.gap is None or not watched),
        steps=tracked.departed.get(event.key, {}),
    )


def _grown(old: TrackedEvent, event: Event, now: Observation) -> TrackedEvent:
    starts = old.started is None and Phase.of(event) is Phase.STARTED
    return msgspec.structs.replace(
        old,
        event=event,
        scope=scope_of(event, now.vm),
        started=now.time if starts else old.started,
        start_seen=_watched(old, now) if starts else old.start_seen,
        not_before=event.not_before or old.not_before,
        reported_not_before=_reported(old) if quiet(old.event, event, _reported(old)) else event.not_before,
        unread_since=None,
    )


def _reported(life: TrackedEvent) -> datetime | None:
    return life.reported_not_before or life.event.not_before


def _watched(life: TrackedEvent, now: Observation) -> bool:
    """Somebody looked all the time, and could read this event."""
    return now.watched and (life.unread_since is None or (now.time - life.unread_since).total_seconds() <= WATCHED)


def _unread(life: TrackedEvent, now: Observation) -> TrackedEvent:
    if life.unread_since is not None:
        return life
    since = now.time - timedelta(seconds=now.silence) if now.silence is not None else life.first_seen
    return msgspec.structs.replace(life, unread_since=since)


def _read(life: TrackedEvent) -> TrackedEvent:
    return life if life.unread_since is None else msgspec.structs.replace(life, unread_since=None)


def _felt(life: TrackedEvent, now: Observation) -> TrackedEvent:
    """Put the gap since the last answer down to this event, if it is one that interrupts this VM."""
    if life.started is None or not _hits(life):
        return life
    if now.gap is None:
        return life if life.unmeasured else msgspec.structs.replace(life, unmeasured=True)
    gap = life.interruption.widened(now.gap) if life.interruption else now.gap
    return life if gap == life.interruption else msgspec.structs.replace(life, interruption=gap)


def _gone(life: TrackedEvent, incarnation: int, now: Observation) -> tuple[dict[str, int], Change]:
    kind, reason = TRANSITIONS[Phase.of(life.event), Phase.ABSENT]
    if kind == "canceled" and life.started is not None:  # it had begun, whatever was listed of it after that
        kind, reason = "ended", "status_went_back"
    outcome = OUTCOMES[kind]
    if not _watched(life, now):
        kind, reason, outcome = "ended", "not_watched" if not now.watched else "not_readable", "unknown"
    if now.rebooted:
        reason = "machine_rebooted"
        if _proven_by_reboot(life, now):
            outcome = "finished"
            life = msgspec.structs.replace(life, interruption=life.interruption or now.gap)
        else:
            outcome = "unknown"
    life, identity = _numbered(life, kind, "")
    change = _change(life, identity, (kind, reason), incarnation, now)
    return life.steps, msgspec.structs.replace(change, outcome=outcome)


def _proven_by_reboot(life: TrackedEvent, now: Observation) -> bool:
    """This machine went down, and an event of its own that takes it down was due: that was it."""
    due = life.started is not None or (life.not_before is not None and life.not_before <= now.time)
    return life.scope == "self" and life.event.event_type in REBOOTING and due


def _numbered(life: TrackedEvent, kind: ChangeKind, digest: str) -> tuple[TrackedEvent, str]:
    step = f"{kind} {digest}".rstrip()
    nth = life.steps.get(step, 0)
    steps = {**life.steps, step: nth + 1}
    if len(steps) > MAX_STEPS:  # of the others there is one a kind, and each is needed if the EventId comes back
        del steps[next(known for known in steps if known.startswith("updated "))]
    life = msgspec.structs.replace(life, steps=steps)
    return life, change_id(life.event.key, kind, digest, nth)


def _change(
    life: TrackedEvent, identity: str, step: tuple[ChangeKind, Reason], incarnation: int, now: Observation
) -> Change:
    kind, reason = step
    over = kind in OUTCOMES
    start = life.started or (now.time if kind == "canceled" else None)
    scheduled = life.beginning_seen and start is not None and (life.start_seen or kind == "canceled")
    if kind == "started" and start != now.time:  # for the second time: it was told at the first
        scheduled = False
    return Change(
        id=identity,
        kind=kind,
        reason=reason,
        time=now.time,
        event=life.event,
        scope=life.scope,
        incarnation=incarnation,
        first_seen=life.first_seen,
        not_before=life.not_before,
        notice_seconds=life.notice,
        scheduled_seconds=(start - life.first_seen).total_seconds() if scheduled and start else None,
        started_seconds=_started_seconds(life, now) if kind == "finished" else None,
        interruption=life.interruption if over and life.scope == "self" and not life.unmeasured else None,
    )


def _started_seconds(life: TrackedEvent, now: Observation) -> float | None:
    return (now.time - life.started).total_seconds() if life.started and life.start_seen else None
