"""``Record``: a change as flat data for log lines, OTLP, the page and notifications; and as a
CloudEvent.

Its fields are typed; ``flat`` returns the attributes as they are written. Attribute names are those
of OpenTelemetry's semantic conventions (``cloud.*``, ``host.*``, ``azure.*`` resource attributes);
the other names begin with ``azure.scheduled_event.``. Unknown values are left out.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import islice
from typing import Any, Final, Self, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from notbefore.core.change import Change, Step
from notbefore.core.text import escaped, natural, rfc3339

PREFIX: Final = "azure.scheduled_event."  # of the attributes that OpenTelemetry does not define
# the ``type`` of a CloudEvent, with the kind of change
CHANGE_TYPE: Final = "notbefore.scheduled_event.{}.v1"
HEARTBEAT_TYPE: Final = "notbefore.heartbeat.v1"
# that an agent keeps in its history; one answer has as many at most
HISTORY_RECORDS: Final = 10_000
Value = str | int | float | bool | tuple[str, ...]
Viewed = TypeVar("Viewed", bound=Struct)


def view(kind: type[Viewed], /, *sources: object, **fields: Any) -> Viewed:
    """Make a ``kind``: each field is from ``fields``, else from the first source that has it as
    anything but "".
    """
    for name in kind.__struct_fields__:
        if name not in fields:
            found = next(
                (getattr(one, name) for one in sources if getattr(one, name, "") != ""), ""
            )
            if found != "":
                fields[name] = found
    return kind(**fields)


class Vm(Struct, frozen=True):
    """The identity of this VM from ``/metadata/instance`` (``compute.*``).

    A field that IMDS does not give is empty.
    """

    name: str = ""
    vm_id: str = ""
    resource_id: str = ""
    subscription_id: str = ""
    resource_group: str = ""
    location: str = ""
    zone: str = ""
    scale_set: str = ""
    vm_size: str = ""
    tags: dict[str, str] = {}  # the user's own; routes match them
    record_tags: tuple[str, ...] = ()  # the names of the tags that its records have


class FleetFacts(Struct, frozen=True):
    """What the records of many VMs together say about one event, or about a wave of events."""

    fleet_events: int
    fleet_vms: int  # affected ones
    fleet_reported_by: int  # VMs that reported it
    fleet_under_way: int = 0  # events that have started
    fleet_over: int = 0  # events that are over


# the start of an id of several events that `notbefore fleet` reports together
WAVE: Final = "wave-"
AZURE: Final = "azure"  # the cloud, and its kind of machine, with OpenTelemetry's names
AZURE_VM: Final = "azure.vm"
TAG: Final = "azure.tag."
"""The start of a tag's attribute name, as OpenTelemetry's Collector has it: `azure.tag.team`."""
# a record without it is not decoded again for its tags: few have any
TAG_BYTES: Final = TAG.encode()
MAX_TAGS: Final = 10  # per record
MAX_TAG_NAME: Final = 512  # characters; this and the next one are Azure's own limits
MAX_TAG: Final = 256  # characters of a value
MAX_LISTED: Final = 100  # EventIds in a heartbeat
DATA_SCHEMA: Final = (
    "https://github.com/notbefore/notbefore/blob/main/src/notbefore/core/record.v1.json"
)
_NOT_IN_URI: Final = re.compile("[^A-Za-z0-9._~/-]")


class BaseRecord(Struct, frozen=True, kw_only=True):
    """The attributes of every record: the time, a sentence, the VM that reports it.

    ``name``: as it is written.
    """

    time: datetime
    event_name: str = field(name="event.name")
    body: str  # one sentence for people
    cloud_provider: str = field(default=AZURE, name="cloud.provider")
    cloud_platform: str = field(default=AZURE_VM, name="cloud.platform")
    location: str | None = field(default=None, name="cloud.region")
    zone: str | None = field(default=None, name="cloud.availability_zone")
    subscription_id: str | None = field(default=None, name="cloud.account.id")
    resource_id: str | None = field(default=None, name="cloud.resource_id")
    resource_group: str | None = field(default=None, name="azure.resource_group.name")
    scale_set: str | None = field(default=None, name="azure.vm.scaleset.name")
    vm_id: str | None = field(default=None, name="host.id")
    vm_name: str | None = field(default=None, name="host.name")
    vm_size: str | None = field(default=None, name="host.type")
    tags: dict[str, str] = field(default_factory=dict, name=TAG)  # each is an attribute of its own

    def flat(self) -> dict[str, Value]:
        """The attributes as they are written: times as RFC 3339 in UTC, without unknown values."""
        values: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(datetime,))
        tags = {TAG + name: value for name, value in values.pop(TAG).items()}
        found = {name: value for name, value in values.items() if value not in (None, "")}
        return {
            name: rfc3339(one) if isinstance(one, datetime) else one for name, one in found.items()
        } | tags

    def line(self) -> bytes:
        """The attributes as one line of JSON, as it is stored."""
        return json_line(self.flat())

    @classmethod
    def read(cls, line: bytes) -> Self:
        """Read a stored line; unknown attributes are ignored. Raises ``msgspec.DecodeError``."""
        return replace(msgspec.json.decode(line, type=cls), tags=tags_in(line))


def tags_in(line: bytes) -> dict[str, str]:
    """Return the tags of a record, within the bounds. Raises ``msgspec.DecodeError``."""
    if TAG_BYTES not in line:
        return {}
    values = msgspec.json.decode(line, type=dict[str, Any])
    return _bounded(
        (name[len(TAG) :], value) for name, value in values.items() if name.startswith(TAG)
    )


def _bounded(tags: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """The tags within the bounds, names in lower case: Azure compares the names without regard to
    case.
    """
    texts = ((name.casefold(), value) for name, value in tags if name and isinstance(value, str))
    return {name[:MAX_TAG_NAME]: value[:MAX_TAG] for name, value in islice(texts, MAX_TAGS)}


def _attribute(name: str) -> str:
    return PREFIX + name


class Record(BaseRecord, Step, frozen=True, kw_only=True, rename=_attribute):
    """One change. Durations are seconds.

    A field is plain text if a newer version may add values to it.
    """

    change_id: str
    change: str
    reason: str
    outcome: str | None = None
    event_id: str = field(name=_attribute("id"))
    event_type: str = field(name=_attribute("type"))
    event_status: str = field(name=_attribute("status"))
    event_source: str | None = field(default=None, name=_attribute("source"))
    scope: str
    resource_type: str | None = None
    resources: tuple[str, ...]
    description: str | None = None
    incarnation: int
    first_seen: datetime
    not_before: datetime | None = None
    previous_not_before: datetime | None = None
    previous_scope: str | None = None
    exercise: bool | None = None
    expected_duration_seconds: int | None = None
    notice_seconds: float | None = None
    scheduled_seconds: float | None = None
    started_seconds: float | None = None
    over_since: datetime | None = None
    interruption_seconds: float | None = None
    approval_rule: str | None = field(default=None, name=_attribute("approval.rule"))
    approval_by: str | None = field(default=None, name=_attribute("approval.by"))
    approval_detail: str | None = field(default=None, name=_attribute("approval.detail"))
    approval_requests: int | None = field(default=None, name=_attribute("approval.requests"))
    approval_reason: str | None = field(default=None, name=_attribute("approval.reason"))
    # only in the records of `notbefore fleet`
    fleet_events: int | None = field(default=None, name=_attribute("fleet.events"))
    fleet_vms: int | None = field(default=None, name=_attribute("fleet.vms"))
    fleet_reported_by: int | None = field(default=None, name=_attribute("fleet.reported_by"))
    fleet_under_way: int | None = field(default=None, name=_attribute("fleet.events_under_way"))
    fleet_over: int | None = field(default=None, name=_attribute("fleet.events_over"))
    # the attributes that were cut to fit, or not read in full
    truncated: tuple[str, ...] | None = field(default=None, name="notbefore.truncated")

    @classmethod
    def of(
        cls,
        change: Change,
        vm: Vm | None,
        body: str,
        *,
        exercise: bool = False,
        fleet: FleetFacts | None = None,
    ) -> Self:
        """The record of a change that was seen on ``vm`` (``None``: it is not known which VM this
        is).

        ``body``: the change in a sentence.

        ``fleet``: what many VMs say about it together; ``vm`` then has what these VMs have in
        common.
        """
        event, before, seconds = change.event, change.previous, change.interruption
        return view(
            cls,
            change,
            event,
            change.approval,
            fleet,
            vm,
            event_name=_attribute(change.kind),
            body=body,
            vm_name=(vm and vm.name) or None,
            tags=_recorded(vm),
            change_id=change.id,
            change=change.kind,
            previous_not_before=(
                before.not_before if before and before.not_before != event.not_before else None
            ),
            exercise=exercise or None,
            expected_duration_seconds=event.duration,
            interruption_seconds=round(seconds, 3) if seconds is not None else None,
            truncated=("resources",) if event.resources_cut else None,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The affected VMs as they are listed: for a wave of several events as it has them, else in
        natural order.
        """
        return (
            self.resources
            if (self.fleet_events or 0) > 1
            else tuple(sorted(self.resources, key=natural))
        )

    @property
    def of_one_vm(self) -> bool:
        """Whether the event affects a single VM."""
        return len(self.resources) == 1 and self.fleet_vms in (None, 1)

    @property
    def has_begun(self) -> bool:
        """Whether some of a wave's events have started or are over, and others are still
        to come.
        """
        return self.events_to_come > 0 and self.events_to_come != self.fleet_events

    @property
    def events_to_come(self) -> int:
        """Events of a wave that have neither started nor ended; 0 without a wave."""
        return (self.fleet_events or 0) - (self.fleet_under_way or 0) - (self.fleet_over or 0)

    @property
    def shared(self) -> Self:
        """The record without the fields that differ between the VMs that report it.

        Unchanged if the event affects only the reporting VM, or if it is a record of `notbefore
        fleet`.
        """
        alone = [name.casefold() for name in self.resources] == [(self.vm_name or "").casefold()]
        if self.fleet_vms is not None or alone:
            return self
        return replace(
            self, scope="self", previous_scope=None, tags={}, **dict.fromkeys(_OF_ONE_VM)
        )


