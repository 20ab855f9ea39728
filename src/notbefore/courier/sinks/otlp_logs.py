"""OTLP logs: each change as a log record with the attributes of ``record.py``, those of the VM at its resource.

An answer may say that a part of a batch was rejected, and not which. Then, as when the content of a batch is refused,
each record is sent once more by itself: only its own answer says what became of it. Those that were accepted with the
batch are there twice, with one ``notbefore.delivery.id``.
"""

import logging
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

from opentelemetry.sdk._logs import ReadableLogRecord

from notbefore.config.messages import Messages
from notbefore.config.sinks import OtlpConnection
from notbefore.core.record import is_of_resource
from notbefore.courier.http import Http
from notbefore.courier.message import Asked, Message, Outcome, Receipt
from notbefore.courier.message import Sink as BaseSink
from notbefore.courier.redact import Redactor
from notbefore.errors import SendError
from notbefore.otlp.exporter import learn
from notbefore.otlp.sender import ContentError, PartialSuccess, Sender
from notbefore.otlp.signals import log_record, resource_of

OWN_FIELDS: Final = ("time", "body")  # of a record; they are fields of an OTLP record, not attributes

log = logging.getLogger("notbefore.otlp")


class Sink(BaseSink):
    """One receiver."""

    def __init__(self, name: str, settings: OtlpConnection, _messages: Messages) -> None:
        self._name = name
        self._timeout = settings.timeout.seconds
        own = {"service.name": "notbefore", "service.version": version("azure-notbefore")}
        self._resource = {**own, **settings.resource}
        redactor = Redactor()
        learn(settings.headers, redactor)
        self._sender = Sender(settings, "logs", Http, redactor)

    def send_many(self, messages: Sequence[Message]) -> list[Outcome]:
        """Send what is due in one request; what came of each, in the order given."""
        deadline = time.monotonic() + self._timeout
        try:
            partial = self._export(messages, self._timeout)
        except ContentError as error:
            return [error] if len(messages) == 1 else self._each(messages, deadline)
        except SendError as error:
            return [error] * len(messages)
        if partial.rejected >= len(messages):
            return [_rejected(partial)] * len(messages)
        return self._each(messages, deadline) if partial.rejected else [Receipt()] * len(messages)

    def connect(self) -> Asked:
        """Send an empty request; raises ``SendError`` where it is not accepted."""
        self._sender.connect()
        return Asked()

    def close(self) -> None:
        """Close the connection."""
        self._sender.close()

    def _each(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        waiting: set[str] = set()  # events of which an earlier record is to be sent first
        for message in messages:
            try:
                if message.event_key in waiting:
                    raise SendError("an earlier record of the same event is to be sent first")  # noqa: TRY301 - as below
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SendError("the receiver took too long over the others")  # noqa: TRY301 - one way out for all
                self._one(message, left)
                outcomes.append(Receipt())
            except SendError as error:
                if not error.permanent:
                    waiting.add(message.event_key)
                outcomes.append(error)
        return outcomes

    def _one(self, message: Message, timeout: float) -> None:
        partial = self._export([message], timeout)
        if partial.rejected:
            raise _rejected(partial)

    def _export(self, messages: Sequence[Message], timeout: float) -> PartialSuccess:
        partial = self._sender.send([self._log_record(message) for message in messages], timeout)
        if partial.reason and not partial.rejected:
            log.warning("sink %s: the receiver accepted the records, and warns: %s", self._name, partial.reason)
        return partial

    def _log_record(self, message: Message) -> ReadableLogRecord:
        values = message.content.flat()
        resource = {name: value for name, value in values.items() if is_of_resource(name)}
        instance = values.get("host.id") or values.get("host.name")
        if instance:
            resource["service.instance.id"] = instance
        own = OWN_FIELDS
        attributes = {name: value for name, value in values.items() if not is_of_resource(name) and name not in own}
        attributes |= {"notbefore.delivery.id": message.delivery_id, "notbefore.delivery.kind": message.kind}
        content = message.content
        made = resource_of(resource | self._resource)
        return log_record(made, content.time, message.severity, content.body, attributes, content.event_name)


def _rejected(partial: PartialSuccess) -> SendError:
    return SendError(f"rejected: {partial.reason or 'the receiver gives no reason'}", permanent=True)
