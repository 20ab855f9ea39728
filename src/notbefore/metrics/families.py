"""The definition of every metric: its name, type, help and labels, and how its samples are computed.

``samples(view)`` computes them at each scrape and each export; nothing is set in advance, so no sample is stale. Names
follow Prometheus: base units, ``_total`` (added by the exposition) for counters.

A VM has a handful of events a year, and a fleet has many VMs, so a series exists only once it has a value. Prometheus
would miss the first increase of such a series; ``_created`` shows it (docs/metrics.md). Only counters that alerts watch
and that have no ``_created`` start at 0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache, partial
from itertools import product
from typing import Any, Final, NamedTuple, TypeVar

from msgspec import Struct

from notbefore.core.document import SCHEDULED, STARTED
from notbefore.core.outbox_rows import LATENCY_BOUNDS
from notbefore.core.text import escaped
from notbefore.core.tracked import Tracked, TrackedEvent
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

MAX_DESCRIPTION_LABEL: Final = 120  # characters of the description in a label of the status metric


class Metric(Struct, frozen=True):
    """The definition of one family. The ``name`` of a counter does not include ``_total``."""

    name: str
    kind: str  # gauge, counter or histogram
    help: str
    labels: Labels = ()


class Family(Struct, frozen=True):
    """A metric with its samples at one moment: label values -> a number, or a ``Histogram``."""

    metric: Metric
    samples: Mapping[Labels, Any]  # before ``_complete``, a value may be ``None``: no sample
    since: datetime | None = None  # when counting began, for counters and histograms
    created: dict[Labels, float] = {}  # of a counter: Unix time of the first count, if it is shown


class Snapshot(Struct, frozen=True):
    """The values that samples are computed from."""

    tracked: Tracked
    totals: Totals
    figures: Figures
    now: datetime
    outbox: OutboxView = OutboxView()
    sinks: tuple[str, ...] = ()  # the configured sinks: their counters start at 0
    polling: PollFigures = PollFigures()


Value = TypeVar("Value")
Make = Callable[[Snapshot], Iterator[Family]]


class Part(NamedTuple):
    """Families that are computed from the same values: while ``source`` is equal, they and their text are equal."""

    source: tuple[object, ...]
    families: Callable[[], Iterable[Family]]


def _metric(kind: str, signature: str, text: str) -> Metric:
    """Make a metric. ``signature``: ``name{label, label}``; ``text``: its help."""
    name, _, labels = signature.rstrip("}").partition("{")
    return Metric(name, kind, text, tuple(labels.split(", ")) if labels else ())


gauge: Final = partial(_metric, "gauge")
counter: Final = partial(_metric, "counter")
histogram: Final = partial(_metric, "histogram")

_NO_LATENCY: Final = Histogram.empty(LATENCY_BOUNDS)
# alerts and dashboards ask for the first increase of these counters; the others appear at their first count
_RESULTS: Final = ("accepted", "delivered", "failed", "dead", "expired", "overflowed")

PENDING: Final = gauge(
    "azure_scheduled_events_pending{event_type, event_status, scope}", "Events that Azure lists now."
)
STATUS: Final = gauge(
    "azure_scheduled_event_status{event_id, event_type, event_status, event_source, scope, description}",
    f"1 for each listed event, with its present status. The description is cut at {MAX_DESCRIPTION_LABEL} characters.",
)
NOT_BEFORE: Final = gauge(
    "azure_scheduled_event_not_before_timestamp_seconds{event_id}",
    "NotBefore as Unix time: the event does not start before it. Keeps its last known value once the event is started.",
)
SECONDS_TO_NOT_BEFORE: Final = gauge(
    "azure_scheduled_event_seconds_to_not_before{event_id}",
    "Seconds from this scrape to NotBefore; negative after NotBefore, absent once the event is started.",
)
STARTED_AT: Final = gauge(
    "azure_scheduled_event_started_timestamp_seconds{event_id}",
    "Unix time at which the event was first seen started.",
)
EXPECTED: Final = gauge(
    "azure_scheduled_event_expected_interruption_seconds{event_id}",
    "Interruption that Azure expects (DurationInSeconds); absent if unknown.",
)
CURRENT_NOTICE: Final = gauge(
    "azure_scheduled_event_current_notice_seconds{event_id}",
    "NotBefore, as it stands now, minus the time when the event was first seen; 0 if it started without notice.",
)
RESOURCES: Final = gauge("azure_scheduled_event_resources{event_id}", "Number of VMs that the event affects.")
NEXT: Final = gauge(
    "azure_scheduled_events_next_not_before_timestamp_seconds{scope}",
    "Earliest NotBefore of the events that are not started, as Unix time; absent if there is none.",
)
INCARNATION: Final = gauge(
    "azure_scheduled_events_document_incarnation", "DocumentIncarnation of the last document; it may jump or decrease."
)
CHANGES: Final = counter(
    "azure_scheduled_event_changes{change, event_type}",
    "Changes in the life of events that affect this VM, or may. `ended`: the event is gone, and nobody saw how.",
)
NOTICE: Final = histogram(
    "azure_scheduled_event_initial_notice_seconds{event_type}",
    "Notice of each event when it was first seen: NotBefore minus that time; 0 if it started without notice.",
)
INTERRUPTION: Final = histogram(
    "azure_scheduled_event_measured_interruption_seconds{event_type}",
    "The longest time in which the agent did not run while an event of this VM was started.",
)
APPROVALS: Final = counter(
    "azure_scheduled_event_approvals{rule, result}",
    "Results for events that a rule approves, or that were approved by hand (rule `operator`).",
)
POLLS: Final = counter(
    "notbefore_polls{result}", "Polls of IMDS by result; all except `changed` and `unchanged` are errors."
)
POLL_DURATION: Final = histogram("notbefore_poll_duration_seconds", "Duration of a poll of IMDS, including errors.")
IMDS_UP: Final = gauge(
    "notbefore_imds_up", "0 while the agent does not see what Azure announces (then /readyz says no); otherwise 1."
)
LAST_POLL: Final = gauge(
    "notbefore_last_successful_poll_timestamp_seconds",
    "Unix time of the last valid answer from IMDS; absent before the first.",
)
POLL_DELAY: Final = gauge("notbefore_poll_delay_seconds", "How much later than planned the last poll began.")
REJECTED: Final = counter(
    "notbefore_documents_rejected{reason}", "Answers of IMDS that are not a valid document, by reason."
)
FLAWS: Final = counter("notbefore_event_flaws{reason}", "Events, or fields of them, that could not be read, by reason.")
DEGRADED: Final = gauge(
    "notbefore_store_degraded", "1 while the state file cannot be written: new data do not survive a reboot."
)
DAMAGED: Final = counter("notbefore_store_damaged_files", "Damaged state files, or rows of one, that were set aside.")
RELOADS: Final = counter("notbefore_config_reloads{result}", "Reloads of the configuration (SIGHUP), by result.")
LAST_RELOAD: Final = gauge(
    "notbefore_config_last_reload_successful", "0 if the last reload of the configuration failed, otherwise 1."
)
AUTH_FAILURES: Final = counter(
    "notbefore_http_auth_failures", "Requests with a wrong user or password. Absent where there are no users."
)
RESTART_NEEDED: Final = gauge(
    "notbefore_restart_needed", "1 while a package is installed that does not work: notifications wait."
)
UNFORESEEN: Final = counter(
    "notbefore_unforeseen_errors", "Errors that the agent does not foresee: the log has a traceback of each."
)
CONFIG_LOADED: Final = gauge(
    "notbefore_config_loaded_timestamp_seconds", "Unix time at which the configuration in use was read."
)
BUILD: Final = gauge("notbefore_build_info{version, python, api_version}", "Version of the agent; always 1.")
DELIVERIES: Final = counter(
    "notbefore_deliveries{sink, result}",
    "Deliveries by result: accepted = delivered + expired + withdrawn + overflowed + dropped + those that are pending"
    " or dead. `failed` counts attempts that are repeated.",
)
LATENCY: Final = histogram(
    "notbefore_delivery_latency_seconds{sink}", "Time from when a change was seen to its acceptance by the receiver."
)
OUTBOX: Final = gauge(
    "notbefore_outbox_deliveries{sink, state}",
    "Deliveries: `pending`, `dead` (refused for good), `repeating` (delivered, and sent again while the event lasts).",
)
OLDEST_PENDING: Final = gauge(
    "notbefore_outbox_oldest_pending_seconds{sink, severity}",
    "Age of the oldest pending delivery, of a reminder since it is due; absent if there is none.",
)
COURIER_RUNNING: Final = gauge("notbefore_courier_running", "1 while the courier process runs.")
COURIER_STARTS: Final = counter("notbefore_courier_starts{reason}", "Starts of the courier process, by reason.")
OTLP_EXPORTS: Final = counter(
    "notbefore_otlp_exports{signal, result}",
    "Exports over OTLP by result; `rejected`: accepted in part. Absent unless OTLP is configured.",
)
VM: Final = gauge(
    "notbefore_vm_info{name, vm_id, subscription_id, resource_group, location, zone, scale_set}",
    "The identity of this VM, from IMDS; always 1, absent until known.",
)


METRICS: Final = [one for one in list(globals().values()) if isinstance(one, Metric)]  # of an agent


def samples(view: Snapshot) -> Iterator[Family]:
    """Every family with its samples at ``view.now``; families without samples are left out."""
    for part in parts(view):
        yield from part.families()


def parts(view: Snapshot) -> Iterator[Part]:
    """The same families, grouped by the values that they are computed from."""
    stored, own = view.totals.since, view.figures.since  # the starts of stored counts, and of this process's
    polling = view.polling

    def part(make: Make, since: datetime | None, *source: object) -> Part:
        return Part(source, lambda: _complete(make, view, since))

    yield part(_listed, own, view.tracked)
    yield part(_passing, own, view.now, view.tracked, view.outbox)
    yield part(_counted, stored, view.totals)
    yield part(_outbox, stored, view.outbox, view.sinks)
    yield part(_polls, own, polling)
    yield part(_agent, own, view.sinks, view.figures, polling.answering, polling.documents_rejected, polling.flaws)


def _complete(make: Make, view: Snapshot, since: datetime | None) -> Iterator[Family]:
    """Yield the families that have samples, with their start and with labels that are safe to show."""
    for family in make(view):
        found = {
            _shown(labels): value if isinstance(value, Histogram) else float(value)
            for labels, value in family.samples.items()
            if value is not None
        }
        if found:
            created = {_shown(labels): time for labels, time in family.created.items()}
            yield Family(family.metric, found, since, created)


@lru_cache(maxsize=256)  # enough for the families that are computed at each scrape
def _shown(labels: Labels) -> Labels:
    return tuple(map(escaped, labels))


def _listed(view: Snapshot) -> Iterator[Family]:
    listed = view.tracked.by_urgency
    pending: dict[Labels, int] = {}
    for tracked in listed:
        status = tracked.event.event_status if tracked.event.event_status in (SCHEDULED, STARTED) else OTHER
        labels: Labels = (known_type(tracked.event.event_type), status, tracked.scope)
        pending[labels] = pending.get(labels, 0) + 1
    yield Family(PENDING, pending)
    shown = listed[:MAX_SERIES]
    for metric, read in _PER_EVENT:
        yield Family(metric, {(tracked.event.event_id,): read(tracked) for tracked in shown})
    yield Family(STATUS, {_status_labels(tracked): 1 for tracked in shown})
    earliest: dict[Labels, Any] = {}
    for tracked in listed:  # sorted by NotBefore: the first of a scope is the earliest
        if tracked.event.event_status != STARTED and tracked.not_before is not None:
            earliest.setdefault((tracked.scope,), tracked.not_before.timestamp())
    yield Family(NEXT, earliest)
    yield Family(INCARNATION, {(): view.tracked.incarnation})


def _passing(view: Snapshot) -> Iterator[Family]:
    """Families that change with time alone."""
    listed = view.tracked.events.values()
    shown = listed if len(listed) <= MAX_SERIES else view.tracked.by_urgency[:MAX_SERIES]
    yield Family(SECONDS_TO_NOT_BEFORE, {(one.event.event_id,): one.seconds_to(view.now) for one in shown})
    now = view.now.timestamp()
    yield Family(OLDEST_PENDING, {labels: max(0.0, now - since) for labels, since in view.outbox.oldest.items()})


def _status_labels(tracked: TrackedEvent) -> Labels:
    event = tracked.event
    source, description = event.event_source or UNKNOWN, (event.description or "")[:MAX_DESCRIPTION_LABEL]
    return (event.event_id, event.event_type, event.event_status, source, tracked.scope, description)


def _unix(time: datetime | None) -> float | None:
    return time.timestamp() if time is not None else None


_PER_EVENT: Final[tuple[tuple[Metric, Callable[[TrackedEvent], float | None]], ...]] = (
    (NOT_BEFORE, lambda one: _unix(one.not_before)),
    (STARTED_AT, lambda one: _unix(one.started)),
    (EXPECTED, lambda one: one.event.duration),
    (CURRENT_NOTICE, lambda one: one.notice),
    (RESOURCES, lambda one: len(one.event.resources)),
)


def _counted(view: Snapshot) -> Iterator[Family]:
    totals = view.totals
    for metric, counts in ((CHANGES, totals.changes), (APPROVALS, totals.approvals)):
        created = {labels: totals.created[labels] for labels in counts if labels in totals.created}
        yield Family(metric, by_name(metric, counts), created=by_name(metric, created))
    yield Family(NOTICE, by_name(NOTICE, totals.notice))
    yield Family(INTERRUPTION, by_name(INTERRUPTION, totals.interruption))


def by_name(metric: Metric, stored: Mapping[Named, Value]) -> dict[Labels, Value]:
    """Stored values by the metric's present labels; a label that it gained later is empty, which means absent."""
    return {tuple(dict(labels).get(name, "") for name in metric.labels): value for labels, value in stored.items()}


