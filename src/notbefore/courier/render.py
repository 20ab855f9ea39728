"""The texts of a message: the built-in ones (``delivery.wording``), or the user's templates.

A template is Jinja2, sandboxed. It is given: ``event`` (type, status, source, description, resources, id,
not_before, duration), ``vm`` (name, resource_group, scale_set, zone, location, subscription, resource_id), ``change``,
``severity``, ``title`` and ``body`` (the built-in texts), ``advice``, ``record``. Where it fails, the built-in text is
sent. All values are one line, without control characters and marks that change the direction of text.
"""

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from msgspec.structs import replace

from notbefore.config.messages import Messages
from notbefore.config.sinks import MessageSettings, SinkSettings
from notbefore.core.duration import countdown
from notbefore.core.text import one_line
from notbefore.courier.message import Message
from notbefore.courier.wording import Text, built_in, marked

MAX_TEXT: Final = 8_000  # characters of a title or body that a template makes

log = logging.getLogger("notbefore.render")


class Renderer:
    """Makes the texts of one sink. ``escape`` makes a value harmless in the format of the template."""

    def __init__(self, settings: MessageSettings, messages: Messages, escape: Callable[[str], str] = str) -> None:
        self._settings = settings
        self._messages = messages
        self._escape = escape
        self._compiled: dict[tuple[str, Callable[[str], str]], Any] = {}

    def __call__(self, message: Message, now: datetime | None = None) -> Text:
        """The texts of a message: the user's, where there are templates and they work."""
        now = now or datetime.now(UTC)
        text = built_in(message, now, self._messages)
        if not any(templates(self._settings)):
            return text
        try:
            return self._from_templates(message, text, now)
        except Exception as error:  # noqa: BLE001 - a template may raise anything; the message must go out
            log.warning("the template of sink %s failed (%s): the built-in text is sent", message.sink, error)
            return replace(text, fallback=True)

    def trouble(self, message: Message) -> str:
        """Why the user's templates fail for this message; empty where they do not."""
        now = datetime.now(UTC)
        try:
            self._from_templates(message, built_in(message, now, self._messages), now)
        except Exception as error:  # noqa: BLE001 - as above
            return str(error)
        return ""

    def _from_templates(self, message: Message, text: Text, now: datetime) -> Text:
        values = _values(message, text, now)
        settings, kind = self._settings, message.kind
        # a title is plain text in every format: what is sent of it is escaped where it is put in
        title = one_line(self._render(settings.titles.get(kind, settings.title), str, values))
        body = self._render(settings.bodies.get(kind, settings.body), self._escape, values)
        title = marked(title, message.record) if title else text.title
        return replace(text, title=title, body=body or None)

    def _render(self, source: str | None, escape: Callable[[str], str], values: dict[str, Any]) -> str:
        if source is None:
            return ""
        key = (source, escape)
        if key not in self._compiled:
            from notbefore.courier.sandbox import compile_template  # noqa: PLC0415 - only who writes templates needs it

            self._compiled[key] = compile_template(source, escape)
        return str(self._compiled[key].render(values))[:MAX_TEXT]


def templates(settings: SinkSettings) -> Iterator[tuple[str, str]]:
    """Every template of a sink, with the name of its key; none of a sink that is sent the record."""
    if not isinstance(settings, MessageSettings):
        return iter(())
    given = {"title": settings.title, "body": settings.body}
    given |= {f"titles.{kind}": source for kind, source in settings.titles.items()}
    given |= {f"bodies.{kind}": source for kind, source in settings.bodies.items()}
    return ((key, source) for key, source in given.items() if source is not None)


def _values(message: Message, text: Text, now: datetime) -> dict[str, Any]:
    """What a template is given. What comes from outside is cleaned here, before any filter can take it apart."""
    record = message.record
    flat = {name: _clean(value) for name, value in record.flat().items()}
    event = ("type", "status", "source", "description", "resources", "id", "not_before", "scope", "notice_seconds")
    vm = {
        "name": record.vm_name,
        "resource_group": record.resource_group,
        "scale_set": record.scale_set,
        "zone": record.zone,
        "location": record.location,
        "subscription": record.subscription_id,
        "resource_id": record.resource_id,
    }
    return {
        "event": {name: flat.get(f"azure.scheduled_event.{name}", "") for name in event}
        | {"duration": flat.get("azure.scheduled_event.expected_duration_seconds", "")},
        "vm": {name: one_line(value or "") for name, value in vm.items()},
        "change": message.kind,
        "severity": message.shown_severity,
        "exercise": bool(record.exercise),
        "countdown": countdown(text.time, now) if text.time else "",
        "title": text.title,
        "body": text.plain,
        "advice": text.advice,
        "record": flat,
    }


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return one_line(value)
    return [one_line(item) for item in value] if isinstance(value, list) else value
