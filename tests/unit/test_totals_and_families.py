"""What is counted, and how it comes out as samples: bounded, complete, computed for the moment."""

from typing import Any

import msgspec
import pytest

from notbefore.core.lifecycle import diff
from notbefore.core.tracked import Tracked
from notbefore.metrics import fleet
from notbefore.metrics.families import Family
from notbefore.metrics.samples import Snapshot, samples
from notbefore.metrics.totals import (
    MAX_ENDS,
    MAX_SERIES,
    Figures,
    Histogram,
    Labels,
    OutboxView,
    Totals,
    named,
)
from notbefore.web.exposition import render
from support.azure import ID, ME, PEER, STARTED, Story, at, document, item, now

ENDED = "azure_scheduled_event_ended_timestamp_seconds"


class Agent(Story):
    """Tracked and counted, without I/O."""

    figures = Figures()

    def families(self, seconds: float) -> dict[str, Family]:
        view = Snapshot(self.tracked, self.totals, self.figures, at(seconds))
        return {family.metric.name: family for family in samples(view)}

    def value(self, name: str, seconds: float, *labels: str) -> Any:
        family = self.families(seconds).get(name)
        return None if family is None else family.samples.get(labels)


@pytest.fixture
def agent() -> Agent:
    return Agent().sees(0)


def test_what_has_not_occurred_has_no_series(agent: Agent) -> None:
    found = agent.families(1)
    assert "azure_scheduled_events_pending" not in found
    assert not [name for name in found if name.startswith("azure_scheduled_event_")]
    assert found["notbefore_polls"].samples == {("changed",): 0.0, ("unchanged",): 0.0}
    series = sum(
        len(s.counts) + 2 if isinstance(s, Histogram) else 1
        for f in found.values()
        for s in f.samples.values()
    )
    assert series <= 30


def test_the_seconds_to_not_before_are_those_of_the_moment(agent: Agent) -> None:
    agent.sees(1, item())
    name = "azure_scheduled_event_seconds_to_not_before"
    assert [agent.value(name, seconds, ID) for seconds in (1, 300.5, 900, 960)] == [
        899,
        599.5,
        0,
        -60,
    ]


def test_the_countdown_is_absent_once_the_event_is_started(agent: Agent) -> None:
    agent.sees(1, item()).sees(900, item(**STARTED))
    assert agent.value("azure_scheduled_event_seconds_to_not_before", 901, ID) is None
    assert (
        agent.value("azure_scheduled_event_not_before_timestamp_seconds", 901, ID)
        == at(900).timestamp()
    )
    assert (
        agent.value("azure_scheduled_event_started_timestamp_seconds", 901, ID)
        == at(900).timestamp()
    )


def test_the_next_not_before_is_the_earliest_of_its_scope_and_an_unknown_duration_has_no_sample(
    agent: Agent,
) -> None:
    agent.sees(
        1,
        item("late", DurationInSeconds=-1),
        item("soon", NotBefore="Sun, 01 Mar 2026 12:05:00 GMT"),
        item("theirs", NotBefore="Sun, 01 Mar 2026 12:01:00 GMT", Resources=[PEER]),
        item("none", NotBefore=None),
        item("begun", **STARTED),
    )
    upcoming = agent.families(1)["azure_scheduled_events_next_not_before_timestamp_seconds"].samples
    assert upcoming == {("self",): at(300).timestamp(), ("peer",): at(60).timestamp()}
    expected = agent.families(1)["azure_scheduled_event_expected_interruption_seconds"].samples
    assert ("late",) not in expected
    assert expected["soon",] == 5.0


def test_the_info_carries_what_the_event_is_with_a_short_description(agent: Agent) -> None:
    agent.sees(1, item(Description="d" * 1000, EventSource=None))
    (labels,) = agent.families(1)["azure_scheduled_event_status"].samples
    assert labels == (ID, "Freeze", "Scheduled", "unknown", "self", ME, "d" * 120)


def test_info_names_three_vms(agent: Agent) -> None:
    agent.sees(1, item(Resources=["web_0", "web_1", "web_2", "web_3", "web_4"]))

    (labels,) = agent.families(1)["azure_scheduled_event_status"].samples

    assert labels[5] == "web_0, web_1, web_2 and 2 more"


