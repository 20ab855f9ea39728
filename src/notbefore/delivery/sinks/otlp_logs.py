"""OTLP logs: each change as a log record with the attributes of ``record.py``, those of the VM at its resource.

An answer may say that a part of a batch was rejected, and not which. Then, as when the content of a batch is refused,
each record is sent once more by itself: its own answer is the only one that tells. Those that were taken with the batch
are there twice, under one ``notbefore.delivery.id``.
"""

import logging
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from notbefore.config.sinks import Connection, Links, OtlpLogs
from notbefore.core.record import RESOURCE_ATTRIBUTES
from notbefore.delivery.message import Message, Receipt
from notbefore.errors import SendError
from notbefore.otlp.transport import ContentError, Partial, Sender, log_record, logs_request

OWN_FIELDS: Final = ("time", "body")  # of a record; they are fields of an OTLP record, not attributes

log = logging.getLogger("notbefore.otlp")
Outcome = Receipt | SendError


class Sink:
    """One far side."""

    def __init__(self, name: str, settings: OtlpLogs, _links: Links) -> None:
        self._name = name
        self._timeout = settings.timeout.seconds
        own = {"service.name": "notbefore", "service.version": version("azure-notbefore")}
        self._resource = {**own, **settings.resource}
        self._sender = Sender(Connection.of(settings), "logs")

    def send(self, message: Message) -> Receipt:
        """Send one."""
        self._one(message, self._timeout)
        return Receipt()

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

    def connect(self) -> None:
        """Is an empty request taken?"""
        self._sender.connect()

    def close(self) -> None:
        """Let go of the connection."""
        self._sender.close()

    def _each(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        waiting: set[str] = set()  # events of which an earlier record is to be sent first
        for message in messages:
            try:
                if message.event_key in waiting:
                    raise SendError("an earlier one of the same event is to be sent first")  # noqa: TRY301 - as below
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SendError("the far side took too long over the others")  # noqa: TRY301 - one way out for all
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

    def _export(self, messages: Sequence[Message], timeout: float) -> Partial:
        groups: dict[tuple[tuple[str, Any], ...], list[LogRecord]] = {}
        for message in messages:
            resource, record = convert(message)
            groups.setdefault(tuple({**resource, **self._resource}.items()), []).append(record)
        partial = self._sender.send(logs_request([(dict(key), records) for key, records in groups.items()]), timeout)
        if partial.reason and not partial.rejected:
            log.warning("sink %s took the records, and warns: %s", self._name, partial.reason)
        return partial


def _rejected(partial: Partial) -> SendError:
    return SendError(f"rejected: {partial.reason or 'the far side gives no reason'}", permanent=True)


def convert(message: Message) -> tuple[dict[str, Any], LogRecord]:
    """The attributes of its resource, and the record."""
    values = message.content.flat()
    resource = {name: value for name, value in values.items() if name in RESOURCE_ATTRIBUTES}
    instance = values.get("host.id") or values.get("host.name")
    if instance:
        resource["service.instance.id"] = instance
    attributes = {
        name: value for name, value in values.items() if name not in RESOURCE_ATTRIBUTES and name not in OWN_FIELDS
    }
    attributes |= {"notbefore.delivery.id": message.delivery_id, "notbefore.delivery.kind": message.kind}
    record = log_record(
        message.content.time,
        message.severity,
        message.content.body,
        attributes,
        message.content.event_name,
    )
    return resource, record
