"""The texts of messages: what happens, when, to which VMs, and what to do. Pure.

Texts from Azure are put on one line, without control characters and marks that change the
direction of text. They mention no one in a chat; the user's own advice and templates may.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, tzinfo
from typing import Final, NamedTuple
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import AS_FAR_AS_KNOWN, SILENT
from notbefore.core.document import STARTED
from notbefore.core.duration import countdown, words
from notbefore.core.event_types import FREEZE, event_type_of
from notbefore.core.message import Message
from notbefore.core.record import WAVE, Record
from notbefore.core.text import one_line, some_of, without_mentions
from notbefore.wording import phrases
from notbefore.wording.phrases import KINDS, REASONS, TYPES, TypePhrases, phrases_of
from notbefore.wording.sentences import (
    EXERCISE,
    approval_result,
    in_place,
    progress,
    several_vms,
)
from notbefore.wording.times import clock, zone_named

NAMES_IN_MESSAGE: Final = 20  # of affected VMs
Facts = Iterator[tuple[str, str]]  # name and value; ``text_of`` leaves out those without a value
# the key of a link -> its name in a message
LINK_TITLES: Final = {"dashboard": "Dashboard", "runbook": "Runbook", "page": "Agent's page"}
_MARKS: Final = {"updated": " (changed)", "reminder": " (reminder)"}


class LinkTemplates(Struct, frozen=True):
    """The addresses of the links in a message.

    `{vm}` is replaced by the name of the sending VM, `{event_type}` by Azure's type.
    """

    dashboard: str | None = None
    runbook: str | None = None
    page: str | None = None  # the agent's page


class Additions(Struct, frozen=True):
    """The user's additions to the texts of messages."""

    advice: dict[str, str] = {}  # what to do, by event type; replaces the built-in text
    links: LinkTemplates = LinkTemplates()
    time_zone: str | None = None  # times are shown in it and in UTC; without one, in UTC alone


class Fact(NamedTuple):
    """One line of a message."""

    name: str
    value: str


class Text(Struct, frozen=True):
    """A message in words."""

    title: str
    summary: str
    delivery_id: str
    # the event in words that are the same in all its messages; or the title of a template
    topic: str = ""
    advice: str = ""  # what to do
    facts: tuple[Fact, ...] = ()
    links: tuple[Fact, ...] = ()  # name and address
    has_own_body: bool = False  # the user's template made the body, which is the summary

    @property
    def plain(self) -> str:
        """Everything except title, links and the id, with one line per fact."""
        paragraphs: list[str] = []
        if self.summary:
            paragraphs.append(self.summary)
        if self.advice:
            paragraphs.append(f"What to do: {self.advice}")
        if self.facts:
            paragraphs.append(_lines(self.facts))
        return "\n\n".join(paragraphs)

    @property
    def whole(self) -> str:
        """Everything except the title. A template decides itself whether its body has the links."""
        if self.has_own_body:
            return self.summary
        return f"{self.plain}\n\n{_lines([*self.links, Fact('Delivery', self.delivery_id)])}"


class _Sentences(NamedTuple):
    """The part of a message that differs between the kinds of change."""

    title: str
    summary: str
    advice: str


def _lines(facts: Iterable[Fact]) -> str:
    return "\n".join(f"{fact.name}: {fact.value}" for fact in facts)


def text_of(message: Message, additions: Additions) -> Text:
    """Return the message in words: in those of the user's templates, if they have made any."""
    text = _built_in(message, additions)
    templated = message.templated
    if templated.title is not None:
        title = one_line(templated.title)
        text = replace(text, title=title, topic=title)
    if templated.body is not None:
        text = replace(text, summary=templated.body, advice="", facts=(), has_own_body=True)
    return text


