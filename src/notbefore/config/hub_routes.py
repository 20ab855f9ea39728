"""``without_peers(routing)`` finds the routes that give an event hub no events of other VMs.

A VM that a Preempt deletes cannot report the end, so the fleet learns it only from other VMs. To
find such a route, this module routes two examples: an event of this VM, and the same event of
another VM. Pure.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from notbefore.core.change import APPROVAL_KINDS, Change, ChangeKind, Scope
from notbefore.core.document import SCHEDULED, Event
from notbefore.core.event_types import EVENT_TYPES
from notbefore.core.record import Vm
from notbefore.core.routing import Match, Route, Routing, route_by_sink

_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)  # of the examples; routes do not match times


def without_peers(routing: Routing) -> Iterator[tuple[int, str]]:
    """Yield the index of each route that gives a hub no events of other VMs, and the hub's name."""
    for index, route in enumerate(routing.routes):
        for sink in route.sinks:
            if routing.sinks[sink].every_event and _leaves_out_peers(route, sink, routing):
                yield index, sink


def _leaves_out_peers(route: Route, hub: str, routing: Routing) -> bool:
    """Whether a route gives a hub the events of this VM, and none gives it those of other VMs."""
    match = route.match
    vm = _vm_for(match)
    for event_type in match.event_type or EVENT_TYPES:
        change_of_this_vm = _change_for(match, event_type, "self")
        change_of_another_vm = _change_for(match, event_type, "peer")
        uses_route = route_by_sink(change_of_this_vm, routing, vm).get(hub) is route
        if uses_route and hub not in route_by_sink(change_of_another_vm, routing, vm):
            return True
    return False


def _vm_for(match: Match) -> Vm:
    """Return a VM that the matchers accept.

    It has no id, so its empty facts are unknown: they contradict no matcher of the other routes.
    """
    return Vm(
        name=_first(match.vm, "vm"),
        scale_set=_first(match.scale_set),
        resource_group=_first(match.resource_group),
        subscription_id=_first(match.subscription),
        location=_first(match.location),
        zone=_first(match.zone),
    )


def _change_for(match: Match, event_type: str, scope: Scope) -> Change:
    """Return a change that the matchers accept, except for its scope."""
    kind: ChangeKind = "announced"
    kinds = [name for name in match.change if name not in APPROVAL_KINDS]
    if kinds:
        kind = kinds[0]

    duration = None
    if match.duration is not None:
        duration = match.duration.max
        if duration is None:
            duration = match.duration.min
    event = Event(
        event_id="example",
        event_type=event_type,
        event_status=SCHEDULED,
        resources=("another-vm",),
        event_source=_first(match.event_source, "Platform"),
        duration=duration,
    )
    return Change(
        id="example",
        kind=kind,
        reason="first_seen_scheduled",
        time=_TIME,
        event=event,
        scope=scope,
        incarnation=1,
        first_seen=_TIME,
    )


def _first(words: tuple[str, ...], default: str = "") -> str:
    if not words:
        return default
    return words[0]
