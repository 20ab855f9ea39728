"""The definitions of an agent's metrics: the name, the type, the help and the labels of each.

To add a metric, add its definition here and its samples in ``metrics/samples.py``; a test fails if
it has none. Then run `make reference`, which writes docs/metrics.md from this file.

Names follow Prometheus: base units; the exposition adds ``_total`` to the name of a counter.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

from msgspec import Struct

from notbefore.metrics.totals import Labels

MAX_DESCRIPTION_LABEL: Final = 120  # characters of the description in a label of the status metric
MAX_RESOURCES_LABEL: Final = 3  # names of VMs in a label of the same metric

MetricKind = Literal["gauge", "counter", "histogram"]


class Metric(Struct, frozen=True):
    """The definition of one family. The ``name`` of a counter does not include ``_total``."""

    name: str
    kind: MetricKind
    help: str
    labels: Labels = ()


class Family(Struct, frozen=True):
    """A metric with its samples at one moment."""

    metric: Metric
    samples: Mapping[Labels, Any]  # label values -> a number or a ``Histogram``; ``None``: absent
    since: datetime | None = None  # when counting began, for counters and histograms
    created: dict[Labels, float] = {}  # of a counter: Unix time of the first count, if it is shown


def gauge(name: str, text: str, labels: Labels = ()) -> Metric:
    """Define a gauge; ``text``: its help."""
    return Metric(name, "gauge", text, labels)


def counter(name: str, text: str, labels: Labels = ()) -> Metric:
    """Define a counter; ``text``: its help."""
    return Metric(name, "counter", text, labels)


def histogram(name: str, text: str, labels: Labels = ()) -> Metric:
    """Define a histogram; ``text``: its help."""
    return Metric(name, "histogram", text, labels)


# ---- scheduled events

PENDING: Final = gauge(
    "azure_scheduled_events_pending",
    "Events that Azure lists now.",
    labels=("event_type", "event_status", "scope"),
)
STATUS: Final = gauge(
    "azure_scheduled_event_status",
    "1 for each listed event, with its present status. `resources` names"
    f" {MAX_RESOURCES_LABEL} of the VMs that it affects. The description is cut at"
    f" {MAX_DESCRIPTION_LABEL} characters.",
    labels=(
        "event_id",
        "event_type",
        "event_status",
        "event_source",
        "scope",
        "resources",
        "description",
    ),
)
NOT_BEFORE: Final = gauge(
    "azure_scheduled_event_not_before_timestamp_seconds",
    "NotBefore as Unix time: the event does not start before it. Keeps its last known value once"
    " the event is started.",
    labels=("event_id",),
)
SECONDS_TO_NOT_BEFORE: Final = gauge(
    "azure_scheduled_event_seconds_to_not_before",
    "Seconds from this scrape to NotBefore; negative after NotBefore, absent once the event is"
    " started.",
    labels=("event_id",),
)
STARTED_AT: Final = gauge(
    "azure_scheduled_event_started_timestamp_seconds",
    "Unix time at which the event was first seen started.",
    labels=("event_id",),
)
ENDED_AT: Final = gauge(
    "azure_scheduled_event_ended_timestamp_seconds",
    "Unix time at which the agent saw that the event is gone, and how it ended: `finished`,"
    " `canceled` or `unknown`. Shown for 15 minutes.",
    labels=("event_id", "outcome"),
)
EXPECTED: Final = gauge(
    "azure_scheduled_event_expected_interruption_seconds",
    "Interruption that Azure expects (DurationInSeconds); absent if unknown.",
    labels=("event_id",),
)
CURRENT_NOTICE: Final = gauge(
    "azure_scheduled_event_current_notice_seconds",
    "NotBefore, as it stands now, minus the time when the event was first seen; 0 if it started"
    " without notice.",
    labels=("event_id",),
)
RESOURCES: Final = gauge(
    "azure_scheduled_event_resources",
    "Number of VMs that the event affects.",
    labels=("event_id",),
)
NEXT: Final = gauge(
    "azure_scheduled_events_next_not_before_timestamp_seconds",
    "Earliest NotBefore of the events that are not started, as Unix time; absent if there is none.",
    labels=("scope",),
)
INCARNATION: Final = gauge(
    "azure_scheduled_events_document_incarnation",
    "DocumentIncarnation of the last document; it may jump or decrease.",
)
CHANGES: Final = counter(
    "azure_scheduled_event_changes",
    "Changes in the life of events that affect this VM, or may. `ended`: the event is gone, and"
    " how it ended was not seen.",
    labels=("change", "event_type"),
)
NOTICE: Final = histogram(
    "azure_scheduled_event_initial_notice_seconds",
    "Notice of each event when it was first seen: NotBefore minus that time; 0 if it started"
    " without notice.",
    labels=("event_type",),
)
SCHEDULED_DURATION: Final = histogram(
    "azure_scheduled_event_scheduled_duration_seconds",
    "Time from when an event was first seen to its start; 0 if it started without notice. Canceled"
    " events do not count.",
    labels=("event_type",),
)
STARTED_DURATION: Final = histogram(
    "azure_scheduled_event_started_duration_seconds",
    "Time from the start of an event to its end, when Azure no longer lists it.",
    labels=("event_type",),
)
INTERRUPTION: Final = histogram(
    "azure_scheduled_event_measured_interruption_seconds",
    "The longest time in which the agent did not run while an event of this VM was started.",
    labels=("event_type",),
)
APPROVALS: Final = counter(
    "azure_scheduled_event_approvals",
    "Results for events that a rule approves, or that were approved by hand (rule `operator`).",
    labels=("rule", "result"),
)

# ---- the agent itself

POLLS: Final = counter(
    "notbefore_polls",
    "Polls of IMDS by result; all except `changed` and `unchanged` are errors.",
    labels=("result",),
)
POLL_DURATION: Final = histogram(
    "notbefore_poll_duration_seconds",
    "Duration of a poll of IMDS, including errors.",
)
IMDS_UP: Final = gauge(
    "notbefore_imds_up",
    "0 while the agent does not see what Azure announces (then /readyz fails); otherwise 1.",
)
LAST_POLL: Final = gauge(
    "notbefore_last_successful_poll_timestamp_seconds",
    "Unix time of the last valid answer from IMDS; absent before the first.",
)
POLL_DELAY: Final = gauge(
    "notbefore_poll_delay_seconds",
    "Seconds by which the last poll began later than planned.",
)
REJECTED: Final = counter(
    "notbefore_documents_rejected",
    "Answers of IMDS that are not a valid document, by reason.",
    labels=("reason",),
)
FLAWS: Final = counter(
    "notbefore_event_flaws",
    "Events, or fields of them, that could not be read, by reason.",
    labels=("reason",),
)
DEGRADED: Final = gauge(
    "notbefore_store_degraded",
    "1 while the state file cannot be written: new data do not survive a reboot.",
)
DAMAGED: Final = counter(
    "notbefore_store_damaged_files",
    "Damaged state files, or rows of one, that were set aside.",
)
RELOADS: Final = counter(
    "notbefore_config_reloads",
    "Reloads of the configuration (SIGHUP), by result.",
    labels=("result",),
)
LAST_RELOAD: Final = gauge(
    "notbefore_config_last_reload_successful",
    "0 if the last reload of the configuration failed, otherwise 1.",
)
AUTH_FAILURES: Final = counter(
    "notbefore_http_auth_failures",
    "Requests with a wrong user or password. Absent where there are no users.",
)
RESTART_NEEDED: Final = gauge(
    "notbefore_restart_needed",
    "1 while a package is installed that does not work: notifications wait.",
)
UNFORESEEN: Final = counter(
    "notbefore_unforeseen_errors",
    "Unforeseen errors of the agent: the log has a traceback of each.",
)
CONFIG_LOADED: Final = gauge(
    "notbefore_config_loaded_timestamp_seconds",
    "Unix time at which the configuration in use was read.",
)
BUILD: Final = gauge(
    "notbefore_build_info",
    "Version of the agent; always 1.",
    labels=("version", "python", "api_version"),
)
DELIVERIES: Final = counter(
    "notbefore_deliveries",
    "Deliveries by result: accepted = delivered + expired + withdrawn + overflowed + dropped"
    " + those that are pending or dead. `failed` counts attempts that are repeated.",
    labels=("sink", "result"),
)
LATENCY: Final = histogram(
    "notbefore_delivery_latency_seconds",
    "Time from when a change was seen to its acceptance by the receiver.",
    labels=("sink",),
)
OUTBOX: Final = gauge(
    "notbefore_outbox_deliveries",
    "Deliveries: `pending`, `dead` (refused for good), `repeating` (delivered, and sent again while"
    " the event lasts).",
    labels=("sink", "state"),
)
OLDEST_PENDING: Final = gauge(
    "notbefore_outbox_oldest_pending_seconds",
    "Age of the oldest pending delivery, of a reminder since it is due; absent if there is none.",
    labels=("sink", "severity"),
)
COURIER_RUNNING: Final = gauge(
    "notbefore_courier_running",
    "1 while the courier process runs.",
)
COURIER_STARTS: Final = counter(
    "notbefore_courier_starts",
    "Starts of the courier process, by reason.",
    labels=("reason",),
)
TEMPLATE_FAILURES: Final = counter(
    "notbefore_delivery_template_failures",
    "Templates of `messages` or of a webhook that failed, so that the built-in text was sent."
    " Absent for a sink without templates.",
    labels=("sink",),
)
OTLP_EXPORTS: Final = counter(
    "notbefore_otlp_exports",
    "Exports over OTLP by result; `rejected`: accepted in part. Absent unless OTLP is configured.",
    labels=("signal", "result"),
)
VM: Final = gauge(
    "notbefore_vm_info",
    "The identity of this VM, from IMDS; always 1, absent until known.",
    labels=("name", "vm_id", "subscription_id", "resource_group", "location", "zone", "scale_set"),
)
