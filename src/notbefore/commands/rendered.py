"""The texts of sample messages, as a sink would send them, for ``notbefore check-config``."""

from collections.abc import Iterator

from msgspec import Struct

from notbefore.commands.samples import sample_messages
from notbefore.config.sinks import Messages, SinkConfig, templates_of
from notbefore.core.message import Message
from notbefore.courier.renderer import Renderer
from notbefore.courier.templates import Templates
from notbefore.wording.texts import text_of


class RenderedSample(Struct, frozen=True):
    """The message that a sink would send about one step of a sample event."""

    sink: str
    kind: str  # of the sink
    event_type: str
    change: str
    title: str | None  # null: the sink sends no text for people
    body: str

    @property
    def heading(self) -> str:
        """The sink and the step, in words."""
        return f"{self.sink} ({self.kind}): {self.event_type} {self.change}"


def rendered_samples(name: str, sink: SinkConfig, messages: Messages) -> Iterator[RenderedSample]:
    """Yield the texts of all sample messages that a sink gets."""
    templates = Templates(sink, messages, Renderer())
    for message in _messages(name, sink):
        title, body = _shown(sink, templates.render(message).message, messages)
        yield RenderedSample(
            sink=name,
            kind=sink.kind,
            event_type=message.record.event_type,
            change=message.kind,
            title=title,
            body=body,
        )


def failures_of(name: str, sink: SinkConfig, messages: Messages) -> dict[str, str]:
    """Return the first failure of each template of a sink, in words, by the name of its key."""
    if not templates_of(sink, messages):
        return {}
    templates = Templates(sink, messages, Renderer())
    failures: dict[str, str] = {}
    for message in _messages(name, sink):
        for failure in templates.render(message).failures:
            where = f"in the message `{message.kind}` about a {message.record.event_type}"
            failures[failure.key] = f"{failure.text}: {where}"
            templates.leave_out(failure.key)  # it may take a second each time
    return failures


def _messages(name: str, sink: SinkConfig) -> Iterator[Message]:
    """Yield the sample messages that a sink gets."""
    for message in sample_messages(name):
        if message.record.approval_rule is None or sink.settings.APPROVALS:
            yield message


def _shown(sink: SinkConfig, message: Message, messages: Messages) -> tuple[str | None, str]:
    """Return the title and the body that a sink sends."""
    if message.templated.request is not None:
        return None, message.templated.request
    if not sink.settings.HAS_TEXT:
        return None, message.line.decode()
    if sink.settings.SHARES_TEXT:
        message = message.shared
    text = text_of(message, messages)
    return text.title, text.whole
