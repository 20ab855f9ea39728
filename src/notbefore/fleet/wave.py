"""``Wave``: a group of stories that are notified together, and what they have in common. Pure.

A wave has the form of one event, with all its VMs as ``Resources``, so that every sink and route of
the agent can handle it.
"""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import SILENT
from notbefore.core.document import SCHEDULED, STARTED, Event
from notbefore.core.event_types import SEVERITIES
from notbefore.core.record import FleetFacts, Vm
from notbefore.core.routing import severity_of
from notbefore.core.text import natural
from notbefore.fleet.hub_records import Place
from notbefore.fleet.story import OVER, STATUS_ORDER, Standing, Story

VMS_IN_NOTIFICATION: Final = 2_000  # further ones are left out

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


class Wave(Struct, array_like=True):
    """One group of stories. Mutable: only ``Waves`` and ``notify`` change it."""

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
        """The key under which ``Waves`` has it; it must have stories."""
        story = next(iter(self.stories.values()))
        return story.labels

    @property
    def heard_at(self) -> float:
        """When the last record about it came, in Unix seconds; it must have stories."""
        return max(story.heard_at for story in self.stories.values())

    @property
    def standing(self) -> Standing:
        """The state of the wave, by the states of its stories."""
        standings: set[Standing] = set()
        for story in self.stories.values():
            if story.standing is Standing.STARTED:
                return Standing.STARTED  # at once, because a wave may have thousands of stories
            standings.add(story.standing)
        for standing in _BY_WEIGHT:
            if standing in standings:
                return standing
        return Standing.NEW


OpenWaves = dict[tuple[str, ...], Wave]
"""By ``Story.labels``: resource group, values of ``group_by``, whether an exercise, the routes."""


class Progress(NamedTuple):
    """The stories of a wave by how far they are."""

    to_come: list[Story]
    under_way: list[Story]
    over: list[Story]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many stories are in each part."""
        return len(self.to_come), len(self.under_way), len(self.over)


def copied(open_waves: OpenWaves) -> OpenWaves:
    """Return a copy of waves, which shares nothing with them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(open_waves), type=OpenWaves)


# ---- a wave as one event


def severity(event: Event) -> int:
    """Return the rank of an event's severity: the smallest is the most severe."""
    return SEVERITIES.index(severity_of(event.event_type, None, event.duration))


def event_of_wave(wave: Wave, standing: Standing) -> Event:
    """Return the wave as one event, with the first NotBefore of its events that have not started.

    Its VMs are in the order of ``by_progress``: of too many, it names those that still have time.
    """
    stories = list(wave.stories.values())
    live = [story for story in stories if story.standing not in OVER] or stories
    most_urgent = min(live, key=_urgency)
    if len(stories) == 1 and wave.event_key == most_urgent.event.key:
        return _event_of_story(most_urgent, standing)

    names: dict[str, None] = {}  # in order, each once
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


def _event_of_story(story: Story, standing: Standing) -> Event:
    """Return the event of a story; once it has started, without its NotBefore."""
    not_before = story.not_before
    if standing is Standing.STARTED:
        not_before = None
    return replace(story.event, not_before=not_before)


def by_progress(stories: Collection[Story]) -> Progress:
    """Return the stories of events to come, of events under way, and of those that are over."""
    return Progress(
        to_come=[story for story in stories if story.standing is Standing.SCHEDULED],
        under_way=[story for story in stories if story.standing is Standing.STARTED],
        over=[story for story in stories if story.standing in OVER],
    )


def _named(stories: list[Story]) -> list[Story]:
    """Return the stories whose VMs a notification names.

    While VMs are silent, those that are heard from again are not named: only the end names them.
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
    return severity(story.event), date, story.event.key


def facts_of(stories: list[Story]) -> FleetFacts:
    """Return the facts that all reports of these stories show together; there is at least one."""
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
