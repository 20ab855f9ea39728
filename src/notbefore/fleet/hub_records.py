"""Decodes bytes from the hub into a ``Report``, a change that a VM reports, or a ``Beat``, a VM's
heartbeat. Pure.

Only the fields that the fleet needs are decoded.
"""

from collections import Counter
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from notbefore.core.change import APPROVAL_KINDS, LIFECYCLE_KINDS, LifecycleKind
from notbefore.core.cloud_event import CHANGE_TYPE, HEARTBEAT_TYPE
from notbefore.core.document import (
    MAX_DESCRIPTION,
    MAX_DURATION,
    MAX_ID,
    MAX_NAME,
    MAX_RESOURCES,
    MAX_WORD,
)
from notbefore.core.record import MAX_TAGS, Heartbeat, Record, tags_in
from notbefore.metrics.fleet import NO_DELAYS
from notbefore.metrics.totals import Histogram

MAX_RECORD_BYTES: Final = 1024 * 1024  # as many as a hub accepts by default

PoisonReason = Literal[
    "too_large", "not_json", "foreign", "newer", "wrong_shape", "failed", "too_many"
]

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
Word = Annotated[str, Meta(max_length=MAX_WORD)]
Kind = Annotated[str, Meta(min_length=1, max_length=MAX_WORD)]  # no agent leaves it empty
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Duration = Annotated[int, Meta(ge=0, le=MAX_DURATION)]  # seconds
Seconds = Annotated[float, Meta(ge=0, le=10_000 * 365 * 86_400.0)]  # a NotBefore may be in any year

Tags = tuple[tuple[str, str], ...]
"""Names in lower case with their values, sorted by name."""


class VmGroup(NamedTuple):
    """A scale set, or the VMs of a resource group that are in none; all names in one case."""

    group: str  # see ``Place.group``
    scale_set: str


class Place(NamedTuple):
    """Where a VM is, and its tags; for several VMs, what they have in common."""

    subscription: str = ""
    resource_group: str = ""
    region: str = ""
    scale_set: str = ""
    zone: str = ""
    tags: Tags = ()

    def shared(self, other: "Place") -> "Place":
        """Return what both have in common.

        Azure writes one name in several cases: of these, the first by order.
        """
        if self == other:
            return self
        return Place(
            subscription=_shared(self.subscription, other.subscription),
            resource_group=_shared(self.resource_group, other.resource_group),
            region=_shared(self.region, other.region),
            scale_set=_shared(self.scale_set, other.scale_set),
            zone=_shared(self.zone, other.zone),
            tags=tuple(tag for tag in self.tags if tag in other.tags),
        )

    def completed_by(self, other: "Place") -> "Place":
        """Return this place, or the other one if only that one has a region.

        A VM that IMDS has not told its region does not know its scale set, zone and tags either.
        """
        if not self.region and other.region and self.group == other.group:
            return other
        return self

    @property
    def group(self) -> str:
        """``SUBSCRIPTION/RESOURCE GROUP/`` in one case. With this prefix, a VM's name is unique.

        VMs see each other's events within a scale set or an availability set, which lies within one
        resource group. So the names in ``Resources`` belong to the group of the VM that reports
        them.
        """
        subscription = self.subscription.replace("/", "_")
        resource_group = self.resource_group.replace("/", "_")
        return f"{subscription}/{resource_group}/".casefold()

    @property
    def vm_group(self) -> VmGroup:
        """The scale set of a VM, else its resource group."""
        return VmGroup(self.group, self.scale_set.casefold())


def _shared(name: str, other: str) -> str:
    """Return a name that two VMs have in common, or nothing."""
    if name.casefold() != other.casefold():
        return ""
    return min(name, other)


@lru_cache(maxsize=16_384)
def one_place(place: Place) -> Place:
    """Return an equal place that all its VMs share, to save memory."""
    return place


def _written_names(kind: type[Struct]) -> dict[str, str]:
    return dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))


_WRITTEN: Final = {**_written_names(Heartbeat), **_written_names(Record)}
"""A field of a record or a heartbeat -> its name as it is written."""


class _Reporter(Struct, frozen=True, kw_only=True, rename=_WRITTEN.get):
    """The fields of a record about the VM that reports."""

    time: datetime
    location: Name = ""
    zone: Name = ""
    subscription_id: Name = ""
    resource_group: Name = ""
    scale_set: Name = ""
    vm_id: Name = ""
    vm_name: Name = ""
    tags: Annotated[Tags, Meta(max_length=MAX_TAGS)] = ()  # each is an attribute of its own

    @property
    def place(self) -> Place:
        """Where the VM is."""
        return one_place(
            Place(
                subscription=self.subscription_id,
                resource_group=self.resource_group,
                region=self.location,
                scale_set=self.scale_set,
                zone=self.zone,
                tags=self.tags,
            )
        )

    @property
    def vm(self) -> str:
        """The VM's name as in ``Resources``, in one case; its id if it has no name."""
        return (self.vm_name or self.vm_id or "unknown").casefold()


