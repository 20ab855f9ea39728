"""The metrics of ``notbefore fleet``. Each instance has those of its partitions: sums over all instances are right."""

from collections.abc import Iterator, Mapping
from typing import Final

from notbefore.metrics import families
from notbefore.metrics.families import Family, Metric, Snapshot, counter, gauge
from notbefore.metrics.totals import MAX_SERIES, OTHER, Labels

# subscription and resource_group are empty, unless the configuration asks for them
_VMS: Final = "region, scale_set, subscription, resource_group"
_PLACE: Final = "event_type, region, scale_set, zone, subscription, resource_group"

EVENTS: Final = gauge(f"notbefore_fleet_events_pending{{{_PLACE}, event_status}}", "Events that are not over.")
VMS: Final = gauge(f"notbefore_fleet_vms_affected{{{_PLACE}}}", "VMs that events which are not over affect.")
HEARD: Final = gauge(f"notbefore_fleet_vms_heard{{{_VMS}}}", "VMs that have sent a heartbeat.")
SILENT: Final = gauge(
    f"notbefore_fleet_vms_silent{{{_VMS}}}", "VMs whose heartbeats have stopped, without an event that explains it."
)
MISSING_VMS: Final = gauge(
    f"notbefore_fleet_vms_missing{{{_VMS}}}", "VMs of the inventory that were never heard from, or not for a day."
)
RECORDS: Final = counter("notbefore_fleet_records{result}", "Records of the hub by what they were.")
POISON: Final = counter("notbefore_fleet_poison_records{reason}", "Records that could not be read.")
MISSING: Final = counter("notbefore_fleet_records_missing", "Records that the hub had deleted before they were read.")
ERRORS: Final = counter(
    "notbefore_fleet_errors{part}",
    "Errors of the hub, of the checkpoint store, of the history, of the inventory, and of the program (`fold`).",
)
PARTITIONS: Final = gauge("notbefore_fleet_partitions", "Partitions that this instance reads.")
LAG_RECORDS: Final = gauge("notbefore_fleet_lag_records{partition}", "Records of the hub that are still to be read.")
LAG_SECONDS: Final = gauge(
    "notbefore_fleet_lag_seconds{partition}", "Age of the next record to be read; 0 where there is none."
)
CONNECTED: Final = gauge("notbefore_fleet_hub_connected", "1 while the hub is being read, else 0.")
CHANGES: Final = counter(
    "notbefore_fleet_changes{change, event_type}", "Steps of events, or of waves of them, that people were notified of."
)

COMMON: Final = ("notbefore_deliver", "notbefore_outbox", "notbefore_store", "notbefore_courier", "notbefore_build")
"""The beginnings of the names of metrics that an agent has as well: of outbox, store, courier and process."""

Counts = Mapping[Metric, Mapping[Labels, float]]
"""Metric -> label values -> a number."""


def samples(counts: Counts, process: Snapshot) -> Iterator[Family]:
    """Every family with its samples. ``process``: the values of the outbox, the courier and the process."""
    counts = {**counts, CHANGES: families.by_name(CHANGES, process.totals.changes)}
    for metric, values in counts.items():
        yield Family(metric, bounded(values), None if metric.kind == "gauge" else process.figures.since)
    yield from (family for family in families.samples(process) if family.metric.name.startswith(COMMON))


def bounded(found: Mapping[Labels, float]) -> dict[Labels, float]:
    """At most ``MAX_SERIES`` series: the smallest ones are added up as `other`."""
    if len(found) <= MAX_SERIES:
        return dict(found)
    kept = dict(sorted(found.items(), key=lambda one: -one[1])[: MAX_SERIES - 1])
    width = len(next(iter(found)))
    kept[(OTHER,) * width] = sum(found.values()) - sum(kept.values())
    return kept
