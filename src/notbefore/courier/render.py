"""The texts of a message: the built-in ones (``courier.wording``), or the user's templates.

A template is Jinja2, sandboxed. It is given: ``event`` (type, status, source, description, resources, id,
not_before, duration), ``vm`` (name, resource_group, scale_set, zone, location, subscription, resource_id), ``change``,
``severity``, ``title`` and ``body`` (the built-in texts), ``advice``, ``record``. Where it fails, the built-in text is
sent. All values are one line, without control characters and marks that change the direction of text.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from msgspec.structs import replace

from notbefore.config.messages import Messages
from notbefore.config.sinks import MessageSettings
from notbefore.core.duration import countdown
from notbefore.core.text import one_line
from notbefore.courier.message import Message
from notbefore.courier.wording import Text, built_in, marked

MAX_TEXT: Final = 8_000  # characters of a title or body that a template makes
_EVENT: Final = ("type", "status", "source", "description", "resources", "id", "not_before", "scope", "notice_seconds")

log = logging.getLogger("notbefore.render")


class Renderer:
    """Makes the texts of one sink. ``escape`` makes a value harmless in the format of the template."""

    def __init__(self, settings: MessageSettings, messages: Messages, escape: Callable[[str], str] = str) -> None:
        self._settings = settings
        self._messages = messages
        self._escape = escape

    def __call__(self, message: Message, now: datetime | None = None) -> Text:
        """The texts of a message: the user's, where there are templates and they work."""
        now = now or datetime.now(UTC)
        text, settings = built_in(message, now, self._messages), self._settings
        try:
            values = _values(message, text, now)
            # a title is plain text in every format: what is sent of it is escaped where it is put in
            title = one_line(_rendered(settings.title, str, values)) if settings.title is not None else ""
            body = _rendered(settings.body, self._escape, values) if settings.body is not None else ""
        except Exception as error:  # noqa: BLE001 - a template may raise anything; the message must go out
            log.warning("the template of sink %s failed (%s): the built-in text is sent", message.sink, error)
            return text
        return replace(text, title=marked(title, message.record) if title else text.title, body=body or None)


def _rendered(source: str, escape: Callable[[str], str], values: dict[str, Any]) -> str:
    from notbefore.courier.sandbox import compile_template  # noqa: PLC0415 - only who writes templates needs it

    return str(compile_template(source, escape).render(values))[:MAX_TEXT]


def _values(message: Message, text: Text, now: datetime) -> dict[str, Any]:
    """What a template is given. What comes from outside is cleaned here, before any filter can take it apart."""
    record = message.record
    flat = {name: _clean(value) for name, value in record.flat().items()}
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
        "event": {name: flat.get(f"azure.scheduled_event.{name}", "") for name in _EVENT}
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
