"""The names for OpenTelemetry: by rule, and back again by the rules of others."""

import pytest

from notbefore.metrics.families import METRICS, Metric
from notbefore.otlp.names import ATTRIBUTES, Instrument, instrument


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (
            Metric("azure_scheduled_event_changes", "counter", "", unit="{change}"),
            Instrument("azure.scheduled_event.changes", "{change}", "Counter"),
        ),
        (
            Metric("azure_scheduled_events_pending", "gauge", "", unit="{event}", additive=True),
            Instrument("azure.scheduled_events.pending", "{event}", "UpDownCounter"),
        ),
        (
            Metric("notbefore_poll_duration_seconds", "histogram", ""),
            Instrument("notbefore.poll.duration", "s", "Histogram"),
        ),
        (
            Metric("azure_scheduled_event_seconds_to_not_before", "gauge", ""),
            Instrument("azure.scheduled_event.seconds_to_not_before", "s", "Gauge"),
        ),
        (Metric("notbefore_store_degraded", "gauge", ""), Instrument("notbefore.store.degraded", "", "Gauge")),
        (Metric("up", "gauge", ""), Instrument("up", "", "Gauge")),
    ],
)
def test_names_have_dots_and_units_their_place(metric: Metric, expected: Instrument) -> None:
    assert instrument(metric) == expected


def test_every_metric_has_a_name_of_its_own() -> None:
    assert len({instrument(metric).name for metric in METRICS}) == len(METRICS) > 30


def test_every_counter_says_what_it_counts() -> None:
    assert [m.name for m in METRICS if m.kind == "counter" and not m.unit] == []


def test_what_is_listed_by_name_is_there() -> None:
    assert {metric.kind for metric in METRICS if metric.additive} == {"gauge"}
    assert ATTRIBUTES.keys() <= {label for metric in METRICS for label in metric.labels}
    assert len(set(ATTRIBUTES.values())) == len(ATTRIBUTES)
