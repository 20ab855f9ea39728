"""Random fleets, and a judgment of the notifications that they cause.

``planned`` plans events: VMs of the same name in several groups, moved events, short notices.
``notified`` lets the fold of the fleet read the records of that plan. ``wrong`` judges the
notifications by the plan alone. It shares no code with the fold.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple

from notbefore.fleet.notification import Notification
from notbefore.fleet.partition import Partition
from notbefore.fleet.snapshot import Position
from support.azure import T0
from support.fleet_log import grouped, snapshot_of

TYPES: Final = {
    "Preempt": 30.0,
    "Freeze": 900.0,
    "Reboot": 900.0,
    "Redeploy": 600.0,
    "Terminate": 300.0,
}
DETAILS: Final = {  # fields that only some api-versions have
    "description": "Host maintenance.",
    "source": "Platform",
    "expected_duration_seconds": 9,
}
DELETING: Final = ("Preempt", "Terminate")
HIDDEN: Final = 15.0  # seconds for which a VM's IMDS does not list a hidden event
BEAT_EVERY: Final = 120.0  # seconds between two heartbeats of a VM
FOLLOW_EVERY: Final = 20.0  # seconds after which partitions read each other's snapshots again
HORIZON: Final = 4_000.0  # seconds in which VMs send heartbeats
GROUPINGS: Final = (("event_id",), ("scale_set", "event_type"), ("region",))
# seconds from a step until a VM reports it, at least; at most twice as many
REPORT_DELAY: Final = 1.0
PREFIX: Final = "azure.scheduled_event."  # of the fields of a record about an event

# the stages of an event; every other kind of change is the last one, 2
STAGES: Final = {"announced": 0, "updated": 0, "started": 1}

Group = tuple[str, str]  # a subscription and a resource group


class Step(NamedTuple):
    """A step of an event; times in seconds."""

    time: float
    kind: str
    not_before: float


@dataclass
class Planned:
    """One event and its real course."""

    id: str
    group: Group
    vm: str
    type: str
    steps: list[Step] = field(default_factory=list)
    joins_at: float | None = None  # when the event begins to affect ``joiner`` too
    hidden_at: float | None = None  # when IMDS hides it from one VM, for ``HIDDEN`` seconds
    vanishes_at: float | None = None  # when its VM is deleted without a last report

    @property
    def joiner(self) -> str:
        """The VM that the event affects too from ``joins_at`` on."""
        return f"joins-{self.vm}"

    @property
    def peers(self) -> tuple[str, str]:
        """Two VMs that see the event without being affected."""
        return f"peer-of-{self.vm}", f"other-peer-of-{self.vm}"

    @property
    def is_canceled(self) -> bool:
        """Whether Azure cancels the event."""
        return self.steps[-1].kind == "canceled"

    @property
    def last_announcement(self) -> Step:
        """The step that announces the last NotBefore."""
        return [step for step in self.steps if step.kind in ("announced", "updated")][-1]

    @property
    def start(self) -> float | None:
        """The time at which the event starts; ``None`` if Azure cancels it."""
        for step in self.steps:
            if step.kind == "started":
                return step.time
        return None

    @property
    def begin(self) -> float:
        """The time of its first step."""
        return self.steps[0].time

    @property
    def end(self) -> float:
        """The time of its last step."""
        return self.steps[-1].time

    def resources(self, when: float) -> list[str]:
        """The VMs that the event affects at this time."""
        if self.joins_at is not None and when >= self.joins_at:
            return [self.vm, self.joiner]
        return [self.vm]

    def reports(self, reporter: str, when: float, kind: str) -> bool:
        """Return whether a VM reports a step: a deleted VM cannot."""
        if reporter != self.vm:
            return True
        if self.vanishes_at is not None:
            return when < self.vanishes_at
        return not (self.type in DELETING and kind == "finished")


def planned(dice: random.Random) -> list[Planned]:
    """Plan events in several subscriptions and groups whose VMs have the same names."""
    groups: list[Group] = []
    for subscription in range(2):
        for number in range(dice.randint(1, 3)):
            groups.append((f"sub-{subscription}", f"rg-{number}"))
    return [_planned_event(number, groups, dice) for number in range(dice.randint(3, 25))]


def _planned_event(number: int, groups: list[Group], dice: random.Random) -> Planned:
    group = dice.choice(groups)
    event_type = dice.choice(list(TYPES))
    event = Planned(f"E{number}", group, f"web{dice.randint(0, 3)}", event_type)
    begin = dice.uniform(0, 1500)
    notice = TYPES[event_type]
    due = begin + notice
    event.steps.append(Step(begin, "announced", due))

    if dice.random() < 0.3:
        moved = begin + dice.uniform(3, notice * 0.6)
        due = moved + dice.uniform(20, notice)
        event.steps.append(Step(moved, "updated", due))
    last_announced = event.end

    if dice.random() < 0.2:
        event.steps.append(Step(dice.uniform(last_announced, due) + 1, "canceled", due))
        if dice.random() < 0.5:
            event.vm = f"deleted{number}"
            event.vanishes_at = dice.uniform(last_announced, event.end)
    else:
        event.steps.append(Step(due, "started", due))
        event.steps.append(Step(due + dice.uniform(5, 300), "finished", due))
        _complicate(event, last_announced, due, dice)
    return event


def _complicate(event: Planned, announced: float, due: float, dice: random.Random) -> None:
    """Let a VM join the event before it starts, or hide it from a VM for a moment."""
    turn = dice.random()
    if turn < 0.2:
        event.joins_at = dice.uniform(announced + 2 * REPORT_DELAY, due)
        event.steps.append(Step(event.joins_at, "updated", due))
        event.steps.sort()
    elif turn < 0.4 and due - announced > HIDDEN + 4 * REPORT_DELAY:
        event.hidden_at = dice.uniform(
            announced + 2 * REPORT_DELAY, due - HIDDEN - 2 * REPORT_DELAY
        )


def record_of(
    reporter: str,
    change: str,
    group: Group,
    *,
    time: str,
    resources: list[str],
    scale_set: str = "web",
    **event_fields: Any,
) -> bytes:
    """Return a change of an event as the agent of a VM sends it.

    ``event_fields``: fields of the record without ``PREFIX``.
    """
    data = {
        "time": time,
        "event.name": PREFIX + change,
        "body": change,
        "cloud.region": "westeurope",
        "cloud.account.id": group[0],
        "azure.resource_group.name": group[1],
        "host.name": reporter,
        "azure.vm.scaleset.name": scale_set,
        PREFIX + "change": change,
        PREFIX + "status": "Started" if change == "started" else "Scheduled",
        PREFIX + "scope": "self" if reporter in resources else "peer",
        PREFIX + "resources": resources,
    }
    for name, value in event_fields.items():
        data[PREFIX + name] = value
    return _cloud_event(f"scheduled_event.{change}", data)


def _cloud_event(event_type: str, data: dict[str, Any]) -> bytes:
    event = {"specversion": "1.0", "type": f"notbefore.{event_type}.v1", "data": data}
    return json.dumps(event).encode()


def _record(
    event: Planned, reporter: str, step: Step, *, details: dict[str, Any] | None = None
) -> bytes:
    """Return a step of an event as a VM reports it; ``details``: fields that only some VMs have."""
    return record_of(
        reporter,
        step.kind,
        event.group,
        time=_time(step.time),
        id=event.id,
        type=event.type,
        resources=event.resources(step.time - REPORT_DELAY),
        change_id=f"{event.id}-{step.kind}-{step.time:.0f}",
        first_seen=_time(event.begin),
        not_before=_time(step.not_before),
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
    return _cloud_event("heartbeat", data)


def _reports(plan: list[Planned], dice: random.Random) -> Iterator[tuple[float, bytes]]:
    """Yield time and record of each report: by the affected VM while it exists, and by two peers.

    Some VMs use an api-version without ``DETAILS``.
    """
    has_details: dict[tuple[Group, str], bool] = {}
    for event in plan:
        for reporter in (event.vm, *event.peers):
            vm = (event.group, reporter)
            details = None
            if has_details.setdefault(vm, dice.random() < 0.6):
                details = DETAILS

            for step in event.steps:
                if event.reports(reporter, step.time, step.kind):
                    sent = step.time + REPORT_DELAY + dice.uniform(0, REPORT_DELAY)
                    reported = step._replace(time=sent)
                    yield sent, _record(event, reporter, reported, details=details)

        if event.hidden_at is not None:
            yield from _hidden(event, event.hidden_at)


def _hidden(event: Planned, when: float) -> Iterator[tuple[float, bytes]]:
    """Yield the reports of a peer from which IMDS hides an event for a moment."""
    peer = event.peers[0]
    due = event.last_announcement.not_before
    yield when, _record(event, peer, Step(when, "canceled", due))

    again = when + HIDDEN
    reason = {"reason": "came_back"}
    yield again, _record(event, peer, Step(again, "announced", due), details=reason)


def _heartbeats(plan: list[Planned]) -> Iterator[tuple[float, bytes]]:
    """Yield time and record of each heartbeat of the VMs that report."""
    ends: dict[tuple[Group, str], float] = {}
    for event in plan:
        ends[event.group, event.vm] = event.vanishes_at or HORIZON
        for peer in event.peers:
            ends[event.group, peer] = HORIZON
    for (group, vm), end in ends.items():
        when = 0.0
        while when < end:
            yield when, _heartbeat(group, vm, when)
            when += BEAT_EVERY


def notified(
    plan: list[Planned], dice: random.Random, group_by: tuple[str, ...]
) -> list[Notification]:
    """Return the notifications of Azure's events by one partition that reads all records."""
    records = sorted([*_reports(plan, dice), *_heartbeats(plan)])
    fold = Partition("0", grouped(group_by))
    notifications: list[Notification] = []
    for number, (sent, body) in enumerate(records):
        now = T0.timestamp() + sent
        notifications += fold.add(body, Position(str(number), number, now))
        notifications += fold.advance(now)
    for later in range(0, 20_000, 100):
        notifications += fold.advance(T0.timestamp() + HORIZON + later)
    return without_silent_vms(notifications)


