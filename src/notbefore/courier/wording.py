"""The texts of messages: what happens, when, to whom, and what to do. Pure.

What comes from Azure is made one line, without control characters and marks that change the direction of text.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from msgspec import Struct

from notbefore.config.messages import Links, Messages
from notbefore.core.change import ENDINGS, MISSING, SILENT
from notbefore.core.document import REBOOTING, STARTED, VANISHING
from notbefore.core.duration import countdown, words
from notbefore.core.record import EXERCISE, Record
from notbefore.core.text import natural, one_line, some_of
from notbefore.courier import phrases
from notbefore.courier.message import Message
from notbefore.courier.phrases import KINDS, TYPES, UNKNOWN_TYPE, WAVE

MAX_NAMES: Final = 20  # VMs that are listed by name
_MARKS: Final = {"updated": " (changed)", "reminder": " (reminder)"}


class Fact(Struct, frozen=True):
    """One line of a message."""

    name: str
    value: str


class Text(Struct, frozen=True):
    """A message in words. ``time`` is NotBefore where it still lies ahead."""

    title: str
    summary: str
    delivery_id: str
    advice: str = ""  # what to do
    facts: tuple[Fact, ...] = ()
    links: tuple[Fact, ...] = ()  # name and address
    time: datetime | None = None

    @property
    def plain(self) -> str:
        """Everything but title and footer, with a line for each fact."""
        advice = f"What to do: {self.advice}" if self.advice else ""
        return "\n\n".join(filter(None, (self.summary, advice, _lines(self.facts))))

    @property
    def footer(self) -> str:
        """The links, and the id of the delivery."""
        return _lines([*self.links, Fact("Delivery", self.delivery_id)])

    @property
    def whole(self) -> str:
        """Everything but the title."""
        return f"{self.plain}\n\n{self.footer}"


def _lines(facts: Iterable[Fact]) -> str:
    return "\n".join(f"{fact.name}: {fact.value}" for fact in facts)


def text_of(message: Message, now: datetime, settings: Messages) -> Text:
    """The message in words, as of ``now``."""
    record = message.record
    advice, facts, time = _advice(message, settings.advice), _facts(message, now), None
    if record.event_type == SILENT:
        title, summary = _silence(message)
        advice, facts = "" if message.over else phrases.SILENT_ADVICE, _facts_of_silence(message)
    else:
        title, summary = _title(message, now), _summary(message)
        time = record.not_before if message.is_ahead else None
    return Text(
        title=one_line(title),
        summary=summary,
        delivery_id=message.delivery_id,
        advice=advice,
        facts=tuple(Fact(name, text) for name, value in facts if (text := one_line(value))),
        links=tuple(_links(settings.links, record)),
        time=time,
    )


# ---- the title


def subject(record: Record) -> str:
    """Whom the event affects, the same on every VM: ``web_0``, ``web_0 and 4 more``."""
    if record.many:
        return record.many
    names = sorted(record.resources, key=natural)
    return some_of(names, 1) or "an unknown VM"


def _title(message: Message, now: datetime) -> str:
    """``Reboot of web_0 in 14 min``, ``Freeze of web_0 is over``."""
    record = message.record
    if record.no_longer_affected:
        title = f"{record.event_type} no longer affects {record.vm_name or 'this VM'}"
    else:
        title = f"{record.event_type} of {subject(record)} {_state(message, now)}"
    exercise = EXERCISE if record.exercise else ""
    return one_line(exercise + title) + (" (correction)" if record.reason == "corrected" else "")


def _state(message: Message, now: datetime) -> str:
    """What of the event is said in a title."""
    record, mark = message.record, _MARKS.get(message.kind, "")
    if message.is_ahead and record.not_before is None:
        return f"at an unknown time{mark}"
    if message.is_ahead and record.not_before is not None:
        return ("was due " if record.not_before < now else "") + countdown(record.not_before, now) + mark
    if record.outcome == "finished":
        return "is over"
    return (KINDS[message.kind].title if message.kind in KINDS else _under_way(message)) + mark


def _under_way(message: Message) -> str:
    """What is said of an event that has started and is not over."""
    if message.kind == "updated":
        return "goes on"
    if message.record.events_to_come and message.record.progress:
        return f"has begun: {message.record.progress}"
    return "has started" + (" without notice" if message.record.without_notice else "")


# ---- what happens


def _summary(message: Message) -> str:
    record = message.record
    said = phrases.EXERCISE if record.exercise else phrases.CORRECTION if record.reason == "corrected" else ""
    return " ".join(filter(None, (said, _what_happens(message))))


def _what_happens(message: Message) -> str:
    record = message.record
    if record.no_longer_affected:
        return f"Azure removed {one_line(record.vm_name or 'this VM')} from the event."
    if record.outcome == "finished":  # also where it ``ended``: a boot proves it
        return "The event is over. Nothing more will happen."
    if message.kind in KINDS:
        why = f" The reason: {ENDINGS[record.reason]}." if message.kind == "ended" and record.reason in ENDINGS else ""
        return KINDS[message.kind].summary.format(vm=one_line(record.vm_name or "A VM")) + why
    who = "The VM" if record.of_one_vm else "Each affected VM"
    if message.is_ahead:
        return effect(record.event_type, "will be", who)
    if record.progress and record.fleet_under_way != record.fleet_events:  # a wave: its events start in turn
        return effect(record.event_type, "are", "One after the other, the affected VMs")
    return effect(record.event_type, "is being", who)


def effect(event_type: str, tense: str = "is", who: str = "The VM") -> str:
    """What an event of this type does: ``The VM is rebooted. ...``; empty for a type that is not known."""
    known = TYPES.get(event_type)
    return f"{who} {tense} {known.effect}. {known.then}" if known else ""


def _silence(message: Message) -> tuple[str, str]:
    """Title and summary where VMs of a fleet have fallen silent, or are heard from again."""
    lasting, over, summary = _silent_phrases(message.record)
    what = over if message.over else lasting + (" (changed)" if message.kind == "updated" else "")
    return f"{subject(message.record)}: {what}", phrases.HEARD if message.over else summary


def _silent_phrases(record: Record) -> tuple[str, str, str]:
    return phrases.NOT_THERE if record.description == MISSING else phrases.SILENT


# ---- what to do


def _advice(message: Message, own: dict[str, str]) -> str:
    """What to do: the user's text for the type of event until it is over, or a built-in one."""
    record = message.record
    users = {name.casefold(): text for name, text in own.items()}.get(record.event_type.casefold())
    if users is not None and not message.settled and message.kind not in KINDS:
        return users
    affected = "the VM" if record.of_one_vm else "each affected VM"
    return _built_in_advice(message).format(
        the_vm=affected,
        The_vm=affected[0].upper() + affected[1:],
        name_it=f"name {affected}" if record.event_id.startswith(WAVE) else "give the EventId",  # Azure knows no wave
        event=one_line(record.event_id),
        vm=one_line(record.vm_name or "a VM"),
    )


