"""The counts and measurements.

Those of changes begin at the agent's first start and survive a restart. Those of polls, store,
courier, configuration and OTLP begin with this process. Those of deliveries come from the outbox.
"""

from bisect import bisect_left
from datetime import datetime
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import SILENT, Change
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
# seconds of a poll: the usual durations of IMDS, and durations that are slow for one poll per
# second
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
        """A histogram without observations."""
        return cls(bounds, (0,) * (len(bounds) + 1))

    def plus(self, value: float) -> "Histogram":
        """Add an observation.

        A value on a bound belongs to the bucket below it, as in Prometheus.
        """
        counts = list(self.counts)
        counts[bisect_left(self.bounds, value)] += 1
        return Histogram(self.bounds, tuple(counts), self.sum + value, self.created)


# Seconds. Each bucket is a series on each VM that had such an event, so only bounds of interest for
# a fleet.
# Azure's promises, by type
NOTICE_BOUNDS: Final = (
    0.0,
    30.0,
    60.0,
    300.0,
    600.0,
    900.0,
    3_600.0,
    86_400.0,
)
# a freeze takes some seconds, a reboot minutes
INTERRUPTION_BOUNDS: Final = (
    1.0,
    5.0,
    10.0,
    30.0,
    120.0,
    600.0,
)


class Totals(Struct, frozen=True):
    """Counters and histograms over all changes since ``since``."""

    since: datetime | None = None  # when counting began; the start time of the cumulative series
    changes: dict[
        Named, int
    ] = {}  # by change and event_type, for events that affect this VM, or may
    notice: dict[Named, Histogram] = {}  # the histograms: by event_type
    interruption: dict[Named, Histogram] = {}
    approvals: dict[Named, int] = {}  # by rule and result
    ends: dict[Named, float] = {}  # the newest, by event_id and outcome -> Unix time
    created: dict[Named, float] = {}  # key of changes or approvals -> Unix time of the first count

    def plus(self, change: Change) -> "Totals":
        """Add a change, and the durations that it completes."""
        event_type = known_type(change.event.event_type)
        if change.approval is not None:
            result = (
                "dry_run" if change.reason == "dry_run" else change.kind.removeprefix("approval_")
            )
            return self._counted(
                "approvals", named(rule=change.approval.approval_rule, result=result), change
            )
        totals = self
        if change.scope != "peer":
            totals = self._counted(
                "changes", named(change=change.kind, event_type=event_type), change
            )
        if change.outcome is not None:
            totals = replace(totals, ends=_with_end(totals.ends, change, change.outcome))
        by_type = named(event_type=event_type)
        if change.notice_seconds is not None and (
            change.kind == "announced" or (change.kind == "started" and change.previous is None)
        ):
            notice = _observed(
                totals.notice, by_type, NOTICE_BOUNDS, change.notice_seconds, change.time
            )
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


def _with_end(ends: dict[Named, float], change: Change, outcome: str) -> dict[Named, float]:
    """Return the newest ``MAX_ENDS`` ends, the last of them that of this change."""
    labels = named(event_id=change.event.event_id, outcome=outcome)
    others = {key: time for key, time in ends.items() if key != labels}
    newest = list(others.items())[1 - MAX_ENDS :]
    return {**dict(newest), labels: change.time.timestamp()}


def known_type(event_type: str) -> str:
    """Return the event type as a label.

    `other` if Azure does not document it, so that series are few.
    """
    return event_type if event_type in _COUNTED_TYPES else OTHER


def named(**labels: str) -> Named:
    """The labels of a stored value."""
    return tuple(labels.items())


def _observed(
    family: dict[Named, Histogram],
    labels: Named,
    bounds: tuple[float, ...],
    value: float,
    time: datetime,
) -> dict[Named, Histogram]:
    histogram = family.get(labels) or replace(Histogram.empty(bounds), created=time.timestamp())
    return {**family, labels: histogram.plus(value)}


def increased(counts: dict[Key, int], key: Key) -> dict[Key, int]:
    """A new dict of the counts, with one more for ``key``."""
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
        """Add a poll; ``delay`` and ``duration`` in seconds."""
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
    oldest: dict[
        tuple[str, str], float
    ] = {}  # (sink, severity) -> Unix time when the oldest pending change was seen
    counts: dict[tuple[str, str], int] = {}  # (sink, result)
    latency: dict[
        str, Histogram
    ] = {}  # sink -> seconds from when a change was seen to its acceptance
    errors: dict[str, str] = {}  # sink -> the error of its newest delivery that has one


def view_of(outbox: Outbox, now: float, wall: float) -> OutboxView:
    """The numbers of an outbox. ``now``: seconds on the outbox's clock.

    ``wall``: the same moment as Unix time.
    """
    rows: dict[tuple[str, str], int] = {}
    oldest: dict[tuple[str, str], float] = {}
    errors: dict[str, str] = {}
    for row in outbox.rows.chosen():
        key = row.sink, row.state
        rows[key] = rows.get(key, 0) + 1
        if row.error:
            errors[row.sink] = row.error
        if row.state == "pending":
            waits = row.sink, row.severity
            oldest[waits] = min(oldest.get(waits, wall), row.created - now + wall)
    ledger = outbox.rows.ledger
    latency = {sink: Histogram(LATENCY_BOUNDS, *found) for sink, found in ledger.latency.items()}
    return OutboxView(rows, oldest, ledger.counts, latency, errors)
