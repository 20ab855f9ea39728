"""``View``: what the HTTP application asks of the agent."""

from datetime import datetime
from typing import Protocol

from msgspec import Struct

from notbefore.core.tracked import PendingView


class CheckResult(Struct, frozen=True):
    """The result of a health check, with its reasons."""

    ok: bool
    reasons: tuple[str, ...] = ()


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

    def page(self) -> bytes:
        """The page for people, as HTML."""
