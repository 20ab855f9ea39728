"""The phrases about each type of event and each kind of change.

``texts`` and ``sentences`` combine them. ``{the_vm}``: "the VM", or "each affected VM"
if there are several.
"""

from typing import Final, NamedTuple

from notbefore.core.change import AS_FAR_AS_KNOWN, AZURE_CANCELED, AZURE_COMPLETED
from notbefore.core.document import PLATFORM, USER
from notbefore.core.event_types import (
    FREEZE,
    PREEMPT,
    REBOOT,
    REDEPLOY,
    SPOT_REBALANCE,
    TERMINATE,
)
from notbefore.core.routing import LONG_FREEZE
from notbefore.core.text import counted


class TypePhrases(NamedTuple):
    """The sentences about a type of event."""

    verb: str  # what Azure will do to the VM
    effect: str  # what happens to the VM, and the consequences; ``{pause}``: how long it takes
    ahead: str  # what to do before it starts
    over: str  # what to do after it
    started: str = ""  # what to do while it lasts; an advice never starts
    finished: str = "The event is over. Nothing more will happen."  # what its end means


class KindPhrases(NamedTuple):
    """The sentences about a kind of change; the same for every type of event."""

    title: str
    summary: str
    advice: str


_WAIT: Final = (
    "Wait until {the_vm} is back. If that takes more than half an hour, open a support ticket with"
    " Azure and {name_it}."
)
_GONE: Final = "The event is over, and {the_vm} is gone."
TYPES: Final = {
    FREEZE: TypePhrases(
        verb="will pause",
        effect=(
            "paused for {pause}. CPU and network stop for that time. Memory and open files are"
            " kept."
        ),
        ahead=(
            "If an application does not tolerate a pause (a cluster, a database), fail it over"
            " before NotBefore."
        ),
        started="Nothing. The pause takes seconds, but the event usually lasts about ten minutes.",
        over="Nothing, if the applications on {the_vm} are healthy.",
    ),
    REBOOT: TypePhrases(
        verb="will reboot",
        effect="rebooted. All processes end, and what is in memory is lost.",
        ahead="Move or stop applications that must not be killed. {The_vm} comes back by itself.",
        started=_WAIT,
        over="Check that all applications on {the_vm} run again.",
    ),
    REDEPLOY: TypePhrases(
        verb="will redeploy",
        effect="moved to another host. This is a reboot, and the temporary disk is lost.",
        ahead=(
            "Move or stop applications that must not be killed. Save what is on the temporary disk."
            " {The_vm} comes back by itself."
        ),
        started=_WAIT,
        over="Check that all applications on {the_vm} run again. The temporary disk is empty now.",
    ),
    PREEMPT: TypePhrases(
        verb="will evict",
        effect="evicted. A Spot VM that is evicted is deleted or deallocated.",
        ahead=(
            "You may have only 30 seconds: only automation can react in time. Replace {the_vm} if"
            " you need it: it does not come back by itself."
        ),
        started="Do not wait. Replace {the_vm} if you need it: it does not come back by itself.",
        over="Replace {the_vm} if you need it.",
        finished=_GONE,
    ),
    TERMINATE: TypePhrases(
        verb="will delete",
        effect="deleted. It does not come back.",
        ahead="Remove {the_vm} from everything that depends on it. It does not come back.",
        started="Remove {the_vm} from everything that depends on it. It does not come back.",
        over="Remove {the_vm} from everything that still depends on it.",
        finished=_GONE,
    ),
    SPOT_REBALANCE: TypePhrases(
        verb="may evict",
        effect=(
            "more likely to be evicted than before. This is a recommendation: nothing happens to"
            " it until Azure announces a Preempt, and that has only 30 seconds of notice."
        ),
        ahead=(
            "Start a replacement for {the_vm} if you need one, and move work there while there is"
            " time. There is nothing to approve."
        ),
        over="Nothing. If Azure evicts {the_vm}, it announces a Preempt.",
        finished=(
            "The recommendation was withdrawn. Whether Azure evicts {the_vm} is announced as"
            " Preempt."
        ),
    ),
}
SHORT_FREEZE: Final = TYPES[FREEZE]._replace(
    ahead=(
        f"Usually nothing: a pause of less than {LONG_FREEZE} seconds rarely matters. If an"
        " application does not tolerate it (a cluster, a database), fail it over before NotBefore."
    )
)
NO_PAUSE: Final = TYPES[FREEZE]._replace(
    ahead="Nothing: Azure expects no interruption.",
    started="Nothing: Azure expects no interruption.",
)
UNKNOWN_TYPE: Final = TYPES[REBOOT]._replace(
    verb="will do maintenance on",
    ahead=(
        "notbefore does not know this type of event. Read Azure's description below. Prepare as for"
        " a reboot."
    ),
)
NO_INTERRUPTION: Final = "Azure expects that this event interrupts no VM."


