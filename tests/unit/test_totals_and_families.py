"""Totals and their samples: bounded, complete, computed at the scrape."""

from typing import Any

import msgspec
import pytest

from notbefore.core.lifecycle import diff
from notbefore.core.tracked import Tracked
from notbefore.metrics import fleet
from notbefore.metrics.families import Family
from notbefore.metrics.samples import MetricsSnapshot, samples
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
from support.azure import ID, ME, PEER, STARTED, Story, at, document, item, observation

STATUS = "azure_scheduled_event_status"
CHANGES = "azure_scheduled_event_changes"
ENDED = "azure_scheduled_event_ended_timestamp_seconds"
COUNTDOWN = "azure_scheduled_event_seconds_to_not_before"
INITIAL_NOTICE = "azure_scheduled_event_initial_notice_seconds"
CURRENT_NOTICE = "azure_scheduled_event_current_notice_seconds"
SCHEDULED_DURATION = "azure_scheduled_event_scheduled_duration_seconds"
STARTED_DURATION = "azure_scheduled_event_started_duration_seconds"


class Agent(Story):
    """Tracks and counts events, without I/O."""

    figures = Figures()

    def families(self, seconds: float) -> dict[str, Family]:
        snapshot = MetricsSnapshot(self.tracked, self.totals, self.figures, at(seconds))
        return {family.metric.name: family for family in samples(snapshot)}

    def value(self, name: str, seconds: float, *labels: str) -> Any:
        family = self.families(seconds).get(name)
        if family is None:
            return None
        return family.samples.get(labels)


@pytest.fixture
def agent() -> Agent:
    return Agent().sees(0)


def series(family: Family, *, of_a_histogram: int) -> int:
    """Return the number of series; each histogram has ``of_a_histogram`` besides its buckets."""
    count = 0
    for sample in family.samples.values():
        if isinstance(sample, Histogram):
            count += len(sample.counts) + of_a_histogram
        else:
            count += 1
    return count


def total(histogram: Histogram | None) -> float | None:
    """Return the sum of what a histogram observed; ``None`` if there is no such sample."""
    if histogram is None:
        return None
    return histogram.sum


# ---- an agent without events


def test_event_families_are_absent_before_the_first_event(agent: Agent) -> None:
    families = agent.families(1)

    assert "azure_scheduled_events_pending" not in families
    assert not [name for name in families if name.startswith("azure_scheduled_event_")]


def test_polls_have_zeros_before_the_first_event(agent: Agent) -> None:
    families = agent.families(1)

    assert families["notbefore_polls"].samples == {("changed",): 0.0, ("unchanged",): 0.0}


def test_agent_without_events_has_at_most_thirty_series(agent: Agent) -> None:
    families = agent.families(1)

    assert sum(series(family, of_a_histogram=2) for family in families.values()) <= 30


# ---- pending events


@pytest.mark.parametrize(
    ("seconds", "countdown"),
    [(1, 899), (300.5, 599.5), (900, 0), (960, -60)],
)
def test_seconds_to_not_before_are_computed_at_the_scrape(
    agent: Agent,
    seconds: float,
    countdown: float,
) -> None:
    agent.sees(1, item())

    assert agent.value(COUNTDOWN, seconds, ID) == countdown


def test_countdown_is_absent_once_event_has_started(agent: Agent) -> None:
    agent.sees(1, item())

    agent.sees(900, item(**STARTED))

    assert agent.value(COUNTDOWN, 901, ID) is None


def test_started_event_has_times_of_start_and_not_before(agent: Agent) -> None:
    agent.sees(1, item())

    agent.sees(900, item(**STARTED))

    start = at(900).timestamp()
    not_before = agent.value("azure_scheduled_event_not_before_timestamp_seconds", 901, ID)
    started = agent.value("azure_scheduled_event_started_timestamp_seconds", 901, ID)
    assert not_before == start
    assert started == start