def _built_in(message: Message, additions: Additions) -> Text:
    record = message.record
    zone = zone_named(additions.time_zone)
    if record.event_type == SILENT:
        sentences = _silence(message)
        facts = _facts_of_silence(message, zone)
    else:
        sentences = _event(message, additions.advice)
        facts = _facts_of_event(message, zone)
    sentences = _labeled(sentences, record)

    return Text(
        title=_quoted(sentences.title),
        summary=without_mentions(sentences.summary),
        delivery_id=message.delivery_id,
        topic=_quoted(topic(record)),
        advice=sentences.advice,
        facts=tuple(_with_values(facts)),
        links=tuple(_links(additions.links, record)),
    )


def _labeled(sentences: _Sentences, record: Record) -> _Sentences:
    """Return the sentences, and say so if they are about an exercise or correct earlier ones."""
    if record.exercise:
        return sentences._replace(
            title=EXERCISE + sentences.title,
            summary=f"{phrases.EXERCISE_NOTE} {sentences.summary}".rstrip(),
        )
    if record.reason == "corrected":
        return sentences._replace(
            title=f"{sentences.title} (correction)",
            summary=f"{phrases.CORRECTION} {sentences.summary}".rstrip(),
        )
    return sentences


def _with_values(facts: Facts) -> Iterator[Fact]:
    """Yield the facts that have a value, each on one line."""
    for name, value in facts:
        line = _quoted(value)
        if line:
            yield Fact(without_mentions(name), line)


def _quoted(text: str) -> str:
    """Return a text with words from outside on one line, without mentions."""
    return without_mentions(one_line(text))


# ---- title, summary and advice: one function for each kind of change


def _event(message: Message, custom_advice: Mapping[str, str]) -> _Sentences:
    """Return the sentences about an event.

    ``custom_advice``: event type -> the user's advice, for events that have not ended.
    """
    record = message.record
    if record.no_longer_affected:
        return _no_longer_affected(record)
    if message.over and _is_advice(record):
        return _withdrawn(record)
    if record.outcome == "finished":  # also for ``ended``, if a boot proves it
        return _finished(record)
    if message.kind in KINDS:
        return _same_for_every_type(message)

    if _is_advice(record):
        sentences = _advice(message)
    elif message.is_ahead:
        sentences = _ahead(message)
    else:
        sentences = _under_way(message)
    for event_type, advice in custom_advice.items():
        if event_type.casefold() == record.event_type.casefold():
            sentences = sentences._replace(advice=advice)
    return sentences


def _no_longer_affected(record: Record) -> _Sentences:
    vm = one_line(record.vm_name or "this VM")
    return _Sentences(
        title=f"{record.event_type} no longer affects {vm}",
        summary=f"Azure removed {vm} from the event.",
        advice=phrases.UNDO,
    )


def _withdrawn(record: Record) -> _Sentences:
    """Return the sentences about the end of an advice."""
    type_phrases = _phrases_of(record)
    return _Sentences(
        title=f"{_event_name(record)} {phrases.WITHDRAWN_TITLE}",
        summary=_filled(type_phrases.finished, record),
        advice=_filled(type_phrases.over, record),
    )


def _finished(record: Record) -> _Sentences:
    if record.reason == AS_FAR_AS_KNOWN:
        summary = f"The event is {REASONS[record.reason]}."
    else:
        summary = _filled(_phrases_of(record).finished, record)

    return _Sentences(
        title=f"{_event_name(record)} {phrases.FINISHED_TITLE}",
        summary=summary,
        advice=_filled(_phrases_of(record).over, record),
    )


def _same_for_every_type(message: Message) -> _Sentences:
    """Return the sentences about a cancellation, an end that no one saw, or an approval."""
    record = message.record
    kind = KINDS[message.kind]

    summary = kind.summary.format(vm=one_line(record.vm_name or "A VM"))
    if message.kind == "ended" and record.reason in REASONS:
        summary += f" The reason: {REASONS[record.reason]}."

    return _Sentences(
        title=f"{_event_name(record)} {kind.title}",
        summary=summary,
        advice=_filled(kind.advice, record),
    )


