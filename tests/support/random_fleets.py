"""Random fleets: VMs of one name in several groups, digests, short notices.

And an account of what must be notified.

The records are bytes of its own making; the account is kept from the plan alone, and shares no code
with the fold.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from notbefore.fleet.partition import Partition
from notbefore.fleet.snapshot import Position
from notbefore.fleet.waves import Notification
from support.azure import T0
from support.fleet_log import grouped, written

TYPES: Final = {
    "Preempt": 30.0,
    "Freeze": 900.0,
    "Reboot": 900.0,
    "Redeploy": 600.0,
    "Terminate": 300.0,
}
# what only some api-versions and agents report of an event
DETAILS: Final = {
    "description": "Host maintenance.",
    "source": "Platform",
    "expected_duration_seconds": 9,
}
DELETING: Final = ("Preempt", "Terminate")
HIDDEN: Final = 15.0  # seconds in which a VM's IMDS does not list an event
BEAT_EVERY: Final = 120.0  # seconds between two heartbeats of a VM
FOLLOW_EVERY: Final = 20.0  # seconds between two looks of a partition at another one
HORIZON: Final = 4_000.0  # seconds in which VMs send heartbeats
GROUPINGS: Final = (("event_id",), ("scale_set", "event_type"), ("region",))
SEEN: Final = 1.0  # seconds from what happens until a VM reports it, at most

Group = tuple[str, str]


@dataclass
class Planned:
    """One event, as it is."""

    id: str
    group: Group
    vm: str
    type: str
    steps: list[tuple[float, str, float]] = field(
        default_factory=list
    )  # seconds, kind, NotBefore in seconds
    joins_at: float | None = None  # when it also affects ``joiner``
    hidden_at: float | None = None  # when one VM does not see it listed for ``HIDDEN`` seconds
    vanishes_at: float | None = None  # when its VM is deleted without a word

    @property
    def joiner(self) -> str:
        return f"joins-{self.vm}"

    @property
    def peers(self) -> tuple[str, str]:
        return f"peer-of-{self.vm}", f"other-peer-of-{self.vm}"

    @property
    def is_canceled(self) -> bool:
        return self.steps[-1][1] == "canceled"

    @property
    def known(self) -> tuple[float, float]:
        """When its last NotBefore was known, and that NotBefore, in seconds."""
        known = [step for step in self.steps if step[1] in ("announced", "updated")]
        return known[-1][0], known[-1][2]

    def at(self, *kinds: str) -> float | None:
        return next((time for time, kind, _ in self.steps if kind in kinds), None)

    def resources(self, when: float) -> list[str]:
        if self.joins_at is not None and when >= self.joins_at:
            return [self.vm, self.joiner]
        return [self.vm]

    def reports(self, reporter: str, when: float, kind: str) -> bool:
        """Whether a VM reports a step: a deleted one cannot."""
        if reporter != self.vm:
            return True
        if self.vanishes_at is not None:
            return when < self.vanishes_at
        return not (self.type in DELETING and kind == "finished")


def planned(dice: random.Random) -> list[Planned]:
    """What happens to a fleet of several subscriptions and resource groups whose VMs have the same
    names.
    """
    groups = [(f"sub-{one}", f"rg-{two}") for one in range(2) for two in range(dice.randint(1, 3))]
    plan: list[Planned] = []
    for number in range(dice.randint(3, 25)):
        group = dice.choice(groups)
        kind = dice.choice(list(TYPES))
        event = Planned(f"E{number}", group, f"web{dice.randint(0, 3)}", kind)
        begin = dice.uniform(0, 1500)
        notice = TYPES[kind]
        due = begin + notice
        event.steps.append((begin, "announced", due))

        if dice.random() < 0.3:
            moved = begin + dice.uniform(3, notice * 0.6)
            due = moved + dice.uniform(20, notice)
            event.steps.append((moved, "updated", due))
        last_known = event.steps[-1][0]

        if dice.random() < 0.2:
            event.steps.append((dice.uniform(last_known, due) + 1, "canceled", due))
            if dice.random() < 0.5:
                event.vm = f"deleted{number}"
                event.vanishes_at = dice.uniform(last_known, event.steps[-1][0])
        else:
            event.steps.append((due, "started", due))
            event.steps.append((due + dice.uniform(5, 300), "finished", due))
            _complicate(event, last_known, due, dice)
        plan.append(event)
    return plan


def _complicate(event: Planned, known: float, due: float, dice: random.Random) -> None:
    """Let a VM join the event before it starts, or let one not see it for a moment."""
    turn = dice.random()
    if turn < 0.2:
        event.joins_at = dice.uniform(known + 2 * SEEN, due)
        event.steps.append((event.joins_at, "updated", due))
        event.steps.sort()
    elif turn < 0.4 and due - known > HIDDEN + 4 * SEEN:
        event.hidden_at = dice.uniform(known + 2 * SEEN, due - HIDDEN - 2 * SEEN)


def record_of(reporter: str, change: str, group: Group, **of_event: Any) -> bytes:
    """The change of an event as the agent of a VM sends it.

    ``time`` and the rest are the record's own fields.
    """
    name = "azure.scheduled_event."
    of_event = {"status": "Started" if change == "started" else "Scheduled", **of_event}
    data = {
        "time": of_event.pop("time"),
        "event.name": name + change,
        "body": change,
        "cloud.region": "westeurope",
        "cloud.account.id": group[0],
        "azure.resource_group.name": group[1],
        "host.name": reporter,
        "azure.vm.scaleset.name": of_event.pop("scale_set", "web"),
        name + "change": change,
        name + "scope": "self" if reporter in of_event["resources"] else "peer",
        **{name + field: value for field, value in of_event.items()},
    }
    return json.dumps(
        {"specversion": "1.0", "type": f"notbefore.scheduled_event.{change}.v1", "data": data}
    ).encode()


def _record(
    event: Planned,
    reporter: str,
    when: float,
    kind: str,
    due: float,
    *,
    details: dict[str, Any] | None = None,
) -> bytes:
    """A step of an event as a VM reports it; ``details``: what only some VMs know."""
    return record_of(
        reporter,
        kind,
        event.group,
        time=_time(when),
        id=event.id,
        type=event.type,
        resources=event.resources(when - SEEN),
        change_id=f"{event.id}-{kind}-{when:.0f}",
        first_seen=_time(event.steps[0][0]),
        not_before=_time(due),
        **(details or {}),
    )


def _time(seconds: float) -> str:
    return (T0 + timedelta(seconds=seconds)).isoformat()


def _heartbeat(group: Group, vm: str, when: float) -> bytes:
    data = {
        "time": _time(when),
        "event.name": "notbefore.heartbeat",
        "body": "",
        "cloud.region": "westeurope",
        "cloud.account.id": group[0],
        "azure.resource_group.name": group[1],
        "host.name": vm,
        "azure.vm.scaleset.name": "web",
        "notbefore.heartbeat.interval_seconds": BEAT_EVERY,
    }
    return json.dumps(
        {"specversion": "1.0", "type": "notbefore.heartbeat.v1", "data": data}
    ).encode()


def _reports(plan: list[Planned], dice: random.Random) -> Iterator[tuple[float, bytes]]:
    """What the VMs report: the affected one where it still can, and two others.

    Some VMs use an api-version without ``DETAILS``. All see a step within ``SEEN`` seconds.
    """
    knows_details: dict[tuple[Group, str], bool] = {}
    for event in plan:
        for reporter in (event.vm, *event.peers):
            vm = (event.group, reporter)
            details = None
            if knows_details.setdefault(vm, dice.random() < 0.6):
                details = DETAILS

            for when, kind, due in event.steps:
                if event.reports(reporter, when, kind):
                    # a joining VM is seen by all: see ``resources``
                    seen = when + SEEN + dice.uniform(0, SEEN)
                    yield seen, _record(event, reporter, seen, kind, due, details=details)

        if event.hidden_at is not None:
            yield from _hidden(event, event.hidden_at)


def _hidden(event: Planned, when: float) -> Iterator[tuple[float, bytes]]:
    """What a VM reports that does not see an event for a moment."""
    peer = event.peers[0]
    _, due = event.known
    yield when, _record(event, peer, when, "canceled", due)

    again = when + HIDDEN
    back = {"reason": "came_back"}
    yield again, _record(event, peer, again, "announced", due, details=back)


def _heartbeats(plan: list[Planned]) -> Iterator[tuple[float, bytes]]:
    vanish: dict[tuple[Group, str], float] = {}
    for event in plan:
        vanish[event.group, event.vm] = event.vanishes_at or HORIZON
        for peer in event.peers:
            vanish[event.group, peer] = HORIZON
    for (group, vm), end in vanish.items():
        when = 0.0
        while when < end:
            yield when, _heartbeat(group, vm, when)
            when += BEAT_EVERY


def notified(
    plan: list[Planned], dice: random.Random, group_by: tuple[str, ...]
) -> list[Notification]:
    """Return the notifications of Azure's events that the fold makes of the plan."""
    records = [*_reports(plan, dice), *_heartbeats(plan)]
    fold = Partition("0", grouped(group_by))
    made: list[Notification] = []
    for number, (seen, body) in enumerate(sorted(records)):
        now = T0.timestamp() + seen
        made += fold.add(body, Position(str(number), number, now))
        made += fold.advance(now)
    for later in range(0, 20_000, 100):
        made += fold.advance(T0.timestamp() + HORIZON + later)
    return [one for one in made if one.change.event.event_type in TYPES]


