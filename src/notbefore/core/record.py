"""``Record``: a change as flat data for log lines, OTLP, the page and notifications.

``Heartbeat``: the record of a VM without news. Their fields are typed; ``flat`` returns the
attributes as they are written. Attribute names are those of OpenTelemetry's semantic conventions
(``cloud.*``, ``host.*``, ``azure.*`` resource attributes); the other names begin with
``azure.scheduled_event.``. Unknown values are left out.
"""

from collections.abc import Iterable
from datetime import datetime
from itertools import islice
from typing import Any, Final, Self, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from notbefore.core.change import Approval, Change, StepProperties
from notbefore.core.text import escaped, natural, rfc3339

PREFIX: Final = "azure.scheduled_event."  # of the attributes that OpenTelemetry does not define
# the most records that an agent keeps in its history, and that one answer contains
HISTORY_RECORDS: Final = 10_000
# the start of an id of several events that `notbefore fleet` reports together
WAVE: Final = "wave-"
AZURE: Final = "azure"  # the cloud, and its kind of machine, with OpenTelemetry's names
AZURE_VM: Final = "azure.vm"
TAG: Final = "azure.tag."
"""The start of a tag's attribute name, as OpenTelemetry's Collector has it: `azure.tag.team`."""
_TAG_BYTES: Final = TAG.encode()
MAX_TAGS: Final = 10  # per record
MAX_TAG_NAME: Final = 512  # characters; this and the next one are Azure's own limits
MAX_TAG: Final = 256  # characters of a value
MAX_LISTED: Final = 100  # EventIds in a heartbeat
Value = str | int | float | bool | tuple[str, ...]
R = TypeVar("R", bound="BaseRecord")


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
    """Facts from the records of many VMs together, about one event or a wave of events."""

    fleet_events: int
    fleet_vms: int  # affected ones
    fleet_reported_by: int  # VMs that reported it
    fleet_under_way: int = 0  # events that have started
    fleet_over: int = 0  # events that are over
    # only if VMs of several groups are silent: see ``Silence``
    fleet_scale_sets: int | None = None
    fleet_resource_groups: int | None = None  # those of VMs without a scale set
    fleet_azure_status: str | None = None  # the last status that Azure itself has reported


class BaseRecord(Struct, frozen=True, kw_only=True):
    """The attributes of every record: the time, a sentence, the VM that reports it.

    The ``name`` of a field is that of the attribute.
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
        """Return the attributes as written: times as RFC 3339 in UTC, without unknown values."""
        values: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(datetime,))
        tags = values.pop(TAG)

        attributes: dict[str, Value] = {}
        for name, value in values.items():
            if isinstance(value, datetime):
                attributes[name] = rfc3339(value)
            elif value not in (None, ""):
                attributes[name] = value
        for name, value in tags.items():
            attributes[TAG + name] = value
        return attributes

    def line(self) -> bytes:
        """Return the attributes as one line of JSON, as it is stored."""
        return json_line(self.flat())

    @classmethod
    def read(cls, line: bytes) -> Self:
        """Read a stored line; unknown attributes are ignored. Raises ``msgspec.DecodeError``."""
        return replace(msgspec.json.decode(line, type=cls), tags=tags_in(line))


def tags_in(line: bytes) -> dict[str, str]:
    """Return the tags of a record, within the bounds. Raises ``msgspec.DecodeError``."""
    if _TAG_BYTES not in line:  # few records have tags: the others are not decoded again
        return {}
    values = msgspec.json.decode(line, type=dict[str, Any])
    names = [name for name in values if name.startswith(TAG)]
    return _bounded((name.removeprefix(TAG), values[name]) for name in names)


def _bounded(tags: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the tags within the bounds, names in lower case: Azure ignores their case."""
    texts = ((name, value) for name, value in tags if name and isinstance(value, str))
    bounded: dict[str, str] = {}
    for name, value in islice(texts, MAX_TAGS):
        bounded[name.casefold()[:MAX_TAG_NAME]] = value[:MAX_TAG]
    return bounded


def _attribute(name: str) -> str:
    return PREFIX + name


class Record(BaseRecord, StepProperties, frozen=True, kw_only=True, rename=_attribute):
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
    fleet_scale_sets: int | None = field(default=None, name=_attribute("fleet.scale_sets"))
    fleet_resource_groups: int | None = field(
        default=None, name=_attribute("fleet.resource_groups")
    )
    fleet_azure_status: str | None = field(default=None, name=_attribute("fleet.azure_status"))
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
    ) -> "Record":
        """Return the record of a change that was seen on ``vm``; ``None``: the VM is not known.

        ``body``: the change in a sentence. ``fleet``: what many VMs say about it together; ``vm``
        then has what these VMs have in common.
        """
        event = change.event
        record: Record = cls(
            time=change.time,
            event_name=_attribute(change.kind),
            body=body,
            change_id=change.id,
            change=change.kind,
            reason=change.reason,
            outcome=change.outcome,
            event_id=event.event_id,
            event_type=event.event_type,
            event_status=event.event_status,
            event_source=event.event_source,
            scope=change.scope,
            resource_type=event.resource_type,
            resources=event.resources,
            description=event.description or None,  # Azure writes "" where it has none
            incarnation=change.incarnation,
            first_seen=change.first_seen,
            not_before=change.not_before,
            previous_scope=change.previous_scope,
            exercise=exercise or None,
            expected_duration_seconds=event.duration,
            over_since=change.over_since,
        )
        record = _with_durations(record, change)
        if change.previous is not None and change.not_before_changed:
            record = replace(record, previous_not_before=change.previous.not_before)
        if event.resources_cut:
            record = replace(record, truncated=("resources",))
        if vm is not None:
            record = _with_vm(record, vm)
        if change.approval is not None:
            record = _with_approval(record, change.approval)
        if fleet is not None:
            record = _with_fleet_facts(record, fleet)
        return record

    @property
    def names(self) -> tuple[str, ...]:
        """The affected VMs in the order in which people read them.

        A wave of several events has them in its own order; those of one event are in natural order.
        """
        is_wave = self.fleet_events is not None and self.fleet_events > 1
        if is_wave:
            return self.resources
        return tuple(sorted(self.resources, key=natural))

    @property
    def of_one_vm(self) -> bool:
        """Whether the event affects a single VM."""
        return len(self.resources) == 1 and self.fleet_vms in (None, 1)

    @property
    def has_begun(self) -> bool:
        """Whether some of a wave's events have started or are over, and others have not."""
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
        if self.fleet_vms is not None:
            return self
        vm_name = self.vm_name or ""
        affected = [name.casefold() for name in self.resources]
        if affected == [vm_name.casefold()]:
            return self
        return replace(
            self,
            zone=None,
            resource_id=None,
            vm_id=None,
            vm_name=None,
            vm_size=None,
            tags={},
            scope="self",
            previous_scope=None,
            notice_seconds=None,
            scheduled_seconds=None,
            started_seconds=None,
            interruption_seconds=None,
        )


