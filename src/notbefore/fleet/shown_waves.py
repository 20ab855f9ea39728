"""``ShownWave``: the events of the fleet that are not over, as readers see them. Pure.

Readers are the page, the commands, the API, and calendars.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict, replace

from notbefore.core.event_types import event_type_of
from notbefore.core.text import natural
from notbefore.fleet.hub_records import Place
from notbefore.fleet.story import Story
from notbefore.fleet.wave import (
    Wave,
    affected,
    azure_status,
    by_progress,
    event_of_wave,
    place_of,
    reporters,
)
from notbefore.wording.phrases import reporters as reporters_in_words

# the fields that a mute may match
MATCHERS: Final = (
    "event_type",
    "subscription",
    "resource_group",
    "scale_set",
    "region",
    "tag",
    "vm",
)
FILTERS: Final = (*MATCHERS, "status")  # parameters of a request
OF_EVENTS: Final = ("event_type", "status")  # the filters that VMs do not have

Named = tuple[str, str, str]
"""Subscription, resource group and name, of a VM or of a group of VMs."""


class EventFacts(Struct, frozen=True, kw_only=True):
    """The facts of an event, or the facts that all events of a wave have in common."""

    event_id: str  # of the event, or of the wave
    event_type: str
    event_source: str | None = None
    subscription: str = ""  # this and the next five: common to all of its VMs; empty if they differ
    resource_group: str = ""
    scale_set: str = ""
    region: str = ""
    zone: str = ""
    tags: dict[str, str]
    vms: tuple[str, ...]  # the affected VMs; of a wave those for which it is not over
    reported_by: int  # number of VMs
    first_seen: datetime
    not_before: datetime | None
    started: datetime | None  # the first start
    description: str | None = None
    azure_status: str | None = None  # as in ``waves.azure_status``

    @property
    def is_advice(self) -> bool:
        """Whether it only advises: there is no time at which anything happens to its VMs."""
        return event_type_of(self.event_type).is_advice


class ShownWave(EventFacts, frozen=True, kw_only=True):
    """One wave in ``/api/v1/fleet/events``."""

    status: str  # scheduled, started
    vms_to_come: tuple[str, ...]  # the first ones of ``vms``: their event is still to come
    vms_under_way: tuple[str, ...]  # those that an event under way affects
    events: int
    under_way: int  # events that have started
    over: int  # events that are over
    seconds_to_not_before: float | None
    without_agent: tuple[str, ...] = ()  # those of ``vms`` that report nothing themselves
    group: str = ""  # the name of its scale set, else of its resource group

    @property
    def reporters(self) -> str:
        """Who has reported it: ``Azure and 3 VMs``."""
        return reporters_in_words(self.reported_by, by_azure=self.azure_status is not None)

    @property
    def to_come(self) -> int:
        """The number of its events that have not started: people can still prepare for them."""
        return self.events - self.under_way - self.over

    def matches(self, filters: Mapping[str, str]) -> bool:
        """Whether all filters match.

        A wave that is partly under way is both ``scheduled`` and ``started``.
        """
        other_filters = dict(filters)
        status = other_filters.pop("status", self.status).casefold()
        events_by_status = {"scheduled": self.to_come, "started": self.under_way}
        if events_by_status.get(status, 0) == 0:
            return False
        return _matches(other_filters, asdict(self), self.tags, self.vms)


class PlaceUnderWay(Struct, frozen=True, kw_only=True):
    """The waves of one type and place that have events under way, as one row of the page."""

    key: str  # identifies the row
    event_type: str
    group: str  # as in ``ShownWave``
    region: str
    started: datetime | None  # the first start
    vms: tuple[str, ...]  # those that an event under way affects
    without_agent: tuple[str, ...]  # those of them that report nothing themselves
    under_way: int  # events
    over: int
    to_come: int


class ShownPartition(Struct, frozen=True):
    """One partition of the hub.

    ``age``: seconds since its snapshot was taken; ``None``: this instance reads it.
    """

    name: str
    age: float | None


class ShownVm(NamedTuple):
    """A VM of the fleet."""

    name: str
    place: Place
    silent: bool = False


class FleetEvents(Struct, frozen=True):
    """The body of ``/api/v1/fleet/events``: the whole fleet, on any instance."""

    trouble: str  # why coming events may be unknown: the hub or a partition is not read; else empty
    partitions: tuple[ShownPartition, ...]
    waves: tuple[ShownWave, ...]
    heard: int  # number of VMs that have sent a heartbeat
    silent: tuple[str, ...]  # VMs whose heartbeats have stopped, without an event that explains it
    missing: tuple[str, ...]  # VMs of the inventory that were never heard from, or not for a day
    # whether the events of all partitions are known, though perhaps not what is new
    complete: bool = True
    # VMs that Azure has reported an event of in the last 30 days, and that report nothing
    without_agent: tuple[str, ...] = ()


# ---- filters


def wanted_vms(vms: Iterable[ShownVm], filters: Mapping[str, str]) -> list[ShownVm]:
    """Return the VMs that all filters match, except the filters that are for events alone."""
    vm_filters = {name: value for name, value in filters.items() if name not in OF_EVENTS}
    if not vm_filters:
        return list(vms)

    return [vm for vm in vms if _matches_vm(vm_filters, vm)]


def _matches_vm(filters: Mapping[str, str], vm: ShownVm) -> bool:
    return _matches(filters, vm.place._asdict(), dict(vm.place.tags), [vm.name])


def fits(filters: Mapping[str, str], facts: Mapping[str, object], tags: Mapping[str, str]) -> bool:
    """Whether all filters match; letter case does not count in values.

    The filter ``tag`` is ``NAME`` or ``NAME=VALUE`` and matches ``tags``; others match ``facts``.
    """
    for name, value in filters.items():
        if name == "tag":
            if not _has_tag(tags, value):
                return False
        elif str(facts.get(name, "")).casefold() != value.casefold():
            return False
    return True


def _has_tag(tags: Mapping[str, str], wanted: str) -> bool:
    name, _, value = wanted.partition("=")
    if name.casefold() not in tags:
        return False
    return value in ("", tags[name.casefold()])


def _matches(
    filters: Mapping[str, str],
    facts: Mapping[str, object],
    tags: Mapping[str, str],
    vms: Collection[str],
) -> bool:
    """Whether all filters match. ``vm`` matches a part of a VM's name; see ``fits``."""
    other_filters = dict(filters)
    part_of_name = other_filters.pop("vm", "").casefold()
    if part_of_name and not any(part_of_name in vm.casefold() for vm in vms):
        return False
    return fits(other_filters, facts, tags)


