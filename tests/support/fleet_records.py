"""Records as the agents of VMs send them to the fleet's hub; unit tests need no server for them."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from notbefore.core.change import Change, ChangeKind, Outcome, change_id
from notbefore.core.cloud_event import cloud_event
from notbefore.core.document import Event
from notbefore.core.record import Heartbeat, Record, Vm, json_line
from notbefore.wording.records import record_of

OUTCOMES: dict[str, Outcome] = {"canceled": "canceled", "finished": "finished", "ended": "unknown"}


def vm(
    name: str, scale_set: str = "web", region: str = "westeurope", zone: str = "", **tags: str
) -> Vm:
    """Return a VM whose records have all of its tags."""
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


FIRST_SEEN: dict[str, datetime] = {}  # event id -> when it was reported first, within a minute


def report(
    who: Vm,
    kind: ChangeKind,
    event_id: str = "EVENT-1",
    *,
    at: datetime | None = None,
    resources: Sequence[str] | None = None,
    event_type: str = "Reboot",
    notice: float = 900.0,
    **changed: Any,
) -> Record:
    """Return the record of a step as the agent of a VM writes it."""
    now = datetime.now(UTC)
    first = FIRST_SEEN.get(event_id)
    if first is None or now - first > timedelta(seconds=60):
        first = FIRST_SEEN[event_id] = now
    seen = at or first  # all VMs see one NotBefore
    at = at or now
    resources = (who.name,) if resources is None else tuple(resources)
    not_before = changed.pop("not_before", None) or seen + timedelta(seconds=notice)
    event = Event(
        event_id=event_id,
        event_type=event_type,
        event_status="Started" if kind in ("started", "finished") else "Scheduled",
        resource_type="VirtualMachine",
        resources=resources,
        not_before=None if kind in ("started", "finished") else not_before,
        event_source="Platform",
        duration=9,
    )
    own = who.name in resources
    change = Change(
        id=changed.pop(
            "id", change_id(event.key, kind, event.digest() if kind == "updated" else "", 0)
        ),
        kind=kind,
        reason=changed.pop("reason", "first_seen_scheduled"),
        time=at,
        event=event,
        scope="self" if own else "peer",
        incarnation=1,
        first_seen=changed.pop("first_seen", at),
        outcome=OUTCOMES.get(kind),
        not_before=not_before,
        notice_seconds=notice if kind == "announced" else None,
        started_seconds=changed.pop("started_seconds", None),
        interruption=changed.pop("interruption", None),
    )
    assert not changed, changed
    return record_of(change, who)


def body(record: Record | Heartbeat, number: int = 0) -> bytes:
    """Return the record as the sink `event_hub` sends it."""
    return json_line(cloud_event(record, f"delivery-{number}", record.flat()))
