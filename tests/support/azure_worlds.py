"""Random worlds in which Azure also reports events, and an account of the notifications.

This module builds the messages itself, as bytes. ``account_of`` judges the notifications by the
plan of the events and by the arrival times of the messages. It shares no code with the fold.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple

from notbefore.core.change import Change
from notbefore.fleet.notification import Notification
from notbefore.fleet.partition import Partition
from notbefore.fleet.snapshot import Position
from support.azure import T0
from support.fleet_log import EACH, snapshot_of
from support.random_fleets import DELETING, TYPES, Group, record_of, without_silent_vms

# who reports the events; ``late``: both, and Azure's messages are up to ten hours late
Sources = Literal["both", "azure", "late", "agents"]

GROUP_WAIT: Final = 10.0  # seconds, as in ``EACH``
LIMIT: Final = 3_600.0  # seconds without news after which the fold ends an event
TICK: Final = 30.0  # seconds between two calls of ``advance`` while nothing arrives
LATEST: Final = 36_000.0  # seconds by which a message of Azure is late at most
BEAT_EVERY: Final = 120.0  # seconds between two heartbeats of a VM
NEVER: Final = 1e9  # seconds: a time after the end of every world
END: Final = 6_000.0  # seconds in which VMs send heartbeats
SLACK: Final = 1.0  # seconds by which a notification may come later than it is due
ENDS: Final = ("canceled", "finished", "ended")
COMPUTE: Final = "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.Compute/{}/{}"
EMITTED: Final = "Microsoft.ResourceNotifications.MaintenanceResources.ScheduledEventEmitted"


@dataclass
class Truth:
    """The real course of one event; times in seconds."""

    id: str
    group: Group
    type: str
    vms: list[str]
    watchers: list[str]  # VMs whose agents see the event
    announced: float | None  # ``None``: the event starts without notice
    dates: list[tuple[float, float]]  # when a NotBefore is set, and that NotBefore
    started: float | None  # ``None``: Azure cancels the event
    end: float
    azure_ends_at: float | None = None  # when Azure's first message about the end arrives
    arrivals: list[float] = field(default_factory=list)  # of all messages about the event

    @property
    def outcome(self) -> str:
        return "canceled" if self.started is None else "finished"

    @property
    def begin(self) -> float:
        times = [time for time in (self.announced, self.started) if time is not None]
        return min(times)

    def not_before(self, when: float) -> float | None:
        dates = [date for since, date in self.dates if since <= when]
        return dates[-1] if dates else None


class Outage(NamedTuple):
    """A time in which an agent hangs or cannot reach the hub."""

    begin: float
    end: float

    def includes(self, when: float) -> bool:
        return self.begin <= when < self.end


NO_OUTAGE: Final = Outage(0.0, 0.0)


@dataclass
class World:
    """The events of a fleet, and everything that arrives in the hub, with the time."""

    events: list[Truth]
    arrivals: list[tuple[float, bytes]]
    takeovers: list[float]  # when another instance takes the partition over


@dataclass
class Account:
    """The faults of the notifications in words, and counts of events."""

    wrong: list[str] = field(default_factory=list)
    planned: int = 0  # all events
    events: int = 0  # events about which a message arrived
    with_outcome: int = 0  # events whose outcome was notified


def account_of(seed: int, sources: Sources) -> Account:
    """Play a random world, and return its account."""
    world = world_of(random.Random(seed), sources)  # noqa: S311 - not for cryptography
    notifications, fold = notified(world)
    return judged(world, notifications, fold)


def world_of(dice: random.Random, sources: Sources) -> World:
    """Return a random world."""
    groups = [("sub-0", f"rg-{number}") for number in range(2)]
    events = [_event(f"E{number}", dice, groups, sources) for number in range(dice.randint(2, 8))]
    arrivals: list[tuple[float, bytes]] = []
    if sources != "azure":
        arrivals += _messages_of_agents(events, dice)
    if sources != "agents":
        for event in events:
            arrivals += _messages_of_azure(event, dice, sources)
    takeovers = [dice.uniform(0, END) for _ in range(dice.randint(0, 4))]
    return World(events, sorted(arrivals), sorted(takeovers))


def _event(name: str, dice: random.Random, groups: list[Group], sources: Sources) -> Truth:
    event_type = dice.choice(list(TYPES))
    number = name.removeprefix("E")
    vms = [f"web_{number}"]
    if dice.random() < 0.2:
        vms.append(f"also_{number}")
    watchers: list[str] = []
    if sources != "azure" and dice.random() < 0.8:  # the others have no agent
        watchers = [vms[0], f"peer_{number}", f"other_{number}"]

    begin = dice.uniform(0, 2_000)
    if dice.random() < 0.1:  # hardware has failed
        end = begin + dice.uniform(5, 900)
        return Truth(name, dice.choice(groups), event_type, vms, watchers, None, [], begin, end)

    due = begin + TYPES[event_type]
    dates = [(begin, due)]
    if dice.random() < 0.2:
        moved = dice.uniform(begin + 3, due)
        due = moved + dice.uniform(10, TYPES[event_type])
        dates.append((moved, due))

    started = None
    if dice.random() < 0.25:
        end = dice.uniform(dates[-1][0] + 1, due)
    else:
        started = due + dice.uniform(0, 20)
        end = started + dice.uniform(5, 900)
    group = dice.choice(groups)
    return Truth(name, group, event_type, vms, watchers, begin, dates, started, end)


# ---- Azure


def _messages_of_azure(
    event: Truth, dice: random.Random, sources: Sources
) -> Iterator[tuple[float, bytes]]:
    """Yield the deliveries of Event Grid: it loses, repeats, reorders or delays some messages."""
    steps: list[tuple[float, str]] = [(since, "Scheduled") for since, _ in event.dates]
    if event.started is not None:
        steps.append((event.started, "Started"))
        steps.append((event.end, "Completed"))
    else:
        steps.append((event.end, "Canceled"))

    for when, status in steps:
        if dice.random() < 0.08:
            continue
        sent = when + dice.uniform(0, 2)
        message = _message(event, status, sent, dice)
        copies = 2 if dice.random() < 0.1 else 1
        for _ in range(copies):
            delay = dice.uniform(0.5, 20)
            if dice.random() < 0.1:
                delay = dice.uniform(20, 600)
            if sources == "late" and dice.random() < 0.4:
                delay = dice.uniform(600, LATEST)
            arrival = sent + delay
            event.arrivals.append(arrival)
            if status in ("Completed", "Canceled"):
                event.azure_ends_at = min(event.azure_ends_at or arrival, arrival)
            yield arrival, message


def _message(event: Truth, status: str, when: float, dice: random.Random) -> bytes:
    """Return a message in either schema, alone or in an array, with ids in any case."""
    subscription, resource_group = event.group
    kind = "virtualMachineScaleSets"
    name = "web"
    if len(event.vms) == 1 and dice.random() < 0.5:
        kind = "virtualMachines"
        name = event.vms[0]
    resource = COMPUTE.format(subscription, resource_group, kind, name)
    resource += f"/providers/microsoft.maintenance/scheduledevents/{event.id}"
    if dice.random() < 0.3:
        resource = resource.lower()

    event_id = event.id
    if dice.random() < 0.5:
        event_id = event.id.lower()

    not_before = ""
    date = event.not_before(when)
    if status == "Scheduled" and date is not None:
        not_before = (T0 + timedelta(seconds=date)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    data = {
        "resourceInfo": {
            "id": resource,
            "location": "westeurope",
            "properties": {
                "EventId": event_id,
                "EventType": event.type,
                "EventStatus": status,
                "EventSource": "Platform",
                "NotBefore": not_before,
                "Description": "As Azure words it.",
                "DurationInSeconds": dice.choice((-1, 9, 30)),
                "ResourceType": "VirtualMachine",
                "Resources": event.vms,
            },
        }
    }
    envelope: dict[str, Any] = {"id": event.id, "subject": resource, "data": data}
    if dice.random() < 0.5:
        envelope |= {"eventType": EMITTED, "eventTime": _time(when)}
    else:
        envelope |= {"specversion": "1.0", "type": EMITTED, "time": _time(when)}
    if dice.random() < 0.5:
        return json.dumps([envelope]).encode()
    return json.dumps(envelope).encode()


# ---- agents


def _messages_of_agents(events: list[Truth], dice: random.Random) -> Iterator[tuple[float, bytes]]:
    """Yield records and heartbeats with the times of their arrival.

    Some agents hang. Some cannot reach the hub for a while, and send their records later. To some,
    IMDS lists an event for too long.
    """
    for event in events:
        offline_of_all = _outage(event, dice)
        hang_of_all = _outage(event, dice)
        for watcher in event.watchers:
            offline = offline_of_all or _outage(event, dice) or NO_OUTAGE
            hang = hang_of_all or _outage(event, dice) or NO_OUTAGE
            if hang != NO_OUTAGE and dice.random() < 0.5:
                hang = Outage(hang.begin, NEVER)
            stale = 0.0
            if dice.random() < 0.1:
                stale = dice.uniform(30, 900)

            for when, body in _records_of_agent(event, watcher, hang, stale, dice):
                arrival = when
                if offline.includes(when):
                    arrival = offline.end + dice.uniform(0, 1)
                event.arrivals.append(arrival)
                yield arrival, body

            for when in _times_of_heartbeats(event, watcher):
                if not (offline.includes(when) or hang.includes(when)):
                    yield when, _heartbeat(event, watcher, when, event.end + stale)


def _outage(event: Truth, dice: random.Random) -> Outage | None:
    """Return an outage, or ``None`` as for most agents."""
    if dice.random() < 0.85:
        return None
    begin = dice.uniform(0, event.end)
    return Outage(begin, begin + dice.uniform(60, 3_000))


def _records_of_agent(
    event: Truth, watcher: str, hang: Outage, stale: float, dice: random.Random
) -> Iterator[tuple[float, bytes]]:
    """Yield the records of one agent, with the times at which it sends them.

    ``stale``: seconds for which IMDS lists the event after its end.
    """
    steps: list[tuple[float, str]] = []
    if event.announced is not None:
        steps.append((event.announced, "announced"))
    steps += [(since, "updated") for since, _ in event.dates[1:]]
    if event.started is not None:
        steps.append((event.started, "started"))
    reported: list[str] = []
    for when, kind in steps:
        if not hang.includes(when):
            reported.append(kind)
            time = when + dice.uniform(0.1, 1)
            yield time, _record(event, watcher, kind, time)

    if _deletion_of(event, watcher) is not None or not reported:
        return
    end = event.end + stale
    if not hang.includes(end):
        time = end + dice.uniform(0.1, 1)
        yield time, _record(event, watcher, _end_of(event, reported, hang, end), time)
    elif hang.end < NEVER:  # the agent works again after the end
        kind = "finished" if "started" in reported else "ended"
        time = hang.end + dice.uniform(0.1, 1)
        yield time, _record(event, watcher, kind, time)


def _deletion_of(event: Truth, vm: str) -> float | None:
    """Return when the event deletes a VM; ``None`` if it does not."""
    if event.type in DELETING and vm in event.vms:
        return event.started
    return None


def _end_of(event: Truth, reported: list[str], hang: Outage, end: float) -> str:
    """Return the kind of end that an agent reports if it works at that time."""
    if "started" in reported:
        return "finished"
    if event.started is not None:
        return "ended"  # the agent hung while the event started
    hung_just_before = hang.end < end < hang.end + 1
    if hung_just_before:
        return "ended"  # the agent cannot know whether the event started while it hung
    return "canceled"


def _record(event: Truth, watcher: str, kind: str, when: float) -> bytes:
    fields: dict[str, Any] = {
        "time": _time(when),
        "id": event.id,
        "type": event.type,
        "status": "Started" if kind in ("started", "finished") else "Scheduled",
        "resources": event.vms,
        "change_id": f"{event.id}-{kind}-{when:.0f}",
        "first_seen": _time(event.begin),
        "description": "As the VM words it.",
        "expected_duration_seconds": 9,
    }
    date = event.not_before(when)
    if date is not None:
        fields["not_before"] = _time(int(date))
    return record_of(watcher, kind, event.group, **fields)


def _times_of_heartbeats(event: Truth, vm: str) -> Iterator[float]:
    """Yield the times of a VM's heartbeats, until the event deletes it or the world ends."""
    end = _deletion_of(event, vm) or END
    when = 0.0
    while when < end:
        yield when
        when += BEAT_EVERY