def _built_in_advice(message: Message) -> str:
    record, of_type = message.record, TYPES.get(message.record.event_type, UNKNOWN_TYPE)
    if record.no_longer_affected:
        return phrases.UNDO
    if record.outcome == "finished":
        return of_type.over
    if message.kind in KINDS:
        gone = message.kind == "ended" and record.event_type in VANISHING
        return phrases.MAYBE_GONE if gone else KINDS[message.kind].advice
    if message.is_ahead:
        return of_type.ahead
    crashed = phrases.CRASHED if record.without_notice and record.event_type in REBOOTING else ""
    return crashed + of_type.started + (f" For those that follow: {of_type.ahead}" if record.events_to_come else "")


# ---- the facts: names and values; those without a value are left out


Facts = Iterator[tuple[str, str]]


def _facts(message: Message, now: datetime) -> Facts:
    record = message.record
    yield "Sent here because", message.note
    yield from _times(message, now)
    yield "What changed", _what_changed(message)
    yield "Progress", record.progress
    yield "Affected VMs", _names(record)
    yield from _interruption(message)
    yield "Caused by", phrases.SOURCES.get(record.event_source or "", record.event_source or "unknown")
    yield "Azure's description", one_line(record.description or "") or "none"
    yield "Approval", ": ".join(filter(None, (record.approval_result, record.approval_detail, record.approval_reason)))
    yield "Place", _place(record)
    if record.fleet_vms is not None:  # whose the VMs are: the tags that they have in common
        yield "Tags", ", ".join(f"{name}: {value}" for name, value in record.tags.items())
    yield "Severity", message.shown_severity
    yield "Wave" if record.event_id.startswith(WAVE) else "EventId", record.event_id
    yield "Reported by", f"{record.fleet_reported_by} VMs" if record.fleet_reported_by else record.vm_name or ""