@pytest.mark.parametrize(
    ("looks", "outcome"),
    [
        ([item(), item(**STARTED)], "finished"),
        ([item()], "canceled"),
        ([item(EventStatus="Odd")], "unknown"),
    ],
)
def test_end_is_shown_with_its_outcome_for_15_minutes(
    agent: Agent, looks: list[dict[str, Any]], outcome: str
) -> None:
    for second, look in enumerate(looks, start=1):
        agent.sees(second, look)
    agent.sees(10)

    assert agent.value(ENDED, 10, ID, outcome) == at(10).timestamp()
    assert agent.value(ENDED, 909, ID, outcome) is not None
    assert agent.value(ENDED, 910, ID, outcome) is None


def test_end_is_not_shown_of_an_event_that_is_listed_again(agent: Agent) -> None:
    agent.sees(1, item()).sees(2).sees(3, item())

    assert ENDED not in agent.families(3)


def test_ends_are_bounded_and_the_newest_stay(agent: Agent) -> None:
    for number in range(MAX_ENDS + 1):
        agent.sees(2 * number + 1, item(f"event-{number}")).sees(2 * number + 2)

    ends = agent.families(2 * MAX_ENDS + 3)[ENDED].samples

    assert len(ends) == MAX_ENDS
    assert ("event-0", "canceled") not in ends


def test_changes_are_counted_from_the_first_on_with_its_time(agent: Agent) -> None:
    agent.sees(1, item()).sees(2).sees(3, item("other")).sees(4)
    assert agent.value("azure_scheduled_event_changes", 4, "canceled", "Freeze") == 2
    created = agent.families(4)["azure_scheduled_event_changes"].created
    assert created == {
        ("announced", "Freeze"): at(1).timestamp(),
        ("canceled", "Freeze"): at(2).timestamp(),
    }


def test_changes_of_other_vms_events_are_not_counted_here(agent: Agent) -> None:
    agent.sees(1, item(Resources=[PEER])).sees(2)
    assert "azure_scheduled_event_changes" not in agent.families(2)
    assert sum(agent.value("azure_scheduled_event_initial_notice_seconds", 2, "Freeze").counts) == 1


def test_the_histograms_observe_notice_and_interruption(agent: Agent) -> None:
    agent.sees(10, item()).sees(900, item(**STARTED)).sees(910, item(**STARTED), gap=4.0).sees(1500)
    for name, total, seconds in (("initial_notice", 890, 10), ("measured_interruption", 4.0, 1500)):
        histogram = agent.value(f"azure_scheduled_event_{name}_seconds", 1500, "Freeze")
        assert (sum(histogram.counts), histogram.sum, histogram.created) == (
            1,
            total,
            at(seconds).timestamp(),
        )


def test_an_event_without_notice_is_a_notice_of_zero(agent: Agent) -> None:
    agent.sees(1, item(EventType="Reboot", **STARTED))
    notice = agent.value("azure_scheduled_event_initial_notice_seconds", 1, "Reboot")
    assert (notice.counts[0], notice.sum) == (1, 0)


def test_what_was_there_at_the_first_look_is_no_sample_of_notice() -> None:
    agent = Agent().sees(0, item(), silence=None)
    assert agent.value("azure_scheduled_event_initial_notice_seconds", 0, "Freeze") is None
    assert agent.value("azure_scheduled_event_current_notice_seconds", 0, ID) is None


def test_the_notice_of_an_event_follows_its_not_before_and_stays_once_it_is_started(
    agent: Agent,
) -> None:
    name = "azure_scheduled_event_current_notice_seconds"
    agent.sees(10, item())
    assert agent.value(name, 10, ID) == 890
    agent.sees(20, item(NotBefore="Sun, 01 Mar 2026 12:25:00 GMT"))
    assert agent.value(name, 20, ID) == 1490
    agent.sees(1500, item(**STARTED), item("sudden", **STARTED))
    assert (agent.value(name, 1501, ID), agent.value(name, 1501, "sudden")) == (1490, 0)


