"""OTLP logs: each change as a log record with the attributes of ``record.py``.

Those of the VM are in its resource.

Each record is a separate request: the answer to a batch may tell that a part was rejected, but not
which part.
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

OWN_FIELDS: Final = ("time", "body")  # fields of an OTLP record, not attributes

log = logging.getLogger("notbefore.otlp")


class Sink(BaseSink):
    """One receiver."""

    def __init__(self, name: str, settings: OtlpConnection, _messages: Messages) -> None:
        self._name = name
        self._own = settings.resource
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
        content, values = message.content, message.content.flat()
        resource: dict[str, Any] = {
            name: value for name, value in values.items() if is_of_resource(name)
        }
        attributes = {
            name: value for name, value in values.items() if name not in {*resource, *OWN_FIELDS}
        }
        attributes |= {
            "notbefore.delivery.id": message.delivery_id,
            "notbefore.delivery.kind": message.kind,
        }
        resource["service.version"] = __version__
        if instance := values.get("host.id") or values.get("host.name"):
            resource["service.instance.id"] = instance
        made = resource_of(resource, self._own)
        return log_record(
            made, content.time, message.severity, content.body, attributes, content.event_name
        )
