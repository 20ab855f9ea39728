"""``parse`` reads an answer of IMDS: bounded, tolerant of additions, strict about shape. Pure.

Microsoft's "Scheduled Events for Linux/Windows VMs" explains the fields. A document that cannot be
read as a whole raises ``DocumentError``. A single event that cannot be read is left out, and a
``Flaw`` reports it. If only an optional field is unreadable, the event is kept and the field is
unknown: people have to be notified of a reboot even if its description is broken.
"""

import codecs
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from notbefore.core.event_types import event_type_of
from notbefore.core.text import sha256
from notbefore.errors import DocumentError

# of IMDS, unless the configuration or `imds.elsewhere` finds another one
ENDPOINT: Final = "http://169.254.169.254"
MAX_BYTES: Final = 1024 * 1024  # a document of 1,000 events is about 400 KB
MAX_EVENTS: Final = 10_000
MAX_ID: Final = 128  # characters; a GUID has 36
MAX_WORD: Final = 64  # EventType, EventStatus, EventSource, ResourceType
MAX_NAME: Final = 256  # a resource; Azure's own limit for a VM name is 64
MAX_RESOURCES: Final = 2_000  # a scale set has at most 1,000 VMs
MAX_DESCRIPTION: Final = 4_096
MAX_DURATION: Final = 10 * 365 * 86_400  # seconds
EMPTY_BODIES: Final = 3
"""So many empty bodies in a row mean that no event is listed: some nodes of IMDS answer so. Fewer
are failed polls."""

_UTC: Final = re.compile(r" (GMT|UTC|UT|Z)$")
_BEFORE_OFFSET: Final = re.compile(r" (?=[+-]\d)")
# from the first year of the service; .NET writes the years 1 and 9999 for "no time"
YEARS: Final = range(2016, 9999)

PLATFORM: Final = "Platform"
USER: Final = "User"
EVENT_SOURCES: Final = (PLATFORM, USER)
UNKNOWN_VALUES: Final = (None, "", -1)  # Azure's ways to write an unknown value
SCHEDULED: Final = "Scheduled"
STARTED: Final = "Started"


class Event(Struct, frozen=True):
    """One event as Azure described it. A field that was absent or unreadable is ``None``."""

    event_id: str  # as received; compare by ``key``
    event_type: str  # a name in ``EVENT_TYPES``, or one that Azure has added
    event_status: str  # Scheduled, Started, or what Azure adds
    resource_type: str | None = None
    resources: tuple[str, ...] = ()  # the VMs affected; may be empty
    not_before: datetime | None = None  # UTC; None once started, and for an advice
    description: str | None = None
    event_source: str | None = None  # Platform, User
    duration: int | None = None  # expected interruption in seconds; None = unknown (Azure's -1)
    resources_cut: bool = False  # resources or parts of names were cut off

    @property
    def is_advice(self) -> bool:
        """Whether it only advises: it affects no VM by itself."""
        return event_type_of(self.event_type).is_advice

    @property
    def has_started(self) -> bool:
        """Whether Azure affects the VMs now. An advice never starts, whatever its status."""
        return self.event_status == STARTED and not self.is_advice

    @property
    def key(self) -> str:
        """The EventId in one case: IMDS was seen to send upper case, Azure's examples have lower
        case.
        """
        return self.event_id.casefold()

    @property
    def vms(self) -> tuple[str, ...]:
        """The names in ``resources``, also in one case."""
        return tuple(name.casefold() for name in self.resources)

    def digest(self) -> str:
        """Return 32 hex digits over everything that Azure can change.

        They are equal on every VM that reads the same content. The order and the case of
        ``resources`` do not count.
        """
        content = (
            self.event_type,
            self.event_status,
            sorted(self.vms),
            self.not_before,
            self.description or None,  # a stored event may have ""
            self.event_source,
            self.duration,
        )
        return sha256(msgspec.json.encode(content))[:32]