# ---- waves


def coming(
    waves: Iterable[Wave], now: datetime, without_agent: Collection[str] = ()
) -> tuple[ShownWave, ...]:
    """Return the waves that are not over, those with events to come first, by the time left.

    If groups in several places have the same name, their subscription and resource group stand in
    front of it. ``without_agent``: the keys of VMs that report nothing themselves.
    """
    open_waves: list[ShownWave] = []
    for wave in _newest(waves):
        shown_wave = shown(wave, now, without_agent)
        if shown_wave.over < shown_wave.events:
            open_waves.append(shown_wave)

    open_waves.sort(key=_order)
    names = _distinct(_group(wave) for wave in open_waves)
    return tuple(replace(wave, group=names[_group(wave)]) for wave in open_waves)


def _newest(waves: Iterable[Wave]) -> list[Wave]:
    """Return the waves that have stories, each once.

    After partitions were added, two of them may have the same wave for some time. The partition
    that has heard of it last knows more.
    """
    newest: dict[tuple[str, ...], Wave] = {}
    for wave in waves:
        if not wave.stories:
            continue
        key = (wave.event_key, *wave.labels)
        other = newest.get(key)
        if other is None or wave.heard_at > other.heard_at:
            newest[key] = wave
    return list(newest.values())


def _order(wave: ShownWave) -> tuple[bool, datetime, str]:
    is_under_way = wave.to_come == 0
    return is_under_way, wave.not_before or wave.first_seen, wave.event_id


def _group(wave: ShownWave) -> Named:
    if wave.scale_set:
        return wave.subscription, wave.resource_group, wave.scale_set
    return wave.subscription, "", wave.resource_group


