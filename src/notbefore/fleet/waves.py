"""``Waves``: groups of stories that belong together, and the times of their notifications. Pure.

The terms are Alertmanager's. ``group_by`` defines which stories of one resource group and the same
routes are a group, called a wave. ``group_wait`` is how long the first notification waits for more
of them, ``group_interval`` how long a digest waits. The start of a wave is notified at once; its
end waits for ``group_interval``. News that would lose its notice by waiting for the next digest
does not wait for it. A wave has the form of one event, with all its VMs as ``Resources``, so that
every sink and route of the agent can handle it.

All times are the hub's: every instance that reads the same log makes the same notifications, under
the same ids.
"""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import (
    AS_FAR_AS_KNOWN,
    AZURE_CANCELED,
    AZURE_COMPLETED,
    SILENT,
    Change,
    LifecycleKind,
    Reason,
    change_id,
)
from notbefore.core.document import SCHEDULED, STARTED, Event
from notbefore.core.event_types import SEVERITIES
from notbefore.core.outbox_rows import Schedule
from notbefore.core.record import WAVE, FleetFacts, Vm
from notbefore.core.routing import Route, severity_of
from notbefore.core.text import natural
from notbefore.fleet.hub_records import Place
from notbefore.fleet.story import (
    OUTCOMES,
    OVER,
    STATUS_ORDER,
    STEPS,
    Standing,
    Story,
    content,
    from_unix,
)

MAX_ROUTED: Final = 16  # places by which the notifications of one wave are routed, by other routes
VMS_IN_NOTIFICATION: Final = 2_000  # further ones are left out
SHARE_OF_NOTICE: Final = 3  # news waits for a third of the notice left at most: a Preempt has 30 s
SHARE_OF_DIGEST: Final = 2  # or for the next digest, if it leaves at least half of that notice
DIGESTS_PER_STANDING: Final = 1_000  # a wave that begins again numbers its digests from a multiple

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

_BY_WEIGHT: Final = (
    Standing.STARTED,
    Standing.SCHEDULED,
    Standing.ENDED,
    Standing.FINISHED,
    Standing.CANCELED,
)
"""The standing of a wave is the first of these that one of its stories has.

It is started while one of its events is, and over once all of them are. Then the least known end
counts.
"""


class Grouping(Struct, frozen=True):
    """How stories are grouped; times in seconds.

    Stories of two resource groups are never one group.
    """

    group_by: tuple[str, ...]  # see ``_label``
    group_wait: float
    group_interval: float
    over_after: float  # after NotBefore, the start and the last record: it is over without reports
    routes: tuple[Route, ...]  # stories with different routes are different groups

    @property
    def each_event(self) -> bool:
        """Whether every event is a group of its own: then there is nothing to wait for."""
        return "event_id" in self.group_by


class Wave(Struct, array_like=True):
    """One group of stories. Mutable: only ``Waves`` changes it."""

    event_key: str  # the event key of its notifications
    stories: dict[str, Story] = {}
    notified: Standing = Standing.NEW  # the standing that was notified last
    notified_event: Event | None = None
    notified_at: float = 0.0  # Unix seconds of the hub's clock; when it began, if not notified yet
    due: float | None = None  # when the next notification is due, in Unix seconds
    number: int = 0  # the number of the last digest
    nth: int = 0  # the number of earlier events with this id
    routed: tuple[Vm, ...] = ()  # the places that route its notifications, each once
    notified_progress: tuple[int, ...] = ()  # ``Progress.counts`` as notified

    @property
    def labels(self) -> tuple[str, ...]:
        """The key under which it is open; it must have stories."""
        story = next(iter(self.stories.values()))
        return story.labels

    @property
    def heard_at(self) -> float:
        """When the last record about it came, in Unix seconds; it must have stories."""
        return max(story.heard_at for story in self.stories.values())

    @property
    def standing(self) -> Standing:
        """Its state, by those of its stories."""
        standings: set[Standing] = set()
        for story in self.stories.values():
            if story.standing is Standing.STARTED:
                return Standing.STARTED  # nothing counts more: a wave may have thousands of stories
            standings.add(story.standing)
        for standing in _BY_WEIGHT:
            if standing in standings:
                return standing
        return Standing.NEW


OpenWaves = dict[tuple[str, ...], Wave]
"""By ``Story.labels``: resource group, values of ``group_by``, whether an exercise, the routes."""