def _outbox(view: Snapshot) -> Iterator[Family]:
    outbox = view.outbox
    sinks = [*view.sinks, *sorted({sink for sink, _ in (*outbox.rows, *outbox.counts)} - set(view.sinks))]
    yield _counts(DELIVERIES, outbox.counts, product(sinks, _RESULTS))
    yield Family(LATENCY, {(sink,): outbox.latency.get(sink, _NO_LATENCY) for sink in sinks})
    yield _counts(OUTBOX, outbox.rows, product(sinks, ("pending", "dead")))


def _polls(view: Snapshot) -> Iterator[Family]:
    """Families that change with each poll."""
    polling = view.polling
    yield _counts(POLLS, polling.results, ("changed", "unchanged"))
    yield Family(POLL_DURATION, {(): polling.duration})
    yield Family(LAST_POLL, {(): polling.last_success})
    yield Family(POLL_DELAY, {(): polling.delay})


def _agent(view: Snapshot) -> Iterator[Family]:
    figures, polling = view.figures, view.polling
    courier, config = figures.courier, figures.config
    yield _counts(REJECTED, polling.documents_rejected)
    yield _counts(FLAWS, polling.flaws)
    yield _counts(COURIER_STARTS, courier.starts, ("crashed", "hung") if view.sinks else ())
    yield _counts(RELOADS, config.reloads, ("success", "failure"))
    yield _counts(OTLP_EXPORTS, figures.otlp_exports)
    yield Family(BUILD, {(figures.version, figures.python, figures.api_version): 1})
    yield Family(VM, {tuple(figures.vm.get(label, "") for label in VM.labels): 1} if figures.vm else {})
    for metric, value in (
        (IMDS_UP, polling.answering),
        (DEGRADED, figures.store_degraded),
        (DAMAGED, figures.store_damaged),
        (COURIER_RUNNING, courier.running),
        (LAST_RELOAD, not config.refused),
        (CONFIG_LOADED, config.loaded),
        (AUTH_FAILURES, figures.auth_failures),
        (RESTART_NEEDED, figures.restart_needed),
        (UNFORESEEN, figures.unforeseen),
    ):
        yield Family(metric, {(): value})


def _counts(metric: Metric, counts: Mapping[Any, int], always: Iterable[Any] = ()) -> Family:
    """The counts, and 0 for the keys in ``always``. A key is the value of the only label, or a tuple of all values."""
    found = dict.fromkeys(always, 0) | dict(counts)
    return Family(metric, {(key,) if isinstance(key, str) else key: count for key, count in found.items()})
