"""The built-in texts of messages: what happens, when, to whom, and what to do. Pure.

What comes from Azure is made one line, without control characters and marks that change the direction of text.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote
from zoneinfo import ZoneInfo

from msgspec import Struct
from msgspec.structs import replace

from notbefore.config.messages import Links, Messages
from notbefore.core.change import ENDINGS, MISSING, SILENT
from notbefore.core.document import STARTED
from notbefore.core.duration import countdown, words
from notbefore.core.record import EXERCISE, Record
from notbefore.core.text import natural, one_line, some_of
from notbefore.courier.advice import GONE, WAVE, advice_for
from notbefore.courier.message import Message

MAX_NAMES: Final = 20  # VMs that are listed by name

_EFFECTS: Final = {  # event type -> what is done to the VM, and what follows from it
    "Freeze": ("paused for some seconds", "CPU and network stop for that time. Memory and open files are kept."),
    "Reboot": ("rebooted", "All processes end, and what is in memory is lost."),
    "Redeploy": ("moved to another host", "This is a reboot, and the temporary disk is lost."),
    "Preempt": ("evicted", "A Spot VM that is evicted is deleted or deallocated."),
    "Terminate": ("deleted", "It does not come back."),
}
_TITLES: Final = {
    "canceled": "canceled",
    "ended": "may have happened: Azure no longer lists it",
    "approved": "approved: it may start now",
    "approval_failed": "could not be approved",
    "approval_skipped": "was not approved",
}
_SUMMARIES: Final = {
    "canceled": "Azure canceled the event before it started. Nothing happened.",
    "approved": "{vm} approved the event. Azure may start it now, for all affected VMs.",
    "approval_failed": "{vm} tried to approve the event, without success. Azure will start it after the time below.",
    "approval_skipped": (
        "{vm} did not approve the event, although a rule applies to it. Azure will start it after the time below."
    ),
}
_SOURCES: Final = {"Platform": "Azure (Platform)", "User": "a user of your subscription (User)"}
_EXERCISE: Final = "This is an exercise: nothing has happened, and nothing will."
_CORRECTION: Final = "This corrects an earlier message: VMs that could not report it then have done so now."
_SILENT_WORDS: Final = (
    "heard from again",
    "silent",
    "No heartbeat came for three intervals, and no event explains it.",
)
_MISSING_WORDS: Final = ("no longer missing", "missing", MISSING)
_SILENT_ADVICE: Final = (
    "Check in the portal whether the VMs run. On one that runs, check `systemctl status notbefore`, and with"
    " `notbefore outbox list` whether it reaches the hub."
)
_FAILED_ADVICE: Final = (
    "On the VM, as root, run `notbefore outbox list`: it shows what was refused, and why. Correct the cause. Then run"
    " `notbefore outbox retry --all`."
)


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
    body: str | None = None  # the user's, instead of summary, advice and facts
    fallback: bool = False  # a template failed, and this is the built-in text

    @property
    def plain(self) -> str:
        """Everything but title and footer, with a line for each fact."""
        if self.body is not None:
            return self.body
        advice = f"What to do: {self.advice}" if self.advice else ""
        return "\n\n".join(filter(None, (self.summary, advice, _lines(self.facts))))

    @property
    def footer(self) -> str:
        """The links, and the id of the delivery."""
        return _lines([*self.links, Fact("Delivery", self.delivery_id)])


def _lines(facts: Iterable[Fact]) -> str:
    return "\n".join(f"{fact.name}: {fact.value}" for fact in facts)


def built_in(message: Message, now: datetime, settings: Messages) -> Text:
    """The built-in texts, as of ``now``."""
    record = message.record
    links = tuple(_links(settings.links, record))
    if message.kind == "sink_failed":
        title = one_line(f"notbefore on {record.vm_name or 'an unknown VM'}: {message.note}")
        return Text(title, _refused(message, now), message.delivery_id, _FAILED_ADVICE, links=links)
    if record.event_type == SILENT:
        return _silence(message, links, settings.time_zone)
    time = record.not_before if message.is_ahead else None
    corrects = record.reason == "corrected"
    said = _EXERCISE if record.exercise else _CORRECTION if corrects else ""
    return Text(
        title=marked(one_line(_title(message, time, now) + (" (correction)" if corrects else "")), record),
        summary=" ".join(filter(None, (said, _summary(message)))),
        delivery_id=message.delivery_id,
        advice=advice_for(message, settings.advice),
        facts=_facts(message, now, settings.time_zone),
        links=links,
        time=time,
    )


def _refused(message: Message, now: datetime) -> str:
    """What the readers of a sink that fails do not know."""
    record = message.record
    refused = replace(message, kind=record.change)
    title = one_line(_title(refused, record.not_before if refused.is_ahead else None, now))
    return f"The refused message: {marked(title, record)}. Later messages to that receiver may be refused as well."


def marked(title: str, record: Record) -> str:
    """The title, with a mark in front where nothing of it is real."""
    return EXERCISE + title if record.exercise and EXERCISE.strip() not in title else title


def _silence(message: Message, links: tuple[Fact, ...], time_zone: str | None) -> Text:
    """That VMs of a fleet have fallen silent, or are heard from again."""
    record = message.record
    missing = record.description == MISSING
    over, now, summary = _MISSING_WORDS if missing else _SILENT_WORDS
    what = over if message.over else now + (" (changed)" if message.kind == "updated" else "")
    if message.over:
        summary = "All of these VMs send heartbeats again, or are no longer expected."
    return Text(
        title=one_line(f"{subject(record)}: {what}"),
        summary=summary,
        delivery_id=message.delivery_id,
        advice="" if message.over else _SILENT_ADVICE,
        facts=_shown(
            Fact(f"{now.capitalize()} since", _clock(record.first_seen, time_zone)),
            Fact("Over since", _clock(record.over_since or record.time, time_zone) if message.over else ""),
            Fact("VMs", _names(record.resources)),
            *_place(record),
            Fact("Severity", message.shown_severity),
        ),
        links=links,
    )


# ---- the title


def subject(record: Record) -> str:
    """Whom the event affects, the same on every VM: ``web_0``, ``web_0 and 4 more``."""
    names = sorted(record.resources, key=natural)
    if record.many:
        return record.many
    if not names:
        return "an unknown VM"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _title(message: Message, time: datetime | None, now: datetime) -> str:
    """``Reboot of web_0 in 14 min``, ``Freeze of web_0 is over: 4.2 s of interruption (5 s expected)``."""
    record = message.record
    if record.no_longer_affected:
        return f"{record.event_type} no longer affects {record.vm_name or 'this VM'}"
    what = f"{record.event_type} of {subject(record)}"
    mark = {"updated": " (changed)", "reminder": " (reminder)"}.get(message.kind, "")
    if message.is_ahead:
        late = "was due " if time is not None and time < now else ""
        return f"{what} {late}{countdown(time, now) if time is not None else 'at an unknown time'}{mark}"
    if record.outcome == "finished":
        return f"{what} is over{_measured(record)}"
    return f"{what} {_TITLES.get(message.kind) or _under_way(message, now)}{mark}"


def _under_way(message: Message, now: datetime) -> str:
    """What is said of an event that has started and is not over."""
    if message.kind == "reminder":
        return f"has not ended after {words((now - message.record.time).total_seconds())}"
    if message.kind == "updated":
        return "goes on"
    if message.record.events_to_come and message.record.progress:
        return f"has begun: {message.record.progress}"
    return "has started" + (" without notice" if message.record.without_notice else "")


def _measured(record: Record) -> str:
    """The interruption of the one VM that the event affects: of several, this VM measures only its own."""
    if record.interruption_seconds is None or not record.of_one_vm or record.event_type in GONE:
        return ""
    expected = record.expected_duration_seconds
    beside = f" ({words(expected)} expected)" if expected is not None else ""
    return f": {words(record.interruption_seconds)} of interruption{beside}"


# ---- what happens, and what to do


def _summary(message: Message) -> str:
    record = message.record
    if record.no_longer_affected:
        return f"Azure removed {one_line(record.vm_name or 'this VM')} from the event."
    if record.outcome == "finished":  # also where it ``ended``: a boot proves it
        return f"The event is over. {_how_it_went(record)}"
    if message.kind == "ended":
        reason = ENDINGS.get(record.reason)
        return "It is not known whether the event happened." + (f" The reason: {reason}." if reason else "")
    if message.kind in _SUMMARIES:
        return _SUMMARIES[message.kind].format(vm=one_line(record.vm_name or "A VM"))
    if not message.is_ahead and record.progress and record.fleet_under_way != record.fleet_events:
        return _part_of_wave(record)
    tense = "will be" if message.is_ahead else "is being"
    return effect(record.event_type, tense, "The VM" if record.of_one_vm else "Each affected VM")


def _part_of_wave(record: Record) -> str:
    """What is done to a part of a wave's VMs: its events start one after the other."""
    if not record.fleet_under_way:
        return effect(record.event_type, "will be", "The rest of the affected VMs")
    now = effect(record.event_type, "are being", "Some of the affected VMs")
    return f"{now} The others follow." if record.events_to_come else now


