"""The metrics of ``notbefore fleet``. Each instance has those of its partitions: over all instances, sums are right."""

from collections.abc import Iterator, Mapping
from typing import Final

from notbefore.metrics import families
from notbefore.metrics.families import Family, Metric, Snapshot
from notbefore.metrics.totals import MAX_SERIES, OTHER, Labels

_OWNER: Final = ("subscription", "resource_group")  # empty, unless the configuration asks for them
_VMS: Final = ("region", "scale_set", *_OWNER)
_PLACE: Final = ("event_type", "region", "scale_set", "zone", *_OWNER)

EVENTS: Final = Metric(
    "notbefore_fleet_events_pending", "gauge", "Events that are not over.", (*_PLACE, "event_status")
)
VMS: Final = Metric("notbefore_fleet_vms_affected", "gauge", "VMs that events which are not over affect.", _PLACE)
HEARD: Final = Metric("notbefore_fleet_vms_heard", "gauge", "VMs that have sent a heartbeat.", _VMS)
SILENT: Final = Metric(
    "notbefore_fleet_vms_silent", "gauge", "VMs whose heartbeats have stopped, without an event that explains it.", _VMS
)
MISSING_VMS: Final = Metric(
    "notbefore_fleet_vms_missing", "gauge", "VMs of the inventory that were never heard from, or not for a day.", _VMS
)
RECORDS: Final = Metric("notbefore_fleet_records", "counter", "Records of the hub by what they were.", ("result",))
POISON: Final = Metric("notbefore_fleet_poison_records", "counter", "Records that could not be read.", ("reason",))
GIVEN_UP: Final = Metric(
    "notbefore_fleet_events_given_up", "counter", "Events that were over only as far as is known: not every VM said so."
)
MISSING: Final = Metric(
    "notbefore_fleet_records_missing", "counter", "Records that the hub had deleted before they were read."
)
ERRORS: Final = Metric(
    "notbefore_fleet_errors",
    "counter",
    "Errors of the hub, of the checkpoint store, of the history, of the inventory, and of the program (`fold`).",
    ("part",),
)
PARTITIONS: Final = Metric("notbefore_fleet_partitions", "gauge", "Partitions that this instance reads.")
LAG_RECORDS: Final = Metric(
    "notbefore_fleet_lag_records", "gauge", "Records of the hub that are still to be read.", ("partition",)
)
LAG_SECONDS: Final = Metric(
    "notbefore_fleet_lag_seconds", "gauge", "Age of the next record to be read; 0 where there is none.", ("partition",)
)
CONNECTED: Final = Metric("notbefore_fleet_hub_connected", "gauge", "1 while the hub is being read, else 0.")
CHANGES: Final = Metric(
    "notbefore_fleet_changes",
    "counter",
    "Steps of events, or of waves of them, that people were notified of.",
    ("change", "event_type"),
)

COMMON: Final = frozenset(
    {
        families.DELIVERIES,
        families.LATENCY,
        families.OUTBOX,
        families.OLDEST_PENDING,
        families.DEGRADED,
        families.DAMAGED,
        families.COURIER_RUNNING,
        families.COURIER_STARTS,
        families.BUILD,
    }
)
"""What an agent has as well: of the outbox, the courier and the process."""


Counts = Mapping[Metric, Mapping[Labels, float]]
"""By metric, label values -> a number."""


def samples(counts: Counts, process: Snapshot) -> Iterator[Family]:
    """Every family with its samples; ``process``: of the outbox, the courier and the process."""
    for metric, values in counts.items():
        yield Family(metric, bounded(values), None if metric.kind == "gauge" else process.figures.since)
    totals = process.totals
    changes = {labels: float(count) for labels, count in families.by_name(CHANGES, totals.changes).items()}
    yield Family(CHANGES, bounded(changes), totals.since)
    yield from (family for family in families.samples(process) if family.metric in COMMON)


def bounded(found: Mapping[Labels, float]) -> dict[Labels, float]:
    """At most ``MAX_SERIES`` series: the smallest ones are added up under `other`."""
    if len(found) <= MAX_SERIES:
        return dict(found)
    kept = dict(sorted(found.items(), key=lambda one: -one[1])[: MAX_SERIES - 1])
    width = len(next(iter(found)))
    kept[(OTHER,) * width] = sum(found.values()) - sum(kept.values())
    return kept