def notified_by_two_partitions(
    plan: list[Planned], dice: random.Random, group_by: tuple[str, ...]
) -> list[Notification]:
    """Return the notifications if all VMs send to an added partition from some moment on."""
    records = sorted([*_reports(plan, dice), *_heartbeats(plan)])
    added_at = dice.uniform(100, 2_000)
    old = Partition("0", grouped(group_by))
    new = Partition("1", grouped(group_by))
    old.hub_has(1)
    notifications: list[Notification] = []
    followed_at = 0.0
    for number, (seen, body) in enumerate(records):
        now = T0.timestamp() + seen
        position = Position(str(number), number, now)
        if seen <= added_at:
            notifications += old.add(body, position)
            notifications += old.advance(now)
            continue
        if new.state.partitions == 0:
            old.hub_has(2, [], now)
            new.hub_has(2, [written(old)], now)
        notifications += new.add(body, position)
        notifications += new.advance(now)
        notifications += old.advance(now)
        if now - followed_at > FOLLOW_EVERY:
            followed_at = now
            _follow_each_other(old, new, now)

    for later in range(0, 20_000, 100):
        now = T0.timestamp() + HORIZON + later
        _follow_each_other(old, new, now)
        notifications += old.advance(now)
        notifications += new.advance(now)
    assert not old.events.open
    assert not new.events.open
    return [made for made in notifications if made.change.event.event_type in TYPES]