class Flaw(Struct, frozen=True):
    """A part of a document that could not be read in full.

    ``reason``: ``not_an_event`` (not a readable JSON object), ``duplicate_event_id`` (a readable
    copy is kept, if possible a Started one, else the first one), or the field of ``Event`` that is
    missing, unreadable, or cut at a bound. The flaws of a dropped copy are not reported.
    """

    reason: str
    event_id: str | None = None  # None: not even the id could be read
    rejected: bool = False  # True: the event was left out; its last known state is kept

    @property
    def key(self) -> str:
        """The EventId as in ``Event.key``; empty if it could not be read."""
        return (self.event_id or "").casefold()


class Document(Struct, frozen=True):
    """The events that are listed now. ``flaws``: what could not be read."""

    incarnation: int
    events: tuple[Event, ...]
    flaws: tuple[Flaw, ...] = ()
    was_empty_body: bool = False  # IMDS sent no document; see ``EMPTY_BODIES``


class _Reading(Struct, frozen=True):
    """One item of ``Events``: the event if it is readable, and its flaws."""

    event_id: str | None  # None: not even the id could be read
    event: Event | None
    flaws: tuple[Flaw, ...]

    @property
    def key(self) -> str:
        """The EventId as in ``Event.key``; empty if it could not be read."""
        return (self.event_id or "").casefold()

    @property
    def rank(self) -> int:
        """Which copy of an event listed twice is kept: the one with the highest rank."""
        if self.event is None:
            return 0
        if self.event.event_status != STARTED:
            return 1
        return 2


class _RawDocument(Struct):
    """The fields of a document before its events are read, with Azure's names."""

    Events: list[Raw]
    # it is stored and shown as 64 bits
    DocumentIncarnation: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None


class _RawEvent(Struct):
    """The fields of an event before they are checked, with Azure's names."""

    EventId: Any = None
    EventType: Any = None
    EventStatus: Any = None
    ResourceType: Any = None
    Resources: Any = None
    NotBefore: Any = None
    Description: Any = None
    EventSource: Any = None
    DurationInSeconds: Any = None


# not strict: a DocumentIncarnation in quotes is accepted as a number
_document_decoder = msgspec.json.Decoder(_RawDocument, strict=False)
_event_decoder = msgspec.json.Decoder(_RawEvent)


def parse(body: bytes) -> Document:
    """Read an answer of ``/metadata/scheduledevents``.

    Raises ``DocumentError`` and nothing else.
    """
    document = _decoded(body)
    best_copies: dict[str, _Reading] = {}  # by EventId
    duplicates: list[Flaw] = []
    unnamed: list[Flaw] = []  # of events whose EventId cannot be read
    for raw in document.Events:
        reading = _read(raw)
        key = reading.key
        if not key:
            unnamed += reading.flaws
            continue
        best_so_far = best_copies.get(key)
        if best_so_far is not None:
            duplicates.append(Flaw("duplicate_event_id", reading.event_id))
        if best_so_far is None or reading.rank > best_so_far.rank:
            best_copies[key] = reading

    events = [copy.event for copy in best_copies.values() if copy.event is not None]
    flaws: list[Flaw] = []
    for copy in best_copies.values():
        flaws += copy.flaws
    # it is only shown: the content decides whether something has changed
    incarnation = document.DocumentIncarnation or 0
    return Document(incarnation, tuple(events), (*flaws, *unnamed, *duplicates))


