"""The report of past events: how Azure treated the fleet, by type of event and place. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from notbefore.core.event_types import event_type_of
from notbefore.fleet.history import PastEvent

# the least share of the promised notice that keeps the promise: an agent may see an event up to a
# second late
KEPT_SHARE: Final = 0.9
COLUMNS: Final = (
    "event_type",
    "region",
    "subscription",
    "resource_group",
    "scale_set",
    "zone",
    "event_source",
)
"""What a report may be grouped by, besides ``tags.NAME``."""
USUAL: Final = ("event_type", "region")
"""What a report is grouped by, unless the user names something else."""

Row = dict[str, Any]
"""A row of a report: the columns that it is grouped by, and ``Figures``."""


class Figures(Struct, frozen=True, kw_only=True):
    """The figures of a row. Notice and interruption are per affected VM, in seconds."""

    events: int
    vms: int  # affected VMs, counted once for each event
    finished: int
    canceled: int
    unknown: int
    as_far_as_known: int  # not every VM has reported the end
    promised: float | None  # the notice that Azure promises; null for several types
    measured_notice: int  # VMs
    short_notice: int | None  # VMs with less than nine tenths of the promise
    notice_min: float | None
    notice_median: float | None
    notice_max: float | None
    measured_interruption: int  # VMs
    interruption_min: float | None
    interruption_median: float | None
    interruption_max: float | None
    azure_notice: int  # events whose notice is known from Azure's own messages, when they came
    azure_short_notice: int | None  # of these, events with less than nine tenths of the promise
    azure_notice_min: float | None
    azure_notice_median: float | None
    azure_notice_max: float | None
    known_by_azure: int  # events whose end Azure has reported
    known_by_vms: int  # events whose end VMs have reported


FIGURES: Final = Figures.__struct_fields__
"""The names of a row's figures."""


def report(past: Iterable[PastEvent], by: tuple[str, ...] = USUAL) -> list[Row]:
    """Return the rows, grouped by ``COLUMNS`` or ``tags.NAME``. Exercises are left out."""
    groups: dict[tuple[str, ...], list[PastEvent]] = {}
    for event in past:
        if event.exercise:
            continue
        key = tuple(_value(event, name) for name in by)
        groups.setdefault(key, []).append(event)

    rows: list[Row] = []
    for key, events in sorted(groups.items()):
        columns = dict(zip(by, key, strict=True))
        rows.append(columns | asdict(_figures_of(events)))
    return rows


def _figures_of(events: list[PastEvent]) -> Figures:
    notices: list[float] = []
    interruptions: list[float] = []
    for event in events:
        for measures in event.measured.values():
            if measures.notice is not None:
                notices.append(measures.notice)
            if measures.interruption is not None:
                interruptions.append(measures.interruption)

    promised = None
    short_notice = None
    promises = {_promised_notice(event.event_type) for event in events}
    if len(promises) == 1:  # several types have no common promise
        promised = promises.pop()
    if promised is not None:
        short_notice = sum(notice < KEPT_SHARE * promised for notice in notices)

    azure_notices = [event.azure_notice for event in events if event.azure_notice is not None]
    azure_short_notice = None
    if promised is not None:
        azure_short_notice = sum(notice < KEPT_SHARE * promised for notice in azure_notices)

    outcomes = Counter(event.outcome for event in events)
    known_by = Counter(event.ended_by for event in events)
    return Figures(
        events=len(events),
        vms=sum(len(event.vms) for event in events),
        finished=outcomes["finished"],
        canceled=outcomes["canceled"],
        unknown=outcomes["unknown"],
        as_far_as_known=sum(event.as_far_as_known for event in events),
        promised=promised,
        measured_notice=len(notices),
        short_notice=short_notice,
        **_spread("notice", notices),
        measured_interruption=len(interruptions),
        **_spread("interruption", interruptions),
        azure_notice=len(azure_notices),
        azure_short_notice=azure_short_notice,
        **_spread("azure_notice", azure_notices),
        known_by_azure=known_by["azure"] + known_by["both"],
        known_by_vms=known_by["vms"] + known_by["both"],
    )


def _promised_notice(event_type: str) -> float | None:
    """Return the seconds of notice that Azure promises; ``None`` for a type without a promise."""
    return event_type_of(event_type).promised_notice or None


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    """Return the smallest, the middle and the largest value; ``None`` if there are none."""
    if not values:
        return {f"{name}_min": None, f"{name}_median": None, f"{name}_max": None}
    ordered = sorted(values)
    return {
        f"{name}_min": ordered[0],
        f"{name}_median": ordered[(len(ordered) - 1) // 2],
        f"{name}_max": ordered[-1],
    }


def _value(event: PastEvent, name: str) -> str:
    """Return the value of a column, or of the tag of ``tags.NAME``."""
    if name.startswith("tags."):
        return event.tags.get(name.removeprefix("tags.").casefold(), "")
    return str(getattr(event, name) or "")
