"""``PageModel``: the values that the page shows. Pure, so a test needs no server."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

import msgspec
from msgspec import Struct

from notbefore.core.event_types import SEVERITIES
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.record import Record
from notbefore.core.routing import severity_of
from notbefore.core.tracked import PendingEvent, PendingView
from notbefore.metrics.totals import OutboxView
from notbefore.web.app import CheckResult
from notbefore.wording.page import summary
from notbefore.wording.phrases import REASONS

MAX_PENDING: Final = 100  # events; /api/v1/events has all of them
MAX_ENDED: Final = 10
# seconds after which a waiting delivery is a problem, as for the alert NotbeforeNotificationsStuck
STUCK: Final = 300.0


class TimelineEvent(Struct, frozen=True):
    """An event from its first sight to its end.

    A value is ``None`` if it was not observed, or is still to come.
    """

    event_id: str
    event_type: str
    scope: str
    first_seen: datetime
    not_before: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    outcome: str | None = None
    why: str = ""  # the reason for the outcome, in words
    notice_seconds: float | None = None
    started_seconds: float | None = None
    interruption_seconds: float | None = None  # measured on this VM

    @classmethod
    def of(cls, pending: PendingEvent) -> "TimelineEvent":
        """Return an event that has not ended."""
        return cls(
            event_id=pending.event_id,
            event_type=pending.event_type,
            scope=pending.scope,
            first_seen=pending.first_seen,
            not_before=pending.not_before,
            started=pending.started,
            notice_seconds=pending.notice_seconds,
        )

    @property
    def anchor(self) -> datetime:
        """The time that the timeline has in its middle: NotBefore, else the start, else the first
        sight.
        """
        return self.not_before or self.started or self.first_seen

    @property
    def key(self) -> str:
        """The identity of its row. An EventId alone is not enough: it may come back."""
        return f"{self.event_id} {self.first_seen.timestamp()}"


class PageModel(Struct, frozen=True):
    """The agent at one moment. ``ended``: the newest first."""

    now: datetime
    ready: CheckResult
    listed: PendingView = PendingView(None, None, None, 0, ())
    ended: tuple[TimelineEvent, ...] = ()
    history_problem: str = ""  # why ``ended`` may lack events, in words
    version: str = ""
    endpoint: str = ""  # of IMDS
    state_file: str = ""
    degraded: str | None = None  # why the state cannot be written
    kinds: dict[str, str] = {}  # of the configured sinks: name -> kind
    outbox: OutboxView = OutboxView()
    approval_off: str = ""  # why no approval is sent, in words; empty if approvals are sent
    approval_untouched: bool = False  # approval is off because the configuration is silent on it
    watching_since: datetime | None = None

    @property
    def pending(self) -> list[PendingEvent]:
        """The listed events: this VM's first, then by severity, then by the time that is left."""

        def rank(event: PendingEvent) -> tuple[bool, int]:
            severity = severity_of(
                event.event_type, event.seconds_to_not_before, event.expected_duration_seconds
            )
            return event.scope == "peer", SEVERITIES.index(severity)

        return sorted(self.listed.events, key=rank)

    @property
    def shown(self) -> list[PendingEvent]:
        """The most urgent of the pending events."""
        return self.pending[:MAX_PENDING]

    @property
    def summary(self) -> str:
        """The listed events in a sentence or two."""
        return summary(self.pending, self.listed, self.now, is_ready=self.ready.ok)

    @property
    def sinks(self) -> list[str]:
        """The configured sinks, then those that only the outbox has."""
        in_outbox = {sink for sink, _ in self.outbox.rows}
        in_outbox |= {sink for sink, _ in self.outbox.counts}
        return [*self.kinds, *sorted(in_outbox - self.kinds.keys())]

    def count(self, state: str) -> int:
        """Return the number of deliveries of all sinks in this state."""
        total = 0
        for (_, state_of_rows), count in self.outbox.rows.items():
            if state_of_rows == state:
                total += count
        return total

    def oldest(self, sink: str | None = None) -> float | None:
        """Return the seconds that the oldest pending delivery of a sink, or of all, has waited."""
        times: list[float] = []
        for (name, _), time in self.outbox.oldest.items():
            if sink is None or name == sink:
                times.append(time)
        if not times:
            return None
        return self.seconds_since(min(times))

    @property
    def deliveries_ok(self) -> bool | None:
        """Whether no delivery is dead or has waited too long.

        ``None`` without sinks and deliveries.
        """
        pending = self.count("pending")
        dead = self.count("dead")
        if not self.kinds and not pending and not dead:
            return None
        return not dead and (self.oldest() or 0.0) <= STUCK

    def seconds_since(self, timestamp: float) -> float:
        """Return the seconds from a Unix time until now, never less than 0."""
        return max(0.0, self.now.timestamp() - timestamp)


def newest_ended(history: Iterable[bytes]) -> tuple[TimelineEvent, ...]:
    """Return the last events that ended, the newest first. ``history``: records, oldest first.

    An EventId that comes back is another event.
    """
    changes = [msgspec.json.decode(record, type=Record) for record in history]
    ends = [change for change in changes if change.change in OUTCOMES]
    newest_first = reversed(ends[-MAX_ENDED:])
    return tuple(_ended(change) for change in newest_first)


def _ended(change: Record) -> TimelineEvent:
    started = None
    if change.started_seconds is not None:
        started = change.time - timedelta(seconds=change.started_seconds)
    return TimelineEvent(
        event_id=change.event_id,
        event_type=change.event_type,
        scope=change.scope,
        first_seen=change.first_seen,
        not_before=change.not_before,
        started=started,
        ended=change.time,
        outcome=change.outcome or "unknown",
        why=REASONS.get(change.reason, ""),
        notice_seconds=change.notice_seconds,
        started_seconds=change.started_seconds,
        interruption_seconds=change.interruption_seconds,
    )
