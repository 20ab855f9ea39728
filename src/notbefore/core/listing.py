"""The events that are listed now, as ``/api/v1/events`` returns them to the page and the commands. Pure."""

from datetime import datetime

from msgspec import Struct

from notbefore.core.record import Vm, view
from notbefore.core.tracked import TrackedEvent


class PendingEvent(Struct, frozen=True):
    """One listed event in ``/api/v1/events``; durations in seconds."""

    event_id: str
    event_type: str
    event_status: str
    event_source: str | None
    scope: str
    resources: tuple[str, ...]
    description: str | None
    not_before: datetime | None
    seconds_to_not_before: float | None
    expected_duration_seconds: int | None
    first_seen: datetime
    notice_seconds: float | None
    started: datetime | None
    start_seen: bool  # it was seen to start; else it had started before the agent looked

    @classmethod
    def of(cls, tracked: TrackedEvent, now: datetime) -> "PendingEvent":
        """The event as it stands at ``now``."""
        return view(
            cls,
            tracked,
            tracked.event,
            seconds_to_not_before=tracked.seconds_to(now),
            expected_duration_seconds=tracked.event.duration,
            notice_seconds=tracked.notice,
        )


class PendingView(Struct, frozen=True):
    """The body of ``/api/v1/events``."""

    incarnation: int | None
    last_successful_poll: datetime | None
    vm: Vm | None
    unreadable: int  # listed events that are not among these: they cannot be read
    events: tuple[PendingEvent, ...]
    silence: str = ""  # why these are not known to be the events that are listed now, in words
