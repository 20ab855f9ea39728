"""``route_by_sink``: which sinks a change goes to, how severe it is, and which VM notifies. Pure.

Routes work as in Alertmanager: they are tried in order, and the first match wins unless it has
``continue``. Without any route, the changes of events that affect this VM go to every sink, and
those of all other events that it sees go to the event hubs.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from notbefore.core.change import Change, ChangeKind, Scope
from notbefore.core.document import Event
from notbefore.core.duration import Duration
from notbefore.core.event_types import EVENT_TYPES, PREEMPT, Severity, event_type_of
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.record import Vm

AnnounceBy = Literal["affected", "all"]
Words = Annotated[tuple[str, ...], Meta(min_length=1)]  # an empty list would match everything

# seconds before NotBefore from which an event that takes a VM down is critical
NEAR: Final = 3600.0
LONG_FREEZE: Final = 10  # seconds of expected interruption from which a Freeze is worth a warning
MAX_REMINDERS: Final = 12  # of one event to one sink
A_DAY: Final = 86_400.0  # seconds


class DurationRange(Struct, frozen=True, forbid_unknown_fields=True):
    """A range of expected interruptions, in seconds, ends included.

    An unknown interruption is in no range.
    """

    min: int | None = None  # seconds
    max: int | None = None  # seconds

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise ValueError("expected min or max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"expected min to be no more than max, got {self.min} and {self.max}")

    def holds(self, duration: int | None) -> bool:
        """Whether the expected interruption is within the range."""
        if duration is None:
            return False
        if self.min is not None and duration < self.min:
            return False
        return self.max is None or duration <= self.max


class EventMatch(Struct, frozen=True, forbid_unknown_fields=True):
    """Matchers for an event; without any, it matches every event."""

    event_type: Words = ()
    event_source: Words = ()
    scope: Annotated[tuple[Scope, ...], Meta(min_length=1)] = ()
    duration: DurationRange | None = None

    def holds(self, event: Event) -> bool:
        """Whether every matcher that is set matches, except ``scope``.

        The caller checks the scope, because it may be unknown.
        """
        if not _matches(self.event_type, event.event_type):
            return False
        if not _matches(self.event_source, event.event_source or ""):
            return False
        return self.duration is None or self.duration.holds(event.duration)


class Match(EventMatch, frozen=True, forbid_unknown_fields=True):
    """Matchers of a route, for a change and for the VM that reports it."""

    change: Annotated[tuple[ChangeKind, ...], Meta(min_length=1)] = ()
    vm: Words = ()  # the name of this VM, which reports the change
    scale_set: Words = ()  # of this VM
    resource_group: Words = ()  # of this VM
    subscription: Words = ()  # the id of this VM's subscription
    location: Words = ()  # of this VM, such as westeurope
    zone: Words = ()  # of this VM, such as 1
    # of this VM: a value or a list of values for each; an empty list: any
    tags: dict[str, tuple[str, ...]] = {}

    def accepts(self, change: Change, vm: Vm | None) -> bool:
        """Whether every matcher that is set matches a change on this VM.

        The scope ``self`` also matches an event that may be, or was, this VM's.
        """
        if not self.is_here(vm) or not self.holds(change.event):
            return False
        if not _matches(self.change, change.kind):
            return False
        if not self.scope or change.scope in self.scope:
            return True
        # too many messages do less harm than too few
        may_be_ours = change.scope == "unknown" or change.no_longer_affected
        return may_be_ours and "self" in self.scope

    def is_here(self, vm: Vm | None) -> bool:
        """Whether no known value of this VM contradicts the matchers.

        If a value does, the route never matches on this VM.

        A value that IMDS has not given yet contradicts nothing: too many messages do less harm than
        too few. Azure compares names without regard to case, but not the values of tags.
        """
        if vm is None:
            return True
        is_identified = bool(vm.vm_id)  # by IMDS: then an empty value means that there is none
        matchers = (  # the accepted names, and the name that this VM has
            (self.vm, vm.name),
            (self.scale_set, vm.scale_set),
            (self.resource_group, vm.resource_group),
            (self.subscription, vm.subscription_id),
            (self.location, vm.location),
            (self.zone, vm.zone),
        )
        for accepted, name in matchers:
            is_known = is_identified or name != ""
            if accepted and is_known and _comparable(name) not in map(_comparable, accepted):
                return False
        return not is_identified or self._has_tags(vm)

    def _has_tags(self, vm: Vm) -> bool:
        """Whether an identified VM has the tags."""
        values = {name.casefold(): value for name, value in vm.tags.items()}
        for name, accepted in self.tags.items():
            value = values.get(name.casefold())
            if value is None:
                return False
            if accepted and value not in accepted:
                return False
        return True


def _comparable(name: str) -> str:
    """Return a name in the form in which it is compared.

    A location may be written with spaces (`West Europe`).
    """
    return name.casefold().replace(" ", "")


def _matches(matcher: tuple[str, ...], word: str) -> bool:
    """Whether a matcher has a word, in any case; an empty matcher matches every word."""
    if not matcher:
        return True
    return word.casefold() in [name.casefold() for name in matcher]


class Route(Struct, frozen=True, forbid_unknown_fields=True, rename={"continues": "continue"}):
    """The sinks of the changes that match, and how they are notified."""

    match: Match = Match()
    sinks: tuple[str, ...] = ()  # where the change goes; without any, no one is notified
    continues: bool = False  # also try the routes after this one
    # who notifies: only the affected VMs, or all VMs that see the event; default: `all` for event
    # hubs, else `affected`
    announce_by: AnnounceBy | None = None
    severity: Severity | None = None  # replaces the severity that follows from type and notice
    remind_before: tuple[Duration, ...] = ()  # how long before NotBefore reminders are sent
    # sinks for critical changes if one of `sinks` refuses or is too slow
    fallback: tuple[str, ...] = ()
    # a sink that has not accepted the change within this time is too slow
    fallback_after: Duration = Duration("60s")

    def __post_init__(self) -> None:
        if len(self.remind_before) > MAX_REMINDERS:
            raise ValueError(
                f"remind_before: expected {MAX_REMINDERS} or less, got {len(self.remind_before)}"
            )
        self._check_reminders_of_preempts()
        if not self.fallback and self.fallback_after != Duration("60s"):
            raise ValueError(
                "fallback_after: expected `fallback` with the sinks to use after that time"
            )

    def _check_reminders_of_preempts(self) -> None:
        """Raise ``ValueError`` if a route for Preempts alone has a reminder that is always late."""
        event_types = {name.casefold() for name in self.match.event_type}
        if event_types != {PREEMPT.casefold()}:
            return
        notice = EVENT_TYPES[PREEMPT].promised_notice
        if any(before.seconds >= notice for before in self.remind_before):
            raise ValueError(f"remind_before: a Preempt has {notice:g} s of notice: expected less")


class Terms(Struct, frozen=True):
    """The settings of a sink that concern its routes and deliveries."""

    expire_after: float = A_DAY  # seconds
    expire_on_end: bool = True
    approvals: bool = True  # it also gets the results of approvals
    once: bool = False  # its deliveries may be attempted only once
    # its receiver keeps one incident for each event, whichever VMs report it; the end closes it
    keeps_incidents: bool = False
    updates_message: bool = False  # it keeps one message for each event that this VM reports
    every_event: bool = False  # by default it also gets the events that affect only other VMs

    @property
    def needs_end(self) -> bool:
        """Whether its receiver shows an event as open until the end comes."""
        return self.keeps_incidents or self.updates_message

    def announce_by(self, route: Route) -> AnnounceBy:
        """Return which VMs notify this sink, by a route that leads to it."""
        if route.announce_by is not None:
            return route.announce_by
        if self.every_event:
            return "all"
        return "affected"


class Routing(Struct, frozen=True):
    """The routes, and the sinks that they may name."""

    routes: tuple[Route, ...] = ()
    sinks: dict[str, Terms] = {}

    @property
    def routes_or_default(self) -> tuple[Route, ...]:
        """The routes, or those that apply if none are configured."""
        if self.routes:
            return self.routes
        of_every_event = tuple(name for name, terms in self.sinks.items() if terms.every_event)
        return (
            Route(sinks=of_every_event, continues=True),
            Route(Match(scope=("self",)), tuple(self.sinks)),
        )


def severity_of(event_type: str, ahead: float | None, duration: int | None) -> Severity:
    """Return the severity from values that are the same on every VM, as the Prometheus rules do.

    ``ahead``: seconds to NotBefore; ``None`` if the event is started or has none. ``duration``: the
    interruption that Azure expects, in seconds; ``None`` if unknown.
    """
    highest = event_type_of(event_type).severity
    if highest == "info":
        return highest
    if highest == "critical":
        is_near = ahead is None or ahead <= NEAR
        if is_near:
            return "critical"
        return "warning"

    is_short = duration is not None and duration < LONG_FREEZE
    if is_short:
        return "info"
    return "warning"


def severity_at_once(change: Change) -> Severity:
    """Return how severe a change is when it is seen."""
    return severity_of(change.event.event_type, change.ahead_seconds, change.event.duration)


def route_by_sink(change: Change, routing: Routing, vm: Vm | None) -> dict[str, Route]:
    """Return the sinks that this VM sends a change to, each with the first route to it."""
    routes = _notifying_routes(change, routing, vm)
    if _is_end_of_vanished_peer(change):
        for sink, route in _closing_routes(change, routing, vm or Vm()).items():
            routes.setdefault(sink, route)
    return routes


def _notifying_routes(change: Change, routing: Routing, vm: Vm | None) -> dict[str, Route]:
    routes: dict[str, Route] = {}
    for route in _matching_routes(change, routing, vm):
        for sink in route.sinks:
            announce_by = routing.sinks[sink].announce_by(route)
            if sink not in routes and _notifies(change, announce_by, vm):
                routes[sink] = route
    return routes


def _matching_routes(change: Change, routing: Routing, vm: Vm | None) -> list[Route]:
    matching: list[Route] = []
    for candidate in routing.routes_or_default:
        if candidate.match.accepts(change, vm):
            matching.append(candidate)
            if not candidate.continues:
                break
    return matching


def _is_end_of_vanished_peer(change: Change) -> bool:
    """Whether an event of other VMs ended, after which they are gone and cannot report it."""
    if change.scope != "peer" or change.kind not in OUTCOMES:
        return False
    return event_type_of(change.event.event_type).vanishes


def _closing_routes(change: Change, routing: Routing, vm: Vm) -> dict[str, Route]:
    """Return the sinks where a VM that is gone may have opened an incident.

    They are the sinks of the routes by which it sent its own events, as far as this VM knows its
    properties. An end without an incident has no effect there, so a failure to send it needs no
    fallback.
    """
    routes: dict[str, Route] = {}
    as_its_own = replace(change, scope="self")
    for name in change.event.resources:
        for route in _matching_routes(as_its_own, routing, replace(vm, name=name)):
            for sink in (*route.sinks, *route.fallback):
                if routing.sinks[sink].keeps_incidents:
                    routes.setdefault(sink, Route(sinks=(sink,), severity=route.severity))
    return routes


def _notifies(change: Change, announce_by: AnnounceBy, vm: Vm | None) -> bool:
    """Whether this VM notifies of a change.

    With ``affected``, it does if it is one of Resources, and once more when it no longer is.
    """
    if change.approval is not None:  # no other VM reports this approval
        return True
    if announce_by == "all" or vm is None or not vm.name or not change.event.vms:
        return True
    return change.scope != "peer" or change.no_longer_affected