def test_a_value_on_a_bound_belongs_to_the_bucket_below() -> None:
    histogram = Histogram.empty((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 99.0):
        histogram = histogram.plus(value)
    assert histogram.counts == (1, 2, 1)


def test_no_family_has_more_than_200_series_whatever_azure_invents() -> None:
    flooded = Agent().sees(0)
    for second in range(1, 4):
        names = [f"{second}-{number}" for number in range(500)]
        flooded.sees(
            second, *(item(name, EventType=f"Type{name}", EventStatus=f"S{name}") for name in names)
        )
    flooded.sees(4, item("real"))
    found = flooded.families(4)
    for name, family in found.items():
        series = sum(
            len(s.counts) + 3 if isinstance(s, Histogram) else 1 for s in family.samples.values()
        )
        assert series + len(family.created) <= MAX_SERIES, name
    assert found["azure_scheduled_event_changes"].samples["announced", "other"] == 1_500
    assert found["azure_scheduled_event_changes"].samples["announced", "Freeze"] == 1
    assert found["azure_scheduled_events_pending"].samples == {("Freeze", "Scheduled", "self"): 1}
    shown = flooded.sees(5, item("new", EventType="New", EventStatus="Odd")).families(5)
    assert shown["azure_scheduled_events_pending"].samples == {("other", "other", "self"): 1}
    assert next(iter(shown["azure_scheduled_event_status"].samples))[1:3] == ("New", "Odd")


def test_a_label_that_a_metric_has_gained_is_empty_in_what_was_stored_before(agent: Agent) -> None:
    notice = agent.sees(1, item()).totals.notice[named(event_type="Freeze")]
    agent.totals = Totals(changes={named(change="canceled"): 3}, notice={(): notice})
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(agent.totals), type=Totals)
    agent.totals = stored
    assert agent.value("azure_scheduled_event_changes", 4, "canceled", "") == 3
    assert agent.value("azure_scheduled_event_initial_notice_seconds", 4, "") == notice
    text = render(agent.families(4).values(), "")[0].decode()
    assert 'azure_scheduled_event_changes_total{change="canceled",event_type=""} 3.0' in text


def test_what_became_of_deliveries_comes_out_with_zeros_for_the_sinks_that_are_configured() -> None:
    view = OutboxView(
        rows={("chat", "pending"): 3, ("gone", "dead"): 1},
        oldest={("chat", "info"): at(0).timestamp()},
        counts={("chat", "accepted"): 5, ("chat", "delivered"): 2},
    )
    found = samples(Snapshot(Tracked(), Totals(), Figures(), at(60), view, ("chat", "hub")))
    by_name = {family.metric.name: family.samples for family in found}
    assert by_name["notbefore_deliveries"][("chat", "delivered")] == 2
    assert by_name["notbefore_deliveries"][("hub", "dead")] == 0
    assert by_name["notbefore_outbox_deliveries"][("chat", "pending")] == 3
    assert by_name["notbefore_outbox_deliveries"][("gone", "dead")] == 1
    assert by_name["notbefore_outbox_oldest_pending_seconds"] == {("chat", "info"): 60.0}
    assert by_name["notbefore_courier_starts"] == {("crashed",): 0.0, ("hung",): 0.0}
    assert set(by_name["notbefore_delivery_latency_seconds"]) == {("chat",), ("hub",), ("gone",)}
    assert by_name["notbefore_courier_running"] == {(): 0.0}


def test_no_label_holds_what_could_forge_a_line_or_turn_text_around() -> None:
    seen = diff(
        Tracked(), document(item(EventType="a\nb\u202e", Description="c\x1b[2J\x85")), now(0)
    ).tracked
    labels = [
        text
        for family in samples(Snapshot(seen, Totals(), Figures(), at(0)))
        for texts in family.samples
        for text in texts
    ]
    assert all(text.isprintable() for text in labels)
    assert r"a\u000ab\u202e" in labels


def test_a_fleet_of_many_scale_sets_shows_the_largest_and_adds_up_the_rest() -> None:
    heard: dict[Labels, float] = {
        ("westeurope", f"set{number}"): float(number) for number in range(1, 2 * MAX_SERIES)
    }
    process = Snapshot(now=at(0), tracked=Tracked(), totals=Totals(), figures=Figures())
    found = {one.metric: one for one in fleet.samples({fleet.HEARD: heard}, process)}[
        fleet.HEARD
    ].samples
    assert len(found) == MAX_SERIES
    assert sum(found.values()) == sum(heard.values())
    assert ("westeurope", f"set{2 * MAX_SERIES - 1}") in found
    assert ("westeurope", "set1") not in found
    assert found["other", "other"] > 1


def test_the_changes_of_a_fleet_are_counted_since_its_process_began() -> None:
    process = Snapshot(
        now=at(0), tracked=Tracked(), totals=Totals(), figures=Figures(since=at(-60))
    )
    assert [one.since for one in fleet.samples({}, process) if one.metric is fleet.CHANGES] == [
        at(-60)
    ]