class Notification(Struct, frozen=True):
    """A change of a wave, with what its VMs have in common, and what only many VMs show."""

    change: Change
    vm: Vm
    place: Place  # of ``vm``
    facts: FleetFacts
    exercise: bool = False
    routed: tuple[Vm, ...] = ()  # the places that route it: its end goes where its start went


class DueWave(NamedTuple):
    """A wave that was due, and its notification; ``None`` if there is nothing to notify of."""

    wave: Wave
    notification: Notification | None


class Progress(NamedTuple):
    """The stories of a wave by how far they are."""

    to_come: list[Story]
    under_way: list[Story]
    over: list[Story]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many stories are in each part."""
        return len(self.to_come), len(self.under_way), len(self.over)


class Waves:
    """The waves of one partition; ``open_waves``: those of its previous owner, changed in place."""

    def __init__(self, grouping: Grouping, open_waves: OpenWaves) -> None:
        self._grouping = grouping
        self.open = open_waves
        self._schedule = Schedule[tuple[str, ...]]()  # the waves that have a due time
        for labels, wave in open_waves.items():
            self._schedule.put(labels, wave.due)

    # ---- stories

    def labels(self, story: Story) -> tuple[str, ...]:
        """Return the key of the wave of a new story."""
        labels = [story.group]
        labels += [_label(name, story) for name in self._grouping.group_by]
        if story.exercise:
            labels.append("exercise")  # never in a wave of real events
        return (*labels, self._routes_of(story))

    def labels_of_region(self, story: Story) -> tuple[str, ...]:
        """Return the key of a wave that has the stories of a whole region."""
        return ("region", story.place.region.casefold(), self._routes_of(story))

    def _routes_of(self, story: Story) -> str:
        vm = vm_of(story.place, story.event.resources)
        return matching_routes(vm, story.event, self._grouping.routes)

    def note(self, story: Story, now: float, notified: Standing = Standing.NEW) -> None:
        """Note that a story is new or has changed at ``now``; set when its wave is due.

        ``notified``: the last notified standing of a story that was over, and turns out not to be.
        """
        if not story.labels:
            story.labels = self.labels(story)
        wave = self.open.get(story.labels)
        if wave is None:
            wave = self._begin(story, now, notified)

        was_over = wave.standing in OVER
        wave.stories[story.event.key] = story
        self.route(story)

        standing = wave.standing
        due = self._due(wave, standing, story, now)
        was_notified = wave.notified is not Standing.NEW
        ends_or_continues = was_notified and (standing in OVER or was_over)
        if wave.due is None or due < wave.due or ends_or_continues:
            wave.due = due
            self._schedule.put(story.labels, due)

    def route(self, story: Story) -> None:
        """Route the story's wave also by its place, if other routes match there than elsewhere."""
        wave = self.open[story.labels]
        routes = self._grouping.routes
        vm = vm_of(story.place, story.event.resources)
        matching = matching_routes(vm, story.event, routes)

        for routed_vm in wave.routed:
            if matching_routes(routed_vm, story.event, routes) == matching:
                return
        if len(wave.routed) < MAX_ROUTED:
            wave.routed = (*wave.routed, vm)

    def continue_wave(self, wave: Wave, now: float) -> bool:
        """Add a wave that another partition has had, unless these labels have one here."""
        labels = wave.labels
        if labels in self.open:
            return False
        if wave.due is not None:
            wave.due = max(wave.due, now)
        self.open[labels] = wave
        self._schedule.put(labels, wave.due)
        return True

    def drop(self, story: Story) -> Wave:
        """Remove a story from its wave, which is returned; drop the wave if it has no other one."""
        wave = self.open[story.labels]
        del wave.stories[story.event.key]
        if not wave.stories:
            del self.open[story.labels]
            self._schedule.drop(story.labels)
        return wave

    def forget_over(self) -> list[Story]:
        """Remove and return the stories that are over, before any wave is notified."""
        forgotten: list[Story] = []
        for wave in list(self.open.values()):
            for story in by_progress(wave.stories.values()).over:
                self.drop(story)
                forgotten.append(story)
        return forgotten

    def _begin(self, story: Story, now: float, notified: Standing) -> Wave:
        """Add the wave of a story that has none."""
        notified_at = 0.0
        if notified is Standing.NEW:
            notified_at = now
        wave = Wave(
            event_key=self._event_key(story, notified),
            notified=notified,
            notified_at=notified_at,
            number=DIGESTS_PER_STANDING * notified,  # the ids of its digests must not repeat
            nth=story.nth,
        )
        self.open[story.labels] = wave
        return wave

    def _event_key(self, story: Story, notified: Standing) -> str:
        """Return the key of a new wave.

        A group that begins again with the same event, which was over, gets another key.
        """
        if self._grouping.each_event and not story.shares_id:
            return story.event.key
        labels = "\n".join(story.labels)
        first_story = f"{story.event.key} {notified.name}"
        return WAVE + change_id(labels, "announced", first_story, story.nth)[:24]

    # ---- when a wave is due

    def _due(self, wave: Wave, standing: Standing, story: Story, now: float) -> float:
        """Return when a wave is due after a change of one of its stories."""
        grouping = self._grouping

        # a correction waits for others like it
        if story.late:
            return now + grouping.group_wait

        # with a wave for each event, nothing else can join it
        if grouping.each_event:
            if not story.awaits_reports:
                return now
            wait_ends = now + grouping.group_wait
            return min(wait_ends, wave.due or wait_ends)

        # the event with the NotBefore that people expect is over: others may end with it
        is_outdated = standing is not Standing.STARTED and _is_outdated(wave, now)
        if is_outdated and story.standing in OVER:
            return now + grouping.group_wait

        # people do not know of the wave, or expect a NotBefore that it no longer has
        if wave.notified is Standing.NEW or is_outdated:
            return self._soon(story, now)

        return self._due_again(wave, standing, story, now)

    def _due_again(self, wave: Wave, standing: Standing, story: Story, now: float) -> float:
        """Return when a wave is due that people know of."""
        # the first start is what people wait for
        if standing is Standing.STARTED and wave.notified is Standing.SCHEDULED:
            return now

        # the end waits, as the next VM's event may still come
        if standing in OVER:
            return now + self._grouping.group_interval

        # news that people cannot act on waits for the next digest
        digest = max(now, wave.notified_at + self._grouping.group_interval)
        if not _is_urgent(wave, story, now):
            return digest

        # urgent news also waits for the digest, if that leaves enough of the notice
        if digest - now <= _notice_left(story, now) / SHARE_OF_DIGEST:
            return digest
        return min(self._soon(story, now), digest)

    def _soon(self, story: Story, now: float) -> float:
        """Return when news of a story is due that may wait for ``group_wait``."""
        longest = _notice_left(story, now) / SHARE_OF_NOTICE
        return now + max(0.0, min(self._grouping.group_wait, longest))

    def _rests_until(self, wave: Wave) -> float:
        """Return until when more events may join a wave that was over before its notification."""
        if wave.notified is not Standing.NEW:
            return 0.0
        if wave.standing not in OVER or self._grouping.each_event:
            return 0.0

        last_heard = max(story.heard_at for story in wave.stories.values())
        latest = wave.notified_at + self._grouping.group_interval
        return min(last_heard + self._grouping.group_wait, latest)

    # ---- notifications

    def first_due(self) -> float:
        """Return when the next wave is due, in Unix seconds; infinite if none is."""
        return self._schedule.first()

    def notify_next(self, now: float) -> DueWave | None:
        """Notify of the wave that is due first; ``None`` if none is due by ``now``.

        A wave that is over is removed from ``open``.
        """
        while True:
            labels = self._schedule.pop(now)
            if labels is None:
                return None

            wave = self.open[labels]
            rests_until = self._rests_until(wave)
            if rests_until > now:
                wave.due = rests_until
                self._schedule.put(labels, rests_until)
                continue

            notification = _notify(wave)
            if wave.standing in OVER:
                del self.open[labels]
            return DueWave(wave, notification)


