"""A recommendation of Azure: an event that only advises, from its first sight to its end."""

import re
from typing import Any, Final

import pytest

from notbefore.commands.drill import exercise_changes
from notbefore.config.sinks import Messages
from notbefore.core.approval import ADVICE, Policy, Rule, RuleMatch, judge
from notbefore.core.delivery import deliveries
from notbefore.core.event_types import SPOT_REBALANCE, event_type_of
from notbefore.core.message import Message
from notbefore.core.record import Record
from notbefore.core.routing import Route, Routing, Terms
from notbefore.core.tracked import PendingEvent, PendingView
from notbefore.metrics import families
from notbefore.metrics.families import Metric
from notbefore.metrics.samples import MetricsSnapshot, samples
from notbefore.metrics.totals import Figures
from notbefore.simulator.state import SCENARIOS, Play
from notbefore.web.app import CheckResult
from notbefore.web.page.model import PageModel
from notbefore.web.page.render import render
from notbefore.wording.records import record_of
from notbefore.wording.texts import Text, text_of
from support.azure import ID, ME, PEER, STARTED, Story, at, item
from support.fleet_log import A, Log
from support.messages import VM, message

# with the values of an impact, which mean nothing in a recommendation
ADVICE_FIELDS: Final = {"EventType": SPOT_REBALANCE, "DurationInSeconds": 600}
WITHDRAWN: Final = "withdrawn: whether Azure evicts is announced as Preempt"
LATER: Final = {"NotBefore": "Sun, 01 Mar 2026 12:45:00 GMT"}


def advice(**fields: Any) -> dict[str, Any]:
    return item(**{**ADVICE_FIELDS, **fields})


def metric_name(metric: Metric) -> str:
    return metric.name


def text_of_advice(*looks: dict[str, Any], is_gone: bool = False, **settings: Any) -> Text:
    """Return the text about advice that was listed with these fields, one after the other."""
    listed: list[dict[str, Any] | None] = [ADVICE_FIELDS | look for look in looks]
    if is_gone:
        listed.append(None)
    return text_of(message(*listed), Messages(**settings))


# ---- from its first sight to its end


@pytest.mark.parametrize(
    "end",
    [{}, {"silence": 3600.0}, {"silence": 40.0, "rebooted": True, "gap": 40.0, "down": at(905)}],
    ids=["watched", "not watched", "after a boot"],
)
def test_advice_is_withdrawn_however_it_ends(end: dict[str, Any]) -> None:
    story = Story().sees(0).sees(1, advice()).sees(1000, **end)

    assert story.kinds == ["announced", "ended"]
    assert story.last.reason == "withdrawn"
    assert story.last.outcome == "unknown"
    assert story.last.interruption is None
    assert story.last.started_seconds is None


def test_advice_does_not_start_when_it_is_listed_as_started() -> None:
    story = Story().sees(0)

    story.sees(1, advice())
    story.sees(900, advice(**STARTED), gap=8.0)
    story.sees(1000)

    assert story.kinds == ["announced", "updated", "ended"]
    assert story.last.reason == "withdrawn"
    assert story.last.interruption is None
    assert not story.changes[1].without_notice


def test_advice_first_seen_started_is_announced() -> None:
    story = Story().sees(0).sees(1, advice(**STARTED))

    assert story.kinds == ["announced"]
    assert not story.last.without_notice
    assert not story.tracked.interrupting


def test_advice_is_unchanged_when_its_not_before_moves() -> None:
    story = Story().sees(0).sees(1, advice())

    story.sees(2, advice(**LATER))

    assert story.kinds == ["announced"]


def test_announcement_of_advice_has_no_time_of_impact() -> None:
    story = Story().sees(0).sees(1, advice())

    assert story.last.not_before is None
    assert story.last.ahead_seconds is None


def test_pending_advice_has_no_time_of_impact() -> None:
    story = Story().sees(0).sees(1, advice())

    listed = story.tracked.events[ID.casefold()]
    pending = PendingEvent.of(listed, at(2))

    assert pending.is_advice
    assert pending.seconds_to_not_before is None
    assert pending.expected_duration_seconds is None
    assert listed.notice is None
    assert story.tracked.imminent_from is None