_OF_ONE_VM: Final = (
    *("zone", "resource_id", "vm_id", "vm_name", "vm_size"),
    *("notice_seconds", "scheduled_seconds", "started_seconds", "interruption_seconds"),
)


class Heartbeat(BaseRecord, frozen=True, kw_only=True):
    """A record at regular intervals, which distinguishes a VM without events from one without an
    agent.
    """

    pending: int = field(name="azure.scheduled_events.pending")
    # their EventIds
    listed: tuple[str, ...] = field(default=(), name="azure.scheduled_events.listed")
    # until the next one
    interval: float | None = field(default=None, name="notbefore.heartbeat.interval_seconds")
    service_version: str = field(name="service.version")

    @classmethod
    def of(
        cls,
        vm: Vm | None,
        body: str,
        *,
        listed: tuple[str, ...],
        version: str,
        now: datetime,
        interval: float | None = None,
    ) -> Self:
        """The heartbeat at ``now``; ``listed``: the EventIds of the scheduled events.

        ``interval`` in seconds.
        """
        return view(
            cls,
            vm,
            time=now,
            event_name="notbefore.heartbeat",
            body=body,
            vm_name=(vm and vm.name) or None,
            tags=_recorded(vm),
            pending=len(listed),
            listed=listed[:MAX_LISTED],
            interval=interval,
            service_version=version,
        )


