"""The texts of a message: the built-in ones, or the user's templates.

A template is Jinja2, sandboxed. It is given: ``event`` (type, status, source, description, resources, id,
not_before, duration), ``vm`` (name, resource_group, scale_set, zone, location, subscription, resource_id), ``change``,
``severity``, ``title`` and ``body`` (the built-in texts), ``record``. Where it fails, the built-in text is sent.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct

from notbefore.core.duration import countdown, words
from notbefore.core.record import Record
from notbefore.delivery.message import Message

MAX_TEXT: Final = 8_000  # characters of a title or body that a template makes
MAX_RESOURCES: Final = 10  # names that are spelled out
AHEAD: Final = ("announced", "updated", "reminder")  # kinds of message about what is to come

log = logging.getLogger("notbefore.render")

MEANINGS: Final = {
    "Freeze": "The VM is paused for some seconds: memory and connections stay, what is in flight waits.",
    "Reboot": "The VM reboots: processes end, what is in memory is lost.",
    "Redeploy": "The VM is moved to another host: it reboots, and its temporary disk is lost.",
    "Preempt": "The Spot VM is evicted: it is deleted or deallocated, and does not come back by itself.",
    "Terminate": "The VM is deleted.",
}
_NOTES: Final = {"updated": " (changed)", "reminder": " (reminder)"}
_TITLES: Final = {
    "canceled": "canceled",
    "ended": "is gone: how it ended was not seen",
    "approved": "approved: it may start at once",
    "approval_failed": "could not be approved",
    "approval_skipped": "not approved, though a rule would approve it",
}


class Fact(Struct, frozen=True):
    """One line of a message."""

    name: str
    value: str


class Text(Struct, frozen=True):
    """A message in words. ``time`` is NotBefore where it still lies ahead."""

    title: str
    meaning: str
    facts: tuple[Fact, ...]
    time: datetime | None = None
    body: str | None = None  # the user's, instead of meaning and facts
    fallback: bool = False  # a template failed, and this is the built-in text

    @property
    def plain(self) -> str:
        """Everything but the title, for a mail or a pager."""
        if self.body is not None:
            return self.body
        return "\n".join([self.meaning, "", *(f"{fact.name}: {fact.value}" for fact in self.facts)])


def built_in(message: Message, now: datetime) -> Text:
    """The built-in texts, as of ``now``."""
    record = message.record
    subject = record.many or record.vm_name or ", ".join(record.resources[:1]) or "a VM"
    if record.scope == "peer" and not record.no_longer_affected:
        subject = f"{', '.join(record.resources[:1])} (seen by {record.vm_name or 'a peer'})"
    if message.kind == "sink_failed":
        return _sink_failed(message)
    time = record.not_before if message.kind in AHEAD else None
    mark = "[EXERCISE] " if record.exercise else ""
    if record.no_longer_affected:
        title = one_line(f"{mark}{record.event_type} no longer affects {subject}")
    else:
        title = one_line(f"{mark}{record.event_type} of {subject} {_what(message, time, now)}")
    meaning = (
        MEANINGS.get(record.event_type, "")
        if not record.no_longer_affected
        else "Azure removed this VM from the event."
    )
    facts = [Fact(name, one_line(value)) for name, value in _facts(message, time, now) if value]
    return Text(title=title, meaning=meaning, facts=tuple(facts), time=time)


def _sink_failed(message: Message) -> Text:
    """That another sink refuses messages."""
    title = one_line(f"notbefore on {message.record.vm_name or 'a VM'}: {message.note}")
    advice = "`notbefore outbox list` shows what was refused; mend the cause, then `notbefore outbox retry --all`."
    return Text(title=title, meaning=advice, facts=())


def one_line(text: str) -> str:
    """Without line ends, which could forge another line, and without marks that change the direction of text."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


def _what(message: Message, time: datetime | None, now: datetime) -> str:
    """What becomes of the event: ``in 14 min``, ``has started``, ``is over: 4.2 s of interruption (5 s expected)``."""
    record = message.record
    if message.kind in AHEAD:
        late = "was due " if time is not None and time < now else ""
        when = late + countdown(time, now) if time is not None else "announced, at a time not given"
        return when + _NOTES.get(message.kind, "")
    if message.kind == "started":
        return "has started" + (" without notice" if record.notice_seconds == 0 else "")
    if record.outcome == "finished":
        return "is over" + _measured(record)
    return _TITLES[message.kind]


def _measured(record: Record) -> str:
    if record.interruption_seconds is None:
        return ""
    expected = record.expected_duration_seconds
    beside = f" ({words(expected)} expected)" if expected is not None else ""
    return f": {words(record.interruption_seconds)} of interruption{beside}"