def shown(wave: Wave, now: datetime, without_agent: Collection[str] = ()) -> ShownWave:
    """Return a wave, which must have stories, as it is at ``now``; the rest is as in ``coming``."""
    stories = list(wave.stories.values())
    standing = wave.standing
    event = event_of_wave(wave, standing)
    place = place_of(stories)
    progress = by_progress(stories)
    vms_to_come = affected(progress.to_come)
    vms_under_way = affected(progress.under_way)
    starts = [story.started for story in stories if story.started is not None]

    seconds_to_not_before = None
    if event.not_before is not None:
        seconds_to_not_before = (event.not_before - now).total_seconds()

    return ShownWave(
        event_id=event.event_id,
        event_type=event.event_type,
        event_source=event.event_source or None,
        subscription=place.subscription,
        resource_group=place.resource_group,
        scale_set=place.scale_set,
        region=place.region,
        zone=place.zone,
        tags=dict(place.tags),
        vms=tuple(dict.fromkeys([*vms_to_come, *vms_under_way])),
        reported_by=len(reporters(stories)),
        first_seen=min(story.first_seen for story in stories),
        not_before=event.not_before,
        started=min(starts, default=None),
        description=event.description or None,
        azure_status=azure_status(stories),
        status=standing.name.lower(),
        vms_to_come=tuple(vms_to_come),
        vms_under_way=tuple(vms_under_way),
        events=len(stories),
        under_way=len(progress.under_way),
        over=len(progress.over),
        seconds_to_not_before=seconds_to_not_before,
        without_agent=_names_without_agent(stories, without_agent),
    )


def _names_without_agent(
    stories: Iterable[Story], without_agent: Collection[str]
) -> tuple[str, ...]:
    """Return the names of the affected VMs that report nothing themselves."""
    names: set[str] = set()
    if without_agent:
        for story in stories:
            for name in story.event.resources:
                if story.group + name.casefold() in without_agent:
                    names.add(name)
    return tuple(sorted(names, key=natural))


def under_way(waves: Iterable[ShownWave]) -> list[PlaceUnderWay]:
    """Return the types and places that have events under way."""
    by_place: dict[tuple[str, ...], list[ShownWave]] = {}
    for wave in waves:
        if wave.under_way:
            place = (wave.event_type, wave.subscription, wave.resource_group, wave.scale_set)
            by_place.setdefault(place, []).append(wave)
    return [_place_under_way(place, by_place[place]) for place in sorted(by_place)]


def _place_under_way(place: tuple[str, ...], waves: list[ShownWave]) -> PlaceUnderWay:
    waves.sort(key=_first_vm_under_way)
    vms: dict[str, None] = {}
    without_agent: list[str] = []
    starts: list[datetime] = []
    for wave in waves:
        without_agent += wave.without_agent
        vms.update(dict.fromkeys(wave.vms_under_way))
        if wave.started is not None:
            starts.append(wave.started)

    first = waves[0]
    return PlaceUnderWay(
        key=" ".join(place),
        event_type=first.event_type,
        group=first.group,
        region=first.region,
        started=min(starts, default=None),
        vms=tuple(vms),
        without_agent=tuple(without_agent),
        under_way=sum(wave.under_way for wave in waves),
        over=sum(wave.over for wave in waves),
        to_come=sum(wave.to_come for wave in waves),
    )


def _first_vm_under_way(wave: ShownWave) -> list[tuple[list[str | int], str]]:
    return [natural(name) for name in wave.vms_under_way[:1]]


# ---- names


def names_of(vms: Iterable[ShownVm]) -> tuple[str, ...]:
    """Return the names of VMs; equal names have their subscription and resource group in front."""
    named = [(vm.place.subscription, vm.place.resource_group, vm.name) for vm in vms]
    return tuple(sorted(_distinct(named).values(), key=natural))


def _distinct(named: Iterable[Named]) -> dict[Named, str]:
    """Return the names to show: equal ones have their subscription and group in front."""
    distinct = set(named)
    bearers: set[Named] = set()
    for subscription, resource_group, name in distinct:
        bearers.add((subscription.casefold(), resource_group.casefold(), name.casefold()))
    frequency = Counter(name for _, _, name in bearers)

    names: dict[Named, str] = {}
    for full_name in distinct:
        name = full_name[-1]
        if frequency[name.casefold()] > 1:
            names[full_name] = "/".join(part for part in full_name if part)
        else:
            names[full_name] = name
    return names