def _facts_of_silence(message: Message) -> Facts:
    record = message.record
    lasting, *_ = _silent_phrases(record)
    yield f"{lasting.capitalize()} since", _clock(record.first_seen)
    if message.over:
        yield "Over since", _clock(record.over_since or record.time)
    yield "VMs", _names(record)
    yield "Place", _place(record)
    yield "Severity", message.shown_severity


def _times(message: Message, now: datetime) -> Facts:
    record = message.record
    planned = _clock(record.not_before) if record.not_before is not None else "unknown"
    if message.is_ahead:
        yield "Not before", planned + (f", {countdown(record.not_before, now)}" if record.not_before else "")
        if record.previous_not_before is not None and _moved(record):
            yield "Previously", _clock(record.previous_not_before)
    elif message.over:
        yield "Over since", _clock(record.over_since or record.time)
        yield "Duration of the event", words(record.started_seconds) if record.started_seconds is not None else ""
    elif message.kind == "started" or record.event_status == STARTED:
        name = "Started" if message.kind == "started" else "Changed"
        yield name, _clock(record.time)
    else:
        yield "Not before", planned


def _moved(record: Record) -> bool:
    return record.previous_not_before is not None and record.previous_not_before != record.not_before


def _what_changed(message: Message) -> str:
    """What an update is about where it is not NotBefore: that stands in a line of its own."""
    record = message.record
    if message.kind != "updated" or _moved(record) or record.no_longer_affected:
        return ""
    if record.previous_scope is not None:
        return f"{record.vm_name or 'this VM'} is affected now"
    return "" if record.progress else "the affected VMs, or what Azure says of the event"


def _interruption(message: Message) -> Facts:
    """What Azure expects, and what was measured. Nothing of it matters where the VM stays, or stays away."""
    record = message.record
    unaffected = message.kind == "canceled" or record.no_longer_affected or record.approval_rule is not None
    if unaffected or record.event_type in VANISHING:
        return
    yield "Expected interruption", _seconds(record.expected_duration_seconds)
    if record.fleet_vms is not None:
        yield "Measured interruption", _spread(record)
    elif message.over and record.scope == "self" and record.vm_name is not None:
        yield f"Measured interruption of {one_line(record.vm_name)}", _seconds(record.interruption_seconds)


def _seconds(value: float | None) -> str:
    return words(value) if value is not None else "unknown"


def _spread(record: Record) -> str:
    """The interruptions that many VMs measured."""
    low, middle, high = record.fleet_interruption_min, record.fleet_interruption_median, record.fleet_interruption_max
    if low is None or middle is None or high is None:
        return ""
    return f"{words(middle)} (median), from {words(low)} to {words(high)}"


def _place(record: Record) -> str:
    """Where the affected VMs are; the zone is known of this VM alone."""
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
    return some_of(sorted(record.resources, key=natural), MAX_NAMES) or "unknown (Azure names none)"


def _clock(time: datetime) -> str:
    """``2026-03-01 12:15:00 UTC``."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _links(links: Links, record: Record) -> Iterator[Fact]:
    """The links whose places can all be filled in."""
    values = {"{vm}": record.vm_name, "{event_type}": record.event_type}
    for name, link in (("Dashboard", links.dashboard), ("Runbook", links.runbook), ("Agent's page", links.page)):
        if link is not None and all(value or place not in link for place, value in values.items()):
            for place, value in values.items():
                link = link.replace(place, quote(value or "", safe=""))  # noqa: PLW2901 - filled in step by step
            yield Fact(name, link)