def test_advice_is_listed_after_events_with_impact() -> None:
    story = Story().sees(0).sees(1, advice(**STARTED), item("E2"))

    ids = [listed.event.event_id for listed in story.tracked.by_urgency]
    assert ids == ["E2", ID]


# ---- metrics, deliveries and records


def sampled_metrics(story: Story) -> set[Metric]:
    snapshot = MetricsSnapshot(story.tracked, story.totals, Figures(), at(2))
    return {family.metric for family in samples(snapshot) if family.samples}


def test_pending_advice_has_a_status_in_metrics() -> None:
    story = Story().sees(0).sees(1, advice())

    assert families.STATUS in sampled_metrics(story)


@pytest.mark.parametrize(
    "metric",
    [
        families.NOT_BEFORE,
        families.NEXT,
        families.SECONDS_TO_NOT_BEFORE,
        families.CURRENT_NOTICE,
        families.EXPECTED,
        families.STARTED_AT,
        families.NOTICE,
    ],
    ids=metric_name,
)
def test_pending_advice_has_no_times_in_metrics(metric: Metric) -> None:
    story = Story().sees(0).sees(1, advice())

    assert metric not in sampled_metrics(story)


def test_withdrawn_advice_has_no_interruption_in_metrics() -> None:
    story = Story().sees(0).sees(1, advice()).sees(2)

    assert families.INTERRUPTION not in sampled_metrics(story)


def test_withdrawn_advice_is_counted_with_an_unknown_outcome() -> None:
    story = Story().sees(0).sees(1, advice()).sees(2)

    (labels,) = story.totals.ends
    assert dict(labels) == {"event_id": ID, "outcome": "unknown"}


def test_advice_is_information_without_a_reminder() -> None:
    story = Story().sees(0).sees(1, advice())
    record = record_of(story.last, VM)
    routing = Routing((Route(sinks=("chat",), remind_before=("5m",)),), {"chat": Terms()})  # type: ignore[arg-type]

    (delivery,) = deliveries(story.last, record.line(), routing, VM)

    assert delivery.severity == "info"
    assert delivery.kind == "announced"


def test_advice_has_no_promised_notice() -> None:
    assert event_type_of(SPOT_REBALANCE).promised_notice == 0


def test_record_of_advice_says_that_it_was_withdrawn() -> None:
    story = Story().sees(0).sees(1, advice()).sees(2)

    bodies = [record_of(change, VM).body for change in story.changes]
    record = Record.read(record_of(story.last, VM).line())

    assert bodies == [
        "SpotRebalanceRecommendation of this VM announced",
        f"SpotRebalanceRecommendation of this VM {WITHDRAWN}",
    ]
    assert record.outcome == "unknown"
    assert record.reason == "withdrawn"
    assert record.not_before is None


# ---- messages


def test_message_about_advice_has_effect_and_advice_without_countdown() -> None:
    announced = text_of_advice({})

    assert announced.title == (
        "SpotRebalanceRecommendation of WestNO_0: eviction is more likely now"
    )
    assert announced.summary.startswith("The VM is more likely to be evicted than before.")
    assert announced.advice.startswith("Start a replacement for the VM if you need one")
    names = {fact.name for fact in announced.facts}
    assert not names & {"Not before", "Expected interruption", "Started", "Changed"}


def test_changed_advice_is_marked_as_changed() -> None:
    changed = text_of_advice({}, {"Description": "another one"})

    assert changed.title.endswith("eviction is more likely now (changed)")


def test_message_about_several_vms_speaks_of_each() -> None:
    announced = text_of_advice({"Resources": [ME, PEER]})

    assert announced.summary.startswith("Each affected VM is more likely to be evicted")


def test_withdrawn_advice_says_that_azure_announces_an_eviction() -> None:
    withdrawn = text_of_advice({}, is_gone=True)

    assert withdrawn.title == "SpotRebalanceRecommendation of WestNO_0 was withdrawn"
    assert withdrawn.summary == (
        "The recommendation was withdrawn. Whether Azure evicts the VM is announced as Preempt."
    )
    assert withdrawn.advice == "Nothing. If Azure evicts the VM, it announces a Preempt."