class Report(_Reporter, frozen=True, kw_only=True):
    """One change, as one VM reports it. Durations are seconds."""

    change_id: Id
    change: LifecycleKind
    reason: Word = ""
    event_id: Id
    event_type: Kind
    event_status: Kind
    event_source: Word | None = None
    scope: Word = "unknown"
    resources: Annotated[tuple[Name, ...], Meta(max_length=MAX_RESOURCES)] = ()
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION + 1)] | None = None
    first_seen: datetime
    not_before: datetime | None = None
    # as in ``Event``
    duration: Duration | None = field(default=None, name=_WRITTEN["expected_duration_seconds"])
    notice_seconds: Seconds | None = None
    interruption_seconds: Seconds | None = None
    exercise: bool = False
    fleet_vms: int | None = None  # only in a notification of `notbefore fleet`


class Beat(_Reporter, frozen=True, kw_only=True):
    """A heartbeat of a VM, with the EventIds that it lists."""

    listed: Annotated[tuple[Id, ...], Meta(max_length=MAX_RESOURCES)] = ()
    interval: Seconds = 300.0


class PoisonError(Exception):
    """A record that is not used, and why."""

    def __init__(self, reason: PoisonReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class PartitionFigures(Struct):
    """The counts since the start, over all partitions that this instance has had."""

    # by result: `news` has changed a story, `known` has not, `late` is about an event that is over,
    # `beat` is a heartbeat, `skipped` is of no use here, `poison` cannot be used
    records: Counter[str] = field(default_factory=Counter)
    poison: Counter[str] = field(default_factory=Counter)  # by reason
    # by part: hub, store, inventory, history, fold
    errors: Counter[str] = field(default_factory=Counter)
    azure_messages: Counter[str] = field(default_factory=Counter)  # by Azure's status, or `skipped`
    azure_delays: Histogram = NO_DELAYS
    # events, by who reported them first: azure, vm
    first_notices: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)  # events, by ``EndedBy``
    contradictions: int = 0  # events that Azure calls canceled, and whose start was seen
    missing: int = 0  # records that were gone before they were read
    # partition and reason of the unused records that were logged
    logged: set[tuple[str, str]] = set()

    def note_azure_delay(self, seconds: float) -> None:
        """Count one of Azure's messages that was ``seconds`` on its way."""
        self.azure_delays = self.azure_delays.plus(max(0.0, seconds))


class _Envelope(Struct):
    type: str
    data: msgspec.Raw


_envelopes: Final = msgspec.json.Decoder(_Envelope)
_changes: Final = msgspec.json.Decoder(Report)
_beats: Final = msgspec.json.Decoder(Beat)

_DECODERS: Final[dict[str, msgspec.json.Decoder[Report] | msgspec.json.Decoder[Beat] | None]] = {
    **dict.fromkeys(map(CHANGE_TYPE.format, LIFECYCLE_KINDS), _changes),
    **dict.fromkeys(map(CHANGE_TYPE.format, APPROVAL_KINDS)),  # an approval is no step of an event
    HEARTBEAT_TYPE: _beats,
}


def read(body: bytes) -> Report | Beat | None:
    """Decode a record of the hub; ``None`` if it is of no use, such as an approval.

    Raises ``PoisonError``.
    """
    if len(body) > MAX_RECORD_BYTES:
        raise PoisonError("too_large", f"{len(body)} bytes")
    try:
        return _decoded(_envelopes.decode(body))
    except msgspec.ValidationError as error:
        reason: PoisonReason = "foreign"
        if b"notbefore." in body[:2000]:
            reason = "wrong_shape"
        raise PoisonError(reason, str(error)) from None
    except (ValueError, RecursionError) as error:
        # UnicodeDecodeError and msgspec.DecodeError are ValueErrors
        raise PoisonError("not_json", str(error)) from None


def _decoded(envelope: _Envelope) -> Report | Beat | None:
    """Decode the record in an envelope.

    Raises ``PoisonError`` for an unknown type, and ``ValueError`` for wrong data.
    """
    kind = envelope.type
    if kind not in _DECODERS:
        reason: PoisonReason = "foreign"
        if kind.startswith("notbefore."):
            reason = "newer"
        raise PoisonError(reason, kind[:200])

    decoder = _DECODERS[kind]
    if decoder is None:
        return None
    record = decoder.decode(envelope.data)
    if isinstance(record, Report) and record.fleet_vms is not None:
        return None  # a fleet's own notification
    _check_times(record)

    tags = tags_in(bytes(envelope.data))
    if not tags:
        return record
    return msgspec.structs.replace(record, tags=tuple(sorted(tags.items())))


def _check_times(record: Report | Beat) -> None:
    """Raise ``msgspec.ValidationError`` for a time that is not in UTC: it cannot be compared."""
    times: list[datetime | None] = [record.time]
    if isinstance(record, Report):
        times += [record.first_seen, record.not_before]
    for time in times:
        if time is not None and time.tzinfo is not UTC:
            raise msgspec.ValidationError("expected times in UTC")