def _facts(message: Message, time: datetime | None, now: datetime) -> list[tuple[str, str]]:
    record = message.record
    previous = record.previous_not_before
    place = [
        ("group", record.resource_group),
        ("scale set", record.scale_set),
        ("zone", record.zone),
        ("region", record.location),
        ("subscription", record.subscription_id),
    ]
    expected, measured = record.expected_duration_seconds, record.interruption_seconds
    exercise = "This is an exercise: nothing has happened, nothing will." if record.exercise else ""
    return [
        ("Exercise", exercise),
        ("Sent here because", message.note),
        ("Not before", f"{_clock(time)} ({countdown(time, now)})" if time else ""),
        ("Previously", _clock(previous) if time and previous != time else ""),
        ("Expected interruption", "" if message.over else (words(expected) if expected is not None else "not known")),
        ("Measured interruption", words(measured) if measured is not None else ""),
        ("VM", record.vm_name or ""),
        ("Place", ", ".join(f"{name} {value}" for name, value in place if value)),
        ("Affected", _names(record.resources)),
        ("Why", record.description or ""),
        ("Approval", _approval(record)),
        ("Source", record.event_source or ""),
        ("Severity", message.severity),
        ("Event", record.event_id),
    ]


def _approval(record: Record) -> str:
    if record.approval_rule is None:
        return ""
    words = [record.reason.replace("_", " "), f"rule {record.approval_rule}", f"by {record.approval_by}"]
    return ", ".join(words) + (f": {record.approval_detail}" if record.approval_detail else "")


def _names(names: tuple[str, ...]) -> str:
    more = len(names) - MAX_RESOURCES
    return ", ".join(names[:MAX_RESOURCES]) + (f" and {more} more" if more > 0 else "")


def _clock(time: datetime | None) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if time else ""


class Renderer:
    """Makes the texts of one sink. ``escape`` makes a value harmless in the format of the template."""

    def __init__(self, title: str | None, body: str | None, escape: Callable[[str], str] = str) -> None:
        self._sources = {"title": title, "body": body}
        self._escape = escape
        self._templates: dict[str, Any] = {}

    def __call__(self, message: Message, now: datetime | None = None) -> Text:
        """The texts of a message: the user's, where there are templates and they work."""
        now = now or datetime.now(UTC)
        text = built_in(message, now)
        if not any(self._sources.values()):
            return text
        try:
            return self._from_templates(message, text, now)
        except Exception as error:  # noqa: BLE001 - a template may raise anything; the message must go out
            log.warning("the template of sink %s failed (%s): the built-in text is sent", message.sink, error)
            return Text(text.title, text.meaning, text.facts, text.time, fallback=True)

    def trouble(self, message: Message) -> str:
        """Why the user's templates fail for this message; empty where they do not."""
        now = datetime.now(UTC)
        try:
            self._from_templates(message, built_in(message, now), now)
        except Exception as error:  # noqa: BLE001 - as above
            return str(error)
        return ""

    def _from_templates(self, message: Message, text: Text, now: datetime) -> Text:
        values = _values(message, text, now)
        title, body = self._render("title", values), self._render("body", values)
        return Text(one_line(title or "") or text.title, text.meaning, text.facts, text.time, body=body or None)

    def _render(self, name: str, values: dict[str, Any]) -> str | None:
        source = self._sources[name]
        if source is None:
            return None
        if name not in self._templates:
            # a title is plain text in every format: what is sent of it is escaped where it is put in
            self._templates[name] = compile_template(source, str if name == "title" else self._escape)
        return str(self._templates[name].render(values))[:MAX_TEXT]


def compile_template(source: str, escape: Callable[[str], str]) -> Any:
    """A Jinja2 template whose values are escaped; raises ``jinja2.TemplateError`` for a syntax error."""
    from jinja2 import StrictUndefined  # noqa: PLC0415 - only who writes templates needs it
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - as above

    def harmless(value: object) -> str:
        return escape(str(value))  # a list or a mapping holds Azure's words as well; `|safe` does not switch it off

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False, finalize=harmless)
    return environment.from_string(source)


def _values(message: Message, text: Text, now: datetime) -> dict[str, Any]:
    record = message.record
    flat = record.flat()
    event = ("type", "status", "source", "description", "resources", "id", "not_before", "scope", "notice_seconds")
    vm = ("resource_group", "scale_set", "zone", "location", "resource_id")
    return {
        "event": {name: flat.get(f"azure.scheduled_event.{name}", "") for name in event}
        | {"duration": flat.get("azure.scheduled_event.expected_duration_seconds", "")},
        "vm": {name: getattr(record, name) or "" for name in vm}
        | {"name": record.vm_name or "", "subscription": record.subscription_id or ""},
        "change": message.kind,
        "severity": message.severity,
        "exercise": bool(record.exercise),
        "countdown": countdown(text.time, now) if text.time else "",
        "title": text.title,
        "body": text.plain,
        "record": flat,
    }
