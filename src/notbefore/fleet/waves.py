"""``Waves``: stories that belong together, and the moments at which people are notified of them. Pure.

In Alertmanager's words: ``group_by`` says which stories are one group (a wave), ``group_wait`` how long the first
notification waits for more of them, ``group_interval`` how long a digest does. What changes how a wave stands is
notified at once. A wave is shown as one event, with all its VMs as ``Resources``, so that every sink and route of the
agent takes it.

All times are those at which the hub took the records in. So whoever reads the same log, and however late, makes the
same notifications at the same moments, under the same ids.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from functools import reduce
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import Change, Gap, LifecycleKind, Reason, change_id
from notbefore.core.document import Event
from notbefore.core.record import FleetFacts, Spread, Vm
from notbefore.fleet.merge import (
    CANCELED,
    ENDED,
    FINISHED,
    NEW,
    OUTCOME,
    OVER,
    SCHEDULED,
    STARTED,
    STEPS,
    Standing,
    Story,
    content,
    from_unix,
)
from notbefore.fleet.reading import Place

EACH_EVENT: Final = ("event_id",)
MAX_ROUTED: Final = 4  # places by which the notifications of one wave are routed
MAX_NAMES: Final = 2_000  # of VMs in one notification
SHARE_OF_NOTICE: Final = 3  # the first notification waits for a third of the notice at most: a Preempt has 30 s

LABELS: Final[dict[str, Callable[[Story], str]]] = {
    "event_id": lambda story: story.event.key,
    "event_type": lambda story: story.event.event_type,
    "event_source": lambda story: story.event.event_source or "",
    "region": lambda story: story.place.region,
    "zone": lambda story: story.zone,
    "subscription": lambda story: story.place.subscription,
    "resource_group": lambda story: story.place.resource_group,
    "scale_set": lambda story: story.place.scale_set,
}

_OUTCOMES: Final = {ENDED: "unknown", CANCELED: "canceled", FINISHED: "finished"}
_REASONS: Final[dict[LifecycleKind, Reason]] = {
    "announced": "first_seen_scheduled",
    "updated": "content_changed",
    "started": "status_started",
    "canceled": "gone_before_start",
    "finished": "gone_after_start",
    "ended": "not_watched",
}


class Grouping(Struct, frozen=True):
    """How stories are grouped; times in seconds."""

    group_by: tuple[str, ...] = EACH_EVENT  # of `LABELS`, or `tags.NAME`
    group_wait: float = 10.0
    group_interval: float = 300.0
    configured: str = ""  # a digest of all that instances have to have in common

    @property
    def each_event(self) -> bool:
        """Every event is a group of its own: there is nothing to wait for."""
        return "event_id" in self.group_by


class Wave(Struct):
    """One group of stories. Mutable: only ``Waves`` changes it."""

    key: tuple[str, ...]  # the values of ``group_by``
    event_key: str  # what its notifications are known by
    stories: dict[str, Story] = {}
    notified: Standing = NEW  # what was notified last
    notified_event: Event | None = None
    notified_at: float = 0.0  # Unix seconds of the hub's clock
    due: float | None = None  # when the next notification is to be made
    number: int = 0  # of the digests so far
    nth: int = 0  # of an event that came back: how often it was over before
    routed: tuple[Vm, ...] = ()  # what its VMs had in common at its notifications so far, each once


class Notification(Struct, frozen=True):
    """A change of a wave, with whose it is, and what is only known of many VMs."""

    change: Change
    vm: Vm
    facts: FleetFacts
    exercise: bool = False
    before: tuple[Vm, ...] = ()  # what its VMs had in common: who was notified by that hears of the end as well


class Waves:
    """The waves of one partition."""

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping
        self.open: dict[tuple[str, ...], Wave] = {}
        self.next_due = float("inf")  # Unix seconds: nothing is due before

    def restore(self, waves: Iterable[Wave]) -> None:
        """Go on with the waves of a snapshot."""
        for wave in waves:
            self.open[wave.key] = wave
            self._expect(wave.due)

    def note(self, story: Story, now: float, notified: Standing = NEW) -> None:
        """A story has begun or has changed, ``now`` by the hub's clock: its wave is due at once, or with its digest.

        ``notified``: what was notified of it before its wave was over, where it turns out that it is not.
        """
        key = story.labels = self.key_of(story)
        wave = self.open.get(key)
        if wave is None:
            again = 2 * story.nth + (notified is not NEW)
            wave = self.open[key] = Wave(key, self._event_key(key, story, again), notified=notified, nth=story.nth)
        wave.stories[story.event.key] = story
        due = self._due(wave, story, now)
        if wave.due is None or due < wave.due or standing_of(wave) in OVER:
            wave.due = due
        self._expect(wave.due)

    def key_of(self, story: Story) -> tuple[str, ...]:
        """The key of the wave that a story belongs to."""
        return story.labels or tuple([_label(name, story) for name in self._grouping.group_by])

    def add(self, wave: Wave) -> None:
        """Take over a wave of another partition; its stories join the one of the same key, where there is one."""
        known = self.open.setdefault(wave.key, wave)
        known.stories |= wave.stories
        self._expect(wave.due)

    def split(self, wave: Wave, keys: Collection[str]) -> Wave:
        """Take these stories out of an open wave; returns what is to go on elsewhere: the wave itself, if it is all.

        Else a wave of its own, known by another key: each of the two may be over before the other is.
        """
        moved = {key: story for key, story in wave.stories.items() if key in keys}
        if len(moved) == len(wave.stories):
            return self.open.pop(wave.key)
        wave.stories = {key: story for key, story in wave.stories.items() if key not in keys}
        again = change_id(wave.event_key, "announced", min(moved), 1)
        return replace(wave, event_key="wave-" + again[:24], stories=moved)

    def flush(self, now: float) -> Iterator[tuple[Wave, Notification | None]]:
        """The waves that are due by ``now`` in the order of their moments, with what is to be notified of each.

        Those that are over are no longer among the open ones then.
        """
        if now < self.next_due:
            return
        due = [(wave.due, wave) for wave in self.open.values() if wave.due is not None and wave.due <= now]
        for moment, wave in sorted(due, key=lambda one: (one[0], one[1].event_key)):
            made = self._notify(wave, moment)
            if wave.notified in OVER:
                del self.open[wave.key]
            yield wave, made
        self.next_due = min((wave.due for wave in self.open.values() if wave.due is not None), default=float("inf"))

    def _expect(self, due: float | None) -> None:
        if due is not None and due < self.next_due:
            self.next_due = due

    def _event_key(self, key: tuple[str, ...], story: Story, again: int) -> str:
        if self._grouping.each_event:
            return story.event.key
        return "wave-" + change_id("\n".join(key), "announced", story.event.key, again)[:24]

    def _due(self, wave: Wave, story: Story, now: float) -> float:
        grouping = self._grouping
        standing = standing_of(wave)
        if grouping.each_event:
            return now
        if wave.notified is NEW:
            notice = (story.not_before.timestamp() - now) / SHARE_OF_NOTICE if story.not_before else 0.0
            return now + max(0.0, min(grouping.group_wait, notice))
        if standing is STARTED and wave.notified is SCHEDULED:
            return now
        if standing in OVER:  # the next VM's event may come now
            return now + grouping.group_interval
        return max(now, wave.notified_at + grouping.group_interval)

    def _notify(self, wave: Wave, moment: float) -> Notification | None:
        wave.due = None  # first: if it fails, it keeps no other wave waiting
        standing = standing_of(wave)
        if wave.notified is STARTED and standing is SCHEDULED:
            standing = STARTED
        kind = STEPS[wave.notified, standing]
        event = event_of_wave(wave, standing)
        if kind == "updated" and wave.notified_event is not None and content(event) == content(wave.notified_event):
            kind = None
        if kind is None:
            return None
        wave.number += kind == "updated"
        identity = change_id(wave.event_key, kind, str(wave.number) if kind == "updated" else "", wave.nth)
        made = _notification(wave, event, (kind, identity, standing), from_unix(moment))
        wave.notified, wave.notified_event, wave.notified_at = standing, event, moment
        return made


def _label(name: str, story: Story) -> str:
    tag = name.removeprefix("tags.")
    return LABELS[name](story) if tag == name else dict(story.place.tags).get(tag.casefold(), "")


def standing_of(wave: Wave) -> Standing:
    """How a wave stands: started while one of its events is, over once all of them are."""
    standings = {story.standing for story in wave.stories.values()}
    for standing in (STARTED, SCHEDULED, FINISHED, CANCELED, ENDED):
        if standing in standings:
            return standing
    return NEW


def event_of_wave(wave: Wave, standing: Standing) -> Event:
    """The wave as one event: all VMs, and the next NotBefore of those that have not started."""
    stories = list(wave.stories.values())
    live = [story for story in stories if story.standing not in OVER] or stories
    first = min(live, key=lambda story: (story.not_before or story.first_seen, story.event.key))
    if len(stories) == 1 and wave.event_key == first.event.key:
        return replace(first.event, not_before=None if standing is STARTED else first.not_before)
    names = dict.fromkeys(name for story in stories for name in story.affected)
    scheduled = [one.not_before for one in live if one.standing is SCHEDULED and one.not_before is not None]
    return Event(
        event_id=wave.event_key,
        event_type=first.event.event_type,
        event_status="Started" if standing is STARTED else "Scheduled",
        resource_type=first.event.resource_type,
        resources=tuple(names)[:MAX_NAMES],
        not_before=min(scheduled, default=None),
        description=first.event.description,
        event_source=first.event.event_source,
        duration=max((story.event.duration for story in stories if story.event.duration is not None), default=None),
    )


def _notification(wave: Wave, event: Event, step: tuple[LifecycleKind, str, Standing], time: datetime) -> Notification:
    kind, identity, standing = step
    stories = list(wave.stories.values())
    facts = facts_of(stories)
    first_seen = min(story.first_seen for story in stories)
    starts = [story.started for story in stories if story.started is not None]
    started, notice = min(starts, default=None), facts.notice
    ended = max((story.over for story in stories if story.over is not None), default=None)
    gap = facts.interruption.max if facts.interruption is not None and standing in OVER else None
    change = Change(
        id=identity,
        kind=kind,
        reason="as_far_as_known" if any(story.given_up for story in stories) and standing in OVER else _REASONS[kind],
        time=time,
        event=event,
        scope="self",  # of the fleet
        incarnation=0,
        first_seen=first_seen,
        previous=wave.notified_event,
        previous_not_before=wave.notified_event.not_before if wave.notified_event is not None else None,
        outcome=_OUTCOMES[OUTCOME[standing]] if standing in OVER else None,  # type: ignore[arg-type]
        not_before=event.not_before or min((one.not_before for one in stories if one.not_before), default=None),
        notice_seconds=notice.min if notice is not None else None,
        scheduled_seconds=_seconds(first_seen, started) if kind == "started" else None,
        started_seconds=_seconds(started, ended) if standing in OVER else None,
        interruption=Gap(gap, gap) if gap is not None else None,
    )
    vm = vm_of(stories)
    before = tuple(one for one in wave.routed if one != vm)
    if vm not in wave.routed and len(wave.routed) < MAX_ROUTED:
        wave.routed += (vm,)
    return Notification(change, vm, facts, any(story.exercise for story in stories), before)


def facts_of(stories: Iterable[Story]) -> FleetFacts:
    """What many VMs say together."""
    stories = list(stories)
    measured = [one for story in stories for one in story.measured.values()]
    return FleetFacts(
        events=len(stories),
        vms=len({name.casefold() for story in stories for name in story.affected}),
        reported_by=len({vm for story in stories for vm in story.reported}),
        under_way=sum(story.standing is STARTED for story in stories),
        over=sum(story.standing in OVER for story in stories),
        notice=Spread.of(one.notice for one in measured),
        started=Spread.of(one.started_for for one in measured),
        interruption=Spread.of(one.interruption for one in measured),
    )


def _seconds(begin: datetime | None, end: datetime | None) -> float | None:
    return max(0.0, (end - begin).total_seconds()) if begin is not None and end is not None else None


def vm_of(stories: list[Story]) -> Vm:
    """What the VMs have in common, and the name where there is one alone."""
    place = reduce(Place.shared, (story.place for story in stories))
    names = {name for story in stories for name in story.affected}
    zones = {story.zone for story in stories}
    tags = dict(place.tags)
    return Vm(
        name=next(iter(names)) if len(names) == 1 else "",
        subscription_id=place.subscription,
        resource_group=place.resource_group,
        location=place.region,
        zone=zones.pop() if len(zones) == 1 else "",
        scale_set=place.scale_set,
        tags=tags,
        record_tags=tuple(tags),
    )
