"""Decodes the messages that Event Grid delivers to the hub into ``AzureReport``s. Pure.

Event Grid delivers the scheduled events of VMs, scale sets and availability sets in its own schema
or as CloudEvents 1.0, one by one or as an array. It also delivers messages about other things,
which are skipped.
"""

import re
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from notbefore.core.document import (
    MAX_NAME,
    SCHEDULED,
    STARTED,
    Event,
    parse,
    read_time,
)
from notbefore.errors import DocumentError
from notbefore.fleet.hub_records import (
    Beat,
    Place,
    PoisonError,
    Report,
    one_place,
    read,
)

# the types of messages about scheduled events, in lower case: Microsoft's documents name both
EVENT_TYPES: Final = (
    "microsoft.resourcenotifications.maintenanceresources.scheduledeventemitted",
    "microsoft.maintenance/scheduledevents/write",
)
MAX_UNREADABLE: Final = 100  # elements of one array that are no messages; more are not counted
MICROSOFT: Final = "microsoft."  # the start of every type of Azure's messages, in lower case
VIRTUAL_MACHINE: Final = "virtualmachine"  # a ResourceType, in lower case

AzureStatus = Literal["Scheduled", "Started", "Completed", "Canceled"]
COMPLETED: Final = "Completed"
CANCELED: Final = "Canceled"
_STATUSES: Final[dict[str, AzureStatus]] = {
    "scheduled": "Scheduled",
    "started": "Started",
    "completed": "Completed",
    "canceled": "Canceled",
    "cancelled": "Canceled",
}
_LISTED_AS: Final[dict[AzureStatus, str]] = {
    "Scheduled": SCHEDULED,
    "Started": STARTED,
    "Completed": STARTED,
    "Canceled": SCHEDULED,
}
"""Azure's status -> the status that IMDS lists last, which does not know the other two."""

_RESOURCE: Final = re.compile(
    r"(/subscriptions/(?P<subscription>[^/]{1,256})"
    r"/resourcegroups/(?P<resource_group>[^/]{1,256})"
    r"/providers/microsoft\.compute"
    r"/(?P<type>virtualmachines|virtualmachinescalesets|availabilitysets)"
    r"/(?P<name>[^/]{1,256}))(?:/|$)",
    re.IGNORECASE,
)


class AzureReport(Struct, frozen=True, kw_only=True):
    """A status of an event, as Azure itself reports it."""

    status: AzureStatus
    event: Event  # as IMDS would list it, or did last
    place: Place  # without what Azure does not say: zone and tags
    time: datetime | None  # when Azure sent it; ``None``: it does not say
    resource_id: str  # of the VM, the scale set or the availability set


class AzureMessages(Struct, frozen=True):
    """The messages of one record of the hub."""

    reports: tuple[AzureReport, ...] = ()
    skipped: int = 0  # messages about other things
    unreadable: tuple[str, ...] = ()  # for each message that cannot be read: the reason


class _Message(Struct, rename="camel"):
    """The fields of a message in either schema."""

    event_type: str = ""  # of the Event Grid schema
    event_time: Any = None
    type: str = ""  # of CloudEvents
    time: Any = None
    subject: Any = None
    data: Raw = Raw(b"null")

    @property
    def kind(self) -> str:
        """The type of the message, in lower case."""
        return (self.event_type or self.type).casefold()


class _ResourceInfo(Struct):
    id: Any = None
    location: Any = None
    properties: Raw = Raw(b"null")


class _OperationalInfo(Struct, rename="camel"):
    resource_event_time: Any = None


class _Data(Struct, rename="camel"):
    resource_info: _ResourceInfo
    operational_info: _OperationalInfo | None = None


class _Properties(Struct):
    """The properties of a scheduled event that are not those of IMDS, or have other values."""

    EventStatus: Any = None
    ResourceType: Any = None


_arrays: Final = msgspec.json.Decoder(list[Raw])
_messages: Final = msgspec.json.Decoder(_Message)
_data: Final = msgspec.json.Decoder(_Data)
_properties: Final = msgspec.json.Decoder(_Properties)


