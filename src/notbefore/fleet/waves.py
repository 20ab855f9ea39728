"""``Waves``: groups of stories that belong together, and the times of their notifications. Pure.

The terms are Alertmanager's: ``group_by`` defines which stories of one resource group and the same routes are a group
(a wave), ``group_wait`` how long the first notification waits for more of them, ``group_interval`` how long a digest
waits. The start of a wave is notified at once; its end waits for ``group_interval``. News that would lose its notice by
waiting for the next digest does not wait for it. A wave has the form of one event, with all its VMs as ``Resources``,
so that every sink and route of the agent can handle it.

All times are the hub's: every instance that reads the same log makes the same notifications, under the same ids.
"""

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from functools import reduce
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import AS_FAR_AS_KNOWN, Change, LifecycleKind, Reason, change_id
from notbefore.core.document import SCHEDULED as STATUS_SCHEDULED
from notbefore.core.document import STARTED as STATUS_STARTED
from notbefore.core.document import Event
from notbefore.core.outbox_rows import Schedule
from notbefore.core.record import WAVE, FleetFacts, Vm, view
from notbefore.core.routing import SEVERITIES, Route, severity_of
from notbefore.core.text import natural
from notbefore.fleet.hub_records import Place
from notbefore.fleet.story import (
    CANCELED,
    ENDED,
    FINISHED,
    NEW,
    OUTCOMES,
    OVER,
    SCHEDULED,
    STARTED,
    STEPS,
    Standing,
    Story,
    content,
    from_unix,
)

MAX_ROUTED: Final = 16  # places by which the notifications of one wave are routed, each by other routes
MAX_NAMES: Final = 2_000  # of VMs in one notification
SHARE_OF_NOTICE: Final = 3  # news waits for a third of the remaining notice at most: a Preempt has 30 s
SHARE_OF_DIGEST: Final = 2  # or for the next digest, if at least half of the notice is left by then

_REASONS: Final[dict[LifecycleKind, Reason]] = {
    "announced": "first_seen_scheduled",
    "updated": "content_changed",
    "started": "status_started",
    "canceled": "gone_before_start",
    "finished": "gone_after_start",
    "ended": "not_watched",
}


class Grouping(Struct, frozen=True):
    """How stories are grouped; times in seconds. Stories of two resource groups are never one group."""

    group_by: tuple[str, ...]  # see ``_label``
    group_wait: float
    group_interval: float
    over_after: float  # after NotBefore, the start and the last record: then it is over without reports
    routes: tuple[Route, ...]  # stories with different routes are different groups

    @property
    def each_event(self) -> bool:
        """Whether every event is a group of its own: then there is nothing to wait for."""
        return "event_id" in self.group_by


class Wave(Struct, array_like=True):
    """One group of stories. Mutable: only ``Waves`` changes it."""

    event_key: str  # the event key of its notifications
    stories: dict[str, Story] = {}
    notified: Standing = NEW  # the standing that was notified last
    notified_event: Event | None = None
    notified_at: float = 0.0  # Unix seconds of the hub's clock; before the first notification: when the wave began
    due: float | None = None  # when the next notification is due, in Unix seconds
    number: int = 0  # the number of the last digest
    nth: int = 0  # the number of earlier events with this id
    routed: tuple[Vm, ...] = ()  # the places that route its notifications, each once
    notified_progress: tuple[int, ...] = ()  # the numbers of its events to come, under way and over that were notified

    @property
    def standing(self) -> Standing:
        """Its state: started while one of its events is, over once all of them are; then the least known end counts."""
        found = {story.standing for story in list(self.stories.values())}  # a copy: other threads read it
        return next((one for one in (STARTED, SCHEDULED, ENDED, FINISHED, CANCELED) if one in found), NEW)


OpenWaves = dict[tuple[str, ...], Wave]
"""The keys are ``Story.labels``: resource group, values of ``group_by``, whether it is an exercise, the routes."""


class Notification(Struct, frozen=True):
    """A change of a wave, with what its VMs have in common, and what only many VMs together show."""

    change: Change
    vm: Vm
    place: Place  # of ``vm``
    facts: FleetFacts
    exercise: bool = False
    routed: tuple[Vm, ...] = ()  # the places that route it: who was notified of a wave is notified of its end


