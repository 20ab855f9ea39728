"""``Report``: how Azure treated a fleet over some time, by type and region of the events. Pure."""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from msgspec import Struct

from notbefore.core.document import PROMISED
from notbefore.core.record import Spread
from notbefore.fleet.history import PastEvent

KEPT: Final = 0.9  # share of the promise from which on it counts as kept: an agent sees an event up to a second later


class ReportRow(Struct, frozen=True):
    """The events of one type in one region. Notice and interruption are of the affected VMs, in seconds."""

    event_type: str
    region: str
    events: int
    vms: int  # affected, an event's each
    finished: int  # this and the next two: events, by their outcome
    canceled: int
    unknown: int
    as_far_as_known: int  # events of which not every VM said that they were over
    promised: float | None
    measured_notice: int  # VMs
    short_notice: int | None  # of them, VMs that had less than nine tenths of what is promised
    notice: Spread | None
    measured_interruption: int  # VMs
    interruption: Spread | None


class Report(Struct, frozen=True):
    """What became of the events that were over in this time."""

    since: datetime
    until: datetime
    events: tuple[PastEvent, ...]  # without exercises
    exercises: int
    rows: tuple[ReportRow, ...]  # by type and region

    @classmethod
    def of(cls, past: Iterable[PastEvent], since: datetime, until: datetime) -> "Report":
        """The report of these events."""
        past = list(past)
        events = tuple(one for one in past if not one.exercise)
        groups: dict[tuple[str, str], list[PastEvent]] = {}
        for one in events:
            groups.setdefault((one.event_type, one.region), []).append(one)
        rows = tuple(_row(*key, group) for key, group in sorted(groups.items()))
        return cls(since, until, events, len(past) - len(events), rows)


def _row(event_type: str, region: str, events: list[PastEvent]) -> ReportRow:
    measured = [one for event in events for one in event.measured]
    notices = [one.notice for one in measured if one.notice is not None]
    interruptions = [one.interruption for one in measured if one.interruption is not None]
    promised = PROMISED.get(event_type)
    outcomes = Counter(event.outcome for event in events)
    return ReportRow(
        event_type=event_type,
        region=region,
        events=len(events),
        vms=sum(len(event.vms) for event in events),
        finished=outcomes["finished"],
        canceled=outcomes["canceled"],
        unknown=outcomes["unknown"],
        as_far_as_known=sum(event.as_far_as_known for event in events),
        promised=promised,
        measured_notice=len(notices),
        short_notice=sum(one < KEPT * promised for one in notices) if promised is not None else None,
        notice=Spread.of(notices),
        measured_interruption=len(interruptions),
        interruption=Spread.of(interruptions),
    )
