"""``report``: how Azure treated a fleet, by type and region of its events, or otherwise. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple, Self

from msgspec import Struct

from notbefore.core.document import PROMISED
from notbefore.fleet.history import PastEvent

KEPT: Final = 0.9  # share of the promise from which on it counts as kept: an agent sees an event up to a second later
COLUMNS: Final = ("event_type", "region", "subscription", "resource_group", "scale_set", "zone", "event_source")
"""What a report may be made by, beside ``tags.NAME``."""
USUAL: Final = ("event_type", "region")


class Spread(NamedTuple):
    """Smallest, middle and greatest of a measurement over the VMs, in seconds."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """Of what was measured; ``None`` where nothing was."""
        found = sorted(value for value in values if value is not None)
        return cls(found[0], found[(len(found) - 1) // 2], found[-1]) if found else None


class ReportRow(Struct, frozen=True):
    """The events of one type in one place. Notice and interruption are of the affected VMs, in seconds."""

    key: tuple[str, ...]  # what the report is made by
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

    @classmethod
    def of(cls, key: tuple[str, ...], events: list[PastEvent]) -> "ReportRow":
        """The row of these events."""
        measured = [one for event in events for one in event.measured.values()]
        notices = [one.notice for one in measured if one.notice is not None]
        interruptions = [one.interruption for one in measured if one.interruption is not None]
        promises = {PROMISED.get(event.event_type) for event in events}
        promised = promises.pop() if len(promises) == 1 else None  # of several types there is no one promise
        outcomes = Counter(event.outcome for event in events)
        return cls(
            key=key,
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


def report(past: Iterable[PastEvent], by: tuple[str, ...] = USUAL) -> list[ReportRow]:
    """The rows, by ``COLUMNS`` or ``tags.NAME``. Exercises are left out."""
    groups: dict[tuple[str, ...], list[PastEvent]] = {}
    for one in past:
        if not one.exercise:
            groups.setdefault(tuple(_value(one, name) for name in by), []).append(one)
    return [ReportRow.of(key, group) for key, group in sorted(groups.items())]


def _value(event: PastEvent, name: str) -> str:
    tag = name.removeprefix("tags.")
    return str(getattr(event, name) or "") if tag == name else event.tags.get(tag.casefold(), "")