def copied(open_waves: OpenWaves) -> OpenWaves:
    """Return a copy of waves, which shares nothing with them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(open_waves), type=OpenWaves)


def _label(name: str, story: Story) -> str:
    """Return the value of a ``group_by`` name.

    It is a field of the event or of its place, or the value of the tag of ``tags.NAME``.
    """
    if name.startswith("tags."):
        tags = dict(story.place.tags)
        return tags.get(name.removeprefix("tags.").casefold(), "")
    if name == "event_id":
        return story.event.key
    if name.startswith("event_"):
        return getattr(story.event, name) or ""
    value: str = getattr(story.place, name)
    return value.casefold()


# ---- judging the news of a wave


def _is_outdated(wave: Wave, now: float) -> bool:
    """Whether people expect a NotBefore that no event to come has any more."""
    # people know of no NotBefore: they were not notified, or it has started
    if wave.notified is not Standing.SCHEDULED or wave.notified_event is None:
        return False

    # no one is reminded of a NotBefore that is unknown, or has passed
    expected = wave.notified_event.not_before
    if expected is None or expected.timestamp() <= now:
        return False

    to_come = by_progress(wave.stories.values()).to_come
    return all(story.not_before != expected for story in to_come)


def _is_urgent(wave: Wave, story: Story, now: float) -> bool:
    """Whether a story is news that people can still prepare for."""
    # it has started, or is over: nothing is left to prepare for
    if story.standing is not Standing.SCHEDULED:
        return False

    # no notification has named the event
    notified_event = wave.notified_event
    if not story.named or notified_event is None:
        return True

    # it affects VMs that no notification has named for this event
    if story.joined:
        return True

    # it comes before what people expect
    if _is_earlier(story, notified_event.not_before, now):
        return True

    # it is more severe than what people expect
    return _severity(story.event) < _severity(notified_event)


def _is_earlier(story: Story, expected: datetime | None, now: float) -> bool:
    """Whether a story comes before an expected NotBefore."""
    if story.not_before is None:
        return False

    # people expect nothing that is still to come
    if expected is None or expected.timestamp() <= now:
        return True
    return story.not_before < expected


def _notice_left(story: Story, now: float) -> float:
    """Return the seconds until NotBefore, negative if it has passed; 0 if it is unknown."""
    if story.not_before is None:
        return 0.0
    return story.not_before.timestamp() - now


def _severity(event: Event) -> int:
    """Return the rank of an event's severity: the smallest is the most severe."""
    return SEVERITIES.index(severity_of(event.event_type, None, event.duration))


