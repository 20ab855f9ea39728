"""The counts and measurements that the samples of metrics are computed from. Pure.

Those of changes begin at the agent's first start and survive a restart. Those of polls, store,
courier, configuration and OTLP begin with this process. Those of deliveries come from the outbox.
"""

from bisect import bisect_left
from collections import Counter
from datetime import datetime
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import SILENT, Approval, Change
from notbefore.core.event_types import EVENT_TYPES
from notbefore.core.outbox import Outbox
from notbefore.core.outbox_rows import LATENCY_BOUNDS

OTHER: Final = "other"
UNKNOWN: Final = "unknown"  # Azure did not give it
_COUNTED_TYPES: Final = frozenset((*EVENT_TYPES, SILENT))

MAX_ENDS: Final = 50  # of events, each with an EventId of at most some hundred characters
MAX_SERIES: Final = 200  # per metric family: the texts of its labels come from outside

# the names of a metric's labels, or the values of a sample's, in the same order
Labels = tuple[str, ...]
# names and values, in the stored form: a metric may gain a label
Named = tuple[tuple[str, str], ...]
Key = TypeVar("Key")
# seconds: the usual durations of a poll, and durations that are slow for one poll per second
POLL_BOUNDS: Final = (0.01, 0.1, 1.0, 5.0)


