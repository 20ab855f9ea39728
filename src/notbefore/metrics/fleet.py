"""The metrics of ``notbefore fleet``.

Each instance has those of its partitions, so that sums over all instances are right.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from notbefore.metrics.families import Family, Metric, counter, gauge, histogram
from notbefore.metrics.samples import MetricsSnapshot, by_name, samples
from notbefore.metrics.totals import MAX_SERIES, OTHER, Histogram, Labels

# subscription and resource_group are empty, unless the configuration asks for them
_VM_LABELS: Final = ("region", "scale_set", "subscription", "resource_group")
_EVENT_LABELS: Final = (
    "event_type",
    "region",
    "scale_set",
    "zone",
    "subscription",
    "resource_group",
)

EVENTS: Final = gauge(
    "notbefore_fleet_events_pending",
    "Events that are not over.",
    labels=(*_EVENT_LABELS, "event_status"),
)
VMS: Final = gauge(
    "notbefore_fleet_vms_affected",
    "VMs affected by events that are not over.",
    labels=_EVENT_LABELS,
)
HEARD: Final = gauge(
    "notbefore_fleet_vms_heard",
    "VMs that have sent a heartbeat.",
    labels=_VM_LABELS,
)
SILENT: Final = gauge(
    "notbefore_fleet_vms_silent",
    "VMs whose heartbeats have stopped, without an event that explains it.",
    labels=_VM_LABELS,
)
MISSING_VMS: Final = gauge(
    "notbefore_fleet_vms_missing",
    "VMs of the inventory that were never heard from, or not for a day.",
    labels=_VM_LABELS,
)
RECORDS: Final = counter(
    "notbefore_fleet_records",
    "Event Hub records read, by result.",
    labels=("result",),
)
POISON: Final = counter(
    "notbefore_fleet_poison_records",
    "Records that could not be read.",
    labels=("reason",),
)
MISSING: Final = counter(
    "notbefore_fleet_records_missing",
    "Records that the hub had deleted before they were read.",
)
ERRORS: Final = counter(
    "notbefore_fleet_errors",
    "Errors of the hub, of the checkpoint store, of the history, of the inventory, and of the"
    " program (`fold`).",
    labels=("part",),
)
LOST_SNAPSHOTS: Final = gauge(
    "notbefore_fleet_snapshots_lost",
    "Partitions of this instance whose snapshot could not be read, for an hour after the loss.",
)
NEWER_SNAPSHOTS: Final = gauge(
    "notbefore_fleet_snapshots_newer",
    "Partitions that this instance leaves to a newer version, which has written their snapshots.",
)
UNKNOWN_EVENTS: Final = gauge(
    "notbefore_fleet_events_unknown",
    "Events that VMs list in their heartbeats but that no VM has reported.",
)
AZURE_MESSAGES: Final = counter(
    "notbefore_fleet_azure_messages",
    "Azure's own messages about scheduled events, by EventStatus; `skipped`: about other things.",
    labels=("event_status",),
)
AZURE_DELAY: Final = histogram(
    "notbefore_fleet_azure_delay_seconds",
    "Seconds between the eventTime of Azure's messages and their arrival in the hub.",
)
FIRST_NOTICES: Final = counter(
    "notbefore_fleet_first_notices",
    "Events by their first reporter: `azure`, or a VM (`vm`).",
    labels=("source",),
)
ENDS: Final = counter(
    "notbefore_fleet_ends",
    "Ends of events, by which source knew how they ended: `azure`, `vms`, `both` or `nobody`. A"
    " correction counts again.",
    labels=("known_by",),
)
CONTRADICTIONS: Final = counter(
    "notbefore_fleet_contradictions",
    "Events that Azure reported as Canceled after their start was seen.",
)
SPLIT_EVENTS: Final = gauge(
    "notbefore_fleet_events_split",
    "Events of this instance that are also open in another partition, for example with Azure's"
    " messages in one, and the VMs' records in the other.",
)
AZURE_VMS: Final = gauge(
    "notbefore_fleet_vms_without_agent",
    "VMs that Azure has named in events of the last 30 days, and that have reported nothing"
    " themselves.",
)
PARTITIONS: Final = gauge(
    "notbefore_fleet_partitions",
    "Partitions that this instance reads.",
)
LAG_RECORDS: Final = gauge(
    "notbefore_fleet_lag_records",
    "Records of the hub that are still to be read.",
    labels=("partition",),
)
LAG_SECONDS: Final = gauge(
    "notbefore_fleet_lag_seconds",
    "Age of the next record to be read; 0 where there is none.",
    labels=("partition",),
)
CONNECTED: Final = gauge(
    "notbefore_fleet_hub_connected",
    "1 while the hub is being read, else 0.",
)
CHANGES: Final = counter(
    "notbefore_fleet_changes",
    "Steps of events, or of waves of them, that people were notified of.",
    labels=("change", "event_type"),
)

# seconds; Event Grid delivers within some seconds, and tries for a day
AZURE_DELAY_BOUNDS: Final = (1.0, 5.0, 30.0, 120.0, 600.0, 3_600.0, 36_000.0)
NO_DELAYS: Final = Histogram.empty(AZURE_DELAY_BOUNDS)

# the names of metrics that an agent also has begin with these
COMMON: Final = (
    "notbefore_deliver",
    "notbefore_outbox",
    "notbefore_store",
    "notbefore_courier",
    "notbefore_build",
)

Counts = Mapping[Metric, Mapping[Labels, float]]
"""Metric -> label values -> a number."""


def fleet_samples(
    counts: Counts, process: MetricsSnapshot, azure_delays: Histogram = NO_DELAYS
) -> Iterator[Family]:
    """Yield every family with its samples.

    ``process``: the values of the outbox, the courier and the process.
    """
    yield Family(AZURE_DELAY, {(): azure_delays}, process.figures.since)
    changes = by_name(CHANGES, process.totals.changes)
    for metric, values in {**counts, CHANGES: changes}.items():
        since = process.figures.since
        if metric.kind == "gauge":
            since = None
        yield Family(metric, bounded(values), since)

    for family in samples(process):
        if family.metric.name.startswith(COMMON):
            yield family


def bounded(values: Mapping[Labels, float]) -> dict[Labels, float]:
    """Return at most ``MAX_SERIES`` series: the smallest ones are added up as `other`."""
    if len(values) <= MAX_SERIES:
        return dict(values)

    largest = sorted(values, key=values.__getitem__, reverse=True)[: MAX_SERIES - 1]
    series = {labels: values[labels] for labels in largest}
    sum_of_others = sum(values.values()) - sum(series.values())
    labels_of_others = (OTHER,) * len(largest[0])
    series[labels_of_others] = sum_of_others
    return series
