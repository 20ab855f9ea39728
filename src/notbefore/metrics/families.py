"""The definition of every metric: its name, type, help and labels, and how its samples are computed.

``samples(view)`` is computed at each scrape and each export; nothing is set before that, so no sample is stale. Names
follow Prometheus: base units, ``_total`` (added by the exposition) for counters.

A VM has a handful of events a year, and a fleet has many VMs: a series exists once there is something to say. What
Prometheus would then miss, the first increase, is found by ``_created`` (docs/metrics.md). Only counters that are
watched by alerts and have no ``_created`` start at 0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from itertools import product
from typing import Any, Final, Literal, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.document import SCHEDULED, STARTED
from notbefore.core.outbox import LATENCY_BOUNDS
from notbefore.core.text import escaped
from notbefore.core.tracked import Tracked, TrackedEvent
from notbefore.metrics.outbox import OutboxView
from notbefore.metrics.process import Figures, PollFigures
from notbefore.metrics.totals import MAX_SERIES, OTHER, UNKNOWN, Histogram, Labels, Named, Totals, known_type

MAX_DESCRIPTION_LABEL: Final = 120  # characters of Description in the label of the status metric


Kind = Literal["gauge", "counter", "histogram", "unknown"]


class Metric(Struct, frozen=True):
    """The definition of one family. The ``name`` of a counter does not include ``_total``."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()


class Family(Struct, frozen=True):
    """A metric with its samples at one moment: label values -> value."""

    metric: Metric
    samples: Mapping[Labels, float | Histogram]
    since: datetime | None = None  # when counting began, for counters and histograms
    created: dict[Labels, float] = {}  # of a counter: Unix time of the first count, where it is shown


class Snapshot(Struct, frozen=True):
    """Everything that samples are computed from."""

    tracked: Tracked
    totals: Totals
    figures: Figures
    now: datetime
    outbox: OutboxView = OutboxView()
    sinks: tuple[str, ...] = ()  # the configured ones: their counters start at 0


Value = TypeVar("Value")
Make = Callable[[Snapshot], Iterator[Family]]


class Part(NamedTuple):
    """Families that are computed from the same values: while ``source`` is equal, so are they, and their text."""

    source: tuple[object, ...]
    families: Callable[[], Iterable[Family]]


_NO_POLLS: Final = PollFigures()
_NO_LATENCY: Final = Histogram.empty(LATENCY_BOUNDS)
# the counters that alerts and dashboards ask for their first increase; the others appear once they count
_GOOD_POLLS: Final = ("changed", "unchanged")
_RESULTS: Final = ("accepted", "delivered", "failed", "dead", "expired", "overflowed")
_STATES: Final = ("pending", "dead")
_STARTS: Final = ("crashed", "hung")

