"""Messages about scheduled events as Azure Event Grid delivers them."""

from datetime import datetime
from typing import Any, Final

import msgspec

SUBSCRIPTION: Final = "62d72a8a-5a42-4a28-a1cc-70a836ae7955"
EMITTED: Final = "Microsoft.ResourceNotifications.MaintenanceResources.ScheduledEventEmitted"
WRITTEN: Final = "microsoft.maintenance/scheduledevents/write"
COMPUTE: Final = "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.Compute/{}/{}"


def resource_id(
    kind: str = "virtualMachineScaleSets",
    name: str = "web",
    event_id: str = "EVENT-1",
    subscription: str = "sub",
    resource_group: str = "rg",
) -> str:
    """Return the id of a scheduled event."""
    compute = COMPUTE.format(subscription, resource_group, kind, name)
    return f"{compute}/providers/microsoft.maintenance/scheduledevents/{event_id}"


def gmt(time: datetime) -> str:
    """Return a NotBefore as Azure writes it."""
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT")


def message(
    status: str,
    event_id: str = "EVENT-1",
    *,
    at: datetime,
    not_before: datetime | None = None,
    resource: str | None = None,
    location: str = "eastus",
    **properties: Any,
) -> dict[str, Any]:
    """Return a message in the Event Grid schema."""
    resource = resource or resource_id(event_id=event_id)
    return {
        "id": event_id,
        "topic": "/subscriptions/sub",
        "subject": resource,
        "data": {
            "resourceInfo": {
                "id": resource,
                "name": event_id,
                "type": "microsoft.maintenance/scheduledEvents",
                "location": location,
                "properties": {
                    "EventId": event_id,
                    "EventType": "Reboot",
                    "EventStatus": status,
                    "EventSource": "Platform",
                    "NotBefore": gmt(not_before) if not_before is not None else "",
                    "Description": "As Azure words it.",
                    "DurationInSeconds": -1,
                    "ResourceType": "VirtualMachine",
                    "Resources": ["web_0"],
                    **properties,
                },
            },
            "apiVersion": "2024-07-01",
        },
        "eventType": EMITTED,
        "dataVersion": "3.0",
        "metadataVersion": "1",
        "eventTime": at.isoformat(),
    }


def as_cloud_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the Event Grid schema as CloudEvents 1.0."""
    return {
        "specversion": "1.0",
        "id": event["id"],
        "source": event["topic"],
        "subject": event["subject"],
        "type": event["eventType"],
        "time": event["eventTime"],
        "data": event["data"],
    }


def encoded(*messages: dict[str, Any]) -> bytes:
    """Return messages as one record of the hub: alone, or as an array."""
    if len(messages) == 1:
        return msgspec.json.encode(messages[0])
    return msgspec.json.encode(messages)