class Waves:
    """The waves of one partition; ``found``: those of the previous owner, changed in place."""

    def __init__(self, grouping: Grouping, found: OpenWaves) -> None:
        self._grouping = grouping
        self.open = found
        self._schedule = Schedule[tuple[str, ...]]()  # the waves that have a due time
        for labels, wave in found.items():
            self._schedule.put(labels, wave.due)

    def note(self, story: Story, now: float, notified: Standing = NEW) -> None:
        """Note that a story is new or has changed at ``now``, by the hub's clock; set when its wave is due.

        ``notified``: the last notified standing of a story that was over, and turns out not to be.
        """
        if not story.labels:
            story.labels = self._labels(story)
        wave = self.open.get(story.labels)
        if wave is None:
            key = self._event_key(story, notified)
            number = 1_000 * notified  # a wave that begins again must not repeat the ids of digests
            began = now if notified is NEW else 0.0
            wave = Wave(key, notified=notified, notified_at=began, nth=story.nth, number=number)
            self.open[story.labels] = wave
        was_over = wave.standing in OVER
        wave.stories[story.event.key] = story
        self.route(story)
        standing = wave.standing
        due = self._due(wave, standing, story, now)
        ends_or_goes_on = wave.notified is not NEW and (standing in OVER or was_over)
        if wave.due is None or due < wave.due or ends_or_goes_on:
            wave.due = due
            self._schedule.put(story.labels, due)

    def route(self, story: Story) -> None:
        """Route the story's wave by its place as well, if other routes match there than at the places before."""
        wave, vm, routes = self.open[story.labels], vm_of(story.place, story.event.resources), self._grouping.routes
        ways = ways_of(vm, story.event, routes)
        if ways not in (ways_of(one, story.event, routes) for one in wave.routed):
            wave.routed = (*wave.routed, vm)[:MAX_ROUTED]

    def forget_over(self) -> list[Story]:
        """Remove and return the stories that are over, before anybody is notified of any wave."""
        found: list[Story] = []
        for labels, wave in list(self.open.items()):
            found += (over := [story for story in wave.stories.values() if story.standing in OVER])
            for story in over:
                del wave.stories[story.event.key]
            if not wave.stories:
                del self.open[labels]
                self._schedule.drop(labels)
        return found

    def flush(self, now: float) -> Iterator[tuple[Wave, Notification | None]]:
        """Yield the waves that are due by ``now``, in the order of their due times, with their notifications, if any.

        A wave that is over is removed from ``open`` first.
        """
        while (labels := self._schedule.pop(now)) is not None:
            wave = self.open[labels]
            if (later := self._rests_until(wave)) > now:
                wave.due = later
                self._schedule.put(labels, later)
                continue
            made = self._notify(wave)
            if wave.standing in OVER:
                del self.open[labels]
            yield wave, made

    def _rests_until(self, wave: Wave) -> float:
        """Return until when more events may join a wave that is over before anybody was notified of it."""
        if wave.notified is not NEW or wave.standing not in OVER or self._grouping.each_event:
            return 0.0
        last = max(story.heard_at for story in wave.stories.values())
        return min(last + self._grouping.group_wait, wave.notified_at + self._grouping.group_interval)

    def _labels(self, story: Story) -> tuple[str, ...]:
        """Return the key of the wave of a new story; an exercise is never in a wave of real events."""
        labels = [_label(name, story) for name in self._grouping.group_by]
        exercise = ["exercise"] if story.exercise else []
        vm = vm_of(story.place, story.event.resources)
        return story.group, *labels, *exercise, ways_of(vm, story.event, self._grouping.routes)

    def _event_key(self, story: Story, notified: Standing) -> str:
        """Return the key of a new wave; a group that begins again with the same event, which was over, gets another."""
        if self._grouping.each_event and not story.shares_id:
            return story.event.key
        first = f"{story.event.key} {notified.name}"
        return WAVE + change_id("\n".join(story.labels), "announced", first, story.nth)[:24]

    def _due(self, wave: Wave, standing: Standing, story: Story, now: float) -> float:
        grouping = self._grouping
        outdated = wave.notified is SCHEDULED and standing is not STARTED and _is_outdated(wave, now)
        if story.late or (outdated and story.standing in OVER and not grouping.each_event):
            return now + grouping.group_wait  # with others like it: one correction
        if grouping.each_event:
            return now
        left = story.not_before.timestamp() - now if story.not_before else 0.0
        soon = now + max(0.0, min(grouping.group_wait, left / SHARE_OF_NOTICE))
        if wave.notified is NEW or outdated:
            return soon
        if standing is STARTED and wave.notified is SCHEDULED:
            return now
        if standing in OVER:  # the next VM's event may still come
            return now + grouping.group_interval
        digest = max(now, wave.notified_at + grouping.group_interval)
        return min(soon, digest) if _is_urgent(wave, story, now) and digest - now > left / SHARE_OF_DIGEST else digest

    def _notify(self, wave: Wave) -> Notification | None:
        moment, wave.due = wave.due or 0.0, None  # first: if this fails, the other waves do not wait
        standing, now = wave.standing, from_unix(moment)
        event = event_of_wave(wave, standing)
        if wave.notified is STARTED and standing is SCHEDULED:  # between two of its events: it is not started twice
            standing = STARTED
        kind = STEPS[wave.notified].get(standing)
        before = wave.notified_event
        progress = tuple(map(len, by_progress(wave.stories.values())))
        same = before is not None and content(event) == content(before) and progress == wave.notified_progress
        if kind is None or (kind == "updated" and same):
            return None
        wave.number += kind == "updated"
        made = _notification(wave, event, kind, standing, now)
        wave.notified, wave.notified_event, wave.notified_at = standing, event, moment
        wave.notified_progress = progress
        for story in wave.stories.values():
            story.named, story.late = True, False
        return made


