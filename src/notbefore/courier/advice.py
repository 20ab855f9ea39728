"""What to do about an event, by its type and by how far it has come."""

from typing import Final

from notbefore.core.text import one_line
from notbefore.courier.message import Message

GONE: Final = ("Preempt", "Terminate")  # the VM does not come back
WAVE: Final = "wave-"  # begins the id of several events that `notbefore fleet` reports together
_AHEAD: Final = {  # where several VMs are affected, "the VM" becomes "each affected VM"
    "Freeze": (
        "Nothing in most cases. If an application does not tolerate a pause (a cluster, a database), fail it over now."
    ),
    "Reboot": "Move or stop applications that must not be killed. The VM comes back by itself.",
    "Redeploy": (
        "Move or stop applications that must not be killed. Save what is on the temporary disk. The VM comes back by"
        " itself."
    ),
    "Preempt": (
        "You may have only 30 seconds: only automation can react in time. Replace the VM if you need it: it does not"
        " come back by itself."
    ),
    "Terminate": "Remove the VM from everything that depends on it. It does not come back.",
}
_STARTED: Final = {
    "Freeze": "Nothing. The pause takes seconds, but the event usually lasts about ten minutes.",
    "Reboot": (
        "Wait until the VM is back. If that takes more than half an hour, open a support ticket with Azure and give the"
        " EventId."
    ),
    "Preempt": "Do not wait. Replace the VM if you need it: it does not come back by itself.",
    "Terminate": "Remove the VM from everything that depends on it. It does not come back.",
}
_LATE: Final = (
    "If an affected VM is down, open a support ticket with Azure and give the EventId. Otherwise, expect further"
    " interruptions until the event is over."
)
_FINISHED: Final = {
    "Freeze": "Nothing, if the applications on the VM are healthy.",
    "Reboot": "Check that all applications on the VM run again.",
    "Redeploy": "Check that all applications on the VM run again. The temporary disk is empty now.",
    "Preempt": "Replace the VM if you need it.",
    "Terminate": "Remove the VM from everything that still depends on it.",
}
_UNDO: Final = "Nothing. If you moved or stopped something for this event, bring it back."
_NOT_APPROVED: Final = "If the VM is ready, run `notbefore approve {event}` on {vm}. Otherwise do nothing."
_OF_KIND: Final = {
    "canceled": _UNDO,
    "ended": "Check the VM: it may have been interrupted.",
    "approved": "Nothing, if the VM is ready: the event may start at any moment.",
    "approval_failed": _NOT_APPROVED,
    "approval_skipped": _NOT_APPROVED,
}
_MAYBE_GONE: Final = "Check whether the VM still exists."
_UNKNOWN: Final = "notbefore does not know this type of event. Read Azure's description below. Prepare as for a reboot."
_CRASHED: Final = "Treat the VM as crashed: what was not written to disk is lost. "


def advice_for(message: Message, own: dict[str, str]) -> str:
    """What to do: the user's text for the type of event until it is over, or a built-in one."""
    record = message.record
    users = {name.casefold(): text for name, text in own.items()}.get(record.event_type.casefold())
    if users is not None and not message.settled and message.kind not in _OF_KIND:
        return users
    text = _built_in(message)
    if record.event_id.startswith(WAVE):  # Azure does not know this id
        text = text.replace("give the EventId", "name the VM")
    if not record.of_one_vm:
        text = text.replace("the VM", "each affected VM").replace("The VM", "Each affected VM")
    return text.format(event=one_line(record.event_id), vm=one_line(record.vm_name or "a VM"))


def _built_in(message: Message) -> str:
    record, event_type = message.record, message.record.event_type
    if record.no_longer_affected:
        return _UNDO
    if record.outcome == "finished":
        return _FINISHED.get(event_type, _FINISHED["Reboot"])
    if message.kind == "ended" and event_type in GONE:
        return _MAYBE_GONE
    if message.kind in _OF_KIND:
        return _OF_KIND[message.kind]
    return _until_the_end(message)


def _until_the_end(message: Message) -> str:
    record, event_type = message.record, message.record.event_type
    if message.is_ahead:
        return _AHEAD.get(event_type, _UNKNOWN)
    if message.kind == "reminder" and event_type not in GONE:
        return _LATE
    crashed = _CRASHED if record.without_notice and event_type in ("Reboot", "Redeploy") else ""
    others = f" For those that follow: {_AHEAD.get(event_type, _UNKNOWN)}" if record.events_to_come else ""
    return crashed + _STARTED.get(event_type, _STARTED["Reboot"]) + others
