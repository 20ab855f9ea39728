"""``Runtime``: the settings that the agent uses now, as one frozen value.

A part reads ``runtime.current`` once for each task and uses that value until the task ends. All
settings of a task therefore belong together, even if a reload replaces them in the middle of it.
"""

import threading
from typing import Any, Generic, TypeVar

from msgspec import Struct, structs

from notbefore.config.model import Config, Imds
from notbefore.imds.client import NEWEST

T = TypeVar("T", bound=Struct)


class Published(Generic[T]):
    """The newest version of a frozen value. Any thread may read or replace it."""

    def __init__(self, value: T) -> None:
        self._current = value
        self._lock = threading.Lock()

    @property
    def current(self) -> T:
        """The newest version."""
        return self._current

    def replace(self, **changes: Any) -> None:
        """Publish a copy of the newest version in which the named fields have other values."""
        with self._lock:  # else a thread could undo what another one has just replaced
            self._current = structs.replace(self._current, **changes)


class Runtime(Struct, frozen=True):
    """The settings that the agent uses now.

    The main thread replaces them at a reload. The polling replaces ``endpoint`` if it finds IMDS
    at another address, and ``answered_version`` if the endpoint does not know the newest one.
    """

    config: Config
    endpoint: str  # of IMDS: the configured one, or the one that the polling has found
    allow_approval: bool = False  # the option --allow-approval
    # the api-version that the endpoint has answered; empty if none was refused
    answered_version: str = ""

    @property
    def api_version(self) -> str:
        """The version of Scheduled Events that IMDS is asked for."""
        return version_to_ask(self.config.imds, self.answered_version)

    @property
    def approval_off(self) -> str:
        """Why no approval is sent, in words; empty if approvals are sent."""
        if not self.allow_approval:
            return "`notbefore run` was started without --allow-approval"
        if not self.config.approval.enabled:
            return "approval.enabled is not true"
        if self.config.approval.dry_run:
            return "approval.dry_run is true"
        return ""

    @property
    def approval_untouched(self) -> bool:
        """Whether neither of the two switches of approval is set, as by default."""
        return not (self.allow_approval or self.config.approval.enabled)

    @property
    def approval_dry_run(self) -> bool:
        """Whether approvals are recorded and not sent."""
        policy = self.config.approval
        return self.allow_approval and policy.enabled and policy.dry_run


def version_to_ask(imds: Imds, answered_version: str) -> str:
    """Return the configured api-version; for `auto` the one that was answered, else the newest."""
    if imds.api_version != "auto":
        return imds.api_version
    return answered_version or NEWEST
