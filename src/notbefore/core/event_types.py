"""Azure's types of scheduled events: one row for each, with everything that differs between them.

To add a type, add a row to ``EVENT_TYPES`` and its sentences to ``wording/phrases.py``; a test
fails if they are missing. Metrics, filters, drills and the dashboards read this table. The
Prometheus rules repeat its severities, and a test compares them.
"""

from typing import Final, Literal, get_args

from msgspec import Struct

Severity = Literal["critical", "warning", "info"]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)  # the most severe first


class EventType(Struct, frozen=True, kw_only=True):
    """The properties of one type of event."""

    severity: Severity
    """The highest severity of its events; ``routing.severity_of`` lowers it for some of them."""

    promised_notice: float
    """Seconds between the announcement and NotBefore that Azure's documentation promises."""

    reboots: bool = False
    """Whether the VM boots during the event."""

    vanishes: bool = False
    """Whether the VM is gone after the event."""

    drill_interruption: int | None = None
    """Seconds of interruption that a drill announces; ``None``: unknown, as Azure announces it."""


FREEZE: Final = "Freeze"
REBOOT: Final = "Reboot"
REDEPLOY: Final = "Redeploy"
PREEMPT: Final = "Preempt"
TERMINATE: Final = "Terminate"

# those of api-version 2020-07-01; the notice of a Terminate is the shortest that can be configured
EVENT_TYPES: Final = {
    FREEZE: EventType(severity="warning", promised_notice=900.0, drill_interruption=9),
    REBOOT: EventType(severity="critical", promised_notice=900.0, reboots=True),
    REDEPLOY: EventType(severity="critical", promised_notice=600.0, reboots=True),
    PREEMPT: EventType(severity="critical", promised_notice=30.0, vanishes=True),
    TERMINATE: EventType(severity="critical", promised_notice=300.0, vanishes=True),
}

# a type that Azure has added since: it has promised nothing
_UNDOCUMENTED: Final = EventType(severity="warning", promised_notice=0.0)


def event_type_of(name: str) -> EventType:
    """Return the properties of the type that Azure calls ``name``."""
    return EVENT_TYPES.get(name, _UNDOCUMENTED)
