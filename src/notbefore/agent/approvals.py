"""What the approver decides on: ``ApprovalSettings`` of the configuration, ``ListedEvents`` of the agent's state."""

from typing import Final, Literal

from msgspec import Struct

from notbefore.agent.state import AgentSnapshot
from notbefore.core.approval import ApprovalAttempt, ApprovalContext, Decision, Policy, judge
from notbefore.core.listing import PendingApproval
from notbefore.core.tracked import WATCHED, Tracked, TrackedEvent
from notbefore.process.clock import ClockReading

KEPT_ATTEMPTS: Final = 20  # that are over, of events that are gone: a list that flaps brings them back


class ApprovalSettings(Struct, frozen=True):
    """What decides whether anything is sent, and where."""

    policy: Policy
    endpoint: str
    api_version: str
    allowed: bool  # --allow-approval

    @property
    def off(self) -> str:
        """Which of the two switches is off, in words; empty if both are on."""
        if not self.allowed:
            return "`notbefore run` was started without --allow-approval"
        return "" if self.policy.enabled else "approval.enabled is not true"

    @property
    def mode(self) -> Literal["on", "dry_run", "off"]:
        """What becomes of a decision to approve."""
        if self.off:
            return "off"
        return "dry_run" if self.policy.dry_run else "on"


class ListedEvents(Struct, frozen=True):
    """The listed events, and how far the approval of each has come."""

    events: dict[str, TrackedEvent]
    attempts: dict[str, ApprovalAttempt]
    context: ApprovalContext
    answered: bool  # IMDS has answered since this process began
    fresh: bool  # its last answer was good and is new: nothing is approved on old knowledge
    flawed: frozenset[str]  # events of which a part could not be read, by their keys

    @classmethod
    def of(cls, snapshot: AgentSnapshot, now: ClockReading) -> "ListedEvents":
        """What was known at ``now``."""
        tracked, poll = snapshot.state.tracked, snapshot.poll
        good = poll.answered is not None and not poll.outdated and poll.failure is None
        return cls(
            events=tracked.events,
            attempts=snapshot.state.approvals,
            context=ApprovalContext(now.wall, snapshot.vm_name, tracked.incarnation or 0),
            answered=poll.answered is not None,
            fresh=good and poll.answered is not None and now.since(poll.answered) <= WATCHED,
            flawed=frozenset(flaw.event_id.casefold() for flaw in poll.flaws if flaw.event_id is not None),
        )

    def certain(self, key: str) -> bool:
        """IMDS has just listed an event, and it could be read."""
        return self.fresh and key in self.events and not self.events[key].unread


def decide(settings: ApprovalSettings, tracked: TrackedEvent, listed: ListedEvents) -> Decision:
    """What the rules say of a listed event."""
    return judge(settings.policy, tracked, listed.context.vm, flawed=tracked.event.key in listed.flawed)


def preview(settings: ApprovalSettings, tracked: TrackedEvent, listed: ListedEvents) -> PendingApproval | None:
    """What the rules would do with a listed event, and why; ``None`` if there are no rules and no switch is on."""
    if not (settings.policy.rules or settings.policy.enabled or settings.allowed):
        return None
    decision, attempt = decide(settings, tracked, listed), listed.attempts.get(tracked.event.key)
    return PendingApproval(
        action=decision.action,
        rule=decision.rule,
        reason=decision.why,
        at=decision.at,
        mode=settings.mode,
        off=settings.off,
        state="" if attempt is None else attempt.outcome or attempt.state,
    )


def without_old(attempts: dict[str, ApprovalAttempt], tracked: Tracked) -> dict[str, ApprovalAttempt]:
    """The attempts without the oldest of those that are over and whose events are gone."""
    over = [key for key, one in attempts.items() if one.state == "done" and key not in tracked.events]
    old = set(over[:-KEPT_ATTEMPTS])
    return {key: one for key, one in attempts.items() if key not in old}
