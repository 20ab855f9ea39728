"""``FleetApprover``: approves an event for an operator, from outside its VMs.

It approves only at an operator's request, one event at a time, and only while both switches are on:
the configuration and the option of the command. It refuses an event that has changed since the
operator saw it. A record says who approved it, and what Azure answered.
"""

import logging
import threading
from typing import Final

from notbefore.core.approval import ADVICE
from notbefore.core.change import OPERATOR, Approval, ApprovalKind, Change, change_id
from notbefore.core.event_types import event_type_of
from notbefore.core.record import WAVE
from notbefore.core.text import rfc3339
from notbefore.errors import NotBeforeError
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.keeper import Parts
from notbefore.fleet.maintenance import Acknowledgement, MaintenanceProvider, target_of
from notbefore.fleet.notification import Notification
from notbefore.fleet.open_events import OpenEvent
from notbefore.fleet.story import Standing, from_unix
from notbefore.fleet.wave import vm_of
from notbefore.process.control_socket import ControlReply, ControlRequest

UNNAMED: Final = "the event names no VM; to approve it anyway, add `--without-resources`"
NOT_ENABLED: Final = (
    "nothing is sent: `fleet.approval.enabled` is not true in the configuration; set it, and start"
    " the instance again"
)
NOT_ALLOWED: Final = (
    "nothing is sent: the instance was started without --allow-approval; start it with that option"
)

log = logging.getLogger("notbefore.fleet.approval")


class FleetApprover:
    """The approvals of one instance.

    ``provider``: ``None`` unless the configuration enables approvals. ``allowed``: whether the
    command's option permits them.
    """

    def __init__(
        self,
        provider: MaintenanceProvider | None,
        consumer: Consumer,
        parts: Parts,
        *,
        allowed: bool,
    ) -> None:
        self._provider = provider
        self._consumer = consumer
        self._parts = parts
        self._allowed = allowed
        self._lock = threading.Lock()  # one event after the other

    def answer(self, request: ControlRequest, user: str) -> ControlReply:
        """Show an event, or approve it as it was shown; may wait for Azure.

        Raises ``NotBeforeError`` if approvals are off, or if the event cannot be approved.
        """
        if self._provider is None:
            raise NotBeforeError(NOT_ENABLED)
        if not self._allowed:
            raise NotBeforeError(NOT_ALLOWED)
        with self._lock:
            open_event = self._event(request.event_id)
            if not request.content:
                event = open_event.pending
                return ControlReply(done=True, event=event, content=open_event.content)
            return self._approve(self._provider, open_event, request, user)

    def _event(self, event_id: str) -> OpenEvent:
        """Return the event that may be approved. Raises ``NotBeforeError``."""
        if event_id.casefold().startswith(WAVE):
            raise NotBeforeError("nothing is sent: this is a wave; approve its events one by one")
        events = self._consumer.open_events(event_id)
        if not events:
            raise NotBeforeError(
                f"no event {event_id} is open in the partitions that this instance reads: see"
                " `notbefore events --fleet`"
            )
        if len(events) > 1:
            raise NotBeforeError(
                "nothing is sent: several resource groups report this EventId; approve it on one of"
                " its VMs, with `notbefore approve`"
            )

        open_event = events[0]
        if event_type_of(open_event.event.event_type).is_advice:
            raise NotBeforeError(f"nothing is sent: {ADVICE}")
        if open_event.standing is not Standing.SCHEDULED:
            status = open_event.pending.event_status
            raise NotBeforeError(f"nothing is sent: it is {status}, no longer Scheduled")
        return open_event

    def _approve(
        self,
        provider: MaintenanceProvider,
        open_event: OpenEvent,
        request: ControlRequest,
        user: str,
    ) -> ControlReply:
        if request.content != open_event.content:
            words = "nothing was sent: the event has changed since it was shown; try again"
            return ControlReply(done=False, words=words)
        if not open_event.event.resources and not request.without_resources:
            raise NotBeforeError(f"nothing is sent: {UNNAMED}")

        event_id = open_event.event.event_id
        target = target_of(
            open_event.resource_id,
            open_event.place,
            open_event.event.resources,
        )
        # first: if this process ends meanwhile, the log says who asked for it
        log.warning("%s approves the %s %s", user, open_event.event.event_type, event_id)
        result = provider.acknowledge(target, event_id)
        self._record(open_event, result, request, user)
        is_accepted = result.reason == "accepted"
        words = "approved"
        if not is_accepted:
            words = f"not approved: {result.words}"
        log.warning("%s %s, %s: %s", open_event.event.event_type, event_id, user, words)
        return ControlReply(done=is_accepted, words=words)

    def _record(
        self,
        open_event: OpenEvent,
        result: Acknowledgement,
        request: ControlRequest,
        user: str,
    ) -> None:
        """Queue the notification of an approval or of its failure, and write its record."""
        now = from_unix(self._parts.clock.now())
        event = open_event.event
        kind: ApprovalKind = "approval_failed"
        if result.reason == "accepted":
            kind = "approved"
        change = Change(
            id=change_id(event.key, kind, f"{user} {rfc3339(now)}", 0),
            kind=kind,
            reason=result.reason,
            time=now,
            event=event,
            scope="self",  # it affects the fleet
            incarnation=0,
            first_seen=open_event.pending.first_seen,
            not_before=open_event.pending.not_before,
            ahead_seconds=open_event.pending.seconds_to_not_before,
            approval=Approval(
                approval_rule=OPERATOR,
                approval_by=user,
                approval_detail=result.words,
                approval_requests=1,
                approval_reason=request.reason,
            ),
        )
        notification = Notification(
            change=change,
            vm=vm_of(open_event.place, event.resources),
            place=open_event.place,
            facts=open_event.facts,
            routed=open_event.routed,
        )
        line = self._parts.outbox.commit(open_event.partition, notification)
        self._parts.write_record(line + b"\n")
