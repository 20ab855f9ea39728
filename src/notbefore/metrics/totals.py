"""Counters and histograms of events since the agent's first start; they survive a restart."""

from bisect import bisect_left
from datetime import datetime
from itertools import product
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import LIFECYCLE_KINDS, Change, ChangeKind

TYPES: Final = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
STATUSES: Final = ("Scheduled", "Started")
SOURCES: Final = ("Platform", "User")
OTHER: Final = "other"
UNKNOWN: Final = "unknown"  # Azure did not say

MAX_SERIES: Final = 200  # of a metric family; the texts in its labels come from outside
_MAX_FREE: Final = 120  # series of changes beyond KNOWN_CHANGES; what is left is for those of `other`

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

Labels = tuple[str, ...]
Key = TypeVar("Key")

KNOWN_CHANGES: Final[frozenset[Labels]] = frozenset(product(LIFECYCLE_KINDS, TYPES, SOURCES, ("self",)))
"""The series that are always there, at 0 before the first: increase() does not see a counter that begins at 1."""


class Histogram(Struct, frozen=True):
    """Observations in seconds, by bucket; ``counts`` has one more than ``bounds``: the last is +Inf."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        """No observations yet."""
        return cls(bounds, (0,) * (len(bounds) + 1))

    def plus(self, value: float) -> "Histogram":
        """With one observation more; a value on a bound belongs to the bucket below it, as in Prometheus."""
        counts = list(self.counts)
        counts[bisect_left(self.bounds, value)] += 1
        return Histogram(self.bounds, tuple(counts), self.sum + value)

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self.counts)


# seconds: half a minute of a Preempt, the minutes of the others, the days of failing hardware
NOTICE_BOUNDS: Final = (
    0.0,
    15.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    900.0,
    1_800.0,
    3_600.0,
    21_600.0,
    86_400.0,
    604_800.0,
)
STARTED_BOUNDS: Final = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1_800.0, 3_600.0, 7_200.0, 21_600.0)
INTERRUPTION_BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0)


LATENCY_BOUNDS: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 21_600.0)


class Totals(Struct, frozen=True):
    """Counters and histograms over all changes since ``since``."""

    since: datetime | None = None  # when counting began; the start time of the cumulative series
    changes: dict[Labels, int] = {}  # (change, event_type, event_source, scope)
    notice: dict[str, Histogram] = {}  # the histograms: by event_type
    scheduled: dict[str, Histogram] = {}
    started: dict[str, Histogram] = {}
    interruption: dict[str, Histogram] = {}
    approvals: dict[Labels, int] = {}  # (rule, result)
    folded: dict[str, int] = {}  # family -> how often a label was replaced by `other`

    def plus(self, change: Change) -> "Totals":
        """With one change more, and the durations that it completes."""
        if change.approval is not None:
            return self._plus_approval(change.approval.rule, change)
        event = change.event
        totals = self._plus_change((change.kind, event.event_type, event.event_source or UNKNOWN, change.scope))
        if change.kind == "announced" or (change.kind == "started" and change.previous is None):
            totals = _observed(totals, "notice", event.event_type, NOTICE_BOUNDS, change.notice_seconds)
        if change.kind == "started":
            totals = _observed(totals, "scheduled", event.event_type, NOTICE_BOUNDS, change.scheduled_seconds)
        if change.kind == "finished":
            totals = _observed(totals, "started", event.event_type, STARTED_BOUNDS, change.started_seconds)
        interruption = change.interruption.seconds if change.interruption is not None else None
        return _observed(totals, "interruption", event.event_type, INTERRUPTION_BOUNDS, interruption)

    def _plus_change(self, labels: Labels) -> "Totals":
        known = labels in self.changes or labels in KNOWN_CHANGES
        if known or len(self.changes.keys() - KNOWN_CHANGES) < _MAX_FREE:
            return replace(self, changes=increased(self.changes, labels))
        labels = (labels[0], OTHER, OTHER, labels[3])
        return replace(_folded(self, "azure_scheduled_event_changes"), changes=increased(self.changes, labels))

    def _plus_approval(self, rule: str, change: Change) -> "Totals":
        totals, result = self, "dry_run" if change.reason == "dry_run" else RESULT_OF[change.kind]
        if (rule, result) not in self.approvals and len(self.approvals) >= MAX_SERIES - len(APPROVAL_RESULTS):
            totals, rule = _folded(self, "azure_scheduled_event_approvals"), OTHER
        return replace(totals, approvals=increased(self.approvals, (rule, result)))


def _observed(totals: Totals, name: str, event_type: str, bounds: tuple[float, ...], value: float | None) -> Totals:
    if value is None:
        return totals
    family: dict[str, Histogram] = getattr(totals, name)
    # a histogram is a series a bucket: beside the known types and `other` there is room for a few unknown ones
    room = MAX_SERIES // (len(bounds) + 3) - len(TYPES) - 1
    if event_type not in family and event_type not in TYPES and len(family.keys() - {*TYPES, OTHER}) >= room:
        totals, event_type = _folded(totals, HISTOGRAMS[name]), OTHER
    histogram = family.get(event_type) or Histogram.empty(bounds)
    return replace(totals, **{name: {**family, event_type: histogram.plus(value)}})


def _folded(totals: Totals, family: str) -> Totals:
    return replace(totals, folded=increased(totals.folded, family))


def increased(counts: dict[Key, int], key: Key) -> dict[Key, int]:
    """The counts with one more of ``key``, in a dict of its own."""
    found = counts.copy()
    found[key] = counts.get(key, 0) + 1
    return found