def without_silent_vms(notifications: list[Notification]) -> list[Notification]:
    """Return the notifications about Azure's events."""
    kept: list[Notification] = []
    for notification in notifications:
        if notification.change.event.event_type in TYPES:
            kept.append(notification)
    return kept


def notified_by_two_partitions(
    plan: list[Planned], dice: random.Random, group_by: tuple[str, ...]
) -> list[Notification]:
    """Return the notifications of Azure's events by two partitions.

    The hub gets the second partition at a random moment, and all VMs send to it from then on.
    """
    records = sorted([*_reports(plan, dice), *_heartbeats(plan)])
    added_at = dice.uniform(100, 2_000)
    old = Partition("0", grouped(group_by))
    new = Partition("1", grouped(group_by))
    old.hub_has(1)
    notifications: list[Notification] = []
    followed_at = 0.0
    for number, (sent, body) in enumerate(records):
        now = T0.timestamp() + sent
        position = Position(str(number), number, now)
        if sent <= added_at:
            notifications += old.add(body, position)
            notifications += old.advance(now)
            continue
        if new.state.partitions == 0:
            old.hub_has(2, [], now)
            new.hub_has(2, [snapshot_of(old)], now)
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
    return without_silent_vms(notifications)


def _follow_each_other(old: Partition, new: Partition, now: float) -> None:
    """Let each partition read the snapshot of the other."""
    old_state = snapshot_of(old)
    new_state = snapshot_of(new)
    old.events.follow([new_state], now)
    new.events.follow([old_state], now)