def effect(event_type: str, tense: str = "is", who: str = "The VM") -> str:
    """What an event of this type does: ``The VM is rebooted. ...``; empty for a type that is not known."""
    done, then = _EFFECTS.get(event_type, ("", ""))
    return f"{who} {tense} {done}. {then}" if done else ""


def _how_it_went(record: Record) -> str:
    """In the past tense; of several VMs it is not said in one sentence."""
    if record.scope != "self" or not record.of_one_vm or record.event_type in GONE:
        return "Nothing more will happen."
    name, expected = one_line(record.vm_name or "The VM"), record.expected_duration_seconds
    if record.interruption_seconds is None:
        return f"It is not known how long {name} was interrupted."
    beside = f"Azure expected {words(expected)}." if expected is not None else "Azure gave no expected time."
    return f"{name} was interrupted for {words(record.interruption_seconds)}. {beside}"


# ---- the facts


def _shown(*facts: Fact) -> tuple[Fact, ...]:
    """Those that say something, each on one line."""
    return tuple(Fact(fact.name, one_line(fact.value)) for fact in facts if one_line(fact.value))


def _facts(message: Message, now: datetime, time_zone: str | None) -> tuple[Fact, ...]:
    record = message.record
    return _shown(
        Fact("Sent here because", message.note),
        *_times(message, now, time_zone),
        Fact("What changed", _what_changed(message)),
        Fact("Progress", record.progress),
        Fact("Affected VMs", _names(record.resources)),
        *_interruption(message),
        Fact("Caused by", _SOURCES.get(record.event_source or "", record.event_source or "unknown")),
        Fact("Azure's description", one_line(record.description or "") or "none"),
        Fact("Approval", _approval(record)),
        *_place(record),
        Fact("Tags", _tags(record)),
        Fact("Severity", message.shown_severity),
        Fact("Wave" if record.event_id.startswith(WAVE) else "EventId", record.event_id),
        Fact("Reported by", f"{record.fleet_reported_by} VMs" if record.fleet_reported_by else record.vm_name or ""),
    )