def phrases_of(event_type: str, duration: int | None = None) -> TypePhrases:
    """Return the phrases about events of a type; ``duration``: the seconds of interruption that
    Azure expects, if known.
    """
    if event_type == FREEZE and duration == 0:
        return NO_PAUSE
    if event_type == FREEZE and duration is not None and duration < LONG_FREEZE:
        return SHORT_FREEZE
    return TYPES.get(event_type, UNKNOWN_TYPE)


FINISHED_TITLE: Final = "is over"
ADVICE_TITLE: Final = "eviction is more likely now"
WITHDRAWN_TITLE: Final = "was withdrawn"
UNDO: Final = "Nothing. If you moved or stopped something for this event, bring it back."
_NOT_APPROVED: Final = (
    "If {the_vm} is ready, and the event has not started, run `notbefore approve {event}` on {vm}."
    " Otherwise do nothing."
)
KINDS: Final = {
    "canceled": KindPhrases(
        "was canceled", "Azure canceled the event before it started. Nothing happened.", UNDO
    ),
    "ended": KindPhrases(
        "may have happened: Azure no longer lists it",
        "It is not known whether the event happened.",
        "Check {the_vm}: it may have been interrupted, or may be gone.",
    ),
    "approved": KindPhrases(
        "approved: it may start now",
        "{vm} approved the event. Azure may start it now, for all affected VMs.",
        "Nothing, if {the_vm} is ready: the event may start at any moment.",
    ),
    "approval_failed": KindPhrases(
        "could not be approved",
        "{vm} tried to approve the event, without success. Without an approval, Azure starts it"
        " after NotBefore.",
        _NOT_APPROVED,
    ),
    "approval_skipped": KindPhrases(
        "was not approved",
        "{vm} did not approve the event. Without an approval, Azure starts it after NotBefore.",
        _NOT_APPROVED,
    ),
}
CRASHED: Final = "Treat {the_vm} as crashed: what was not written to disk is lost. "

SOURCES: Final = {PLATFORM: "Azure (Platform)", USER: "a user of your subscription (User)"}
EXERCISE_NOTE: Final = "This is an exercise: nothing has happened, and nothing will."
CORRECTION: Final = (
    "This corrects an earlier message: Azure or VMs that had not reported it before have now"
    " reported it."
)

# about the VMs of a fleet that send no heartbeats
SILENT: Final = "No heartbeat came for three intervals, and no event explains it."
# the description of such VMs that are known only from the inventory, as it is stored
MISSING: Final = "In the inventory, and never heard from, or not for a day."
# about VMs of a fleet that only Azure has named
WITHOUT_AGENT: Final = (
    "Azure reported an event of them in the last 30 days. They have reported nothing themselves."
)
HEARD: Final = "All of these VMs send heartbeats again, or are no longer expected."
SILENT_ADVICE: Final = (
    "Check in the portal whether the VMs run. On one that runs, check `systemctl status notbefore`,"
    " and with `notbefore outbox list` whether it reaches the hub."
)

# the reasons of endings, and the results of approvals
REASONS: Final[dict[str, str]] = {
    "gone_before_start": "no longer listed, and it had not started",
    "gone_after_start": "it was Started, and is no longer listed",
    "gone_after_start_unwatched": (
        "it was Started, and is no longer listed; when it ended was not seen"
    ),
    "start_may_be_missed": "no longer listed, and NotBefore passed while IMDS gave no answer",
    "withdrawn": "the recommendation was withdrawn; whether Azure evicts is announced as Preempt",
    "gone_from_other_status": "no longer listed, after a status that is not known",
    "not_watched": (
        "no longer listed after a time in which the agent was down, or IMDS gave no answer"
    ),
    "empty_answer": "no longer listed since IMDS sends empty answers",
    "not_readable": "no longer listed after a time in which it could not be read",
    "machine_rebooted": "no longer listed after a boot of this VM",
    AZURE_COMPLETED: "Azure says that it is completed",
    AZURE_CANCELED: "Azure says that it was canceled",
    AS_FAR_AS_KNOWN: "over as far as is known: not every VM has reported it",
    "corrected": "a correction: Azure or VMs that had not reported it before have now reported it",
    "status_went_back": "no longer listed, after it went from Started back to Scheduled",
    "accepted": "Azure accepted it",
    "refused": "Azure refused it",
    "no_answer": "IMDS gave no usable answer in time",
    "dry_run": "this is a dry run, so nothing was sent",
    "no_resources": "the event names no VM",
    "several_resources": "the event also affects other VMs, and the rule does not allow that",
    "changed": "the event changed meanwhile",
    "no_longer_scheduled": "the event started or disappeared before that",
    "too_late": "NotBefore comes first",
    "state_not_written": "the state could not be written to the disk",
    "switched_off": "approval was disabled meanwhile",
}


def reporters(vms: int, *, by_azure: bool) -> str:
    """Return who reports an event: ``Azure and 3 VMs``."""
    if not by_azure:
        return counted(vms, "VM")
    if not vms:
        return "Azure"
    return f"Azure and {counted(vms, 'VM')}"
