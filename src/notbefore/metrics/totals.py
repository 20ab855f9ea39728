"""What was counted since the agent's first start: counters and histograms of the domain, which survive a restart."""

from bisect import bisect_left
from datetime import datetime
from itertools import product
from typing import Final

from msgspec import Struct, field

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

Labels = tuple[str, ...]

KNOWN_CHANGES: Final[frozenset[Labels]] = frozenset(product(LIFECYCLE_KINDS, TYPES, SOURCES, ("self",)))
"""The series that are always there, at 0 before the first: increase() does not see a counter that begins at 1."""


class Histogram(Struct):
    """Observations in seconds, by bucket; ``counts`` has one more than ``bounds``: the last is +Inf."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        """No observations yet."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        """Add one observation; a value on a bound belongs to the bucket below it, as Prometheus has it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

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


class Totals(Struct):
    """Counters and histograms over all changes. Mutable: the agent owns one, and the store keeps it."""

    since: datetime | None = None  # when counting began; the start time of the cumulative series
    changes: dict[Labels, int] = field(default_factory=dict)  # (change, event_type, event_source, scope)
    notice: dict[str, Histogram] = field(default_factory=dict)  # the histograms: by event_type
    scheduled: dict[str, Histogram] = field(default_factory=dict)
    started: dict[str, Histogram] = field(default_factory=dict)
    interruption: dict[str, Histogram] = field(default_factory=dict)
    approvals: dict[Labels, int] = field(default_factory=dict)  # (rule, result)
    folded: dict[str, int] = field(default_factory=dict)  # family -> how often a label was replaced by `other`

    def add(self, change: Change) -> None:
        """Count one change, and observe the durations that it completes."""
        if change.approval is not None:
            self._add_approval(change.approval.rule, change)
            return
        event = change.event
        labels: Labels = (change.kind, event.event_type, event.event_source or UNKNOWN, change.scope)
        labels = self._fold(labels)
        self.changes[labels] = self.changes.get(labels, 0) + 1
        begins = change.kind == "announced" or (change.kind == "started" and change.previous is None)
        if begins:
            self._observe("notice", event.event_type, NOTICE_BOUNDS, change.notice_seconds)
        if change.kind == "started":
            self._observe("scheduled", event.event_type, NOTICE_BOUNDS, change.scheduled_seconds)
        if change.kind == "finished":
            self._observe("started", event.event_type, STARTED_BOUNDS, change.started_seconds)
        felt = change.interruption.seconds if change.interruption is not None else None
        self._observe("interruption", event.event_type, INTERRUPTION_BOUNDS, felt)

    def _add_approval(self, rule: str, change: Change) -> None:
        result = "dry_run" if change.reason == "dry_run" else RESULT_OF[change.kind]
        if (rule, result) not in self.approvals and len(self.approvals) >= MAX_SERIES - len(APPROVAL_RESULTS):
            self._count_folded("azure_scheduled_event_approvals")
            rule = OTHER
        self.approvals[rule, result] = self.approvals.get((rule, result), 0) + 1

    def _observe(self, name: str, event_type: str, bounds: tuple[float, ...], value: float | None) -> None:
        if value is None:
            return
        family: dict[str, Histogram] = getattr(self, name)
        # a histogram is a series a bucket: beside the known types and `other` there is room for a few unknown ones
        room = MAX_SERIES // (len(bounds) + 3) - len(TYPES) - 1
        if event_type not in family and event_type not in TYPES and len(family.keys() - {*TYPES, OTHER}) >= room:
            self._count_folded(f"azure_scheduled_event_{name}_seconds")
            event_type = OTHER
        family.setdefault(event_type, Histogram.empty(bounds)).observe(value)

    def _fold(self, labels: Labels) -> Labels:
        if labels in self.changes or labels in KNOWN_CHANGES or len(self.changes.keys() - KNOWN_CHANGES) < _MAX_FREE:
            return labels
        self._count_folded("azure_scheduled_event_changes")
        return (labels[0], OTHER, OTHER, labels[3])

    def _count_folded(self, family: str) -> None:
        self.folded[family] = self.folded.get(family, 0) + 1
