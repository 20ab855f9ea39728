"""``cloud_event``: a record as a CloudEvent, the form in which event hubs receive it. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Final

from notbefore.core.record import BaseRecord, Heartbeat, Record
from notbefore.core.text import rfc3339

# the ``type`` of a CloudEvent, with the kind of change
CHANGE_TYPE: Final = "notbefore.scheduled_event.{}.v1"
HEARTBEAT_TYPE: Final = "notbefore.heartbeat.v1"
DATA_SCHEMA: Final = (
    "https://github.com/notbefore/notbefore/blob/main/src/notbefore/core/record.v1.json"
)
_NOT_IN_URI: Final = re.compile("[^A-Za-z0-9._~/-]")


def cloud_event(
    record: Record | Heartbeat, delivery_id: str, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a CloudEvents 1.0 envelope (JSON format) around ``data``.

    Its id is that of the change. A heartbeat is no change, so it has the id of its delivery.
    """
    envelope = {
        "specversion": "1.0",
        "id": delivery_id,
        "source": _source(record),
        "type": HEARTBEAT_TYPE,
        "time": rfc3339(record.time),
        "datacontenttype": "application/json",
        "data": data,
    }
    if isinstance(record, Record):
        envelope["id"] = record.change_id
        envelope["type"] = CHANGE_TYPE.format(record.change)
        envelope["dataschema"] = DATA_SCHEMA
        if record.event_id:
            envelope["subject"] = record.event_id
    return envelope


def _source(record: BaseRecord) -> str:
    """Return a URI reference of the VM that reports: its resource id, else its name."""
    vm_name = record.vm_name or "unknown"
    source = record.resource_id or f"/{vm_name}"
    return _NOT_IN_URI.sub("-", source)


def partition_key(record: BaseRecord, event_key: str) -> str:
    """Return the key of a record's partition in a stream: one for all records and heartbeats of a
    group of VMs.

    VMs see each other's events within a scale set or an availability set. IMDS names the scale set,
    but not the availability set, which always lies within one resource group. So the key is the
    scale set, else the resource group. If IMDS has not identified the VM, it is ``event_key``.
    """
    if record.subscription_id is None or record.resource_group is None:
        return event_key
    key = f"{record.subscription_id}/{record.resource_group}"
    if record.scale_set:
        key = f"{key}/{record.scale_set}"
    return key.casefold()
