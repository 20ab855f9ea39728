"""``Change``: one step in the life of an event, a frozen fact that metrics, records and deliveries are made from."""

from datetime import datetime
from typing import Final, Literal, get_args

from msgspec import Struct

from notbefore.core.document import Event
from notbefore.core.text import sha256

LifecycleKind = Literal["announced", "updated", "started", "canceled", "finished", "ended"]
LIFECYCLE_KINDS: tuple[LifecycleKind, ...] = get_args(LifecycleKind)

ApprovalKind = Literal["approved", "approval_failed", "approval_skipped"]
APPROVAL_KINDS: tuple[ApprovalKind, ...] = get_args(ApprovalKind)

ChangeKind = Literal[LifecycleKind, ApprovalKind]
"""A step in the event's life, as Azure's document shows it; or what this VM did, or did not do, about it."""

Scope = Literal["self", "peer", "unknown"]

Outcome = Literal["canceled", "finished", "unknown"]

Reason = str  # why it is reported so: docs/how-it-works.md has each of them with its story, ``WORDS`` some in words

SILENT: Final = "Silent"
"""The type of what is no event of Azure: VMs of a fleet whose signs of life have stopped."""

MISSING: Final = "In the inventory, and never heard from, or not for a day."
"""The description of one whose VMs were never heard from."""

WORDS: Final[dict[str, str]] = {  # why an ending is reported as it is, and what became of an approval
    "gone_before_start": "no longer listed, and it had not started",
    "gone_after_start": "it was Started, and is no longer listed",
    "gone_after_start_unwatched": "it was Started, and is no longer listed; nobody saw when it ended",
    "start_may_be_missed": "no longer listed, and NotBefore passed while IMDS gave no answer",
    "gone_from_other_status": "no longer listed, after a status that is not known",
    "not_watched": "no longer listed after a time in which the agent was down, or IMDS gave no answer",
    "not_readable": "no longer listed after a time in which it could not be read",
    "machine_rebooted": "no longer listed after a boot of this VM",
    "as_far_as_known": "over as far as is known: not every VM has said so",
    "corrected": "a correction: VMs that could not report it then have done so now",
    "status_went_back": "no longer listed, after it went from Started back to Scheduled",
    "accepted": "Azure accepted it",
    "refused": "Azure refused it",
    "no_answer": "Azure did not answer in time",
    "dry_run": "this is a dry run, so nothing was sent",
    "several_resources": "the event affects other VMs as well, and the rule does not allow that",
    "changed": "the event changed meanwhile",
    "no_longer_scheduled": "the event started or was gone before that",
    "too_late": "NotBefore came first",
    "state_not_written": "the state could not be written to the disk",
    "switched_off": "approval was disabled meanwhile",
}


class Step:
    """What follows from the facts that a change and its record have in common."""

    __slots__ = ()
    reason: str
    scope: str
    previous_scope: str | None
    notice_seconds: float | None

    @property
    def no_longer_affected(self) -> bool:
        """The event was to affect this VM, or might have, and no longer is."""
        return self.scope == "peer" and self.previous_scope is not None

    @property
    def without_notice(self) -> bool:
        """The event was first seen as it had just started: nobody announced it."""
        return self.reason == "first_seen_started" and self.notice_seconds == 0


class Change(Struct, Step, frozen=True):
    """One step in an event's life. Times are UTC; durations are seconds and ``None`` where they were not observed."""

    id: str  # the same on every VM that sees the same step; see ``change_id``
    kind: ChangeKind
    reason: Reason
    time: datetime  # when this agent saw it
    event: Event  # as last listed
    scope: Scope  # does it hit this VM?
    incarnation: int  # of the document that showed the change
    first_seen: datetime
    previous: Event | None = None  # as listed before, for ``updated`` and ``started``
    previous_scope: Scope | None = None  # where it was another: Resources moved
    outcome: Outcome | None = None  # for ``canceled``, ``finished``, ``ended``
    not_before: datetime | None = None  # the last one known: Azure empties it once the event is started
    ahead_seconds: float | None = None  # from ``time`` to NotBefore; ``None`` without one, and once it was Started
    notice_seconds: float | None = None  # from the first sight to NotBefore; 0 when it began without notice
    scheduled_seconds: float | None = None  # from the first sight to the start (or the cancellation)
    started_seconds: float | None = None  # from the start to the end
    interruption: float | None = None  # seconds, measured on this VM; for events of ``self`` that have started
    over_since: datetime | None = None  # where it is known that it was over before ``time``
    approval: "Approval | None" = None  # for the kinds of approval

    @property
    def not_before_changed(self) -> bool:
        """NotBefore is another than before this step."""
        return self.previous is not None and self.previous.not_before != self.event.not_before


OPERATOR: Final = "operator"  # the rule of what is approved by hand
BY_RULE: Final = "rule"  # by whom, where a rule decided


class Approval(Struct, frozen=True):
    """Who approved, or would have, and what was said to it."""

    approval_rule: str  # its name in the configuration; ``OPERATOR`` for ``notbefore approve``
    approval_by: str  # the name of the VM's user where somebody did it by hand, ``BY_RULE`` otherwise
    approval_detail: str = ""  # what the command or IMDS said, or why not; in words
    approval_requests: int = 0  # start requests sent for it
    approval_reason: str = ""  # why, in the words of the user who did it by hand


def change_id(event_key: str, kind: ChangeKind, digest: str, nth: int) -> str:
    """32 hex digits: the same for the same step on every VM, after every restart.

    A step differs from another of its kind by the event's content (``digest``, for ``updated`` alone) and by how often
    the same step happened before (``nth``: an EventId that comes back, a NotBefore that moves to and fro).
    """
    return sha256("\n".join((event_key, kind, digest, str(nth))).encode())[:32]
