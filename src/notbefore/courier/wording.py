"""The texts of messages: what happens, when, to which VMs, and what to do. Pure.

Texts from Azure are put on one line, without control characters and marks that change the direction of text.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple
from urllib.parse import quote

from msgspec import Struct

from notbefore.config.sinks import Links, Messages
from notbefore.core.change import AS_FAR_AS_KNOWN, SILENT, WORDS
from notbefore.core.document import STARTED
from notbefore.core.duration import countdown, words
from notbefore.core.event_types import event_type_of
from notbefore.core.record import EXERCISE, WAVE, Record
from notbefore.core.text import one_line, some_of
from notbefore.courier import phrases
from notbefore.courier.message import Message
from notbefore.courier.phrases import KINDS, TYPES, UNKNOWN_TYPE

MAX_NAMES: Final = 20  # VMs that are listed by name
Facts = Iterator[tuple[str, str]]  # name and value
_MARKS: Final = {"updated": " (changed)", "reminder": " (reminder)"}


class Fact(NamedTuple):
    """One line of a message."""

    name: str
    value: str


class Text(Struct, frozen=True):
    """A message in words."""

    title: str
    summary: str
    delivery_id: str
    advice: str = ""  # what to do
    facts: tuple[Fact, ...] = ()
    links: tuple[Fact, ...] = ()  # name and address

    @property
    def plain(self) -> str:
        """Everything except title, links and the id, with one line per fact."""
        advice = f"What to do: {self.advice}" if self.advice else ""
        return "\n\n".join(filter(None, (self.summary, advice, _lines(self.facts))))

    @property
    def whole(self) -> str:
        """Everything except the title."""
        return f"{self.plain}\n\n{_lines([*self.links, Fact('Delivery', self.delivery_id)])}"


def _lines(facts: Iterable[Fact]) -> str:
    return "\n".join(f"{fact.name}: {fact.value}" for fact in facts)


def text_of(message: Message, settings: Messages) -> Text:
    """Return the message in words."""
    record = message.record
    silence = record.event_type == SILENT
    title, summary, advice = _silence(message) if silence else _story(message, settings.advice)
    facts = _facts_of_silence(message) if silence else _facts(message)
    if record.exercise:
        title, summary = EXERCISE + title, f"{phrases.EXERCISE_NOTE} {summary}".rstrip()
    elif record.reason == "corrected":
        title, summary = f"{title} (correction)", f"{phrases.CORRECTION} {summary}".rstrip()
    return Text(
        title=one_line(title),
        summary=summary,
        delivery_id=message.delivery_id,
        advice=advice,
        facts=tuple(Fact(name, text) for name, value in facts if (text := one_line(value))),
        links=tuple(_links(settings.links, record)),
    )


# ---- title, summary, and what to do


def subject(record: Record) -> str:
    """Return the affected VMs in the same words on every VM: ``web_0``, ``web_0 and 4 more``."""
    return record.many or some_of(record.names, 1) or "an unknown VM"


def effect(event_type: str, tense: str = "is", who: str = "The VM") -> str:
    """Return what an event of this type does: ``The VM is rebooted. ...``; empty for an unknown type."""
    return f"{who} {tense} {TYPES[event_type].effect}" if event_type in TYPES else ""


def _story(message: Message, own: dict[str, str]) -> tuple[str, str, str]:
    """Return title, summary and advice. ``own``: event type -> the user's advice, for events that are not over."""
    record, kind = message.record, message.kind
    event = f"{record.event_type} of {subject(record)}"
    vm = one_line(record.vm_name or "this VM")
    of_type = TYPES.get(record.event_type, UNKNOWN_TYPE)
    if record.no_longer_affected:
        return f"{record.event_type} no longer affects {vm}", f"Azure removed {vm} from the event.", phrases.UNDO
    if record.outcome == "finished":  # also of ``ended``, if a boot proves it
        known = record.reason != AS_FAR_AS_KNOWN
        summary = "The event is over. Nothing more will happen." if known else f"The event is {WORDS[record.reason]}."
        return f"{event} is over", summary, _filled(of_type.over, record)
    if kind in KINDS:
        said = KINDS[kind]
        why = f" The reason: {WORDS[record.reason]}." if kind == "ended" and record.reason in WORDS else ""
        summary = said.summary.format(vm=one_line(record.vm_name or "A VM")) + why
        return f"{event} {said.title}", summary, _filled(said.advice, record)
    affected = "The VM" if record.of_one_vm else "Each affected VM"
    if message.is_ahead:
        state, advice = _when(record.not_before, message.now), of_type.ahead
        if record.has_begun:  # between two events of a wave
            state, affected = f"{state}: {record.progress}", "Each VM that is still to come"
        summary = effect(record.event_type, "will be", affected)
    else:
        state, advice = _under_way(message), of_type.started
        if record.without_notice and event_type_of(record.event_type).reboots:
            advice = phrases.CRASHED + advice
        if record.events_to_come:
            advice += f" For the VMs that follow: {of_type.ahead}"
        summary = effect(record.event_type, "is being", affected)
        if record.progress and record.fleet_under_way != record.fleet_events:  # a wave: its events start in turn
            summary = effect(record.event_type, "are", "One after the other, the affected VMs")
    users = {name.casefold(): text for name, text in own.items()}.get(record.event_type.casefold())
    advice = users if users is not None else _filled(advice, record)
    return f"{event} {state}{_MARKS.get(kind, '')}", summary, advice


def _when(time: datetime | None, now: datetime) -> str:
    if time is None:
        return "at an unknown time"
    return ("was due " if time < now else "") + countdown(time, now)


