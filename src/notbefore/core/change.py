"""``Change``: one step in the life of an event. Pure.

Metrics, records and deliveries are made from it.
"""

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
"""A step in the event's life that IMDS's document shows, or the result of an approval here."""

Scope = Literal["self", "peer", "unknown"]

Outcome = Literal["canceled", "finished", "unknown"]

Reason = str
"""Why a change is of its kind. ``wording.phrases.REASONS`` has some in words; docs/how-it-works.md
and docs/approval.md say more."""

SILENT: Final = "Silent"
"""An event type that Azure does not have: VMs of a fleet have stopped sending heartbeats."""

AS_FAR_AS_KNOWN: Final = "as_far_as_known"
"""The reason of an end that not every VM of a fleet has reported."""

AZURE_COMPLETED: Final = "azure_completed"
AZURE_CANCELED: Final = "azure_canceled"
"""The reasons of ends that Azure itself has reported to a fleet."""


class StepProperties:
    """The properties that ``Change`` and ``Record`` have in common."""

    __slots__ = ()
    reason: str
    scope: str
    previous_scope: str | None
    notice_seconds: float | None

    @property
    def no_longer_affected(self) -> bool:
        """Whether the event no longer affects this VM, after it did or might have affected it."""
        return self.scope == "peer" and self.previous_scope is not None

    @property
    def without_notice(self) -> bool:
        """Whether the event was Started when it first appeared: there was no notice."""
        return self.reason == "first_seen_started" and self.notice_seconds == 0


class Change(Struct, StepProperties, frozen=True):
    """One step in an event's life. Times are UTC.

    Durations are seconds and ``None`` where they were not observed.
    """

    id: str  # the same on every VM that sees the same step; see ``change_id``
    kind: ChangeKind
    reason: Reason
    time: datetime  # when this agent saw it
    event: Event  # as last listed
    scope: Scope  # whether it affects this VM
    incarnation: int  # of the document that showed the change
    first_seen: datetime
    previous: Event | None = None  # as listed before, for ``updated`` and ``started``
    previous_scope: Scope | None = None  # the scope before, if a change of Resources changed it
    outcome: Outcome | None = None  # for ``canceled``, ``finished``, ``ended``
    # the last one known: Azure empties it once the event is started
    not_before: datetime | None = None
    # from ``time`` to NotBefore; ``None`` without a NotBefore, and once Started
    ahead_seconds: float | None = None
    # from ``first_seen`` to NotBefore; 0 if it began without notice
    notice_seconds: float | None = None
    scheduled_seconds: float | None = None  # from ``first_seen`` to the start (or the cancellation)
    started_seconds: float | None = None  # from the start to the end
    # measured on this VM; only for ``self`` events that have started
    interruption: float | None = None
    # when it ended, if that is known to be earlier than ``time``
    over_since: datetime | None = None
    approval: "Approval | None" = None  # for each ``ApprovalKind``

    @property
    def not_before_changed(self) -> bool:
        """Whether this step changed NotBefore."""
        return self.previous is not None and self.previous.not_before != self.event.not_before


OPERATOR: Final = "operator"  # the rule of approvals by hand
BY_RULE: Final = "rule"  # ``approval_by`` if a rule decided


class Approval(Struct, frozen=True):
    """The result of an approval, and who decided."""

    # the rule's name in the configuration; ``OPERATOR`` for ``notbefore approve``
    approval_rule: str
    approval_by: str  # ``BY_RULE``, or the name of the user on this VM who approved it by hand
    approval_detail: str = ""  # what IMDS answered, or why nothing was sent; in words
    approval_requests: int = 0  # start requests sent for it
    approval_reason: str = ""  # why it is approved, given by the user who approves it by hand


def change_id(event_key: str, kind: ChangeKind, digest: str, nth: int) -> str:
    """Return 32 hex digits: the same for the same step on every VM, after every restart.

    ``digest`` distinguishes steps of one kind (``updated``: the event's content; approvals: the VM
    and the time). ``nth``: how often the same step happened before; an EventId can come back, a
    NotBefore can move back and forth.
    """
    return sha256("\n".join((event_key, kind, digest, str(nth))).encode())[:32]
