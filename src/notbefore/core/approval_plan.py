"""``plan`` decides the next action in the approval of one listed event, and says why. Pure.

The approver carries out the plan. The page, ``notbefore events`` and the JSON interface show the
same plan, also while approval is off.
"""

from datetime import datetime
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.approval import ApprovalAttempt, Decision, Policy, judge
from notbefore.core.document import SCHEDULED
from notbefore.core.tracked import TrackedEvent

PlannedAction = Literal["approve", "dry_run", "skip", "continue", "done", "off", "leave"]
"""``approve``: send a start request. ``dry_run``: record that it would be sent. ``skip``: record
why the matching rule does not approve the event. ``continue``: an approval has begun and not ended.
``done``: this decision was carried out. ``off``: the rules approve it, but approval is off.
``leave``: the rules do not approve it."""

DUE_ACTIONS: Final[frozenset[PlannedAction]] = frozenset(("approve", "dry_run", "skip"))
"""The actions that the approver carries out, ``approve`` and ``dry_run`` from a time on."""


class Switches(Struct, frozen=True):
    """Whether approvals are sent."""

    off: str = ""  # why none is sent, in words; empty if they are sent
    dry_run: bool = False  # ``off`` is this dry run: the request that would be sent is recorded


class ApprovalPlan(Struct, frozen=True):
    """The next step in the approval of an event."""

    action: PlannedAction
    decision: Decision  # of the rules
    step: str = ""  # identifies the decision, so that it is carried out once
    off: str = ""  # why nothing is sent, in words
    attempt: ApprovalAttempt | None = None  # what was done about this event so far

    @property
    def is_due_action(self) -> bool:
        """Whether the approver has something to do, now or later."""
        return self.action in DUE_ACTIONS

    def seconds_left(self, now: datetime) -> float:
        """Return the seconds until the action is due, at least 0."""
        if self.decision.at is None:
            return 0.0
        return max(0.0, (self.decision.at - now).total_seconds())


def plan(
    policy: Policy,
    switches: Switches,
    tracked: TrackedEvent,
    attempt: ApprovalAttempt | None,
    *,
    vm: str | None,
    now: datetime,
    flawed: bool,
) -> ApprovalPlan:
    """Return the plan for an event on the VM named ``vm``.

    ``attempt``: what was done about the event so far. ``flawed``: a part of it could not be read.
    """
    decision = judge(policy, tracked, vm, flawed=flawed)
    not_before = tracked.event.not_before
    if decision.action == "approve" and not_before is not None and now >= not_before:
        decision = _too_late(decision)
    step = decision.step
    if switches.dry_run:
        step = f"{step} dry run"
    action = _action(decision, step, switches, tracked, attempt)
    return ApprovalPlan(action, decision, step, switches.off, attempt)


def _too_late(decision: Decision) -> Decision:
    """Return an approval that comes after NotBefore. Only the first VM in turn reports it."""
    too_late = replace(decision, action="leave", why="NotBefore has passed", at=None)
    if decision.predecessors:
        return too_late
    return replace(too_late, skipped="too_late")


def _action(
    decision: Decision,
    step: str,
    switches: Switches,
    tracked: TrackedEvent,
    attempt: ApprovalAttempt | None,
) -> PlannedAction:
    if attempt is not None and attempt.state != "done":
        return "continue"
    if attempt is not None and attempt.is_carried_out(tracked, step):
        return "done"
    # the result of an attempt says more than that the event is no longer Scheduled
    if attempt is not None and tracked.event.event_status != SCHEDULED:
        return "done"
    if decision.action == "leave" and decision.skipped is None:
        return "leave"

    is_off = bool(switches.off) and not switches.dry_run  # nothing is sent or recorded
    if decision.skipped is not None and is_off:
        return "leave"
    if decision.skipped is not None:
        return "skip"
    if not switches.off:
        return "approve"
    # a dry run cannot know whether the VMs before this one would have approved
    if is_off or decision.predecessors:
        return "off"
    return "dry_run"