def read_record(body: bytes) -> Report | Beat | AzureMessages | None:
    """Decode a record of the hub, of an agent or of Azure; ``None`` if it is of no use.

    Raises ``PoisonError``.
    """
    try:
        return read(body)  # most records are those of agents
    except PoisonError as poison:
        if poison.reason in ("foreign", "wrong_shape"):
            messages = read_messages(body)
            if messages is not None:
                return messages
        raise


def read_messages(body: bytes) -> AzureMessages | None:
    """Decode the messages of a record; ``None`` if none of them is one of Azure's."""
    try:
        parts = _arrays.decode(body)
    except (ValueError, RecursionError):
        parts = [Raw(body)]  # one message alone

    messages: list[_Message] = []
    unreadable: list[str] = []
    for part in parts:
        try:
            messages.append(_messages.decode(part))
        except (ValueError, RecursionError) as error:  # a DecodeError is a ValueError
            if len(unreadable) < MAX_UNREADABLE:
                unreadable.append(str(error))
    if not any(message.kind.startswith(MICROSOFT) for message in messages):
        return None

    reports: list[AzureReport] = []
    skipped = 0
    for message in messages:
        try:
            report = _report_of(message)
        except ValueError as error:
            unreadable.append(str(error))
            continue
        if report is None:
            skipped += 1
        else:
            reports.append(report)
    return AzureMessages(tuple(reports), skipped, tuple(unreadable))


def _report_of(message: _Message) -> AzureReport | None:
    """Return the report in a message; ``None`` if it is about something else.

    Raises ``ValueError`` for an event of VMs that cannot be read.
    """
    if message.kind not in EVENT_TYPES:
        return None
    try:
        data = _data.decode(message.data)
        properties = _properties.decode(data.resource_info.properties)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

    resource = _resource(data.resource_info.id) or _resource(message.subject)
    if resource is None or not _is_of_vms(properties.ResourceType):
        return None  # such as an upgrade of a cluster

    status = _STATUSES.get(str(properties.EventStatus).casefold())
    if status is None:
        return None  # one that Azure has added
    return AzureReport(
        status=status,
        event=_event(data.resource_info.properties, status, resource),
        place=_place(resource, data.resource_info.location),
        time=_time(message, data),
        resource_id=resource[1],
    )


def _resource(text: object) -> re.Match[str] | None:
    """Return the parts of the id of a scheduled event, or of the resource that it affects."""
    if not isinstance(text, str):
        return None
    return _RESOURCE.match(text)


def _is_of_vms(resource_type: object) -> bool:
    """Whether a ResourceType is that of VMs. An event without one is taken to affect VMs."""
    return resource_type is None or str(resource_type).casefold() == VIRTUAL_MACHINE


def _event(properties: Raw, status: AzureStatus, resource: re.Match[str]) -> Event:
    """Return the event, whose properties are written as in IMDS. Raises ``ValueError``."""
    try:
        document = parse(b'{"Events":[%b]}' % bytes(properties))
    except DocumentError as error:
        raise ValueError(str(error)) from None
    if not document.events:
        reasons = sorted({flaw.reason for flaw in document.flaws})
        raise ValueError(f"its event cannot be read: {', '.join(reasons)}")

    event = replace(document.events[0], event_status=_LISTED_AS[status])
    if not event.resources and resource["type"].casefold() == "virtualmachines":
        event = replace(event, resources=(resource["name"],))
    if status != SCHEDULED:
        event = replace(event, not_before=None)
    return event


def _place(resource: re.Match[str], location: object) -> Place:
    region = ""
    if isinstance(location, str) and len(location) <= MAX_NAME:
        region = location
    scale_set = ""
    if resource["type"].casefold() == "virtualmachinescalesets":
        scale_set = resource["name"]
    return one_place(
        Place(
            subscription=resource["subscription"],
            resource_group=resource["resource_group"],
            region=region,
            scale_set=scale_set,
        )
    )


def _time(message: _Message, data: _Data) -> datetime | None:
    """Return when Azure sent a message, in UTC."""
    texts = [message.event_time, message.time]
    if data.operational_info is not None:
        texts.append(data.operational_info.resource_event_time)
    for text in texts:
        time = read_time(text)
        if time is not None:
            return time.astimezone(UTC)
    return None