def _times(message: Message, now: datetime, time_zone: str | None) -> list[Fact]:
    record = message.record
    planned = _clock(record.not_before, time_zone) if record.not_before is not None else "unknown"
    if message.is_ahead:
        left = f", {countdown(record.not_before, now)}" if record.not_before is not None else ""
        before = record.previous_not_before
        moved = before is not None and before != record.not_before
        return [
            Fact("Not before", planned + left),
            Fact("Previously", _clock(before, time_zone) if before is not None and moved else ""),
        ]
    seen = _clock(record.time, time_zone)
    if message.over:
        lasted = words(record.started_seconds) if record.started_seconds is not None else ""
        return [
            Fact("Over since", _clock(record.over_since or record.time, time_zone)),
            Fact("Duration of the event", lasted),
        ]
    if message.kind == "started" or record.event_status == STARTED:
        name = "Started" if message.kind in ("started", "reminder") else "Changed"
        return [Fact(name, seen)]
    return [Fact("Not before", planned)]


def _what_changed(message: Message) -> str:
    """What an update is about where it is not NotBefore: that stands in a line of its own."""
    record = message.record
    moved = record.previous_not_before is not None and record.previous_not_before != record.not_before
    if message.kind != "updated" or moved or record.no_longer_affected:
        return ""
    if record.previous_scope is not None:
        return f"{record.vm_name or 'this VM'} is affected now"
    return "" if record.progress else "the affected VMs, or what Azure says of the event"


