"""Random worlds in which Azure also reports events, and an account of what may be notified.

The messages are bytes of its own making. The account is kept from the plan and from the times at
which messages arrive, and shares no code with the fold.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal

from notbefore.fleet.partition import Partition
from notbefore.fleet.snapshot import Position
from notbefore.fleet.waves import Notification
from support.azure import T0
from support.fleet_log import EACH, snapshot_of
from support.random_fleets import DELETING, TYPES, Group, record_of

Sources = Literal["both", "azure", "late", "agents"]
"""``late``: both, and Azure's messages are up to ten hours late."""

GROUP_WAIT: Final = 10.0  # seconds, as in ``EACH``
LIMIT: Final = 3_600.0  # seconds after which an event is over as far as is known
TICK: Final = 30.0  # seconds between two looks at the clock, while nothing arrives
LATEST: Final = 36_000.0  # seconds by which a message of Azure is late at most
BEAT_EVERY: Final = 120.0
END: Final = 6_000.0  # seconds in which VMs send heartbeats
SLACK: Final = 1.0  # seconds by which a notification may come later than it is due
ENDS: Final = ("canceled", "finished", "ended")
COMPUTE: Final = "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.Compute/{}/{}"
EMITTED: Final = "Microsoft.ResourceNotifications.MaintenanceResources.ScheduledEventEmitted"


@dataclass
class Truth:
    """What happens to one event; times in seconds."""

    id: str
    group: Group
    type: str
    vms: list[str]
    watchers: list[str]  # VMs with an agent that see it
    announced: float | None  # ``None``: it starts without notice
    dates: list[tuple[float, float]]  # when a NotBefore is set, and that NotBefore
    started: float | None  # ``None``: it is canceled
    end: float
    azure_ends_at: float | None = None  # when Azure's word about the end arrives
    arrivals: list[float] = field(default_factory=list)  # of anything about it

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


@dataclass
class World:
    """The events of a fleet, and everything that arrives in the hub, with the time."""

    events: list[Truth]
    arrivals: list[tuple[float, bytes]]
    takeovers: list[float]


@dataclass
class Account:
    """What was wrong in words, and how many ends are known."""

    wrong: list[str] = field(default_factory=list)
    planned: int = 0  # events
    events: int = 0  # those of them of which anything arrived
    known: int = 0  # those whose outcome was notified


def account_of(seed: int, sources: Sources) -> Account:
    """Play a random world, and return its account."""
    world = world_of(random.Random(seed), sources)  # noqa: S311 - not for cryptography
    notifications, fold = notified(world)
    return checked(world, notifications, fold)


def world_of(dice: random.Random, sources: Sources) -> World:
    """Return a random world."""
    groups = [("sub-0", f"rg-{number}") for number in range(2)]
    events = [_event(f"E{number}", dice, groups, sources) for number in range(dice.randint(2, 8))]
    arrivals: list[tuple[float, bytes]] = []
    if sources != "azure":
        arrivals += _of_agents(events, dice)
    if sources != "agents":
        for event in events:
            arrivals += _of_azure(event, dice, sources)
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