def _is_outdated(wave: Wave, now: float) -> bool:
    """Whether people expect, and may be reminded of, a NotBefore that no event to come has any more."""
    due = wave.notified_event.not_before if wave.notified_event is not None else None
    to_come, _, _ = by_progress(wave.stories.values())
    return due is not None and due.timestamp() > now and due not in [story.not_before for story in to_come]


def _is_urgent(wave: Wave, story: Story, now: float) -> bool:
    """Whether people can still prepare for an event that is new to them, or earlier, more severe, or of more VMs."""
    if story.standing is not SCHEDULED:
        return False
    known = wave.notified_event
    if not story.named or known is None or not set(story.event.vms) <= set(known.vms):
        return True
    due = known.not_before if known.not_before is not None and known.not_before.timestamp() > now else None
    earlier = story.not_before is not None and (due is None or story.not_before < due)
    return earlier or _severity(story.event) < _severity(known)


def _severity(event: Event) -> int:
    """Return the rank of an event's severity: the smallest is the most severe."""
    return SEVERITIES.index(severity_of(event.event_type, None, event.duration))


def ways_of(vm: Vm, event: Event, routes: tuple[Route, ...]) -> str:
    """Return the numbers of the routes that match an event, without regard to matchers that change with time."""
    found: list[str] = []
    for number, one in enumerate(routes):
        match = one.match
        if not match.is_here(known(vm)) or not match.holds(event):
            continue
        found.append(str(number))
        if not (one.go_on or match.change):
            break
    return " ".join(found)


def known(vm: Vm) -> Vm:
    """Return the VM for routes: with an id, so that an empty value counts as known, and does not match."""
    return replace(vm, vm_id="fleet") if vm.subscription_id else vm


def _label(name: str, story: Story) -> str:
    """Return the value of a ``group_by`` name: a field of the event or of its place, or the tag of ``tags.NAME``."""
    if name.startswith("tags."):
        return dict(story.place.tags).get(name.removeprefix("tags.").casefold(), "")
    if name == "event_id":
        return story.event.key
    return getattr(story.event, name) or "" if name.startswith("event_") else getattr(story.place, name).casefold()