# ---- the routes of a wave


def matching_routes(vm: Vm, event: Event, routes: tuple[Route, ...]) -> str:
    """Return the numbers of the routes that match an event.

    Matchers that change with time do not count.
    """
    routed_vm = routable(vm)
    numbers: list[str] = []
    for number, route in enumerate(routes):
        match = route.match
        if not match.is_here(routed_vm) or not match.holds(event):
            continue
        numbers.append(str(number))
        if not (route.go_on or match.change):
            break
    return " ".join(numbers)


def routable(vm: Vm) -> Vm:
    """Return the VM with an id, so that routes take an empty value for known, and do not match."""
    if not vm.subscription_id:
        return vm
    return replace(vm, vm_id="fleet")


# ---- a wave as one event


def event_of_wave(wave: Wave, standing: Standing) -> Event:
    """Return the wave as one event, with the first NotBefore of its events that have not started.

    Its VMs are in the order of ``by_progress``: of too many, it names those that still have time.
    """
    stories = list(wave.stories.values())
    live = [story for story in stories if story.standing not in OVER] or stories
    most_urgent = min(live, key=_urgency)
    if len(stories) == 1 and wave.event_key == most_urgent.event.key:
        not_before = None if standing is Standing.STARTED else most_urgent.not_before
        return replace(most_urgent.event, not_before=not_before)

    names: dict[str, None] = {}
    for part in by_progress(_named(stories)):
        names |= dict.fromkeys(affected(part))

    not_started = [story for story in live if story.standing is not Standing.STARTED]
    dates = [story.not_before for story in not_started if story.not_before is not None]

    event_status = SCHEDULED  # as a VM reports it
    if standing in (Standing.STARTED, Standing.FINISHED):
        event_status = STARTED

    durations = [story.event.duration for story in stories if story.event.duration is not None]
    return replace(
        most_urgent.event,
        event_id=wave.event_key,
        event_status=event_status,
        resources=tuple(names)[:VMS_IN_NOTIFICATION],
        not_before=min(dates, default=None),
        duration=max(durations, default=None),
    )


def by_progress(stories: Collection[Story]) -> Progress:
    """Return the stories that are still to come, those under way, and those that are over."""
    return Progress(
        to_come=[story for story in stories if story.standing is Standing.SCHEDULED],
        under_way=[story for story in stories if story.standing is Standing.STARTED],
        over=[story for story in stories if story.standing in OVER],
    )


def _named(stories: list[Story]) -> list[Story]:
    """Return the stories whose VMs a notification names.

    A silent VM that is heard from again is silent no longer: it is only named at the end.
    """
    if stories[0].event.event_type != SILENT:
        return stories
    return by_progress(stories).under_way or stories


