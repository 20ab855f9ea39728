"""Which sinks a change goes to, how severe it is, and which VM notifies. Pure, in the manner of Alertmanager.

Routes are tried in order; the first that matches wins unless it says ``continue``. Without any route, the changes of
events that hit this VM go to every sink.
"""

from typing import Final, Literal, get_args

from msgspec import Struct

from notbefore.core.change import Change, ChangeKind, Scope
from notbefore.core.document import PREEMPT, PROMISED, REBOOTING, VANISHING, Event
from notbefore.core.duration import Duration
from notbefore.core.record import Vm

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

AnnounceBy = Literal["affected", "all"]

CRITICAL_TYPES: Final = REBOOTING | VANISHING
NEAR: Final = 3600.0  # seconds before NotBefore from which an event that takes a VM down is critical
LONG_FREEZE: Final = 9  # seconds of expected interruption from which a Freeze is worth a warning
MAX_REMINDERS: Final = 12  # of one event to one sink


class DurationRange(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of expected interruption, both ends included; one that Azure does not know lies within no range."""

    min: int | None = None  # seconds
    max: int | None = None  # seconds

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise ValueError("expected min or max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"expected min to be no more than max, got {self.min} and {self.max}")

    def holds(self, duration: int | None) -> bool:
        """The expected interruption lies within."""
        if duration is None:
            return False
        return (self.min is None or duration >= self.min) and (self.max is None or duration <= self.max)


class EventMatch(Struct, frozen=True, forbid_unknown_fields=True):
    """What an event must be like; what is left empty does not matter."""

    event_type: tuple[str, ...] = ()
    event_source: tuple[str, ...] = ()
    scope: tuple[Scope, ...] = ()
    duration: DurationRange | None = None

    def holds(self, event: Event) -> bool:
        """Whether every matcher that is set agrees. ``scope`` is the caller's: it may be unknown."""
        return (
            _one_of(event.event_type, self.event_type)
            and _one_of(event.event_source or "", self.event_source)
            and (self.duration is None or self.duration.holds(event.duration))
        )


class Match(EventMatch, frozen=True, forbid_unknown_fields=True):
    """What a change must be like for a route, and the VM that reports it."""

    change: tuple[ChangeKind, ...] = ()
    vm: tuple[str, ...] = ()  # the name of this VM, which reports the change
    scale_set: tuple[str, ...] = ()  # of this VM
    resource_group: tuple[str, ...] = ()  # of this VM
    subscription: tuple[str, ...] = ()  # the id of this VM's
    location: tuple[str, ...] = ()  # of this VM, such as westeurope
    zone: tuple[str, ...] = ()  # of this VM, such as 1
    tags: dict[str, tuple[str, ...]] = {}  # of this VM: each with its value, or one of a list; an empty list: any value

    def accepts(self, change: Change, vm: Vm | None) -> bool:
        """Whether every matcher that is set agrees; also with an event that was this VM's, when it no longer is."""
        ours = change.scope == "unknown" or change.no_longer_affected  # may be, or was: rather one message too many
        return (
            self.is_here(vm)
            and _one_of(change.kind, self.change)
            and (not self.scope or change.scope in self.scope or (ours and "self" in self.scope))
            and self.holds(change.event)
        )

    def is_here(self, vm: Vm | None) -> bool:
        """Whether nothing that is known of this VM contradicts: else nothing ever matches here.

        What IMDS has not said yet contradicts nothing: rather one message too many. Azure compares names without
        regard to case, and the values of tags with it.
        """
        vm = vm or Vm()
        known = bool(vm.vm_id)  # IMDS has said who this VM is; an empty fact is one that it does not have
        asked = (self.vm, self.scale_set, self.resource_group, self.subscription, self.location, self.zone)
        facts = (vm.name, vm.scale_set, vm.resource_group, vm.subscription_id, vm.location, vm.zone)
        for names, fact in zip(asked, facts, strict=True):
            if names and (known or fact) and _compared(fact) not in map(_compared, names):
                return False
        tags = {name.casefold(): value for name, value in vm.tags.items()}
        found = [(tags.get(name.casefold()), values) for name, values in self.tags.items()] if known else []
        return all(value is not None and (not values or value in values) for value, values in found)


def _compared(name: str) -> str:
    """A name as it is compared; a location is also written with spaces (`West Europe`)."""
    return name.casefold().replace(" ", "")


class Route(Struct, frozen=True, forbid_unknown_fields=True, rename={"go_on": "continue"}):
    """One entry of ``routes``."""

    match: Match = Match()
    sinks: tuple[str, ...] = ()  # where it goes; without any, nobody is notified
    go_on: bool = False  # try the routes after this one as well
    announce_by: AnnounceBy = "affected"  # each VM for itself, or all that see it
    severity: Severity | None = None  # instead of the one by type and notice
    remind_before: tuple[Duration, ...] = ()  # reminders, so long before NotBefore
    fallback: tuple[str, ...] = ()  # sinks for what is critical, where one of `sinks` refuses it or takes too long
    fallback_after: Duration = Duration("60s")  # what has not been accepted by then takes too long

    def __post_init__(self) -> None:
        if len(self.remind_before) > MAX_REMINDERS:
            raise ValueError(f"remind_before: expected {MAX_REMINDERS} or less, got {len(self.remind_before)}")
        preempt = {one.casefold() for one in self.match.event_type} == {PREEMPT.casefold()}
        if preempt and any(one.seconds >= PROMISED[PREEMPT] for one in self.remind_before):
            raise ValueError(f"remind_before: a Preempt has {PROMISED[PREEMPT]:g} s of notice: expected less")
        if not self.fallback and self.fallback_after != Duration("60s"):
            raise ValueError("fallback_after: there is no `fallback`: name the sinks that are tried then")


def severity_of(event_type: str, ahead: float | None, duration: int | None) -> Severity:
    """Return the severity by what is the same on every VM that sees the event; the rules for Prometheus say the same.

    ``ahead``: seconds to NotBefore; ``None`` if it is started or has none. ``duration``: the interruption that Azure
    expects, in seconds; ``None`` where it does not know.
    """
    if event_type in CRITICAL_TYPES:
        return "critical" if ahead is None or ahead <= NEAR else "warning"
    return "warning" if duration is None or duration >= LONG_FREEZE else "info"


def severity_at_once(change: Change) -> Severity:
    """Return how severe a change is when it is seen."""
    return severity_of(change.event.event_type, change.ahead_seconds, change.event.duration)


def route(change: Change, routes: tuple[Route, ...], vm: Vm | None, sinks: tuple[str, ...]) -> dict[str, Route]:
    """The sinks that a change goes to on this VM, each with the first route by which it goes there."""
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
    """This VM notifies of it. ``affected``: as one of Resources, and once more when it is no longer among them."""
    if change.approval is not None:  # only the VM that did it knows of it
        return True
    if announce_by == "all" or vm is None or not vm.name or not change.event.vms:
        return True
    return change.scope != "peer" or change.no_longer_affected