def _recorded(vm: Vm | None) -> dict[str, str]:
    """The tags of a VM that its records contain."""
    if vm is None or not vm.record_tags:
        return {}
    wanted = {name.casefold() for name in vm.record_tags}
    return _bounded((name, value) for name, value in vm.tags.items() if name.casefold() in wanted)


def identity(vm: Vm) -> dict[str, str]:
    """The attributes that identify a VM, with OpenTelemetry's names.

    A value that IMDS does not give is empty.
    """
    fields = zip(BaseRecord.__struct_fields__, BaseRecord.__struct_encode_fields__, strict=True)
    found = {
        name: getattr(vm, field) for field, name in fields if hasattr(vm, field) and name != TAG
    }
    known = {"cloud.provider": AZURE, "cloud.platform": AZURE_VM, "host.name": vm.name}
    return known | found | {TAG + name: value for name, value in _recorded(vm).items()}


_RESOURCE_ATTRIBUTES: Final = frozenset(identity(Vm()))


def is_of_resource(name: str) -> bool:
    """Whether an attribute identifies the VM that reports.

    In OpenTelemetry these are resource attributes.
    """
    return name in _RESOURCE_ATTRIBUTES or name.startswith(TAG)


def json_line(values: object) -> bytes:
    r"""JSON in UTF-8 on one line.

    Characters that are not safe to show are escaped as ``\uXXXX``.
    """
    return escaped(msgspec.json.encode(values).decode()).encode()


# ---- how a record is sent


def partition_key(record: BaseRecord, event_key: str) -> str:
    """Return the key of a record's partition in a stream: one for all records and heartbeats of a
    group of VMs.

    VMs see each other's events within a scale set or an availability set. IMDS names the scale set,
    but not the availability set, which always lies within one resource group. So the key is the
    scale set, else the resource group. If IMDS has not identified the VM, it is ``event_key``.
    """
    if record.subscription_id is None or record.resource_group is None:
        return event_key
    group = (
        record.subscription_id,
        record.resource_group,
        *((record.scale_set,) if record.scale_set else ()),
    )
    return "/".join(group).casefold()


def cloud_event(
    record: Record | Heartbeat, delivery_id: str, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a CloudEvents 1.0 envelope (JSON format) around ``data``.

    Its id is the change's or the heartbeat's.
    """
    change = record if isinstance(record, Record) else None
    source = record.resource_id or f"/{record.vm_name or 'unknown'}"
    return {
        "specversion": "1.0",
        "id": change.change_id if change else delivery_id,
        "source": _NOT_IN_URI.sub(
            "-", source
        ),  # a URI reference: the VM's resource id, else its name
        "type": CHANGE_TYPE.format(change.change) if change else HEARTBEAT_TYPE,
        **({"subject": change.event_id} if change and change.event_id else {}),
        "time": rfc3339(record.time),
        "datacontenttype": "application/json",
        **({"dataschema": DATA_SCHEMA} if change else {}),
        "data": data,
    }
