"""What the metrics of ``samples`` are called in OpenTelemetry: names with dots, units in UCUM. Pure, and by rule.

The rules are the inverse of those by which a Collector or Prometheus itself translates OTLP, so that a series has the
same name whichever road it took: dots become underscores, the unit ``s`` the suffix ``_seconds``, a monotonic sum gets
``_total``; units in braces leave no trace.
"""

from typing import Final, Literal

from msgspec import Struct

from notbefore.metrics.families import Metric

NAMESPACES: Final = (  # the longer before the shorter
    "azure.scheduled_events",
    "azure.scheduled_event",
    "notbefore.config",
    "notbefore.courier",
    "notbefore.delivery",
    "notbefore.otlp",
    "notbefore.outbox",
    "notbefore.poll",
    "notbefore.store",
    "notbefore.vm",
    "notbefore",
)
UNITS: Final = {  # of what counts things; without an entry a metric has no unit: it is 1, a time of Azure's, or a flag
    "azure_scheduled_event_approvals": "{approval}",
    "azure_scheduled_event_changes": "{change}",
    "azure_scheduled_event_resources": "{vm}",
    "azure_scheduled_events_pending": "{event}",
    "notbefore_config_reloads": "{reload}",
    "notbefore_courier_starts": "{start}",
    "notbefore_deliveries": "{delivery}",
    "notbefore_documents_rejected": "{document}",
    "notbefore_event_flaws": "{flaw}",
    "notbefore_events_without_series": "{event}",
    "notbefore_otlp_exports": "{export}",
    "notbefore_outbox_rows": "{delivery}",
    "notbefore_polls": "{poll}",
    "notbefore_series_folded": "{label}",
    "notbefore_store_damaged_files": "{file}",
    "notbefore_template_errors": "{error}",
}
SECONDS: Final = "seconds"
InstrumentKind = Literal["gauge", "sum", "histogram"]
KINDS: Final[dict[str, InstrumentKind]] = {"gauge": "gauge", "counter": "sum", "histogram": "histogram"}


class Instrument(Struct, frozen=True):
    """A metric as OpenTelemetry names it."""

    name: str
    unit: str
    kind: InstrumentKind


def instrument(metric: Metric) -> Instrument:
    """The same metric for OpenTelemetry."""
    kind = KINDS[metric.kind]
    unit = "s" if SECONDS in metric.name.split("_") else UNITS.get(metric.name, "")
    return Instrument(_dotted(metric.name.removesuffix(f"_{SECONDS}")), unit, kind)


def _dotted(name: str) -> str:
    for namespace in NAMESPACES:
        prefix = namespace.replace(".", "_") + "_"
        if name.startswith(prefix):
            return f"{namespace}.{name.removeprefix(prefix)}"
    return name


def prometheus_name(metric: Metric) -> str:
    """The name under which ``/metrics`` shows it."""
    return metric.name + "_total" if metric.kind == "counter" else metric.name