def _heartbeat(event: Truth, vm: str, when: float, listed_until: float) -> bytes:
    data = {
        "time": _time(when),
        "event.name": "notbefore.heartbeat",
        "body": "",
        "cloud.region": "westeurope",
        "cloud.account.id": event.group[0],
        "azure.resource_group.name": event.group[1],
        "host.name": vm,
        "azure.vm.scaleset.name": "web",
        "notbefore.heartbeat.interval_seconds": BEAT_EVERY,
    }
    if event.begin + 2 < when < listed_until:
        data["azure.scheduled_events.listed"] = [event.id]
    return json.dumps({"type": "notbefore.heartbeat.v1", "data": data}).encode()


def _time(seconds: float) -> str:
    return (T0 + timedelta(seconds=seconds)).isoformat()


# ---- the fold, and the account


def notified(world: World) -> tuple[list[Notification], Partition]:
    """Return the notifications of Azure's events by the fold, and the fold."""
    fold = Partition("0", EACH)
    notifications: list[Notification] = []
    takeovers = list(world.takeovers)
    now = 0.0
    for number, (arrival, body) in enumerate(world.arrivals):
        while now + TICK < arrival:
            now += TICK
            notifications += fold.advance(T0.timestamp() + now)
        now = arrival
        if takeovers and takeovers[0] < now:
            takeovers.pop(0)
            fold = Partition("0", EACH, snapshot_of(fold), fold.figures)
        hub_time = T0.timestamp() + now
        notifications += fold.add(body, Position(str(number), number, hub_time))
        notifications += fold.advance(hub_time)

    end = now + 3 * LIMIT
    while now < end:
        now += TICK
        notifications += fold.advance(T0.timestamp() + now)
    return without_silent_vms(notifications), fold