def _ahead(message: Message) -> _Sentences:
    """Return the sentences about an event that has not started."""
    record = message.record
    state = _time_left(record.not_before, message.now)
    affected = _capitalized(_affected(record))
    if record.has_begun:  # between two events of a wave
        state = f"{state}: {progress(record)}"
        affected = "Each VM that is still to come"

    return _Sentences(
        title=_title(message, state),
        summary=effect(record.event_type, "will be", affected, record.expected_duration_seconds),
        advice=_filled(_phrases_of(record).ahead, record),
    )


def _advice(message: Message) -> _Sentences:
    """Return the sentences about an advice that is listed."""
    record = message.record
    mark = _MARKS.get(message.kind, "")
    return _Sentences(
        title=f"{_event_name(record)}: {phrases.ADVICE_TITLE}{mark}",
        summary=effect(record.event_type, affected=_capitalized(_affected(record))),
        advice=_filled(_phrases_of(record).ahead, record),
    )


def _under_way(message: Message) -> _Sentences:
    """Return the sentences about an event that has started and has not ended."""
    record = message.record
    type_phrases = _phrases_of(record)

    advice = type_phrases.started
    if record.without_notice and event_type_of(record.event_type).reboots:
        advice = phrases.CRASHED + advice
    if record.events_to_come:
        advice += f" For the VMs that follow: {type_phrases.ahead}"

    if progress(record) and record.fleet_under_way != record.fleet_events:
        # the events of a wave start in turn
        tense = "are"
        affected = "One after the other, the affected VMs"
    else:
        tense = "is being"
        affected = _capitalized(_affected(record))

    return _Sentences(
        title=_title(message, _state_under_way(message)),
        summary=effect(record.event_type, tense, affected, record.expected_duration_seconds),
        advice=_filled(advice, record),
    )


def _state_under_way(message: Message) -> str:
    record = message.record
    if message.kind == "updated":
        if progress(record):
            return f"continues: {progress(record)}"
        return "continues"
    if record.events_to_come and progress(record):
        return f"has begun: {progress(record)}"
    if record.without_notice:
        return "has started without notice"
    return "has started"


def _silence(message: Message) -> _Sentences:
    """Return the sentences about VMs of a fleet that are silent, or send heartbeats again."""
    record = message.record
    if message.over:
        return _Sentences(title=record.body, summary=phrases.HEARD, advice="")

    return _Sentences(
        title=record.body + _MARKS.get(message.kind, ""),
        summary=one_line(record.description or phrases.SILENT),
        advice=phrases.SILENT_ADVICE,
    )


# ---- parts of these sentences


def subject(record: Record) -> str:
    """Return the affected VMs in the same words on every VM: ``web_0``, ``web_0 and 4 more``."""
    several = several_vms(record)
    if several:
        return several
    if not record.names:
        return "an unknown VM"
    return some_of(record.names, 1)


def topic(record: Record) -> str:
    """Return the event in words that are the same in all its messages: ``Reboot of web_0``.

    The VMs of an event, and even more those of a wave, may change. So several are only named by
    their place.
    """
    label = EXERCISE if record.exercise else ""
    if record.event_type == SILENT:
        vms = "Missing VMs" if record.description == phrases.MISSING else "Silent VMs"
        return label + in_place(vms, record)

    is_wave = record.event_id.startswith(WAVE)
    if len(record.resources) == 1 and not is_wave:
        return f"{label}{record.event_type} of {record.resources[0]}"
    return f"{label}{record.event_type} of {in_place('VMs', record)}"


def effect(
    event_type: str,
    tense: str = "is",
    affected: str = "The VM",
    duration: int | None = None,
) -> str:
    """Return the effect of an event of this type: ``The VM is rebooted. ...``.

    ``duration``: the seconds of interruption that Azure expects, if known.

    Empty for a type that Azure does not document.
    """
    if event_type not in TYPES:
        return ""
    if event_type == FREEZE and duration == 0:
        return phrases.NO_INTERRUPTION
    pause = "some seconds"
    if duration is not None:
        pause = f"about {words(duration)}"
    text = phrases_of(event_type, duration).effect.format(pause=pause)
    return f"{affected} {tense} {text}"