PENDING: Final = Metric(
    "azure_scheduled_events_pending", "gauge", "Events that Azure lists now.", ("event_type", "event_status", "scope")
)
STATUS: Final = Metric(
    "azure_scheduled_event_status",
    "gauge",
    f"1 for each listed event, with its present status. The description is cut at {MAX_DESCRIPTION_LABEL} characters.",
    ("event_id", "event_type", "event_status", "event_source", "scope", "description"),
)
NOT_BEFORE: Final = Metric(
    "azure_scheduled_event_not_before_timestamp_seconds",
    "gauge",
    "NotBefore as Unix time: the event does not start before it. Keeps its last known value once the event is started.",
    ("event_id",),
)
SECONDS_TO_NOT_BEFORE: Final = Metric(
    "azure_scheduled_event_seconds_to_not_before",
    "gauge",
    "Seconds from this scrape to NotBefore; negative after NotBefore, absent once the event is started.",
    ("event_id",),
)
STARTED_AT: Final = Metric(
    "azure_scheduled_event_started_timestamp_seconds",
    "gauge",
    "Unix time at which the event was first seen started.",
    ("event_id",),
)
EXPECTED: Final = Metric(
    "azure_scheduled_event_expected_interruption_seconds",
    "gauge",
    "Interruption that Azure expects (DurationInSeconds); absent if unknown.",
    ("event_id",),
)
CURRENT_NOTICE: Final = Metric(
    "azure_scheduled_event_current_notice_seconds",
    "gauge",
    "Notice of a listed event, as NotBefore stands now: NotBefore minus the time when the event was first seen; 0 if it"
    " started without notice, absent if the agent did not see it appear.",
    ("event_id",),
)
RESOURCES: Final = Metric(
    "azure_scheduled_event_resources", "gauge", "Number of VMs that the event affects.", ("event_id",)
)
NEXT: Final = Metric(
    "azure_scheduled_events_next_not_before_timestamp_seconds",
    "gauge",
    "Earliest NotBefore of the events that are not started, as Unix time; absent if there is none.",
    ("scope",),
)
INCARNATION: Final = Metric(
    "azure_scheduled_events_document_incarnation",
    "gauge",
    "DocumentIncarnation of the last document; it may jump or decrease.",
)
CHANGES: Final = Metric(
    "azure_scheduled_event_changes",
    "counter",
    "Changes in the life of events that affect this VM, or may. `ended`: the event is gone, and nobody saw how.",
    ("change", "event_type"),
)
NOTICE: Final = Metric(
    "azure_scheduled_event_initial_notice_seconds",
    "histogram",
    "Notice of each event when it was first seen: NotBefore minus that time; 0 if it started without notice.",
    ("event_type",),
)
INTERRUPTION: Final = Metric(
    "azure_scheduled_event_measured_interruption_seconds",
    "histogram",
    "Measured interruption of this VM: the longest time in which the agent did not run while an event of this VM was"
    " started.",
    ("event_type",),
)
APPROVALS: Final = Metric(
    "azure_scheduled_event_approvals",
    "counter",
    "Results for events that a rule approves, or that were approved by hand (rule `operator`).",
    ("rule", "result"),
)
POLLS: Final = Metric(
    "notbefore_polls",
    "counter",
    "Polls of IMDS by result; all except `changed` and `unchanged` are errors.",
    ("result",),
)
POLL_DURATION: Final = Metric(
    "notbefore_poll_duration_seconds", "histogram", "Duration of a poll of IMDS, including errors."
)
IMDS_UP: Final = Metric(
    "notbefore_imds_up",
    "gauge",
    "1 if the last valid answer of IMDS is at most three intervals old, as for /readyz; 0: the agent runs, and does not"
    " see what Azure announces.",
)
LAST_POLL: Final = Metric(
    "notbefore_last_successful_poll_timestamp_seconds",
    "gauge",
    "Unix time of the last valid answer from IMDS; absent before the first.",
)
POLL_DELAY: Final = Metric(
    "notbefore_poll_delay_seconds",
    "gauge",
    "Delay of the last poll after its planned time, or by how much the next one is overdue at this scrape.",
)
REJECTED: Final = Metric(
    "notbefore_documents_rejected", "counter", "Answers of IMDS that are not a valid document, by reason.", ("reason",)
)
FLAWS: Final = Metric(
    "notbefore_event_flaws",
    "counter",
    "Events in a document, or fields of them, that could not be read, by reason.",
    ("reason",),
)
DEGRADED: Final = Metric(
    "notbefore_store_degraded", "gauge", "1 while the state file cannot be written: new data do not survive a reboot."
)
DAMAGED: Final = Metric(
    "notbefore_store_damaged_files",
    "counter",
    "Damaged state files, or rows of one, that were set aside.",
)
RELOADS: Final = Metric(
    "notbefore_config_reloads", "counter", "Reloads of the configuration (SIGHUP), by result.", ("result",)
)
LAST_RELOAD: Final = Metric(
    "notbefore_config_last_reload_successful", "gauge", "0 if the last reload of the configuration failed, otherwise 1."
)
AUTH_FAILURES: Final = Metric(
    "notbefore_http_auth_failures",
    "counter",
    "Requests with a wrong user or password. Absent unless server.web_config_file has users.",
)
RESTART_NEEDED: Final = Metric(
    "notbefore_restart_needed",
    "gauge",
    "1 while another package is installed than the one that runs, and does not work: notifications wait.",
)
UNFORESEEN: Final = Metric(
    "notbefore_unforeseen_errors",
    "counter",
    "Errors in the agent that its code does not foresee: the log has a traceback of each.",
)
CONFIG_LOADED: Final = Metric(
    "notbefore_config_loaded_timestamp_seconds", "gauge", "Unix time at which the configuration in use was read."
)
BUILD: Final = Metric(
    "notbefore_build_info", "gauge", "Version of the agent; always 1.", ("version", "python", "api_version")
)
DELIVERIES: Final = Metric(
    "notbefore_deliveries",
    "counter",
    "Deliveries by result. At any time accepted = delivered + expired + withdrawn + overflowed + dropped +"
    " the rows that are pending or dead. `failed` counts attempts that are repeated.",
    ("sink", "result"),
)
LATENCY: Final = Metric(
    "notbefore_delivery_latency_seconds",
    "histogram",
    "Time from when a change was seen to its acceptance by the receiver.",
    ("sink",),
)
OUTBOX: Final = Metric(
    "notbefore_outbox_deliveries",
    "gauge",
    "Deliveries in the outbox: `pending`; `dead` (permanently refused); `repeating` (delivered, and sent again while"
    " the event lasts).",
    ("sink", "state"),
)
OLDEST_PENDING: Final = Metric(
    "notbefore_outbox_oldest_pending_seconds",
    "gauge",
    "Age of the oldest pending delivery that is due; absent if there is none.",
    ("sink", "severity"),
)
COURIER_RUNNING: Final = Metric("notbefore_courier_running", "gauge", "1 while the courier process runs.")
COURIER_STARTS: Final = Metric(
    "notbefore_courier_starts", "counter", "Starts of the courier process, by reason.", ("reason",)
)
OTLP_EXPORTS: Final = Metric(
    "notbefore_otlp_exports",
    "counter",
    "Exports over OTLP by result; `rejected`: accepted in part. Absent unless OTLP is configured.",
    ("signal", "result"),
)
VM_LABELS: Final = (
    "name",
    "vm_id",
    "subscription_id",
    "resource_group",
    "location",
    "zone",
    "scale_set",
    "fault_domain",
    "update_domain",
)
VM: Final = Metric(
    "notbefore_vm_info", "gauge", "The identity of this VM, from IMDS; always 1, absent until known.", VM_LABELS
)


