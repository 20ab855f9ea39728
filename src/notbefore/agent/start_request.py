"""The two requests of an approval: ``why_not_listed`` asks IMDS once more for the event, ``post`` asks it to start."""

from typing import Final

import msgspec
from msgspec import Struct

from notbefore.core.approval import ApprovalContext, Policy
from notbefore.core.document import parse
from notbefore.core.tracked import TrackedEvent
from notbefore.errors import DocumentError, ImdsError
from notbefore.imds.client import TIMEOUT, ImdsClient

CONFIRM_TIMEOUT: Final = 5.0  # seconds for the answer right before a request
SHORTEST: Final = 1.0  # seconds that a request has, however near NotBefore is
PREVIEW_VERSION: Final = "2017-03-01"  # needs the DocumentIncarnation as well


class ApprovalSettings(Struct, frozen=True):
    """What decides whether anything is sent, and where."""

    policy: Policy
    endpoint: str
    api_version: str
    allowed: bool  # --allow-approval
    conflict: str = ""  # why it is not certain which VM this is, in words

    @property
    def off(self) -> str:
        """Why nothing may be approved, in words; empty if it may."""
        return self.missing or self.conflict

    @property
    def missing(self) -> str:
        """Which of the two switches is off, in words; empty if both are on."""
        if not self.allowed:
            return "`notbefore run` was started without --allow-approval"
        return "" if self.policy.enabled else "approval.enabled is not true"

    @property
    def mode(self) -> str:
        """One of on, dry_run, off."""
        if self.off:
            return "off"
        return "dry_run" if self.policy.dry_run else "on"


def why_not_listed(client: ImdsClient, settings: ApprovalSettings, tracked: TrackedEvent) -> str:
    """Return why IMDS does not list the event exactly as it was decided on, in words; empty if it does.

    Raises ``ImdsError`` where there is no usable answer.
    """
    event = tracked.event
    answer = client.get(_path(settings), timeout=CONFIRM_TIMEOUT)
    try:
        document = parse(answer.body or b"", settings.api_version)
    except DocumentError as error:
        raise ImdsError("rejected", str(error)) from None
    if any(flaw.event_id is not None and flaw.event_id.casefold() == event.key for flaw in document.flaws):
        return "a part of it cannot be read now"
    same = any(one.key == event.key and one.digest() == event.digest() for one in document.events)
    return "" if same else "IMDS does not list it like this any more"


def post(client: ImdsClient, settings: ApprovalSettings, tracked: TrackedEvent, context: ApprovalContext) -> None:
    """Send one start request; raises ``ImdsError`` for everything but 200."""
    body: dict[str, object] = {"StartRequests": [{"EventId": tracked.event.event_id}]}
    if settings.api_version == PREVIEW_VERSION:
        body["DocumentIncarnation"] = context.incarnation
    left = tracked.seconds_to(context.now)
    timeout = TIMEOUT if left is None else max(SHORTEST, min(TIMEOUT, left))
    client.post(_path(settings), msgspec.json.encode(body), timeout=timeout)


def _path(settings: ApprovalSettings) -> str:
    return f"/metadata/scheduledevents?api-version={settings.api_version}"
