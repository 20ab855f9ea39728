"""``Change`` -> record: a flat mapping for log lines, OTLP and everything that is sent, and its one JSON line.

Attribute names follow OpenTelemetry's semantic conventions where they have one (``cloud.*``, ``host.*``,
``azure.*`` resource attributes); the rest stands under ``azure.scheduled_event.``. Unknown values are left out.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from notbefore.core.change import Approval, Change, ChangeKind

Value = str | int | float | bool | list[str]
Record = dict[str, Value]


class Vm(Struct, frozen=True):
    """Who this VM is, as ``/metadata/instance`` says (``compute.*``); empty where it does not say."""

    name: str = ""
    vm_id: str = ""
    resource_id: str = ""
    subscription_id: str = ""
    resource_group: str = ""
    location: str = ""
    zone: str = ""
    scale_set: str = ""
    placement_group_id: str = ""
    fault_domain: str = ""
    update_domain: str = ""
    vm_size: str = ""
    os_type: str = ""


def record(change: Change, vm: Vm | None) -> Record:
    """The change as flat data. Times are RFC 3339 in UTC, durations seconds."""
    event = change.event
    values: dict[str, Value | None] = {
        "time": rfc3339(change.time),
        "event.name": f"azure.scheduled_event.{change.kind}",
        "body": sentence(change),
        **(identity(vm) if vm is not None else {"cloud.provider": "azure"}),
        "azure.scheduled_event.change_id": change.id,
        "azure.scheduled_event.change": change.kind,
        "azure.scheduled_event.reason": change.reason,
        "azure.scheduled_event.outcome": change.outcome,
        "azure.scheduled_event.id": event.event_id,
        "azure.scheduled_event.type": event.event_type,
        "azure.scheduled_event.status": event.event_status,
        "azure.scheduled_event.source": event.event_source,
        "azure.scheduled_event.scope": change.scope,
        "azure.scheduled_event.resource_type": event.resource_type,
        "azure.scheduled_event.resources": list(event.resources),
        "azure.scheduled_event.description": event.description,
        "azure.scheduled_event.incarnation": change.incarnation,
        "azure.scheduled_event.first_seen": rfc3339(change.first_seen),
        "azure.scheduled_event.not_before": rfc3339(change.not_before) if change.not_before else None,
        "azure.scheduled_event.previous_not_before": _previous_not_before(change),
        "azure.scheduled_event.previous_scope": change.previous_scope,
        **_durations(change),
        **_approval(change.approval),
    }
    return {name: value for name, value in values.items() if value is not None}


def _approval(approval: Approval | None) -> dict[str, Value | None]:
    if approval is None:
        return {}
    return {
        "azure.scheduled_event.approval.rule": approval.rule,
        "azure.scheduled_event.approval.by": approval.by,
        "azure.scheduled_event.approval.detail": approval.detail or None,
        "azure.scheduled_event.approval.requests": approval.requests,
    }


def _previous_not_before(change: Change) -> str | None:
    before = change.previous.not_before if change.previous is not None else None
    return rfc3339(before) if before is not None and before != change.event.not_before else None


def _durations(change: Change) -> dict[str, Value | None]:
    felt = change.interruption
    return {
        "azure.scheduled_event.expected_duration_seconds": change.event.duration,
        "azure.scheduled_event.notice_seconds": change.notice_seconds,
        "azure.scheduled_event.scheduled_seconds": change.scheduled_seconds,
        "azure.scheduled_event.started_seconds": change.started_seconds,
        "azure.scheduled_event.interruption_seconds": round(felt.seconds, 3) if felt else None,
        "azure.scheduled_event.interruption_wall_seconds": round(felt.wall, 3) if felt else None,
        "azure.scheduled_event.interruption_monotonic_seconds": round(felt.monotonic, 3) if felt else None,
    }


def identity(vm: Vm) -> dict[str, Value | None]:
    """The attributes of a VM that OpenTelemetry has names for."""
    return {
        "cloud.provider": "azure",
        "cloud.platform": "azure.vm",
        "cloud.region": vm.location or None,
        "cloud.availability_zone": vm.zone or None,
        "cloud.account.id": vm.subscription_id or None,
        "cloud.resource_id": vm.resource_id or None,
        "azure.resource_group.name": vm.resource_group or None,
        "azure.vm.scaleset.name": vm.scale_set or None,
        "host.id": vm.vm_id or None,
        "host.name": vm.name or None,
        "host.type": vm.vm_size or None,
    }


RESOURCE_ATTRIBUTES: Final = frozenset(identity(Vm()))
"""What a record says of who reports it; in OpenTelemetry these stand at the resource."""


_OUTCOMES: Final = {"canceled": "canceled", "finished": "finished", "unknown": "gone, and how it ended was not seen"}


_APPROVALS: Final[dict[ChangeKind, str]] = {
    "approved": "approved: Azure may start it now, for all its resources",
    "approval_failed": "asked to be approved, without success",
    "approval_skipped": "not approved",
}


def sentence(change: Change) -> str:
    """The change in words, for people: what happens to whom, and when."""
    event = change.event
    whom = {"self": "this VM", "peer": "another VM", "unknown": "a VM of this group"}[change.scope]
    what = f"{event.event_type} of {whom}"
    if change.kind == "announced":
        when = f"not before {rfc3339(change.not_before)}" if change.not_before else "at a time not given"
        return f"{what} announced: {when}"
    if change.no_longer_affected:
        return f"{event.event_type} does not hit this VM any longer"
    if change.kind == "updated":
        return f"{what} changed"
    if change.approval is not None:
        return f"{what} {_APPROVALS[change.kind]} ({change.reason.replace('_', ' ')}, {change.approval.rule})"
    if change.kind == "started":
        return f"{what} started" + (" without notice" if change.notice_seconds == 0 else "")
    return f"{what} {_OUTCOMES[change.outcome or 'unknown']}"


def rfc3339(time: datetime) -> str:
    """UTC to the millisecond: 2022-04-11T22:26:58.000Z."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# control characters, line and paragraph separators, and the marks that turn the direction of text around: a record is