METRICS: Final = [one for one in list(globals().values()) if isinstance(one, Metric)]  # of an agent


def samples(view: Snapshot) -> Iterator[Family]:
    """Every family with its samples at ``view.now``; families without samples are left out."""
    for part in parts(view):
        yield from part.families()


def parts(view: Snapshot) -> Iterator[Part]:
    """The same, by what the families are computed from."""
    stored, own = view.totals.since, view.figures.since  # counts that the state keeps, and those that each start resets
    figures, polling = view.figures, view.figures.polling

    def part(make: Make, since: datetime | None, *source: object) -> Part:
        return Part(source, lambda: _complete(make, view, since))

    yield part(_listed, own, view.tracked)
    yield part(_passing, own, view.now, view.tracked, view.outbox)
    yield part(_counted, stored, view.totals)
    yield part(_outbox, stored, view.outbox, view.sinks)
    yield part(_polls, own, polling)
    steady = (polling.api_version, polling.answering, polling.documents_rejected, polling.flaws)
    yield part(_agent, own, view.sinks, replace(figures, polling=_NO_POLLS), *steady)


def fresh(families: Callable[[], Iterable[Family]]) -> Callable[[], list[Part]]:
    """Return what makes one part of them, which never equals the one before."""
    return lambda: [Part((object(),), families)]


def _complete(make: Make, view: Snapshot, since: datetime | None) -> Iterator[Family]:
    """Families that have samples, with their start and with labels that are safe to show."""
    for family in make(view):
        if family.samples:
            found = {_shown(labels): value for labels, value in family.samples.items()}
            yield Family(family.metric, found, since, {_shown(labels): time for labels, time in family.created.items()})


@lru_cache(maxsize=256)  # those of the families that are computed at each scrape
def _shown(labels: Labels) -> Labels:
    return tuple(map(escaped, labels))


def _listed(view: Snapshot) -> Iterator[Family]:
    listed = _by_urgency(view)
    yield Family(PENDING, _pending(listed))
    shown = listed[:MAX_SERIES]
    for metric, read in _PER_EVENT:
        values = {(tracked.event.event_id,): read(tracked) for tracked in shown}
        yield Family(metric, {labels: float(value) for labels, value in values.items() if value is not None})
    yield Family(STATUS, {_status_labels(tracked): 1.0 for tracked in shown})
    yield Family(NEXT, _next(listed))
    incarnation = view.tracked.incarnation
    yield Family(INCARNATION, {(): float(incarnation)} if incarnation is not None else {})


def _passing(view: Snapshot) -> Iterator[Family]:
    """What changes by the time alone."""
    listed = view.tracked.events.values()
    shown = listed if len(listed) <= MAX_SERIES else _by_urgency(view)[:MAX_SERIES]
    left = {(tracked.event.event_id,): tracked.seconds_to(view.now) for tracked in shown}
    yield Family(SECONDS_TO_NOT_BEFORE, {labels: value for labels, value in left.items() if value is not None})
    now = view.now.timestamp()
    yield Family(OLDEST_PENDING, {labels: max(0.0, now - since) for labels, since in view.outbox.oldest.items()})


def _by_urgency(view: Snapshot) -> list[TrackedEvent]:
    return sorted(view.tracked.events.values(), key=_urgency)


def _urgency(tracked: TrackedEvent) -> float:
    """Sort key: started events first, then by NotBefore; events without NotBefore last."""
    if tracked.event.event_status == STARTED:
        return 0.0
    return tracked.not_before.timestamp() if tracked.not_before else float("inf")