def affected(stories: Iterable[Story]) -> list[str]:
    """Return the names of the affected VMs in natural order, each once."""
    names: set[str] = set()
    for story in stories:
        names.update(story.event.resources)
    return sorted(names, key=natural)


def reporters(stories: Iterable[Story]) -> set[str]:
    """Return the VMs that have reported any of these stories."""
    names: set[str] = set()
    for story in stories:
        names.update(story.reported)
    return names


def azure_status(stories: Iterable[Story]) -> str | None:
    """Return the last status that Azure itself has reported; ``None`` if it has reported none.

    Of several events, it is that of the one that is the least advanced.
    """
    words = [story.azure for story in stories if story.azure is not None]
    statuses = [word.status for word in words]
    return min(statuses, key=STATUS_ORDER.index, default=None)


def place_of(stories: Iterable[Story]) -> Place:
    """Return what the places of these stories have in common; there must be at least one."""
    first_place, *places = [story.place for story in stories]
    common = first_place
    for place in places:
        common = common.shared(place)
    return common


def vm_of(place: Place, names: tuple[str, ...]) -> Vm:
    """Return what the VMs of a place have in common, for routes and records.

    It has their name if there is only one.
    """
    tags = dict(place.tags)
    name = ""
    if len(set(names)) == 1:
        name = names[0]
    return Vm(
        name=name,
        subscription_id=place.subscription,
        resource_group=place.resource_group,
        location=place.region,
        zone=place.zone,
        scale_set=place.scale_set,
        tags=tags,
        record_tags=tuple(tags),
    )


def _urgency(story: Story) -> tuple[int, datetime, str]:
    """Return the rank of a story: the smallest is the most urgent."""
    date = story.not_before or story.first_seen
    return _severity(story.event), date, story.event.key


# ---- the notification of a wave


def _notify(wave: Wave) -> Notification | None:
    """Return the notification of a wave that is due; ``None`` if there is nothing to notify of."""
    due = wave.due or 0.0
    wave.due = None  # first: if this fails, the other waves do not wait

    standing = wave.standing
    event = event_of_wave(wave, standing)
    progress = by_progress(wave.stories.values()).counts
    if wave.notified is Standing.STARTED and standing is Standing.SCHEDULED:
        standing = Standing.STARTED  # it is between two of its events, and does not start twice

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
    """Whether people know all of this already."""
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


def facts_of(stories: list[Story]) -> FleetFacts:
    """Return what all reports of these stories, of which there is at least one, show together."""
    progress = by_progress(stories)
    vms: set[str] = set()
    for story in _named(stories):
        vms.update(story.vms)

    facts = FleetFacts(
        fleet_events=len(stories),
        fleet_vms=len(vms),
        fleet_reported_by=len(reporters(stories)),
        fleet_under_way=len(progress.under_way),
        fleet_over=len(progress.over),
        fleet_azure_status=azure_status(stories),
    )
    groups = {story.place.vm_group for story in _named(stories)}
    if len(groups) == 1 or stories[0].event.event_type != SILENT:
        return facts

    scale_sets = [group for group in groups if group.scale_set]
    return replace(
        facts,
        fleet_scale_sets=len(scale_sets),
        fleet_resource_groups=len(groups) - len(scale_sets),
    )


def _change(
    wave: Wave,
    event: Event,
    kind: LifecycleKind,
    standing: Standing,
    now: datetime,
) -> Change:
    stories = list(wave.stories.values())
    measured = [measures for story in stories for measures in story.measured.values()]
    notices = [measures.notice for measures in measured if measures.notice is not None]
    starts = [story.started for story in stories if story.started is not None]
    first_seen = min(story.first_seen for story in stories)
    started = min(starts, default=None)
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
        ends = [story.over for story in stories if story.over is not None]
        gaps = [measures.interruption for measures in measured if measures.interruption is not None]
        over_since = max(ends, default=None)
        interruption = max(gaps, default=None)

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
        outcome=OUTCOMES.get(standing),
        not_before=not_before,
        ahead_seconds=ahead_seconds,
        notice_seconds=min(notices, default=None),
        scheduled_seconds=scheduled_seconds,
        started_seconds=_seconds(started, over_since),
        interruption=interruption,
        over_since=over_since,
    )


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
    # people were notified of an end that was none, or not the right one
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
