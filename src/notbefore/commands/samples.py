"""Sample messages: each type of event, step by step. ``check-config`` renders templates for them.

They are made like real ones: documents of IMDS are compared, and the changes become deliveries.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec.structs import replace

from notbefore.core.change import BY_RULE, Approval, Change
from notbefore.core.clock import Instant
from notbefore.core.delivery import deliveries
from notbefore.core.document import PLATFORM, SCHEDULED, STARTED, Document, Event
from notbefore.core.event_types import EVENT_TYPES
from notbefore.core.lifecycle import diff
from notbefore.core.message import Message
from notbefore.core.record import Vm
from notbefore.core.routing import Route, Routing, Terms
from notbefore.core.tracked import Observation, Tracked
from notbefore.wording.records import record_of

TIME: Final = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
EVENT_ID: Final = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
SAMPLE_VM: Final = Vm(
    name="web_0",
    vm_id="02aab8a4-74ef-476e-8182-f6d2ba4166a6",
    resource_id=(
        "/subscriptions/8ecadfc9-d1a3-4ea4-b844-0d9f87e4d7c8/resourceGroups/shop/providers"
        "/Microsoft.Compute/virtualMachineScaleSets/web/virtualMachines/0"
    ),
    subscription_id="8ecadfc9-d1a3-4ea4-b844-0d9f87e4d7c8",
    resource_group="shop",
    location="westeurope",
    zone="2",
    scale_set="web",
    vm_size="Standard_D4s_v5",
)
APPROVED: Final = Approval(approval_rule="drained", approval_by=BY_RULE, approval_requests=1)


def changes_of(
    listings: Sequence[tuple[Event, ...]], start: datetime, vm: str, seconds: float = 1.0
) -> list[Change]:
    """Return the changes that a VM sees in documents that list these events.

    ``seconds``: between two documents.
    """
    changes: list[Change] = []
    tracked = Tracked()
    for number, events in enumerate(listings):
        time = start + timedelta(seconds=number * seconds)
        step = diff(tracked, Document(number, events), Observation(Instant(time, date=time), vm))
        tracked = step.tracked
        changes += step.changes
    return changes


def sample_messages(sink: str) -> Iterator[Message]:
    """Yield the messages about a sample event of each type, as a sink gets them."""
    for event_type in EVENT_TYPES:
        changes = _steps(event_type)
        if EVENT_TYPES[event_type].is_advice:
            changes = _steps_of_advice(event_type)
        for change in changes:
            message = _message(change, sink)
            yield message
            if change.kind == "announced":
                yield replace(message, kind="reminder")


def _steps(event_type: str) -> list[Change]:
    """Return the steps of an event that is approved, moved, started and finished.

    The last step is its cancellation, as if it had not started.
    """
    scheduled = _event(event_type)
    not_before = TIME + timedelta(seconds=EVENT_TYPES[event_type].promised_notice)
    scheduled = replace(scheduled, not_before=not_before)
    moved = replace(scheduled, not_before=not_before + timedelta(hours=1))
    started = replace(moved, event_status=STARTED, not_before=None)

    to_its_end = changes_of([(scheduled,), (moved,), (started,), ()], TIME, SAMPLE_VM.name, 10.0)
    canceled = changes_of([(scheduled,), ()], TIME, SAMPLE_VM.name, 10.0)
    approved = replace(to_its_end[0], kind="approved", reason="accepted", approval=APPROVED)
    return [to_its_end[0], approved, *to_its_end[1:], canceled[-1]]


def _steps_of_advice(event_type: str) -> list[Change]:
    return changes_of([(_event(event_type),), ()], TIME, SAMPLE_VM.name, 10.0)


def _event(event_type: str) -> Event:
    return Event(
        event_id=EVENT_ID,
        event_type=event_type,
        event_status=SCHEDULED,
        resources=(SAMPLE_VM.name,),
        resource_type="VirtualMachine",
        description="A sample, which `notbefore check-config --render` shows.",
        event_source=PLATFORM,
        duration=EVENT_TYPES[event_type].drill_interruption,
    )


def _message(change: Change, sink: str) -> Message:
    """Return the message about a change."""
    route = Route(sinks=(sink,), announce_by="all")
    line = record_of(change, SAMPLE_VM).line()
    delivery, *_ = deliveries(change, line, Routing((route,), {sink: Terms()}), SAMPLE_VM)
    return Message.of(delivery, change.time)
