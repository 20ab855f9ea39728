"""``Notification``: a change of a wave, as the outbox gets it. Pure."""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Final

from msgspec import Struct

from notbefore.core.change import (
    AS_FAR_AS_KNOWN,
    AZURE_CANCELED,
    AZURE_COMPLETED,
    Change,
    LifecycleKind,
    Reason,
    change_id,
)
from notbefore.core.document import Event
from notbefore.core.record import FleetFacts, Vm
from notbefore.fleet.hub_records import Place
from notbefore.fleet.story import OUTCOME_OF, OVER, STEPS, Standing, Story, content, from_unix
from notbefore.fleet.wave import Wave, by_progress, event_of_wave, facts_of, place_of, vm_of

_REASONS: Final[dict[LifecycleKind, Reason]] = {
    "announced": "first_seen_scheduled",
    "updated": "content_changed",
    "started": "status_started",
    "canceled": "gone_before_start",
    "finished": "gone_after_start",
    "ended": "not_watched",
}

_AZURE_REASONS: Final[dict[Standing, Reason]] = {
    Standing.FINISHED: AZURE_COMPLETED,
    Standing.CANCELED: AZURE_CANCELED,
}
"""The end of a wave -> its reason, if Azure has reported the end of each of its events."""


class Notification(Struct, frozen=True):
    """A change of a wave, what its VMs have in common, and what only many VMs show together."""

    change: Change
    vm: Vm
    place: Place  # of ``vm``
    facts: FleetFacts
    exercise: bool = False
    routed: tuple[Vm, ...] = ()  # the places that route it: its end goes where its start went


def notify(wave: Wave) -> Notification | None:
    """Return the notification of a wave that is due, and note it in the wave.

    ``None`` if there is nothing to notify of.
    """
    due = wave.due or 0.0
    wave.due = None  # first: if this fails, the other waves do not wait

    standing = wave.standing
    event = event_of_wave(wave, standing)
    progress = by_progress(wave.stories.values()).counts
    if wave.notified is Standing.STARTED and standing is Standing.SCHEDULED:
        standing = Standing.STARTED  # it is between two of its events: it does not start twice

    kind = STEPS[wave.notified].get(standing)
    if kind is None:
        return None
    if kind == "updated":
        if _is_same(wave, event, progress):
            return None
        wave.number += 1

    notification = _notification(wave, event, kind, standing, from_unix(due))
    wave.notified = standing
    wave.notified_event = event
    wave.notified_at = due
    wave.notified_progress = progress
    for story in wave.stories.values():
        story.named = True
        story.joined.clear()
        story.late = False
    return notification


def _is_same(wave: Wave, event: Event, progress: tuple[int, ...]) -> bool:
    """Whether the last notification has told people all of this already."""
    if wave.notified_event is None:
        return False
    if progress != wave.notified_progress:
        return False
    if any(story.joined for story in wave.stories.values()):
        return False
    return content(event) == content(wave.notified_event)


def _notification(
    wave: Wave,
    event: Event,
    kind: LifecycleKind,
    standing: Standing,
    now: datetime,
) -> Notification:
    stories = list(wave.stories.values())
    place = place_of(stories)
    return Notification(
        change=_change(wave, event, kind, standing, now),
        vm=vm_of(place, event.resources),
        place=place,
        facts=facts_of(stories),
        exercise=any(story.exercise for story in stories),
        routed=wave.routed,
    )


def _change(
    wave: Wave,
    event: Event,
    kind: LifecycleKind,
    standing: Standing,
    now: datetime,
) -> Change:
    stories = list(wave.stories.values())
    first_seen = min(story.first_seen for story in stories)
    started = _first_start(stories)
    not_before = _known_not_before(stories, event)

    digest = ""
    if kind == "updated":
        digest = str(wave.number)

    ahead_seconds = None
    if standing not in (Standing.STARTED, Standing.FINISHED):
        ahead_seconds = _seconds(now, not_before)

    scheduled_seconds = None
    if kind == "started":
        scheduled_seconds = _seconds(first_seen, started)

    over_since = None
    interruption = None
    if standing in OVER:
        over_since = _last_end(stories)
        interruption = _longest_interruption(stories)

    return Change(
        id=change_id(wave.event_key, kind, digest, wave.nth),
        kind=kind,
        reason=_reason(wave, kind, standing),
        time=now,
        event=event,
        scope="self",  # it affects the fleet
        incarnation=0,
        first_seen=first_seen,
        previous=wave.notified_event,
        outcome=OUTCOME_OF.get(standing),
        not_before=not_before,
        ahead_seconds=ahead_seconds,
        notice_seconds=_shortest_notice(stories),
        scheduled_seconds=scheduled_seconds,
        started_seconds=_seconds(started, over_since),
        interruption=interruption,
        over_since=over_since,
    )


def _first_start(stories: Iterable[Story]) -> datetime | None:
    starts = [story.started for story in stories if story.started is not None]
    return min(starts, default=None)


def _last_end(stories: Iterable[Story]) -> datetime | None:
    ends = [story.over for story in stories if story.over is not None]
    return max(ends, default=None)


def _shortest_notice(stories: Iterable[Story]) -> float | None:
    """Return the shortest notice that a VM has measured."""
    notices: list[float] = []
    for story in stories:
        for measures in story.measured.values():
            if measures.notice is not None:
                notices.append(measures.notice)
    return min(notices, default=None)


def _longest_interruption(stories: Iterable[Story]) -> float | None:
    """Return the longest interruption that a VM has measured."""
    interruptions: list[float] = []
    for story in stories:
        for measures in story.measured.values():
            if measures.interruption is not None:
                interruptions.append(measures.interruption)
    return max(interruptions, default=None)


def _known_not_before(stories: Collection[Story], event: Event) -> datetime | None:
    """Return the NotBefore of a wave; once none of its events is to come, the first one it had."""
    if event.not_before is not None:
        return event.not_before
    progress = by_progress(stories)
    if progress.to_come:
        return None

    # what is over says nothing about those that are still under way
    dated = progress.under_way or stories
    dates = [story.not_before for story in dated if story.not_before is not None]
    return min(dates, default=None)


def _reason(wave: Wave, kind: LifecycleKind, standing: Standing) -> Reason:
    stories = list(wave.stories.values())
    # people were notified of a wrong end
    if wave.notified in OVER or any(story.late for story in stories):
        return "corrected"
    if standing in OVER and any(story.given_up for story in stories):
        return AS_FAR_AS_KNOWN
    if standing in _AZURE_REASONS and all(_is_ended_by_azure(story) for story in stories):
        return _AZURE_REASONS[standing]
    return _REASONS[kind]


def _is_ended_by_azure(story: Story) -> bool:
    """Whether an event has ended as Azure reports it."""
    if story.azure is None or story.azure.end is None:
        return False
    return not story.is_contradicted


def _seconds(begin: datetime | None, end: datetime | None) -> float | None:
    """Return the seconds between two times, at least 0; ``None`` if one of them is unknown."""
    if begin is None or end is None:
        return None
    return max(0.0, (end - begin).total_seconds())
