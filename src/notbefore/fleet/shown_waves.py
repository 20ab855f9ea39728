"""The events of the fleet that are not over, for the page, the commands, and calendars. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from notbefore.core.record import view
from notbefore.core.text import natural, one_line, some_of
from notbefore.fleet.silence import Heard
from notbefore.fleet.waves import Wave, affected, by_progress, event_of_wave, place_of, reporters

MATCHERS: Final = ("event_type", "subscription", "resource_group", "scale_set", "region", "tag", "vm")  # of a mute
FILTERS: Final = (*MATCHERS, "status")  # parameters of a request
PART_OF_LINE: Final = re.compile(rb".{1,74}(?![\x80-\xbf])")  # octets, by RFC 5545; the next octet begins a character
MAX_NAMES: Final = 20  # of VMs in a calendar entry
Named = tuple[str, str, str]
"""Subscription, resource group and name, of a VM or of a group of VMs."""


class EventFacts(Struct, frozen=True, kw_only=True):
    """What is shown of an event or a wave; for a wave, what all of its events have in common."""

    event_id: str  # of the event, or of the wave
    event_type: str
    event_source: str | None = None
    subscription: str = ""  # this and the next five: common to all of its VMs; empty if they differ
    resource_group: str = ""
    scale_set: str = ""
    region: str = ""
    zone: str = ""
    tags: dict[str, str]
    vms: tuple[str, ...]  # the affected VMs; of a wave those that it is not over for
    reported_by: int  # number of VMs
    first_seen: datetime
    not_before: datetime | None
    started: datetime | None  # the first start
    description: str | None = None


class ShownWave(EventFacts, frozen=True, kw_only=True):
    """One wave in ``/api/v1/fleet/events``."""

    status: str  # scheduled, started
    vms_to_come: tuple[str, ...]  # those of ``vms`` that an event has still to come to: ``vms`` begins with them
    vms_under_way: tuple[str, ...]  # those that an event under way affects
    events: int
    under_way: int  # events that have started
    over: int  # events that are over
    seconds_to_not_before: float | None
    group: str = ""  # the name of its scale set, else of its resource group: see ``coming``

    @property
    def to_come(self) -> int:
        """The number of its events that have not started: people can still prepare for them."""
        return self.events - self.under_way - self.over

    def matches(self, wanted: Mapping[str, str]) -> bool:
        """Whether all filters match; a wave that is partly under way is both ``scheduled`` and ``started``."""
        fields = dict(wanted)
        status = fields.pop("status", self.status).casefold()
        events = {"scheduled": self.to_come, "started": self.under_way}.get(status, 0)
        return events > 0 and _is_wanted(fields, asdict(self), self.tags, self.vms)


def wanted_vms(vms: Iterable[Heard], wanted: Mapping[str, str]) -> list[Heard]:
    """Return the VMs that all filters match, except those that are for events alone."""
    fields = {name: value for name, value in wanted.items() if name not in ("event_type", "status")}
    if not fields:
        return list(vms)
    return [one for one in vms if _is_wanted(fields, one.place._asdict(), dict(one.place.tags), [one.name])]


def _is_wanted(
    wanted: Mapping[str, str], facts: Mapping[str, object], tags: Mapping[str, str], vms: Collection[str]
) -> bool:
    """Whether all filters match: ``vm`` is a part of a VM's name, in any case; the others as in ``fits``."""
    fields = dict(wanted)
    part = fields.pop("vm", "").casefold()
    named = not part or any(part in vm.casefold() for vm in vms)
    return named and fits(fields, facts, tags)


def fits(wanted: Mapping[str, str], facts: Mapping[str, object], tags: Mapping[str, str]) -> bool:
    """Whether the facts have the wanted values, in any case, and the tags a ``tag`` (``NAME`` or ``NAME=VALUE``)."""
    tag, _, value = wanted.get("tag", "").partition("=")
    found = tags.get(tag.casefold())
    tagged = "tag" not in wanted or (found is not None and value in ("", found))
    others = ((facts.get(name, ""), one) for name, one in wanted.items() if name != "tag")
    return tagged and all(str(fact).casefold() == one.casefold() for fact, one in others)


class ShownPartition(Struct, frozen=True):
    """One partition of the hub. ``age``: seconds since its snapshot was taken; ``None``: this instance reads it."""

    name: str
    age: float | None


class FleetEvents(Struct, frozen=True):
    """The body of ``/api/v1/fleet/events``: the whole fleet, on any instance."""

    trouble: str  # why coming events may be unknown: the hub or a partition is not being read; else empty
    partitions: tuple[ShownPartition, ...]
    waves: tuple[ShownWave, ...]
    heard: int  # number of VMs that have sent a heartbeat
    silent: tuple[str, ...]  # VMs whose heartbeats have stopped, without an event that explains it
    missing: tuple[str, ...]  # VMs of the inventory that were never heard from, or not for a day