def _is_advice(record: Record) -> bool:
    return event_type_of(record.event_type).is_advice


def _title(message: Message, state: str) -> str:
    mark = _MARKS.get(message.kind, "")
    return f"{_event_name(message.record)} {state}{mark}"


def _event_name(record: Record) -> str:
    return f"{record.event_type} of {subject(record)}"


def _phrases_of(record: Record) -> TypePhrases:
    return phrases_of(record.event_type, record.expected_duration_seconds)


def _time_left(not_before: datetime | None, now: datetime) -> str:
    if not_before is None:
        return "at an unknown time"
    if not_before < now:
        return f"was due {countdown(not_before, now)}"
    return countdown(not_before, now)


def _affected(record: Record) -> str:
    return "the VM" if record.of_one_vm else "each affected VM"


def _capitalized(text: str) -> str:
    """Return the text with a capital at its start; ``str.capitalize`` would write `The vm`."""
    return text[0].upper() + text[1:]


def _filled(advice: str, record: Record) -> str:
    """Return the advice with the words that its placeholders stand for."""
    affected = _affected(record)
    if record.event_id.startswith(WAVE):  # Azure does not know the id of a wave
        name_it = f"name {affected}"
    else:
        name_it = "give the EventId"

    return advice.format(
        the_vm=affected,
        The_vm=_capitalized(affected),
        name_it=name_it,
        event=_quoted(record.event_id),
        vm=_quoted(record.vm_name or "a VM"),
    )


# ---- the facts


def _facts_of_event(message: Message, zone: tzinfo | None) -> Facts:
    record = message.record
    yield "Sent here because", message.note
    yield from _times(message, zone)
    yield from _what_changed(message)
    yield "Progress", progress(record)
    yield "Affected VMs", _names(record)
    if _is_interruption_of_interest(message):
        yield "Expected interruption", _expected(record.expected_duration_seconds)
        yield from _measured(message)
    yield "Caused by", _cause(record)
    yield "Azure's description", one_line(record.description or "") or "none"
    yield "Approval", _approval(record)
    yield "Place", _place(record)
    if record.fleet_vms is not None:  # the tags that all affected VMs have: they may name the owner
        yield "Tags", ", ".join(f"{name}: {value}" for name, value in record.tags.items())
    yield "Severity", message.shown_severity
    yield _id_name(record), record.event_id
    yield "Reported by", _reporters(record)


def _facts_of_silence(message: Message, zone: tzinfo | None) -> Facts:
    record = message.record
    yield "Since", clock(record.first_seen, zone)
    if message.over:
        yield "Over since", clock(record.over_since or record.time, zone)
    yield "VMs", _names(record)
    yield "Place", _place(record)
    yield "Severity", message.shown_severity


def _times(message: Message, zone: tzinfo | None) -> Facts:
    """Yield when the event starts, has started or has ended."""
    record = message.record
    if message.over:
        yield from _times_of_end(record, zone)
    elif _is_advice(record):
        return
    elif message.is_ahead:
        yield from _times_ahead(message, zone)
    elif record.event_status == STARTED or message.kind == "started":
        yield from _times_under_way(message, zone)
    elif record.not_before is not None:
        yield "Not before", clock(record.not_before, zone)
    else:
        yield "Not before", "unknown"


def _times_of_end(record: Record, zone: tzinfo | None) -> Facts:
    yield "Over since", clock(record.over_since or record.time, zone)
    if record.started_seconds is not None:
        yield "Duration of the event", words(record.started_seconds)


def _times_ahead(message: Message, zone: tzinfo | None) -> Facts:
    record = message.record
    if record.not_before is None:
        yield "Not before", "unknown"
    else:
        time_left = countdown(record.not_before, message.now)
        yield "Not before", f"{clock(record.not_before, zone)}, {time_left}"

    previous = _moved_from(record)
    if previous is not None:
        yield "Previously", clock(previous, zone)


