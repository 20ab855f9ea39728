"""``View``: what the HTTP application asks of the agent."""

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from msgspec import Struct

from notbefore.config.messages import Links
from notbefore.core.listing import PendingView
from notbefore.metrics.outbox import OutboxView


class CheckResult(Struct, frozen=True):
    """The result of a health check, with its reasons."""

    ok: bool
    reasons: tuple[str, ...] = ()


class AgentStatus(Struct, frozen=True):
    """The state of the agent itself, for its page."""

    version: str = ""
    endpoint: str = ""  # of IMDS
    state_file: str = ""
    degraded: str | None = None  # why the state cannot be written
    sinks: dict[str, str] = {}  # the configured ones: name -> kind
    outbox: OutboxView = OutboxView()
    approval_off: str = ""  # why nothing is approved, in words; empty if it is
    watching_since: datetime | None = None
    links: Links = Links()


class ProcessView(Protocol):
    """What every process shows. Its methods are called from several threads and never wait for the network."""

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The body and the content type for this ``Accept`` header."""

    def health(self) -> CheckResult:
        """Is the process alive?"""

    def ready(self) -> CheckResult:
        """Does it receive what it watches?"""


class View(ProcessView, Protocol):
    """What an agent shows."""

    def pending(self) -> PendingView:
        """The events that Azure lists now."""

    def history(self, since: datetime | None, limit: int) -> bytes:
        """The last ``limit`` changes since a time, as the JSON of ``/api/v1/history``."""

    def agent_status(self) -> AgentStatus:
        """The state of the agent itself."""


class FleetPages(ProcessView, Protocol):
    """What an instance of ``notbefore fleet`` shows."""

    def fleet(self, wanted: Mapping[str, str]) -> Struct:
        """The body of ``/api/v1/fleet/events``; ``wanted``: field -> value, of what is asked for."""

    def calendar(self, wanted: Mapping[str, str]) -> bytes:
        """The body of ``/api/v1/calendar.ics``."""

    def past(self, since: datetime | None) -> bytes:
        """The body of ``/api/v1/fleet/history``."""

    def page(self, wanted: Mapping[str, str]) -> bytes:
        """The page for people, as HTML."""
