"""``without_peers(routing)``: the routes by which an event hub gets no events of other VMs.

A VM that a Preempt deletes cannot report the end, so the fleet learns it only from other VMs. To
find such a route, an event that it sends to the hub is routed again as one of another VM. Pure.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from notbefore.core.change import APPROVAL_KINDS, Change, Scope
from notbefore.core.document import SCHEDULED, Event
from notbefore.core.event_types import EVENT_TYPES
from notbefore.core.record import Vm
from notbefore.core.routing import Match, Route, Routing, route_by_sink

_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)  # of the example; routes do not match times


def without_peers(routing: Routing) -> Iterator[tuple[int, str]]:
    """Yield the number of each such route, and the name of the hub."""
    for number, way in enumerate(routing.routes):
        for sink in way.sinks:
            if routing.sinks[sink].every_event and _leaves_out_peers(way, sink, routing):
                yield number, sink


def _leaves_out_peers(way: Route, hub: str, routing: Routing) -> bool:
    match = way.match
    vm = _vm_for(match)
    for event_type in match.event_type or EVENT_TYPES:
        own = _change_for(match, event_type, "self")
        is_sent_here = route_by_sink(own, routing, vm).get(hub) is way
        peers = _change_for(match, event_type, "peer")
        if is_sent_here and hub not in route_by_sink(peers, routing, vm):
            return True
    return False


def _vm_for(match: Match) -> Vm:
    """Return a VM that the matchers accept.

    It has no id: so no other route is sure that it does not match this VM.
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
    kinds = [kind for kind in match.change if kind not in APPROVAL_KINDS]
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
        kind=kinds[0] if kinds else "announced",
        reason="first_seen_scheduled",
        time=_TIME,
        event=event,
        scope=scope,
        incarnation=1,
        first_seen=_TIME,
    )


def _first(words: tuple[str, ...], otherwise: str = "") -> str:
    return words[0] if words else otherwise
