"""``PageModel``: the values that the page shows. Pure: a test needs no server.

The timeline joins the changes of an event: the record of its end says most, the record of its start says when that was.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec import Struct

from notbefore.core.change import WORDS
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.listing import PendingEvent, PendingView
from notbefore.core.record import Record, Vm, view
from notbefore.core.routing import SEVERITIES, severity_of
from notbefore.web.view import AgentStatus, CheckResult

MAX_PENDING: Final = 100  # events; /api/v1/events has all of them
MAX_ENDED: Final = 10
DOCUMENTS: Final = "https://github.com/notbefore/notbefore/tree/main/docs"
MANY, SOON = 100, 60.0  # so many deliveries that wait so many seconds are trouble before that
STUCK: Final = 300.0  # seconds that a delivery may wait before somebody should look; the alert has the same limit


class _History(Struct, frozen=True):
    changes: tuple[Record, ...] = ()


class TimelineEvent(Struct, frozen=True):
    """An event from its first sight to its end; ``None`` is what was not observed, or is still to come."""

    event_id: str
    event_type: str
    scope: str
    first_seen: datetime
    not_before: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    outcome: str | None = None
    why: str = ""  # it is said to have ended so
    notice_seconds: float | None = None
    started_seconds: float | None = None
    interruption_seconds: float | None = None  # as measured

    @property
    def anchor(self) -> datetime:
        """The time that its other times are measured from: NotBefore, or its start where there was no notice."""
        return self.not_before or self.started or self.first_seen

    @property
    def key(self) -> str:
        """Identifies its row: an EventId may come back."""
        return f"{self.event_id} {self.first_seen.timestamp()}"


class SinkRow(Struct, frozen=True):
    """The deliveries of one sink. ``kind`` is ``None`` for a sink that is no longer configured."""

    name: str
    kind: str | None
    pending: int
    oldest: float | None  # seconds that its oldest pending delivery has waited
    dead: int
    delivered: int
    expired: int
    error: str  # of its newest delivery that waits or is dead, and has one


class PageModel(Struct, frozen=True):
    """The agent at one moment. ``pending`` is in the order of urgency, ``ended`` the newest first."""

    now: datetime
    ready: CheckResult
    agent: AgentStatus
    vm: Vm | None = None
    last_good: datetime | None = None  # the last good answer of IMDS
    unreadable: int = 0  # events that are listed and cannot be read
    pending: tuple[PendingEvent, ...] = ()
    ended: tuple[TimelineEvent, ...] = ()
    silence: str = ""  # why it is not known what is listed now

    @classmethod
    def of(
        cls, now: datetime, listed: PendingView, history: bytes, ready: CheckResult, agent: AgentStatus
    ) -> "PageModel":
        """From what is listed now and the body of ``/api/v1/history``."""
        return cls(
            now=now,
            ready=ready,
            agent=agent,
            vm=listed.vm,
            last_good=listed.last_successful_poll,
            unreadable=listed.unreadable,
            silence=listed.silence,
            pending=tuple(sorted(listed.events, key=_urgency)),
            ended=tuple(ended_events(msgspec.json.decode(history, type=_History).changes)[:MAX_ENDED]),
        )

    @property
    def shown(self) -> tuple[PendingEvent, ...]:
        """The most urgent of the pending events."""
        return self.pending[:MAX_PENDING]

    @property
    def links(self) -> list[tuple[str, str]]:
        """Where a reader may go on: names and addresses, without those that need an event's type."""
        name = quote(self.vm.name if self.vm is not None and self.vm.name else "", safe="")
        given = (
            ("Runbook", self.agent.links.runbook),
            ("Dashboard", self.agent.links.dashboard),
            ("Documents", DOCUMENTS),
        )
        found = [(text, address.replace("{vm}", name)) for text, address in given if address]
        return [(text, address) for text, address in found if "{event_type}" not in address]

    @property
    def sinks(self) -> list[SinkRow]:
        """The configured sinks, then those that only the outbox still knows."""
        outbox, kinds = self.agent.outbox, self.agent.sinks
        others = {sink for sink, _ in (*outbox.rows, *outbox.counts)} - kinds.keys()
        return [
            SinkRow(
                name=name,
                kind=kinds.get(name),
                pending=outbox.rows.get((name, "pending"), 0),
                oldest=self.seconds_since(oldest) if (oldest := outbox.oldest_of(name)) is not None else None,
                dead=outbox.rows.get((name, "dead"), 0),
                delivered=outbox.counts.get((name, "delivered"), 0),
                expired=outbox.counts.get((name, "expired"), 0),
                error=outbox.errors.get(name, ""),
            )
            for name in (*kinds, *sorted(others))
        ]

    @property
    def waiting(self) -> int:
        """Pending deliveries of all sinks."""
        return sum(row.pending for row in self.sinks)

    @property
    def dead(self) -> int:
        """Deliveries that were refused for good, of all sinks."""
        return sum(row.dead for row in self.sinks)

    @property
    def oldest(self) -> float | None:
        """Seconds that the oldest pending delivery has waited."""
        return max((row.oldest for row in self.sinks if row.oldest is not None), default=None)

    @property
    def deliveries_ok(self) -> bool | None:
        """``None`` where there is no sink: then there is nothing that could be good or bad."""
        if not (self.agent.sinks or self.waiting or self.dead):
            return None
        late = STUCK if self.waiting < MANY else SOON
        return not self.dead and (self.oldest or 0.0) <= late

    def seconds_since(self, timestamp: float) -> float:
        """Seconds from a Unix time until now, never less than 0."""
        return max(0.0, self.now.timestamp() - timestamp)


def _urgency(event: PendingEvent) -> tuple[bool, int, bool, float]:
    """This VM's before the others', then the most severe, then the started ones, then by NotBefore."""
    due = event.not_before.timestamp() if event.not_before else float("inf")
    severity = severity_of(event.event_type, event.seconds_to_not_before, event.expected_duration_seconds)
    return (event.scope == "peer", SEVERITIES.index(severity), event.started is None, due)


def ended_events(changes: Iterable[Record]) -> list[TimelineEvent]:
    """The events that have ended, the newest first. An EventId that came back is as many events."""
    starts: dict[str, datetime] = {}
    events: list[TimelineEvent] = []
    for change in changes:
        key = change.event_id.casefold()
        if change.change == "started":
            starts.setdefault(key, change.time)
        if change.change in OUTCOMES:
            events.append(_ended(change, starts.pop(key, None)))
    return events[::-1]


def _ended(change: Record, started: datetime | None) -> TimelineEvent:
    if started is None and change.started_seconds is not None:  # the record of its start is no longer kept
        started = change.time - timedelta(seconds=change.started_seconds)
    return view(
        TimelineEvent,
        change,
        started=started,
        ended=change.time,
        outcome=change.outcome or "unknown",
        why=WORDS.get(change.reason, ""),
    )