def event_of_wave(wave: Wave, standing: Standing) -> Event:
    """Return the wave as one event, with the first NotBefore of its events that have not started.

    Its VMs are in the order of ``by_progress``: if they are too many, those are named for which there is still time.
    """
    stories = list(wave.stories.values())
    live = [story for story in stories if story.standing not in OVER] or stories
    first = min(live, key=_urgency)
    if len(stories) == 1 and wave.event_key == first.event.key:
        return replace(first.event, not_before=None if standing is STARTED else first.not_before)
    names = dict.fromkeys(name for part in by_progress(stories) for name in affected(part))
    dates = [one.not_before for one in live if one.standing is not STARTED and one.not_before is not None]
    return replace(
        first.event,
        event_id=wave.event_key,
        event_status=STATUS_STARTED if standing in (STARTED, FINISHED) else STATUS_SCHEDULED,  # as a VM reports it
        resources=tuple(names)[:MAX_NAMES],
        not_before=min(dates, default=None),
        duration=max((story.event.duration for story in stories if story.event.duration is not None), default=None),
    )


def by_progress(stories: Collection[Story]) -> tuple[list[Story], list[Story], list[Story]]:
    """Return the stories that are still to come, those under way, and those that are over."""
    return (
        [story for story in stories if story.standing is SCHEDULED],
        [story for story in stories if story.standing is STARTED],
        [story for story in stories if story.standing in OVER],
    )


def affected(stories: Iterable[Story]) -> list[str]:
    """Return the names of the affected VMs in natural order, each once."""
    return sorted({name for story in stories for name in story.event.resources}, key=natural)


def _urgency(story: Story) -> tuple[int, datetime, str]:
    return _severity(story.event), story.not_before or story.first_seen, story.event.key


def _notification(wave: Wave, event: Event, kind: LifecycleKind, standing: Standing, now: datetime) -> Notification:
    stories, over = list(wave.stories.values()), standing in OVER
    to_come, under_way, done = by_progress(stories)
    measured = [one for story in stories for one in story.measured.values()]
    facts = FleetFacts(
        fleet_events=len(stories),
        fleet_vms=len({name for story in stories for name in story.event.vms}),
        fleet_reported_by=len(reporters(stories)),
        fleet_under_way=len(under_way),
        fleet_over=len(done),
    )
    first_seen = min(story.first_seen for story in stories)
    started = min((story.started for story in stories if story.started is not None), default=None)
    ended = max((story.over for story in stories if story.over is not None), default=None) if over else None
    gaps = [one.interruption for one in measured if over and one.interruption is not None]
    reason = _REASONS[kind]
    if any(story.late for story in stories):
        reason = "corrected"
    elif over and any(story.given_up for story in stories):
        reason = AS_FAR_AS_KNOWN
    dates = [one.not_before for one in stories if one.not_before is not None]
    not_before = event.not_before or (None if to_come else min(dates, default=None))
    change = Change(
        id=change_id(wave.event_key, kind, str(wave.number) if kind == "updated" else "", wave.nth),
        kind=kind,
        reason=reason,
        time=now,
        event=event,
        scope="self",  # it affects the fleet
        incarnation=0,
        first_seen=first_seen,
        previous=wave.notified_event,
        outcome=OUTCOMES.get(standing),
        not_before=not_before,
        ahead_seconds=_seconds(now, not_before) if standing not in (STARTED, FINISHED) else None,
        notice_seconds=min((one.notice for one in measured if one.notice is not None), default=None),
        scheduled_seconds=_seconds(first_seen, started) if kind == "started" else None,
        started_seconds=_seconds(started, ended),
        interruption=max(gaps, default=None),
        over_since=ended,
    )
    place, exercise = place_of(stories), any(story.exercise for story in stories)
    return Notification(change, vm_of(place, event.resources), place, facts, exercise, wave.routed)


def reporters(stories: Iterable[Story]) -> set[str]:
    """Return the VMs that have reported any of these stories."""
    return set[str]().union(*(story.reported for story in stories))


def _seconds(begin: datetime | None, end: datetime | None) -> float | None:
    return max(0.0, (end - begin).total_seconds()) if begin is not None and end is not None else None


def place_of(stories: Iterable[Story]) -> Place:
    """Return what the places of these stories have in common."""
    return reduce(Place.shared, (story.place for story in stories))


def vm_of(place: Place, names: tuple[str, ...]) -> Vm:
    """Return what the VMs of a place have in common, for routes and records; their name if there is only one."""
    tags = dict(place.tags)
    return view(
        Vm,
        place,
        name=names[0] if len(set(names)) == 1 else "",
        subscription_id=place.subscription,
        location=place.region,
        tags=tags,
        record_tags=tuple(tags),
    )
