"""``View``: what can be looked at, as the HTTP application asks for it."""

from datetime import datetime
from typing import Protocol

from msgspec import Struct

from notbefore.metrics.outbox import OutboxView


class Verdict(Struct, frozen=True):
    """Yes or no, and why."""

    ok: bool
    reasons: tuple[str, ...] = ()


class Condition(Struct, frozen=True):
    """How the agent itself fares: what the page says beside the events."""

    version: str = ""
    endpoint: str = ""  # of IMDS
    trouble: str | None = None  # why the last answer of IMDS was no good
    state_file: str = ""
    degraded: str | None = None  # why the state is not written
    damaged_files: int = 0
    courier_running: bool = False
    sinks: dict[str, str] = {}  # those that are configured, with their kinds
    outbox: OutboxView = OutboxView()


class View(Protocol):
    """What can be looked at. Called from several threads; must not wait for anything outside."""

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The body and the content type that the ``Accept`` header asks for."""

    def health(self) -> Verdict:
        """Is the agent alive?"""

    def ready(self) -> Verdict:
        """Does it see what Azure says?"""

    def pending(self) -> bytes:
        """What is listed now, as JSON."""

    def history(self, since: datetime | None, limit: int) -> bytes:
        """The last changes, as JSON."""

    def condition(self) -> Condition:
        """How the agent itself fares."""