def test_next_not_before_is_the_earliest_of_its_scope(agent: Agent) -> None:
    agent.sees(
        1,
        item("late"),
        item("soon", NotBefore="Sun, 01 Mar 2026 12:05:00 GMT"),
        item("theirs", NotBefore="Sun, 01 Mar 2026 12:01:00 GMT", Resources=[PEER]),
        item("none", NotBefore=None),
        item("begun", **STARTED),
    )

    family = agent.families(1)["azure_scheduled_events_next_not_before_timestamp_seconds"]

    assert family.samples == {("self",): at(300).timestamp(), ("peer",): at(60).timestamp()}


def test_unknown_duration_has_no_sample(agent: Agent) -> None:
    agent.sees(1, item("unknown", DurationInSeconds=-1), item("known"))

    family = agent.families(1)["azure_scheduled_event_expected_interruption_seconds"]

    assert ("unknown",) not in family.samples
    assert family.samples["known",] == 5.0


def test_status_has_labels_with_a_shortened_description(agent: Agent) -> None:
    agent.sees(1, item(Description="d" * 1000, EventSource=None))

    (labels,) = agent.families(1)[STATUS].samples

    assert labels == (ID, "Freeze", "Scheduled", "unknown", "self", ME, "d" * 120)


def test_status_names_three_vms_and_counts_the_rest(agent: Agent) -> None:
    agent.sees(1, item(Resources=["web_0", "web_1", "web_2", "web_3", "web_4"]))

    (labels,) = agent.families(1)[STATUS].samples

    assert labels[5] == "web_0, web_1, web_2 and 2 more"


# ---- ended events


@pytest.mark.parametrize(
    ("looks", "outcome"),
    [
        ([item(), item(**STARTED)], "finished"),
        ([item()], "canceled"),
        ([item(EventStatus="Odd")], "unknown"),
    ],
)
def test_end_is_shown_with_its_outcome_for_15_minutes(
    agent: Agent,
    looks: list[dict[str, Any]],
    outcome: str,
) -> None:
    for second, look in enumerate(looks, start=1):
        agent.sees(second, look)

    agent.sees(10)

    assert agent.value(ENDED, 10, ID, outcome) == at(10).timestamp()
    assert agent.value(ENDED, 909, ID, outcome) is not None
    assert agent.value(ENDED, 910, ID, outcome) is None


def test_end_disappears_when_event_is_listed_again(agent: Agent) -> None:
    agent.sees(1, item())
    agent.sees(2)

    agent.sees(3, item())

    assert ENDED not in agent.families(3)


def test_oldest_end_is_forgotten_above_the_bound(agent: Agent) -> None:
    for number in range(MAX_ENDS + 1):
        agent.sees(2 * number + 1, item(f"event-{number}"))
        agent.sees(2 * number + 2)

    ends = agent.families(2 * MAX_ENDS + 3)[ENDED].samples

    assert len(ends) == MAX_ENDS
    assert ("event-0", "canceled") not in ends


# ---- changes


def test_changes_are_counted_by_kind_and_type(agent: Agent) -> None:
    agent.sees(1, item())
    agent.sees(2)
    agent.sees(3, item("other"))
    agent.sees(4)

    assert agent.value(CHANGES, 4, "canceled", "Freeze") == 2


def test_counter_of_changes_was_created_with_its_first_change(agent: Agent) -> None:
    agent.sees(1, item())
    agent.sees(2)
    agent.sees(3, item("other"))
    agent.sees(4)

    assert agent.families(4)[CHANGES].created == {
        ("announced", "Freeze"): at(1).timestamp(),
        ("canceled", "Freeze"): at(2).timestamp(),
    }


def test_events_of_other_vms_count_as_notice_but_not_as_changes(agent: Agent) -> None:
    agent.sees(1, item(Resources=[PEER]))
    agent.sees(2)

    notice = agent.value(INITIAL_NOTICE, 2, "Freeze")
    assert CHANGES not in agent.families(2)
    assert sum(notice.counts) == 1


# ---- histograms and notice


