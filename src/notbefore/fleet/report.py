"""``report``: how Azure treated a fleet, by type and region of its events, or otherwise. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from notbefore.core.document import PROMISED
from notbefore.fleet.history import PastEvent

KEPT: Final = 0.9  # share of the promise from which on it counts as kept: an agent sees an event up to a second later
COLUMNS: Final = ("event_type", "region", "subscription", "resource_group", "scale_set", "zone", "event_source")
"""What a report may be made by, beside ``tags.NAME``."""
USUAL: Final = ("event_type", "region")


Row = dict[str, Any]
"""The events of one type in one place. Notice and interruption are of the affected VMs, in seconds."""


def report(past: Iterable[PastEvent], by: tuple[str, ...] = USUAL) -> list[Row]:
    """The rows, by ``COLUMNS`` or ``tags.NAME``. Exercises are left out."""
    groups: dict[tuple[str, ...], list[PastEvent]] = {}
    for one in past:
        if not one.exercise:
            groups.setdefault(tuple(_value(one, name) for name in by), []).append(one)
    return [dict(zip(by, key, strict=True)) | _counted(group) for key, group in sorted(groups.items())]


def _counted(events: list[PastEvent]) -> Row:
    measured = [one for event in events for one in event.measured.values()]
    notices = [one.notice for one in measured if one.notice is not None]
    interruptions = [one.interruption for one in measured if one.interruption is not None]
    promises = {PROMISED.get(event.event_type) for event in events}
    promised = promises.pop() if len(promises) == 1 else None  # of several types there is no one promise
    outcomes = Counter(event.outcome for event in events)
    return {
        "events": len(events),
        "vms": sum(len(event.vms) for event in events),  # affected, an event's each
        "finished": outcomes["finished"],
        "canceled": outcomes["canceled"],
        "unknown": outcomes["unknown"],
        "as_far_as_known": sum(event.as_far_as_known for event in events),  # not every VM said that they were over
        "promised": promised,
        "measured_notice": len(notices),  # VMs
        "short_notice": sum(one < KEPT * promised for one in notices) if promised is not None else None,
        **_spread("notice", notices),
        "measured_interruption": len(interruptions),  # VMs
        **_spread("interruption", interruptions),
    }


def _spread(name: str, values: list[float]) -> Row:
    found = sorted(values)
    three = (found[0], found[(len(found) - 1) // 2], found[-1]) if found else (None, None, None)
    return dict(zip((f"{name}_min", f"{name}_median", f"{name}_max"), three, strict=True))


def _value(event: PastEvent, name: str) -> str:
    tag = name.removeprefix("tags.")
    return str(getattr(event, name) or "") if tag == name else event.tags.get(tag.casefold(), "")
