"""Which sinks a change goes to, how severe it is, and which VM notifies.

Pure, in the manner of Alertmanager.

Routes are tried in order; the first match wins unless it has ``continue``. Without any route, the
changes of events that affect this VM go to every sink, and those of all other events that it sees
go to the event hubs.
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
        return (self.min is None or duration >= self.min) and (
            self.max is None or duration <= self.max
        )


class EventMatch(Struct, frozen=True, forbid_unknown_fields=True):
    """Matchers for an event; without any, it matches every event."""

    event_type: Words = ()
    event_source: Words = ()
    scope: Annotated[tuple[Scope, ...], Meta(min_length=1)] = ()
    duration: DurationRange | None = None

    def holds(self, event: Event) -> bool:
        """Whether every matcher that is set matches, except ``scope``: the caller checks it, as it
        may be unknown.
        """
        return (
            _one_of(event.event_type, self.event_type)
            and _one_of(event.event_source or "", self.event_source)
            and (self.duration is None or self.duration.holds(event.duration))
        )


class Match(EventMatch, frozen=True, forbid_unknown_fields=True):
    """Matchers of a route, for a change and for the VM that reports it."""

    change: Annotated[tuple[ChangeKind, ...], Meta(min_length=1)] = ()
    vm: Words = ()  # the name of this VM, which reports the change
    scale_set: Words = ()  # of this VM
    resource_group: Words = ()  # of this VM
    subscription: Words = ()  # the id of this VM's subscription
    location: Words = ()  # of this VM, such as westeurope
    zone: Words = ()  # of this VM, such as 1
    tags: dict[
        str, tuple[str, ...]
    ] = {}  # of this VM: a value or a list of values for each; an empty list: any

    def accepts(self, change: Change, vm: Vm | None) -> bool:
        """Whether every matcher that is set matches.

        ``self`` also matches an event that may be, or was, this VM's.
        """
        # may be, or was: too many messages do less harm
        ours = change.scope == "unknown" or change.no_longer_affected
        return (
            self.is_here(vm)
            and _one_of(change.kind, self.change)
            and (not self.scope or change.scope in self.scope or (ours and "self" in self.scope))
            and self.holds(change.event)
        )

    def is_here(self, vm: Vm | None) -> bool:
        """Whether no known value of this VM contradicts the matchers.

        If one does, the route never matches on this VM.

        A value that IMDS has not given yet contradicts nothing: too many messages do less harm.
        Azure compares names without regard to case, but not the values of tags.
        """
        vm = vm or Vm()
        known = bool(vm.vm_id)  # IMDS has identified this VM: it has no value for an empty fact
        asked = (
            self.vm,
            self.scale_set,
            self.resource_group,
            self.subscription,
            self.location,
            self.zone,
        )
        facts = (vm.name, vm.scale_set, vm.resource_group, vm.subscription_id, vm.location, vm.zone)
        for names, fact in zip(asked, facts, strict=True):
            if names and (known or fact) and _compared(fact) not in map(_compared, names):
                return False
        tags = {name.casefold(): value for name, value in vm.tags.items()}
        found = (
            [(tags.get(name.casefold()), values) for name, values in self.tags.items()]
            if known
            else []
        )
        return all(value is not None and (not values or value in values) for value, values in found)


def _compared(name: str) -> str:
    """A name in the form in which it is compared.

    Some write a location with spaces (`West Europe`).
    """
    return name.casefold().replace(" ", "")


class Route(Struct, frozen=True, forbid_unknown_fields=True, rename={"go_on": "continue"}):
    """One entry of ``routes``."""

    match: Match = Match()
    sinks: tuple[str, ...] = ()  # where the change goes; without any, nobody is notified
    go_on: bool = False  # try the routes after this one as well
    # who notifies: only the affected VMs, or all VMs that see the event; default: `all` for event
    # hubs, else `affected`
    announce_by: AnnounceBy | None = None
    severity: Severity | None = None  # replaces the severity that follows from type and notice
    remind_before: tuple[Duration, ...] = ()  # how long before NotBefore reminders are sent
    fallback: tuple[
        str, ...
    ] = ()  # sinks for critical changes if one of `sinks` refuses or is too slow
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
    every_event: bool = False  # by default it also gets the events that affect only other VMs

    def announce_by(self, way: Route) -> AnnounceBy:
        """Return which VMs notify this sink, by a route that leads to it."""
        if way.announce_by is not None:
            return way.announce_by
        return "all" if self.every_event else "affected"


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
            Route(sinks=of_every_event, go_on=True),
            Route(Match(scope=("self",)), tuple(self.sinks)),
        )


def severity_of(event_type: str, ahead: float | None, duration: int | None) -> Severity:
    """Return the severity from values that are the same on every VM.

    The Prometheus rules do the same.

    ``ahead``: seconds to NotBefore; ``None`` if the event is started or has none. ``duration``: the
    interruption that Azure expects, in seconds; ``None`` if unknown.
    """
    if event_type_of(event_type).severity == "critical":
        is_near = ahead is None or ahead <= NEAR
        return "critical" if is_near else "warning"

    is_short = duration is not None and duration < LONG_FREEZE
    return "info" if is_short else "warning"


def severity_at_once(change: Change) -> Severity:
    """Return how severe a change is when it is seen."""
    return severity_of(change.event.event_type, change.ahead_seconds, change.event.duration)


def route(change: Change, routing: Routing, vm: Vm | None) -> dict[str, Route]:
    """Return the sinks that this VM sends a change to, each with the first route that
    leads there.
    """
    ways = _ways(change, routing, vm)
    if _is_end_of_vanished_peer(change):
        for sink, way in _closing_ways(change, routing, vm or Vm()).items():
            ways.setdefault(sink, way)
    return ways


def _ways(change: Change, routing: Routing, vm: Vm | None) -> dict[str, Route]:
    ways: dict[str, Route] = {}
    for way in _matching_routes(change, routing, vm):
        for sink in way.sinks:
            announce_by = routing.sinks[sink].announce_by(way)
            if sink not in ways and _notifies(change, announce_by, vm):
                ways[sink] = way
    return ways


def _matching_routes(change: Change, routing: Routing, vm: Vm | None) -> list[Route]:
    matching: list[Route] = []
    for candidate in routing.routes_or_default:
        if candidate.match.accepts(change, vm):
            matching.append(candidate)
            if not candidate.go_on:
                break
    return matching


def _is_end_of_vanished_peer(change: Change) -> bool:
    """Whether an event of other VMs ended, after which they are gone and cannot report it."""
    if change.scope != "peer" or change.kind not in OUTCOMES:
        return False
    return event_type_of(change.event.event_type).vanishes


def _closing_ways(change: Change, routing: Routing, vm: Vm) -> dict[str, Route]:
    """Return the sinks where a VM that is gone may have opened an incident.

    They are those of the routes by which it sent its own events, as far as this VM knows its facts.
    An end without an incident does nothing there, so a failure to send it needs no fallback.
    """
    ways: dict[str, Route] = {}
    own = replace(change, scope="self")
    for name in change.event.resources:
        for way in _matching_routes(own, routing, replace(vm, name=name)):
            for sink in (*way.sinks, *way.fallback):
                if routing.sinks[sink].keeps_incidents:
                    ways.setdefault(sink, Route(sinks=(sink,), severity=way.severity))
    return ways


def _one_of(value: str, wanted: tuple[str, ...]) -> bool:
    return not wanted or value.casefold() in (word.casefold() for word in wanted)


def _notifies(change: Change, announce_by: AnnounceBy, vm: Vm | None) -> bool:
    """Whether this VM notifies.

    ``affected``: if it is one of Resources, and once more when it no longer is.
    """
    if change.approval is not None:  # only the VM that did it knows of it
        return True
    if announce_by == "all" or vm is None or not vm.name or not change.event.vms:
        return True
    return change.scope != "peer" or change.no_longer_affected