def agent_after_freeze() -> Agent:
    """Return an agent that saw a freeze from its announcement to its end."""
    agent = Agent().sees(0)
    agent.sees(10, item())
    agent.sees(900, item(**STARTED))
    agent.sees(910, item(**STARTED), gap=4.0)
    agent.sees(1500)
    return agent


def test_histogram_observes_initial_notice() -> None:
    notice = agent_after_freeze().value(INITIAL_NOTICE, 1500, "Freeze")

    assert sum(notice.counts) == 1
    assert notice.sum == 890
    assert notice.created == at(10).timestamp()


def test_histogram_observes_measured_interruption() -> None:
    name = "azure_scheduled_event_measured_interruption_seconds"

    interruption = agent_after_freeze().value(name, 1500, "Freeze")

    assert sum(interruption.counts) == 1
    assert interruption.sum == 4.0
    assert interruption.created == at(1500).timestamp()


@pytest.mark.parametrize(
    ("name", "duration", "created"),
    [(SCHEDULED_DURATION, 890, 900), (STARTED_DURATION, 600, 1500)],
)
def test_histogram_observes_how_long_event_lasted(
    name: str,
    duration: float,
    created: float,
) -> None:
    histogram = agent_after_freeze().value(name, 1500, "Freeze")

    assert sum(histogram.counts) == 1
    assert histogram.sum == duration
    assert histogram.created == at(created).timestamp()


def test_durations_include_events_of_other_vms(agent: Agent) -> None:
    agent.sees(10, item(Resources=[PEER]))
    agent.sees(900, item(Resources=[PEER], **STARTED))
    agent.sees(1500)

    assert agent.value(SCHEDULED_DURATION, 1500, "Freeze").sum == 890
    assert agent.value(STARTED_DURATION, 1500, "Freeze").sum == 600


def test_durations_survive_a_restart_and_a_reboot() -> None:
    agent = Agent().sees(0)
    agent.sees(10, item(EventType="Reboot"))
    agent.sees(900, item(EventType="Reboot", **STARTED))
    agent.totals = msgspec.msgpack.decode(msgspec.msgpack.encode(agent.totals), type=Totals)
    agent.sees(1000, item(EventType="Reboot", **STARTED), rebooted=True, silence=90.0)

    agent.sees(1500)

    assert agent.value(SCHEDULED_DURATION, 1500, "Reboot").sum == 890
    assert agent.value(STARTED_DURATION, 1500, "Reboot").sum == 600


def test_scheduled_duration_is_zero_without_notice(agent: Agent) -> None:
    agent.sees(1, item(**STARTED))

    assert agent.value(SCHEDULED_DURATION, 1, "Freeze").sum == 0
    assert agent.value(SCHEDULED_DURATION, 1, "Freeze").counts[0] == 1


def test_canceled_event_has_no_durations(agent: Agent) -> None:
    agent.sees(1, item())
    agent.sees(60)

    assert agent.value(CHANGES, 60, "canceled", "Freeze") == 1
    assert SCHEDULED_DURATION not in agent.families(60)
    assert STARTED_DURATION not in agent.families(60)


def test_second_start_of_an_event_is_not_observed_again(agent: Agent) -> None:
    agent.sees(1, item())
    agent.sees(900, item(**STARTED))
    agent.sees(901, item())
    agent.sees(902, item(**STARTED))

    assert agent.value(SCHEDULED_DURATION, 902, "Freeze").sum == 899


@pytest.mark.parametrize(
    ("unwatched", "scheduled", "started"),
    [("announcement", None, 600), ("start", None, None), ("end", 890, None)],
)
def test_duration_has_no_sample_when_its_begin_or_end_was_unwatched(
    unwatched: str,
    scheduled: float | None,
    started: float | None,
) -> None:
    def silence(moment: str) -> float:
        if moment == unwatched:
            return 60.0
        return 1.0

    agent = Agent().sees(0)
    agent.sees(10, item(), silence=silence("announcement"))
    agent.sees(900, item(**STARTED), silence=silence("start"))
    agent.sees(1500, silence=silence("end"))

    assert total(agent.value(SCHEDULED_DURATION, 1500, "Freeze")) == scheduled
    assert total(agent.value(STARTED_DURATION, 1500, "Freeze")) == started