def _decoded(body: bytes) -> _RawDocument:
    if not body.strip():
        raise DocumentError("empty")
    if len(body) > MAX_BYTES:
        raise DocumentError("too_large", f"{len(body)} bytes; at most {MAX_BYTES} are read")
    try:
        document = _document_decoder.decode(body.removeprefix(codecs.BOM_UTF8))
    except msgspec.ValidationError as error:
        raise DocumentError("wrong_shape", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DocumentError("not_json", str(error)) from None
    except RecursionError:
        raise DocumentError("too_deep") from None
    events = len(document.Events)
    if events > MAX_EVENTS:
        raise DocumentError("too_many_events", f"{events}; at most {MAX_EVENTS} are read")
    return document


def _read(raw: Raw) -> _Reading:
    try:
        item = _event_decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _rejected("not_an_event", None)
    event_id = _text(item.EventId, MAX_ID)
    event_type = _text(item.EventType, MAX_WORD)
    event_status = _text(item.EventStatus, MAX_WORD)
    if event_id is None:
        return _rejected("event_id", None)
    if event_type is None:
        return _rejected("event_type", event_id)
    if event_status is None:
        return _rejected("event_status", event_id)

    event = Event(
        event_id=event_id,
        event_type=event_type,
        event_status=event_status,
        resource_type=_text(item.ResourceType, MAX_WORD),
        resources=_names(item.Resources) or (),
        not_before=read_time(item.NotBefore),
        description=_description(item.Description),
        event_source=_text(item.EventSource, MAX_WORD),
        duration=_seconds(item.DurationInSeconds),
        resources_cut=_has_cut_names(item.Resources),
    )
    flaws = _flaws_of(item, event)
    if event.is_advice:
        # it has no impact on the VMs, so these mean nothing
        event = replace(event, not_before=None, duration=None)
    return _Reading(event_id, event, flaws)


def _flaws_of(item: _RawEvent, event: Event) -> tuple[Flaw, ...]:
    """Return the flaws of an event: its fields that could not be read, then those that were cut."""
    # for each field that may be unknown: Azure's value, and what was read of it
    optional = {
        "resource_type": (item.ResourceType, event.resource_type),
        "resources": (item.Resources, _names(item.Resources)),
        "not_before": (item.NotBefore, event.not_before),
        "description": (item.Description, event.description),
        "event_source": (item.EventSource, event.event_source),
        "duration": (item.DurationInSeconds, event.duration),
    }
    fields: list[str] = []
    for name, (raw_value, value) in optional.items():
        if value is None and raw_value not in UNKNOWN_VALUES:
            fields.append(name)
    if event.resources_cut:
        fields.append("resources")
    if event.description is not None and len(item.Description) > MAX_DESCRIPTION:
        fields.append("description")
    return tuple(Flaw(name, event.event_id) for name in fields)


def _rejected(reason: str, event_id: str | None) -> _Reading:
    return _Reading(event_id, None, (Flaw(reason, event_id, rejected=True),))


def _has_cut_names(names: Any) -> bool:
    """Whether a list of names, or a name in it, is longer than its bound."""
    if _names(names) is None:
        return False
    return len(names) > MAX_RESOURCES or any(len(name) > MAX_NAME for name in names)


def _description(value: object) -> str | None:
    """Return the text, cut at the bound; ``None`` if there is none: Azure also writes ``""``."""
    if not isinstance(value, str):
        return None
    return value[:MAX_DESCRIPTION] or None


def _text(value: object, most: int) -> str | None:
    """Return the text without blanks around it.

    ``None`` if the value is no text, is blank, or is longer than ``most``.
    """
    if not isinstance(value, str) or len(value) > most:
        return None
    return value.strip() or None


def _seconds(value: object) -> int | None:
    # a bool is an int in Python, but not a number of seconds
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if not 0 <= value <= MAX_DURATION:
        return None
    return value


def _names(value: object) -> tuple[str, ...] | None:
    """Return the names, cut at the bounds; ``None`` if the value is not a list of names."""
    if not isinstance(value, list):
        return None
    if not all(isinstance(name, str) and name.strip() for name in value):
        return None
    return tuple(_name(text) for text in value[:MAX_RESOURCES])


def _name(text: str) -> str:
    """Return the name of a VM, cut at the bound.

    api-version 2017-03-01 puts a `_` before it. Azure allows no name that begins with one.
    """
    return text[:MAX_NAME].removeprefix("_") or text


def read_time(text: object) -> datetime | None:
    """Read a time of RFC 1123 or ISO 8601, and return it in UTC; ``None`` for anything else.

    A time without a zone is UTC, as all of Azure's times. A wrong weekday is ignored: one was seen
    in the field. A date without a time of day is not accepted.
    """
    if not isinstance(text, str) or len(text) > MAX_WORD or ":" not in text:
        return None
    text = text.strip()
    try:
        if text[:4].isdigit():
            time = _read_iso_8601(text)
        else:
            time = parsedate_to_datetime(text)  # RFC 1123
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        time = time.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    if time.year not in YEARS:
        return None
    return time


def _read_iso_8601(text: str) -> datetime:
    """Read a time, which may have ``UTC`` or a blank before its offset; raises ``ValueError``."""
    without_utc = _UTC.sub("", text)
    return datetime.fromisoformat(_BEFORE_OFFSET.sub("", without_utc))