def _interruption(message: Message) -> list[Fact]:
    """What Azure expects, what is usual, what was measured. Nothing of it matters where the VM stays, or stays away."""
    record, usual = message.record, message.usual
    unaffected = message.kind == "canceled" or record.no_longer_affected or record.approval_rule is not None
    if unaffected or record.event_type in GONE:
        return []
    expected = record.expected_duration_seconds
    facts = [Fact("Expected interruption", words(expected) if expected is not None else "unknown")]
    if record.fleet_vms is not None:
        return [*facts, Fact("Measured interruption", _spread(record))]
    if record.scope != "self" or record.vm_name is None:
        return facts
    if message.over:
        seconds = record.interruption_seconds
        measured = words(seconds) if seconds is not None else "unknown"
        return [*facts, Fact(f"Measured interruption of {one_line(record.vm_name)}", measured)]
    if usual is None:
        return facts
    events = "1 event" if usual.count == 1 else f"{usual.count} events"
    counted = f"{words(usual.seconds)} (median of {events})"
    return [*facts, Fact(f"Usual interruption of {one_line(record.vm_name)}", counted)]


def _spread(record: Record) -> str:
    """The interruptions that many VMs measured."""
    low, middle, high = record.fleet_interruption_min, record.fleet_interruption_median, record.fleet_interruption_max
    if low is None or middle is None or high is None:
        return ""
    return f"{words(middle)} (median), from {words(low)} to {words(high)}"


def _place(record: Record) -> list[Fact]:
    """Where the affected VMs are; the zone is known of this VM alone."""
    own = record.scope == "self" and record.of_one_vm
    place = [
        ("resource group", record.resource_group),
        ("scale set", record.scale_set),
        ("zone", record.zone if own else None),
        ("region", record.location),
        ("subscription", record.subscription_id),
    ]
    return [Fact("Place", ", ".join(f"{name} {value}" for name, value in place if value))]


def _tags(record: Record) -> str:
    """Whose the VMs of a fleet are: the tags that they have in common."""
    if record.fleet_vms is None:
        return ""
    return ", ".join(f"{name}: {value}" for name, value in record.tags.items())


def _approval(record: Record) -> str:
    return ": ".join(filter(None, (record.approval_result, record.approval_detail, record.approval_reason)))


def _names(names: tuple[str, ...]) -> str:
    return some_of(sorted(names, key=natural), MAX_NAMES) or "unknown (Azure names none)"


def _clock(time: datetime, time_zone: str | None) -> str:
    """``2026-03-01 12:15:00 UTC (13:15:00 Europe/Berlin)``, with the date in that zone where it is another one."""
    utc = time.astimezone(UTC)
    text = f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    if time_zone is None:
        return text
    try:
        local = utc.astimezone(ZoneInfo(time_zone))
    except OverflowError:  # before the year 1, or after 9999
        return text
    day = f"{local:%Y-%m-%d} " if local.date() != utc.date() else ""
    return f"{text} ({day}{local:%H:%M:%S} {time_zone})"


def _links(links: Links, record: Record) -> list[Fact]:
    found = []
    values = {"{vm}": record.vm_name, "{event_type}": record.event_type}
    for name, link in (("Dashboard", links.dashboard), ("Runbook", links.runbook), ("Agent's page", links.page)):
        if link is None or any(place in link and not value for place, value in values.items()):
            continue
        for place, value in values.items():
            link = link.replace(place, quote(value or "", safe=""))  # noqa: PLW2901 - filled in step by step
        found.append(Fact(name, link))
    return found
