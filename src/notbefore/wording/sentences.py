"""A change in one sentence, as the body of its record; and parts that longer texts share. Pure."""

from typing import Final

from notbefore.core.change import BY_RULE, OPERATOR, SILENT, Approval, Change
from notbefore.core.record import FleetFacts, Record, Vm
from notbefore.core.text import counted, rfc3339
from notbefore.wording.phrases import MISSING, REASONS

EXERCISE: Final = "[EXERCISE] "  # the start of every text about an exercise: nothing has happened
_OUTCOME_WORDS: Final = {
    "canceled": "canceled",
    "finished": "finished",
    "unknown": "gone, and how it ended was not seen",
}
_STEPS_OF_ADVICE: Final = {  # by kind of change
    "announced": "announced",
    "ended": "withdrawn: whether Azure evicts is announced as Preempt",
}
_VM_BY_SCOPE: Final = {  # by scope
    "self": "this VM",
    "peer": "another VM",
    "unknown": "a VM of this group",
}


def sentence(change: Change, vm: Vm | None = None, fleet: FleetFacts | None = None) -> str:
    """Return the change in a sentence: what happens to which VMs, and when.

    ``fleet``: what many VMs say about it together; ``vm`` then has what these VMs have in common.
    """
    if change.event.event_type == SILENT and fleet is not None:
        return _silence(change, vm or Vm(), fleet)
    if change.no_longer_affected:
        return _no_longer_affected(change)
    affected = _affected(change, vm, fleet)
    return f"{change.event.event_type} of {affected} {_step(change, fleet)}"


def _affected(change: Change, vm: Vm | None, fleet: FleetFacts | None) -> str:
    """Return the affected VMs as this VM sees them, or as many VMs see them together."""
    if fleet is None:
        return _VM_BY_SCOPE[change.scope]
    if vm is None:
        vm = Vm()
    if fleet.fleet_vms == 1 and vm.name:
        return vm.name
    return vms_in_words(fleet.fleet_vms, vm)


def _silence(change: Change, vm: Vm, fleet: FleetFacts) -> str:
    """Return the sentence about VMs of a fleet that send no heartbeats, or send them again."""
    vms_are = f"{_silent_vms(vm, fleet)} are"
    if fleet.fleet_vms == 1:
        vms_are = f"{_silent_vms(vm, fleet)} is"

    is_over = change.kind == "finished"
    is_missing = change.event.description == MISSING
    if is_over and is_missing:
        return f"{vms_are} no longer missing"
    if is_over:
        return f"{vms_are} heard from again, or no longer expected"
    if is_missing:
        return f"{vms_are} missing"
    return f"{vms_are} silent"


def _silent_vms(vm: Vm, fleet: FleetFacts) -> str:
    """Return the silent VMs in words: ``40 scale sets (2,000 VMs) in westeurope``."""
    groups: list[str] = []
    if fleet.fleet_scale_sets:
        groups.append(counted(fleet.fleet_scale_sets, "scale set"))
    if fleet.fleet_resource_groups:
        groups.append(counted(fleet.fleet_resource_groups, "resource group"))

    if groups:
        return f"{' and '.join(groups)} ({counted(fleet.fleet_vms, 'VM')}) in {vm.location}"
    if fleet.fleet_vms == 1 and vm.name:
        return vm.name
    return vms_in_words(fleet.fleet_vms, vm)


def _no_longer_affected(change: Change) -> str:
    if change.previous_scope == "self":
        return f"{change.event.event_type} no longer affects this VM"
    return f"{change.event.event_type} does not affect this VM"  # it was not known before


def _step(change: Change, fleet: FleetFacts | None) -> str:
    """Return the rest of the sentence, from its verb."""
    if change.event.is_advice and change.kind in _STEPS_OF_ADVICE:
        return _STEPS_OF_ADVICE[change.kind]
    if change.kind == "announced":
        return _announced(change)
    if change.kind == "updated":
        return _updated(change, fleet)
    if change.approval is not None:
        return _decided(change, change.approval)
    if change.kind == "started" and change.without_notice:
        return "started without notice"
    if change.kind == "started":
        return "started"
    return _OUTCOME_WORDS[change.outcome or "unknown"]


def _announced(change: Change) -> str:
    if change.not_before is None:
        return "announced: at a time not given"
    return f"announced: not before {rfc3339(change.not_before)}"


def _updated(change: Change, fleet: FleetFacts | None) -> str:
    """Return ``changed: it was a Freeze: 1 of 5 events is under way``, without unused parts."""
    parts = ["changed"]
    if change.previous is not None and change.previous.event_type != change.event.event_type:
        parts.append(f"it was a {change.previous.event_type}")
    if fleet is not None and fleet.fleet_events > 1:
        parts.append(progress(fleet))
    return ": ".join(parts)


def _decided(change: Change, approval: Approval) -> str:
    result = "approved" if change.kind == "approved" else "not approved"
    reason = REASONS.get(change.reason, change.reason)
    return f"{result}: {reason} ({approval.approval_rule})"


def progress(facts: FleetFacts | Record) -> str:
    """Return the progress of a wave: ``2 of 5 events are over, 3 are to come``.

    Empty for one event.
    """
    events = facts.fleet_events or 0
    over = facts.fleet_over or 0
    under_way = facts.fleet_under_way or 0
    if events <= 1:
        return ""
    if not over and not under_way:
        return f"none of {events} events has started"

    counts = {"over": over, "under way": under_way, "to come": events - over - under_way}
    parts: list[str] = []
    for state, count in counts.items():
        if not count:
            continue
        verb = "is" if count == 1 else "are"
        if parts:
            parts.append(f"{count} {verb} {state}")
        else:
            parts.append(f"{count} of {events} events {verb} {state}")
    return ", ".join(parts)


def vms_in_words(count: int, place: Vm | Record) -> str:
    """Return the number of VMs, and where they are: ``48 VMs of the scale set web``."""
    if count == 0:
        return in_place("VMs that Azure does not name", place)
    return in_place(counted(count, "VM"), place)


def in_place(vms: str, place: Vm | Record) -> str:
    """Return VMs with the smallest place that is known of them: ``VMs of the scale set web``."""
    if place.scale_set:
        return f"{vms} of the scale set {place.scale_set}"
    if place.resource_group:
        return f"{vms} of the resource group {place.resource_group}"
    if place.location:
        return f"{vms} in {place.location}"
    return vms


def several_vms(record: Record) -> str:
    """Return the affected VMs in words, if there are several: ``48 VMs of the scale set web``.

    Empty otherwise.
    """
    if record.fleet_vms is None or record.fleet_vms == 1:
        return ""
    return vms_in_words(record.fleet_vms, record)


def approval_result(record: Record) -> str:
    """Return the result of an approval, and who decided: ``Azure accepted it (rule drained)``.

    Empty without one.
    """
    if record.approval_rule is None:
        return ""

    result = REASONS.get(record.reason, record.reason.replace("_", " "))
    decider = f"rule {record.approval_rule}"
    if record.approval_rule == OPERATOR:
        decider = "by hand"
    if record.approval_by not in (None, BY_RULE):
        decider = f"{decider}, {record.approval_by}"
    return f"{result} ({decider})"
