"""The decision of the approval rules on a listed event, in words. Pure."""

from datetime import datetime

from notbefore.core.approval_plan import ApprovalPlan
from notbefore.core.tracked import PendingApproval
from notbefore.wording.page import time_of_day


def pending_approval(plan: ApprovalPlan, now: datetime) -> PendingApproval:
    """Return a plan as ``/api/v1/events`` shows it."""
    decision = plan.decision
    return PendingApproval(plan.action, decision.rule, decision.at, plan_words(plan, now))


def plan_words(plan: ApprovalPlan, now: datetime) -> str:
    """Return what is to be done about an event, and why, in a sentence without a full stop."""
    decision = plan.decision
    if plan.attempt is not None and plan.action == "continue":
        return f"an approval is under way: rule {plan.attempt.rule}"
    if plan.attempt is not None and plan.action == "done":
        return f"{plan.attempt.outcome}: rule {plan.attempt.rule}"
    if decision.action == "leave" and not decision.rule:
        return f"left alone: {decision.why}"
    if decision.action == "leave":
        return f"left alone: rule {decision.rule}: {decision.why}"

    approval = f"approve it {_moment(plan, now)}: rule {decision.rule}"
    if decision.predecessors:
        approval = f"{approval}; {decision.why}"
    if plan.action == "approve":
        return f"will {approval}"
    return f"would {approval}; nothing is sent: {plan.off}"


def _moment(plan: ApprovalPlan, now: datetime) -> str:
    if plan.decision.at is None or plan.seconds_left(now) == 0:
        return "now"
    return f"at {time_of_day(plan.decision.at, now)} UTC"
