"""Records as agents send them to the fleet's hub, built without a server."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from notbefore.core.change import Change, ChangeKind, Outcome, Reason, change_id
from notbefore.core.cloud_event import cloud_event
from notbefore.core.document import Event
from notbefore.core.record import Heartbeat, Record, Vm, json_line
from notbefore.wording.records import record_of

OUTCOMES: dict[str, Outcome] = {"canceled": "canceled", "finished": "finished", "ended": "unknown"}


def vm(
    name: str, scale_set: str = "web", region: str = "westeurope", zone: str = "", **tags: str
) -> Vm:
    """Return a VM whose records include all of its tags."""
    return Vm(
        name=name,
        vm_id=f"id-{name}",
        subscription_id="sub",
        resource_group="rg",
        location=region,
        zone=zone,
        scale_set=scale_set,
        tags=tags,
        record_tags=tuple(tags),
    )


# event id -> the time of its first report in this test: all VMs see the same NotBefore
FIRST_REPORTED: dict[str, datetime] = {}


def report(
    reporter: Vm,
    kind: ChangeKind,
    event_id: str = "EVENT-1",
    *,
    at: datetime | None = None,
    resources: Sequence[str] | None = None,
    event_type: str = "Reboot",
    notice: float = 900.0,
    id: str | None = None,  # noqa: A002 - as in ``Change``
    reason: Reason = "first_seen_scheduled",
    first_seen: datetime | None = None,
    not_before: datetime | None = None,
    started_seconds: float | None = None,
    interruption: float | None = None,
) -> Record:
    """Return the record of a step as the agent of ``reporter`` writes it.

    By default the step happens now, and affects the reporter.
    """
    if not_before is None:
        not_before = (at or _first_reported(event_id)) + timedelta(seconds=notice)
    at = at or datetime.now(UTC)
    if resources is None:
        resources = (reporter.name,)
    has_started = kind in ("started", "finished")
    event = Event(
        event_id=event_id,
        event_type=event_type,
        event_status="Started" if has_started else "Scheduled",
        resource_type="VirtualMachine",
        resources=tuple(resources),
        not_before=None if has_started else not_before,
        event_source="Platform",
        duration=9,
    )
    content = event.digest() if kind == "updated" else ""
    change = Change(
        id=id or change_id(event.key, kind, content, 0),
        kind=kind,
        reason=reason,
        time=at,
        event=event,
        scope="self" if reporter.name in resources else "peer",
        incarnation=1,
        first_seen=first_seen or at,
        outcome=OUTCOMES.get(kind),
        not_before=not_before,
        notice_seconds=notice if kind == "announced" else None,
        started_seconds=started_seconds,
        interruption=interruption,
    )
    return record_of(change, reporter)


def _first_reported(event_id: str) -> datetime:
    """Return the time of an event's first report; now, if this is the first."""
    return FIRST_REPORTED.setdefault(event_id, datetime.now(UTC))


def body(record: Record | Heartbeat, number: int = 0) -> bytes:
    """Return a record as the sink ``event_hub`` sends it."""
    return json_line(cloud_event(record, f"delivery-{number}", record.flat()))
