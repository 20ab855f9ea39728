"""``PageModel``: all that the page shows, read from what the JSON interface answers. Pure: a test needs no server.

An event's life is put together from its changes: the record of its end says most, the one of its start says when.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.listing import PendingEvent, PendingView
from notbefore.core.record import Vm
from notbefore.web.view import AgentStatus, CheckResult

MAX_PENDING: Final = 100  # events; all of them are in /api/v1/events
MAX_ENDED: Final = 50


def _key(field: str) -> str:
    return field if field == "time" else f"azure.scheduled_event.{field}"


class Recorded(Struct, frozen=True, rename=_key):
    """What the page needs of a record of ``/api/v1/history``."""

    time: datetime
    change: str
    id: str
    type: str
    scope: str
    first_seen: datetime
    outcome: str | None = None
    not_before: datetime | None = None
    notice_seconds: float | None = None
    started_seconds: float | None = None
    interruption_seconds: float | None = None


class _History(Struct, frozen=True):
    changes: tuple[Recorded, ...] = ()


class PastEvent(Struct, frozen=True):
    """An event from its first sight to its end; ``None`` is what was not observed, or is still to come."""

    event_id: str
    event_type: str
    scope: str
    first_seen: datetime
    not_before: datetime | None = None
    started: datetime | None = None
    gone: datetime | None = None
    outcome: str | None = None
    notice: float | None = None  # this and the next ones: seconds; None: its beginning was not seen
    started_for: float | None = None
    felt: float | None = None

    @property
    def anchor(self) -> datetime:
        """What its other times are measured from: NotBefore, or its start where there was no notice."""
        return self.not_before or self.started or self.first_seen


class PageModel(Struct, frozen=True):
    """The agent at one moment. ``pending`` is in the order of urgency, ``ended`` the newest first."""

    now: datetime
    ready: CheckResult
    condition: AgentStatus
    vm: Vm | None = None
    last_good: datetime | None = None
    unreadable: int = 0  # events that are listed and cannot be read
    pending: tuple[PendingEvent, ...] = ()
    ended: tuple[PastEvent, ...] = ()

    @classmethod
    def of(
        cls, now: datetime, listed: PendingView, history: bytes, ready: CheckResult, condition: AgentStatus
    ) -> "PageModel":
        """From what is listed and the body of ``/api/v1/history``."""
        return cls(
            now=now,
            ready=ready,
            condition=condition,
            vm=listed.vm,
            last_good=listed.last_successful_poll,
            unreadable=listed.unreadable,
            pending=tuple(sorted(listed.events, key=_urgency)),
            ended=tuple(ended(msgspec.json.decode(history, type=_History).changes)[:MAX_ENDED]),
        )

    @property
    def shown(self) -> tuple[PendingEvent, ...]:
        """The most urgent of what is pending."""
        return self.pending[:MAX_PENDING]


def _urgency(event: PendingEvent) -> tuple[bool, bool, float]:
    """This VM's before the others', what is started before what is to come, then by NotBefore."""
    due = event.not_before.timestamp() if event.not_before else float("inf")
    return (event.scope == "peer", event.started is None, due)


def past_event_of(event: PendingEvent) -> PastEvent:
    """A listed event, as far as it has come."""
    return PastEvent(
        event_id=event.event_id,
        event_type=event.event_type,
        scope=event.scope,
        first_seen=event.first_seen,
        not_before=event.not_before,
        started=event.started,
        notice=event.notice_seconds,
    )


def ended(changes: Iterable[Recorded]) -> list[PastEvent]:
    """The events that are gone, the newest first. An EventId that came back has several lives."""
    starts: dict[str, datetime] = {}
    lives: list[PastEvent] = []
    for change in changes:
        key = change.id.casefold()
        if change.change == "started":
            starts.setdefault(key, change.time)
        if change.change in OUTCOMES:
            lives.append(_ended(change, starts.pop(key, None)))
    return lives[::-1]


def _ended(change: Recorded, started: datetime | None) -> PastEvent:
    if started is None and change.started_seconds is not None:  # the record of its start is no longer kept
        started = change.time - timedelta(seconds=change.started_seconds)
    return PastEvent(
        event_id=change.id,
        event_type=change.type,
        scope=change.scope,
        first_seen=change.first_seen,
        not_before=change.not_before,
        started=started,
        gone=change.time,
        outcome=change.outcome or "unknown",
        notice=change.notice_seconds,
        started_for=change.started_seconds,
        felt=change.interruption_seconds,
    )