def _under_way(message: Message) -> str:
    """Return the part of the title about an event that has started and is not over."""
    if message.kind == "updated":
        return ": ".join(filter(None, ("goes on", message.record.progress)))
    if message.record.events_to_come and message.record.progress:
        return f"has begun: {message.record.progress}"
    return "has started without notice" if message.record.without_notice else "has started"


def _filled(advice: str, record: Record) -> str:
    affected = "the VM" if record.of_one_vm else "each affected VM"
    return advice.format(
        the_vm=affected,
        The_vm=affected[0].upper() + affected[1:],
        name_it=f"name {affected}" if record.event_id.startswith(WAVE) else "give the EventId",  # Azure knows no wave
        event=one_line(record.event_id),
        vm=one_line(record.vm_name or "a VM"),
    )


def _silence(message: Message) -> tuple[str, str, str]:
    """As ``_story``, for VMs of a fleet that have become silent, or send heartbeats again: the record has the title."""
    record = message.record
    if message.over:
        return record.body, phrases.HEARD, ""
    why = one_line(record.description or phrases.SILENT)
    return f"{record.body}{_MARKS.get(message.kind, '')}", why, phrases.SILENT_ADVICE


# ---- the facts: those without a value are left out


def _facts(message: Message) -> Facts:
    record = message.record
    yield "Sent here because", message.note
    yield from _times(message)
    yield "Progress", record.progress
    yield "Affected VMs", _names(record)
    unaffected = message.kind == "canceled" or record.no_longer_affected or record.approval_rule is not None
    is_gone = event_type_of(record.event_type).vanishes
    if not (unaffected or is_gone):
        yield "Expected interruption", _seconds(record.expected_duration_seconds)
        yield from _measured(message)
    yield "Caused by", phrases.SOURCES.get(record.event_source or "", record.event_source or "unknown")
    yield "Azure's description", one_line(record.description or "") or "none"
    yield "Approval", ": ".join(filter(None, (record.approval_result, record.approval_detail, record.approval_reason)))
    yield "Place", _place(record)
    if record.fleet_vms is not None:  # those that all affected VMs have: they may name the owner
        yield "Tags", ", ".join(f"{name}: {value}" for name, value in record.tags.items())
    yield "Severity", message.shown_severity
    yield "Wave" if record.event_id.startswith(WAVE) else "EventId", record.event_id
    count = record.fleet_reported_by
    yield "Reported by", f"{count} VM{'' if count == 1 else 's'}" if count else record.vm_name or ""


def _facts_of_silence(message: Message) -> Facts:
    record = message.record
    yield "Since", clock(record.first_seen)
    if message.over:
        yield "Over since", clock(record.over_since or record.time)
    yield "VMs", _names(record)
    yield "Place", _place(record)
    yield "Severity", message.shown_severity


def _times(message: Message) -> Facts:
    """Yield the times; for an update also what changed, unless it is NotBefore."""
    record = message.record
    planned = clock(record.not_before) if record.not_before is not None else "unknown"
    moved = record.previous_not_before != record.not_before and not record.has_begun
    before = record.previous_not_before if moved else None
    if message.over:
        yield "Over since", clock(record.over_since or record.time)
        yield "Duration of the event", words(record.started_seconds) if record.started_seconds is not None else ""
    elif message.is_ahead:
        yield "Not before", planned + (f", {countdown(record.not_before, message.now)}" if record.not_before else "")
        yield "Previously", clock(before) if before is not None else ""
    elif record.event_status == STARTED or message.kind == "started":
        yield "Started" if message.kind == "started" else "Changed", clock(record.time)
        if record.events_to_come and record.not_before is not None:
            word = "not before" if record.not_before > message.now else "was due at"
            yield "Next", f"{word} {planned}, {countdown(record.not_before, message.now)}"
    else:
        yield "Not before", planned
    if message.kind == "updated" and before is None and not record.no_longer_affected:
        if record.previous_scope is not None:
            yield "What changed", f"{record.vm_name or 'this VM'} is affected now"
        elif not record.progress:
            yield "What changed", "the affected VMs, or what Azure says of the event"


def _measured(message: Message) -> Facts:
    record = message.record
    if record.fleet_vms is not None and record.interruption_seconds is not None:
        yield "Longest measured interruption", words(record.interruption_seconds)
    elif message.over and record.scope == "self" and record.vm_name is not None and record.fleet_vms is None:
        yield f"Measured interruption of {one_line(record.vm_name)}", _seconds(record.interruption_seconds)


def _seconds(value: float | None) -> str:
    return words(value) if value is not None else "unknown"


def _place(record: Record) -> str:
    """Return the place of the affected VMs; the zone is known only for this VM."""
    own = record.scope == "self" and record.of_one_vm
    place = {
        "resource group": record.resource_group,
        "scale set": record.scale_set,
        "zone": record.zone if own else None,
        "region": record.location,
        "subscription": record.subscription_id,
    }
    return ", ".join(f"{name} {value}" for name, value in place.items() if value)


def _names(record: Record) -> str:
    return some_of(record.names, MAX_NAMES) or "unknown (Azure names none)"


def clock(time: datetime) -> str:
    """``2026-03-01 12:15:00 UTC``."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _links(links: Links, record: Record) -> Iterator[Fact]:
    """Yield the links, except one that names the VM if its name is not known."""
    vm, event_type = (quote(text or "", safe="") for text in (record.vm_name, record.event_type))
    for name, link in (("Dashboard", links.dashboard), ("Runbook", links.runbook), ("Agent's page", links.page)):
        if link is not None and (vm or "{vm}" not in link):
            yield Fact(name, link.replace("{vm}", vm).replace("{event_type}", event_type))
