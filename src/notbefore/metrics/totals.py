"""Counters and histograms of events since the agent's first start; they survive a restart."""

from bisect import bisect_left
from datetime import datetime
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import SILENT, Change, ChangeKind
from notbefore.core.document import EVENT_TYPES

OTHER: Final = "other"
UNKNOWN: Final = "unknown"  # Azure did not say
TYPES: Final = frozenset((*EVENT_TYPES, SILENT))  # what comes from outside and is none of these is counted as `other`

MAX_SERIES: Final = 200  # of a metric family; the texts in its labels come from outside

RESULT_OF: Final[dict[ChangeKind, str]] = {
    "approved": "approved",
    "approval_failed": "failed",
    "approval_skipped": "skipped",
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
INTERRUPTION_BOUNDS: Final = (1.0, 5.0, 10.0, 30.0, 120.0, 600.0)  # a freeze takes some seconds, a reboot minutes


class Totals(Struct, frozen=True):
    """Counters and histograms over all changes since ``since``."""

    since: datetime | None = None  # when counting began; the start time of the cumulative series
    changes: dict[Named, int] = {}  # by change and event_type: of the events that affect this VM, or may
    notice: dict[Named, Histogram] = {}  # the histograms: by event_type
    interruption: dict[Named, Histogram] = {}
    approvals: dict[Named, int] = {}  # by rule and result
    created: dict[Named, float] = {}  # of the keys of changes and of approvals: Unix time of the first

    def plus(self, change: Change) -> "Totals":
        """With one change more, and the durations that it completes."""
        event_type = known_type(change.event.event_type)
        if change.approval is not None:
            result = "dry_run" if change.reason == "dry_run" else RESULT_OF[change.kind]
            return self._counted("approvals", named(rule=change.approval.approval_rule, result=result), change)
        totals = self
        if change.scope != "peer":
            totals = self._counted("changes", named(change=change.kind, event_type=event_type), change)
        by_type = named(event_type=event_type)
        if change.notice_seconds is not None and (
            change.kind == "announced" or (change.kind == "started" and change.previous is None)
        ):
            notice = _observed(totals.notice, by_type, NOTICE_BOUNDS, change.notice_seconds, change.time)
            totals = replace(totals, notice=notice)
        if change.interruption is not None:
            interruption = _observed(
                totals.interruption, by_type, INTERRUPTION_BOUNDS, change.interruption, change.time
            )
            totals = replace(totals, interruption=interruption)
        return totals

    def _counted(self, name: str, labels: Named, change: Change) -> "Totals":
        created = {labels: change.time.timestamp(), **self.created}
        return replace(self, created=created, **{name: increased(getattr(self, name), labels)})


def known_type(event_type: str) -> str:
    """The type as the label of a sum: what Azure may add, or invent, is `other`."""
    return event_type if event_type in TYPES else OTHER


def named(**labels: str) -> Named:
    """The labels of something that is stored."""
    return tuple(labels.items())


def _observed(
    family: dict[Named, Histogram], labels: Named, bounds: tuple[float, ...], value: float, time: datetime
) -> dict[Named, Histogram]:
    histogram = family.get(labels) or replace(Histogram.empty(bounds), created=time.timestamp())
    return {**family, labels: histogram.plus(value)}


def increased(counts: dict[Key, int], key: Key) -> dict[Key, int]:
    """The counts with one more of ``key``, in a dict of its own."""
    return {**counts, key: counts.get(key, 0) + 1}