def _pending(listed: Iterable[TrackedEvent]) -> dict[Labels, float | Histogram]:
    counts: dict[Labels, float] = {}
    for tracked in listed:
        status = tracked.event.event_status if tracked.event.event_status in (SCHEDULED, STARTED) else OTHER
        labels: Labels = (known_type(tracked.event.event_type), status, tracked.scope)
        counts[labels] = counts.get(labels, 0.0) + 1.0
    return dict(counts)


def _status_labels(tracked: TrackedEvent) -> Labels:
    event = tracked.event
    source, description = event.event_source or UNKNOWN, (event.description or "")[:MAX_DESCRIPTION_LABEL]
    return (event.event_id, event.event_type, event.event_status, source, tracked.scope, description)


def _next(listed: Iterable[TrackedEvent]) -> dict[Labels, float | Histogram]:
    earliest: dict[Labels, float | Histogram] = {}
    for tracked in listed:  # in the order of NotBefore: the first of a scope is its earliest
        if tracked.event.event_status != STARTED and tracked.not_before is not None:
            earliest.setdefault((tracked.scope,), tracked.not_before.timestamp())
    return earliest


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
        yield Family(metric, _by_labels(by_name(metric, counts)), created=by_name(metric, created))
    yield Family(NOTICE, by_name(NOTICE, totals.notice))
    yield Family(INTERRUPTION, by_name(INTERRUPTION, totals.interruption))


def by_name(metric: Metric, stored: Mapping[Named, Value]) -> dict[Labels, Value]:
    """What is stored, with the labels that the metric has now: one that it has gained since is empty, as if absent."""
    return {tuple(dict(labels).get(name, "") for name in metric.labels): value for labels, value in stored.items()}


def _outbox(view: Snapshot) -> Iterator[Family]:
    outbox = view.outbox
    sinks = [*view.sinks, *sorted({sink for sink, _ in (*outbox.rows, *outbox.counts)} - set(view.sinks))]
    yield Family(DELIVERIES, _by_labels(dict.fromkeys(product(sinks, _RESULTS), 0) | outbox.counts))
    yield Family(LATENCY, {(sink,): outbox.latency.get(sink, _NO_LATENCY) for sink in sinks})
    yield Family(OUTBOX, _by_labels(dict.fromkeys(product(sinks, _STATES), 0) | outbox.rows))


def _polls(view: Snapshot) -> Iterator[Family]:
    """What changes with each poll."""
    polling = view.figures.polling
    yield Family(POLLS, _by_one(polling.results, _GOOD_POLLS))
    yield Family(POLL_DURATION, {(): polling.duration})
    yield Family(LAST_POLL, _once(polling.last_success))
    yield Family(POLL_DELAY, _once(polling.delay))


def _agent(view: Snapshot) -> Iterator[Family]:
    figures = view.figures
    polling, courier, config = figures.polling, figures.courier, figures.config
    yield Family(IMDS_UP, _once(float(polling.answering)))
    yield Family(REJECTED, _by_one(polling.documents_rejected))
    yield Family(FLAWS, _by_one(polling.flaws))
    yield Family(DEGRADED, _once(float(figures.store_degraded)))
    yield Family(DAMAGED, _once(float(figures.store_damaged)))
    yield Family(COURIER_RUNNING, _once(float(courier.running)))
    yield Family(COURIER_STARTS, _by_one(courier.starts, _STARTS if view.sinks else ()))
    yield Family(OTLP_EXPORTS, _by_labels(figures.otlp_exports))
    yield Family(RELOADS, _by_one(config.reloads, ("success", "failure")))
    yield Family(LAST_RELOAD, _once(float(not config.refused)))
    yield Family(CONFIG_LOADED, _once(config.loaded))
    yield Family(AUTH_FAILURES, _once(figures.auth_failures))
    yield Family(RESTART_NEEDED, _once(float(bool(figures.package_replaced))))
    yield Family(UNFORESEEN, _once(float(figures.unforeseen)))
    yield Family(BUILD, {(figures.version, figures.python, polling.api_version): 1.0})
    vm = tuple(figures.vm.get(label, "") for label in VM_LABELS)
    yield Family(VM, {vm: 1.0} if figures.vm else {})


def _by_labels(counts: Mapping[Any, int]) -> dict[Labels, float | Histogram]:
    return {labels: float(count) for labels, count in counts.items()}


def _by_one(counts: dict[str, int], always: tuple[str, ...] = ()) -> dict[Labels, float | Histogram]:
    """Those that have counted anything, and those that are ``always`` shown."""
    return {(label,): float(count) for label, count in (dict.fromkeys(always, 0) | counts).items()}


def _once(value: float | None) -> dict[Labels, float | Histogram]:
    return {} if value is None else {(): float(value)}