def test_event_listed_at_first_look_has_no_durations_before_its_start() -> None:
    agent = Agent().sees(0, item(**STARTED), silence=None)

    agent.sees(600)

    assert SCHEDULED_DURATION not in agent.families(600)
    assert STARTED_DURATION not in agent.families(600)


def test_notice_is_zero_when_event_is_first_seen_started(agent: Agent) -> None:
    agent.sees(1, item(EventType="Reboot", **STARTED))

    notice = agent.value(INITIAL_NOTICE, 1, "Reboot")

    assert notice.counts[0] == 1
    assert notice.sum == 0


def test_notice_has_no_sample_when_event_was_there_at_the_first_look() -> None:
    agent = Agent().sees(0, item(), silence=None)

    assert agent.value(INITIAL_NOTICE, 0, "Freeze") is None
    assert agent.value(CURRENT_NOTICE, 0, ID) is None


LATER = "Sun, 01 Mar 2026 12:25:00 GMT"


def test_current_notice_follows_not_before(agent: Agent) -> None:
    agent.sees(10, item())
    assert agent.value(CURRENT_NOTICE, 10, ID) == 890

    agent.sees(20, item(NotBefore=LATER))

    assert agent.value(CURRENT_NOTICE, 20, ID) == 1490


def test_current_notice_stays_once_event_has_started(agent: Agent) -> None:
    agent.sees(10, item())
    agent.sees(20, item(NotBefore=LATER))

    agent.sees(1500, item(**STARTED))

    assert agent.value(CURRENT_NOTICE, 1501, ID) == 1490


def test_current_notice_is_zero_when_event_is_first_seen_started(agent: Agent) -> None:
    agent.sees(1500, item(**STARTED))

    assert agent.value(CURRENT_NOTICE, 1501, ID) == 0


def test_value_on_a_bound_belongs_to_the_bucket_below() -> None:
    histogram = Histogram.empty((1.0, 2.0))

    for value in (1.0, 1.5, 2.0, 99.0):
        histogram = histogram.plus(value)

    assert histogram.counts == (1, 2, 1)


# ---- bounds


def flooded_agent() -> Agent:
    """Return an agent that saw 1,500 invented types, and then one ordinary event."""
    agent = Agent().sees(0)
    for second in range(1, 4):
        names = [f"{second}-{number}" for number in range(500)]
        agent.sees(
            second,
            *[item(name, EventType=f"Type{name}", EventStatus=f"S{name}") for name in names],
        )
    return agent.sees(4, item("real"))


def test_family_has_at_most_200_series_when_azure_invents_types() -> None:
    families = flooded_agent().families(4)

    too_large = [
        name
        for name, family in families.items()
        if series(family, of_a_histogram=3) + len(family.created) > MAX_SERIES
    ]
    assert too_large == []


def test_changes_of_too_many_types_are_counted_as_other() -> None:
    families = flooded_agent().families(4)

    assert families[CHANGES].samples["announced", "other"] == 1_500
    assert families[CHANGES].samples["announced", "Freeze"] == 1
    assert families["azure_scheduled_events_pending"].samples == {
        ("Freeze", "Scheduled", "self"): 1,
    }


def test_event_of_new_type_counts_as_other_and_keeps_its_status() -> None:
    agent = flooded_agent()

    families = agent.sees(5, item("new", EventType="New", EventStatus="Odd")).families(5)

    (labels,) = families[STATUS].samples
    assert families["azure_scheduled_events_pending"].samples == {("other", "other", "self"): 1}
    assert labels[1] == "New"
    assert labels[2] == "Odd"