def test_withdrawn_advice_is_good_news() -> None:
    withdrawn = message(ADVICE_FIELDS, None)

    assert withdrawn.is_good_news
    assert withdrawn.shown_severity == "info"


def test_configured_advice_replaces_the_built_in_one() -> None:
    announced = text_of_advice({}, advice={SPOT_REBALANCE: "Scale out."})

    assert announced.advice == "Scale out."


# ---- the page


def html_of(*items: Any) -> str:
    """Return the agent's page while these events are listed."""
    story = Story().sees(0).sees(1, *items)
    pending = [PendingEvent.of(tracked, at(2)) for tracked in story.tracked.by_urgency]
    listed = PendingView(
        incarnation=1,
        last_successful_poll=at(2),
        vm=VM,
        unreadable=0,
        events=tuple(pending),
    )
    return render(PageModel(at(2), CheckResult(ok=True), listed)).decode()


def page_of(*items: Any) -> str:
    """Return the text of that page on one line."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html_of(*items)))


def test_page_shows_no_countdown_of_advice() -> None:
    page = page_of(advice())

    assert "SpotRebalanceRecommendation of this VM is listed." in page
    assert "none: this is a recommendation" in page
    assert "NotBefore not given" not in page
    assert 'role="timer"' not in html_of(advice())


def test_page_shows_no_start_of_advice() -> None:
    page = page_of(advice(**STARTED))

    assert "is under way" not in page
    assert "since its start" not in page
    assert "started before this agent looked" not in page


def test_page_names_an_event_with_impact_before_advice() -> None:
    page = page_of(advice(), item("E2"))

    assert "Freeze of this VM is next" in page


# ---- a fleet


def test_fleet_says_that_advice_was_withdrawn() -> None:
    log = Log()
    log.add(A, "announced", event_type=SPOT_REBALANCE)

    kinds = log.add(A, "ended", event_type=SPOT_REBALANCE)

    change = log.last.change
    record = record_of(change, log.last.vm, fleet=log.last.facts)
    routing = Routing((Route(sinks=("chat",)),), {"chat": Terms()})
    (delivery,) = deliveries(change, record.line(), routing, log.last.vm)
    words = text_of(Message.of(delivery, at(2000)), Messages())
    assert kinds == ["announced", "ended"]
    assert words.title == "SpotRebalanceRecommendation of web_0 was withdrawn"
    assert words.summary.startswith("The recommendation was withdrawn.")


# ---- approval


def test_rules_never_approve_advice() -> None:
    story = Story().sees(0).sees(1, advice())
    (tracked,) = story.tracked.events.values()

    decision = judge(Policy(rules=(Rule("all"),)), tracked, ME)

    assert decision.action == "leave"
    assert decision.why == ADVICE
    assert decision.skipped is None


MATCHES_ADVICE: Final = RuleMatch(event_type=(SPOT_REBALANCE.lower(),))


def test_rule_that_approves_advice_is_refused() -> None:
    with pytest.raises(ValueError, match=f"no rule approves a {SPOT_REBALANCE}"):
        Rule(MATCHES_ADVICE)


def test_rule_that_leaves_advice_is_accepted() -> None:
    assert Rule(MATCHES_ADVICE, action="leave").matcher is MATCHES_ADVICE


# ---- exercises and simulations


def test_drill_of_advice_announces_and_withdraws_it() -> None:
    changes = exercise_changes(SPOT_REBALANCE, ME)

    assert [change.kind for change in changes] == ["announced", "ended"]
    assert [change.not_before for change in changes] == [None, None]
    assert changes[-1].reason == "withdrawn"


def test_simulated_advice_never_starts_and_ignores_approvals() -> None:
    played = Play(SCENARIOS["spot-rebalance"], ID, (ME,), 0.0, approved=1.0)

    statuses = [played.status(seconds) for seconds in (0.0, 10.0, 899.0, 900.0)]

    assert statuses == ["Scheduled", "Scheduled", "Scheduled", None]
