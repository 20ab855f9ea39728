"""What the metrics of ``metrics.families`` are called in OpenTelemetry: names with dots, units in UCUM. By rule.

The rules are the inverse of those by which a Collector or Prometheus translates OTLP (OpenTelemetry's *Prometheus and
OpenMetrics Compatibility*), so that a metric has the same name on both ways: dots become underscores, the unit ``s``
the suffix ``_seconds``, a counter gets ``_total``; units in braces leave no trace. What a record says as well has the
record's name among the attributes.
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
    "notbefore.imds",
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
    "notbefore_unforeseen_errors": "{error}",
    "notbefore_courier_starts": "{start}",
    "notbefore_deliveries": "{delivery}",
    "notbefore_documents_rejected": "{document}",
    "notbefore_event_flaws": "{flaw}",
    "notbefore_events_without_series": "{event}",
    "notbefore_otlp_exports": "{export}",
    "notbefore_outbox_deliveries": "{delivery}",
    "notbefore_http_auth_failures": "{request}",
    "notbefore_polls": "{poll}",
    "notbefore_series_folded": "{label}",
    "notbefore_store_damaged_files": "{file}",
    "notbefore_store_unreadable_rows": "{row}",
    "notbefore_template_errors": "{error}",
}
ADDITIVE: Final = (  # gauges of Prometheus that count what is there now: their sum over labels and VMs has a meaning
    "azure_scheduled_events_pending",
    "notbefore_events_without_series",
    "notbefore_outbox_deliveries",
)
ATTRIBUTES: Final = {  # label -> the name that a record has for the same fact; other labels keep their names
    "change": "azure.scheduled_event.change",
    "description": "azure.scheduled_event.description",
    "event_id": "azure.scheduled_event.id",
    "event_source": "azure.scheduled_event.source",
    "event_status": "azure.scheduled_event.status",
    "event_type": "azure.scheduled_event.type",
    "location": "cloud.region",
    "name": "host.name",
    "resource_group": "azure.resource_group.name",
    "rule": "azure.scheduled_event.approval.rule",
    "scale_set": "azure.vm.scaleset.name",
    "scope": "azure.scheduled_event.scope",
    "subscription_id": "cloud.account.id",
    "vm_id": "host.id",
    "zone": "cloud.availability_zone",
}
SECONDS: Final = "seconds"
InstrumentKind = Literal["Gauge", "Counter", "UpDownCounter", "Histogram"]
KINDS: Final[dict[str, InstrumentKind]] = {"gauge": "Gauge", "counter": "Counter", "histogram": "Histogram"}


class Instrument(Struct, frozen=True):
    """A metric as OpenTelemetry names it."""

    name: str
    unit: str
    kind: InstrumentKind


def instrument(metric: Metric) -> Instrument:
    """The same metric for OpenTelemetry."""
    kind = "UpDownCounter" if metric.name in ADDITIVE else KINDS[metric.kind]
    unit = "s" if SECONDS in metric.name.split("_") else UNITS.get(metric.name, "")
    return Instrument(_dotted(metric.name.removesuffix(f"_{SECONDS}")), unit, kind)


def attribute(label: str) -> str:
    """The attribute's name for a label of Prometheus."""
    return ATTRIBUTES.get(label, label)


def _dotted(name: str) -> str:
    for namespace in NAMESPACES:
        prefix = namespace.replace(".", "_") + "_"
        if name.startswith(prefix):
            return f"{namespace}.{name.removeprefix(prefix)}"
    return name
