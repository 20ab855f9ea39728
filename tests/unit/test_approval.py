"""``judge``: nothing is approved that the first matching rule does not say."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.core.approval import (
    ApprovalAttempt,
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
from notbefore.core.routing import DurationRange, Route, Routing, Terms, route
from notbefore.core.tracked import Tracked, TrackedEvent, scope_of
from notbefore.metrics.samples import Snapshot, samples
from notbefore.metrics.totals import Figures, Totals
from support.azure import ID, ME, PEER, at, document, instant, item, now


def tracked(**fields: Any) -> TrackedEvent:
    """An event first seen at 0, with a NotBefore at 900."""
    tracked = diff(Tracked(), document(item(**fields)), now(0)).tracked
    return tracked.events[ID.casefold()]


def test_an_event_of_several_is_skipped_unless_the_rule_says_who_speaks() -> None:
    one = tracked(Resources=[PEER, ME])
    assert judge(Policy(rules=(Rule("all"),)), one, ME).skipped == "several_resources"
    each = judge(Policy(rules=(Rule("all", for_all_resources="each"),)), one, ME)
    assert (each.action, each.at) == ("approve", at(0))
    leader = Policy(rules=(Rule("all", for_all_resources="leader", approve_after=Duration("1m")),))
    assert judge(leader, one, PEER.upper()).at == at(60)
    for another in (ME, None):
        found = judge(leader, one, another)
        # another VM speaks, and this one is not asked
        assert (found.action, found.skipped) == (
            "leave",
            None,
        )
    peers = Policy(
        rules=(
            Rule(
                RuleMatch(scope=("peer",), event_source=("Platform",)), for_all_resources="leader"
            ),
        )
    )
    assert judge(peers, msgspec.structs.replace(one, scope="peer"), "a third").action == "leave"


def test_rules_leave_an_event_that_names_no_vm() -> None:
    unnamed = msgspec.structs.replace(tracked(Resources=[]), scope="self")
    policy = Policy(rules=(Rule("all", for_all_resources="each"),))

    decision = judge(policy, unnamed, ME)

    assert (decision.action, decision.rule) == ("leave", "")
    assert decision.why.startswith("it names no VM")


def test_what_has_started_is_left_alone_and_what_a_rule_does_not_match_is_the_next_ones() -> None:
    over = judge(Policy(rules=(Rule("all"),)), tracked(EventStatus="Started", NotBefore=""), ME)
    assert (over.action, over.why) == (
        "leave",
        "it is Started: only a Scheduled event can be approved",
    )
    rules = (Rule(RuleMatch(event_type=("Reboot",))), Rule("all"))
    found = judge(Policy(rules=rules), tracked(), ME)
    assert (found.action, found.rule) == ("approve", "rules[1]")


def test_after_not_before_nothing_is_approved_and_the_clock_of_the_vm_does_not_decide() -> None:
    fast = msgspec.structs.replace(
        tracked(), seen=msgspec.structs.replace(instant(), wall=at(7_200))
    )
    rules = [
        Rule("all", approve_after=Duration(wait)) for wait in ("15m", "999999999d999999999d", "1m")
    ]
    assert [judge(Policy(rules=(one,)), fast, ME).skipped for one in rules] == [
        "too_late",
        "too_late",
        None,
    ]


names = st.sampled_from([ME, ME.lower(), PEER, "other"])
matches = st.builds(
    RuleMatch,
    event_type=st.lists(st.sampled_from(["Freeze", "reboot", "Preempt"]), max_size=2).map(tuple),
    event_source=st.lists(st.sampled_from(["Platform", "User"]), max_size=1).map(tuple),
    scope=st.sampled_from([("self",), ("peer",), ("self", "peer")]),
    duration=st.none()
    | st.builds(DurationRange, st.none() | st.integers(0, 4), st.integers(4, 9))
    | st.builds(DurationRange, st.integers(0, 4), st.none() | st.integers(4, 9)),
)


rules = st.builds(Rule, match=matches, action=st.just("leave")) | st.builds(
    Rule,
    match=matches.filter(
        lambda match: bool(match.event_type or match.event_source or match.duration)
    )
    | st.just("all"),
    action=st.just("approve"),
)
speaking = rules.map(
    lambda rule: (
        msgspec.structs.replace(rule, for_all_resources="each")
        if rule.action == "approve"
        else rule
    )
)
events = st.fixed_dictionaries(
    {
        "EventType": st.sampled_from(["Freeze", "Reboot", "Preempt", "New"]),
        "EventStatus": st.sampled_from(["Scheduled", "Started", "Other"]),
        "EventSource": st.sampled_from(["Platform", "User", None]),
        "DurationInSeconds": st.sampled_from([-1, 0, 5, 8, 9]),
        "Resources": st.lists(names, max_size=3),
    }
)


def agrees(rule: Rule, one: dict[str, Any], vm: str | None) -> bool:
    """The rule's matchers, spelled out a second time."""
    mine = vm is not None and vm.casefold() in [name.casefold() for name in one["Resources"]]
    scope = "unknown" if vm is None or not one["Resources"] else "self" if mine else "peer"
    match = rule.matcher
    span, length = match.duration, one["DurationInSeconds"]
    known = length >= 0
    long_enough = span is None or (
        known
        and (span.min is None or length >= span.min)
        and (span.max is None or length <= span.max)
    )
    types = [name.casefold() for name in match.event_type]
    return (
        scope in match.scope
        and (not types or one["EventType"].casefold() in types)
        and (not match.event_source or one["EventSource"] in match.event_source)
        and long_enough
    )


