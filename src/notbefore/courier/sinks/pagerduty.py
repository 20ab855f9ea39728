"""PagerDuty, Events API v2: one incident per event, which is resolved when the event is over.

The API: https://developer.pagerduty.com/docs/events-api-v2-overview. PagerDuty accepts an event
with 202 and ``"status": "success"``; receivers with the same interface may answer with another 2xx
and another body. After 429 and 5xx, the event is sent again; other answers are final.
"""

from typing import Any, Final

from notbefore.config.sinks import Messages, PagerDuty
from notbefore.core.message import Message
from notbefore.core.record import json_line
from notbefore.core.text import one_line, rfc3339
from notbefore.courier.http_sink import HttpSink
from notbefore.courier.sink import Receipt
from notbefore.errors import SendError
from notbefore.net.http import Http
from notbefore.wording.texts import Text, text_of

MAX_SUMMARY: Final = 1024  # characters
SUCCESS: Final = "success"  # the status in an answer of 202


class Sink(HttpSink):
    """One integration of a service."""

    def __init__(self, _name: str, settings: PagerDuty, messages: Messages) -> None:
        super().__init__(messages, Http(settings.timeout.seconds, ca_file=settings.ca_file))
        self._url = settings.url
        self._key = settings.routing_key.reveal()

    def send(self, message: Message) -> Receipt:
        """Trigger the incident of the event, add to it, or resolve it."""
        # every affected VM sends the same text; only a VM that is no longer affected says so
        if not message.record.no_longer_affected:
            message = message.shared
        text = text_of(message, self._messages)
        # the key is last: an error that quotes the request quotes its beginning
        body = json_line(event(message, text) | {"routing_key": self._key})
        response = self._http.post(self._url, {"Content-Type": "application/json"}, body)
        response.check()
        answer = response.json()
        if isinstance(answer, dict) and answer.get("status", SUCCESS) != SUCCESS:
            raise SendError(f"this is not an acceptance of PagerDuty: {response.cause}")
        return Receipt(thread=message.alert_key)


def event(message: Message, text: Text) -> dict[str, Any]:
    """Return the body of the request without the routing key."""
    record = message.record
    action = "trigger"
    if message.over or record.no_longer_affected:
        action = "resolve"
    return {
        "event_action": action,
        "dedup_key": message.alert_key,
        "payload": _payload(message, text),
        "links": [{"href": link.value, "text": link.name} for link in text.links],
        "client": "notbefore",
    }


def _payload(message: Message, text: Text) -> dict[str, Any]:
    record = message.record
    source = record.vm_name or "unknown"
    if record.resources:
        source = record.resources[0]
    texts = {
        "summary": text.title[:MAX_SUMMARY],
        "source": source,
        "severity": message.shown_severity,
        "timestamp": rfc3339(record.time),
        "component": record.event_source or "Azure",  # what caused the event
        "group": record.scale_set or record.resource_group,
        "class": record.event_type,
    }
    payload: dict[str, Any] = {name: one_line(value) for name, value in texts.items() if value}
    payload["custom_details"] = _details(message, text)
    return payload


def _details(message: Message, text: Text) -> dict[str, str]:
    details = {"What happens": text.summary, "What to do": text.advice}
    for fact in text.facts:
        details[fact.name] = fact.value
    shown = {name: value for name, value in details.items() if value}
    return shown | {"Delivery": message.delivery_id}
