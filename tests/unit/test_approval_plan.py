"""``plan`` says what is to be done about the approval of an event, and ``plan_words`` why."""

from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.core.approval import ApprovalAttempt, Policy, Rule, RuleMatch, content_of
from notbefore.core.approval_plan import ApprovalPlan, Switches, plan
from notbefore.core.duration import Duration
from notbefore.core.lifecycle import diff
from notbefore.core.tracked import Tracked, TrackedEvent
from notbefore.wording.approval import pending_approval, plan_words
from support.azure import ID, ME, PEER, at, document, item, observation

ON = Switches()
OFF = Switches(off="approval.enabled is not true")
DRY_RUN = Switches(off="approval.dry_run is true", dry_run=True)
USERS = Rule("all", name="users", approve_after=Duration("3m"))
LEADER = Rule("all", name="users", for_all_resources="leader")


def tracked(**fields: Any) -> TrackedEvent:
    """Return an event first seen at 0, which is 12:00, with a NotBefore at 900."""
    step = diff(Tracked(), document(item(**fields)), observation(0))
    return step.tracked.events[ID.casefold()]


def planned(
    *rules: Rule,
    switches: Switches = ON,
    event: TrackedEvent | None = None,
    attempt: ApprovalAttempt | None = None,
    flawed: bool = False,
    seconds: float = 10,
    vm: str = ME,
) -> ApprovalPlan:
    return plan(
        Policy(rules=rules),
        switches,
        event or tracked(),
        attempt,
        vm=vm,
        now=at(seconds),
        flawed=flawed,
    )


OF_TWO_VMS = tracked(Resources=[PEER, ME])
IN_TURN = "this VM is number 2 of 2, if none before it approves it"
NOT_SENT = "nothing is sent: approval.dry_run is true"


@pytest.mark.parametrize(
    ("approval_plan", "action", "words"),
    [
        (planned(USERS), "approve", "will approve it at 12:03:00 UTC: rule users"),
        (planned(Rule("all")), "approve", "will approve it now: rule rules[0]"),
        (
            planned(USERS, switches=OFF),
            "off",
            f"would approve it at 12:03:00 UTC: rule users; nothing is sent: {OFF.off}",
        ),
        (
            planned(USERS, switches=DRY_RUN),
            "dry_run",
            f"would approve it at 12:03:00 UTC: rule users; {NOT_SENT}",
        ),
        (planned(), "leave", "left alone: no rule matches"),
        (planned(switches=OFF), "leave", "left alone: no rule matches"),
        (
            planned(Rule("all", action="leave", name="db"), USERS),
            "leave",
            "left alone: rule db: its action is leave",
        ),
        (planned(USERS, flawed=True), "leave", "left alone: a part of it could not be read"),
        (
            planned(USERS, event=tracked(EventStatus="Started", NotBefore="")),
            "leave",
            "left alone: it is Started: only a Scheduled event can be approved",
        ),
        (
            planned(LEADER, event=OF_TWO_VMS),
            "approve",
            f"will approve it at 12:00:30 UTC: rule users; {IN_TURN}",
        ),
        (
            planned(LEADER, event=OF_TWO_VMS, switches=DRY_RUN),
            "off",
            f"would approve it at 12:00:30 UTC: rule users; {IN_TURN}; {NOT_SENT}",
        ),
    ],
)
def test_plan_says_what_the_rules_do_and_why(
    approval_plan: ApprovalPlan, action: str, words: str
) -> None:
    assert approval_plan.action == action
    assert plan_words(approval_plan, at(10)) == words


@pytest.mark.parametrize(("switches", "action"), [(ON, "skip"), (DRY_RUN, "skip"), (OFF, "leave")])
def test_rule_that_cannot_approve_is_reported_while_approval_is_on(
    switches: Switches, action: str
) -> None:
    skipped = planned(USERS, event=OF_TWO_VMS, switches=switches)

    assert skipped.action == action
    assert plan_words(skipped, at(0)) == (
        "left alone: rule users: it affects 2 VMs, and the rule has no for_all_resources"
    )


def test_begun_approval_continues_whatever_the_rules_say() -> None:
    attempt = ApprovalAttempt(tracked(), "operator", by="eve")

    continued = planned(switches=OFF, attempt=attempt)

    assert continued.action == "continue"
    assert plan_words(continued, at(0)) == "an approval is under way: rule operator"


@pytest.mark.parametrize(
    ("switches", "outcome", "approved"),
    [
        (ON, "approved (accepted)", content_of(tracked())),
        (DRY_RUN, "approval_skipped (dry_run): it would be approved now", ""),
    ],
)
def test_decision_that_was_carried_out_is_done(
    switches: Switches, outcome: str, approved: str
) -> None:
    step = planned(USERS, switches=switches).step
    attempt = replace(ApprovalAttempt(tracked(), "users", step).ended(outcome), approved=approved)

    done = planned(USERS, switches=switches, attempt=attempt)

    assert done.action == "done"
    assert not done.is_due_action
    assert plan_words(done, at(0)) == f"{outcome}: rule users"


@pytest.mark.parametrize(
    ("switches", "vm", "action"),
    [(ON, PEER, "skip"), (OFF, PEER, "leave"), (ON, ME, "leave")],
)
def test_event_is_left_alone_once_not_before_has_passed(
    switches: Switches, vm: str, action: str
) -> None:
    late = planned(LEADER, event=OF_TWO_VMS, switches=switches, vm=vm, seconds=900)

    assert late.action == action
    assert plan_words(late, at(900)) == "left alone: rule users: NotBefore has passed"


def test_started_event_shows_its_approval() -> None:
    attempt = ApprovalAttempt(tracked(), "users", "step").ended("approved (accepted)")
    started = tracked(EventStatus="Started", NotBefore="")

    done = planned(USERS, event=started, attempt=attempt)

    assert done.action == "done"
    assert plan_words(done, at(0)) == "approved (accepted): rule users"


def test_dry_run_does_not_prevent_the_approval_after_it() -> None:
    step = planned(USERS, switches=DRY_RUN).step
    attempt = ApprovalAttempt(tracked(), "users", step).ended("approval_skipped (dry_run)")

    assert planned(USERS, attempt=attempt).action == "approve"


@pytest.mark.parametrize(("seconds", "left"), [(60, 120.0), (180, 0.0), (240, 0.0)])
def test_approval_is_due_from_its_time_on(seconds: float, left: float) -> None:
    assert planned(USERS).seconds_left(at(seconds)) == left


def test_plan_without_a_time_is_due_at_once() -> None:
    assert planned().seconds_left(at(0)) == 0.0


def test_pending_approval_has_rule_time_and_words() -> None:
    approval = pending_approval(planned(Rule(RuleMatch(event_type=("Freeze",)))), at(0))

    assert approval.action == "approve"
    assert approval.rule == "rules[0]"
    assert approval.at == at(0)
    assert approval.words == "will approve it now: rule rules[0]"