def judged(world: World, notifications: list[Notification], fold: Partition) -> Account:
    """Return the account: false, premature, repeated, late or missing notifications."""
    account = Account(planned=len(world.events))
    if fold.figures.errors:
        account.wrong.append(f"failed: {fold.figures.errors}")
    if fold.figures.poison:
        account.wrong.append(f"poison: {fold.figures.poison}")
    account.wrong += [f"stuck: {key}" for key in fold.events.open]
    for event in world.events:
        if not event.arrivals:
            continue
        account.events += 1
        changes = _changes_of(event, notifications)
        account.wrong += [f"{fault}: {event}" for fault in _faults(event, changes)]
        if changes and _has_outcome(changes[-1]):
            account.with_outcome += 1
    return account


def _has_outcome(end: Change) -> bool:
    is_guess = end.reason == "as_far_as_known"
    return end.outcome in ("finished", "canceled") and not is_guess


def _changes_of(event: Truth, notifications: list[Notification]) -> list[Change]:
    """Return the changes that were notified of an event, in order."""
    changes: list[Change] = []
    for notification in notifications:
        change = notification.change
        resource_group = notification.place.resource_group.casefold()
        has_same_id = change.event.event_id.casefold() == event.id.casefold()
        if has_same_id and resource_group == event.group[1]:
            changes.append(change)
    return changes