def test_label_that_is_newer_than_stored_totals_is_empty(agent: Agent) -> None:
    notice = agent.sees(1, item()).totals.notice[named(event_type="Freeze")]
    totals = Totals(changes={named(change="canceled"): 3}, notice={(): notice})

    agent.totals = msgspec.msgpack.decode(msgspec.msgpack.encode(totals), type=Totals)

    assert agent.value(CHANGES, 4, "canceled", "") == 3
    assert agent.value(INITIAL_NOTICE, 4, "") == notice
    text = render(agent.families(4).values(), "")[0].decode()
    assert 'azure_scheduled_event_changes_total{change="canceled",event_type=""} 3.0' in text


def test_label_values_have_only_printable_characters() -> None:
    tracked = diff(
        Tracked(),
        document(item(EventType="a\nb\u202e", Description="c\x1b[2J\x85")),
        observation(0),
    ).tracked

    values: set[str] = set()
    for family in samples(MetricsSnapshot(tracked, Totals(), Figures(), at(0))):
        for labels in family.samples:
            values.update(labels)

    assert [value for value in values if not value.isprintable()] == []
    assert r"a\u000ab\u202e" in values


# ---- deliveries


def samples_of_deliveries(outbox: OutboxView) -> dict[str, Any]:
    """Return the samples of an agent with the sinks "chat" and "hub"."""
    snapshot = MetricsSnapshot(Tracked(), Totals(), Figures(), at(60), outbox, ("chat", "hub"))
    return {family.metric.name: family.samples for family in samples(snapshot)}


def test_deliveries_are_counted_by_sink_and_result() -> None:
    outbox = OutboxView(counts={("chat", "accepted"): 5, ("chat", "delivered"): 2})

    deliveries = samples_of_deliveries(outbox)["notbefore_deliveries"]

    assert deliveries["chat", "delivered"] == 2
    assert deliveries["hub", "dead"] == 0


def test_waiting_deliveries_are_counted_by_sink_and_state() -> None:
    outbox = OutboxView(
        rows={("chat", "pending"): 3, ("gone", "dead"): 1},
        oldest={("chat", "info"): at(0).timestamp()},
    )

    by_name = samples_of_deliveries(outbox)

    assert by_name["notbefore_outbox_deliveries"]["chat", "pending"] == 3
    assert by_name["notbefore_outbox_deliveries"]["gone", "dead"] == 1
    assert by_name["notbefore_outbox_oldest_pending_seconds"] == {("chat", "info"): 60.0}


def test_latency_is_shown_of_configured_and_removed_sinks() -> None:
    outbox = OutboxView(rows={("gone", "dead"): 1})

    latencies = samples_of_deliveries(outbox)["notbefore_delivery_latency_seconds"]

    assert set(latencies) == {("chat",), ("hub",), ("gone",)}


def test_courier_has_zeros_before_it_runs() -> None:
    by_name = samples_of_deliveries(OutboxView())

    assert by_name["notbefore_courier_starts"] == {("crashed",): 0.0, ("hung",): 0.0}
    assert by_name["notbefore_courier_running"] == {(): 0.0}


# ---- a fleet


def fleet_samples(
    gauges: dict[Any, dict[Labels, float]],
    figures: Figures,
) -> dict[Any, Family]:
    process = MetricsSnapshot(now=at(0), tracked=Tracked(), totals=Totals(), figures=figures)
    return {family.metric: family for family in fleet.fleet_samples(gauges, process)}


def test_fleet_shows_largest_scale_sets_and_adds_up_the_rest() -> None:
    heard: dict[Labels, float] = {
        ("westeurope", f"set{number}"): float(number) for number in range(1, 2 * MAX_SERIES)
    }

    families = fleet_samples({fleet.HEARD: heard}, Figures())

    series: Any = families[fleet.HEARD].samples
    assert len(series) == MAX_SERIES
    assert sum(series.values()) == sum(heard.values())
    assert ("westeurope", f"set{2 * MAX_SERIES - 1}") in series
    assert ("westeurope", "set1") not in series
    assert series["other", "other"] > 1


def test_changes_of_a_fleet_are_counted_since_its_process_began() -> None:
    families = fleet_samples({}, Figures(since=at(-60)))

    assert families[fleet.CHANGES].since == at(-60)
