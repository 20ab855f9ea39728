"""``Templates`` renders the user's templates for the messages of one sink.

The module is imported only if there are templates: see ``config.template``.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.config.sinks import (
    BODY_TEMPLATE,
    REQUEST_TEMPLATE,
    TITLE_TEMPLATE,
    Messages,
    SinkConfig,
    templates_of,
)
from notbefore.config.template import RenderError
from notbefore.core.message import Message, Templated
from notbefore.core.record import Heartbeat
from notbefore.core.text import one_line
from notbefore.wording.texts import LINK_TITLES, Text, text_of


class Failure(Struct, frozen=True):
    """A template that failed."""

    key: str
    text: str  # what is wrong, in words


class Rendering(Struct, frozen=True):
    """A message with the texts of the templates."""

    message: Message
    failures: tuple[Failure, ...] = ()  # of the templates that are left out


class TemplateRenderer(Protocol):
    """Renders templates: in this process (``Renderer``), or in another (``RenderProcess``)."""

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """Return the text of a template; raises ``RenderError``."""
        ...


class Templates:
    """The templates of one sink. Use it in one thread at a time."""

    def __init__(self, sink: SinkConfig, messages: Messages, renderer: TemplateRenderer) -> None:
        self._settings = sink.settings
        self._messages = messages
        self._sources = templates_of(sink, messages)
        self._renderer = renderer

    def leave_out(self, key: str) -> None:
        """Leave this template out from now on."""
        self._sources.pop(key, None)

    def render(self, message: Message) -> Rendering:
        """Render the templates for a message. A template that fails is left out."""
        if isinstance(message.content, Heartbeat):
            return Rendering(message)

        basis = message
        if self._settings.SHARES_TEXT and not message.record.no_longer_affected:
            basis = message.shared
        failures: list[Failure] = []

        values = self._values(basis)
        title = self._text(TITLE_TEMPLATE, values, failures)
        body = self._text(BODY_TEMPLATE, values, failures)
        templated = Templated(title, body)

        if REQUEST_TEMPLATE in self._sources:
            values = self._values(replace(basis, templated=templated))
            request = self._text(REQUEST_TEMPLATE, values, failures)
            templated = replace(templated, request=request)
        return Rendering(replace(message, templated=templated), tuple(failures))

    def _text(self, key: str, values: Mapping[str, Any], failures: list[Failure]) -> str | None:
        """Return the text of a template; ``None`` if there is no such template, or if it fails."""
        source = self._sources.get(key)
        if source is None:
            return None
        try:
            return self._rendered(key, source, values)
        except RenderError as error:
            failures.append(Failure(key, f"the template fails ({error})"))
            return None
        except msgspec.DecodeError as error:
            failures.append(Failure(key, f"the template makes no valid JSON ({error})"))
            return None

    def _rendered(self, key: str, source: str, values: Mapping[str, Any]) -> str:
        """Return the text; raises ``RenderError``, or ``msgspec.DecodeError`` if it is no JSON."""
        text = self._renderer.render(source, values)
        if key == REQUEST_TEMPLATE:
            if self._settings.is_json:
                msgspec.json.decode(text)
            return text

        text = text.strip()
        if key == TITLE_TEMPLATE and not one_line(text):
            raise RenderError("it makes an empty title, which receivers refuse")
        return text

    def _values(self, message: Message) -> dict[str, Any]:
        """Return the variables of a template."""
        text = text_of(message, self._messages)
        return {
            "title": text.title,
            "body": text.plain,
            "severity": message.shown_severity,
            "links": _addresses(text),
            "record": message.content.flat(),
        }


def _addresses(text: Text) -> dict[str, str]:
    """Return the addresses of the links by their keys in the configuration."""
    addresses: dict[str, str] = {}
    for key, title in LINK_TITLES.items():
        for link in text.links:
            if link.name == title:
                addresses[key] = link.value
    return addresses
