"""OTLP logs: each change as a log record. The record's fields are its attributes.

The attributes of the VM are in the resource. Each record is a separate request: the answer to a
batch may say that a part was rejected, but not which part.
"""

import logging
import os
from typing import Any, Final

from opentelemetry.sdk._logs import ReadableLogRecord

from notbefore import __version__
from notbefore.config.otel import is_disabled
from notbefore.config.sinks import Messages, OtlpConnection
from notbefore.core.message import Message
from notbefore.core.record import is_of_resource
from notbefore.courier.sink import Receipt
from notbefore.courier.sink import Sink as BaseSink
from notbefore.errors import SendError
from notbefore.otlp.sender import Sender
from notbefore.otlp.signals import log_record, resource_of

NOT_ATTRIBUTES: Final = ("time", "body")  # an OTLP record has fields for them

log = logging.getLogger("notbefore.otlp")


class Sink(BaseSink):
    """One receiver."""

    def __init__(self, name: str, settings: OtlpConnection, _messages: Messages) -> None:
        self._name = name
        self._configured = settings.resource
        self._sender = Sender(settings, "logs")

    def send(self, message: Message) -> Receipt:
        """Send one record."""
        if is_disabled(os.environ):
            raise SendError("OTEL_SDK_DISABLED is true: nothing is sent over OTLP", permanent=True)
        partial = self._sender.send([self._log_record(message)])
        if partial.rejected:
            raise SendError(
                f"rejected: {partial.reason or 'the receiver gives no reason'}", permanent=True
            )
        if partial.reason:
            log.warning(
                "sink %s: the receiver accepted the record, and warns: %s",
                self._name,
                partial.reason,
            )
        return Receipt()

    def close(self) -> None:
        """Close the connection."""
        self._sender.close()

    def _log_record(self, message: Message) -> ReadableLogRecord:
        content = message.content
        resource: dict[str, Any] = {"service.version": __version__}
        attributes: dict[str, Any] = {}
        for name, value in content.flat().items():
            if is_of_resource(name):
                resource[name] = value
            elif name not in NOT_ATTRIBUTES:
                attributes[name] = value
        instance = resource.get("host.id") or resource.get("host.name")
        if instance:
            resource["service.instance.id"] = instance
        attributes["notbefore.delivery.id"] = message.delivery_id
        attributes["notbefore.delivery.kind"] = message.kind
        return log_record(
            resource_of(resource, self._configured),
            content.time,
            message.severity,
            content.body,
            attributes,
            content.event_name,
        )