# one line whatever a description holds, and does not rearrange the terminal that shows it
_UNSAFE: Final = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")


def json_line(values: object) -> bytes:
    r"""JSON in UTF-8 on one line, whatever the texts hold; what is not safe to show is escaped as ``\uXXXX``."""
    text = msgspec.json.encode(values).decode()
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


_NOT_IN_URI: Final = re.compile("[^A-Za-z0-9._~/-]")


TRUNCATED: Final = "notbefore.truncated"  # what was cut away to fit
MAX_RESOURCES_CUT: Final = 20  # names that stay when resources are cut
DATA_SCHEMA: Final = "https://github.com/notbefore/notbefore/blob/main/src/notbefore/core/record.v1.json"


def cut(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The record made smaller, step by step, with a mark that says so."""
    prefix = "azure.scheduled_event."
    less = {name: value for name, value in record.items() if name != prefix + "description"}
    yield less | {TRUNCATED: ["description"]}
    resources = record.get(prefix + "resources", [])[:MAX_RESOURCES_CUT]
    yield less | {prefix + "resources": resources, TRUNCATED: ["description", "resources"]}


def cloud_event(values: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a CloudEvents 1.0 envelope (JSON format) around ``data``; the id is the change's."""
    event_id = values.get("azure.scheduled_event.id", "")
    change = values.get("azure.scheduled_event.change")  # none in a heartbeat
    source = str(values.get("cloud.resource_id") or f"/{values.get('host.name', 'unknown')}")
    return {
        "specversion": "1.0",
        "id": values.get("azure.scheduled_event.change_id") or data["notbefore.delivery.id"],
        "source": _NOT_IN_URI.sub("-", source),  # a URI reference: the VM's resource id, or what is known of it
        "type": f"notbefore.scheduled_event.{change}.v1" if change else "notbefore.heartbeat.v1",
        **({"subject": event_id} if event_id else {}),
        "time": values["time"],
        "datacontenttype": "application/json",
        **({"dataschema": DATA_SCHEMA} if change else {}),
        "data": data,
    }


def heartbeat(vm: Vm | None, pending: int, version: str, now: datetime) -> Record:
    """That this VM is watched: a silent one can be told from a quiet one."""
    values: dict[str, Value | None] = {
        "time": rfc3339(now),
        "event.name": "notbefore.heartbeat",
        "body": f"notbefore watches this VM; {pending} scheduled events are pending",
        **(identity(vm) if vm is not None else {"cloud.provider": "azure"}),
        "azure.scheduled_events.pending": pending,
        "service.version": version,
    }
    return {name: value for name, value in values.items() if value is not None}