def _of_azure(event: Truth, dice: random.Random, sources: Sources) -> Iterator[tuple[float, bytes]]:
    """What Event Grid delivers: some messages are lost, repeated, reordered or late."""
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
        for _ in range(1 + (dice.random() < 0.1)):
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
    """One message in either schema, alone or in an array, in any case."""
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

    not_before = ""
    date = event.not_before(when)
    if status == "Scheduled" and date is not None:
        not_before = (T0 + timedelta(seconds=date)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    data = {
        "resourceInfo": {
            "id": resource,
            "location": "westeurope",
            "properties": {
                "EventId": event.id.lower() if dice.random() < 0.5 else event.id,
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
    return json.dumps([envelope] if dice.random() < 0.5 else envelope).encode()


# ---- agents


def _of_agents(events: list[Truth], dice: random.Random) -> Iterator[tuple[float, bytes]]:
    """What agents send: some hang, are cut off from the hub, or are shown an event for too long."""
    for event in events:
        cut_of_all = _outage(event, dice)
        hung_of_all = _outage(event, dice)
        for watcher in event.watchers:
            cut = cut_of_all or _outage(event, dice) or (0.0, 0.0)
            hung = hung_of_all or _outage(event, dice) or (0.0, 0.0)
            if hung[1] and dice.random() < 0.5:
                hung = (hung[0], 1e9)  # it never works again
            stale = 0.0
            if dice.random() < 0.1:
                stale = dice.uniform(30, 900)

            for when, body in _of_agent(event, watcher, hung, stale, dice):
                arrival = when
                if cut[0] <= when < cut[1]:
                    arrival = cut[1] + dice.uniform(0, 1)
                event.arrivals.append(arrival)
                yield arrival, body
            gone_at = event.started if event.type in DELETING and watcher in event.vms else None
            for when in _beats(gone_at):
                if not (cut[0] <= when < cut[1] or hung[0] <= when < hung[1]):
                    yield when, _heartbeat(event, watcher, when, event.end + stale)


def _outage(event: Truth, dice: random.Random) -> tuple[float, float] | None:
    """Return when an outage begins and ends, which most agents do not have."""
    if dice.random() < 0.85:
        return None
    begin = dice.uniform(0, event.end)
    return begin, begin + dice.uniform(60, 3_000)


def _of_agent(
    event: Truth, watcher: str, hung: tuple[float, float], stale: float, dice: random.Random
) -> Iterator[tuple[float, bytes]]:
    """The records of one agent, with the times at which it sends them."""
    steps: list[tuple[float, str]] = []
    if event.announced is not None:
        steps.append((event.announced, "announced"))
    steps += [(since, "updated") for since, _ in event.dates[1:]]
    if event.started is not None:
        steps.append((event.started, "started"))
    end = event.end + stale
    deletes = event.type in DELETING and watcher in event.vms and event.started is not None

    seen: list[str] = []
    for when, kind in steps:
        if not hung[0] <= when < hung[1]:
            seen.append(kind)
            time = when + dice.uniform(0.1, 1)
            yield time, _record(event, watcher, kind, time)
    if deletes:
        return
    if not hung[0] <= end < hung[1]:
        time = end + dice.uniform(0.1, 1)
        was_watched = not (hung[0] < end and hung[1] < end < hung[1] + 1)
        kind = _end_of(event, seen, was_watched=was_watched)
        if seen:
            yield time, _record(event, watcher, kind, time)
    elif seen and hung[1] < 1e8:  # it works again after the end
        kind = "finished" if "started" in seen else "ended"
        time = hung[1] + dice.uniform(0.1, 1)
        yield time, _record(event, watcher, kind, time)


def _end_of(event: Truth, seen: list[str], *, was_watched: bool) -> str:
    """How an agent that works at the end sees it."""
    if "started" in seen:
        return "finished"
    if event.started is not None or not was_watched:
        return "ended"  # it was not watched while the event started
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


def _beats(gone_at: float | None) -> Iterator[float]:
    when = 0.0
    while when < (gone_at or END):
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
    """Return the notifications of Azure's events that the fold makes, and the fold."""
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
    return [made for made in notifications if made.change.event.event_type in TYPES], fold


def checked(world: World, notifications: list[Notification], fold: Partition) -> Account:
    """Return what is false, premature, twice, late, untold or stuck."""
    account = Account()
    account.wrong += [f"failed: {fold.figures.errors}"] if fold.figures.errors else []
    account.wrong += [f"poison: {fold.figures.poison}"] if fold.figures.poison else []
    account.wrong += [f"stuck: {key}" for key in fold.events.open]
    account.planned = len(world.events)
    for event in world.events:
        changes = [
            (made.change.kind, (made.change.time - T0).total_seconds(), made)
            for made in notifications
            if made.change.event.event_id.casefold() == event.id.casefold()
            and made.place.resource_group.casefold() == event.group[1]
        ]
        if not event.arrivals:
            continue
        account.events += 1
        account.wrong += [f"{what}: {event}" for what in _wrong_of(event, changes)]
        if changes and changes[-1][2].change.outcome in ("finished", "canceled"):
            is_guess = changes[-1][2].change.reason == "as_far_as_known"
            account.known += not is_guess
    return account


def _wrong_of(event: Truth, changes: Sequence[tuple[str, float, Notification]]) -> Iterator[str]:
    kinds = [kind for kind, _, _ in changes]
    if not kinds:
        yield "untold"
        return
    if kinds[-1] not in ENDS:
        yield f"stuck after {kinds}"

    for kind in ("announced", "started", "canceled", "finished", "ended"):
        if kinds.count(kind) > 1:
            yield f"twice {kind}: {kinds}"
    if sum(kind in ENDS for kind in kinds) > 1 and kinds[-2:-1] != ["ended"]:
        yield f"ends again: {kinds}"

    if kinds.count("updated") > max(0, len(event.dates) - 1):
        yield f"needless update: {kinds}"

    for kind, when, made in changes:
        yield from _false(event, kind, when, made)
    yield from _late(event, changes)


def _false(event: Truth, kind: str, when: float, made: Notification) -> Iterator[str]:
    """What a notification says that is not so."""
    outcome = made.change.outcome
    if kind in ENDS and when < event.end:
        yield f"premature {kind} at {when}"
    if outcome in ("canceled", "finished") and outcome != event.outcome:
        yield f"false {kind} at {when}"
    if kind == "started" and (event.started is None or when < event.started):
        yield f"false started at {when}"
    if set(made.change.event.resources) != set(event.vms):
        yield f"false VMs: {made.change.event.resources}"
    is_open = kind not in ENDS
    # one that was canceled may still start until then, as far as is known
    last_date = max((date for _, date in event.dates), default=0.0)
    if is_open and when > max(event.end, last_date) + LIMIT:
        yield f"false: {kind} at {when}, long after the end"
    if is_open and event.azure_ends_at is not None and when > event.azure_ends_at + SLACK:
        yield f"false: {kind} at {when}, after Azure's end at {event.azure_ends_at}"


def _late(event: Truth, changes: Sequence[tuple[str, float, Notification]]) -> Iterator[str]:
    """Whether Azure's word about the end was not notified in time."""
    if event.azure_ends_at is None:
        return
    due = event.azure_ends_at + GROUP_WAIT + SLACK
    ends = [when for kind, when, _ in changes if kind == event.outcome]
    if not ends:
        yield "Azure's end was not notified"
    elif ends[0] > due:
        yield f"late end at {ends[0]}, Azure's word came at {event.azure_ends_at}"