def _follow_each_other(old: Partition, new: Partition, now: float) -> None:
    old_state = written(old)
    new_state = written(new)
    old.events.follow([new_state], now)
    new.events.follow([old_state], now)


def wrong(plan: list[Planned], made: list[Notification]) -> Iterator[str]:
    """What is false, untold, needless or out of order, in words."""
    for one in made:
        yield from _false(plan, one)
        if one.change.reason == "as_far_as_known":
            yield f"unsure: {one.change.event.key}, although all VMs reported or vanished"
    for event in plan:
        yield from _wrong_of(event, made)
        start = event.at("started")
        known, due = event.known
        if (
            start is not None
            and start - known > 2 * SEEN
            and not any(_tells(one, event, start, due) for one in made)
        ):
            yield f"untold: {event}"
    places: dict[str, int] = {}
    for one in made:
        place = {"announced": 0, "updated": 0, "started": 1}.get(one.change.kind, 2)
        before = places.get(one.change.event.key, 0)
        if place < before and one.change.kind != "updated":
            yield f"out of order: {one.change.event.key} {one.change.kind}"
        places[one.change.event.key] = max(place, before)


def _wrong_of(event: Planned, made: list[Notification]) -> Iterator[str]:
    """What is wrong with the notifications of one event that is a wave by itself."""
    changes = [one.change for one in made if one.change.event.event_id == event.id]
    kinds = [change.kind for change in changes]
    updates = [step for step in event.steps if step[1] == "updated"]
    if kinds.count("updated") > len(updates):
        yield f"needless: {kinds} of {event}"
    if "canceled" in kinds and not event.is_canceled:
        yield f"false: canceled is {event}"

    end = event.steps[-1][0]
    for change in changes:
        is_early = (change.time - T0).total_seconds() < end
        if change.kind in ("canceled", "finished", "ended") and is_early:
            yield f"too early: {change.kind} of {event}"


def _false(plan: list[Planned], one: Notification) -> Iterator[str]:
    group = (one.vm.subscription_id, one.vm.resource_group)
    now = (one.change.time - T0).total_seconds() + 0.001
    begun = [event for event in plan if event.group == group and event.steps[0][0] <= now]
    affected = {name for event in begun for name in event.resources(now)}
    for name in one.change.event.resources:
        if name not in affected:
            yield f"false: {one.change.kind} of {name} in {group} at {now}"
    if one.change.kind == "started":
        starts = [event.at("started") for event in begun]
        if not any(start is not None and start <= now for start in starts):
            yield f"false: nothing of {group} had started at {now}"


def _tells(one: Notification, event: Planned, start: float, due: float) -> bool:
    """Whether a notification tells of the event and all its VMs before it starts."""
    change = one.change
    group = (one.vm.subscription_id, one.vm.resource_group)
    if group != event.group or not set(event.resources(start)) <= set(change.event.resources):
        return False

    told = (change.time - T0).total_seconds()
    if not (event.joins_at or 0.0) <= told <= start + 2 * SEEN:
        return False
    return change.not_before is None or change.not_before <= T0 + timedelta(seconds=due)
