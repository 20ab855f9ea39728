"""What is coming over the fleet, as ``/api/v1/fleet/events`` returns it to the page and the commands. Pure."""

from collections.abc import Iterable
from datetime import datetime

from msgspec import Struct

from notbefore.fleet.waves import Wave, event_of_wave, facts_of, vm_of


class ShownWave(Struct, frozen=True):
    """One wave in ``/api/v1/fleet/events``; durations in seconds."""

    event_id: str  # of the event, or of the wave
    event_type: str
    event_source: str | None
    status: str  # scheduled, started
    region: str  # this and the next two: where all of its VMs are; empty where they differ
    resource_group: str
    scale_set: str
    events: int
    under_way: int  # of them
    over: int  # of them
    vms: tuple[str, ...]  # that it affects
    reported_by: int
    first_seen: datetime
    not_before: datetime | None
    seconds_to_not_before: float | None
    started: datetime | None
    description: str | None


class FleetEvents(Struct, frozen=True):
    """The body of ``/api/v1/fleet/events``: of the partitions of this instance."""

    partitions: tuple[str, ...]
    waves: tuple[ShownWave, ...]
    heard: int  # VMs that have sent a sign of life
    silent: tuple[str, ...]  # those whose signs of life have stopped, without an event that explains it
    missing: tuple[str, ...]  # VMs of the inventory that were never heard from, or not for a day


def coming(waves: Iterable[Wave], now: datetime) -> tuple[ShownWave, ...]:
    """The waves that are not over, the most urgent first: one that is over waits for its last notification."""
    found = [one for one in (shown(wave, now) for wave in waves if wave.stories) if one.over < one.events]
    return tuple(
        sorted(found, key=lambda one: (one.status != "started", one.not_before or one.first_seen, one.event_id))
    )


def shown(wave: Wave, now: datetime) -> ShownWave:
    """A wave that has stories, as it is at ``now``."""
    stories = list(wave.stories.values())
    standing = wave.standing
    event, facts, vm = event_of_wave(wave, standing, now), facts_of(stories), vm_of(stories)
    starts = [one.started for one in stories if one.started is not None]
    not_before = event.not_before
    return ShownWave(
        event_id=event.event_id,
        event_type=event.event_type,
        event_source=event.event_source,
        status=standing.name.lower(),
        region=vm.location,
        resource_group=vm.resource_group,
        scale_set=vm.scale_set,
        events=facts.events,
        under_way=facts.under_way,
        over=facts.over,
        vms=event.resources,
        reported_by=facts.reported_by,
        first_seen=min(one.first_seen for one in stories),
        not_before=not_before,
        seconds_to_not_before=(not_before - now).total_seconds() if not_before is not None else None,
        started=min(starts, default=None),
        description=event.description,
    )
