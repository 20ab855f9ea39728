"""Bytes of the hub -> ``Report`` (a change that a VM reports) or ``Beat`` (its sign of life). Pure.

Only the fields that the fleet needs are decoded.
"""

from collections import Counter
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from notbefore.core.change import APPROVAL_KINDS, LIFECYCLE_KINDS, LifecycleKind
from notbefore.core.document import MAX_DESCRIPTION, MAX_DURATION, MAX_ID, MAX_NAME, MAX_RESOURCES, MAX_WORD
from notbefore.core.record import MAX_TAGS, TAG, TAG_BYTES, tags_in

MAX_BYTES: Final = 1024 * 1024  # of one record: what a hub accepts by default
_EVENT: Final = "azure.scheduled_event."

PoisonReason = Literal["too_large", "not_json", "foreign", "newer", "wrong_shape", "failed", "too_many"]

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
Word = Annotated[str, Meta(max_length=MAX_WORD)]
Kind = Annotated[str, Meta(min_length=1, max_length=MAX_WORD)]  # what no agent leaves empty
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Seconds = Annotated[float, Meta(ge=0, le=10_000 * 365 * 86_400.0)]  # a NotBefore has any year

Tags = tuple[tuple[str, str], ...]
"""Names in lower case, and values; by name."""


class Place(NamedTuple):
    """Where a VM is, and its tags, as far as the VMs of its group have them in common."""

    subscription: str = ""
    resource_group: str = ""
    region: str = ""
    scale_set: str = ""
    zone: str = ""
    tags: Tags = ()

    def shared(self, other: "Place") -> "Place":
        """What both have in common."""
        if self == other:
            return self
        texts = (one if one == two else "" for one, two in zip(self[:-1], other[:-1], strict=True))
        return Place._make((*texts, tuple(tag for tag in self.tags if tag in other.tags)))

    @property
    def group(self) -> str:
        """``SUBSCRIPTION/RESOURCE GROUP/`` in one case: before the name of a VM it makes one that no other VM has.

        VMs see each other's events within a scale set or an availability set, which lies within one resource group: so
        the names in ``Resources`` are of the group of the VM that reports them.
        """
        return f"{self.subscription.replace('/', '_')}/{self.resource_group.replace('/', '_')}/".casefold()


@lru_cache(maxsize=16_384)
def one_place(place: Place) -> Place:
    """The same place, once in memory for all its VMs."""
    return place


class _From(Struct, frozen=True, kw_only=True):
    """Who reports."""

    time: datetime
    region: Name = field(default="", name="cloud.region")
    zone: Name = field(default="", name="cloud.availability_zone")
    subscription: Name = field(default="", name="cloud.account.id")
    resource_group: Name = field(default="", name="azure.resource_group.name")
    scale_set: Name = field(default="", name="azure.vm.scaleset.name")
    vm_id: Name = field(default="", name="host.id")
    vm_name: Name = field(default="", name="host.name")
    tags: Annotated[Tags, Meta(max_length=MAX_TAGS)] = field(default=(), name=TAG)  # each is an attribute of its own

    @property
    def place(self) -> Place:
        """Where it is."""
        return one_place(
            Place(self.subscription, self.resource_group, self.region, self.scale_set, self.zone, self.tags)
        )

    @property
    def vm(self) -> str:
        """The VM that reports: the name that it has in ``Resources``, in one case; its id where it has no name."""
        return (self.vm_name or self.vm_id or "unknown").casefold()


_REPORTED: Final = {
    "event_id": "id",
    "event_type": "type",
    "event_status": "status",
    "event_source": "source",
    "duration": "expected_duration_seconds",
    "notice": "notice_seconds",
    "interruption": "interruption_seconds",
}


class Report(_From, frozen=True, kw_only=True, rename=lambda name: _EVENT + _REPORTED.get(name, name)):
    """One change, as one VM saw it. Durations are seconds."""

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
    duration: Annotated[int, Meta(ge=0, le=MAX_DURATION)] | None = None
    notice: Seconds | None = None
    interruption: Seconds | None = None
    exercise: bool = False


class Beat(_From, frozen=True, kw_only=True):
    """A sign of life of a VM, with the EventIds that are listed there."""

    listed: Annotated[tuple[Id, ...], Meta(max_length=MAX_RESOURCES)] = field(
        default=(), name="azure.scheduled_events.listed"
    )
    interval: Seconds = field(default=300.0, name="notbefore.heartbeat.interval_seconds")


class PoisonError(Exception):
    """A record that is not used, and why."""

    def __init__(self, reason: PoisonReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class PartitionFigures(Struct):
    """What was counted since the start, of all partitions that this instance has had.

    Of ``records``: news changed a story, what was known did not, of what is late the event is over.
    """

    records: Counter[str] = field(default_factory=Counter)  # news, known, late, beat, skipped (of no use here), poison
    poison: Counter[str] = field(default_factory=Counter)  # by reason
    errors: Counter[str] = field(default_factory=Counter)  # by part: hub, store, inventory, history, fold
    missing: int = 0  # records that were gone before they were read
    said: set[tuple[str, str]] = set()  # of which partition, and why, a record that is not used was logged


class _Envelope(Struct):
    type: str
    data: msgspec.Raw


_envelopes: Final = msgspec.json.Decoder(_Envelope)
_changes: Final = msgspec.json.Decoder(Report)
_beats: Final = msgspec.json.Decoder(Beat)

_CHANGE: Final = "notbefore.scheduled_event.{}.v1"
_DECODERS: Final[dict[str, msgspec.json.Decoder[Report] | msgspec.json.Decoder[Beat] | None]] = {
    **dict.fromkeys(map(_CHANGE.format, LIFECYCLE_KINDS), _changes),
    **dict.fromkeys(map(_CHANGE.format, APPROVAL_KINDS)),  # what a VM did is no step of an event
    "notbefore.heartbeat.v1": _beats,
}


def read(body: bytes) -> Report | Beat | None:
    """What a record of the hub says; ``None`` for what is of no use here, such as approvals. Raises ``PoisonError``."""
    if len(body) > MAX_BYTES:
        raise PoisonError("too_large", f"{len(body)} bytes")
    try:
        envelope = _envelopes.decode(body)
        if (kind := envelope.type) not in _DECODERS:
            raise PoisonError("newer" if kind.startswith("notbefore.") else "foreign", kind[:200])
        decoder = _DECODERS[kind]
        return None if decoder is None else _complete(decoder.decode(envelope.data), envelope.data, body)
    except msgspec.ValidationError as error:
        raise PoisonError("wrong_shape" if b"notbefore." in body[:2000] else "foreign", str(error)) from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and msgspec.DecodeError are ValueErrors
        raise PoisonError("not_json", str(error)) from None


def _complete(found: Report | Beat, data: msgspec.Raw, body: bytes) -> Report | Beat:
    """With its tags. Raises ``msgspec.ValidationError`` for a time that is not in UTC: others cannot be compared."""
    times = [found.time, *((found.first_seen, found.not_before) if isinstance(found, Report) else ())]
    if any(time is not None and time.tzinfo is not UTC for time in times):
        raise msgspec.ValidationError("expected times in UTC")
    if TAG_BYTES not in body:
        return found
    return msgspec.structs.replace(found, tags=tuple(sorted(tags_in(bytes(data)).items())))
