"""The samples of an agent's metrics, computed from a ``MetricsSnapshot`` at each scrape and export.

Nothing is set in advance, so no sample is stale. A VM has a handful of events a year, and a fleet
has many VMs, so a series exists only once it has a value. Prometheus would miss the first increase
of such a series; ``_created`` shows it (docs/metrics.md). Only counters that alerts watch and that
have no ``_created`` start at 0.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import product
from typing import Any, Final, TypeVar

from msgspec import Struct

from notbefore.core.document import SCHEDULED, STARTED
from notbefore.core.outbox_rows import LATENCY_BOUNDS
from notbefore.core.text import escaped, shortened, some_of
from notbefore.core.tracked import Tracked, TrackedEvent
from notbefore.metrics import families
from notbefore.metrics.families import (
    MAX_DESCRIPTION_LABEL,
    MAX_RESOURCES_LABEL,
    Family,
    Metric,
)
from notbefore.metrics.totals import (
    MAX_SERIES,
    OTHER,
    UNKNOWN,
    Figures,
    Histogram,
    Labels,
    Named,
    OutboxView,
    PollFigures,
    Totals,
    known_type,
)

# alerts and dashboards ask for the first increase of these
_RESULTS: Final = ("accepted", "delivered", "failed", "dead", "expired", "overflowed")
_STATES: Final = ("pending", "dead")
ENDS_SHOWN: Final = 900.0  # seconds
_NO_LATENCY: Final = Histogram.empty(LATENCY_BOUNDS)

Value = TypeVar("Value")


class MetricsSnapshot(Struct, frozen=True):
    """The values that samples are computed from."""

    tracked: Tracked
    totals: Totals
    figures: Figures
    now: datetime
    outbox: OutboxView = OutboxView()
    sinks: tuple[str, ...] = ()  # the configured sinks: their counters start at 0
    polling: PollFigures = PollFigures()


def samples(view: MetricsSnapshot) -> Iterator[Family]:
    """Yield every family that has samples at ``view.now``."""
    stored_since = view.totals.since  # the agent's first start
    process_since = view.figures.since

    yield from _shown(_listed_events(view.tracked), process_since)
    yield from _shown(_countdowns(view), process_since)
    yield from _shown(_changes(view.totals), stored_since)
    yield from _shown(_deliveries(view.outbox, view.sinks), stored_since)
    yield from _shown(_polls(view.polling), process_since)
    yield from _shown(_process(view), process_since)


def _shown(group: Iterable[Family], since: datetime | None) -> Iterator[Family]:
    """Yield the families of a group that have samples, with labels that are safe to show.

    ``since``: when their counting began.
    """
    for family in group:
        values: dict[Labels, float | Histogram] = {}
        for labels, value in family.samples.items():
            if isinstance(value, Histogram):
                values[_safe(labels)] = value
            elif value is not None:
                values[_safe(labels)] = float(value)

        if values:
            created = {_safe(labels): time for labels, time in family.created.items()}
            yield Family(family.metric, values, since, created)


def _safe(labels: Labels) -> Labels:
    return tuple(escaped(value) for value in labels)


# ---- the listed events


def _listed_events(tracked: Tracked) -> Iterator[Family]:
    by_urgency = tracked.by_urgency
    yield Family(families.PENDING, Counter(_pending_labels(listed) for listed in by_urgency))

    shown = _by_id(by_urgency).items()
    not_before = {labels: _unix(listed.not_before) for labels, listed in shown}
    started_at = {labels: _unix(listed.started) for labels, listed in shown}
    expected = {labels: listed.event.duration for labels, listed in shown}
    notice = {labels: listed.notice for labels, listed in shown}
    resources = {labels: len(listed.event.resources) for labels, listed in shown}
    yield Family(families.NOT_BEFORE, not_before)
    yield Family(families.STARTED_AT, started_at)
    yield Family(families.EXPECTED, expected)
    yield Family(families.CURRENT_NOTICE, notice)
    yield Family(families.RESOURCES, resources)
    yield Family(families.STATUS, {_status_labels(listed): 1 for _, listed in shown})

    yield Family(families.NEXT, _next_not_before(by_urgency))
    yield Family(families.INCARNATION, {(): tracked.incarnation})


def _by_id(by_urgency: Sequence[TrackedEvent]) -> dict[Labels, TrackedEvent]:
    """Return the most urgent events, by the label of the metrics with a series for each event."""
    return {(listed.event.event_id,): listed for listed in by_urgency[:MAX_SERIES]}


def _pending_labels(listed: TrackedEvent) -> Labels:
    status = listed.event.event_status
    if status not in (SCHEDULED, STARTED):
        status = OTHER
    return (known_type(listed.event.event_type), status, listed.scope)


def _status_labels(listed: TrackedEvent) -> Labels:
    event = listed.event
    source = event.event_source or UNKNOWN
    description = (event.description or "")[:MAX_DESCRIPTION_LABEL]
    return (
        event.event_id,
        event.event_type,
        event.event_status,
        source,
        listed.scope,
        shortened(some_of(event.resources, MAX_RESOURCES_LABEL), MAX_DESCRIPTION_LABEL),
        description,
    )


def _next_not_before(by_urgency: Sequence[TrackedEvent]) -> dict[Labels, float]:
    """Return the earliest NotBefore of each scope."""
    earliest: dict[Labels, float] = {}
    for listed in by_urgency:  # the first one of a scope is the earliest
        if listed.event.event_status != STARTED and listed.not_before is not None:
            earliest.setdefault((listed.scope,), listed.not_before.timestamp())
    return earliest


def _countdowns(view: MetricsSnapshot) -> Iterator[Family]:
    """Yield the families that change with time alone."""
    shown = _by_id(view.tracked.by_urgency).items()
    seconds_left = {labels: listed.seconds_to(view.now) for labels, listed in shown}
    yield Family(families.SECONDS_TO_NOT_BEFORE, seconds_left)

    yield Family(families.ENDED_AT, _ends(view))

    now = view.now.timestamp()
    ages: dict[Labels, float] = {}
    for labels, since in view.outbox.oldest.items():
        ages[labels] = max(0.0, now - since)
    yield Family(families.OLDEST_PENDING, ages)


def _ends(view: MetricsSnapshot) -> dict[Labels, float]:
    """Return the ends of events that were seen lately, unless the event is listed again."""
    listed_ids = {listed.event.event_id for listed in view.tracked.events.values()}
    ends: dict[Labels, float] = {}
    for labels, time in view.totals.ends.items():
        texts = dict(labels)
        event_id = texts["event_id"]
        outcome = texts["outcome"]
        is_recent = view.now.timestamp() - time < ENDS_SHOWN
        if is_recent and event_id not in listed_ids:
            ends[event_id, outcome] = time
    return ends


def _unix(time: datetime | None) -> float | None:
    if time is None:
        return None
    return time.timestamp()


# ---- what is stored


def _changes(totals: Totals) -> Iterator[Family]:
    yield _with_created(families.CHANGES, totals.changes, totals)
    yield _with_created(families.APPROVALS, totals.approvals, totals)
    yield Family(families.NOTICE, by_name(families.NOTICE, totals.notice))
    yield Family(
        families.SCHEDULED_DURATION,
        by_name(families.SCHEDULED_DURATION, totals.scheduled),
    )
    yield Family(families.STARTED_DURATION, by_name(families.STARTED_DURATION, totals.started))
    yield Family(families.INTERRUPTION, by_name(families.INTERRUPTION, totals.interruption))


def _with_created(metric: Metric, counts: Mapping[Named, int], totals: Totals) -> Family:
    """Return the counts with the time of the first count of each."""
    created = {labels: totals.created[labels] for labels in counts if labels in totals.created}
    return Family(metric, by_name(metric, counts), created=by_name(metric, created))


def by_name(metric: Metric, stored: Mapping[Named, Value]) -> dict[Labels, Value]:
    """Return stored values by the metric's present labels.

    A label that the metric gained later is empty, which means absent to Prometheus.
    """
    values: dict[Labels, Value] = {}
    for named, value in stored.items():
        texts = dict(named)
        labels = tuple(texts.get(name, "") for name in metric.labels)
        values[labels] = value
    return values


def _deliveries(outbox: OutboxView, configured: tuple[str, ...]) -> Iterator[Family]:
    sinks_of_outbox = {sink for sink, _ in (*outbox.rows, *outbox.counts)}
    removed = sorted(sinks_of_outbox.difference(configured))
    sinks = (*configured, *removed)

    results = _counts_by_two(outbox.counts, always=product(sinks, _RESULTS))
    yield Family(families.DELIVERIES, results)

    latencies: dict[Labels, Histogram] = {}
    for sink in sinks:
        latencies[(sink,)] = outbox.latency.get(sink, _NO_LATENCY)
    yield Family(families.LATENCY, latencies)

    states = _counts_by_two(outbox.rows, always=product(sinks, _STATES))
    yield Family(families.OUTBOX, states)


# ---- this process


def _polls(polling: PollFigures) -> Iterator[Family]:
    results = _counts(polling.results, always=("changed", "unchanged"))
    yield Family(families.POLLS, results)
    yield Family(families.POLL_DURATION, {(): polling.duration})
    yield Family(families.LAST_POLL, {(): polling.last_success})
    yield Family(families.POLL_DELAY, {(): polling.delay})
    yield Family(families.IMDS_UP, {(): polling.answering})
    yield Family(families.REJECTED, _counts(polling.documents_rejected))
    yield Family(families.FLAWS, _counts(polling.flaws))


def _process(view: MetricsSnapshot) -> Iterator[Family]:
    figures = view.figures
    courier = figures.courier
    config = figures.config

    yield Family(families.COURIER_RUNNING, {(): courier.running})
    watched_starts: tuple[str, ...] = ()
    if view.sinks:
        watched_starts = ("crashed", "hung")
    yield Family(families.COURIER_STARTS, _counts(courier.starts, always=watched_starts))

    yield Family(families.TEMPLATE_FAILURES, _counts(courier.template_failures))

    reloads = _counts(config.reloads, always=("success", "failure"))
    yield Family(families.RELOADS, reloads)
    yield Family(families.LAST_RELOAD, {(): not config.refused})
    yield Family(families.CONFIG_LOADED, {(): config.loaded})

    yield Family(families.DEGRADED, {(): figures.store_degraded})
    yield Family(families.DAMAGED, {(): figures.store_damaged})
    yield Family(families.OTLP_EXPORTS, _counts_by_two(figures.otlp_exports))
    yield Family(families.AUTH_FAILURES, {(): figures.auth_failures})
    yield Family(families.RESTART_NEEDED, {(): figures.restart_needed})
    yield Family(families.UNFORESEEN, {(): figures.unforeseen})

    yield Family(families.BUILD, {(figures.version, figures.python, figures.api_version): 1})
    if figures.vm:
        identity = tuple(figures.vm.get(name, "") for name in families.VM.labels)
        yield Family(families.VM, {identity: 1})


# ---- counts: both functions copy them, because another thread may count meanwhile


def _counts(counts: Mapping[str, int], always: Iterable[str] = ()) -> dict[Labels, int]:
    """Return the counts by their only label; those in ``always`` start at 0."""
    values: dict[Labels, int] = {(text,): 0 for text in always}
    for text, count in dict(counts).items():
        values[(text,)] = count
    return values


def _counts_by_two(
    counts: Mapping[Any, int],  # by a pair of texts, which mypy does not accept as ``Labels`` here
    always: Iterable[tuple[str, str]] = (),
) -> dict[Labels, int]:
    """Return the counts by their two labels; those in ``always`` start at 0."""
    values: dict[Labels, int] = dict.fromkeys(always, 0)
    values.update(dict(counts))
    return values