def coming(waves: Iterable[Wave], now: datetime) -> tuple[ShownWave, ...]:
    """Return the waves that are not over: those with events to come, by the time left, then those under way.

    Groups of one name in several places have their subscription and resource group in front.
    """
    found = [one for one in (shown(wave, now) for wave in waves if wave.stories) if one.over < one.events]
    names = _distinct(map(_group, found))
    found.sort(key=lambda one: (not one.to_come, one.not_before or one.first_seen, one.event_id))
    return tuple(replace(one, group=names[_group(one)]) for one in found)


def _group(wave: ShownWave) -> Named:
    if wave.scale_set:
        return wave.subscription, wave.resource_group, wave.scale_set
    return wave.subscription, "", wave.resource_group


def shown(wave: Wave, now: datetime) -> ShownWave:
    """Return a wave, which must have stories, as it is at ``now``."""
    stories, standing = list(wave.stories.values()), wave.standing
    to_come, under_way, over = by_progress(stories)
    first, then = affected(to_come), affected(under_way)
    event, place = event_of_wave(wave, standing), place_of(stories)
    return view(
        ShownWave,
        event,
        place,
        tags=dict(place.tags),
        vms=tuple(dict.fromkeys([*first, *then])),
        vms_to_come=tuple(first),
        vms_under_way=tuple(then),
        reported_by=len(reporters(stories)),
        first_seen=min(one.first_seen for one in stories),
        started=min((one.started for one in stories if one.started is not None), default=None),
        status=standing.name.lower(),
        events=len(stories),
        under_way=len(under_way),
        over=len(over),
        seconds_to_not_before=(event.not_before - now).total_seconds() if event.not_before is not None else None,
    )


def names_of(vms: Iterable[Heard]) -> tuple[str, ...]:
    """Return the names of VMs; equal names have their subscription and resource group in front."""
    names = _distinct((one.place.subscription, one.place.resource_group, one.name) for one in vms)
    return tuple(sorted(names.values(), key=natural))


def _distinct(found: Iterable[Named]) -> dict[Named, str]:
    """Return the names to show: equal ones have in front of them what is before the name."""
    every = set(found)
    named = Counter(name for *_, name in {tuple(map(str.casefold, one)) for one in every})
    return {one: "/".join(filter(None, one)) if named[one[-1].casefold()] > 1 else one[-1] for one in every}


def under_way(waves: Iterable[ShownWave]) -> list[list[ShownWave]]:
    """Return the waves with events under way, one list for each type and place."""
    place = attrgetter("event_type", "subscription", "resource_group", "scale_set")
    by_name = sorted((one for one in waves if one.under_way), key=lambda one: [*map(natural, one.vms_under_way[:1])])
    return [list(found) for _, found in groupby(sorted(by_name, key=place), place)]


def calendar(waves: Iterable[ShownWave], now: datetime) -> bytes:
    """Return an iCalendar feed (RFC 5545): an entry for each wave with events to come, at its NotBefore."""
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//notbefore//fleet//EN"]
    for one in waves:
        if not one.to_come or one.not_before is None:
            continue
        where = f" in {one.group}" if one.group else ""
        vms = "1 VM" if len(one.vms_to_come) == 1 else f"{len(one.vms_to_come)} VMs"
        about = [
            f"VMs: {some_of(one.vms_to_come, MAX_NAMES)}",
            *(f"{name}: {value}" for name, value in one.tags.items()),
        ]
        lines += [
            "BEGIN:VEVENT",
            f"UID:{_escaped(one.event_id)}@notbefore",
            f"DTSTAMP:{_time(now)}",
            f"DTSTART:{_time(one.not_before)}",
            f"SUMMARY:{_escaped(f'{one.event_type} of {vms}{where}, not before this time')}",
            "DESCRIPTION:" + "\\n".join(map(_escaped, filter(None, [*about, one.description]))),
            "END:VEVENT",
        ]
    return b"".join(_folded(line) + b"\r\n" for line in [*lines, "END:VCALENDAR"])


def _time(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y%m%dT%H%M%SZ}"


def _escaped(text: str) -> str:
    return re.sub(r"([\\;,])", r"\\\1", one_line(text))


def _folded(line: str) -> bytes:
    """Fold a long line: it continues on the next line after a space; no character is cut."""
    return b"\r\n ".join(PART_OF_LINE.findall(line.encode()))
