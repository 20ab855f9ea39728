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

    promised_notice: float = 0.0
    """Seconds between the announcement and NotBefore that Azure's documentation promises."""

    is_advice: bool = False
    """Whether it only advises: nothing happens at its NotBefore, and an approval has no effect."""

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
SPOT_REBALANCE: Final = "SpotRebalanceRecommendation"

# those of api-version 2024-07-09; the notice of a Terminate is the shortest that can be configured
EVENT_TYPES: Final = {
    FREEZE: EventType(severity="warning", promised_notice=900.0, drill_interruption=9),
    REBOOT: EventType(severity="critical", promised_notice=900.0, reboots=True),
    REDEPLOY: EventType(severity="critical", promised_notice=600.0, reboots=True),
    PREEMPT: EventType(severity="critical", promised_notice=30.0, vanishes=True),
    TERMINATE: EventType(severity="critical", promised_notice=300.0, vanishes=True),
    SPOT_REBALANCE: EventType(severity="info", is_advice=True),
}

# for a type that Azure has added since: it has promised nothing
_UNDOCUMENTED: Final = EventType(severity="warning")

_NAMES: Final = {name.casefold(): name for name in EVENT_TYPES}


def known_name(word: str) -> str:
    """Return Azure's name of a type that a user wrote in any case; another word as it is."""
    return _NAMES.get(word.casefold(), word)


def event_type_of(name: str) -> EventType:
    """Return the properties of the type that Azure calls ``name``."""
    return EVENT_TYPES.get(name, _UNDOCUMENTED)
