"""Events, documents and moments for tests.

Everything has a default, so that a test names only the values that it is about.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import msgspec

from notbefore.core.change import Change
from notbefore.core.clock import Instant
from notbefore.core.document import Document, Event, parse
from notbefore.core.lifecycle import diff
from notbefore.core.tracked import Observation, Tracked
from notbefore.metrics.totals import Totals

T0 = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
ME = "WestNO_0"
PEER = "WestNO_1"
ID = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
FUTURE = "Fri, 01 Mar 2058 12:00:00 GMT"  # a NotBefore that does not pass while a test runs
STARTED = {"EventStatus": "Started", "NotBefore": ""}
# the resources of an event that affects ``ME`` in its first document, and no longer in its second
LEFT = ({"Resources": [ME, PEER]}, {"Resources": [PEER]})


def at(seconds: float) -> datetime:
    """Return the time so many seconds after ``T0``."""
    return T0 + timedelta(seconds=seconds)


def item(event_id: str = ID, **fields: Any) -> dict[str, Any]:
    """Return an event as Azure writes it."""
    return {
        "EventId": event_id,
        "EventStatus": "Scheduled",
        "EventType": "Freeze",
        "ResourceType": "VirtualMachine",
        "Resources": [ME],
        "NotBefore": "Sun, 01 Mar 2026 12:15:00 GMT",
        "Description": (
            "Virtual machine is being paused because of a memory-preserving Live Migration"
            " operation."
        ),
        "EventSource": "Platform",
        "DurationInSeconds": 5,
        **fields,
    }


def body(*items: Any, incarnation: int = 1) -> bytes:
    """Return a document as bytes."""
    return msgspec.json.encode({"DocumentIncarnation": incarnation, "Events": list(items)})


def listed(*event_ids: str) -> bytes:
    """Return a document of events with these ids, which do not start while a test runs."""
    items = [item(event_id, NotBefore=FUTURE) for event_id in event_ids]
    return body(*items, incarnation=len(event_ids))


def document(*items: Any, incarnation: int = 1) -> Document:
    """Return a parsed document."""
    return parse(body(*items, incarnation=incarnation))


def event(**fields: Any) -> Event:
    """Return a parsed event."""
    return document(item(**fields)).events[0]


def instant(seconds: float = 0.0, boot: str = "boot") -> Instant:
    """Return a moment at which all clocks agree."""
    return Instant(at(seconds), boot, seconds, at(seconds))


def observation(seconds: float = 0.0, **fields: Any) -> Observation:
    """Return an observation by ``ME`` one second after the previous one."""
    return Observation(**{"at": instant(seconds), "vm": ME, "silence": 1.0, **fields})


class Story:
    """A sequence of documents as one agent sees them.

    It keeps the tracked events, the changes and the totals.
    """

    def __init__(self) -> None:
        self.tracked = Tracked()
        self.totals = Totals()
        self.incarnation = 0
        self.changes: list[Change] = []

    def sees(self, seconds: float, *items: Any, by: Any = 1, **fields: Any) -> Self:
        """Let the agent see a document; ``by``: how much its DocumentIncarnation increases."""
        self.incarnation += by
        seen = document(*items, incarnation=self.incarnation)
        step = diff(self.tracked, seen, observation(seconds, **fields))
        self.tracked = step.tracked
        self.changes += step.changes
        for change in step.changes:
            self.totals = self.totals.plus(change)
        return self

    @property
    def kinds(self) -> list[str]:
        return [change.kind for change in self.changes]

    @property
    def last(self) -> Change:
        return self.changes[-1]


def last_change(
    *looks: dict[str, Any] | None, vm: str = ME, seconds: Sequence[float] = range(1, 9)
) -> Change:
    """Return the last change of an event that successive documents list with these fields.

    ``None``: the document does not list the event.
    """
    story = Story().sees(0, vm=vm)
    for second, fields in zip(seconds, looks, strict=False):
        items: list[dict[str, Any]] = []
        if fields is not None:
            items.append(item(**fields))
        story.sees(second, *items, by=0, vm=vm)
    return story.last
