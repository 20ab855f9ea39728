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

MINUTE: Final = 60.0
RESCHEDULED_BY: Final = 10 * MINUTE  # how much later NotBefore is after `reschedule`
APPROVED_AFTER: Final = 2.0  # seconds from a start request to Started; real ones were seen at once and later
FORESEEN: Final = 15 * MINUTE  # the notice of a scenario that has none, when it is canceled or rescheduled


class Scenario(Struct, frozen=True):
    """The course of one event. Durations are seconds of real time."""

    name: str
    title: str
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
    reschedule: bool = False  # after a third of the notice NotBefore becomes later
    approved: float | None = None

    @property
    def notice(self) -> float:
        """Seconds of real time from announced to the first NotBefore.

        A failure without notice cannot be canceled or rescheduled: then it gets the notice of a foreseen one.
        """
        return self.scenario.notice or (FORESEEN if self.cancel or self.reschedule else 0.0)

    def not_before(self, now: float) -> float:
        """Return NotBefore as shown at ``now``; both in Unix seconds."""
        notice = self.notice
        if self.reschedule and now - self.begun >= notice / 3 / self.speed:
            notice += RESCHEDULED_BY
        return self.begun + notice / self.speed

    def starts(self, now: float) -> float:
        """Return when it starts, as known at ``now``; both in Unix seconds."""
        due = self.not_before(now)
        if self.approved is not None:
            return min(due, self.approved + APPROVED_AFTER / self.speed)
        return due

    def status(self, now: float) -> str | None:
        """Return ``Scheduled``, ``Started``, or ``None`` when it is gone."""
        starts = self.starts(now)
        # Azure does not cancel what is approved and about to start
        if self.cancel and self.approved is None and now >= self.begun + self.notice / 2 / self.speed:
            return None
        if now < starts:
            return "Scheduled"
        return "Started" if now < starts + self.scenario.started / self.speed else None

    def item(self, now: float) -> dict[str, Any] | None:
        """Return the event as an item of the newest document version, ``None`` when it is not listed."""
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
            "NotBefore": http_date(self.not_before(now)) if status == "Scheduled" else "",
            "Description": scenario.description,
            "EventSource": scenario.event_source,
            "DurationInSeconds": scenario.duration,
        }


def http_date(time: float) -> str:
    """Unix seconds -> RFC 1123, as the service writes it; rounded down to seconds."""
    return format_datetime(datetime.fromtimestamp(math.floor(time), UTC), usegmt=True)


_SINCE: Final = {"Description": "2019-04-01", "EventSource": "2019-08-01", "DurationInSeconds": "2020-07-01"}
_TYPE_SINCE: Final = {"Preempt": "2017-11-01", "Terminate": "2019-01-01"}


def as_of(item: dict[str, Any], api_version: str) -> dict[str, Any] | None:
    """Return an item as an older api-version shows it; ``None`` if its type did not exist yet."""
    if api_version < _TYPE_SINCE.get(item["EventType"], ""):
        return None
    return {key: value for key, value in item.items() if api_version >= _SINCE.get(key, "")}
