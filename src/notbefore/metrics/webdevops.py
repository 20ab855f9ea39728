"""The metric names of webdevops' azure-scheduledevents-exporter and -manager, for dashboards that use them.

``exposition.compat: webdevops`` adds them to the scrape. They have NotBefore as a label, so every move begins a new
series, and one series for each VM that an event affects: use them only while you switch (docs/switching.md).
"""

from collections.abc import Iterator
from email.utils import format_datetime
from itertools import islice
from typing import Final

from notbefore.core.document import Event
from notbefore.metrics.families import Family, Metric, Snapshot
from notbefore.metrics.totals import MAX_SERIES, Histogram, Labels

REQUEST_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # those of Go's client

EVENT: Final = Metric(
    "azure_scheduledevent_event",
    "gauge",
    "A listed event for each VM it affects; NotBefore as a Unix time, 1 without one.",
    ("eventID", "eventType", "resourceType", "resource", "eventStatus", "notBefore", "eventSource"),
)
INCARNATION: Final = Metric("azure_scheduledevent_document_incarnation", "gauge", "DocumentIncarnation.")
REQUEST: Final = Metric(
    "azure_scheduledevent_request", "histogram", "Seconds to the end of an answer of IMDS, errors included."
)
# a counter without `_total`, which only a metric of unknown type may be
REQUEST_ERROR: Final = Metric("azure_scheduledevent_request_error", "unknown", "Polls of IMDS that failed.")


def webdevops(view: Snapshot) -> Iterator[Family]:
    """The families of the other exporter at ``view.now``."""
    polling, incarnation = view.figures.polling, view.tracked.incarnation
    yield Family(EVENT, _events(view))
    if incarnation is not None:
        yield Family(INCARNATION, {(): float(incarnation)})
    yield Family(REQUEST, {(): polling.duration.within(REQUEST_BOUNDS)})
    errors = sum(count for result, count in polling.results.items() if result not in ("changed", "unchanged"))
    yield Family(REQUEST_ERROR, {(): float(errors)})


def _events(view: Snapshot) -> dict[Labels, float | Histogram]:
    """At most ``MAX_SERIES``; those of this VM first."""
    me = view.figures.vm.get("name", "").casefold()
    pairs = [
        (tracked.event, resource)
        for tracked in view.tracked.events.values()
        for resource in tracked.event.resources or ("",)
    ]
    pairs.sort(key=lambda pair: pair[1].casefold() != me)
    return {_labels(event, resource): _value(event) for event, resource in islice(pairs, MAX_SERIES)}


def _labels(event: Event, resource: str) -> Labels:
    not_before = format_datetime(event.not_before, usegmt=True) if event.not_before else ""
    return (
        event.event_id,
        event.event_type,
        event.resource_type or "",
        resource,
        event.event_status,
        not_before,
        event.event_source or "",
    )


def _value(event: Event) -> float:
    return float(int(event.not_before.timestamp())) if event.not_before else 1.0