def wrong(plan: list[Planned], notifications: list[Notification]) -> Iterator[str]:
    """Yield the faults of the notifications in words: false, missing, needless, out of order."""
    for notification in notifications:
        yield from _false(plan, notification)
        if notification.change.reason == "as_far_as_known":
            key = notification.change.event.key
            yield f"unsure: {key}, although all VMs reported or vanished"
    for event in plan:
        yield from _faults_of(event, notifications)
        yield from _missing(event, notifications)
    yield from _out_of_order(notifications)


def _missing(event: Planned, notifications: list[Notification]) -> Iterator[str]:
    """Yield a fault if not all VMs of an event were announced although there was time for it."""
    start = event.start
    last = event.last_announcement
    if start is None or start - last.time <= 2 * REPORT_DELAY:
        return
    for notification in notifications:
        if _announces(notification, event, start, last.not_before):
            return
    yield f"not announced: {event}"


def _out_of_order(notifications: list[Notification]) -> Iterator[str]:
    """Yield the notifications of a step that is earlier than the step notified before."""
    stages: dict[str, int] = {}
    for notification in notifications:
        change = notification.change
        stage = STAGES.get(change.kind, 2)
        before = stages.get(change.event.key, 0)
        if stage < before and change.kind != "updated":
            yield f"out of order: {change.event.key} {change.kind}"
        stages[change.event.key] = max(stage, before)


def _faults_of(event: Planned, notifications: list[Notification]) -> Iterator[str]:
    """Yield the faults of an event's notifications if the event is not grouped with others."""
    changes = [
        notification.change
        for notification in notifications
        if notification.change.event.event_id == event.id
    ]
    kinds = [change.kind for change in changes]
    updates = [step for step in event.steps if step.kind == "updated"]
    if kinds.count("updated") > len(updates):
        yield f"needless: {kinds} of {event}"
    if "canceled" in kinds and not event.is_canceled:
        yield f"false: canceled is {event}"

    for change in changes:
        is_early = (change.time - T0).total_seconds() < event.end
        if change.kind in ("canceled", "finished", "ended") and is_early:
            yield f"too early: {change.kind} of {event}"


def _group_of(notification: Notification) -> Group:
    return notification.vm.subscription_id, notification.vm.resource_group


def _false(plan: list[Planned], notification: Notification) -> Iterator[str]:
    """Yield the claims of a notification that are false at its time."""
    group = _group_of(notification)
    change = notification.change
    now = (change.time - T0).total_seconds() + 0.001
    announced = [event for event in plan if event.group == group and event.begin <= now]
    affected: set[str] = set()
    for event in announced:
        affected.update(event.resources(now))
    for name in change.event.resources:
        if name not in affected:
            yield f"false: {change.kind} of {name} in {group} at {now}"
    if change.kind == "started":
        starts = [event.start for event in announced]
        if not any(start is not None and start <= now for start in starts):
            yield f"false: nothing of {group} had started at {now}"


def _announces(notification: Notification, event: Planned, start: float, due: float) -> bool:
    """Return whether a notification names all VMs of the event before the event starts."""
    change = notification.change
    if _group_of(notification) != event.group:
        return False
    if not set(event.resources(start)) <= set(change.event.resources):
        return False

    when = (change.time - T0).total_seconds()
    if not (event.joins_at or 0.0) <= when <= start + 2 * REPORT_DELAY:
        return False
    return change.not_before is None or change.not_before <= T0 + timedelta(seconds=due)