class Histogram(Struct, frozen=True):
    """Observations in seconds, by bucket.

    ``counts`` has one item more than ``bounds``: the last bucket is +Inf.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float = 0.0
    created: float | None = None  # Unix time of the first observation, if it is shown

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        """Return a histogram without observations."""
        return cls(bounds, (0,) * (len(bounds) + 1))

    def plus(self, value: float) -> "Histogram":
        """Return the histogram with one more observation.

        A value on a bound belongs to the bucket below it, as in Prometheus.
        """
        counts = list(self.counts)
        counts[bisect_left(self.bounds, value)] += 1
        return Histogram(self.bounds, tuple(counts), self.sum + value, self.created)


# Seconds. Each bucket is a series on each VM that had such an event, so there are few.
# the notices that Azure promises, by type
NOTICE_BOUNDS: Final = (0.0, 30.0, 60.0, 300.0, 600.0, 900.0, 3_600.0, 86_400.0)
# Azure starts most events soon after the promised notice, and an approved one at once
SCHEDULED_BOUNDS: Final = (10.0, 30.0, 60.0, 300.0, 600.0, 900.0, 960.0, 3_600.0, 86_400.0)
# Azure lists a started event for some minutes, also a freeze of seconds
STARTED_BOUNDS: Final = (10.0, 30.0, 60.0, 300.0, 600.0, 900.0, 1_800.0, 3_600.0, 86_400.0)
# a freeze takes some seconds, a reboot minutes
INTERRUPTION_BOUNDS: Final = (1.0, 5.0, 10.0, 30.0, 120.0, 600.0)


class Totals(Struct, frozen=True):
    """Counters and histograms over all changes since ``since``."""

    since: datetime | None = None  # when counting began; the start time of the cumulative series
    # by change and event_type, for events that affect this VM, or may
    changes: dict[Named, int] = {}
    notice: dict[Named, Histogram] = {}  # the histograms: by event_type
    scheduled: dict[Named, Histogram] = {}
    started: dict[Named, Histogram] = {}
    interruption: dict[Named, Histogram] = {}
    approvals: dict[Named, int] = {}  # by rule and result
    ends: dict[Named, float] = {}  # the newest, by event_id and outcome -> Unix time
    # labels of a count of changes or approvals -> Unix time of the first one
    created: dict[Named, float] = {}

    def plus(self, change: Change) -> "Totals":
        """Return the totals with one more change, and the durations that it completes."""
        if change.approval is not None:
            return self._plus_approval(change, change.approval)

        totals = self
        if change.scope != "peer":
            totals = self._plus_step(change)
        if change.outcome is not None:
            totals = replace(totals, ends=_with_end(totals.ends, change, change.outcome))
        return _with_durations(totals, change)

    def _plus_approval(self, change: Change, approval: Approval) -> "Totals":
        result = change.kind.removeprefix("approval_")
        if change.reason == "dry_run":
            result = "dry_run"
        labels = named(rule=approval.approval_rule, result=result)
        return replace(
            self,
            approvals=increased(self.approvals, labels),
            created=_with_creation(self.created, labels, change.time),
        )

    def _plus_step(self, change: Change) -> "Totals":
        event_type = known_type(change.event.event_type)
        labels = named(change=change.kind, event_type=event_type)
        return replace(
            self,
            changes=increased(self.changes, labels),
            created=_with_creation(self.created, labels, change.time),
        )


def _with_durations(totals: Totals, change: Change) -> Totals:
    """Return the totals with the durations that are complete with this change.

    A change lacks a duration whose beginning or end was not seen.
    """
    notice = totals.notice
    scheduled = totals.scheduled
    started = totals.started
    interruption = totals.interruption

    is_first = change.kind == "announced"
    if change.kind == "started" and change.previous is None:
        is_first = True
    if is_first and change.notice_seconds is not None:
        notice = _observed(notice, change, NOTICE_BOUNDS, change.notice_seconds)
    # the end of the event repeats its scheduled time
    if change.kind == "started" and change.scheduled_seconds is not None:
        scheduled = _observed(scheduled, change, SCHEDULED_BOUNDS, change.scheduled_seconds)
    if change.started_seconds is not None:
        started = _observed(started, change, STARTED_BOUNDS, change.started_seconds)
    if change.interruption is not None:
        interruption = _observed(interruption, change, INTERRUPTION_BOUNDS, change.interruption)

    return replace(
        totals,
        notice=notice,
        scheduled=scheduled,
        started=started,
        interruption=interruption,
    )


def _with_creation(
    created: dict[Named, float], labels: Named, time: datetime
) -> dict[Named, float]:
    """Return the times of the first counts, with the ``time`` of this one if it is the first."""
    if labels in created:
        return created
    return {**created, labels: time.timestamp()}


def _with_end(ends: dict[Named, float], change: Change, outcome: str) -> dict[Named, float]:
    """Return the newest ``MAX_ENDS`` ends, the last of them that of this change."""
    labels = named(event_id=change.event.event_id, outcome=outcome)
    others = [(key, time) for key, time in ends.items() if key != labels]
    newest = dict(others[-(MAX_ENDS - 1) :])
    newest[labels] = change.time.timestamp()
    return newest


def _observed(
    histograms: dict[Named, Histogram], change: Change, bounds: tuple[float, ...], value: float
) -> dict[Named, Histogram]:
    """Return the histograms with one more observation for the event type of a change."""
    labels = named(event_type=known_type(change.event.event_type))
    histogram = histograms.get(labels)
    if histogram is None:
        histogram = replace(Histogram.empty(bounds), created=change.time.timestamp())
    return {**histograms, labels: histogram.plus(value)}


def known_type(event_type: str) -> str:
    """Return the event type as a label.

    It is `other` if Azure does not document the type, so that series are few.
    """
    if event_type in _COUNTED_TYPES:
        return event_type
    return OTHER


def named(**labels: str) -> Named:
    """Return the labels of a stored value."""
    return tuple(labels.items())


def increased(counts: dict[Key, int], key: Key) -> dict[Key, int]:
    """Return a copy of the counts, with one more for ``key``."""
    return {**counts, key: counts.get(key, 0) + 1}


class PollFigures(Struct, frozen=True):
    """The polls of IMDS: their results, durations and delays."""

    results: dict[str, int] = {}  # `changed`, `unchanged`, or one of ``ImdsReason``
    duration: Histogram = Histogram.empty(POLL_BOUNDS)
    last_success: float | None = None  # Unix seconds
    answering: bool = False  # the last valid answer is at most three intervals old
    delay: float = 0.0  # seconds by which the last poll was late
    documents_rejected: dict[str, int] = {}
    flaws: dict[str, int] = {}

    def plus(self, result: str, delay: float, duration: float) -> "PollFigures":
        """Return the figures with one more poll; ``delay`` and ``duration`` in seconds."""
        return replace(
            self,
            results=increased(self.results, result),
            duration=self.duration.plus(duration),
            delay=delay,
        )


class CourierFigures(Struct, frozen=True):
    """The couriers: whether one runs, and how often one was started."""

    running: bool = False
    starts: dict[str, int] = {}  # by reason: due, crashed, hung, reload, upgrade
    template_failures: dict[str, int] = {}  # by sink


class ConfigFigures(Struct, frozen=True):
    """The last reading of the configuration, and its reloads."""

    loaded: float | None = None  # Unix seconds when the one in use was read
    refused: bool = False  # the last reload failed, and the previous configuration is in use
    reloads: dict[str, int] = {}  # `success`, `failure`


class Figures(Struct, frozen=True):
    """The figures of the process at one moment, without those of its polls."""

    version: str = ""
    python: str = ""
    api_version: str = ""
    courier: CourierFigures = CourierFigures()
    config: ConfigFigures = ConfigFigures()
    store_degraded: bool = False
    store_damaged: int = 0  # files and rows set aside
    otlp_exports: dict[tuple[str, str], int] = {}  # (signal, result)
    unforeseen: int = 0  # unforeseen errors
    # another version is installed, and it does not work: notifications wait
    restart_needed: bool = False
    # requests with a wrong user or password; None if no password is needed
    auth_failures: int | None = None
    vm: dict[str, str] = {}  # label -> value; empty until the identity is known
    since: datetime | None = None  # when this process began to count


class OutboxView(Struct, frozen=True):
    """The numbers of deliveries in the outbox, and the counts of their results."""

    rows: dict[tuple[str, str], int] = {}  # (sink, state)
    # (sink, severity) -> Unix time when the oldest pending change was seen
    oldest: dict[tuple[str, str], float] = {}
    counts: dict[tuple[str, str], int] = {}  # (sink, result)
    # sink -> seconds from when a change was seen to its acceptance
    latency: dict[str, Histogram] = {}
    errors: dict[str, str] = {}  # sink -> the error of its newest delivery that has one


def view_of(outbox: Outbox, now: float, wall: float) -> OutboxView:
    """Return the numbers of an outbox. ``now``: seconds on the outbox's clock.

    ``wall``: the same moment as Unix time.
    """
    counts: Counter[tuple[str, str]] = Counter()
    oldest: dict[tuple[str, str], float] = {}
    errors: dict[str, str] = {}
    for row in outbox.rows.chosen():  # the oldest first
        counts[row.sink, row.state] += 1
        if row.error:
            errors[row.sink] = row.error
        if row.state == "pending":
            key = (row.sink, row.severity)
            created = row.created - now + wall
            oldest[key] = min(oldest.get(key, wall), created)

    ledger = outbox.rows.ledger
    latency: dict[str, Histogram] = {}
    for sink, (bucket_counts, total) in ledger.latency.items():
        latency[sink] = Histogram(LATENCY_BOUNDS, bucket_counts, total)
    return OutboxView(
        rows=dict(counts),
        oldest=oldest,
        counts=ledger.counts,
        latency=latency,
        errors=errors,
    )