def _faults(event: Truth, changes: list[Change]) -> Iterator[str]:
    """Yield the faults of an event's notifications."""
    kinds: list[str] = [change.kind for change in changes]
    if not kinds:
        yield "not notified"
        return
    if kinds[-1] not in ENDS:
        yield f"stuck after {kinds}"

    for kind in ("announced", "started", "canceled", "finished", "ended"):
        if kinds.count(kind) > 1:
            yield f"twice {kind}: {kinds}"
    ends = [kind for kind in kinds if kind in ENDS]
    if len(ends) > 1 and kinds[-2] != "ended":
        yield f"ends again: {kinds}"

    if kinds.count("updated") > max(0, len(event.dates) - 1):
        yield f"needless update: {kinds}"

    for change in changes:
        yield from _false(event, change)
    yield from _late(event, changes)


def _seconds(change: Change) -> float:
    """Return the time of a change as seconds of the world."""
    return (change.time - T0).total_seconds()


def _false(event: Truth, change: Change) -> Iterator[str]:
    """Yield the false claims of a notification."""
    kind = change.kind
    outcome = change.outcome
    when = _seconds(change)
    if kind in ENDS and when < event.end:
        yield f"premature {kind} at {when}"
    if outcome in ("canceled", "finished") and outcome != event.outcome:
        yield f"false {kind} at {when}"
    if kind == "started" and (event.started is None or when < event.started):
        yield f"false started at {when}"
    if set(change.event.resources) != set(event.vms):
        yield f"false VMs: {change.event.resources}"
    is_open = kind not in ENDS
    # the fold may expect the start until then, also of an event that was canceled
    last_date = max((date for _, date in event.dates), default=0.0)
    if is_open and when > max(event.end, last_date) + LIMIT:
        yield f"false: {kind} at {when}, long after the end"
    if is_open and event.azure_ends_at is not None and when > event.azure_ends_at + SLACK:
        yield f"false: {kind} at {when}, after Azure's end at {event.azure_ends_at}"


def _late(event: Truth, changes: list[Change]) -> Iterator[str]:
    """Yield a fault if the end was not notified in time after Azure's message about it."""
    if event.azure_ends_at is None:
        return
    due = event.azure_ends_at + GROUP_WAIT + SLACK
    ends = [_seconds(change) for change in changes if change.kind == event.outcome]
    if not ends:
        yield "Azure's end was not notified"
    elif ends[0] > due:
        yield f"late end at {ends[0]}, Azure's message came at {event.azure_ends_at}"
