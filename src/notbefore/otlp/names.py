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
    kind = "UpDownCounter" if metric.additive else KINDS[metric.kind]
    unit = "s" if SECONDS in metric.name.split("_") else metric.unit
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