def _with_vm(record: R, vm: Vm) -> R:
    """Return a record with the identity of the VM that reports it."""
    return replace(
        record,
        location=vm.location or None,
        zone=vm.zone or None,
        subscription_id=vm.subscription_id or None,
        resource_id=vm.resource_id or None,
        resource_group=vm.resource_group or None,
        scale_set=vm.scale_set or None,
        vm_id=vm.vm_id or None,
        vm_name=vm.name or None,
        vm_size=vm.vm_size or None,
        tags=_recorded_tags(vm),
    )


def _with_durations(record: Record, change: Change) -> Record:
    """Return a record with the durations that were measured for its change."""
    interruption = change.interruption
    if interruption is not None:
        interruption = round(interruption, 3)
    return replace(
        record,
        notice_seconds=change.notice_seconds,
        scheduled_seconds=change.scheduled_seconds,
        started_seconds=change.started_seconds,
        interruption_seconds=interruption,
    )


def _with_approval(record: Record, approval: Approval) -> Record:
    return replace(
        record,
        approval_rule=approval.approval_rule,
        approval_by=approval.approval_by,
        approval_detail=approval.approval_detail or None,
        approval_requests=approval.approval_requests,
        approval_reason=approval.approval_reason or None,
    )


def _with_fleet_facts(record: Record, facts: FleetFacts) -> Record:
    return replace(
        record,
        fleet_events=facts.fleet_events,
        fleet_vms=facts.fleet_vms,
        fleet_reported_by=facts.fleet_reported_by,
        fleet_under_way=facts.fleet_under_way,
        fleet_over=facts.fleet_over,
        fleet_scale_sets=facts.fleet_scale_sets,
        fleet_resource_groups=facts.fleet_resource_groups,
        fleet_azure_status=facts.fleet_azure_status,
    )


class Heartbeat(BaseRecord, frozen=True, kw_only=True):
    """A record at regular intervals, which distinguishes a VM without events from one without an
    agent.
    """

    pending: int = field(name="azure.scheduled_events.pending")  # how many events are listed
    # the EventIds of these events
    listed: tuple[str, ...] = field(default=(), name="azure.scheduled_events.listed")
    # seconds until the next heartbeat
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
        """Return the heartbeat at ``now``.

        ``vm``: ``None`` if the VM is not known. ``listed``: the EventIds of the listed events.
        ``interval`` in seconds.
        """
        heartbeat = cls(
            time=now,
            event_name="notbefore.heartbeat",
            body=body,
            pending=len(listed),
            listed=listed[:MAX_LISTED],
            interval=interval,
            service_version=version,
        )
        if vm is None:
            return heartbeat
        return _with_vm(heartbeat, vm)


def _recorded_tags(vm: Vm) -> dict[str, str]:
    """Return the tags of a VM that its records contain."""
    recorded = {name.casefold() for name in vm.record_tags}
    tags = vm.tags.items()
    return _bounded((name, value) for name, value in tags if name.casefold() in recorded)


def resource_attributes(vm: Vm) -> dict[str, str]:
    """Return the attributes that identify a VM, with OpenTelemetry's names.

    A value that IMDS does not give is empty.
    """
    attributes = {
        "cloud.provider": AZURE,
        "cloud.platform": AZURE_VM,
        "cloud.region": vm.location,
        "cloud.availability_zone": vm.zone,
        "cloud.account.id": vm.subscription_id,
        "cloud.resource_id": vm.resource_id,
        "azure.resource_group.name": vm.resource_group,
        "azure.vm.scaleset.name": vm.scale_set,
        "host.id": vm.vm_id,
        "host.name": vm.name,
        "host.type": vm.vm_size,
    }
    for name, value in _recorded_tags(vm).items():
        attributes[TAG + name] = value
    return attributes


_RESOURCE_ATTRIBUTES: Final = frozenset(resource_attributes(Vm()))


def is_of_resource(name: str) -> bool:
    """Whether an attribute identifies the VM that reports.

    In OpenTelemetry these are resource attributes.
    """
    return name in _RESOURCE_ATTRIBUTES or name.startswith(TAG)


def json_line(values: object) -> bytes:
    r"""Return JSON in UTF-8 on one line.

    Characters that are not safe to show are escaped as ``\uXXXX``.
    """
    return escaped(msgspec.json.encode(values).decode()).encode()
