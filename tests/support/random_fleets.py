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
from support.fleet_log import grouped

TYPES: Final = {
    "Preempt": 30.0,
    "Freeze": 900.0,
    "Reboot": 900.0,
    "Redeploy": 600.0,
    "Terminate": 300.0,
}
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
    # seconds, kind, NotBefore in seconds
    steps: list[tuple[float, str, float]] = field(default_factory=list)

    def at(self, *kinds: str) -> float | None:
        return next((time for time, kind, _ in self.steps if kind in kinds), None)


def planned(dice: random.Random) -> list[Planned]:
    """What happens to a fleet of several subscriptions and resource groups whose VMs have the same
    names.
    """
    groups = [(f"sub-{one}", f"rg-{two}") for one in range(2) for two in range(dice.randint(1, 3))]
    found = []
    for number in range(dice.randint(3, 25)):
        group, kind = dice.choice(groups), dice.choice(list(TYPES))
        event = Planned(f"E{number}", group, f"web{dice.randint(0, 3)}", kind)
        begin, notice = dice.uniform(0, 1500), TYPES[kind]
        due = begin + notice
        event.steps.append((begin, "announced", due))
        if dice.random() < 0.3:
            moved = begin + dice.uniform(3, notice * 0.6)
            due = moved + dice.uniform(20, notice)
            event.steps.append((moved, "updated", due))
        if dice.random() < 0.2:
            event.steps.append(
                (dice.uniform(moved if len(event.steps) > 1 else begin, due) + 1, "canceled", due)
            )
        else:
            event.steps.append((due, "started", due))
            event.steps.append((due + dice.uniform(5, 300), "finished", due))
        found.append(event)
    return found


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


def _record(event: Planned, reporter: str, when: float, kind: str, due: float) -> bytes:
    def time(seconds: float) -> str:
        return (T0 + timedelta(seconds=seconds)).isoformat()

    return record_of(
        reporter,
        kind,
        event.group,
        time=time(when),
        id=event.id,
        type=event.type,
        resources=[event.vm],
        change_id=f"{event.id}-{kind}-{when:.0f}",
        first_seen=time(event.steps[0][0]),
        not_before=time(due),
    )


def notified(
    plan: list[Planned], dice: random.Random, group_by: tuple[str, ...]
) -> list[Notification]:
    """What the fold makes of it: two VMs of the group report each step, the affected one where it
    still can.
    """
    records: list[tuple[float, bytes]] = []
    for event in plan:
        for when, kind, due in event.steps:
            for reporter in (event.vm, f"peer-of-{event.vm}"):
                seen = when + dice.uniform(0, SEEN)
                records.append((seen, _record(event, reporter, seen, kind, due)))
    fold = Partition("0", grouped(group_by))
    made: list[Notification] = []
    for number, (seen, body) in enumerate(sorted(records)):
        now = T0.timestamp() + seen
        made += fold.add(body, Position(str(number), number, now))
        made += fold.advance(now)
    for later in range(0, 20_000, 100):
        made += fold.advance(T0.timestamp() + 1600 + later)
    return made


def wrong(plan: list[Planned], made: list[Notification]) -> Iterator[str]:
    """What is false, untold or out of order, in words."""
    for one in made:
        yield from _false(plan, one)
    for event in plan:
        start = event.at("started")
        known, _, due = [step for step in event.steps if step[1] in ("announced", "updated")][-1]
        if (
            start is not None
            and start - known > SEEN
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


def _false(plan: list[Planned], one: Notification) -> Iterator[str]:
    group, now = (
        (one.vm.subscription_id, one.vm.resource_group),
        (one.change.time - T0).total_seconds() + 0.001,
    )
    for name in one.change.event.resources:
        events = [
            event
            for event in plan
            if (event.group, event.vm) == (group, name) and event.steps[0][0] <= now
        ]
        if not events:
            yield f"false: {one.change.kind} of {name} in {group} at {now}"
    if one.change.kind == "started":
        starts = [event.at("started") for event in plan if event.group == group]
        if not any(start is not None and start <= now for start in starts):
            yield f"false: nothing of {group} had started at {now}"


def _tells(one: Notification, event: Planned, start: float, due: float) -> bool:
    change = one.change
    place = (
        one.vm.subscription_id,
        one.vm.resource_group,
    ) == event.group and event.vm in change.event.resources
    in_time = (change.time - T0).total_seconds() <= start + SEEN
    return (
        place
        and in_time
        and (change.not_before is None or change.not_before <= T0 + timedelta(seconds=due))
    )
