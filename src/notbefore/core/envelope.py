"""How a record travels: its CloudEvents envelope, its partition, and smaller forms of one that is too large. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from notbefore.core.record import BaseRecord, Heartbeat, Record
from notbefore.core.sentence import rfc3339

MAX_RESOURCES_CUT: Final = 20  # names that stay when resources are cut
DATA_SCHEMA: Final = "https://github.com/notbefore/notbefore/blob/main/src/notbefore/core/record.v1.json"
_NOT_IN_URI: Final = re.compile("[^A-Za-z0-9._~/-]")


def partition_key(record: BaseRecord, event_key: str) -> str:
    """What has to meet in one partition of a stream: all that VMs of one group report, signs of life included.

    VMs see each other's events within a scale set or an availability set. IMDS names the scale set, and no
    availability set, but that one lies within one resource group. So the key is the scale set's, else the resource
    group's; the event's own, where IMDS has not said who the VM is.
    """
    if record.subscription_id is None or record.resource_group is None:
        return event_key
    group = (record.subscription_id, record.resource_group, *((record.scale_set,) if record.scale_set else ()))
    return "/".join(group).casefold()


def cut(record: Record) -> Record:
    """The record made smaller, with a mark that says so."""
    return replace(
        record,
        description=None,
        resources=record.resources[:MAX_RESOURCES_CUT],
        truncated=("description", "resources"),
    )


def cloud_event(record: Record | Heartbeat, delivery_id: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a CloudEvents 1.0 envelope (JSON format) around ``data``; the id is the change's."""
    change = record if isinstance(record, Record) else None
    source = record.resource_id or f"/{record.vm_name or 'unknown'}"
    return {
        "specversion": "1.0",
        "id": change.change_id if change else delivery_id,
        "source": _NOT_IN_URI.sub("-", source),  # a URI reference: the VM's resource id, or what is known of it
        "type": f"notbefore.scheduled_event.{change.change}.v1" if change else "notbefore.heartbeat.v1",
        **({"subject": change.event_id} if change and change.event_id else {}),
        "time": rfc3339(record.time),
        "datacontenttype": "application/json",
        **({"dataschema": DATA_SCHEMA} if change else {}),
        "data": data,
    }
