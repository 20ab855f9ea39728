"""``judge`` follows the first matching rule, and an attempt carries out one step."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from notbefore.core.approval import (
    ApprovalAttempt,
    Decision,
    Policy,
    Rule,
    RuleMatch,
    content_of,
    judge,
    next_attempt,
    unreadable,
)
from notbefore.core.change import OPERATOR, ApprovalKind, Reason
from notbefore.core.duration import Duration
from notbefore.core.lifecycle import diff
from notbefore.core.record import Vm
from notbefore.core.routing import DurationRange, Route, Routing, Terms, route_by_sink
from notbefore.core.tracked import Tracked, TrackedEvent, scope_of
from notbefore.metrics.samples import MetricsSnapshot, samples
from notbefore.metrics.totals import Figures, Totals
from support.azure import ID, ME, PEER, at, document, instant, item, observation


def tracked(**fields: Any) -> TrackedEvent:
    """Return an event first seen at 0, with a NotBefore at 900."""
    step = diff(Tracked(), document(item(**fields)), observation(0))
    return step.tracked.events[ID.casefold()]


# ---- rules that cannot be meant


@pytest.mark.parametrize(
    ("match", "problem"),
    [
        ({"event_type": ("Rebot",)}, "event_type: Azure has no 'Rebot': did you mean 'Reboot'?"),
        ({"event_source": ("Me",)}, "event_source: Azure has no 'Me': expected one of Platform"),
    ],
)
def test_rule_refuses_words_that_azure_does_not_use(match: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        RuleMatch(**match)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"action": "leave", "approve_after": Duration("1m")}, "leave accepts neither"),
        ({"action": "leave", "for_all_resources": "each"}, "leave accepts neither"),
        ({}, "match: expected event_type, event_source or duration"),
        ({"match": "all", "name": OPERATOR}, "is reserved for approvals by hand"),
    ],
)
def test_rule_refuses_settings_that_contradict_it(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Rule(**settings)


def test_policy_refuses_two_rules_of_one_name() -> None:
    with pytest.raises(ValueError, match="two rules have the same name"):
        Policy(rules=(Rule("all", name="drained"), Rule("all", name="drained")))


def judged(event: TrackedEvent, *rules: Rule, vm: str | None = ME) -> Decision:
    return judge(Policy(rules=rules), event, vm)


# ---- the first rule that matches


def test_next_rule_decides_when_first_does_not_match() -> None:
    decision = judged(tracked(), Rule(RuleMatch(event_type=("Reboot",))), Rule("all"))

    assert decision.action == "approve"
    assert decision.rule == "rules[1]"


# ---- events of several VMs

OF_TWO_VMS = {"Resources": [PEER, ME]}
LEADER = Rule("all", for_all_resources="leader", approve_after=Duration("1m"))


def test_rule_skips_event_of_several_vms() -> None:
    decision = judged(tracked(**OF_TWO_VMS), Rule("all"))

    assert decision.skipped == "several_resources"


def test_each_vm_approves_when_rule_says_each() -> None:
    decision = judged(tracked(**OF_TWO_VMS), Rule("all", for_all_resources="each"))

    assert decision.action == "approve"
    assert decision.at == at(0)


def test_first_vm_approves_when_rule_says_leader() -> None:
    decision = judged(tracked(**OF_TWO_VMS), LEADER, vm=PEER.upper())

    assert decision.at == at(60)


def test_vm_without_a_name_leaves_event_when_rule_says_leader() -> None:
    decision = judged(tracked(**OF_TWO_VMS), LEADER, vm=None)

    assert decision.action == "leave"
    assert decision.skipped is None


@pytest.mark.parametrize(("vm", "seconds"), [("web_0", 60), ("WEB_1", 90), ("web_2", 120)])
def test_each_successor_approves_30_seconds_later(vm: str, seconds: float) -> None:
    # a VM that is named twice has one turn
    event = replace(tracked(Resources=["web_0", "Web_0", "web_1", "web_2"]), scope="self")

    decision = judged(event, LEADER, vm=vm)

    assert decision.action == "approve"
    assert decision.at == at(seconds)


def test_step_changes_with_the_turn_of_a_vm() -> None:
    first = judged(tracked(Resources=[ME, PEER]), LEADER)
    second = judged(tracked(Resources=[PEER, ME]), LEADER)

    assert first.predecessors == 0
    assert second.predecessors == 1
    assert second.step != first.step


@pytest.mark.parametrize(
    ("position", "action", "skipped"),
    [
        (0, "approve", None),
        (27, "approve", None),  # at 870 s
        (28, "leave", None),  # at 900 s, which is NotBefore
    ],
)
def test_successor_leaves_event_when_not_before_comes_before_its_turn(
    position: int,
    action: str,
    skipped: str | None,
) -> None:
    vms = [f"web_{number}" for number in range(40)]
    event = replace(tracked(Resources=vms), scope="self")

    decision = judged(event, LEADER, vm=vms[position])

    assert decision.action == action
    assert decision.skipped == skipped


def test_only_the_leader_reports_a_rule_that_waits_beyond_not_before() -> None:
    event = tracked(**OF_TWO_VMS)
    rule = Rule("all", for_all_resources="leader", approve_after=Duration("15m"))

    assert judged(event, rule, vm=PEER).skipped == "too_late"
    assert judged(event, rule, vm=ME).skipped is None


def test_unaffected_vm_leaves_event_when_rule_says_leader() -> None:
    of_peer = replace(tracked(**OF_TWO_VMS), scope="peer")
    match = RuleMatch(scope=("peer",), event_source=("Platform",))

    decision = judged(of_peer, Rule(match, for_all_resources="leader"), vm="a third")

    assert decision.action == "leave"


def test_rules_leave_an_event_that_names_no_vm() -> None:
    unnamed = replace(tracked(Resources=[]), scope="self")

    decision = judged(unnamed, Rule("all", for_all_resources="each"))

    assert decision.action == "leave"
    assert decision.rule == ""
    assert decision.why.startswith("it names no VM")


# ---- status, time and readability


def test_rules_leave_an_event_that_has_started() -> None:
    decision = judged(tracked(EventStatus="Started", NotBefore=""), Rule("all"))

    assert decision.action == "leave"
    assert decision.why == "it is Started: only a Scheduled event can be approved"


@pytest.mark.parametrize(
    ("approve_after", "skipped"),
    [
        ("1m", None),
        ("15m", "too_late"),
        ("999999999d999999999d", "too_late"),
    ],
)
def test_event_is_skipped_when_rule_waits_beyond_not_before(
    approve_after: str,
    skipped: str | None,
) -> None:
    # the wall clock of the VM is two hours fast, and does not decide
    event = replace(tracked(), seen=replace(instant(), wall=at(7_200)))

    decision = judged(event, Rule("all", approve_after=Duration(approve_after)))

    assert decision.skipped == skipped


@pytest.mark.parametrize(
    ("fields", "flawed"),
    [
        pytest.param({}, True, id="flawed"),
        pytest.param({"NotBefore": ""}, False, id="empty NotBefore"),
        pytest.param({"NotBefore": None}, False, id="no NotBefore"),
    ],
)
def test_flawed_or_undated_event_is_never_approved(
    fields: dict[str, Any],
    *,
    flawed: bool,
) -> None:
    decision = judge(Policy(rules=(Rule("all"),)), tracked(**fields), ME, flawed=flawed)

    assert decision.action == "leave"
    assert decision.rule == ""
    assert decision.why == unreadable(tracked(**fields), flawed=flawed)


# ---- random rules and events

NAMES = st.sampled_from([ME, ME.lower(), PEER, "other"])
MATCHES = st.builds(
    RuleMatch,
    event_type=st.lists(st.sampled_from(["Freeze", "reboot", "Preempt"]), max_size=2).map(tuple),
    event_source=st.lists(st.sampled_from(["Platform", "User"]), max_size=1).map(tuple),
    scope=st.sampled_from([("self",), ("peer",), ("self", "peer")]),
    duration=st.none()
    | st.builds(DurationRange, st.none() | st.integers(0, 4), st.integers(4, 9))
    | st.builds(DurationRange, st.integers(0, 4), st.none() | st.integers(4, 9)),
)


def selects(match: RuleMatch) -> bool:
    """Return whether an approving rule may have this match."""
    return bool(match.event_type or match.event_source or match.duration)


LEAVING_RULES = st.builds(Rule, match=MATCHES, action=st.just("leave"))
APPROVING_RULES = st.builds(
    Rule,
    match=MATCHES.filter(selects) | st.just("all"),
    action=st.just("approve"),
    for_all_resources=st.sampled_from([None, "each"]),
)
EVENTS = st.fixed_dictionaries(
    {
        "EventType": st.sampled_from(["Freeze", "Reboot", "Preempt", "New"]),
        "EventStatus": st.sampled_from(["Scheduled", "Started", "Other"]),
        "EventSource": st.sampled_from(["Platform", "User", None]),
        "DurationInSeconds": st.sampled_from([-1, 0, 5, 8, 9]),
        "Resources": st.lists(NAMES, max_size=3),
    }
)


def scope_by_name(resources: list[str], vm: str | None) -> str:
    """Return the scope of an event, spelled out a second time."""
    if vm is None or not resources:
        return "unknown"
    if vm.casefold() in [name.casefold() for name in resources]:
        return "self"
    return "peer"


def duration_matches(span: DurationRange | None, seconds: int) -> bool:
    if span is None:
        return True
    if seconds < 0:  # unknown
        return False
    if span.min is not None and seconds < span.min:
        return False
    return span.max is None or seconds <= span.max


def rule_matches(rule: Rule, fields: dict[str, Any], vm: str | None) -> bool:
    """Return whether a rule matches an event, spelled out a second time."""
    match = rule.matcher
    event_types = [name.casefold() for name in match.event_type]
    if scope_by_name(fields["Resources"], vm) not in match.scope:
        return False
    if event_types and fields["EventType"].casefold() not in event_types:
        return False
    if match.event_source and fields["EventSource"] not in match.event_source:
        return False
    return duration_matches(match.duration, fields["DurationInSeconds"])


@given(
    st.lists(LEAVING_RULES | APPROVING_RULES, max_size=4),
    EVENTS,
    st.sampled_from([ME, PEER, None]),
)
def test_event_is_approved_only_by_its_first_matching_rule(
    rules: list[Rule],
    fields: dict[str, Any],
    vm: str | None,
) -> None:
    event = tracked(**fields)
    event = replace(event, scope=scope_of(event.event, vm))

    decision = judged(event, *rules, vm=vm)

    matching = [number for number, rule in enumerate(rules) if rule_matches(rule, fields, vm)]
    affected_vms = {name.casefold() for name in fields["Resources"]}
    is_allowed = False
    if matching and fields["EventStatus"] == "Scheduled":
        rule = rules[matching[0]]
        may_approve = len(affected_vms) == 1 or rule.for_all_resources == "each"
        is_allowed = rule.action == "approve" and may_approve
    assert (decision.action == "approve") == is_allowed
    if is_allowed:
        assert decision.rule == f"rules[{matching[0]}]"


# ---- steps and attempts


def step_of(rule: Rule, event: TrackedEvent) -> str:
    return judged(event, rule).step


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        pytest.param(Rule("all", approve_after=Duration("1s")), {}, id="another delay"),
        pytest.param(Rule("all", name="a"), {}, id="another name"),
        pytest.param(Rule("all"), {"DurationInSeconds": 6}, id="another event"),
    ],
)
def test_step_changes_with_event_or_rule(rule: Rule, fields: dict[str, Any]) -> None:
    step = step_of(Rule("all"), tracked())

    assert step_of(rule, tracked(**fields)) != step


def test_step_is_the_same_when_event_was_gone_meanwhile() -> None:
    step = step_of(Rule("all"), tracked())

    assert step_of(Rule("all"), replace(tracked(), seen=instant(1))) == step


def test_step_is_the_same_when_case_of_resources_changes() -> None:
    step = step_of(Rule("all"), tracked())

    assert step_of(Rule("all"), tracked(Resources=[ME.upper()])) == step


def test_attempt_carries_out_its_own_step_alone() -> None:
    event = tracked()

    skipped = ApprovalAttempt(event, "a", "step").ended("approval_skipped (dry_run)")

    assert skipped.state == "done"
    assert skipped.records == 1
    assert skipped.is_carried_out(event, "step")
    assert not skipped.is_carried_out(event, "another")


def test_next_attempt_remembers_steps_that_were_carried_out() -> None:
    event = tracked()
    moved = tracked(DurationInSeconds=6)
    skipped = ApprovalAttempt(event, "a", "step").ended("approval_skipped (dry_run)")

    attempt = next_attempt(skipped, moved, "b", "another")

    assert attempt.state == "sending"
    assert attempt.records == 1
    assert attempt.rule == "b"
    assert attempt.is_carried_out(event, "step")


def approved_attempt(event: TrackedEvent) -> ApprovalAttempt:
    attempt = ApprovalAttempt(event, "a", "step").ended("approval_skipped (dry_run)")
    return replace(attempt, approved=content_of(event))


def test_approval_carries_out_each_step_of_the_same_content() -> None:
    event = tracked()

    attempt = approved_attempt(event)

    assert attempt.is_carried_out(event, "another")
    assert not attempt.is_carried_out(tracked(DurationInSeconds=6), "another")


def test_approval_is_remembered_when_event_was_gone_meanwhile() -> None:
    event = tracked()
    returned = replace(event, seen=instant(500))

    attempt = next_attempt(approved_attempt(event), returned, "a", "another")

    assert attempt.records == 1
    assert attempt.is_carried_out(returned, "step")
    assert attempt.is_carried_out(returned, "other")


def test_approval_by_operator_carries_out_no_step() -> None:
    attempt = ApprovalAttempt(tracked(), OPERATOR).ended("approved")

    assert attempt.carried_out == ()


# ---- records and counters of approvals


def approval_change(
    kind: ApprovalKind,
    reason: Reason,
    *,
    vm: str = ME,
    records: int = 0,
) -> Any:
    attempt = ApprovalAttempt(tracked(), "a", records=records)
    return attempt.change(kind, reason, "why", at=instant(5), vm=vm, incarnation=7)


def test_approval_record_has_time_rule_and_detail() -> None:
    change = approval_change("approved", "accepted")

    assert change.time == at(5)
    assert change.incarnation == 7
    assert change.approval.approval_rule == "a"
    assert change.approval.approval_detail == "why"


def test_approval_record_id_is_the_same_when_repeated() -> None:
    change = approval_change("approved", "accepted")

    assert approval_change("approved", "accepted").id == change.id


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"vm": PEER}, id="of another VM"),
        pytest.param({"records": 1}, id="second record"),
    ],
)
def test_approval_record_id_differs_by_vm_and_number(fields: dict[str, Any]) -> None:
    change = approval_change("approved", "accepted")

    assert approval_change("approved", "accepted", **fields).id != change.id


def test_approval_of_a_peer_event_is_not_sent_without_routes() -> None:
    change = replace(approval_change("approved", "accepted"), scope="peer")

    assert not route_by_sink(change, Routing((), {"chat": Terms()}), Vm(name=ME))


def test_approval_is_routed_although_vm_is_unaffected() -> None:
    change = replace(approval_change("approved", "accepted"), scope="peer")
    routing = Routing((Route(sinks=("chat",)),), {"chat": Terms()})

    routed = route_by_sink(change, routing, Vm(name="not in it"))

    assert list(routed) == ["chat"]  # only this VM knows of the approval


APPROVAL_REASONS: list[tuple[ApprovalKind, Reason]] = [
    ("approved", "accepted"),
    ("approval_failed", "refused"),
    ("approval_skipped", "changed"),
    ("approval_skipped", "dry_run"),
]


def totals_of_approvals() -> Totals:
    totals = Totals()
    for kind, reason in APPROVAL_REASONS:
        totals = totals.plus(approval_change(kind, reason))
    return totals


def test_approvals_are_counted_by_rule_and_result() -> None:
    snapshot = MetricsSnapshot(Tracked(), totals_of_approvals(), Figures(), at(0))

    (family,) = [
        family
        for family in samples(snapshot)
        if family.metric.name == "azure_scheduled_event_approvals"
    ]

    by_result = {result: value for (rule, result), value in family.samples.items() if rule == "a"}
    assert by_result == {"approved": 1.0, "failed": 1.0, "skipped": 1.0, "dry_run": 1.0}
    assert family.created.keys() == family.samples.keys()


def test_approvals_are_not_counted_as_changes() -> None:
    assert totals_of_approvals().changes == {}
