"""The other exporter's names: those of its dashboards, with their labels and values."""

from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from notbefore.core.lifecycle import diff
from notbefore.core.tracked import Tracked
from notbefore.metrics.families import Family, Snapshot
from notbefore.metrics.process import POLL_BOUNDS, Figures, PollFigures
from notbefore.metrics.totals import MAX_SERIES, Histogram, Totals
from notbefore.metrics.webdevops import webdevops
from notbefore.web.exposition import MetricsText
from support.azure import ID, ME, PEER, at, document, item, now

LABELS = ("eventID", "eventType", "resourceType", "resource", "eventStatus", "notBefore", "eventSource")


def families(*items: Any, figures: Figures | None = None) -> dict[str, Family]:
    tracked = diff(Tracked(), document(*items, incarnation=7), now(0)).tracked
    view = Snapshot(tracked, Totals(), figures or Figures(vm={"name": ME}), at(1))
    return {family.metric.name: family for family in webdevops(view)}


def events(*items: Any) -> dict[tuple[str, ...], Any]:
    family = families(*items)["azure_scheduledevent_event"]
    assert family.metric.labels == LABELS
    return dict(family.samples)


def test_an_event_is_a_series_for_each_vm_with_not_before_as_label_and_value() -> None:
    common = (ID, "Freeze", "VirtualMachine")
    rest = ("Scheduled", "Sun, 01 Mar 2026 12:15:00 GMT", "Platform")
    assert events(item(Resources=[PEER, ME])) == {
        (*common, ME, *rest): at(900).timestamp(),
        (*common, PEER, *rest): at(900).timestamp(),
    }


def test_what_azure_leaves_out_is_an_empty_label_and_no_not_before_is_one() -> None:
    bare = item(EventStatus="Started", NotBefore="", Resources=[], EventSource=None, ResourceType=None)
    assert events(bare) == {(ID, "Freeze", "", "", "Started", "", ""): 1.0}


def test_the_events_of_this_vm_are_the_last_to_be_cut() -> None:
    found = events(*(item(f"id-{n}", Resources=[f"vm-{n}-{m}" for m in range(50)]) for n in range(5)), item("mine"))
    assert len(found) == MAX_SERIES
    assert any(labels[0] == "mine" and labels[3] == ME for labels in found)


def test_requests_are_those_that_the_agent_made() -> None:
    polling = PollFigures()
    results = ("changed", "unchanged", "timeout", "timeout", "refused")
    for result, duration in zip(results, (0.001, 0.005, 0.006, 7.0, 100.0), strict=True):
        polling = polling.plus(result, 0.0, duration)
    found = families(figures=Figures(polling=polling))
    assert found["azure_scheduledevent_request_error"].samples == {(): 3.0}
    request = found["azure_scheduledevent_request"].samples[()]
    assert isinstance(request, Histogram)
    assert set(request.bounds) < set(POLL_BOUNDS)
    assert request.counts == (2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1)
    assert request.sum == polling.duration.sum


def test_the_incarnation_is_shown_once_it_is_known() -> None:
    assert families()["azure_scheduledevent_document_incarnation"].samples == {(): 7.0}
    names = [family.metric.name for family in webdevops(Snapshot(Tracked(), Totals(), Figures(), at(0)))]
    assert "azure_scheduledevent_document_incarnation" not in names


def test_the_names_come_out_as_they_are_in_both_formats() -> None:
    exposition = MetricsText(lambda: families(item()).values())
    openmetrics = exposition.render("application/openmetrics-text; version=1.0.0")[0].decode()
    parse: Any = text_string_to_metric_families  # has no types
    kinds = {family.name: family.type for family in parse(openmetrics)}
    assert kinds["azure_scheduledevent_request_error"] == "unknown"
    for text in (openmetrics, exposition.render("")[0].decode()):
        assert "\nazure_scheduledevent_request_error 0.0\n" in text
        assert "\nazure_scheduledevent_request_count 0.0\n" in text