@given(st.lists(rules | speaking, max_size=4), events, st.sampled_from([ME, PEER, None]))
def test_nothing_is_approved_that_the_first_matching_rule_does_not_say(
    found: list[Rule], one: dict[str, Any], vm: str | None
) -> None:
    seen = tracked(**one)
    decision = judge(
        Policy(rules=tuple(found)),
        msgspec.structs.replace(seen, scope=scope_of(seen.event, vm)),
        vm,
    )
    first = next((number for number, rule in enumerate(found) if agrees(rule, one, vm)), None)
    alone = len({name.casefold() for name in one["Resources"]}) == 1
    allowed = (
        first is not None
        and one["EventStatus"] == "Scheduled"
        and found[first].action == "approve"
        and (alone or found[first].for_all_resources == "each")
    )
    assert (decision.action == "approve") == allowed
    if allowed:
        assert decision.rule == f"rules[{first}]"


def test_an_attempt_settles_its_step_alone() -> None:
    one, moved = tracked(), tracked(DurationInSeconds=6)
    done = ApprovalAttempt(one, "a", "step").ended("approval_skipped (dry_run)")
    assert (done.state, done.records) == ("done", 1)
    assert [done.is_carried_out(one, step) for step in ("step", "another")] == [True, False]
    again = next_attempt(done, moved, "b", "another")
    assert (again.state, again.records, again.rule, again.is_carried_out(one, "step")) == (
        "sending",
        1,
        "b",
        True,
    )
    approved = msgspec.structs.replace(done, approved=content_of(one))
    assert approved.is_carried_out(one, "another")
    assert not approved.is_carried_out(moved, "another")
    back = msgspec.structs.replace(one, seen=instant(500))  # it was gone meanwhile
    anew = next_attempt(approved, back, "a", "another")
    assert (
        anew.records,
        anew.is_carried_out(back, "step"),
        anew.is_carried_out(back, "other"),
    ) == (1, True, True)
    assert ApprovalAttempt(one, OPERATOR).ended("approved").carried_out == ()


def test_a_step_is_the_event_as_it_is_under_the_rule_as_it_is() -> None:
    def step(rule: Rule, one: TrackedEvent) -> str:
        return judge(Policy(rules=(rule,)), one, ME).step

    known = {
        step(Rule("all"), tracked()),
        step(Rule("all", approve_after=Duration("1s")), tracked()),
        step(Rule("all", name="a"), tracked()),
        step(Rule("all"), tracked(DurationInSeconds=6)),
    }
    assert len(known) == 4
    # the list flapped
    assert step(Rule("all"), msgspec.structs.replace(tracked(), seen=instant(1))) in known
    assert step(Rule("all"), tracked(Resources=[ME.upper()])) in known


@pytest.mark.parametrize(
    ("fields", "flawed"), [({}, True), ({"NotBefore": ""}, False), ({"NotBefore": None}, False)]
)
def test_what_could_not_be_read_or_has_no_not_before_is_never_approved(
    fields: dict[str, Any], *, flawed: bool
) -> None:
    decision = judge(Policy(rules=(Rule("all"),)), tracked(**fields), ME, flawed=flawed)
    assert (decision.action, decision.rule) == ("leave", "")
    assert unreadable(tracked(**fields), flawed=flawed) == decision.why


def changed(
    kind: ApprovalKind, reason: Reason, *, rule: str = "a", vm: str = ME, records: int = 0
) -> Any:
    return ApprovalAttempt(tracked(), rule, records=records).change(
        (kind, reason), "why", instant(5), vm, 7
    )


def test_the_record_of_an_approval_is_the_vms_own() -> None:
    one = changed("approved", "accepted")
    assert one.id != changed("approved", "accepted", vm=PEER).id
    assert one.id != changed("approved", "accepted", records=1).id
    assert one.id == changed("approved", "accepted").id
    assert (one.time, one.incarnation) == (at(5), 7)
    assert (one.approval.approval_rule, one.approval.approval_detail) == ("a", "why")
    peers = msgspec.structs.replace(one, scope="peer")
    sinks = {"chat": Terms()}
    assert not route(peers, Routing((), sinks), Vm(name=ME))
    # only this VM knows of it, whoever is affected
    to_chat = Routing((Route(sinks=("chat",)),), sinks)
    assert list(route(peers, to_chat, Vm(name="not in it"))) == ["chat"]


def test_approvals_are_counted_by_rule_and_result_and_as_nothing_else() -> None:
    totals = Totals()
    for kind, reason in (
        ("approved", "accepted"),
        ("approval_failed", "refused"),
        ("approval_skipped", "changed"),
        ("approval_skipped", "dry_run"),
    ):
        totals = totals.plus(changed(kind, reason))  # type: ignore[arg-type]  # they are literals
    assert totals.changes == {}
    view = Snapshot(Tracked(), totals, Figures(), at(0))
    (family,) = [
        one for one in samples(view) if one.metric.name == "azure_scheduled_event_approvals"
    ]
    assert {
        labels[1]: value for labels, value in family.samples.items() if labels[0] == "a"
    } == dict.fromkeys(("approved", "failed", "skipped", "dry_run"), 1.0)
    assert family.created.keys() == family.samples.keys()
