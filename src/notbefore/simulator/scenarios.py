"""The scenarios of scenarios.json: what the document shows at a given time of each.

Timing and texts follow Microsoft's documents of the service and captures of real VMs: minimum notice by type, some
seconds of impact, about ten minutes from Started to gone.
"""

import math
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

APPROVED_AFTER: Final = 2.0  # seconds from a start request to Started; real ones were seen at once and later
FORESEEN: Final = 900.0  # seconds of notice of a canceled event whose scenario has none


class Scenario(Struct, frozen=True):
    """The course of one event. Durations are seconds of real time."""

    name: str
    event_type: str
    event_source: str
    description: str
    duration: int  # DurationInSeconds; -1 = unknown
    notice: float  # from announced to NotBefore, which is when it starts unless approved; 0 = none
    started: float  # from Started to gone


SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in msgspec.json.decode(
        Path(__file__).with_name("scenarios.json").read_bytes(), type=tuple[Scenario, ...]
    )
}


class Play(Struct, frozen=True):
    """A scenario being played for one event. ``begun`` and ``approved`` are Unix seconds of the wall clock."""

    scenario: Scenario
    event_id: str
    resources: tuple[str, ...]
    begun: float
    speed: float = 1.0  # 60 plays an hour in a minute
    cancel: bool = False  # gone after half of the notice, unless it was approved by then
    approved: float | None = None

    @property
    def notice(self) -> float:
        """Seconds of real time from announced to NotBefore; what has no notice could not be canceled."""
        return self.scenario.notice or (FORESEEN if self.cancel else 0.0)

    @property
    def not_before(self) -> float:
        """When it starts unless it is approved, in Unix seconds."""
        return self.begun + self.notice / self.speed

    def status(self, now: float) -> str | None:
        """Return ``Scheduled``, ``Started``, or ``None`` when it is gone."""
        starts = self.not_before
        if self.approved is not None:
            starts = min(starts, self.approved + APPROVED_AFTER / self.speed)
        # Azure does not cancel what is approved and about to start
        if self.cancel and self.approved is None and now >= self.begun + self.notice / 2 / self.speed:
            return None
        if now < starts:
            return "Scheduled"
        return "Started" if now < starts + self.scenario.started / self.speed else None

    def item(self, now: float) -> dict[str, Any] | None:
        """Return the event as an item of the document, ``None`` when it is not listed."""
        status = self.status(now)
        if status is None:
            return None
        scenario = self.scenario
        return {
            "EventId": self.event_id,
            "EventStatus": status,
            "EventType": scenario.event_type,
            "ResourceType": "VirtualMachine",
            "Resources": list(self.resources),
            "NotBefore": http_date(self.not_before) if status == "Scheduled" else "",
            "Description": scenario.description,
            "EventSource": scenario.event_source,
            "DurationInSeconds": scenario.duration,
        }


def http_date(time: float) -> str:
    """Unix seconds -> RFC 1123, as the service writes it; rounded down to seconds."""
    return format_datetime(datetime.fromtimestamp(math.floor(time), UTC), usegmt=True)
