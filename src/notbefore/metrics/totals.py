"""Counters and histograms of events since the agent's first start; they survive a restart."""

from bisect import bisect_left
from datetime import datetime
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import Change, ChangeKind
from notbefore.core.document import EVENT_TYPES

OTHER: Final = "other"
UNKNOWN: Final = "unknown"  # Azure did not say

MAX_SERIES: Final = 200  # of a metric family; the texts in its labels come from outside
_MAX_CHANGES: Final = 60  # label sets of changes, of two series each; what is left is for those of `other`

APPROVAL_RESULTS: Final = ("approved", "failed", "skipped", "dry_run")
RESULT_OF: Final[dict[ChangeKind, str]] = {
    "approved": "approved",
    "approval_failed": "failed",
    "approval_skipped": "skipped",
}

HISTOGRAMS: Final = {  # field of ``Totals`` -> its family
    "notice": "azure_scheduled_event_initial_notice_seconds",
    "scheduled": "azure_scheduled_event_scheduled_duration_seconds",
    "started": "azure_scheduled_event_started_duration_seconds",
    "interruption": "azure_scheduled_event_measured_interruption_seconds",
}

Labels = tuple[str, ...]  # the values of a sample's labels, in the order of the metric's names
Named = tuple[tuple[str, str], ...]  # names and values: what is stored, so that a metric may gain a label
Key = TypeVar("Key")


class Histogram(Struct, frozen=True):
    """Observations in seconds, by bucket; ``counts`` has one more than ``bounds``: the last is +Inf."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float = 0.0
    created: float | None = None  # Unix time of the first observation, where it is shown

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        """No observations yet."""
        return cls(bounds, (0,) * (len(bounds) + 1))

    def plus(self, value: float) -> "Histogram":
        """With one observation more; a value on a bound belongs to the bucket below it, as in Prometheus."""
        counts = list(self.counts)
        counts[bisect_left(self.bounds, value)] += 1
        return Histogram(self.bounds, tuple(counts), self.sum + value, self.created)

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self.counts)


# Seconds. A bucket is a series on each VM that had such an event: these are the bounds that a fleet is asked about.
NOTICE_BOUNDS: Final = (0.0, 30.0, 60.0, 300.0, 600.0, 900.0, 3_600.0, 86_400.0)  # what Azure promises, by type
SCHEDULED_BOUNDS: Final = (60.0, 300.0, 900.0, 3_600.0)
STARTED_BOUNDS: Final = (60.0, 300.0, 600.0, 1_800.0)  # ten minutes are usual
INTERRUPTION_BOUNDS: Final = (1.0, 5.0, 10.0, 30.0, 120.0, 600.0)  # a freeze takes some seconds, a reboot minutes


class Totals(Struct, frozen=True):
    """Counters and histograms over all changes since ``since``."""

    since: datetime | None = None  # when counting began; the start time of the cumulative series
    changes: dict[Named, int] = {}  # by change and event_type: of the events that affect this VM, or may
    notice: dict[Named, Histogram] = {}  # the histograms: by event_type
    scheduled: dict[Named, Histogram] = {}
    started: dict[Named, Histogram] = {}
    interruption: dict[Named, Histogram] = {}
    approvals: dict[Named, int] = {}  # by rule and result
    created: dict[Named, float] = {}  # of the keys of changes and of approvals: Unix time of the first
    folded: dict[str, int] = {}  # family -> how often a label was replaced by `other`

    def plus(self, change: Change) -> "Totals":
        """With one change more, and the durations that it completes."""
        if change.approval is not None:
            return self._plus_approval(change.approval.rule, change)
        totals = self._plus_change(change) if change.scope != "peer" else self
        if change.kind == "announced" or (change.kind == "started" and change.previous is None):
            totals = _observed(totals, "notice", change, NOTICE_BOUNDS, change.notice_seconds)
        if change.kind == "started":
            totals = _observed(totals, "scheduled", change, SCHEDULED_BOUNDS, change.scheduled_seconds)
        if change.kind == "finished":
            totals = _observed(totals, "started", change, STARTED_BOUNDS, change.started_seconds)
        interruption = change.interruption.seconds if change.interruption is not None else None
        return _observed(totals, "interruption", change, INTERRUPTION_BOUNDS, interruption)

    def _plus_change(self, change: Change) -> "Totals":
        totals, event_type = self, change.event.event_type
        labels = named(change=change.kind, event_type=event_type)
        if labels not in self.changes and event_type not in EVENT_TYPES and len(self.changes) >= _MAX_CHANGES:
            totals = _folded(self, "azure_scheduled_event_changes")
            labels = named(change=change.kind, event_type=OTHER)
        return replace(totals, changes=increased(totals.changes, labels), created=_created(totals, labels, change.time))

    def _plus_approval(self, rule: str, change: Change) -> "Totals":
        totals, result = self, "dry_run" if change.reason == "dry_run" else RESULT_OF[change.kind]
        labels = named(rule=rule, result=result)
        if labels not in self.approvals and len(self.approvals) >= MAX_SERIES // 2 - len(APPROVAL_RESULTS):
            totals = _folded(self, "azure_scheduled_event_approvals")
            labels = named(rule=OTHER, result=result)
        return replace(
            totals, approvals=increased(totals.approvals, labels), created=_created(totals, labels, change.time)
        )


def named(**labels: str) -> Named:
    """The labels of something that is stored."""
    return tuple(labels.items())


def _created(totals: Totals, labels: Named, time: datetime) -> dict[Named, float]:
    return totals.created if labels in totals.created else {**totals.created, labels: time.timestamp()}


def _observed(totals: Totals, name: str, change: Change, bounds: tuple[float, ...], value: float | None) -> Totals:
    if value is None:
        return totals
    labels = named(event_type=change.event.event_type)
    family: dict[Named, Histogram] = getattr(totals, name)
    # a histogram is a series a bucket: beside the known types and `other` there is room for a few unknown ones
    room = MAX_SERIES // (len(bounds) + 4) - len(EVENT_TYPES) - 1
    unlimited = {named(event_type=one) for one in (*EVENT_TYPES, OTHER)}
    if labels not in family and labels not in unlimited and len(family.keys() - unlimited) >= room:
        totals, labels = _folded(totals, HISTOGRAMS[name]), named(event_type=OTHER)
    histogram = family.get(labels) or replace(Histogram.empty(bounds), created=change.time.timestamp())
    return replace(totals, **{name: {**family, labels: histogram.plus(value)}})


def _folded(totals: Totals, family: str) -> Totals:
    return replace(totals, folded=increased(totals.folded, family))


def increased(counts: dict[Key, int], key: Key) -> dict[Key, int]:
    """The counts with one more of ``key``, in a dict of its own."""
    found = counts.copy()
    found[key] = counts.get(key, 0) + 1
    return found