def _times_under_way(message: Message, zone: tzinfo | None) -> Facts:
    record = message.record
    if message.kind == "started":
        yield "Started", clock(record.time, zone)
    else:
        yield "Changed", clock(record.time, zone)

    if record.events_to_come and record.not_before is not None:
        word = "not before" if record.not_before > message.now else "was due at"
        time_left = countdown(record.not_before, message.now)
        yield "Next", f"{word} {clock(record.not_before, zone)}, {time_left}"


def _what_changed(message: Message) -> Facts:
    """Yield what an update changed, unless ``_times`` shows that NotBefore moved."""
    record = message.record
    if message.kind != "updated" or record.no_longer_affected:
        return
    if _moved_from(record) is not None:
        return

    if record.previous_scope is not None:
        yield "What changed", f"{record.vm_name or 'this VM'} is affected now"
    elif not progress(record):
        yield "What changed", "the affected VMs, or what Azure says of the event"


def _moved_from(record: Record) -> datetime | None:
    """Return the NotBefore from which the event moved; ``None`` if it did not move."""
    if record.previous_not_before == record.not_before:
        return None
    if record.has_begun:  # a wave: its next event has another NotBefore
        return None
    return record.previous_not_before


def _is_interruption_of_interest(message: Message) -> bool:
    """Whether the event interrupts a VM that continues to run afterwards."""
    record = message.record
    if message.kind == "canceled" or record.no_longer_affected:
        return False
    if record.approval_rule is not None:
        return False
    event_type = event_type_of(record.event_type)
    return not (event_type.vanishes or event_type.is_advice)


def _measured(message: Message) -> Facts:
    record = message.record
    if record.fleet_vms is not None:
        if record.interruption_seconds is not None:
            yield "Longest measured interruption", words(record.interruption_seconds)
    elif message.over and record.scope == "self" and record.vm_name is not None:
        name = f"Measured interruption of {one_line(record.vm_name)}"
        yield name, _seconds(record.interruption_seconds)


def _expected(seconds: int | None) -> str:
    return "none" if seconds == 0 else _seconds(seconds)


def _seconds(value: float | None) -> str:
    if value is None:
        return "unknown"
    return words(value)


def _cause(record: Record) -> str:
    source = record.event_source or "unknown"
    return phrases.SOURCES.get(source, source)


def _approval(record: Record) -> str:
    parts = (approval_result(record), record.approval_detail, record.approval_reason)
    return ": ".join(part for part in parts if part)


def _place(record: Record) -> str:
    """Return the place of the affected VMs; the zone is known only for this VM."""
    zone = None
    if record.scope == "self" and record.of_one_vm:
        zone = record.zone

    place = {
        "resource group": record.resource_group,
        "scale set": record.scale_set,
        "zone": zone,
        "region": record.location,
        "subscription": record.subscription_id,
    }
    return ", ".join(f"{name} {value}" for name, value in place.items() if value)


def _names(record: Record) -> str:
    return some_of(record.names, NAMES_IN_MESSAGE) or "unknown (Azure names none)"


def _id_name(record: Record) -> str:
    return "Wave" if record.event_id.startswith(WAVE) else "EventId"


def _reporters(record: Record) -> str:
    """Return the VM that reports the event, or in a fleet who does: ``Azure and 3 VMs``."""
    count = record.fleet_reported_by or 0
    by_azure = record.fleet_azure_status is not None
    if count or by_azure:
        return phrases.reporters(count, by_azure=by_azure)
    return record.vm_name or ""


# ---- the links


def _links(links: LinkTemplates, record: Record) -> Iterator[Fact]:
    """Yield the links, except one that names the VM if its name is not known."""
    vm = quote(record.vm_name or "", safe="")
    event_type = quote(record.event_type, safe="")
    templates = {"dashboard": links.dashboard, "runbook": links.runbook, "page": links.page}
    for key, template in templates.items():
        if template is None or ("{vm}" in template and not vm):
            continue
        address = template.replace("{vm}", vm).replace("{event_type}", event_type)
        yield Fact(LINK_TITLES[key], address)
