"""Which sinks a change goes to, how severe it is, and which VM notifies.

Pure, in the manner of Alertmanager.

Routes are tried in order; the first match wins unless it has ``continue``. Without any route, the
changes of events that affect this VM go to every sink.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from notbefore.core.change import Change, ChangeKind, Scope
from notbefore.core.document import Event
from notbefore.core.duration import Duration
from notbefore.core.event_types import EVENT_TYPES, PREEMPT, Severity, event_type_of
from notbefore.core.record import Vm

AnnounceBy = Literal["affected", "all"]
Words = Annotated[tuple[str, ...], Meta(min_length=1)]  # an empty list would match everything

# seconds before NotBefore from which an event that takes a VM down is critical
NEAR: Final = 3600.0
LONG_FREEZE: Final = 9  # seconds of expected interruption from which a Freeze is worth a warning
MAX_REMINDERS: Final = 12  # of one event to one sink


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
    # who notifies: only the affected VMs, or all VMs that see the event
    announce_by: AnnounceBy = "affected"
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


def route(
    change: Change, routes: tuple[Route, ...], vm: Vm | None, sinks: tuple[str, ...]
) -> dict[str, Route]:
    """Return the sinks that this VM sends a change to, each with the first route that
    leads there.
    """
    found: dict[str, Route] = {}
    for one in routes or (Route(Match(scope=("self",)), sinks),):
        if one.match.accepts(change, vm):
            if _notifies(change, one.announce_by, vm):
                found |= {sink: one for sink in one.sinks if sink not in found}
            if not one.go_on:
                break
    return found


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
